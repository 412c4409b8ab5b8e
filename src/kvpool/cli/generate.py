"""``kvpool generate``: a language model answers, with its KV cache in the blocks of a pool."""

from __future__ import annotations

import argparse
import hashlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool import BlockManager, InvalidArgument, KvPoolError, Pool, PoolFull

if TYPE_CHECKING:  # at run time these need the model extra: imported once a command line is valid
    from kvpool.engine.engine import Engine, Step
    from kvpool.engine.gguf_file import LlamaConfig
    from kvpool.engine.llama import Llama
    from kvpool.engine.request import Request
    from kvpool.engine.tokenizer import Tokenizer
    from kvpool.tiers import TierStack

    from ._show import Show

SYSTEM = (
    "You are a careful assistant. Answer in one or two short sentences, in plain words. "
    "Do not repeat the question, do not apologize, and say so when you do not know something."
)
PROMPTS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Who wrote Hamlet?",
    "What does a compiler do?",
)
_AUTO_POOL_BYTES = 1 << 30  # a pool sized by itself keeps at most this much for later prompts


def add_command(commands: Any) -> None:
    """Adds ``generate`` to the command line."""
    parser = commands.add_parser(
        "generate",
        help="answer prompts with a Llama model whose KV cache is a pool",
        description="Answers prompts with a Llama-architecture GGUF model, many at once. Without "
        "arguments: built-in prompts, SmolLM2-135M-Instruct.",
        allow_abbrev=False,
    )
    parser.add_argument("texts", nargs="*", metavar="PROMPT", help="the same as --prompt PROMPT")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    prompts.add_argument("--prompts", metavar="FILE", help="one prompt a line; - reads stdin")
    parser.add_argument("--system", metavar="TEXT", default=SYSTEM, help="'' for none")
    parser.add_argument("--model", metavar="PATH", help="any Llama-architecture GGUF file")
    parser.add_argument(
        "--n", type=_at_least(1), default=1, help="samples of each prompt (default 1)"
    )
    parser.add_argument(
        "--max-tokens", type=_at_least(1), default=64, metavar="N", help="a sample (default 64)"
    )
    parser.add_argument(
        "--temperature", type=_temperature, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    parser.add_argument(
        "--top-k", type=_at_least(0), default=0, metavar="K", help="draw among the K likeliest"
    )
    parser.add_argument(
        "--top-p", type=_share, default=1.0, metavar="P", help="draw among those that make up P"
    )
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="S", help="(default 0)")
    parser.add_argument(
        "--beams", type=_at_least(0), default=0, metavar="W",
        help="beam search of this width, the --n best of it; 0 samples instead (default)",
    )  # fmt: skip
    parser.add_argument(
        "--draft", type=_at_least(0), default=0, metavar="N",
        help="guess up to N tokens ahead from earlier text (default 0); changes no answer",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=_at_least(1), default=16, metavar="N",
        help="sequences at the same time (default 16); changes no answer",
    )  # fmt: skip
    parser.add_argument(
        "--chunk", type=_at_least(1), default=256, metavar="N",
        help="tokens of a pass, prompts are cut to it (default 256); changes no answer",
    )  # fmt: skip
    parser.add_argument("--threads", type=_at_least(1), metavar="N", help="(default: all cores)")
    parser.add_argument(
        "--blocks", type=_at_least(1), metavar="N", help="of the pool (default: up to 1 GiB)"
    )
    parser.add_argument(
        "--block-tokens", type=_at_least(1), default=16, metavar="N", help="a block (default 16)"
    )
    parser.add_argument(
        "--prefix-cache",
        choices=("hash", "none"),
        default="hash",
        help="reuse the blocks of prompts with the same beginning (default hash)",
    )
    parser.add_argument(
        "--tier", action="append", metavar="URL",
        help="keep blocks that the pool evicts, also for later runs (disk:/path?size=10GiB); may "
        "be repeated, the fastest first; changes no answer",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run)


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not minimum <= value < 2**32:
            raise argparse.ArgumentTypeError(f"{value} is not in {minimum}..{2**32 - 1}")
        return value

    return parse


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not finite and at least 0")
    return value


