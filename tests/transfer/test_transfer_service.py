"""Over the network, as engines use it: bytes moved, sizes, and what goes wrong."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from transfer_support import ENVELOPE_BYTES, Side, eventually, raw_push, unchanged

import kvpool
from kvpool.transfer import Ack, KvReceiver, Limits, Plan, TransferRefused, push

grpc: Any = pytest.importorskip("grpc", reason="needs kvpool[transfer]")
from kvpool.transfer import (  # noqa: E402
    AioKvClient,
    ClientSettings,
)
from kvpool.transfer import kv_transfer_pb2 as pb  # noqa: E402
from kvpool.transfer._chunk import decode_chunk  # noqa: E402
from kvpool.transfer.sender import messages  # noqa: E402

NINE = list(range(1, 10))
QUICK = ClientSettings(backoff_s=0.01, max_backoff_s=0.02, rpc_timeout_s=5, push_timeout_s=5)


# ---- what moves ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "tokens", "moved", "ack"),
    [
        (0, 9, 3, (3, 0)),  # nothing there: two full blocks and the tail
        (4, 9, 2, (2, 1)),  # the protocol's example: block 0 is cached
        (8, 9, 1, (1, 2)),  # all but the tail
        (8, 8, 0, (0, 2)),  # everything, and no tail: not a byte
        (0, 3, 1, (1, 0)),  # a tail alone
        (4, 16, 3, (3, 1)),
    ],
)
def test_the_bytes_moved_are_the_formulas(
    cached: int, tokens: int, moved: int, ack: tuple[int, int],
    prefill: Side, decode: Side, receiver: KvReceiver, serve: Any, connect: Any,
) -> None:  # fmt: skip
    """(full blocks - blocks already there + 1 for a partial tail) * one-block envelope."""
    prompt = list(range(1, tokens + 1))
    decode.cache(prompt[:cached])
    server = serve(receiver)
    client = connect(server.address)
    result = client.push(prefill.prefill(prompt), handle_id="a")
    assert result == ("a", -(-tokens // 4), *ack, moved * ENVELOPE_BYTES, 1)
    assert client.stats[:5] == (moved * ENVELOPE_BYTES, *ack, 1, 0)
    assert receiver.stats[:5] == (moved * ENVELOPE_BYTES, *ack, 1, 0)
    with receiver.claim("a", prompt) as seq:
        assert decode.holds(seq, prompt)


def test_the_sequence_is_freed_on_success_and_on_failure(
    prefill: Side, receiver: KvReceiver, serve: Any, connect: Any
) -> None:
    server = serve(receiver)
    client = connect(server.address, settings=QUICK)
    seq = prefill.prefill(NINE)
    client.push(seq, handle_id="a")
    assert seq.is_freed
    seq = prefill.prefill(NINE)
    with pytest.raises(TransferRefused, match="ALREADY_EXISTS"):
        client.push(seq, handle_id="a")
    assert seq.is_freed
    seq = prefill.prefill(NINE)
    client.push(seq, keep=True)
    assert not seq.is_freed
    seq.free()
    empty = prefill.manager.allocate(NINE, max_cached_tokens=0)
    with pytest.raises(kvpool.InvalidArgument, match="nothing of the sequence is computed"):
        client.push(empty)
    assert empty.is_freed


def test_push_to_a_target_takes_the_options_of_both(
    prefill: Side, decode: Side, receiver: KvReceiver, make_server: Any, make_client: Any
) -> None:
    server = make_server(receiver, token="secret")
    seq = prefill.prefill(NINE)
    result = push(server.address, seq, token="secret", handle_id="a", keep=True)
    assert result.handle_id == "a"
    assert push(make_client(server.address, token="secret"), seq).n_blocks == 3
    with pytest.raises(kvpool.InvalidArgument, match="token"):
        push(make_client(server.address), seq, token="secret")
    seq = prefill.prefill(NINE)
    with pytest.raises(TypeError):
        push(server.address, seq, no_such_option=1)
    assert seq.is_freed


def test_a_payload_of_almost_4_mib_passes_and_what_is_larger_does_not(
    make_side: Any, make_receiver: Any, serve: Any, connect: Any
) -> None:
    """gRPC's own limit of 4,194,304 bytes is for the whole message."""
    shape = {"block_tokens": 16, "n_layers": 64, "n_kv_heads": 1}
    prefill, decode = (make_side(3, head_dim=1023, **shape) for _ in "ab")
    envelope_bytes = prefill.pool.export_bytes(1)
    assert 4_190_000 < envelope_bytes < 4 << 20
    receiver = make_receiver(decode)
    server = serve(receiver)
    tokens = list(range(40))
    with prefill.manager.allocate(tokens) as seq:
        prefill.pool.slab[seq.blocks] = 1.5
        prefill.pool.slab[seq.blocks[-1], ..., 8:, :] = 0
        seq.commit()
        handle = "h" * 128
        result = connect(server.address).push(seq, keep=True, handle_id=handle)
        assert result.bytes_sent == 3 * envelope_bytes
        with receiver.claim(handle, tokens) as mine:
            assert (decode.pool.slab[mine.blocks] == prefill.pool.slab[seq.blocks]).all()
    with (
        grpc.insecure_channel(server.address, [("grpc.max_send_message_length", -1)]) as channel,
        unchanged(decode),
    ):
        call = channel.stream_unary("/tl.kv.v1.KvTransferService/PushKv")
        for size, code in ((4 << 20, "DATA_LOSS"), ((4 << 20) + 1, "INVALID_ARGUMENT")):
            payload = bytes(size)
            chunk = pb.KvChunk(
                handle_id="b", block_hash=1, n_blocks_total=1, kv_format=1, payload=payload,
                crc32c=kvpool.crc32c(payload),
            )  # fmt: skip
            with pytest.raises(grpc.RpcError) as caught:
                call(iter([chunk.SerializeToString()]))
            assert caught.value.code().name == code
        with pytest.raises(grpc.RpcError) as caught:
            call(iter([bytes(5 << 20)]))
        assert caught.value.code().name == "RESOURCE_EXHAUSTED"


