"""Blocks in Valkey and Redis: real servers, cut connections, kills, full memory, planted values."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_servers import Process, Proxy, free_port, start_valkey
from tier_support import Engine

import kvpool
from kvpool.tiers import Layout, TierStack, open_tier

redis = pytest.importorskip("redis", reason="redis is not installed")

PROMPT = list(range(1, 19))  # 4 full blocks and 2 tokens
LAYOUT = Layout(16, n_layers=1, n_kv_heads=1, head_dim=8)
KEYS = LAYOUT.keys(range(160))


@pytest.fixture(scope="module", params=["redis", "valkey"])
def running(request: Any, tmp_path_factory: Any) -> Iterator[Process]:
    server = start_valkey(request.param, tmp_path_factory.mktemp(request.param))
    server.kind = request.param  # type: ignore[attr-defined]
    yield server
    server.kill()


@pytest.fixture
def server(running: Process) -> Process:
    """A server with nothing in it, as it is by default."""
    if running.process.poll() is not None:
        running.start()
    client = redis.Redis(port=running.port)
    client.flushall()
    client.config_set("maxmemory", 0)
    client.config_set("maxmemory-policy", "noeviction")
    client.close()
    return running


def url(port: int, options: str = "") -> str:
    return f"valkey://127.0.0.1:{port}{options}"


# ---- what it does --------------------------------------------------------------------------------


def test_put_get_has_delete_and_keys(server: Process) -> None:
    with open_tier(url(server.port)) as tier:
        items = [(key, bytes([i]) * (100 + 20_000 * i)) for i, key in enumerate(KEYS[:4])]
        assert tier.put(items) == [True] * 4
        out = [memoryview(bytearray(len(data))) for _, data in items]
        assert tier.get([*KEYS[:5]], [*out, out[0]]) == [*(data for _, data in items), None]
        assert tier.get(KEYS[3:5]) == [items[3][1], None]
        assert tier.has(KEYS[2:6]) == [True, True, False, False]
        assert set(tier.keys()) == set(KEYS[:4])
        assert tier.delete(KEYS[3:5]) == [True, False]
        assert tier.get(KEYS[3:4]) == [None]
        assert tier.put([]) == tier.get([]) == tier.has([]) == tier.delete([]) == []
        assert tier.stats().size_bytes is not None
        assert tier.name == f"valkey:127.0.0.1:{server.port}"
    tier.close()
    redis.Redis(port=server.port).set("tlkv1-nonsense", b"x")
    with open_tier(url(server.port)) as tier:
        assert len(list(tier.keys())) == 3


def test_what_is_there_already_is_not_sent_again(server: Process) -> None:
    with open_tier(url(server.port)) as one, open_tier(url(server.port)) as other:
        one.put([(KEYS[0], b"a" * 1000), (KEYS[1], b"b" * 1000)])
        client = redis.Redis(port=server.port)
        sets = client.info("commandstats")["cmdstat_set"]["calls"]
        assert other.put([(key, b"x" * 1000) for key in KEYS[:3]]) == [True] * 3
        assert client.info("commandstats")["cmdstat_set"]["calls"] == sets + 1
        assert other.stats().counts["present"] == 2
        assert other.put([(KEYS[0], b"of another length")]) == [True]
        assert one.get(KEYS[:1]) == [b"of another length"]


def test_what_one_engine_computed_another_one_finds(server: Process) -> None:
    with Engine([url(server.port)]) as first:
        assert first.answer(PROMPT) == 0
        first.flush()
        assert first.stats.stored == 4
    with Engine([url(server.port)]) as second:
        assert second.answer(PROMPT) == 16
        assert second.stats.hits == 4
        second.close()


def test_a_prefix_of_keys_keeps_two_users_of_a_server_apart(server: Process) -> None:
    with open_tier(url(server.port, "?prefix=a:")) as a, open_tier(url(server.port)) as b:
        a.put([(KEYS[0], b"of a")])
        assert b.get(KEYS[:1]) == [None]
        assert list(b.keys()) == []
        assert list(a.keys()) == KEYS[:1]
    with open_tier(url(server.port, "/3")) as c:
        assert c.get(KEYS[:1]) == [None]


def test_a_ttl_counts_from_the_last_use(server: Process) -> None:
    client = redis.Redis(port=server.port)
    with open_tier(url(server.port, "?ttl=100")) as tier:
        tier.put([(key, b"x" * 50) for key in KEYS[:3]])
        names = [key.text for key in KEYS[:3]]
        for name in names:
            assert 99_000 < client.pttl(name) <= 100_000
            client.pexpire(name, 5000)
        tier.get(KEYS[:1])
        tier.put([(KEYS[1], b"y" * 50)])  # it is there: only its time is renewed
        assert [client.pttl(name) > 90_000 for name in names] == [True, True, False]
        client.pexpire(names[2], 1)
        time.sleep(0.02)
        assert tier.get(KEYS[:3]) == [b"x" * 50, b"x" * 50, None]


# ---- memory that is full -------------------------------------------------------------------------


def test_noeviction_refuses_and_the_engine_goes_on(server: Process) -> None:
    client = redis.Redis(port=server.port)
    with Engine([url(server.port)]) as engine:
        engine.answer(PROMPT)
        engine.flush()
        client.config_set("maxmemory", 1)
        other = [token + 1000 for token in PROMPT]
        engine.answer(other)
        engine.flush()
        assert (engine.stats.stored, engine.stats.not_stored, engine.stats.errors) == (4, 4, 0)
        assert engine.stats.tier.counts["full"] == 4
        engine.forget()
        assert engine.answer(PROMPT) == 16  # reading works on
        engine.forget()
        assert engine.answer(other) == 0
        engine.flush()
        client.config_set("maxmemory", 0)
        engine.answer([token + 2000 for token in PROMPT])
        engine.flush()
        assert engine.stats.stored == 8
        engine.close()


def test_noeviction_keeps_the_beginning_of_a_prefix(server: Process) -> None:
    client = redis.Redis(port=server.port)
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used + (4 << 20))
    with open_tier(url(server.port)) as tier:
        held = tier.put([(key, bytes(1 << 20)) for key in KEYS])
    n = sum(held)
    assert 0 < n < 5
    assert held == [True] * n + [False] * (len(KEYS) - n)


def test_allkeys_lru_forgets_and_the_engine_goes_on(server: Process) -> None:
    client = redis.Redis(port=server.port)
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (3 << 20))
    with Engine([url(server.port)]) as engine, open_tier(url(server.port)) as ballast:
        engine.answer(PROMPT)
        engine.flush()
        for i in range(0, 10, 2):
            assert ballast.put([(key, bytes(1 << 20)) for key in KEYS[i : i + 2]]) == [True, True]
        assert sum(ballast.has(KEYS)) < 10
        for _ in range(3):
            engine.forget()
            engine.answer(PROMPT)  # whatever was forgotten, what is found is right
            engine.flush()
        assert engine.stats.errors == 0
        assert client.info("stats")["evicted_keys"] >= 7
        engine.close()


# ---- values that are wrong -----------------------------------------------------------------------


def wrong_values(records: list[bytes]) -> dict[str, Any]:
    record = records[0]
    return {
        "another block": records[1],
        "cut short": record[:-1],
        "a flipped bit": record[:200] + bytes([record[200] ^ 4]) + record[201:],
        "longer": record + b"\0",
        "much longer": record + bytes(32 << 20),
        "another type": ["a", "list"],
        "empty": b"",
        "zeros": bytes(len(record)),
    }


@pytest.mark.parametrize("what", list(wrong_values([bytes(400)] * 2)))
def test_a_planted_value_is_a_counted_miss_and_is_written_anew(server: Process, what: str) -> None:
    client = redis.Redis(port=server.port)
    with Engine([url(server.port)]) as engine:
        engine.answer(PROMPT)
        engine.flush()
        names = [key.text for key in engine.tiers.layout.keys(PROMPT)]
        before = [client.get(name) for name in names]
        value = wrong_values(before)[what]  # type: ignore[arg-type]
        client.delete(names[0])
        if isinstance(value, list):
            client.rpush(names[0], *value)
        else:
            client.set(names[0], value)
        received = client.info("stats")["total_net_output_bytes"]
        engine.forget()
        assert engine.answer(PROMPT) == 0  # Engine.answer holds every hit against what it must be
        # what the sockets had room for, and no more
        assert client.info("stats")["total_net_output_bytes"] - received < 16 << 20
        refused, foreign = sum(engine.stats.refused.values()), engine.stats.tier.counts["foreign"]
        assert (refused, foreign) == {"another type": (0, 1), "empty": (0, 0)}.get(what, (1, 0))
        engine.flush()
        engine.answer([0] * 5)  # what was refused has been deleted by now, or replaced
        engine.forget()
        engine.answer(PROMPT)
        engine.flush()
        assert client.get(names[0]) == before[0]
        engine.forget()
        assert engine.answer(PROMPT) == 16
        engine.close()


# ---- connections and servers that end ------------------------------------------------------------


def test_a_connection_cut_in_a_reply_is_opened_again(server: Process) -> None:
    proxy = Proxy(server.port)
    try:
        with open_tier(url(proxy.port)) as tier:
            items = [(key, bytes([i]) * 50_000) for i, key in enumerate(KEYS)]
            assert tier.put(items) == [True] * 10
            for cut in (0, 1, 7, 30_000, 123_456, 499_000):
                proxy.cut_after, before = cut, proxy.n_cuts
                assert tier.get(KEYS) == [data for _, data in items]
                assert proxy.n_cuts == before + 1
            assert tier.delete(KEYS[:5]) == [True] * 5
            proxy.cut_after = 2
            assert tier.put(items) == [True] * 10
    finally:
        proxy.close()


def test_a_server_that_is_killed_and_restarted_under_load_changes_no_answer(
    server: Process,
) -> None:
    stop, failures, n_answers = threading.Event(), [], 0
    with Engine(TierStack([url(server.port)], model="m", timeout_s=0.5), n_blocks=64) as engine:
        [level] = engine.tiers._levels
        level._backoff_s = 0.05

        def load(seed: int) -> None:
            nonlocal n_answers
            r = np.random.default_rng(seed)
            try:
                while not stop.is_set():
                    first = int(r.integers(8)) * 100
                    engine.answer(range(first, first + 18))
                    n_answers += 1
                    if r.integers(4) == 0:
                        engine.manager.evict(range(64))
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=load, args=(seed,)) for seed in range(2)]
        for thread in workers:
            thread.start()
        for _ in range(2):
            time.sleep(0.3)
            server.kill()
            time.sleep(0.2)
            before = n_answers
            time.sleep(0.3)
            assert n_answers > before  # it goes on without
            server.start()
        stop.set()
        for thread in workers:
            thread.join()
        assert failures == []
        assert engine.stats.hits > 0
        assert engine.stats.errors > 0
        level._blocked_until = 0.0
        engine.forget()
        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        assert engine.answer(PROMPT) == 16
        engine.close()


def test_a_server_that_hangs_costs_a_deadline_and_closing_does_not_wait(server: Process) -> None:
    engine = Engine([url(server.port, "?timeout=20")], close_timeout_s=0.1)
    engine.answer(PROMPT)
    engine.flush()
    engine.forget()
    engine.tiers.timeout_s = 0.1
    with server.stopped():
        assert engine.answer(PROMPT) == 0
        assert engine.stats.timeouts == 1
        assert not engine.stats.is_healthy
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 5
    with open_tier(url(server.port, "?timeout=0.2")) as tier:
        with server.stopped(), pytest.raises(kvpool.TransferError, match=r"get: \w*[tT]ime"):
            tier.get(KEYS)
        assert tier.get(KEYS[:1]) == [None]


def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(kvpool.TransferError, match=r"valkey:127.0.0.1:\d+: open: Connection"):
        open_tier(url(free_port()))


# ---- who may, and over what ----------------------------------------------------------------------


def test_an_acl_user_with_no_more_than_it_needs(server: Process, tmp_path: Path) -> None:
    client = redis.Redis(port=server.port)
    rights = "~kv:* +get +strlen +exists +set +unlink +pexpire +info +scan"
    client.execute_command("ACL", "SETUSER", "engine", "on", ">sec:ret/1", *rights.split())
    where = f"@127.0.0.1:{server.port}/?prefix=kv:&ttl=60"
    (tmp_path / "password").write_text("sec:ret/1\n")
    with open_tier(f"valkey://engine:sec%3Aret%2F1{where}") as tier:
        assert tier.put([(KEYS[0], b"x" * 100)]) == [True]
        assert tier.get(KEYS[:1]) == [b"x" * 100]
        assert tier.has(KEYS[:1]) == [True]
        assert list(tier.keys()) == KEYS[:1]
        assert tier.delete(KEYS[:1]) == [True]
        assert "sec" not in repr(tier) + tier.name
    with open_tier(f"valkey://engine{where}&password_file={tmp_path}/password") as tier:
        assert tier.has(KEYS[:1]) == [False]
    with pytest.raises(kvpool.TransferError, match="Authentication") as caught:
        open_tier(f"valkey://engine:wr0ng{where}")
    assert "wr0ng" not in str(caught.value)
    client.execute_command("ACL", "SETUSER", "engine", "-set", "-get", "-info")
    with open_tier(f"valkey://engine:sec%3Aret%2F1{where}") as tier:
        with pytest.raises(kvpool.TransferError, match="put: NoPermission"):
            tier.put([(KEYS[0], b"x")])
        with pytest.raises(kvpool.TransferError, match="get: ReplyError: NOPERM"):
            tier.get(KEYS[:1])
    client.execute_command("ACL", "DELUSER", "engine")


def test_tls(server: Process, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates, and is not installed")
    make = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -keyout k.pem "
        "-out c.pem -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(["openssl", *make.split()], cwd=tmp_path, check=True, capture_output=True)
    port = free_port()
    files = [str(tmp_path / name) for name in ("c.pem", "k.pem")]
    try:
        secure = start_valkey(
            server.kind, tmp_path / "tls", "--port", "0", "--tls-port", str(port),  # type: ignore[attr-defined]
            "--tls-cert-file", files[0], "--tls-key-file", files[1],
            "--tls-ca-cert-file", files[0], port=port,
        )  # fmt: skip
    except RuntimeError as error:
        if "TLS" not in str(error) and "tls-port" not in str(error):
            raise
        pytest.skip(f"this {server.kind}-server is built without TLS")  # type: ignore[attr-defined]
    try:
        where = f"://127.0.0.1:{port}?cert={files[0]}&key={files[1]}"
        with open_tier(f"rediss{where}&ca={files[0]}") as tier:
            data = bytes(range(256)) * 500
            assert tier.put([(KEYS[0], data)]) == [True]
            assert tier.get(KEYS[:1]) == [data]
        with pytest.raises(kvpool.TransferError, match="certificate"):
            open_tier(f"valkeys{where}")
        with open_tier(f"valkeys{where}&verify=no") as tier:
            assert tier.has(KEYS[:1]) == [True]
        with pytest.raises(kvpool.TransferError):
            open_tier(url(port))
    finally:
        secure.kill()


def test_a_cluster_and_one_of_its_nodes_killed(server: Process, tmp_path: Path) -> None:
    kind = server.kind  # type: ignore[attr-defined]
    options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
    nodes: list[Process] = []
    try:
        for i in range(3):
            bus = ("--cluster-port", str(free_port()))
            nodes.append(start_valkey(kind, tmp_path / str(i), *options, *bus))
        clients = [redis.Redis(port=node.port) for node in nodes]
        for i, client in enumerate(clients):
            slots = (i * 5462, min((i + 1) * 5462, 16384) - 1)
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
            bus_port = nodes[0].command[-1]
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, bus_port)
        end = time.monotonic() + 20
        while not all(
            client.cluster("info")["cluster_state"] == "ok"
            and client.cluster("info")["cluster_known_nodes"] == "3"
            and client.cluster("info")["cluster_slots_assigned"] == "16384"
            for client in clients
        ):
            assert time.monotonic() < end
            time.sleep(0.05)
        seeds = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        with pytest.raises(kvpool.InvalidArgument, match="say cluster=yes"):
            open_tier(url(nodes[0].port))
        many = LAYOUT.keys(range(640))
        with open_tier(f"valkey://{seeds}?cluster=yes&ttl=100") as tier:
            items = [(key, key.digest * 1000) for key in many]
            assert tier.put(items) == [True] * 40
            assert tier.get(many) == [data for _, data in items]
            assert set(tier.keys()) == set(many)
            assert tier.has(many) == [True] * 40
            assert all(client.dbsize() > 0 for client in clients)
            assert tier.delete(many[:20]) == [True] * 20
        with Engine(TierStack([f"valkey://{seeds}?cluster=yes"], timeout_s=5)) as engine:
            engine.answer(PROMPT)
            engine.flush()
            engine.forget()
            assert engine.answer(PROMPT) == 16
            nodes[1].kill()
            [level] = engine.tiers._levels
            for first in range(100, 400, 100):
                level._blocked_until = 0.0
                engine.answer(range(first, first + 18))
                engine.flush()
            assert engine.stats.errors > 0
            assert engine.stats.last_error
            nodes[1].start()
            end = time.monotonic() + 20
            while not all(
                info["cluster_slots_ok"] == "16384" and info["cluster_state"] == "ok"
                for info in (client.cluster("info") for client in clients)
            ):  # a primary that comes back waits for two seconds
                assert time.monotonic() < end
                time.sleep(0.05)
            level._blocked_until = 0.0
            engine.forget()
            engine.answer(PROMPT)
            engine.flush()
            engine.forget()
            assert engine.answer(PROMPT) == 16
            engine.close()
    finally:
        for node in nodes:
            node.kill()


def test_wrong_urls_name_what_is_wrong(tmp_path: Path) -> None:
    for text, message in (
        ("valkey:", "expected //host:port or ///path"),
        ("valkey://a:b", "expected host:port, found 'a:b'"),
        ("valkey://a,b", "expected one, or a cluster"),
        ("valkey://a/x", "expected /database after the host"),
        ("valkey://a?ttl=soon", "ttl: expected seconds, found 'soon'"),
        ("valkey://a?ttl=-1", "ttl: expected 0.001 or more seconds"),
        ("valkey://a?timeout=0", "timeout: expected more than 0 seconds"),
        ("valkey://a?prefix=%7Bx%7D", "prefix: expected letters"),
        ("valkey://a/1?cluster=yes", "expected hosts and database 0"),
        ("valkey://a?ca=/x", "unknown option ca"),
        ("valkey://u:p@a?password_file=/x", "there is a password in the URL too"),
    ):
        with pytest.raises(kvpool.InvalidArgument, match=message):
            open_tier(text)


def test_over_a_unix_socket(server: Process, tmp_path: Path) -> None:
    at = str(tmp_path / "s")
    local = start_valkey(server.kind, tmp_path / "d", "--unixsocket", at)  # type: ignore[attr-defined]
    try:
        with open_tier(f"valkey://{at}") as tier:
            assert tier.put([(KEYS[0], b"x")]) == [True]
            assert tier.name == f"valkey:{at}"
    finally:
        local.kill()