def _share(text: str) -> float:
    value = _temperature(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


class Prompt(NamedTuple):
    """A text, and what is asked about it."""

    text: str
    request: Request

    @property
    def is_answered(self) -> bool:
        """Every sample came to an end of its own."""
        samples = self.request.samples
        return bool(samples) and all(sample.finish in ("stop", "length") for sample in samples)


@dataclass
class Run:
    """Everything that is shown at the end."""

    args: argparse.Namespace
    model: Llama
    model_name: str
    model_path: Path
    engine: Engine
    prompts: list[Prompt]
    steps: list[Step] = field(default_factory=list)
    interrupted: bool = False

    @property
    def manager(self) -> BlockManager:
        """The engine's manager."""
        return self.engine.manager

    @property
    def pool(self) -> Pool:
        """The manager's pool."""
        return self.manager.pool

    @property
    def started(self) -> list[Prompt]:
        """The prompts that were begun; all of them unless interrupted."""
        return [prompt for prompt in self.prompts if prompt.request.started_s]

    @property
    def elapsed_s(self) -> float:
        """Seconds that the passes took."""
        return sum(step.seconds for step in self.steps)

    def contiguous_bytes(self, prompt: Prompt) -> int:
        """What contiguous float16 caches for prompt and ``--max-tokens`` would reserve."""
        request = prompt.request
        positions = len(request.prompt) + request.max_tokens - 1
        return request.width * positions * self.model.config.kv_bytes_per_token


def run(args: argparse.Namespace) -> int:
    """Loads the model, answers the prompts, shows the sums. Returns the exit code."""
    if args.model == "":
        raise InvalidArgument("--model is empty: it takes the path of a GGUF file")
    if args.beams and args.n > args.beams:
        raise InvalidArgument(f"--n {args.n}: {args.beams} beams have no more answers than that")
    if args.beams and args.temperature:
        raise InvalidArgument("--temperature: beam search draws nothing")
    _check_text("--system", args.system)
    texts = _prompt_texts(args)
    from ._show import make_show

    with _patient_interrupts() as check, make_show(args.json) as show:
        model, tokenizer, name, path = _load(args, show, check)
        requests = [_request(args, tokenizer, text) for text in texts]
        sizes = _size_pool(args, requests, model.config)
        tiers = _open_tiers(args.tier, path) if args.tier else None
        with _make_manager(args, model.config, *sizes, tiers) as manager, manager.pool:
            from kvpool.engine.engine import Engine

            width = max(request.width for request in requests)
            batch = max(args.batch, width)
            with Engine(
                model,
                manager,
                max_seqs=batch,
                max_step_tokens=max(args.chunk, batch),
                n_drafts=args.draft,
            ) as engine:
                prompts = [Prompt(*pair) for pair in zip(texts, requests, strict=True)]
                state = Run(args, model, name, path, engine, prompts)
                _answer(state, tokenizer, show, check)
            if manager.tiers is not None:
                manager.tiers.flush(30)
            show.summary(state, tokenizer)
    return 130 if state.interrupted else 0


def _request(args: argparse.Namespace, tokenizer: Tokenizer, text: str) -> Request:
    from kvpool.engine.request import Request

    return Request(
        tokenizer.chat(text, args.system),
        n=args.n,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        beams=args.beams,
        stop_tokens=tokenizer.stop_tokens,
    )


def _answer(state: Run, tokenizer: Tokenizer, show: Show, check: Callable[[], None]) -> None:
    with show.answers(state, tokenizer) as on_step:

        def stepped(step: Step) -> None:
            state.steps.append(step)
            on_step(step)

        try:
            for prompt in state.prompts:
                state.engine.add(prompt.request)
            state.engine.run(check, stepped)
        except KeyboardInterrupt:
            state.interrupted = True
    for prompt in state.prompts:
        if isinstance(prompt.request.error, Exception):
            raise prompt.request.error


def _check_text(option: str, text: str) -> None:
    """Python hands over the bytes of an argument that are not UTF-8 as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{option}: the text is not UTF-8 (character {error.start + 1})"
        ) from error


def _prompt_texts(args: argparse.Namespace) -> list[str]:
    if args.prompts is not None and args.texts:
        raise InvalidArgument("argument PROMPT: not allowed with argument --prompts")
    if args.prompts is None:
        texts = [*args.texts, *(args.prompt or [])]
        if not texts:
            texts = list(PROMPTS)
        for text in texts:
            if not text.strip():
                raise InvalidArgument("--prompt: the text is empty")
            _check_text("--prompt", text)
        return list(texts)
    if args.prompts == "":
        raise InvalidArgument("--prompts is empty: it takes the path of a file, or -")
    if args.prompts == "-" and sys.stdin is None:
        raise KvPoolError("--prompts -: stdin is closed")
    try:
        data = sys.stdin.buffer.read() if args.prompts == "-" else Path(args.prompts).read_bytes()
        lines = data.decode("utf-8").splitlines()
    except OSError as error:
        raise KvPoolError(f"--prompts {args.prompts}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KvPoolError(f"--prompts {args.prompts}: not UTF-8 ({error})") from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise KvPoolError(f"--prompts {args.prompts}: no prompts in it")
    return texts


@contextmanager
def _patient_interrupts() -> Iterator[Callable[[], None]]:
    """Ctrl-C takes effect where nothing is half done: in the ``check()`` this yields.

    A KeyboardInterrupt can otherwise arise between any two instructions, also between the one that
    takes a block and the one that notes it. A second Ctrl-C does not wait.
    """
    pressed = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, frame)
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check  # only the main thread can have a handler
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def _load(
    args: argparse.Namespace, show: Show, check: Callable[[], None]
) -> tuple[Llama, Tokenizer, str, Path]:
    with show.loading(args.model or "SmolLM2-135M-Instruct") as progress:
        from kvpool.engine.gguf_file import ModelFile, default_model_path
        from kvpool.engine.llama import Llama
        from kvpool.engine.tokenizer import Tokenizer

        def layer_done(done: int, total: int) -> None:
            check()
            progress(done, total)

        path = Path(args.model) if args.model is not None else default_model_path()
        file = ModelFile(path)
        check()
        tokenizer = Tokenizer(file)
        model = Llama(file, layer_done, threads=args.threads)
    return model, tokenizer, file.name, path


def _size_pool(
    args: argparse.Namespace, requests: list[Request], cfg: LlamaConfig
) -> tuple[int, int]:
    """The pool's number of blocks, and how many of them an admission leaves to sequences that are
    running; refuses a prompt that can never fit."""
    from kvpool.engine.paged import blocks_needed

    size: int = args.block_tokens
    needs: list[int] = []
    for i, request in enumerate(requests, start=1):
        n_prompt = len(request.prompt)
        if n_prompt + args.max_tokens > cfg.context_length:
            raise InvalidArgument(
                f"prompt {i} has {n_prompt} tokens, and with --max-tokens {args.max_tokens} is "
                f"longer than the model's context of {cfg.context_length}"
            )
        needs.append(blocks_needed(n_prompt, args.max_tokens, request.width, size))
        if args.blocks is not None and needs[-1] > args.blocks:
            samples = "1 sample" if request.width == 1 else f"{request.width} samples"
            raise PoolFull(
                f"prompt {i} needs {needs[-1]} blocks of {size} tokens ({n_prompt} prompt tokens, "
                f"then {samples} of up to {args.max_tokens}), the pool has {args.blocks}: raise "
                "--blocks, or lower --max-tokens, --n or --beams"
            )
    fits = _AUTO_POOL_BYTES // (size * cfg.kv_bytes_per_token)
    n_blocks: int = args.blocks or max(max(needs), min(sum(needs), fits))
    return n_blocks, min(n_blocks // 100, n_blocks - max(needs))


def _make_manager(
    args: argparse.Namespace,
    cfg: LlamaConfig,
    n_blocks: int,
    watermark: int,
    tiers: TierStack | None = None,
) -> BlockManager:
    try:
        pool = Pool(
            n_blocks,
            block_tokens=args.block_tokens,
            n_layers=cfg.n_layers,
            n_kv_heads=cfg.n_kv_heads,
            head_dim=cfg.head_dim,
        )
        return BlockManager(pool, prefix_cache=args.prefix_cache, watermark=watermark, tiers=tiers)
    except BaseException as error:
        if tiers is not None:
            tiers.close()
        if not isinstance(error, MemoryError):
            raise
        size = n_blocks * args.block_tokens * cfg.kv_bytes_per_token
        raise KvPoolError(
            f"no memory for {n_blocks} blocks of {args.block_tokens} tokens ({size:,} bytes): "
            "lower --blocks or --block-tokens"
        ) from error


def _open_tiers(urls: list[str], path: Path) -> TierStack:
    """Tiers whose keys say what K and V are of: every byte of the model file, and this engine."""
    from kvpool.tiers import TierStack

    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    try:
        return TierStack(
            urls, model=f"gguf {digest.hexdigest()}", revision="kvpool.engine 1", timeout_s=10.0
        )
    except ImportError as error:
        raise KvPoolError(f"--tier: {error}") from error
