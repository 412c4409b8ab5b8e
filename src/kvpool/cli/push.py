"""``kvpool push``: the prefill side. Computes prompts, and lets another process answer them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvpool import BlockManager, InvalidArgument, KvPoolError, PoolFull

from ._transfer import add_model_options, load, needs_grpc, read_file, read_token
from .generate import (
    SYSTEM,
    _at_least,
    _check_text,
    _make_manager,
    _patient_interrupts,
    _prompt_texts,
    _share,
    _temperature,
)

if TYPE_CHECKING:
    from kvpool.engine.llama import Llama
    from kvpool.engine.tokenizer import Tokenizer
    from kvpool.transfer import KvClient


def add_command(commands: Any) -> None:
    """Adds ``push`` to the command line."""
    parser = commands.add_parser(
        "push",
        help="compute prompts here and let kvpool serve answer them elsewhere",
        description="The prefill side of a prefill and a decode engine: computes K and V of each "
        "prompt, picks the first token, pushes the blocks to kvpool serve and hands the request "
        "over. Prints the answer that comes back. See docs/transfer.md.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--to", metavar="HOST:PORT", default="127.0.0.1:5100", help="(default 127.0.0.1:5100)"
    )
    parser.add_argument("texts", nargs="*", metavar="PROMPT", help="the same as --prompt PROMPT")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    prompts.add_argument("--prompts", metavar="FILE", help="one prompt a line; - reads stdin")
    parser.add_argument("--system", metavar="TEXT", default=SYSTEM, help="'' for none")
    parser.add_argument(
        "--max-tokens", type=_at_least(1), default=64, metavar="N", help="(default 64)"
    )
    parser.add_argument(
        "--temperature", type=_temperature, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    parser.add_argument("--top-k", type=_at_least(0), default=0, metavar="K", help="0 for all")
    parser.add_argument("--top-p", type=_share, default=1.0, metavar="P", help="(default 1)")
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="S", help="(default 0)")
    add_model_options(parser)
    parser.add_argument("--tls", action="store_true", help="use TLS, with the usual authorities")
    parser.add_argument("--tls-ca", metavar="PATH", help="use TLS, and trust these, PEM")
    parser.add_argument("--tls-cert", metavar="PATH", help="this side's certificates, PEM")
    parser.add_argument("--tls-key", metavar="PATH", help="the key of the first of them, PEM")
    parser.add_argument("--tls-name", metavar="NAME", help="what the server's certificate is for")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run, prefix_cache="hash")


def run(args: argparse.Namespace) -> int:
    """Pushes the prompts one after the other; 0, or an exception that says which failed."""
    needs_grpc()
    _check_text("--system", args.system)
    texts = _prompt_texts(args)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise KvPoolError("--tls-cert and --tls-key go together")
    from kvpool.transfer import ClientTls, KvClient

    tls = None
    if args.tls or args.tls_ca is not None or args.tls_cert is not None:
        tls = ClientTls(
            read_file("--tls-ca", args.tls_ca),
            read_file("--tls-cert", args.tls_cert),
            read_file("--tls-key", args.tls_key),
            args.tls_name,
        )
    token = read_token(args.token_file)
    from ._show import make_show

    with ExitStack() as stack:
        check = stack.enter_context(_patient_interrupts())
        client = stack.enter_context(KvClient(args.to, tls=tls, token=token))
        client.has_blocks([0])  # who is not there, or knows us not, is told before anything is slow
        show = stack.enter_context(make_show(args.json))
        model, tokenizer, name, root = load(args, show, check)
        prompts = [tokenizer.chat(text, args.system) for text in texts]
        manager = _manager(args, model, prompts)
        stack.enter_context(manager.pool)
        stack.enter_context(manager)
        side = _Side(args, model, tokenizer, manager, client, root, check)
        answers = [side.answer(*pair) for pair in zip(texts, prompts, strict=True)]
        if args.json:
            document = {"model": name, "to": args.to, "prompts": answers}
            print(json.dumps(document, indent=2, ensure_ascii=False))
    return 0


def _manager(args: argparse.Namespace, model: Llama, prompts: list[list[int]]) -> BlockManager:
    cfg, size = model.config, args.block_tokens
    for i, tokens in enumerate(prompts, start=1):
        if len(tokens) + args.max_tokens > cfg.context_length:
            raise InvalidArgument(
                f"prompt {i} has {len(tokens)} tokens, and with --max-tokens {args.max_tokens} is "
                f"longer than the model's context of {cfg.context_length}"
            )
    needs = [-(-len(tokens) // size) for tokens in prompts]
    n_blocks = args.blocks or sum(needs)
    if max(needs) > n_blocks:
        raise PoolFull(
            f"a prompt needs {max(needs)} blocks, the pool has {n_blocks}: raise --blocks"
        )
    return _make_manager(args, cfg, n_blocks, 0)


class _Side:
    """The prefill side of a run."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: Llama,
        tokenizer: Tokenizer,
        manager: BlockManager,
        client: KvClient,
        root: int,
        check: Callable[[], None],
    ) -> None:
        self._args, self._model, self._tokenizer = args, model, tokenizer
        self._manager, self._client, self._root, self._check = manager, client, root, check

    def answer(self, text: str, tokens: list[int]) -> dict[str, Any]:
        """Computes, pushes, hands over; shows what comes back."""
        from kvpool.engine.generate import prefill
        from kvpool.engine.sampling import Sampler
        from kvpool.transfer import Handover

        args = self._args
        self._write(f"> {text}\n")
        started = time.perf_counter()
        sequence, logits = prefill(
            self._model, self._manager, tokens, namespace=self._root, check=self._check
        )
        with sequence:
            n_cached = sequence.n_cached
            sampler = Sampler(args.temperature, args.seed, top_k=args.top_k, top_p=args.top_p)
            first = sampler.pick(logits)
            computed = time.perf_counter()
            result = self._client.push(sequence)
        pushed = time.perf_counter()
        self._write(
            f"{len(tokens)} tokens computed, {n_cached} of them cached; {result.blocks_sent} of "
            f"{result.n_blocks} blocks sent ({result.bytes_sent:,} bytes), "
            f"{result.blocks_deduped} were there\n"
        )
        request = Handover(
            handle_id=result.handle_id,
            tokens=tokens,
            namespace=self._root,
            picked=[first],
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=args.seed,
            draws=1 if args.temperature else 0,
            top_k=args.top_k,
            top_p=args.top_p,
        )
        answer, finish = self._relay(request)
        return {
            "prompt": text,
            "handle_id": result.handle_id,
            "prompt_tokens": len(tokens),
            "cached_tokens": n_cached,
            "blocks_sent": result.blocks_sent,
            "blocks_deduped": result.blocks_deduped,
            "bytes_sent": result.bytes_sent,
            "prefill_s": round(computed - started, 4),
            "push_s": round(pushed - computed, 4),
            "tokens": answer,
            "text": self._tokenizer.decode(answer),
            "finish": finish,
        }

    def _relay(self, request: Any) -> tuple[list[int], str]:
        from kvpool.engine.tokenizer import TokenStream

        stream, tokens, finish = TokenStream(self._tokenizer), [], ""
        for part in self._client.hand_over(request):
            self._check()
            for token in part.tokens:
                if token >= self._model.config.vocab_size:
                    raise KvPoolError(f"{self._args.to}: the answer has a token {token}")
            tokens += part.tokens
            finish = part.finish or finish
            self._write("".join(stream.feed(token) for token in part.tokens))
        self._write(stream.end() + "\n\n")
        if not finish:
            raise KvPoolError(f"{self._args.to}: the answer ended without saying why")
        return tokens, finish

    def _write(self, text: str) -> None:
        from ._show import clean

        if not self._args.json:
            sys.stdout.write(clean(text))
            sys.stdout.flush()
