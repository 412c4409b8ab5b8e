"""What the operations do, one block at a time and in rows: seed section 2."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import kvpool
from pool_support import H0, MakePool, registered


def test_configuration_is_readable_and_read_only() -> None:
    pool = kvpool.Pool(n_blocks=6, block_tokens=4, n_layers=3, n_kv_heads=2, head_dim=8)
    assert (pool.n_blocks, pool.block_tokens) == (6, 4)
    assert (pool.n_layers, pool.n_kv_heads, pool.head_dim) == (3, 2, 8)
    assert (pool.dtype, pool.format) == ("float16", 1)
    assert pool.block_bytes == 3 * 2 * 2 * 4 * 8 * 2
    assert pool.meta_bytes > 0
    with pytest.raises(AttributeError):
        pool.n_blocks = 7


def test_a_block_has_16_tokens_unless_told_otherwise() -> None:
    assert kvpool.Pool(1, n_layers=1, n_kv_heads=1, head_dim=1).block_tokens == 16


def test_metadata_is_at_most_80_bytes_a_block() -> None:
    pool = kvpool.Pool(100_000, block_tokens=1, n_layers=1, n_kv_heads=1, head_dim=1)
    assert pool.meta_bytes <= 80 * pool.n_blocks


@pytest.mark.parametrize("touch", [False, True])
@pytest.mark.parametrize("huge_pages", [False, True])
def test_every_way_to_back_the_slab_gives_the_same_pool(touch: bool, huge_pages: bool) -> None:
    pool = kvpool.Pool(
        64, n_layers=4, n_kv_heads=2, head_dim=64, touch=touch, huge_pages=huge_pages
    )
    pool.slab[:] = 1.5
    assert (pool.slab == 1.5).all()


def test_alloc_gives_an_int_or_an_array(pool: kvpool.Pool) -> None:
    one = pool.alloc()
    assert type(one) is int
    row = pool.alloc(2)
    assert row.dtype == np.uint32
    assert row.shape == (2,)
    assert sorted([one, *row.tolist()]) == [0, 1, 2]
    assert pool.alloc(0).shape == (0,)
    assert pool.alloc(n=1).tolist() == [3]


def test_alloc_is_all_or_nothing(pool: kvpool.Pool) -> None:
    pool.alloc(2)
    before = pool.stats
    for n in (3, pool.n_blocks, 2**32 - 1):
        with pytest.raises(kvpool.PoolFull, match=f"{n} blocks needed, 2 are free and 0 cached"):
            pool.alloc(n)
        assert pool.stats == before


def test_the_pool_runs_full_one_block_at_a_time(pool: kvpool.Pool) -> None:
    assert sorted(pool.alloc() for _ in range(4)) == [0, 1, 2, 3]
    with pytest.raises(kvpool.PoolFull, match="1 blocks needed, 0 are free and 0 cached"):
        pool.alloc()


def test_unref_frees_or_caches(pool: kvpool.Pool) -> None:
    kept, plain = registered(pool, 7), pool.alloc()
    pool.unref([kept, plain])
    assert pool.stats == (3, 0, 1, 0)


def test_an_id_mentioned_k_times_counts_k_times(pool: kvpool.Pool) -> None:
    a, b = pool.alloc(2).tolist()
    pool.ref([a, a, b])
    assert pool.refs([a, b]).tolist() == [3, 2]
    pool.unref([a, b, a, a])
    assert pool.refs([a, b]).tolist() == [0, 1]


def test_a_row_that_takes_too_many_references_changes_nothing(pool: kvpool.Pool) -> None:
    a, b = pool.alloc(2).tolist()
    for row in ([a, a], [b, a, a], [a, 3], [a, b, 99], np.array([a, a])):
        with pytest.raises(kvpool.InvalidArgument, match=r"ids\[\d\]"):
            pool.unref(row)
        assert pool.refs([a, b]).tolist() == [1, 1]
    for row in ([a, 3], [a, 4]):
        with pytest.raises(kvpool.InvalidArgument, match=r"ids\[1\]"):
            pool.ref(row)
        assert pool.refs([a, b]).tolist() == [1, 1]


def test_a_double_unref_is_an_error_that_changes_nothing(pool: kvpool.Pool) -> None:
    block = pool.alloc()
    pool.unref(block)
    with pytest.raises(kvpool.InvalidArgument, match="nobody holds block 0"):
        pool.unref(block)
    with pytest.raises(kvpool.InvalidArgument):
        pool.ref(block)
    assert pool.stats == (4, 0, 0, 0)


def test_cow_copies_only_when_shared(pool: kvpool.Pool) -> None:
    block = pool.alloc()
    pool.set_fill(block, 1)
    pool.block(block)[:] = 3.0
    assert pool.cow(block) == block
    pool.ref(block)
    mine = pool.cow(block)
    assert mine != block
    assert pool.fill(mine) == 1
    pool.block(mine)[:] = 4.0
    assert (pool.block(block) == 3.0).all()
    assert pool.refs([block, mine]).tolist() == [1, 1]


def test_cow_of_a_row_is_what_one_by_one_would_give(make_pool: MakePool) -> None:
    pool = make_pool(8)
    a, b, c = pool.alloc(3).tolist()
    pool.ref([b, c, c])  # references: a 1, b 2, c 3
    pool.slab[[a, b, c]] = np.array([1, 2, 3]).reshape(3, 1, 1, 1, 1, 1)
    out = pool.cow(np.array([a, b, c, c, c]))
    assert out.dtype == np.uint32
    assert out[0] == a
    assert out[1] not in (a, b, c)
    assert out[4] == c  # the last holder writes in place
    assert len(set(out.tolist())) == 5
    assert pool.refs(out).tolist() == [1] * 5
    assert pool.refs(b) == 1
    assert [float(pool.block(i).max()) for i in out] == [1, 2, 3, 3, 3]


def test_cow_of_a_row_is_all_or_nothing(pool: kvpool.Pool) -> None:
    a, b, _ = pool.alloc(3).tolist()
    pool.ref([a, b])
    with pytest.raises(kvpool.PoolFull, match=r"2 .* 1 .* 0 cached"):
        pool.cow([a, b])
    with pytest.raises(kvpool.InvalidArgument, match="nobody holds block 3"):
        pool.cow([a, 3])
    with pytest.raises(kvpool.InvalidArgument, match="out of range"):
        pool.cow([a, 4])
    assert pool.refs([a, b]).tolist() == [2, 2]
    assert pool.stats.free == 1


def test_cow_in_a_full_pool_changes_nothing(pool: kvpool.Pool) -> None:
    block = int(pool.alloc(4)[0])
    pool.ref(block)
    with pytest.raises(kvpool.PoolFull, match="1 blocks needed, 0 are free and 0 cached"):
        pool.cow(block)
    assert pool.refs(block) == 2


def test_fill_takes_one_number_for_all_or_one_for_each(pool: kvpool.Pool) -> None:
    ids = pool.alloc(3)
    pool.set_fill(ids, 2)
    assert pool.fill(ids).tolist() == [2, 2, 2]
    pool.set_fill(ids, [0, 1, 2])
    assert pool.fill(ids).tolist() == [0, 1, 2]
    pool.set_fill(1, np.int8(2))
    assert pool.fill(1) == 2
    assert type(pool.fill(1)) is int
    with pytest.raises(kvpool.InvalidArgument, match="n_tokens: expected one for each id, 3"):
        pool.set_fill(ids, [1, 2])
    with pytest.raises(kvpool.InvalidArgument, match="n_tokens"):
        pool.set_fill(int(ids[0]), [1])
    with pytest.raises(kvpool.InvalidArgument, match=r"fills\[2\] is 3"):
        pool.set_fill(ids, [1, 1, 3])
    assert pool.fill(ids).tolist() == [0, 2, 2]


def test_only_full_blocks_are_registered(pool: kvpool.Pool) -> None:
    ids = pool.alloc(2)
    pool.set_fill(ids, [2, 1])
    for args in ((1, H0), (0, 0), (3, H0), ([0, 1], [H0, 9]), ([0, 3], [H0, 9])):
        with pytest.raises(kvpool.InvalidArgument):
            pool.register(*args)
        assert pool.hash(0) is None
        assert pool.lookup(H0) is None
    assert pool.register(0, H0) is True
    assert pool.register(0, H0) is True
    assert pool.hash(0) == H0
    with pytest.raises(kvpool.InvalidArgument, match="immutable"):
        pool.set_fill(0, 1)
    with pytest.raises(kvpool.InvalidArgument, match="registered under"):
        pool.register(0, 5)


def test_the_first_holder_keeps_the_hash(pool: kvpool.Pool) -> None:
    ids = pool.alloc(3)
    pool.set_fill(ids, 2)
    assert pool.register(int(ids[0]), 7) is True
    assert pool.register(int(ids[1]), 7) is False
    answer = pool.register(ids, np.array([7, 7, 8], np.uint64))
    assert answer.dtype == np.bool_
    assert answer.tolist() == [True, False, True]
    assert pool.hash(ids).tolist() == [7, 0, 8]
    with pytest.raises(kvpool.InvalidArgument, match="hashes: expected one for each id, 3"):
        pool.register(ids, [7, 8])


def test_a_lookup_takes_a_reference_and_revives(pool: kvpool.Pool) -> None:
    block = registered(pool, H0, value=2.5)
    assert pool.lookup(H0) == block
    assert pool.refs(block) == 2
    pool.unref([block, block])
    assert pool.stats.cached == 1
    assert pool.lookup(H0) == block
    assert (pool.block(block) == 2.5).all()
    assert pool.stats == (3, 1, 0, 0)
    assert pool.lookup(H0 + 1) is None
    assert pool.lookup(0) is None


def test_a_row_of_lookups_marks_misses(pool: kvpool.Pool) -> None:
    a, b = registered(pool, 2**64 - 1), registered(pool, 1)
    found = pool.lookup([2**64 - 1, 5, 1, 1, 0])
    assert found.dtype == np.int64
    assert found.tolist() == [a, -1, b, b, -1]
    assert pool.refs([a, b]).tolist() == [2, 3]
    assert pool.lookup(kvpool.block_hashes([1, 2, 3], 2)).tolist() == [-1]


def test_eviction_takes_the_least_recently_used(pool: kvpool.Pool) -> None:
    a, b, c = (registered(pool, h) for h in (1, 2, 3))
    pool.unref([a, b, c])
    pool.unref(pool.lookup([1]).tolist())  # a is the newest now
    pool.alloc(3)  # the free block, then b and c
    assert pool.lookup([1, 2, 3]).tolist() == [a, -1, -1]
    assert pool.stats.evictions == 2


def test_stats_are_named_and_unpack(pool: kvpool.Pool) -> None:
    pool.alloc(3)
    assert isinstance(pool.stats, kvpool.Stats)
    assert pool.stats._asdict() == {"free": 1, "used": 3, "cached": 0, "evictions": 0}
    free, used, _, _ = pool.stats
    assert (free, used) == (1, 3)
    assert pool.stats == pickle.loads(pickle.dumps(pool.stats))


def test_repr_shows_configuration_and_stats(pool: kvpool.Pool) -> None:
    pool.alloc(3)
    assert repr(pool) == (
        "Pool(n_blocks=4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2; "
        "free=1, used=3, cached=0, evictions=0)"
    )
    pool.close()
    assert repr(pool).endswith("head_dim=2; closed)")


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pools_are_not_copied(pool: kvpool.Pool, how: object) -> None:
    with pytest.raises(TypeError, match=r"cannot be (pickled|copied).*export\(\) and import_\(\)"):
        how(pool)


def test_a_subclass_is_a_pool(make_pool: MakePool) -> None:
    class Named(kvpool.Pool):
        name = "prefill"

    pool = Named(2, n_layers=1, n_kv_heads=1, head_dim=2)
    assert pool.alloc() == 0
    assert repr(pool).startswith("Named(n_blocks=2")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(pool)


def test_check_passes_on_a_busy_pool(pool: kvpool.Pool) -> None:
    a = registered(pool, 1)
    pool.unref(a)
    pool.alloc(2)
    pool.check()
