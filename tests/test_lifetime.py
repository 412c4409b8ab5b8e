"""Nothing a user does can read freed memory: views outlive the pool, close() ends it."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import kvpool
from pool_support import MakePool

BIG = {"block_tokens": 16, "n_layers": 8, "n_kv_heads": 4, "head_dim": 64}  # 128 KiB a block


def test_a_view_outlives_its_pool() -> None:
    pool = kvpool.Pool(16, **BIG)
    view, slab = pool.block(3), pool.slab
    slab[:] = 1.0
    del pool
    gc.collect()
    view[:] = 2.0
    assert (slab[3] == 2.0).all()
    del slab
    gc.collect()
    assert (view == 2.0).all()


def test_a_view_of_a_view_is_enough() -> None:
    k = kvpool.Pool(16, **BIG).block(3)[2, 0]
    k[:] = 5.0
    raw = memoryview(k)
    del k
    gc.collect()
    assert bytes(raw) == np.full(raw.shape, 5.0, np.float16).tobytes()


def test_close_ends_the_pool_and_leaves_views_alone(make_pool: MakePool) -> None:
    pool = make_pool(16, **BIG)
    view = pool.block(3)
    view[:] = 4.0
    assert not pool.closed
    pool.close()
    pool.close()
    assert pool.closed
    assert (view == 4.0).all()
    view[:] = 6.0
    assert (view == 6.0).all()


CALLS: dict[str, Callable[[kvpool.Pool], object]] = {
    "alloc": lambda p: p.alloc(),
    "alloc_row": lambda p: p.alloc(2),
    "ref": lambda p: p.ref(0),
    "unref": lambda p: p.unref([0]),
    "refs": lambda p: p.refs(0),
    "cow": lambda p: p.cow(0),
    "cow_row": lambda p: p.cow([0]),
    "set_fill": lambda p: p.set_fill(0, 1),
    "fill": lambda p: p.fill(0),
    "register": lambda p: p.register(0, 1),
    "hash": lambda p: p.hash([0]),
    "lookup": lambda p: p.lookup(1),
    "lookup_row": lambda p: p.lookup([1]),
    "block": lambda p: p.block(0),
    "slab": lambda p: p.slab,
    "export": lambda p: p.export([0]),
    "export_bytes": lambda p: p.export_bytes(1),
    "export_into": lambda p: p.export_into([0], bytearray(99)),
    "export_iter": lambda p: p.export_iter([0]),
    "export_pieces": lambda p: p.export_pieces([0]),
    "import": lambda p: p.import_(b""),
    "check": lambda p: p.check(),
    "stats": lambda p: p.stats,
}


@pytest.mark.parametrize("call", CALLS)
def test_every_operation_says_that_the_pool_is_closed(pool: kvpool.Pool, call: str) -> None:
    pool.alloc()
    pool.close()
    with pytest.raises(kvpool.InvalidArgument, match="the pool is closed"):
        CALLS[call](pool)
    assert pool.n_blocks == 4


def test_the_list_of_operations_is_complete() -> None:
    public = {n for n in dir(kvpool.Pool) if not n.startswith("_")}
    attributes = {
        "block_bytes", "block_tokens", "close", "closed", "dtype", "format", "has_slab", "head_dim",
        "meta_bytes", "n_blocks", "n_kv_heads", "n_layers",
    }  # fmt: skip
    assert public - attributes == {n.removesuffix("_row") for n in CALLS} - {"import"} | {"import_"}


def test_with_closes_also_on_an_exception(pool: kvpool.Pool) -> None:
    with pool as same:
        assert same is pool
    assert pool.closed
    other = kvpool.Pool(1, n_layers=1, n_kv_heads=1, head_dim=1)
    with pytest.raises(ZeroDivisionError), other:
        1 / 0  # noqa: B018
    assert other.closed


def resident_bytes() -> int:
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_memory_is_given_back_with_the_last_share() -> None:
    """In a process of its own: a long-lived one has memory to spare, which a pool may be given."""
    resident_bytes()  # skips where it cannot be told
    code = """
