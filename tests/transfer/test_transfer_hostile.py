"""Callers that mean harm, and engines that get it wrong: told so, ended, and nothing is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transfer_support import Side, eventually, raw_push, send, unchanged

import kvpool
from kvpool.transfer import KvReceiver, Limits, TransferRefused

grpc: Any = pytest.importorskip("grpc", reason="needs kvpool[transfer]")
from kvpool.transfer import (  # noqa: E402
    AioKvClient,
    AioKvServer,
    ClientSettings,
    Handover,
    KvServer,
    Plan,
    ServerTls,
)
from kvpool.transfer import client as client_module  # noqa: E402
from kvpool.transfer import server as server_module  # noqa: E402
from kvpool.transfer._chunk import Chunk, encode_chunk  # noqa: E402
from kvpool.transfer.handover import Answer  # noqa: E402
from kvpool.transfer.sender import messages  # noqa: E402

NINE = list(range(1, 10))
LONG = "x" * (1 << 20)
TRANSFER, HEALTH = "/tl.kv.v1.KvTransferService/", "/grpc.health.v1.Health/"


def code_of(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


# ---- messages -----------------------------------------------------------------------------------


def test_an_error_about_a_long_text_is_short_enough_to_arrive(
    prefill: Side, decode: Side, receiver: KvReceiver, serve: Any
) -> None:
    """gRPC drops a status that is longer than the metadata may be, and says something else."""

    def nobody(handover: Handover, seq: kvpool.Sequence) -> Iterator[Answer]:
        yield Answer([])

    server = serve(receiver, handover=nobody)
    with unchanged(decode), prefill.prefill(NINE) as seq:
        first, *_ = (data for data, _ in messages("a", seq, Plan.of(seq)))
        later = encode_chunk(Chunk(LONG, 7, 1, 3, 1, b"", 0))
        code, text = code_of(lambda: raw_push(server.address, iter([first, later])))
        assert (code, len(text) < 400) == ("INVALID_ARGUMENT", True)
        assert "handle_id 'xxx" in text
        assert "expected 'a'" in text
        code, text = code_of(lambda: raw_push(server.address, iter([later])))
        assert (code, "found 1048576" in text, len(text) < 400) == ("INVALID_ARGUMENT", True, True)
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_stream("/kvpool.handover.v1.Handover/Continue")
        request = Handover(LONG, NINE, picked=[1]).to_message().SerializeToString()
        code, text = code_of(lambda: list(call(request)))
        assert (code, len(text) < 400) == ("NOT_FOUND", True)


@pytest.mark.parametrize("method", [TRANSFER + "HasBlocks", TRANSFER + "Release", HEALTH + "Check"])
def test_a_call_without_a_message_or_with_another_is_refused(
    method: str, receiver: KvReceiver, serve: Any
) -> None:
    with grpc.insecure_channel(serve(receiver).address) as channel:
        call = channel.stream_unary(method)
        assert code_of(lambda: call(iter([]), timeout=10))[0] == "INVALID_ARGUMENT"
        assert code_of(lambda: call(iter([b"\xff\xff"]), timeout=10))[0] == "INVALID_ARGUMENT"


# ---- calls that never say anything --------------------------------------------------------------


@pytest.fixture
def silent(stack: Any) -> Callable[..., list[Any]]:
    """Calls whose message does not come, from as many connections."""
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait(60)
        yield from ()

    def start(address: str, method: str, n: int) -> list[Any]:
        own = [("grpc.use_local_subchannel_pool", 1)]
        channels = [stack.enter_context(grpc.insecure_channel(address, own)) for _ in range(n)]
        stack.callback(over.set)
        return [channel.stream_unary(method).future(nothing()) for channel in channels]

    return start


def test_silent_health_checks_of_strangers_do_not_stop_the_server(
    prefill: Side, make_side: Any, make_receiver: Any, serve: Any, connect: Any, silent: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Health is for anybody, so these need no token; as many as there may be calls at all."""
    from kvpool.transfer import aio_server

    for module in (server_module, aio_server):
        monkeypatch.setattr(module, "CHECK_S", 0.5)
    decode = make_side()
    receiver = make_receiver(decode, limits=Limits(max_pushes=4, idle_s=2))
    server = serve(receiver, token="secret")
    calls = silent(server.address, HEALTH + "Check", 2 * (4 + server_module._SPARE_THREADS))
    held = server_module.MAX_CHECKS
    eventually(lambda: sum(call.done() for call in calls) >= len(calls) - held)
    assert connect(server.address, token="secret").push(prefill.prefill(NINE)).n_blocks == 3
    eventually(lambda: all(call.done() for call in calls))  # after half a second of silence
    codes = [call.code().name for call in calls]
    assert set(codes) == {"RESOURCE_EXHAUSTED", "CANCELLED"}
    assert codes.count("CANCELLED") == held
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(server.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("method", ["HasBlocks", "Release"])
def test_a_call_whose_message_does_not_come_is_ended(
    method: str, decode: Side, make_receiver: Any, serve: Any, silent: Any
) -> None:
    server = serve(make_receiver(decode, limits=Limits(idle_s=0.3)))
    [call] = silent(server.address, TRANSFER + method, 1)
    assert call.exception(timeout=10).code().name == "CANCELLED"


def test_what_cannot_be_ended_does_not_keep_the_rest_from_it(
    prefill: Side, decode: Side, make_receiver: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = make_receiver(decode, limits=Limits(ttl_s=0.2))
    real, failed = receiver.expire, threading.Event()

    def expire() -> int:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("once")
        return int(real())

    monkeypatch.setattr(receiver, "expire", expire)
    with unchanged(decode):
        send(receiver, "a", prefill.prefill(NINE))
        serve(receiver)
        eventually(lambda: receiver.stats.expired == 1)
    assert failed.is_set()


# ---- a claim that others come between -----------------------------------------------------------


@pytest.fixture
def during_claim(receiver: KvReceiver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Claims "a" with tokens that are none; meanwhile something else happens."""

    def claim(meanwhile: Callable[[], None]) -> None:
        real = receiver._compare

        def compare(*args: Any) -> None:
            meanwhile()
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(receiver, "_compare", compare)
            with pytest.raises(kvpool.InvalidArgument):
                receiver.claim("a", [-1] * 9)

    return claim


def test_a_handle_that_is_being_claimed_is_in_use(
    prefill: Side, decode: Side, receiver: KvReceiver, during_claim: Any
) -> None:
    """Else the claim that leaves the handle would put it over another's, whose blocks are lost."""

    def push_again() -> None:
        with pytest.raises(TransferRefused, match="ALREADY_EXISTS"):
            send(receiver, "a", prefill.prefill([7] * 9))

    with unchanged(decode):
        send(receiver, "a", prefill.prefill(NINE))
        during_claim(push_again)
        assert [p.handle_id for p in receiver.pending()] == ["a"]
        assert receiver.release("a")


@pytest.mark.parametrize("how", ["release", "clear", "close"])
def test_a_handle_that_is_let_go_during_a_claim_does_not_come_back(
    how: str, prefill: Side, decode: Side, receiver: KvReceiver, during_claim: Any
) -> None:
    with unchanged(decode):
        send(receiver, "a", prefill.prefill(NINE))
        during_claim({"release": lambda: receiver.release("a")}.get(how) or getattr(receiver, how))
        assert receiver.pending() == []
        assert (receiver.stats.held_blocks, receiver.stats.released) == (0, 1)


def test_a_handle_that_is_let_go_during_a_claim_can_be_anothers_at_once(
    prefill: Side, decode: Side, receiver: KvReceiver, during_claim: Any
) -> None:
    other = [7] * 9

    def take_over() -> None:
        receiver.release("a")
        send(receiver, "a", prefill.prefill(other))

    send(receiver, "a", prefill.prefill(NINE))
    during_claim(take_over)
    assert receiver.stats.held_blocks == 3
    with receiver.claim("a", other) as seq:
        assert decode.holds(seq, other)


# ---- the sender's own troubles ------------------------------------------------------------------


def test_what_goes_wrong_while_a_block_is_read_is_told_as_it_is(
    prefill: Side, decode: Side, receiver: KvReceiver, serve: Any, connect: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It happens in a thread of gRPC's, which says only that there was an exception."""

    def failing(*args: Any) -> Iterator[tuple[bytes, int]]:
        yield next(messages(*args))
        raise MemoryError("no room for block 1")

    client = connect(serve(receiver).address)
    seq = prefill.prefill(NINE)
    with unchanged(decode), monkeypatch.context() as patch:
        patch.setattr(client_module, "messages", failing)
        with pytest.raises(MemoryError, match="no room for block 1"):
            client.push(seq, handle_id="a")
    assert seq.is_freed
    assert (client.stats.failed, receiver.stats.n_pending) == (1, 0)
    assert client.push(prefill.prefill(NINE), handle_id="a").attempts == 1


def test_an_interrupt_behind_the_last_chunk_leaves_no_handle(
    prefill: Side, decode: Side, receiver: KvReceiver, serve: Any, make_client: Any, loop: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Ctrl-C, or a cancelled task, between the ack and the return: nobody will ever claim it."""
    server = serve(receiver)
    real, real_aio = client_module.KvClient._stream, AioKvClient._stream

    def stream(*args: Any) -> None:
        real(*args)
        assert receiver.stats.n_pending == 1
        raise KeyboardInterrupt

    async def stream_aio(*args: Any) -> None:
        await real_aio(*args)
        assert receiver.stats.n_pending == 1
        raise asyncio.CancelledError

    async def push_aio() -> None:
        async with AioKvClient(server.address) as client:
            with pytest.raises(asyncio.CancelledError):
                await client.push(prefill.prefill(NINE))

    monkeypatch.setattr(client_module.KvClient, "_stream", stream)
    monkeypatch.setattr(AioKvClient, "_stream", stream_aio)
    with unchanged(decode):
        with pytest.raises(KeyboardInterrupt):
            make_client(server.address).push(prefill.prefill(NINE))
        loop.run(push_aio())
    assert receiver.stats.released == 2


@pytest.mark.parametrize("handle", ["", "\ud800", "a\n", "x" * 129, 5, b"x"])
def test_a_handle_that_cannot_be_is_refused_before_anything_is_sent(
    handle: Any, prefill: Side, receiver: KvReceiver, serve: Any, connect: Any
) -> None:
    client = connect(serve(receiver).address)
    seq = prefill.prefill(NINE)
    for call in (lambda: client.push(seq, handle_id=handle), lambda: client.release(handle)):
        with pytest.raises(kvpool.InvalidArgument, match="handle_id: expected"):
            call()
    assert seq.is_freed
    assert receiver.stats.failed == 0


@pytest.mark.parametrize("name", [-1, 2**64, 1.5, "7", None])
def test_a_name_is_an_integer_of_64_bits(
    name: Any, receiver: KvReceiver, serve: Any, connect: Any
) -> None:
    client = connect(serve(receiver).address)
    for has_blocks in (client.has_blocks, receiver.has_blocks):
        with pytest.raises(kvpool.InvalidArgument, match=r"hashes\[1\]: expected an integer"):
            has_blocks([7, name])


def test_a_request_that_no_message_can_hold_is_refused(
    receiver: KvReceiver, serve: Any, connect: Any
) -> None:
    client = connect(serve(receiver).address)
    for wrong in ({"max_tokens": -1}, {"picked": [2**32]}, {"seed": 2**64}, {"namespace": -1}):
        with pytest.raises(kvpool.InvalidArgument, match="Handover"):
            list(client.hand_over(Handover("a", NINE, **wrong)))


def test_an_answer_that_nobody_reads_any_more_ends_before_its_blocks_go(
    prefill: Side, decode: Side, receiver: KvReceiver, serve: Any, make_client: Any
) -> None:
    """An engine may be writing into them until the generator has ended."""
    was_freed: list[bool] = []

    def endless(handover: Handover, seq: kvpool.Sequence) -> Iterator[Answer]:
        try:
            while True:
                yield Answer([1])
        finally:
            was_freed.append(seq.is_freed)

    client = make_client(serve(receiver, handover=endless).address)
    client.push(prefill.prefill(NINE), handle_id="a")
    answers = client.hand_over(Handover("a", NINE, picked=[1]))
    assert next(answers) == Answer([1])
    answers.close()
    eventually(lambda: was_freed)
    assert was_freed == [False]
    eventually(lambda: decode.pool.stats.used == 0)


def test_an_answer_may_be_any_iterator(
    prefill: Side, decode: Side, receiver: KvReceiver, serve: Any, connect: Any
) -> None:
    client = connect(serve(receiver, handover=lambda *_: iter([Answer([4], "stop")])).address)
    client.push(prefill.prefill(NINE), handle_id="a")
    assert list(client.hand_over(Handover("a", NINE, picked=[1]))) == [Answer([4], "stop")]
    eventually(lambda: decode.pool.stats.used == 0)


# ---- settings -----------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *((ClientSettings, "push_timeout_s", v) for v in (0, -1, INF, NAN, 1e12, "1", True, None)),
        (ClientSettings, "rpc_timeout_s", INF),
        (ClientSettings, "keepalive_time_s", 1e9),
        (ClientSettings, "backoff_s", 1e-9),
        *((ClientSettings, "max_attempts", v) for v in (0, 2.5, 2**31)),
        *((Limits, "max_pushes", v) for v in (0, -1, 1.5, INF, "1", True, None)),
        (Limits, "max_held_blocks", 0),
        *((Limits, "ttl_s", v) for v in (0, -1, NAN, "1")),
    ],
)
def test_a_setting_out_of_range_is_named(kind: Any, field: str, value: Any) -> None:
    match = f"{kind.__name__}: {field}: expected .* found"
    with pytest.raises(kvpool.InvalidArgument, match=match):
        kind(**{field: value})


def test_the_ends_of_the_ranges_work(
    prefill: Side, decode: Side, make_receiver: Any, serve: Any, connect: Any
) -> None:
    server = serve(make_receiver(decode, limits=Limits(ttl_s=INF, idle_s=INF, max_pushes=1)))
    longest = {name: 1e6 for name in vars(ClientSettings()) if name.endswith("_s")}
    for settings in (
        ClientSettings(max_attempts=1000, **longest),
        ClientSettings(backoff_s=0.001, max_backoff_s=0.001, keepalive_time_s=0.001),
    ):
        client = connect(server.address, settings=settings)
        assert client.push(prefill.prefill(NINE)).attempts == 1
        assert client.has_blocks([1]) == [False]


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1", ":0", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:-1", "127.0.0.1:65536",
     "127.0.0.1:99999", "127.0.0.1:0 ", "::1:0", "ipv4:127.0.0.1:0", "unix:", None, 5],
)  # fmt: skip
def test_an_address_is_a_host_and_a_port_or_a_path(address: Any, receiver: KvReceiver) -> None:
    """gRPC would listen on port 34463 where 99999 was asked for."""
    for kind in (KvServer, AioKvServer):
        with pytest.raises(kvpool.InvalidArgument, match="address: expected HOST:PORT"):
            kind(receiver, address)


@pytest.mark.parametrize("token", ["", "line\nbreak", "nö", 5])
def test_a_client_has_no_token_that_no_server_can_ask_for(token: Any, connect: Any) -> None:
    with pytest.raises(kvpool.InvalidArgument, match="token: expected"):
        connect("127.0.0.1:1", token=token)


def test_certificates_that_are_none_are_told(receiver: KvReceiver, serve: Any) -> None:
    with pytest.raises(kvpool.TransferError, match="certificate and key"):
        serve(receiver, tls=ServerTls(b"x", b"y"))
