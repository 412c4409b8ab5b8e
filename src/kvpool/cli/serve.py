"""``kvpool serve``: the decode side. Blocks arrive, and an engine goes on from them."""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvpool import BlockManager, InvalidArgument, KvPoolError, PoolFull, Sequence

from ._transfer import add_model_options, load, needs_grpc, read_file, read_token
from .generate import _AUTO_POOL_BYTES, _at_least, _make_manager, _patient_interrupts, _temperature

if TYPE_CHECKING:
    from kvpool.engine.engine import Engine
    from kvpool.engine.request import Request
    from kvpool.engine.tokenizer import Tokenizer
    from kvpool.transfer.handover import Answer, Handover


_SIGN_S = 1.0  # between two parts of an answer


def add_command(commands: Any) -> None:
    """Adds ``serve`` to the command line."""
    parser = commands.add_parser(
        "serve",
        help="take KV blocks from prefill engines and generate from them",
        description="The decode side of a prefill and a decode engine: serves tl.kv.v1, and "
        "answers what kvpool push hands over. Prints each answer. See docs/transfer.md.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:5100",
        help="where; port 0 takes a free one (default 127.0.0.1:5100: this machine only)",
    )
    add_model_options(parser)
    parser.add_argument("--tls-cert", metavar="PATH", help="the server's certificates, PEM")
    parser.add_argument("--tls-key", metavar="PATH", help="the key of the first of them, PEM")
    parser.add_argument(
        "--tls-client-ca", metavar="PATH", help="ask clients for a certificate signed by these"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="let anybody push where others can connect: no TLS, no token",
    )
    parser.add_argument(
        "--ttl", type=_temperature, default=60.0, metavar="SECONDS", help="of what is not claimed"
    )
    parser.add_argument(
        "--batch", type=_at_least(1), default=16, metavar="N", help="answers at a time (default 16)"
    )
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve Prometheus metrics there")
    parser.add_argument("--json", action="store_true", help="one JSON document a line")
    parser.set_defaults(run=run, prefix_cache="hash")


class _Job:
    """A request on its way from a thread of the server through the engine and back."""

    def __init__(self, handover: Handover, sequence: Sequence) -> None:
        self.handover, self.sequence = handover, sequence
        self.out: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self.request: Request | None = None
        self.cancelled = False
        self.ended = threading.Event()


class _Desk:
    """Where the server's threads leave jobs for the one thread that has the engine."""

    def __init__(self, root: int, model_name: str, vocab_size: int) -> None:
        self.inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._root, self._model_name, self._vocab_size = root, model_name, vocab_size

    def generate(self, handover: Handover, sequence: Sequence) -> Iterator[Answer]:
        """For the server: the answer, as the engine makes it; a part without tokens once a second
        while there is nothing of it, as when others come first."""
        from kvpool.transfer import TransferRefused
        from kvpool.transfer.handover import Answer

        if handover.namespace != self._root:
            raise TransferRefused(
                "FAILED_PRECONDITION",
                f"the blocks are of model {handover.namespace:016x}, this side runs "
                f"{self._model_name!r}, {self._root:016x}",
            )
        for token in (*handover.tokens, *handover.picked):
            if token >= self._vocab_size:
                raise InvalidArgument(
                    f"Continue: token {token}, the model has 0 to {self._vocab_size - 1}"
                )
        job = _Job(handover, sequence)
        with self._lock:
            if self._closed:
                raise TransferRefused("UNAVAILABLE", "the server is stopping")
            self.inbox.put(job)
        try:
            while True:
                try:
                    part = job.out.get(timeout=_SIGN_S)
                except queue.Empty:
                    yield Answer([])  # finds out whether the caller is still there
                    continue
                if isinstance(part, Exception):
                    raise part
                yield part
                if part.finish:
                    return
        finally:  # also when the caller has gone: the blocks are the engine's until it says so
            job.cancelled = True
            self.inbox.put(None)
            job.ended.wait()

    def close(self) -> list[_Job]:
        """Takes no job any more; those that nobody has taken up."""
        with self._lock:
            self._closed = True
        left = []
        with contextlib.suppress(queue.Empty):
            while True:
                if (job := self.inbox.get_nowait()) is not None:
                    left.append(job)
        return left