import kvpool

def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

before = resident_bytes()
pool = kvpool.Pool(512, block_tokens=16, n_layers=8, n_kv_heads=4, head_dim=64, touch=True)
view = pool.block(0)
print(resident_bytes() - before)
pool.close()
print(resident_bytes() - before)
del view
print(resident_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made, closed, dropped = map(int, done.stdout.split())
    assert made > 60 << 20  # of 64 MiB
    assert closed > 60 << 20  # the view keeps it
    assert dropped < 16 << 20


@pytest.mark.parametrize("end", ["close", "del", "view last"])
def test_pools_do_not_leak(end: str) -> None:
    pool, view = kvpool.Pool(1, n_layers=1, n_kv_heads=1, head_dim=1), None
    gc.collect()
    before = resident_bytes()
    for _ in range(20):  # 64 MiB each
        pool = kvpool.Pool(512, touch=True, **BIG)
        view = pool.slab
        if end == "close":
            pool.close()
        elif end == "del":
            del view
        del pool
    view = None
    assert resident_bytes() - before < 128 << 20


def test_a_failed_init_leaks_nothing_and_leaves_no_pool() -> None:
    for _ in range(1000):
        with pytest.raises(kvpool.InvalidArgument):
            kvpool.Pool(0, **BIG)
    with pytest.raises(MemoryError, match="no memory for"):
        kvpool.Pool(2**31, block_tokens=2**10, n_layers=2**5, n_kv_heads=4, head_dim=64)
    with pytest.raises(kvpool.InvalidArgument, match="overflows"):
        kvpool.Pool(2**32 - 1, 2**32 - 1, n_layers=2**32 - 1, n_kv_heads=1, head_dim=1)


@pytest.mark.filterwarnings("ignore:nanobind:RuntimeWarning")
def test_a_second_init_is_refused(pool: kvpool.Pool) -> None:
    block = pool.alloc()
    with pytest.raises(TypeError):
        pool.__init__(4, n_layers=1, n_kv_heads=1, head_dim=1)
    assert pool.refs(block) == 1


@pytest.mark.filterwarnings("ignore:nanobind:RuntimeWarning")
def test_a_pool_that_was_never_initialised_is_refused() -> None:
    with pytest.raises(TypeError):
        kvpool.Pool.__new__(kvpool.Pool).alloc()

    class Lazy(kvpool.Pool):
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError):
        Lazy().alloc()


def test_weak_references_do_not_keep_a_pool() -> None:
    pool = kvpool.Pool(1, n_layers=1, n_kv_heads=1, head_dim=1)
    ref, view = weakref.ref(pool), pool.slab
    assert ref() is pool
    del pool
    gc.collect()
    assert ref() is None  # a view keeps the memory, not the pool
    view[:] = 1


def test_calls_do_not_leak_objects(pool: kvpool.Pool) -> None:
    block = pool.alloc()
    pool.set_fill(block, 2)
    pool.register(block, 7)
    envelope = pool.export([block])

    def everything() -> None:
        pool.unref(pool.alloc(2))
        pool.unref([pool.lookup(7), *pool.lookup([7, 8])[:1]])
        pool.block(block).sum()
        pool.slab.sum()
        pool.unref(pool.import_(envelope))
        pool.hash([0, 1])
        assert pool.stats.used == 1
        kvpool.block_hashes(range(10), 2)
        for bad in (None, [1.0], np.zeros((2, 2), int), [2**40], "x", b"x"):
            with pytest.raises(kvpool.InvalidArgument):
                pool.ref(bad)

    everything()
    gc.collect()
    watched = [pool, np.dtype(np.float16), np.dtype(np.uint32), kvpool.Stats, 7, None]
    counts = [sys.getrefcount(o) for o in watched]
    blocks = sys.getallocatedblocks()
    for _ in range(200):
        everything()
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 100
    assert all(abs(sys.getrefcount(o) - n) < 100 for o, n in zip(watched, counts, strict=True))