def test_two_hundred_pushes_at_a_time(
    make_side: Any, make_receiver: Any, serve: Any, connect: Any
) -> None:
    prefill, decode = make_side(256), make_side(1024)
    receiver = make_receiver(decode, limits=Limits(max_pushes=200))
    server = serve(receiver)
    client = connect(server.address, settings=ClientSettings(push_timeout_s=60, rpc_timeout_s=60))
    seqs = [prefill.prefill([i % 7, 1, 2, 3, i, 5]) for i in range(200)]
    results: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: client.push(seqs[i])}))
        for i in range(200)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200
    assert receiver.stats.n_pending == 200
    for i, result in results.items():
        tokens = [i % 7, 1, 2, 3, i, 5]
        with receiver.claim(result.handle_id, tokens) as seq:
            assert decode.holds(seq, tokens)


# ---- when something goes wrong ------------------------------------------------------------------


def test_a_block_that_went_after_has_blocks_is_sent_again_with_all_others(
    prefill: Side, decode: Side, receiver: KvReceiver, serve: Any, connect: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    decode.cache(NINE)
    real = receiver.has_blocks

    def has_blocks(hashes: Any, kv_format: int = 1) -> Any:
        present = real(hashes, kv_format)
        decode.manager.evict(1)  # the second of them, right behind the answer
        return present

    monkeypatch.setattr(receiver, "has_blocks", has_blocks)
    server = serve(receiver)
    client = connect(server.address)
    result = client.push(prefill.prefill(NINE), handle_id="a")
    # Block 0 was deduplicated in the first stream; in the second all three have their payloads.
    assert (result.attempts, result.blocks_sent, result.blocks_deduped) == (2, 3, 0)
    with receiver.claim("a", NINE) as seq:
        assert decode.holds(seq, NINE)
    monkeypatch.setattr(receiver, "has_blocks", lambda hashes, kv_format=1: real(hashes) | True)
    decode.manager.reset()
    assert client.push(prefill.prefill(NINE)).attempts == 2


def test_a_second_not_found_is_final(
    prefill: Side, receiver: KvReceiver, serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.transfer import Push

    def add(self: Any, chunk: Any) -> Ack:
        raise TransferRefused("NOT_FOUND", "gone")

    monkeypatch.setattr(Push, "add", add)
    client = connect(serve(receiver).address, settings=QUICK)
    with pytest.raises(TransferRefused, match="NOT_FOUND"):
        client.push(prefill.prefill(NINE))
    assert receiver.stats.failed == 2
    assert client.stats.failed == 1


def test_an_attempt_that_the_other_side_still_holds_is_released_and_repeated(
    prefill: Side, decode: Side, receiver: KvReceiver, serve: Any, connect: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The connection went in the middle, and the server has not noticed when the next attempt
    comes: the handle is in use, by ourselves. Somebody else's is left alone."""
    import kvpool.transfer.client as client_module

    left = []
    real = client_module.Course.attempt

    def attempt(self: Any, present: list[bool]) -> Any:
        if not left:  # the first one gets through to one chunk, and then its connection is gone
            left.append(receiver.begin())
            sent = messages("a", self._seq, self.plan)
            left[0].add(decode_chunk(next(sent)[0]))
            raise TransferRefused("UNAVAILABLE", "cut")
        return real(self, present)

    monkeypatch.setattr(client_module.Course, "attempt", attempt)
    client = connect(serve(receiver).address, settings=QUICK)
    result = client.push(prefill.prefill(NINE), handle_id="a")
    assert (result.blocks_sent, left[0].ended) == (3, "released")
    with receiver.claim("a", NINE) as seq:
        assert decode.holds(seq, NINE)
    with receiver.begin() as theirs, prefill.prefill(NINE) as seq:
        theirs.add(decode_chunk(next(messages("b", seq, Plan.of(seq)))[0]))
        with pytest.raises(TransferRefused, match="ALREADY_EXISTS"):
            client.push(seq.fork(), handle_id="b")
        assert theirs.ended is None


def test_no_server_is_unavailable_after_so_many_attempts(prefill: Side, connect: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        client = connect(target, settings=QUICK)
        with pytest.raises(TransferRefused) as caught:
            client.push(prefill.prefill(NINE))
        assert caught.value.code == "UNAVAILABLE"
        assert isinstance(caught.value, ConnectionError)
        assert client.stats.failed == 1


def test_a_deadline_ends_a_push_on_both_sides(
    prefill: Side, decode: Side, make_receiver: Any, serve: Any, connect: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    receiver = make_receiver(decode)
    import kvpool.transfer.client as client_module

    def slow(*args: Any) -> Iterator[tuple[bytes, int]]:
        for message in messages(*args):
            yield message
            time.sleep(0.4)

    server = serve(receiver)
    client = connect(server.address, settings=ClientSettings(push_timeout_s=0.6))
    monkeypatch.setattr(client_module, "messages", slow)
    with unchanged(decode):
        with pytest.raises(TransferRefused) as caught:
            client.push(prefill.prefill(NINE))
        assert caught.value.code == "DEADLINE_EXCEEDED"
    assert receiver.stats.n_pending == 0


def test_a_cancelled_push_leaves_nothing(
    prefill: Side, decode: Side, receiver: KvReceiver, serve: Any, loop: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """asyncio: the task is cancelled between two chunks."""
    server = serve(receiver)
    started = threading.Event()

    async def cancelled() -> None:
        async with AioKvClient(server.address) as client:
            import kvpool.transfer.client as client_module

            real = client_module.Attempt.__next__
            count = [0]

            def take(self: Any) -> bytes:
                count[0] += 1
                if count[0] == 2:
                    started.set()
                    task.cancel()
                return real(self)

            monkeypatch.setattr(client_module.Attempt, "__next__", take)
            task = asyncio.ensure_future(client.push(prefill.prefill(NINE), handle_id="a"))
            with pytest.raises(asyncio.CancelledError):
                await task

    with unchanged(decode):
        loop.run(cancelled())
        assert started.is_set()
        eventually(lambda: receiver.stats.n_pushing == 0)
        receiver.release("a")  # where the last chunk was faster than the cancellation
    assert prefill.pool.stats.used == 0


@pytest.mark.parametrize("n", [0, 2])
def test_a_stream_that_just_ends_is_a_cut(
    n: int, prefill: Side, decode: Side, receiver: KvReceiver, serve: Any
) -> None:
    server = serve(receiver)
    with unchanged(decode), prefill.prefill(NINE) as seq:
        sent = [data for data, _ in messages("a", seq, Plan.of(seq))][:n]
        with pytest.raises(grpc.RpcError) as caught:
            raw_push(server.address, iter(sent))
        assert caught.value.code().name == "INVALID_ARGUMENT"
        assert "ended before the last block" in caught.value.details()
    assert receiver.stats.n_pending == 0


def test_bytes_that_are_no_message_are_refused(
    decode: Side, receiver: KvReceiver, serve: Any
) -> None:
    with unchanged(decode), pytest.raises(grpc.RpcError) as caught:
        raw_push(serve(receiver).address, iter([b"\xff\xff\xff"]))
    assert caught.value.code().name == "INVALID_ARGUMENT"
    assert "KvChunk" in caught.value.details()


def test_a_silent_push_is_ended(
    prefill: Side, decode: Side, make_receiver: Any, serve: Any
) -> None:
    receiver = make_receiver(decode, limits=Limits(idle_s=0.3))
    server = serve(receiver)
    release = threading.Event()

    def slow() -> Iterator[bytes]:
        yield from first
        release.wait(20)

    with unchanged(decode), prefill.prefill(NINE) as seq:
        first = [data for data, _ in messages("a", seq, Plan.of(seq))][:2]
        with pytest.raises(grpc.RpcError) as caught:
            raw_push(server.address, slow())
        release.set()
        assert caught.value.code().name == "CANCELLED"


def test_an_unclaimed_handle_ends_with_its_time_to_live(
    prefill: Side, decode: Side, make_receiver: Any, serve: Any, connect: Any
) -> None:
    receiver = make_receiver(decode, limits=Limits(ttl_s=0.3))
    client = connect(serve(receiver).address)
    with unchanged(decode):
        client.push(prefill.prefill(NINE), handle_id="a")
        eventually(lambda: receiver.stats.expired == 1)
    client.release("a")
    client.release("a")
    client.release("never")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"kv_format": 2}, "FAILED_PRECONDITION"),
        ({"block_hashes": list(range(9)), "kv_format": 1}, "RESOURCE_EXHAUSTED"),
    ],
)
def test_has_blocks_refuses(
    fields: dict[str, Any], code: str, decode: Side, make_receiver: Any, serve: Any
) -> None:
    server = serve(make_receiver(decode, limits=Limits(max_hashes=8)))
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/tl.kv.v1.KvTransferService/HasBlocks")
        with pytest.raises(grpc.RpcError) as caught:
            call(pb.HasBlocksRequest(**fields).SerializeToString())
        assert caught.value.code().name == code


def test_has_blocks_keeps_length_and_order(
    decode: Side, receiver: KvReceiver, serve: Any, connect: Any
) -> None:
    decode.cache(NINE)
    a, b = kvpool.block_hashes(NINE, 4).tolist()
    client = connect(serve(receiver).address)
    with unchanged(decode):
        assert client.has_blocks([b, 7, a, 0, a]) == [True, False, True, False, True]
        assert client.has_blocks([]) == []
