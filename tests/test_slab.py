"""Pools over memory of the caller's (`slab=`), and pools of ids (`copy=`)."""

from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool
from pool_support import ENVELOPE, H0

SHAPE: dict[str, Any] = {"block_tokens": 2, "n_layers": 1, "n_kv_heads": 1, "head_dim": 2}


# ---- a slab of the caller's ------------------------------------------------------------------


def test_values_are_in_the_callers_memory() -> None:
    memory = np.zeros((4, 1, 2, 1, 2, 2), np.float16)
    pool = kvpool.Pool(4, slab=memory, **SHAPE)
    assert pool.has_slab
    [block] = pool.import_(ENVELOPE)
    assert memory[block].ravel().tolist() == [1, 2, 3, 4, 0.5, -1, 0, 0.25]
    memory[block, 0, 1, 0, 1, 1] = 8.0
    assert pool.block(int(block))[0, 1, 0, 1, 1] == 8.0
    assert pool.slab.ctypes.data == memory.ctypes.data
    memory[block, 0, 1, 0, 1, 1] = 0.25
    assert pool.export([block]) == ENVELOPE
    pool.check()


@pytest.mark.parametrize("make", [
    lambda n: bytearray(n), lambda n: mmap.mmap(-1, n), lambda n: np.zeros(n, np.uint8),
    lambda n: np.zeros(n // 2, np.float16), lambda n: (ctypes.c_uint8 * n)(),
    lambda n: memoryview(bytearray(n + 40)).cast("B"),
], ids=["bytearray", "mmap", "uint8", "float16", "ctypes", "longer"])  # fmt: skip
def test_any_writable_buffer_will_do(make: Callable[[int], Any]) -> None:
    buffer = make(4 * 16)
    pool = kvpool.Pool(4, slab=buffer, **SHAPE)
    ids = pool.alloc(4)
    pool.slab[:] = 1.0
    pool.set_fill(ids, 2)
    assert memoryview(buffer).cast("B")[:64].tobytes() == b"\x00\x3c" * 32
    assert len(pool.export(ids)) == pool.export_bytes(4)


@pytest.mark.parametrize(("slab", "error", "text"), [
    (np.zeros(31, np.float16), kvpool.InvalidArgument, r"less than .* \(64 bytes, found 62\)"),
    (np.zeros((4, 16), np.float32), kvpool.ArgumentTypeError, "found format 'f'"),
    (np.zeros((4, 16), np.int16), kvpool.ArgumentTypeError, "found format 'h'"),
    (np.zeros((4, 16), ">f2"), kvpool.ArgumentTypeError, "found format '>e'"),
    (np.zeros((8, 16), np.float16)[::2], kvpool.ArgumentTypeError, "C-contiguous"),
    (np.zeros((16, 4), np.float16).T, kvpool.ArgumentTypeError, "C-contiguous"),
    (bytes(64), kvpool.ArgumentTypeError, "writable"),
    (memoryview(bytearray(65))[1:], kvpool.InvalidArgument, "aligned to 2"),
    ([0] * 64, kvpool.ArgumentTypeError, "found list"),
    (17, kvpool.ArgumentTypeError, "found int"),
], ids=["short", "float32", "int16", "big-endian", "strided", "transposed", "read-only",
        "unaligned", "list", "int"])  # fmt: skip
def test_other_things_are_no_slab(slab: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        kvpool.Pool(4, slab=slab, **SHAPE)


def test_options_that_contradict_a_slab() -> None:
    memory = bytearray(64)
    with pytest.raises(kvpool.InvalidArgument, match="expected one of the two"):
        kvpool.Pool(4, slab=memory, copy=print, **SHAPE)
    with pytest.raises(kvpool.InvalidArgument, match="TL_KV_TOUCH would overwrite"):
        kvpool.Pool(4, slab=memory, touch=True, **SHAPE)
    memory.append(0)  # a refused pool holds nothing: this can grow


def test_the_slab_is_held_while_the_pool_or_a_view_is_there() -> None:
    memory = bytearray(64)
    pool = kvpool.Pool(4, slab=memory, **SHAPE)
    view = pool.block(1)
    for step in (pool.close, lambda: None):
        step()
        with pytest.raises(BufferError):
            memory.append(0)
    del pool
    gc.collect()
    view[:] = 1.0
    del view
    memory.append(0)


class Array(np.ndarray[Any, Any]):  # of which a weak reference can be had
    pass


def test_a_dropped_slab_lives_on_under_its_pool() -> None:
    memory = np.zeros(32, np.float16).view(Array)
    gone = weakref.ref(memory)
    pool = kvpool.Pool(4, slab=memory, **SHAPE)
    del memory
    gc.collect()
    assert gone() is not None
    pool.slab[:] = 3.0
    thread = threading.Thread(target=pool.close)  # the memory may be let go by any thread
    thread.start()
    thread.join()
    del pool
    gc.collect()
    assert gone() is None


def test_a_pool_over_a_slab_that_outlives_the_interpreter_ends_quietly() -> None:
    code = (
        "import kvpool, sys\n"
        "shape = dict(block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)\n"
        "sys.pool = kvpool.Pool(4, slab=bytearray(64), **shape)\n"
        "sys.view = sys.pool.slab\n"
        "sys.ids = kvpool.Pool(4, copy=print, **shape)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


# ---- a pool of ids ---------------------------------------------------------------------------


class Keeper:
    """Values outside of the pool, and the copies that were asked for."""

    def __init__(self, n_blocks: int = 8) -> None:
        self.values = np.zeros((n_blocks, 2), np.int64)
        self.calls: list[list[tuple[int, int]]] = []

    def __call__(self, sources: Any, destinations: Any) -> None:
        assert sources.dtype == destinations.dtype == np.uint32
        self.calls.append(list(zip(sources.tolist(), destinations.tolist(), strict=True)))
        for src, dst in self.calls[-1]:
            self.values[dst] = self.values[src]


def ids_pool(n_blocks: int = 8, copy: Any = None) -> kvpool.Pool:
    return kvpool.Pool(n_blocks, copy=copy or Keeper(n_blocks), **SHAPE)


def test_cow_copies_by_the_function() -> None:
    keeper = Keeper()
    pool = ids_pool(copy=keeper)
    assert not pool.has_slab
    a, b = pool.alloc(2)
    pool.set_fill([a, b], [1, 2])
    pool.ref([a, a, b])
    keeper.values[a], keeper.values[b] = 7, 9
    copies = pool.cow([a, b, a])
    assert keeper.calls == [[(a, copies[0]), (b, copies[1]), (a, copies[2])]]
    assert keeper.values[copies, 0].tolist() == [7, 9, 7]
    assert pool.fill(copies).tolist() == [1, 2, 1]
    assert pool.refs([a, b, *copies]).tolist() == [1, 1, 1, 1, 1]
    assert pool.cow(int(a)) == a
    assert len(keeper.calls) == 1
    pool.check()


CALLS: dict[str, Callable[[kvpool.Pool], object]] = {
    "block": lambda p: p.block(0),
    "slab": lambda p: p.slab,
    "export": lambda p: p.export([0]),
    "export_into": lambda p: p.export_into([0], bytearray(99)),
    "export_iter": lambda p: p.export_iter([0]),
    "export_pieces": lambda p: p.export_pieces([0]),
    "import": lambda p: p.import_(ENVELOPE),
    "manager.import": lambda p: kvpool.BlockManager(p).import_(ENVELOPE),
    "manager.import_sequence": lambda p: kvpool.BlockManager(p).import_sequence(ENVELOPE, [1, 2]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_pool_of_ids_has_no_bytes(call: str) -> None:
    pool = ids_pool()
    block = pool.alloc()
    pool.set_fill(block, 2)
    with pytest.raises(kvpool.Unsupported, match="a pool of ids has no values"):
        CALLS[call](pool)
    assert pool.stats == (7, 1, 0, 0)
    pool.check()


def test_a_sequence_over_a_pool_of_ids_is_not_exported() -> None:
    pool = ids_pool()
    with kvpool.BlockManager(pool).allocate([1, 2, 3]) as seq:
        seq.commit()
        with pytest.raises(kvpool.Unsupported, match="a pool of ids"):
            seq.export()


@pytest.mark.parametrize("copy", [1, "copy", [print]])
def test_copy_is_a_function(copy: Any) -> None:
    with pytest.raises(kvpool.ArgumentTypeError, match=r"copy: expected a function"):
        ids_pool(copy=copy)


def test_a_managers_appends_are_copied() -> None:
    keeper = Keeper()
    pool = ids_pool(copy=keeper)
    mgr = kvpool.BlockManager(pool)
    seq = mgr.allocate([1, 2, 3])
    keeper.values[seq.blocks] = [[1, 2], [3, 0]]
    seq.commit()
    forks = [seq.fork(), seq.fork()]
    made = mgr.append([seq, *forks], [10, 11, 12])
    assert keeper.calls == [made]
    assert len(made) == 2
    for row, token in zip([seq, *forks], [10, 11, 12], strict=True):
        assert keeper.values[row.blocks[1], 0] == 3
        keeper.values[row.blocks[1], 1] = token
    seq.commit()
    seq.truncate(3)
    [(src, dst)] = seq.append(13)
    assert keeper.calls[1:] == [[(src, dst)]]
    assert keeper.values[dst].tolist() == [3, 10]
    mgr.free([seq, *forks])
    mgr.check()
    assert pool.stats.used == 0


def test_a_copy_that_raises_is_made_before_anything_else() -> None:
    keeper = Keeper()
    broken = True

    def copy(sources: Any, destinations: Any) -> None:
        if broken:
            raise RuntimeError("the device is gone")
        keeper(sources, destinations)

    pool = ids_pool(copy=copy)
    a = pool.alloc()
    keeper.values[a] = 5
    pool.ref([a, a])
    for used in (2, 3):
        with pytest.raises(RuntimeError, match="the device is gone"):
            pool.cow(a)
        assert pool.stats.used == used  # it has happened, and the blocks are held
    pool.unref([a, 1, 2])
    assert pool.stats.used == 3  # nobody can take what is not copied yet
    broken = False
    b = pool.alloc()
    keeper.values[b] = 6
    pool.ref(b)
    c = pool.cow(b)
    assert keeper.calls == [[(a, 1), (a, 2), (b, c)]]
    pool.unref([b, c])
    assert pool.stats.used == 0
    pool.check()


def test_what_is_copied_on_before_it_is_written_is_copied_in_the_next_round() -> None:
    keeper = Keeper()
    fail = 1

    def copy(sources: Any, destinations: Any) -> None:
        nonlocal fail
        fail -= 1
        if fail >= 0:
            raise RuntimeError
        keeper(sources, destinations)

    pool = ids_pool(copy=copy)
    a = pool.alloc()
    keeper.values[a] = 5
    pool.ref(a)
    with pytest.raises(RuntimeError):
        pool.cow(a)  # block 1, not copied yet
    pool.ref(1)
    c = pool.cow(1)
    assert keeper.calls == [[(a, 1)], [(1, c)]]
    assert keeper.values[[1, c], 0].tolist() == [5, 5]


def test_copy_may_call_the_pool() -> None:
    log = []

    def copy(sources: Any, destinations: Any) -> None:
        log.append((sources.tolist(), destinations.tolist(), pool.refs(sources).tolist()))
        if len(log) == 1:
            pool.ref(int(destinations[0]))
            pool.unref(pool.cow(int(destinations[0])))  # asks for another copy, from inside

    pool = ids_pool(copy=copy)
    a = pool.alloc()
    pool.ref(a)
    b = pool.cow(a)
    assert [entry[:2] for entry in log] == [([a], [b]), ([b], [2])]
    assert log[0][2] == [2]  # its holder's, and one while it is copied
    assert pool.stats.used == 2
    pool.check()


def test_a_cycle_through_the_function_is_collected() -> None:
    class Owner:
        def __init__(self) -> None:
            self.pool = ids_pool(copy=self.copy)

        def copy(self, sources: Any, destinations: Any) -> None: ...

    owner = Owner()
    gone = weakref.ref(owner.pool)
    del owner
    gc.collect()
    assert gone() is None


def test_a_sequence_keeps_the_function_alive() -> None:
    keeper = Keeper()
    pool = ids_pool(copy=keeper)
    mgr = kvpool.BlockManager(pool)
    a = mgr.allocate([1])
    with a, a.fork() as b:
        del mgr, pool
        gc.collect()
        assert keeper.calls == [b.append(2)] != [[]]


def test_closing_while_copies_are_pending_ends_them() -> None:
    def copy(sources: Any, destinations: Any) -> None:
        pool.close()

    pool = ids_pool(copy=copy)
    a = pool.alloc()
    pool.ref(a)
    pool.cow(a)
    assert pool.closed


def test_two_threads_of_forks_lose_no_copy() -> None:
    """Each block's value is its writer's; a copy made late or twice shows as another's."""
    keeper = Keeper(64)
    lock = threading.Lock()
    running = 0

    def copy(sources: Any, destinations: Any) -> None:
        nonlocal running
        with lock:
            running += 1
            assert running == 1
        keeper(sources, destinations)
        with lock:
            running -= 1

    pool = ids_pool(64, copy=copy)
    mgr = kvpool.BlockManager(pool)
    errors: list[BaseException] = []

    def work(me: int) -> None:
        try:
            for i in range(300):
                with mgr.allocate([me]) as a, a.fork() as b, b.fork() as c:
                    value = me * 1000 + i
                    keeper.values[a.blocks[0], 0] = value
                    for seq in (b, c):
                        seq.append(1)
                        assert keeper.values[seq.blocks[0], 0] == value
                        keeper.values[seq.blocks[0], 1] = value
                        assert seq.blocks[0] != a.blocks[0]
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in (1, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors[0]
    assert pool.stats.used == 0
    mgr.check()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("afatcu"), st.integers(0, 5)), max_size=40))
def test_a_manager_over_ids_answers_as_one_over_a_slab(steps: list[tuple[str, int]]) -> None:
    keeper = Keeper(12)
    pools = [ids_pool(12, copy=keeper), kvpool.Pool(12, **SHAPE)]
    managers = [kvpool.BlockManager(p) for p in pools]
    rows: list[list[kvpool.Sequence]] = [[], []]
    for step, x in steps:
        answers: list[object] = []
        for mgr, seqs in zip(managers, rows, strict=True):
            try:
                if step == "a":
                    seqs.append(mgr.allocate(range(x)))
                    answers.append(seqs[-1].n_cached)
                elif seqs:
                    seq = seqs[x % len(seqs)]
                    if step == "f":
                        seqs.append(seq.fork())
                    elif step == "t":
                        answers.append(seq.append([x]))
                    elif step == "c":
                        seq.commit()
                    else:
                        seq.truncate(min(x, len(seq)))
                answers.append([s.blocks.tolist() for s in seqs])
            except kvpool.PoolFull:
                answers.append("full")
        n = len(answers) // 2
        assert answers[:n] == answers[n:]
        assert pools[0].stats == pools[1].stats
    for mgr, seqs in zip(managers, rows, strict=True):
        mgr.check()
        mgr.free(seqs)


def test_names_and_hits_work_as_ever() -> None:
    pool = ids_pool()
    block = pool.alloc()
    pool.set_fill(block, 2)
    assert pool.register(block, H0)
    pool.unref(block)
    assert pool.lookup(H0) == block
