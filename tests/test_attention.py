"""kvpool.attention: the kernels through NumPy arrays, against the formula in float64."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvpool
from kvpool.attention import ThreadPool, paged_decode, paged_prefill
from pool_support import MakePool

H, HKV, D, BT = 6, 2, 8, 4
LENS = [1, 4, 5, 11, 300]

F32 = NDArray[np.float32]


class Batch:
    """Sequences of LENS positions in a pool of two layers; values are random."""

    def __init__(self, make_pool: MakePool) -> None:
        self.rng = np.random.default_rng(1)
        n_blocks = [-(-n // BT) for n in LENS]
        self.pool = make_pool(
            sum(n_blocks) + 1, block_tokens=BT, n_layers=2, n_kv_heads=HKV, head_dim=D
        )
        self.pool.slab[:] = np.nan
        self.tables = np.full((len(LENS), max(n_blocks)), -1, dtype=np.int32)
        for row, n, length in zip(self.tables, n_blocks, LENS, strict=True):
            row[:n] = self.pool.alloc(n)
            for pos in range(length):
                place = self.pool.slab[row[pos // BT], :, :, :, pos % BT]
                place[:] = self.rng.standard_normal(place.shape)
        self.q = self.rng.standard_normal((len(LENS), H, D)).astype(np.float32)

    def decode(self, **options: Any) -> F32:
        return paged_decode(self.q, self.pool, 1, self.tables, LENS, **options)

    def formula(self, q: F32, b: int, pos: int, window: int = 0) -> NDArray[np.float64]:
        first = max(0, pos - window + 1) if window else 0
        at = np.arange(first, pos + 1)
        kv = self.pool.slab[self.tables[b, at // BT], 1, :, :, at % BT].astype(np.float64)
        out = np.empty((H, D))
        for h in range(H):
            k, v = kv[:, 0, h // (H // HKV)], kv[:, 1, h // (H // HKV)]
            s = k @ q[h].astype(np.float64) / np.sqrt(D)
            w = np.exp(s - s.max())
            out[h] = w @ v / w.sum()
        return out


@pytest.fixture
def batch(make_pool: MakePool) -> Batch:
    return Batch(make_pool)


@pytest.mark.parametrize("window", [0, 1, 7])
def test_decode_is_the_formula(batch: Batch, window: int) -> None:
    out = batch.decode(window=window)
    assert (out.shape, out.dtype) == ((len(LENS), H, D), np.float32)
    for b, length in enumerate(LENS):
        want = batch.formula(batch.q[b], b, length - 1, window)
        np.testing.assert_allclose(out[b], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [0, 7])
def test_a_prefill_in_chunks_is_the_decode_of_every_position(batch: Batch, window: int) -> None:
    b, length = 4, LENS[4]
    q = batch.rng.standard_normal((length, H, D)).astype(np.float32)
    table = batch.tables[b]
    whole = paged_prefill(q, batch.pool, 1, table, length, window=window)
    parts = [
        paged_prefill(q[i : i + 37], batch.pool, 1, table, min(i + 37, length), window=window)
        for i in range(0, length, 37)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    for pos in range(length):
        one = paged_decode(q[pos, None], batch.pool, 1, table[None], [pos + 1], window=window)
        np.testing.assert_array_equal(one[0], whole[pos])
    np.testing.assert_allclose(whole[150], batch.formula(q[150], b, 150, window), atol=2e-5)


def test_scale_defaults_to_the_root_of_head_dim(batch: Batch) -> None:
    np.testing.assert_array_equal(batch.decode(), batch.decode(scale=1 / np.sqrt(D)))
    assert not np.array_equal(batch.decode(), batch.decode(scale=1))
    batch.q *= 2
    twice = batch.decode()
    batch.q /= 2
    np.testing.assert_array_equal(batch.decode(scale=2 / np.sqrt(D)), twice)


def test_integers_of_every_kind_are_tables(batch: Batch) -> None:
    want = batch.decode()
    for dtype in (np.int64, np.uint32, np.int16, ">i4"):
        got = paged_decode(batch.q, batch.pool, 1, batch.tables.astype(dtype), np.array(LENS))
        np.testing.assert_array_equal(got, want)
    strided = np.repeat(batch.tables, 2, axis=1)[:, ::2]
    np.testing.assert_array_equal(paged_decode(batch.q, batch.pool, 1, strided, tuple(LENS)), want)
    one = paged_decode(batch.q[:1], batch.pool, 1, [[int(batch.tables[0, 0])]], [1])
    np.testing.assert_array_equal(one, want[:1])


def test_queries_may_have_strides_and_results_a_place(batch: Batch) -> None:
    want = batch.decode()
    wide = np.zeros((len(LENS), 2 * H, D), dtype=np.float32)
    wide[:, ::2] = batch.q
    got = paged_decode(wide[:, ::2], batch.pool, 1, batch.tables, LENS)
    np.testing.assert_array_equal(got, want)
    out = np.zeros_like(batch.q)
    assert batch.decode(out=out) is out
    np.testing.assert_array_equal(out, want)


def test_no_queries_are_no_results(batch: Batch) -> None:
    empty = np.empty((0, H, D), dtype=np.float32)
    assert paged_decode(empty, batch.pool, 0, batch.tables[:0], []).shape == (0, H, D)
    assert paged_prefill(empty, batch.pool, 0, batch.tables[0], 4).shape == (0, H, D)


# ---- errors --------------------------------------------------------------------------------------


def test_wrong_arrays_are_refused(batch: Batch) -> None:
    def call(match: str, error: type[Exception] = kvpool.InvalidArgument, **changed: Any) -> None:
        arguments: dict[str, Any] = {
            "q": batch.q, "pool": batch.pool, "layer": 1, "block_tables": batch.tables,
            "context_lens": LENS,
        } | changed  # fmt: skip
        with pytest.raises(error, match=match):
            paged_decode(**arguments)

    wrong_type = kvpool.ArgumentTypeError
    call("q: expected float32, found float64", wrong_type, q=batch.q.astype(np.float64))
    call("q: expected a float32 array", wrong_type, q=batch.q.tolist())
    call("q: expected 3 dimensions", q=batch.q[0])
    call("head_dim|D: expected", kvpool.ShapeMismatch, q=np.ascontiguousarray(batch.q[..., :4]))
    call("multiple of Hkv", kvpool.ShapeMismatch, q=np.ascontiguousarray(batch.q[:, :5]))
    call("layer 2 is out of range", layer=2)
    call("layer", layer=-1)
    call("block_tables: expected a row for each query", block_tables=batch.tables[:2])
    call("block_tables: expected 2 dimensions", block_tables=batch.tables[0])
    call("block_tables: expected integers", wrong_type, block_tables=batch.tables * 1.0)
    call("block_tables: expected integers", wrong_type, block_tables=batch.tables > 0)
    call("context_lens: expected one for each", context_lens=LENS[:2])
    call("expected at least 1, found 0", context_lens=[*LENS[:4], 0])
    call("expected at least 1, found -2147483648", context_lens=[*LENS[:4], -(2**60)])
    call("its table has 75", context_lens=[*LENS[:4], 301])
    call("its table has 75", context_lens=[*LENS[:4], 2**40])
    call("its table has 0", block_tables=np.empty((len(LENS), 0), dtype=np.int32))
    call("block 1 of its table is -1", context_lens=[5, *LENS[1:]])
    for scale in (np.inf, -np.inf, np.nan, 2.4e38, -2.4e38):
        call("scale: expected a finite number, at most 2.3e", scale=scale)
    call("scale: expected a number", wrong_type, scale="x")
    call("window", window=-1)
    for threads in (2, ThreadPool.__new__(ThreadPool)):
        call("threads: expected a kvpool.attention.ThreadPool", wrong_type, threads=threads)
    call("out: expected the shape of q", out=np.empty((1, H, D), dtype=np.float32))
    call("out: expected float32", wrong_type, out=np.empty(batch.q.shape))
    call("q and out overlap", out=batch.q)
    read_only = np.empty_like(batch.q)
    read_only.flags.writeable = False
    call("out: expected a writable", out=read_only)
    inside = batch.pool.slab.reshape(-1)[: 2 * batch.q.size].view(np.float32)
    call("found a part of its slab", out=inside.reshape(batch.q.shape))
    with pytest.raises(kvpool.InvalidArgument, match="T: expected at most"):
        paged_prefill(batch.q, batch.pool, 0, batch.tables[0], 3)
    with pytest.raises(TypeError):
        paged_decode(batch.q, "pool", 0, batch.tables, LENS)  # type: ignore[arg-type]


def test_a_refused_call_leaves_out_alone(batch: Batch) -> None:
    out = np.full_like(batch.q, 7)
    batch.tables[4, 74] = batch.pool.n_blocks
    with pytest.raises(
        kvpool.InvalidArgument, match=f"block 74 of its table is {batch.pool.n_blocks}"
    ):
        batch.decode(out=out)
    assert (out == 7).all()


def test_a_closed_pool_is_refused(batch: Batch) -> None:
    batch.pool.close()
    with pytest.raises(kvpool.InvalidArgument, match="closed"):
        batch.decode()


# ---- threads -------------------------------------------------------------------------------------


def long_sequence(
    make_pool: MakePool, n: int = 4000
) -> tuple[kvpool.Pool, F32, NDArray[np.uint32]]:
    pool = make_pool(n // 16, block_tokens=16, n_kv_heads=2, head_dim=64)
    rng = np.random.default_rng(2)
    pool.slab[:] = rng.standard_normal(pool.slab.shape)
    q = rng.standard_normal((1, 8, 64)).astype(np.float32)
    return pool, q, pool.alloc(n // 16)


def test_results_do_not_depend_on_threads(make_pool: MakePool) -> None:
    pool, q, table = long_sequence(make_pool)
    want = paged_decode(q, pool, 0, [table], [4000])
    for n in (1, 2, 5):
        with ThreadPool(n) as threads:
            assert threads.n_threads == n
            assert repr(threads) == f"ThreadPool({n})"
            for _ in range(5):
                got = paged_decode(q, pool, 0, [table], [4000], threads=threads)
                np.testing.assert_array_equal(got, want)


def test_one_thread_pool_serves_many_threads_while_blocks_come_and_go(make_pool: MakePool) -> None:
    pool, q, table = long_sequence(make_pool)
    other = make_pool(8)
    want = paged_decode(q, pool, 0, [table], [4000])
    problems: list[str] = []
    with ThreadPool(3) as threads:

        def work() -> None:
            for _ in range(20):
                if not np.array_equal(
                    paged_decode(q, pool, 0, [table], [4000], threads=threads), want
                ):
                    problems.append("another result")
                ids = other.alloc(2)
                other.unref(ids)

        callers = [threading.Thread(target=work) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not problems


def test_thread_pools_have_limits() -> None:
    with pytest.raises(kvpool.InvalidArgument, match="n_threads: expected at least 1"):
        ThreadPool(0)
    with pytest.raises(kvpool.InvalidArgument, match="at most 1024"):
        ThreadPool(1025)
    with pytest.raises(kvpool.ArgumentTypeError):
        ThreadPool(1.5)  # type: ignore[arg-type]
    assert ThreadPool().n_threads == len(os.sched_getaffinity(0))


def test_a_closed_thread_pool_is_refused(batch: Batch) -> None:
    threads = ThreadPool(2)
    threads.close()
    threads.close()
    with pytest.raises(kvpool.InvalidArgument, match="the ThreadPool is closed"):
        batch.decode(threads=threads)


def test_threads_end_with_their_pool() -> None:
    def n_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = n_threads()
    threads = ThreadPool(4)
    assert n_threads() == before + 3
    del threads
    gc.collect()
    deadline = time.monotonic() + 5
    while n_threads() > before and time.monotonic() < deadline:
        time.sleep(0.001)  # a thread that was joined is listed for a moment more
    assert n_threads() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_child_is_refused_the_pool_but_not_its_thread_pool(make_pool: MakePool) -> None:
    pool, q, table = long_sequence(make_pool)
    contents = pool.slab.copy()
    with ThreadPool(2) as threads:
        want = paged_decode(q, pool, 0, [table], [4000], threads=threads)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    paged_decode(q, pool, 0, [table], [4000], threads=threads)
                except kvpool.Unsupported:
                    own = kvpool.Pool(250, 16, n_layers=1, n_kv_heads=2, head_dim=64)
                    own.slab[:] = contents
                    same = paged_decode(q, own, 0, [table], [4000], threads=threads)
                    code = 0 if np.array_equal(same, want) else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert status == 0