class _Worker:
    """Runs the engine over the jobs of a desk."""

    def __init__(self, engine: Engine, desk: _Desk, tokenizer: Tokenizer, as_json: bool) -> None:
        self._engine, self._desk, self._tokenizer = engine, desk, tokenizer
        self._as_json = as_json
        self._jobs: list[_Job] = []

    def run(self, check: Callable[[], None]) -> None:
        """Until ``check`` raises."""
        from kvpool.transfer import TransferRefused

        try:
            while True:
                check()
                self._take_in()
                if self._engine.is_busy:
                    self._engine.step()
                self._let_go()
        finally:
            self._engine.close()
            for job in [*self._jobs, *self._desk.close()]:
                job.out.put(TransferRefused("UNAVAILABLE", "the server is stopping"))
                job.ended.set()

    def _take_in(self) -> None:
        try:
            if not self._engine.is_busy:
                self._start(self._desk.inbox.get(timeout=0.2))
            while True:
                self._start(self._desk.inbox.get_nowait())
        except queue.Empty:
            pass

    def _start(self, job: _Job | None) -> None:
        from kvpool.engine.request import Request
        from kvpool.engine.sampling import Sampler
        from kvpool.transfer.handover import Answer

        if job is None:  # only to wake up
            return
        self._jobs.append(job)
        found, stop_tokens = job.handover, self._tokenizer.stop_tokens
        picked, finish = _cut(found.picked, stop_tokens, found.max_tokens)
        job.out.put(Answer(picked, finish))
        if finish:
            self._tell(job, picked, finish)
            job.sequence.free()
            return self._end(job)
        try:
            job.request = Request(
                found.tokens,
                max_tokens=found.max_tokens,
                stop_tokens=stop_tokens,
                generated=picked,
                sequence=job.sequence,
                on_token=lambda _, token: job.out.put(Answer([token])),
            )
            job.request.samples[0].sampler = Sampler(
                found.temperature,
                found.seed,
                found.sample,
                top_k=found.top_k,
                top_p=found.top_p,
                n_drawn=found.draws,
            )
            self._engine.add(job.request)
        except Exception as error:  # whatever a request is, the others go on
            job.out.put(error)
            self._end(job)

    def _let_go(self) -> None:
        from kvpool.transfer.handover import Answer

        for job in [*self._jobs]:
            request = job.request
            assert request is not None
            if request.is_done:
                sample = request.samples[0]
                if isinstance(request.error, Exception):
                    job.out.put(request.error)
                else:
                    job.out.put(Answer([], sample.finish))
                    self._tell(job, sample.tokens, sample.finish)
                self._end(job)
            elif job.cancelled:
                self._engine.abort(request)
                self._end(job)

    def _end(self, job: _Job) -> None:
        self._jobs.remove(job)
        job.ended.set()

    def _tell(self, job: _Job, tokens: list[int], finish: str) -> None:
        from ._show import clean

        text = self._tokenizer.decode(tokens)
        n_prompt, handle = len(job.handover.tokens), job.handover.handle_id
        if self._as_json:
            line = json.dumps(
                {
                    "handle_id": handle,
                    "prompt_tokens": n_prompt,
                    "tokens": tokens,
                    "text": text,
                    "finish": finish,
                },
                ensure_ascii=False,
            )
        else:
            line = f"[{clean(handle)[:8]}] {n_prompt} tokens arrived computed\n{clean(text)}\n"
        print(line, flush=True)


def _cut(picked: list[int], stop_tokens: Any, max_tokens: int) -> tuple[list[int], str]:
    """The tokens of an answer that was picked elsewhere, and why it ends there, if it does."""
    for i, token in enumerate(picked):
        if token in stop_tokens:
            return picked[:i], "stop"
    return picked, "length" if len(picked) == max_tokens else ""


