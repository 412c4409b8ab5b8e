"""PagedKVCache: the suite that `ol check L8.3` runs, and Hypothesis against a contiguous cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvpool
from kvpool.attention import paged_prefill
from kvpool.workbench.cache_suite import TESTS, Contiguous, compare
from pool_support import MakePool


@pytest.mark.parametrize("name", TESTS)
def test_the_suite_of_the_course(name: str, make_pool: MakePool) -> None:
    names = ("block_tokens", "n_layers", "n_kv_heads", "head_dim")
    TESTS[name](lambda n, *shape: make_pool(n, **dict(zip(names, shape, strict=True))))


FLOATS = st.sampled_from([np.float16, np.float32, np.float64])


class AgainstContiguous(RuleBasedStateMachine):
    """Any history of appends, forks and frees, in pools that are full most of the time."""

    @initialize(
        n_blocks=st.integers(1, 8),
        size=st.integers(1, 4),
        n_layers=st.integers(1, 3),
        heads=st.integers(1, 2),
    )
    def start(self, n_blocks: int, size: int, n_layers: int, heads: int) -> None:
        self.shape = (n_blocks, size, n_layers, heads, 2)
        self.pool = kvpool.Pool(n_blocks, size, n_layers=n_layers, n_kv_heads=heads, head_dim=2)
        self.pool.slab[:] = np.nan
        self.cache, self.model = kvpool.PagedKVCache(self.pool), Contiguous(*self.shape)

    def one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model.blocks)))

    @rule()
    def add(self) -> None:
        self.model.add(self.cache.add_seq())

    @precondition(lambda self: self.model.blocks)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq = self.one(data)
        self.model.fork(seq, self.cache.fork(seq))

    @precondition(lambda self: self.model.blocks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = self.one(data)
        self.cache.free(seq)
        self.model.drop(seq)

    @precondition(lambda self: self.model.blocks)
    @rule(data=st.data(), n=st.integers(0, 6), dtype=FLOATS)
    def append(self, data: st.DataObject, n: int, dtype: Any) -> None:
        _, _, n_layers, heads, dim = self.shape
        seq, layer = self.one(data), data.draw(st.integers(0, n_layers - 1))
        arrays = hnp.arrays(dtype, (heads, n, dim), elements={"allow_nan": False})
        k, v = data.draw(arrays), data.draw(arrays)
        if self.model.needed(seq, layer, n) > self.model.free_blocks:
            before = self.pool.slab.view(np.uint16).copy()
            with pytest.raises(kvpool.OutOfBlocks, match=r"append: \d+ blocks? needed"):
                self.cache.append(seq, layer, k, v)
            assert np.array_equal(self.pool.slab.view(np.uint16), before)
            return
        shared = [b for b, n in self.model.holders.items() if n > 1]
        held = {b: i for s, t in self.model.blocks.items()
                for b, i in zip(t, self.cache.block_table(s).tolist(), strict=True)}  # fmt: skip
        before = {held[b]: self.pool.block(held[b]).view(np.uint16).copy() for b in shared}
        self.cache.append(seq, layer, k, v)
        for id, values in before.items():
            assert np.array_equal(self.pool.block(id).view(np.uint16), values), "a shared block"
        with np.errstate(over="ignore"):
            self.model.append(seq, layer, k.astype(np.float16), v.astype(np.float16))

    @invariant()
    def agrees(self) -> None:
        compare(self.cache, self.pool, self.model)
        self.pool.check()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
            assert self.pool.stats.free == self.pool.n_blocks


AgainstContiguous.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestAgainstContiguous = AgainstContiguous.TestCase


def test_a_block_that_somebody_else_holds_is_never_written(make_pool: MakePool) -> None:
    pool = make_pool(4, n_layers=1)
    cache = kvpool.PagedKVCache(pool)
    seq = cache.add_seq()
    k = np.full((1, 1, 2), 3.0)
    cache.append(seq, 0, k, k)
    [id] = cache.block_table(seq).tolist()
    pool.ref(id)
    held = pool.block(id).view(np.uint16).copy()
    cache.append(seq, 0, 2 * k, 2 * k)
    assert cache.block_table(seq).tolist() != [id]
    assert np.array_equal(pool.block(id).view(np.uint16), held)
    assert cache.gather(seq, 0)[0][0].tolist() == [[3, 3], [6, 6]]
    pool.unref(id)
    cache.close()
    assert pool.stats.free == 4


def test_the_pool_stays_with_its_owner(make_pool: MakePool) -> None:
    pool = make_pool(4)
    with kvpool.PagedKVCache(pool) as cache:
        assert repr(cache) == "PagedKVCache(0 sequences)"
        k = np.ones((1, 3, 2), dtype=np.float32)
        cache.append(cache.add_seq(), 0, k, k)
        assert (cache.num_free_blocks, cache.stats.used) == (2, 2)
    assert not pool.closed
    assert (pool.stats.free, repr(cache)) == (4, "PagedKVCache(closed)")


def test_the_kernel_reads_what_the_cache_wrote(make_pool: MakePool) -> None:
    pool = make_pool(9, n_layers=2, block_tokens=4, n_kv_heads=2, head_dim=8)
    cache, rng = kvpool.PagedKVCache(pool), np.random.default_rng(3)
    seq = cache.add_seq()
    for layer in range(2):
        k, v = rng.standard_normal((2, 2, 11, 8))
        cache.append(seq, layer, k, v)
    q = rng.standard_normal((11, 4, 8)).astype(np.float32)
    got = paged_prefill(q, pool, 1, cache.block_table(seq), 11)
    k, v = (np.repeat(x, 2, axis=0).astype(np.float64) for x in cache.gather(seq, 1))
    scores = np.einsum("thd,hjd->htj", q, k) / np.sqrt(8)
    scores[:, np.triu(np.ones((11, 11), dtype=bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = np.einsum("htj,hjd->thd", weights / weights.sum(axis=-1, keepdims=True), v)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_out_of_blocks_is_a_full_pool() -> None:
    assert issubclass(kvpool.OutOfBlocks, kvpool.PoolFull)


def test_sequences_and_layers_are_integers_of_any_kind_but_no_bools() -> None:
    pool = kvpool.Pool(2, block_tokens=2, n_layers=2, n_kv_heads=1, head_dim=2)
    with kvpool.PagedKVCache(pool) as cache:
        seqs = np.array([cache.add_seq(), cache.add_seq()])
        cache.append(seqs[1], np.uint8(1), np.ones((1, 1, 2)), np.ones((1, 1, 2)))
        assert cache.seq_len(1, 1) == cache.seq_len(seqs[1], np.int64(1)) == 1
        with pytest.raises(kvpool.InvalidArgument, match="seq: expected a sequence"):
            cache.seq_len(True, 1)
        with pytest.raises(kvpool.InvalidArgument, match="layer: expected 0 to 1, found True"):
            cache.seq_len(1, True)
