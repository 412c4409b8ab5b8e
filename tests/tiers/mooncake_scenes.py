"""Scenes for test_mooncake.py: each runs as the first process of namespaces of its own, so that the
ports are free and whatever is left over ends with it.

    mooncake_scenes.py SCENE      a scene or one of faults.py: starts a master, plays, exits 0 if
                                  everything held
    mooncake_scenes.py --peer     a second engine: {"answer": [tokens]} a line, n_cached a line
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mooncake
from faults import FAULTS, Backend
from tier_servers import Process
from tier_support import Engine

import kvpool
from kvpool.tiers import Key, Layout, Tier, TierStack, open_tier

PROMPT = list(range(1, 19))  # 4 full blocks and 2 tokens
KEYS = Layout(16, n_layers=1, n_kv_heads=1, head_dim=8).keys(range(64 * 16))
PORT = 50051
NO_PART = "segment=0"  # lends nothing


def url(options: str = "segment=32MiB") -> str:
    return f"mooncake://127.0.0.1:{PORT}?{options}"


def start_master(lease_ms: int = 200) -> Process:
    binary = Path(mooncake.__file__).with_name("mooncake_master")
    binary.chmod(0o755)
    options = {
        "rpc_port": PORT, "metrics_port": PORT + 1, "client_ttl": 2, "rpc_thread_num": 2,
        "default_kv_lease_ttl": lease_ms, "enable_metric_reporting": "false",
    }  # fmt: skip
    command = [str(binary), *(f"--{name}={value}" for name, value in options.items())]
    return Process(command, PORT, Path(tempfile.mkdtemp()))


class Peer:
    """A second engine, in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def answer(self, tokens: Sequence[int]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"answer": list(tokens)}).encode() + b"\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(b"n_cached "):
                return int(line.split()[1])
        raise AssertionError("the peer has ended")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def be_peer() -> None:
    with Engine(TierStack([url()], model="test", timeout_s=20)) as engine:
        for line in sys.stdin:
            engine.forget()
            n_cached = engine.answer(json.loads(line)["answer"])
            engine.flush()
            print("n_cached", n_cached, flush=True)


def wake(engine: Engine) -> None:
    """Its tier is asked again at once."""
    engine.tiers._levels[0]._blocked_until = 0.0


def works_again(engine: Engine, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while True:
        wake(engine)
        engine.forget()
        if engine.answer(PROMPT) == 16:
            return
        engine.flush()
        assert time.monotonic() < end, engine.stats
        time.sleep(0.2)


# ---- the scenes ----------------------------------------------------------------------------------


def what_the_store_does(master: Process) -> None:
    with open_tier(url()) as tier:
        data = bytes(range(256)) * 100
        assert tier.get(KEYS[:2]) == [None, None]
        assert tier.put([(key, data) for key in KEYS[:2]]) == [True, True]
        assert tier.put([(KEYS[0], b"other bytes")]) == [True]
        assert tier.get(KEYS[:3]) == [data, data, None]  # the old bytes were kept
        out = [memoryview(bytearray(len(data) + 5)) for _ in range(3)]
        assert tier.get(KEYS[:3], out) == [data, data, None]
        short = [memoryview(bytearray(10))]
        assert tier.get(KEYS[:1], short) == [b"?"]
        assert tier.has(KEYS[:3]) == [True, True, False]
        assert tier.delete(KEYS[:3]) == [True, True, False]  # leased by the gets, and yet
        assert tier.get(KEYS[:2]) == [None, None]
        many = [(key, os.urandom(300_000)) for key in KEYS]  # more than the staging memory
        assert tier.put(many) == [True] * 64
        assert tier.get(KEYS) == [record for _, record in many]
        large = os.urandom(9 << 20)
        assert tier.delete(KEYS[:1]) == [True]
        assert tier.put([(KEYS[0], large)]) == [True]
        assert tier.get(KEYS[:1]) == [large]
        assert tier.put([]) == tier.get([]) == tier.has([]) == tier.delete([]) == []
        with open_tier(url("segment=0&replicas=2")) as careful:
            tier.delete(KEYS[:1])
            assert careful.put([(KEYS[0], data)]) == [True]
            assert careful.stats().counts["under_replicated"] == 1
            assert careful.get(KEYS[:1]) == [data]
    tier.close()
    try:
        tier.get(KEYS)
    except kvpool.TransferError as error:
        assert "is closed" in str(error)
    else:
        raise AssertionError("a get after close")


def put_on_one_hit_from_the_other(master: Process) -> None:
    peer = Peer()
    assert peer.answer(PROMPT) == 0
    with Engine(TierStack([url(NO_PART)], model="test", timeout_s=20)) as engine:
        assert engine.answer(PROMPT) == 16
        assert engine.stats.hits == 4
        other = [token + 100 for token in PROMPT]
        assert engine.answer(other) == 0  # stored in the peer's memory: this one lends none
        engine.flush()
        assert engine.stats.stored == 4
        assert peer.answer(other) == 16
        engine.close()
    peer.kill()


def the_owner_is_killed(master: Process) -> None:
    peer = Peer()
    assert peer.answer(PROMPT) == 0
    with Engine(TierStack([url()], model="test", timeout_s=20)) as engine:
        assert engine.answer(PROMPT) == 16
        engine.forget()
        peer.kill()
        assert engine.answer(PROMPT) == 0  # a miss, though the store says that it has them
        works_again(engine)
        engine.close()


def the_master_hangs(master: Process) -> None:
    engine = Engine(TierStack([url()], model="test", timeout_s=0.3, close_timeout_s=0.1))
    engine.tiers.timeout_s = 20
    engine.answer(PROMPT)
    engine.flush()
    engine.forget()
    assert engine.answer(PROMPT) == 16
    engine.tiers.timeout_s = 0.3
    engine.forget()
    with master.stopped():
        began = time.monotonic()
        assert engine.answer(PROMPT) == 0
        assert engine.stats.timeouts == 1
        engine.close()
        assert time.monotonic() - began < 8


class Mooncake(Backend):
    """The engine lends memory of its own to a master."""

    def __init__(self, master: Process) -> None:
        self.server = master

    def open(self) -> Tier:
        return open_tier(url("segment=16MiB"))

    @contextlib.contextmanager
    def full(self, tier: Any) -> Iterator[None]:
        held: list[Key] = []
        tier._config.with_hard_pin = True  # so that it is not evicted
        for size in (1 << 20, 1 << 12, 200):  # until not even a record of the engine's fits
            for i in range(1 << 12):
                key = KEYS[0]._replace(hash=i, namespace=size)
                if tier.put([(key, bytes(size))]) == [False]:
                    break
                held.append(key)
        tier._config.with_hard_pin = False
        yield
        tier.delete(held)


SCENES = {
    scene.__name__: scene
    for scene in (
        what_the_store_does, put_on_one_hit_from_the_other, the_owner_is_killed, the_master_hangs
    )
}  # fmt: skip


def main() -> None:
    [what] = sys.argv[1:]
    if what == "--peer":
        be_peer()
        return
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    master = start_master()
    if what in FAULTS:
        FAULTS[what](Mooncake(master))
    else:
        SCENES[what](master)
    master.kill()
    print("scene held", flush=True)
    os._exit(0)  # threads of the store's that still wait for the master are not waited for


if __name__ == "__main__":
    main()