def run(args: argparse.Namespace) -> int:
    """Serves until it is told to stop: 130 after Ctrl-C, 0 after SIGTERM."""
    needs_grpc()
    if (args.tls_cert is None) != (args.tls_key is None):
        raise KvPoolError("--tls-cert and --tls-key go together")
    if args.tls_client_ca is not None and args.tls_cert is None:
        raise KvPoolError("--tls-client-ca goes with --tls-cert and --tls-key")
    from kvpool.transfer import KvReceiver, KvServer, Limits, ServerTls, keep_freed_memory
    from kvpool.transfer.settings import check_address, is_loopback

    certificate, key = read_file("--tls-cert", args.tls_cert), read_file("--tls-key", args.tls_key)
    client_ca = read_file("--tls-client-ca", args.tls_client_ca)
    tls = ServerTls(certificate, key, client_ca) if certificate and key else None
    token = read_token(args.token_file)
    check_address(args.listen, tls, token, args.insecure)  # before a model is loaded
    limits = Limits(ttl_s=args.ttl)
    metrics = None if args.metrics is None else _host_port("--metrics", args.metrics)
    from ._show import make_show

    with ExitStack() as stack:
        check = stack.enter_context(_patient_interrupts())
        stopped = threading.Event()
        before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        stack.callback(signal.signal, signal.SIGTERM, before)
        show = stack.enter_context(make_show(args.json))
        model, tokenizer, name, root = load(args, show, check)
        manager = _manager(args, model.config)
        stack.enter_context(manager.pool)
        stack.enter_context(manager)
        from kvpool.engine.engine import Engine

        engine = stack.enter_context(
            Engine(model, manager, max_seqs=args.batch, max_step_tokens=max(args.batch, 256))
        )
        keep_freed_memory()
        receiver = KvReceiver(manager, limits=limits)
        stack.callback(receiver.close)
        if metrics is not None:
            stack.callback(_serve_metrics(*metrics, manager, receiver))
        desk = _Desk(root, name, model.config.vocab_size)
        server = KvServer(
            receiver,
            args.listen,
            tls=tls,
            token=token,
            insecure=args.insecure,
            handover=desk.generate,
        )
        stack.callback(server.close)
        who = "this machine only" if is_loopback(server.address) else "reachable from elsewhere"
        print(f"serving {name} on {server.address} ({who})", file=sys.stderr, flush=True)

        def check_both() -> None:
            check()
            if stopped.is_set():
                raise _Stopped

        try:
            _Worker(engine, desk, tokenizer, args.json).run(check_both)
        except _Stopped:
            return 0
    return 130


class _Stopped(Exception):
    """SIGTERM."""


def _manager(args: argparse.Namespace, cfg: Any) -> BlockManager:
    fits = _AUTO_POOL_BYTES // (args.block_tokens * cfg.kv_bytes_per_token)
    n_blocks = args.blocks or max(1, fits)
    if n_blocks < 2:
        raise PoolFull("--blocks 1: an answer needs a block beside the prompt's")
    return _make_manager(args, cfg, n_blocks, n_blocks // 100)


def _host_port(option: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port[:6]) < 2**16):
        raise KvPoolError(f"{option} {address}: expected HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def _serve_metrics(
    host: str, port: int, manager: BlockManager, receiver: Any
) -> Callable[[], None]:
    """Starts a Prometheus endpoint; what stops it."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from kvpool.metrics import KVCollector, TransferCollector
    except ImportError as error:
        raise KvPoolError("--metrics needs pip install 'kvpool[metrics]'") from error
    registry = CollectorRegistry()
    KVCollector(manager.pool, manager, registry=registry)
    TransferCollector(receiver=receiver, registry=registry)
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise KvPoolError(f"--metrics {host}:{port}: {error.strerror or error}") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop
