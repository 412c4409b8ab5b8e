"""Managers, pools and sequences end in any order: nothing leaks, nothing freed is touched."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import kvpool

SHAPE = {"block_tokens": 4, "n_layers": 1, "n_kv_heads": 1, "head_dim": 1}


@pytest.fixture
def pool() -> Iterator[kvpool.Pool]:
    pool = kvpool.Pool(16, **SHAPE)
    yield pool
    if not pool.closed:
        pool.check()


@pytest.mark.parametrize(
    "order", [*itertools.permutations(["pool", "manager", "sequence", "view"])]
)
def test_dropped_in_any_order(order: tuple[str, ...]) -> None:
    alive = {"pool": kvpool.Pool(16, **SHAPE)}
    alive["manager"] = kvpool.BlockManager(alive["pool"])
    alive["sequence"] = alive["manager"].allocate(range(9))
    alive["view"] = alive["pool"].slab
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for name in order:
            del alive[name]
            gc.collect()
            if "sequence" in alive:
                alive["sequence"].append(1)
                assert alive["sequence"].n_blocks in (3, 4)
                assert not alive["sequence"].is_freed
            if "manager" in alive:
                alive["manager"].check()
                assert alive["manager"].pool.n_blocks == 16
            if "view" in alive:
                alive["view"][:] = 1.0
            if "pool" in alive:
                alive["pool"].check()
                if "sequence" not in alive:
                    assert alive["pool"].stats.used == 0


@pytest.mark.parametrize("order", [*itertools.permutations(["pool", "manager", "sequence"])])
def test_closed_in_any_order(order: tuple[str, ...]) -> None:
    pool = kvpool.Pool(16, **SHAPE)
    mgr = kvpool.BlockManager(pool)
    seq, other = mgr.allocate(range(9)), mgr.allocate([1])
    for name in order:
        if name == "pool":
            pool.close()
        elif name == "manager":
            mgr.close()
        elif mgr.closed:
            with pytest.raises(kvpool.InvalidArgument, match="closed"):
                seq.free()
        else:
            seq.free()
    assert seq.is_freed
    assert other.is_freed
    del other, seq, mgr  # without a warning: they are gone already


def test_a_dropped_sequence_gives_its_blocks_back_and_warns(pool: kvpool.Pool) -> None:
    mgr = kvpool.BlockManager(pool)
    seq = mgr.allocate(range(9))
    with pytest.warns(ResourceWarning, match="a Sequence of 9 tokens was dropped .* its 3 blocks"):
        del seq
    assert pool.stats.free == 16
    mgr.check()


def test_no_warning_for_what_was_freed(pool: kvpool.Pool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mgr = kvpool.BlockManager(pool)
        mgr.allocate(range(9)).free()
        with mgr.allocate(range(9)):
            pass
        seq = mgr.allocate([1])
        mgr.close()
        del seq
        with kvpool.BlockManager(pool) as mgr:
            seq = mgr.allocate([1])
        del seq
        gc.collect()
    assert pool.stats.used == 0


def test_a_warning_that_is_an_error_does_not_escape_a_destructor(
    pool: kvpool.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    mgr = kvpool.BlockManager(pool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seq = mgr.allocate([1])
        try:
            raise KeyError("under way")
        except KeyError as error:
            del seq
            assert error.args == ("under way",)
    assert len(seen) == 1
    assert pool.stats.used == 0


def test_with_blocks(pool: kvpool.Pool) -> None:
    with kvpool.BlockManager(pool) as mgr:
        with mgr.allocate(range(9)) as seq:
            assert pool.stats.used == 3
        assert seq.is_freed
        with pytest.raises(ZeroDivisionError), mgr.allocate([1]):
            1 / 0  # noqa: B018
        with mgr.allocate([1]) as early:
            early.free()
        assert pool.stats.used == 0
        left = mgr.allocate([2])
    assert mgr.closed
    assert left.is_freed
    assert pool.stats.used == 0


def test_one_manager_at_a_time(pool: kvpool.Pool) -> None:
    mgr = kvpool.BlockManager(pool)
    with mgr.allocate(range(9)) as seq:
        seq.commit()
    for _ in range(3):
        with pytest.raises(kvpool.Busy):
            kvpool.BlockManager(pool)
    mgr.close()
    second = kvpool.BlockManager(pool)
    assert second.can_allocate(range(9)).n_cached == 0  # it has no proof of what is cached
    with second.allocate(range(9)) as seq:
        seq.commit()
        second.check()
    # what it met without proof made room: it could never be hit
    assert (second.stats.unproven, second.stats.n_findable) == (0, 2)
    del second, seq, mgr
    gc.collect()
    kvpool.BlockManager(pool).check()


def test_a_sequence_keeps_its_manager_working(pool: kvpool.Pool) -> None:
    seq = kvpool.BlockManager(pool).allocate(range(5))
    gc.collect()
    child = seq.fork()
    seq.append(5)
    seq.commit()
    with pytest.raises(kvpool.Busy):
        kvpool.BlockManager(pool)
    seq.free()
    child.free()
    del seq, child
    kvpool.BlockManager(pool)


def test_sequences_of_a_closed_manager_do_not_touch_its_successor(pool: kvpool.Pool) -> None:
    first = kvpool.BlockManager(pool)
    old = first.allocate(range(9))
    first.close()
    second = kvpool.BlockManager(pool)
    new = second.allocate(range(9))
    with pytest.raises(kvpool.InvalidArgument, match="the manager is closed"):
        old.free()
    with pytest.raises(kvpool.InvalidArgument, match="another manager"):
        second.free([new, first_like(old)])
    assert len(new) == 9
    new.free()


def first_like(seq: kvpool.Sequence) -> kvpool.Sequence:
    """A live sequence of yet another manager."""
    other = kvpool.BlockManager(kvpool.Pool(4, **SHAPE))
    return other.allocate([1])


def test_cycles_of_garbage_are_collected() -> None:
    class Engine(kvpool.BlockManager):
        pass

    class MyPool(kvpool.Pool):
        pass

    pool = MyPool(16, **SHAPE)
    engine = Engine(pool)
    pool.manager = engine  # a cycle: the manager refers to its pool
    engine.itself = engine
    engine.running = [engine.allocate(range(9))]
    gone = weakref.ref(engine), weakref.ref(pool)
    del pool, engine
    with pytest.warns(ResourceWarning, match="9 tokens"):
        gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_weak_references_do_not_keep_anything(pool: kvpool.Pool) -> None:
    mgr = kvpool.BlockManager(pool)
    seq = mgr.allocate([1])
    refs = weakref.ref(mgr), weakref.ref(seq)
    assert refs[0]() is mgr
    seq.free()
    del mgr, seq
    assert [ref() for ref in refs] == [None, None]


@pytest.mark.filterwarnings("ignore:nanobind:RuntimeWarning")
def test_objects_that_were_never_made_are_refused(pool: kvpool.Pool) -> None:
    with pytest.raises(TypeError):
        kvpool.BlockManager.__new__(kvpool.BlockManager).check()
    mgr = kvpool.BlockManager(pool)
    try:
        hollow = kvpool.Sequence.__new__(kvpool.Sequence)
    except TypeError:
        return
    with pytest.raises(TypeError):
        hollow.fork()
    with pytest.raises(kvpool.ArgumentTypeError, match=r"seqs\[0\]"):
        mgr.free([hollow])


def test_calls_do_not_leak_objects(pool: kvpool.Pool) -> None:
    mgr = kvpool.BlockManager(pool, events=True)
    tokens = np.arange(9, dtype=np.uint32)
    table = np.empty((2, 4), np.int32)

    def everything() -> None:
        a = mgr.allocate(tokens)
        b = a.fork()
        mgr.append([a, b], [1, 2])
        mgr.commit((a, b))
        mgr.block_tables([a, b], out=table)
        mgr.block_tables([a, b])
        mgr.slot_mapping([a, b], [0, 1], 2)
        mgr.seq_lens([a, b])
        mgr.import_sequence(a.export(), a.tokens).free()
        a.truncate(3)
        a.pin(0.0001)
        repr((a, b, mgr, mgr.stats, mgr.can_allocate([1]), a.blocks))
        mgr.drain_events()
        for bad in ([a, 5], [a, a], None, [b, None]):
            with pytest.raises(kvpool.InvalidArgument):
                mgr.free(bad)  # type: ignore[arg-type]
        with pytest.raises(kvpool.PoolFull):
            mgr.allocate(range(100))
        mgr.free([a, b])

    everything()
    gc.collect()
    watched = [mgr, pool, table, tokens, kvpool.Sequence, kvpool.BlockEvent, kvpool.Fit]
    counts = [sys.getrefcount(o) for o in watched]
    blocks = sys.getallocatedblocks()
    for _ in range(400):
        everything()
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 300  # one object a pass would be 400
    assert all(abs(sys.getrefcount(o) - n) < 100 for o, n in zip(watched, counts, strict=True))


def test_managers_do_not_leak_memory() -> None:
    pool = kvpool.Pool(200_000, **SHAPE)
    for i in range(300):  # 8 MB each: 2.4 GB if they stayed
        mgr = kvpool.BlockManager(pool)
        seq = mgr.allocate(range(9))
        if i % 2:
            mgr.close()
        else:
            seq.free()
        del mgr, seq
    assert pool.stats.used == 0


def test_what_is_alive_at_the_end_of_the_interpreter_is_no_trouble() -> None:
    code = (
        "import kvpool\n"
        "pool = kvpool.Pool(16, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=1)\n"
        "mgr = kvpool.BlockManager(pool, events=True)\n"
        "seq = mgr.allocate(range(9)); seq.commit(); seq.pin(100)\n"
        "seqs = [seq.fork() for _ in range(3)]\n"
        "print('end')\n"
    )
    for flags in ([], ["-W", "error"], ["-X", "dev"]):
        result = subprocess.run(
            [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False
        )
        assert result.stdout == "end\n"
        assert result.returncode == 0, result.stderr
