"""One manager, many threads: every call whole, the books right at the end, no deadlock."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest

import kvpool

N_THREADS = 8
B = 4
SHAPE = {"block_tokens": B, "n_layers": 1, "n_kv_heads": 2, "head_dim": 8}


def run_threads(work: Callable[[int], None], n: int = N_THREADS) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(n)

    def body(i: int) -> None:
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(n)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
            assert not thread.is_alive(), "deadlock"
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def test_eight_threads_on_one_manager() -> None:
    """Each request's K is its own; whoever hits a block must find the K of the same prefix."""
    pool = kvpool.Pool(160, **SHAPE)
    mgr = kvpool.BlockManager(pool, events=True)
    index: set[int] = set()
    lock = threading.Lock()
    refused = [0] * N_THREADS

    def k_of(tokens: np.ndarray) -> np.ndarray:
        """One value a position that depends on everything before it."""
        return (np.cumsum(tokens * np.arange(1, len(tokens) + 1)) % 1000).astype(np.float16)

    def work(me: int) -> None:
        rng = random.Random(me)
        slab = pool.slab  # (blocks, layers, 2, heads, B, head_dim)
        for step in range(250):
            tokens = np.array([rng.randrange(2) for _ in range(rng.randrange(1, 24))], np.uint32)
            try:
                seq = mgr.allocate(tokens)
            except kvpool.PoolFull:
                refused[me] += 1
                continue
            k = k_of(tokens)
            blocks = seq.blocks
            for i in range(len(tokens)):
                at = (blocks[i // B], 0, 0, 0, i % B, 0)
                if i < seq.n_cached:
                    assert slab[at] == k[i]
                else:
                    slab[at] = k[i]
            seq.commit()
            child = seq.fork() if step % 3 == 0 else None
            try:
                if child is not None and step % 2:
                    mgr.append([seq, child], [1, 0])
                    assert seq.tokens.tolist() == [*tokens, 1]
                    seq.truncate(len(tokens))
                elif step % 5 == 0:
                    seq.append([1] * 5)
            except kvpool.PoolFull:
                refused[me] += 1
            if step % 7 == 0:
                seq.export()
            if step % 50 == me:
                mgr.check()
                mgr.reset() if me == 3 else None
            if me == 0:
                with lock:
                    replay(mgr, index)
            mgr.free([seq] if child is None else [child, seq])

    run_threads(work)
    mgr.check()
    replay(mgr, index)
    assert pool.stats.used == 0
    assert mgr.stats.n_seqs == 0
    assert mgr.stats.n_findable == len(index) == pool.stats.cached
    assert {h for h in pool.hash(range(160)).tolist() if h} == index


def replay(mgr: kvpool.BlockManager, index: set[int]) -> None:
    for event in mgr.drain_events():
        if event.type == kvpool.EventType.STORED:
            assert event.hash not in index
            index.add(event.hash)
        elif event.type == kvpool.EventType.REMOVED:
            index.remove(event.hash)
        else:
            index.clear()


def test_a_sequence_is_freed_once() -> None:
    pool = kvpool.Pool(16, **SHAPE)
    mgr = kvpool.BlockManager(pool)
    for _ in range(100):
        seq = mgr.allocate(range(9))
        freed = [0] * N_THREADS

        def work(me: int, seq: kvpool.Sequence = seq, freed: list[int] = freed) -> None:
            try:
                mgr.free([seq]) if me % 2 else seq.free()
                freed[me] = 1
            except kvpool.InvalidArgument as error:
                assert "freed" in str(error) or "twice" in str(error)

        run_threads(work, 4)
        assert sum(freed) == 1
        assert pool.stats.used == 0


def test_close_while_others_work() -> None:
    for i in range(20):
        pool = kvpool.Pool(64, **SHAPE)
        mgr = kvpool.BlockManager(pool)

        def work(
            me: int,
            pool: kvpool.Pool = pool,
            mgr: kvpool.BlockManager = mgr,
            closes: bool = i % 2 == 0,
        ) -> None:
            try:
                if me == 0:
                    time.sleep(0.002)
                    pool.close() if closes else mgr.close()
                    return
                while True:
                    seq = mgr.allocate(range(9))
                    seq.append(1)
                    mgr.commit([seq])
                    mgr.block_tables([seq])
                    seq.export()
                    seq.free()
            except kvpool.InvalidArgument as error:
                assert "closed" in str(error)

        run_threads(work, 4)
        assert mgr.closed


def test_sequences_are_collected_while_others_work() -> None:
    pool = kvpool.Pool(256, **SHAPE)
    mgr = kvpool.BlockManager(pool)

    def work(me: int) -> None:
        for i in range(150):
            try:
                cycle: list[object] = [mgr.allocate(range(me, me + 9))]
            except kvpool.PoolFull:  # a collection that is under way elsewhere takes its time
                continue
            cycle.append(cycle)
            del cycle
            if i % 10 == 0:
                gc.collect()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        run_threads(work)
        gc.collect()
    assert pool.stats.used == 0
    mgr.check()


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="there is no GIL to release"
)
@pytest.mark.parametrize("name", ["allocate", "export", "import_sequence", "copy"])
def test_long_work_releases_the_gil(name: str) -> None:
    """A thread that only counts runs while the call does: with the GIL kept it could not."""
    pool = kvpool.Pool(1200, block_tokens=1024, n_layers=4, n_kv_heads=4, head_dim=16)  # 1 MiB
    mgr = kvpool.BlockManager(pool)
    tokens = np.zeros(200 * 1024 + 1, np.uint32)
    seq = mgr.allocate(tokens)
    seq.truncate(len(tokens) - 1)
    seq.append(1)
    seq.commit()
    envelope = seq.export()
    kept = seq.tokens
    forks = [seq.fork() for _ in range(100)]

    def copy() -> None:
        mgr.append(forks, [1] * len(forks))
        for fork in forks:
            fork.truncate(len(tokens))

    calls: dict[str, Callable[[], object]] = {
        "allocate": lambda: [mgr.allocate(tokens).free() for _ in range(20)],
        "export": seq.export,
        "import_sequence": lambda: mgr.import_sequence(envelope, kept).free(),
        "copy": copy,
    }
    ticks = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(1e-4)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    thread = threading.Thread(target=count, daemon=True)
    try:
        thread.start()
        progress = []
        for _ in range(5):
            before = ticks[0]
            calls[name]()
            progress.append(ticks[0] - before)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join(timeout=60)
    assert max(progress) > 1, progress
    mgr.free([seq, *forks])
    mgr.check()


def test_an_envelope_may_change_while_its_import_waits() -> None:
    """The count in the header is small when import_sequence starts, and grows before it is done."""
    code = """
import struct, threading, time
import numpy as np, kvpool

pool = kvpool.Pool(8192, block_tokens=16, n_layers=4, n_kv_heads=1, head_dim=64)  # 128 MiB
mgr = kvpool.BlockManager(pool)
ids = pool.alloc(2000)
pool.set_fill(ids, 16)
envelope = bytearray(pool.export(ids))
pool.unref(ids)
busy = pool.alloc(6000)
pool.set_fill(busy, 16)
out = bytearray(pool.export_bytes(6000))
refused = []
tokens = np.zeros(1999 * 16, np.uint32)  # one block less: whoever trusts the first count loses it
for first in [1, 0, 2**32 - 1] * 4:
    struct.pack_into("<I", envelope, 8, first)

    def imports():
        try:
            mgr.import_sequence(envelope, tokens).free()
        except kvpool.CorruptEnvelope:
            refused.append(first)
        [bytearray(n) for n in range(32, 1 << 17, 97)]  # a broken heap is found here

    threads = [threading.Thread(target=pool.export_into, args=(busy, out)),
               threading.Thread(target=imports)]
    for thread in threads:
        thread.start()
        time.sleep(0.002)
    struct.pack_into("<I", envelope, 8, 2000)
    for thread in threads:
        thread.join()
    mgr.check()
    assert pool.stats.used == 6000, pool.stats
assert len(refused) == 12
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
