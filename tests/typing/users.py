"""Read by mypy --strict, never run: what a user's type checker sees."""

import mmap

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import kvpool


def use(pool: kvpool.Pool, ids: NDArray[np.uint32], tokens: NDArray[np.int64]) -> None:
    assert_type(pool.alloc(), int)
    assert_type(pool.alloc(4), NDArray[np.uint32])
    assert_type(pool.refs(0), int)
    assert_type(pool.refs(np.uint32(0)), int)
    assert_type(pool.refs(ids), NDArray[np.uint32])
    assert_type(pool.refs([0, 1]), NDArray[np.uint32])
    assert_type(pool.refs(range(4)), NDArray[np.uint32])
    assert_type(pool.fill((0, 1)), NDArray[np.uint32])
    assert_type(pool.cow(3), int)
    assert_type(pool.cow(ids), NDArray[np.uint32])
    assert_type(pool.hash(3), int | None)
    assert_type(pool.hash(ids), NDArray[np.uint64])
    assert_type(pool.lookup(7), int | None)
    assert_type(pool.lookup(kvpool.block_hashes(tokens)), NDArray[np.int64])
    assert_type(pool.lookup(np.uint64(7)), int | None)
    assert_type(pool.register(0, 7), bool)
    assert_type(pool.register(ids, [7, 8]), NDArray[np.bool_])
    assert_type(pool.block(ids[0]), NDArray[np.float16])
    assert_type(pool.slab, NDArray[np.float16])
    assert_type(pool.export(ids), bytes)
    assert_type(pool.import_(b""), NDArray[np.uint32])
    assert_type(pool.import_(np.zeros(4)), NDArray[np.uint32])
    assert_type(pool.stats, kvpool.Stats)
    assert_type(pool.stats.free, int)
    assert_type(pool.n_blocks, int)
    assert_type(pool.dtype, str)
    pool.ref(3)
    pool.unref(ids)
    pool.set_fill(ids, 16)
    pool.set_fill(ids, [1, 2])
    pool.set_fill(0, 3)
    with pool as same:
        assert_type(same, kvpool.Pool)
    with mmap.mmap(-1, 4096) as mapped:
        pool.import_(mapped)
        kvpool.crc32c(memoryview(mapped))


def manager(pool: kvpool.Pool, tokens: NDArray[np.int64], out: NDArray[np.int32]) -> None:
    mgr = kvpool.BlockManager(pool, prefix_cache="hash", watermark=2, events=True)
    assert_type(mgr.allocate(tokens), kvpool.Sequence)
    seq = mgr.allocate([1, 2], namespace=7, max_cached_tokens=4, resumed=True, match_last=True)
    assert_type(mgr.can_allocate(range(9)), kvpool.Fit)
    assert_type(mgr.can_allocate((1, 2)).fits, bool)
    assert_type(seq.append(3), list[tuple[int, int]])
    assert_type(mgr.append([seq], [4]), list[tuple[int, int]])
    assert_type(seq.fork(), kvpool.Sequence)
    assert_type(seq.blocks, NDArray[np.uint32])
    assert_type(seq.tokens, NDArray[np.uint32])
    assert_type(seq.slot_mapping(0, 4), NDArray[np.int64])
    assert_type(seq.export(), bytes)
    assert_type(len(seq) + seq.n_cached + seq.n_computed + seq.n_blocks + seq.namespace, int)
    assert_type(seq.is_freed, bool)
    seq.truncate(1)
    seq.commit()
    seq.pin(2.5)
    mgr.commit([seq], [1])
    assert_type(mgr.block_tables([seq], out=out, scale=2), NDArray[np.int32])
    assert_type(mgr.slot_mapping((seq,), [0], 1), NDArray[np.int64])
    assert_type(mgr.seq_lens([seq]), NDArray[np.int32])
    assert_type(mgr.import_(b""), NDArray[np.uint32])
    assert_type(mgr.import_sequence(b"", tokens), kvpool.Sequence)
    assert_type(mgr.adopt([0], [1]), kvpool.Sequence)
    assert_type(mgr.drain_events(), list[kvpool.BlockEvent])
    assert_type(mgr.drain_events(1)[0].type, kvpool.EventType)
    assert_type(mgr.stats, kvpool.ManagerStats)
    assert_type(mgr.stats.hit_rate, float)
    assert_type(mgr.pool, kvpool.Pool)
    mgr.reset(namespace=None)
    mgr.evict(seq.blocks)
    mgr.free(s for s in [seq])
    with mgr as same, same.allocate([1]) as inner:
        assert_type(inner, kvpool.Sequence)


def functions() -> None:
    assert_type(kvpool.block_hash(0, [1, 2]), int)
    assert_type(kvpool.block_hashes(range(32)), NDArray[np.uint64])
    assert_type(kvpool.crc32c(b""), int)
    assert_type(kvpool.abi_version, int)
    assert_type(kvpool.get_include(), str)
    try:
        kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=8)
    except kvpool.KvPoolError as error:
        assert_type(error, kvpool.KvPoolError)


def mistakes(pool: kvpool.Pool) -> None:
    pool.ref(1.5)  # type: ignore[arg-type]
    pool.ref("ids")  # type: ignore[arg-type]
    pool.alloc("2")  # type: ignore[call-overload]
    pool.register(0, [1])  # type: ignore[call-overload]
    pool.import_("text")  # type: ignore[arg-type]
    kvpool.Pool(4)  # type: ignore[call-arg]
    mgr = kvpool.BlockManager(pool, prefix_cache="radix")  # type: ignore[arg-type]
    mgr.allocate("text")  # type: ignore[arg-type]
    mgr.append([1], [2])  # type: ignore[list-item]
    kvpool.Sequence().fork(1)  # type: ignore[call-arg]
