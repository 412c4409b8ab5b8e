"""Cuts, kills and restarts with real sockets and real processes; nothing is left anywhere."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from transfer_support import Side, eventually, raw_push, unchanged

from kvpool.transfer import Plan, TransferRefused

grpc: Any = pytest.importorskip("grpc", reason="needs kvpool[transfer]")
from kvpool.transfer import ClientSettings, KvClient  # noqa: E402
from kvpool.transfer.sender import messages  # noqa: E402

HERE = Path(__file__).resolve().parent
ONCE = ClientSettings(max_attempts=1, rpc_timeout_s=5, push_timeout_s=10)


# ---- a proxy that cuts --------------------------------------------------------------------------


class Proxy:
    """TCP between a client and a server; ``cut_at`` bytes from the client, and both ends are reset.

    ``delay_s`` is waited after every ``piece`` bytes towards the server.
    """

    def __init__(self, target: str, *, piece: int = 1 << 16, delay_s: float = 0.0) -> None:
        host, _, port = target.rpartition(":")
        self.target, self.piece, self.delay_s = (host, int(port)), piece, delay_s
        self.cut_at: int | None = None
        self.cut_once = False
        self.passed = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            for source, sink, counted in ((client, server, True), (server, client, False)):
                thread = threading.Thread(
                    target=self._pump, args=(source, sink, counted), daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self.piece):
                if counted:
                    if self.cut_at is not None and self.passed + len(data) >= self.cut_at:
                        sink.sendall(data[: self.cut_at - self.passed])
                        self.passed = self.cut_at
                        if self.cut_once:
                            self.cut_at = None
                        break
                    self.passed += len(data)
                    time.sleep(self.delay_s)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self.listener.close()


def test_a_connection_cut_after_any_number_of_bytes_leaves_nothing(
    make_side: Any, make_receiver: Any, make_server: Any
) -> None:
    """From the first byte of the handshake to the last of the stream, some 40 positions. Where the
    cut comes behind the last chunk, the push is complete and only the ack was lost."""
    prefill, decode = make_side(), make_side()
    receiver = make_receiver(decode)
    server = make_server(receiver)
    tokens = list(range(21))
    decode.cache(tokens[:5])
    prefill.cache(tokens)

    def attempt(cut_at: int | None) -> tuple[Proxy, str]:
        proxy = Proxy(server.address)
        proxy.cut_at = cut_at
        try:
            with KvClient(proxy.address, settings=ONCE) as client:
                client.push(prefill.prefill(tokens), handle_id="a")
                return proxy, "ok"
        except TransferRefused as error:
            return proxy, error.code
        finally:
            proxy.close()

    with unchanged(prefill, decode):
        proxy, outcome = attempt(None)
        assert outcome == "ok"
        assert receiver.release("a")
        total = proxy.passed
    assert total > 5 * 172
    rng = random.Random(1)
    cuts = {0, 1, 23, 24, total - 1, *(rng.randrange(total) for _ in range(35))}
    outcomes = set()
    for cut_at in sorted(cuts):
        with unchanged(prefill, decode):
            _, outcome = attempt(cut_at)
            outcomes.add(outcome)
            eventually(lambda: receiver.stats.n_pushing == 0, f"cut at {cut_at}")
            receiver.release("a")
    assert "UNAVAILABLE" in outcomes
    assert receiver.stats.failed > 5  # pushes were cut in their middle, not only before them


def test_a_cut_push_is_tried_again(make_side: Any, make_receiver: Any, make_server: Any) -> None:
    prefill, decode = make_side(), make_side()
    receiver = make_receiver(decode)
    tokens = list(range(41))
    server = make_server(receiver)
    proxy = Proxy(server.address)
    proxy.cut_at, proxy.cut_once = 1500, True  # in the stream; the next connection passes
    settings = ClientSettings(backoff_s=0.01)
    with contextlib.closing(proxy), KvClient(proxy.address, settings=settings) as client:
        result = client.push(prefill.prefill(tokens), handle_id="a")
    assert result.attempts == 2
    with receiver.claim("a", tokens) as seq:
        assert decode.holds(seq, tokens)


@pytest.mark.parametrize(("piece", "delay_s"), [(512, 0.002), (1 << 16, 0.05)])
def test_a_slow_connection_is_only_slow(
    piece: int, delay_s: float, make_side: Any, make_receiver: Any, make_server: Any
) -> None:
    """A slow writer: the stream trickles in. And a slow reader: the server takes its time."""
    shape = {"block_tokens": 16, "n_kv_heads": 2, "head_dim": 32}
    prefill, decode = make_side(32, **shape), make_side(32, **shape)
    receiver = make_receiver(decode)
    server = make_server(receiver)
    tokens = list(range(16 * 20))
    proxy = Proxy(server.address, piece=piece, delay_s=delay_s)
    with contextlib.closing(proxy), KvClient(proxy.address) as client:
        result = client.push(prefill.prefill(tokens))
    with receiver.claim(result.handle_id, tokens) as seq:
        assert decode.holds(seq, tokens)


def test_a_slow_reader_holds_the_sender_back_and_not_the_others(
    make_side: Any, make_receiver: Any, make_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"block_tokens": 16, "n_layers": 8, "n_kv_heads": 4, "head_dim": 64}  # 128 KiB
    prefill, decode = make_side(96, **shape), make_side(96, **shape)
    receiver = make_receiver(decode)
    server = make_server(receiver)
    from kvpool.transfer import Push

    real = Push.add

    def slowly(push: Any, chunk: Any) -> Any:
        if chunk.handle_id == "slow":
            time.sleep(0.03)
        return real(push, chunk)

    monkeypatch.setattr(Push, "add", slowly)
    big, small = list(range(16 * 40)), list(range(500, 520))
    with KvClient(server.address) as client:
        slow = threading.Thread(target=lambda: client.push(prefill.prefill(big), handle_id="slow"))
        slow.start()
        eventually(lambda: receiver.stats.blocks_sent > 2)
        assert client.push(prefill.prefill(small), handle_id="quick").n_blocks == 2
        assert receiver.stats.n_pushing == 1  # the slow one still runs
        slow.join()
    for handle, tokens in (("slow", big), ("quick", small)):
        with receiver.claim(handle, tokens) as seq:
            assert decode.holds(seq, tokens)


# ---- processes that die -------------------------------------------------------------------------


class Process:
    """A side in a process of its own."""

    def __init__(self, *args: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, HERE / "transfer_process.py", *map(str, args)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, *words: object) -> Any:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)
        return json.loads(self.line())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*args: object) -> Process:
        started.append(Process(*args))
        return started[-1]

    yield start
    for process in started:
        if process.process.returncode is None:
            process.end()


def test_clients_killed_in_the_middle_of_a_push_leave_nothing(
    make_side: Any, make_receiver: Any, make_server: Any, start: Any, tmp_path: Path
) -> None:
    """SIGKILL, 20 times, each after another number of chunks, five pushes at a time. A killed
    client has been seen to end its stream like any other."""
    decode = make_side(512)
    receiver = make_receiver(decode)
    server = make_server(receiver)
    nursery = start("nursery")
    with unchanged(decode):
        for batch in range(4):
            clients = []
            for i in range(5):
                dots = tmp_path / f"{batch}-{i}"
                dots.touch()
                clients.append((nursery.ask(server.address, 60, dots), dots, 1 + 2 * i + 5 * batch))
            for pid, dots, n_chunks in clients:
                eventually(lambda d=dots, n=n_chunks: d.stat().st_size >= n, "it pushes")
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: receiver.stats.n_pushing == 0, f"{receiver.stats}")
            for pending in receiver.pending():  # a whole push, before the one that was killed
                receiver.release(pending.handle_id)
    assert receiver.stats.failed >= 16
    assert receiver.stats.held_blocks == 0


def test_a_server_that_is_killed_and_started_again_is_found_again(
    prefill: Side, start: Any
) -> None:
    tokens = list(range(37))
    prefill.cache(tokens)
    server = start("decode", 0)
    address = server.line()
    port = address.rpartition(":")[2]
    settings = ClientSettings(max_attempts=50, backoff_s=0.05, max_backoff_s=0.2)
    with unchanged(prefill), KvClient(address, settings=settings) as client:
        client.push(prefill.prefill(tokens), handle_id="a")
        assert server.ask("claim", "a", 37) is True
        for i in range(3):
            client.push(prefill.prefill(tokens), handle_id=f"held-{i}")  # and dies with the server
            server.kill()
            once = KvClient(address, settings=ONCE)
            with once, pytest.raises(TransferRefused, match="UNAVAILABLE"):
                once.push(prefill.prefill(tokens))
            with futures.ThreadPoolExecutor(1) as pool:
                seq = prefill.prefill(tokens)
                pushed = pool.submit(client.push, seq, handle_id=f"b{i}")  # until there is somebody
                server = start("decode", port)
                assert server.line() == address
                assert pushed.result(30).blocks_deduped == 0  # nothing is cached in a new process
            assert server.ask("claim", f"b{i}", 37) is True
            free, used, cached, stats = server.ask("stats")
            assert (free, used, cached) == (64 - 9, 0, 9)
            assert stats["held_blocks"] == 0
            server.ask("check")


def test_a_push_abandoned_after_5_of_10_chunks_leaves_nothing(prefill: Side, start: Any) -> None:
    """Without a word: the iterator of the sender just ends."""
    server = start("decode", 0)
    address = server.line()
    with prefill.prefill(list(range(40))) as seq:
        sent = [data for data, _ in messages("a", seq, Plan.of(seq))][:5]
        with pytest.raises(grpc.RpcError):
            raw_push(address, iter(sent))
    eventually(lambda: server.ask("stats")[:3] == [64, 0, 0])
    assert server.ask("stats")[3]["failed"] == 1


# ---- for ever -----------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_is_flat_over_many_pushes(
    make_side: Any, make_receiver: Any, make_server: Any
) -> None:
    """Client and server in this process. ``make soak-transfer`` does 10,000; every fifth push is
    refused, every fifth is released, the others are claimed."""
    n = int(os.environ.get("KVPOOL_SOAK_PUSHES", "1000"))
    prefill, decode = make_side(), make_side()
    receiver = make_receiver(decode)
    server = make_server(receiver)

    def push(i: int) -> None:
        tokens = [i % 11, 1, 2, 3, i % 13, 5, 6, 7, i]
        seq = prefill.prefill(tokens)
        if i % 5 == 0:
            with seq:
                sent = [data for data, _ in messages(f"h{i}", seq, Plan.of(seq))]
                with pytest.raises(grpc.RpcError):
                    call(iter([sent[0], sent[0]]))
            return
        client.push(seq, handle_id=f"h{i}")
        if i % 5 == 1:
            client.release(f"h{i}")
        else:
            receiver.claim(f"h{i}", tokens).free()

    with KvClient(server.address) as client, grpc.insecure_channel(server.address) as channel:
        call = channel.stream_unary("/tl.kv.v1.KvTransferService/PushKv")
        for i in range(300):  # caches, arenas and threads come into being
            push(i)
        gc.collect()
        meta = decode.manager.meta_bytes, prefill.manager.meta_bytes
        before = resident_bytes()
        for i in range(n):
            push(i)
        gc.collect()
        grown = resident_bytes() - before
    assert grown < 4 << 20, f"{grown} bytes in {n} pushes"
    assert (decode.manager.meta_bytes, prefill.manager.meta_bytes) == meta
    assert receiver.stats.held_blocks == 0
    assert receiver.stats.failed == (300 + n) // 5
