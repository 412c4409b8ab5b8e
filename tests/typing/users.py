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
