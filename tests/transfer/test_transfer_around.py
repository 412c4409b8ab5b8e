"""Around the protocol: who may connect, health, hand-over, metrics, logs."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transfer_support import Side, eventually, raw_push, unchanged

import kvpool
from kvpool.transfer import KvReceiver, TransferRefused

grpc: Any = pytest.importorskip("grpc", reason="needs kvpool[transfer]")
from kvpool.transfer import (  # noqa: E402
    AioKvServer,
    ClientSettings,
    ClientTls,
    Handover,
    KvServer,
    ServerTls,
)
from kvpool.transfer.handover import Answer  # noqa: E402

NINE = list(range(1, 10))
QUICK = ClientSettings(backoff_s=0.01, max_backoff_s=0.02, rpc_timeout_s=5, push_timeout_s=5)


# ---- who may connect ----------------------------------------------------------------------------


def test_a_token_is_asked_for_before_anything_is_read(
    prefill: Side, decode: Side, receiver: KvReceiver, serve: Any, connect: Any
) -> None:
    server = serve(receiver, token="secret")
    for token in (None, "secre", "secret2", "Secret"):
        client = connect(server.address, token=token, settings=QUICK)
        for call in (
            lambda c=client: c.push(prefill.prefill(NINE)),
            lambda c=client: c.has_blocks([1]),
            lambda c=client: c.release("a"),
        ):
            with pytest.raises(TransferRefused) as caught:
                call()
            assert caught.value.code == "UNAUTHENTICATED"
    assert receiver.stats.failed == 0  # no push has begun
    assert connect(server.address, token="secret").push(prefill.prefill(NINE)).n_blocks == 3
    read: list[int] = []

    def endless() -> Iterator[bytes]:
        while True:
            read.append(1)
            yield bytes(1 << 20)

    with pytest.raises(grpc.RpcError) as caught:
        raw_push(server.address, endless())
    assert caught.value.code().name == "UNAUTHENTICATED"
    assert len(read) < 50


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0"])
def test_nobody_else_may_connect_unless_something_asks_who_they_are(
    address: str, receiver: KvReceiver
) -> None:
    for kind in (KvServer, AioKvServer):
        with pytest.raises(kvpool.InvalidArgument, match="insecure=True"):
            kind(receiver, address)


def test_other_addresses_need_a_token_or_insecure(
    prefill: Side, receiver: KvReceiver, serve: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvpool.transfer"):
        server = serve(receiver, "0.0.0.0:0", token="secret")
    assert "the token travel in clear" in caplog.text
    port = server.address.rpartition(":")[2]
    assert connect(f"127.0.0.1:{port}", token="secret").push(prefill.prefill(NINE)).n_blocks == 3
    assert serve(receiver, "0.0.0.0:0", insecure=True).address.startswith("0.0.0.0:")


@pytest.mark.parametrize("token", ["", "line\nbreak", "nö"])
def test_a_token_must_be_printable(token: str, receiver: KvReceiver) -> None:
    with pytest.raises(kvpool.InvalidArgument, match="token"):
        KvServer(receiver, token=token)


def test_a_port_that_is_taken_is_told(receiver: KvReceiver, serve: Any) -> None:
    server = serve(receiver)
    with pytest.raises(kvpool.TransferError, match="cannot listen on 127"):
        serve(receiver, server.address)


def test_a_unix_socket_is_an_address(
    prefill: Side, receiver: KvReceiver, serve: Any, connect: Any, tmp_path: Path
) -> None:
    server = serve(receiver, f"unix:{tmp_path}/kv.sock")
    assert connect(server.address).push(prefill.prefill(NINE)).n_blocks == 3


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """Two authorities: "ca" has signed "server" and "client", "stranger" the client "other"."""
    folder = tmp_path_factory.mktemp("pki")

    def openssl(*args: str) -> None:
        try:
            subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("needs the openssl command")

    (folder / "san").write_text("subjectAltName=DNS:decode.test")
    for ca in ("ca", "stranger"):
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{ca}.key", "-out",
                f"{ca}.pem", "-days", "2", "-subj", f"/CN={ca}")  # fmt: skip
    for name, ca in (("server", "ca"), ("client", "ca"), ("other", "stranger")):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out",
                f"{name}.csr", "-subj", f"/CN={name}")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key",
                "-CAcreateserial", "-out", f"{name}.pem", "-days", "2",
                "-extfile", "san")  # fmt: skip
    return lambda name: (folder / name).read_bytes()


def test_tls_and_mutual_tls(
    pki: Any, prefill: Side, decode: Side, receiver: KvReceiver, serve: Any, connect: Any
) -> None:
    name = {"server_name": "decode.test"}
    trusting = ClientTls(pki("ca.pem"), **name)
    known = ClientTls(pki("ca.pem"), pki("client.pem"), pki("client.key"), **name)
    other = ClientTls(pki("ca.pem"), pki("other.pem"), pki("other.key"), **name)
    fooled = ClientTls(pki("stranger.pem"), **name)
    elsewhere = ClientTls(pki("ca.pem"), server_name="elsewhere.test")
    cases = [
        (None, [trusting, known], [fooled, elsewhere, None]),
        (pki("ca.pem"), [known], [trusting, other, None]),
    ]
    for client_ca, good, bad in cases:
        tls = ServerTls(pki("server.pem"), pki("server.key"), client_ca)
        server = serve(receiver, tls=tls)
        for client_tls in good:
            client = connect(server.address, tls=client_tls)
            assert client.push(prefill.prefill(NINE)).n_blocks == 3
        for client_tls in bad:
            client = connect(server.address, tls=client_tls, settings=QUICK)
            with unchanged(decode), pytest.raises(TransferRefused) as caught:
                client.push(prefill.prefill(NINE))
            assert caught.value.code == "UNAVAILABLE"


# ---- beside the protocol ------------------------------------------------------------------------


def test_health_is_served_to_anybody(receiver: KvReceiver, serve: Any) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    server = serve(receiver, token="secret")
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "tl.kv.v1.KvTransferService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="another"))
        assert caught.value.code().name == "NOT_FOUND"


def answer_with(handover: Handover, seq: kvpool.Sequence) -> Iterator[Answer]:
    """Echoes what it was given, and takes room as a decode step does."""
    yield Answer(handover.picked)
    seq.append(handover.picked[-1])
    yield Answer([seq.n_computed, handover.draws, handover.seed >> 32], "length")


def test_a_request_is_handed_over_with_its_tokens(
    prefill: Side, decode: Side, receiver: KvReceiver, serve: Any, connect: Any
) -> None:
    client = connect(serve(receiver, handover=answer_with).address)
    client.push(prefill.prefill(NINE), handle_id="a")
    request = Handover("a", NINE, picked=[5, 6], seed=2**64 - 1, draws=2, temperature=0.8)
    with unchanged(prefill):
        answers = list(client.hand_over(request))
    assert answers == [Answer([5, 6]), Answer([9, 2, 2**32 - 1], "length")]
    eventually(lambda: decode.pool.stats.used == 0)
    for wrong, code in (
        (request, "NOT_FOUND"),
        (Handover("a", [], picked=[1]), "INVALID_ARGUMENT"),
        (Handover("a", NINE, temperature=-1.0), "INVALID_ARGUMENT"),
        (Handover("a", NINE, temperature=float("nan")), "INVALID_ARGUMENT"),
        (Handover("a", NINE, picked=[1, 2], max_tokens=1), "INVALID_ARGUMENT"),
    ):
        with pytest.raises(TransferRefused) as caught:
            list(client.hand_over(wrong))
        assert caught.value.code == code
    client.push(prefill.prefill(NINE), handle_id="b")
    with pytest.raises(TransferRefused) as caught:
        list(client.hand_over(Handover("b", NINE, namespace=3, picked=[1])))
    assert caught.value.code == "DATA_LOSS"


def test_nobody_generates_where_no_engine_is(
    receiver: KvReceiver, serve: Any, connect: Any
) -> None:
    with pytest.raises(TransferRefused) as caught:
        list(connect(serve(receiver).address).hand_over(Handover("a", NINE)))
    assert caught.value.code == "UNIMPLEMENTED"


def test_the_metrics_of_both_sides(
    prefill: Side, decode: Side, receiver: KvReceiver, serve: Any, connect: Any
) -> None:
    prometheus = pytest.importorskip("prometheus_client", reason="needs kvpool[metrics]")
    from kvpool.metrics import TransferCollector

    registry = prometheus.CollectorRegistry()
    decode.cache(NINE[:4])
    client = connect(serve(receiver).address)
    TransferCollector(sender=client, receiver=receiver, registry=registry)
    client.push(prefill.prefill(NINE), handle_id="a")

    def sample(name: str, **labels: str) -> Any:
        return registry.get_sample_value(name, labels)

    for direction in ("sent", "received"):
        assert sample("tl_kv_transfer_bytes_total", direction=direction) == 344
    assert sample("tl_kv_transfer_blocks_total", outcome="sent") == 2
    assert sample("tl_kv_transfer_blocks_total", outcome="deduped") == 1
    assert sample("tl_kv_transfer_pushes_total", side="decode", result="complete") == 1
    assert sample("tl_kv_transfer_held_blocks") == 3
    assert sample("tl_kv_transfer_handles", state="pending") == 1
    receiver.release("a")
    assert sample("tl_kv_transfer_held_blocks") == 0


def test_logs_name_the_handle(
    prefill: Side, receiver: KvReceiver, make_server: Any, make_client: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with caplog.at_level(logging.INFO, "kvpool.transfer"):
        make_client(make_server(receiver).address).push(
            prefill.prefill(NINE), handle_id="my-handle"
        )
        receiver.claim("my-handle", NINE).free()
    told = [r for r in caplog.records if getattr(r, "handle_id", None) == "my-handle"]
    assert [r.getMessage().split()[0] for r in told] == ["complete", "claimed"]
    assert told[0].kv_received == 3
    assert "secret" not in caplog.text
