"""The faults of the matrix, each of which any tier must bear: ``FAULTS[name](backend)``.

A backend is a store for one test. What happens to a tier, an engine's answers stay right
(``Engine.answer`` holds every hit against what it must be), its calls stay short, the fault is told
in the stats, and when it is over blocks are found again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tier_servers import Process, SeaweedFs, start_valkey
from tier_support import Engine

from kvpool.tiers import Key, MemoryTier, Tier, TierStack, TierStats, open_tier

PROMPT = list(range(1, 19))  # 4 full blocks and 2 tokens
OTHER = [token + 1000 for token in PROMPT]


class Wrapped(Tier):
    """A real tier, and what is done before each of its gets and puts."""

    def __init__(self, inner: Tier) -> None:
        self.inner, self.name = inner, inner.name
        self.before: Callable[[], None] = lambda: None

    def put(self, items: Sequence[Any]) -> list[bool]:
        self.before()
        return self.inner.put(items)

    def get(self, keys: Sequence[Key], out: Any = None) -> Any:
        self.before()
        return self.inner.get(keys, out)

    def has(self, keys: Sequence[Key]) -> list[bool]:
        return self.inner.has(keys)

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        return self.inner.delete(keys)

    def stats(self) -> TierStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()


class Backend:
    """A store. ``server`` is its process, if it has one."""

    server: Process | None = None
    outlives_a_restart = False
    evicts = False
    """Whether it forgets old blocks when it is full; else it refuses new ones."""

    def open(self) -> Tier:
        raise NotImplementedError

    @contextlib.contextmanager
    def full(self, tier: Tier) -> Iterator[None]:
        """There is no room in the store meanwhile."""
        raise NotImplementedError

    def close(self) -> None:
        if self.server is not None:
            self.server.kill()


class Memory(Backend):
    evicts = True

    def open(self) -> Tier:
        return MemoryTier(1 << 20)

    @contextlib.contextmanager
    def full(self, tier: Tier) -> Iterator[None]:
        record = bytes(tier.get(list(islice(tier.keys(), 1)))[0] or b"")
        for first in range(0, 6000, 50):  # more than it holds
            keys = [Key(bytes(16), 0, first + i, bytes(32)) for i in range(50)]
            assert all(tier.put([(key, record) for key in keys]))
        yield


class Disk(Memory):
    outlives_a_restart = True

    def __init__(self, folder: Path) -> None:
        self.path = folder / "slab"

    def open(self) -> Tier:
        return open_tier(f"disk:{self.path}?size=1MiB")


class Valkey(Backend):
    def __init__(self, kind: str, folder: Path) -> None:
        self.server = start_valkey(kind, folder)

    def open(self) -> Tier:
        assert self.server is not None
        return open_tier(f"valkey://127.0.0.1:{self.server.port}?timeout=20")

    @contextlib.contextmanager
    def full(self, tier: Tier) -> Iterator[None]:
        import redis

        assert self.server is not None
        client = redis.Redis(port=self.server.port)
        client.config_set("maxmemory", 1)
        yield
        client.config_set("maxmemory", 0)


class S3(Backend):
    """A place in a bucket. ``full`` is not asked of it: an object store has no end."""

    def __init__(self, server: SeaweedFs, prefix: str) -> None:
        self.server, self.prefix = server, prefix

    def open(self) -> Tier:
        assert self.server is not None
        endpoint = f"http://127.0.0.1:{self.server.port}"
        return open_tier(f"s3://blocks/{self.prefix}?endpoint={endpoint}&timeout=20")

    def close(self) -> None:
        assert self.server is not None
        if self.server.process.poll() is not None:
            self.server.start()  # the next test has it too


@contextlib.contextmanager
def engine_on(backend: Backend) -> Iterator[tuple[Engine, Wrapped]]:
    """An engine whose blocks of PROMPT are in the store and not in its pool any more."""
    tier = Wrapped(backend.open())
    stack = TierStack([tier], model="test", timeout_s=30, close_timeout_s=0.2)
    with Engine(stack, n_blocks=24) as engine:
        assert engine.answer(PROMPT) == 0
        engine.flush()
        engine.forget()
        assert engine.answer(PROMPT) == 16
        engine.forget()
        yield engine, tier
        engine.manager.check()


def recovers(engine: Engine, seconds: float = 20) -> None:
    """The fault is over: blocks are stored and found again."""
    engine.tiers.timeout_s = 30
    end = time.monotonic() + seconds
    while True:
        engine.tiers._levels[0]._blocked_until = 0.0  # it is asked again at once
        engine.forget()
        if engine.answer(PROMPT) == 16:
            return
        engine.tiers.flush(5)
        assert time.monotonic() < end, engine.stats
        time.sleep(0.1)


def goes_on(engine: Engine, *, within_s: float) -> None:
    """Answers come, and come soon, whatever the store does."""
    began = time.monotonic()
    for _ in range(3):
        engine.forget()
        engine.answer(PROMPT)
        engine.answer(OTHER)
    assert time.monotonic() - began < within_s


def missing(backend: Backend) -> None:
    with engine_on(backend) as (engine, tier):
        keys = engine.tiers.layout.keys(PROMPT)
        assert tier.delete(keys[:2]) == [True, True]
        misses = engine.stats.misses
        assert engine.answer(PROMPT) == 0
        assert engine.stats.misses > misses
        assert engine.stats.errors == 0
        recovers(engine)


def slow(backend: Backend) -> None:
    with engine_on(backend) as (engine, tier):
        engine.tiers.timeout_s = 0.05
        tier.before = lambda: time.sleep(0.3)
        assert engine.answer(PROMPT) == 0
        assert engine.stats.timeouts == 1
        goes_on(engine, within_s=5)
        tier.before = lambda: None
        recovers(engine)


def hanging(backend: Backend) -> None:
    with engine_on(backend) as (engine, tier):
        engine.tiers.timeout_s = 0.1
        let_go = threading.Event()
        if backend.server is None:
            tier.before = lambda: (let_go.wait(30), None)[1]
            stopped: Any = contextlib.nullcontext()
        else:
            stopped = backend.server.stopped()
        with stopped:
            assert engine.answer(PROMPT) == 0
            assert engine.stats.timeouts == 1
            assert not engine.stats.is_healthy
            goes_on(engine, within_s=5)
        let_go.set()
        recovers(engine, seconds=40)


def erroring(backend: Backend) -> None:
    with engine_on(backend) as (engine, tier):

        def fail() -> None:
            raise OSError("the cable is out")

        tier.before = fail
        assert engine.answer(PROMPT) == 0
        assert engine.stats.errors == 1
        assert "the cable is out" in engine.stats.last_error
        goes_on(engine, within_s=5)
        tier.before = lambda: None
        recovers(engine)


def killed(backend: Backend) -> None:
    """The server is killed; a store in this process is closed under the engine."""
    with engine_on(backend) as (engine, tier):
        engine.tiers.timeout_s = 0.5
        if backend.server is None:
            tier.close()
        else:
            backend.server.kill()
        assert engine.answer(PROMPT) == 0
        goes_on(engine, within_s=8)
        stats = engine.stats
        assert stats.errors + stats.timeouts + stats.misses > 0


def restarted(backend: Backend) -> None:
    """The server, or this process with its engine."""
    if backend.server is None:
        with engine_on(backend):
            pass
        tier = backend.open()
        with Engine(TierStack([tier], model="test", timeout_s=30)) as engine:
            assert engine.answer(PROMPT) == (16 if backend.outlives_a_restart else 0)
            engine.flush()
            recovers(engine)
        return
    with engine_on(backend) as (engine, _):
        backend.server.kill()
        backend.server.start()
        engine.tiers.timeout_s = 2
        goes_on(engine, within_s=15)
        recovers(engine)


def full(backend: Backend) -> None:
    with engine_on(backend) as (engine, tier):
        with backend.full(tier.inner):
            engine.answer(OTHER)
            engine.flush()
            stats = engine.stats
            assert stats.errors == 0
            if backend.evicts:
                assert stats.not_stored == 0
                assert engine.answer(PROMPT) == 0
            else:
                assert stats.not_stored >= 4
            goes_on(engine, within_s=60)
            engine.flush()
        recovers(engine)


def wrong_bytes(backend: Backend) -> None:
    with engine_on(backend) as (engine, tier):
        keys = engine.tiers.layout.keys(PROMPT)
        records = [bytes(record) for record in tier.get(keys)]
        for n, wrong in enumerate(
            (
                records[1],  # another block's
                records[0][:100] + bytes([records[0][100] ^ 1]) + records[0][101:],
                records[0][:-2],
            ),
            start=1,
        ):
            tier.delete(keys[:1])
            assert tier.put([(keys[0], wrong)]) == [True]
            engine.forget()
            assert engine.answer(PROMPT) == 0
            assert sum(engine.stats.refused.values()) == n
            engine.flush()
            recovers(engine)


FAULTS: dict[str, Callable[[Backend], None]] = {
    fault.__name__: fault
    for fault in (missing, slow, hanging, erroring, killed, restarted, full, wrong_bytes)
}
