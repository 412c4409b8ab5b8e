"""Views of the slab: shape, layout, sharing, and other libraries that read them without a copy."""

from __future__ import annotations

import numpy as np
import pytest

import kvpool
from pool_support import MakePool

SHAPE = {"block_tokens": 3, "n_layers": 2, "n_kv_heads": 2, "head_dim": 5}


@pytest.fixture
def pool(make_pool: MakePool) -> kvpool.Pool:
    return make_pool(4, **SHAPE)


def test_shapes_and_strides_are_the_layout_of_the_slab(pool: kvpool.Pool) -> None:
    slab, block = pool.slab, pool.block(2)
    assert slab.shape == (4, 2, 2, 2, 3, 5)
    assert block.shape == (2, 2, 2, 3, 5)
    for view in (slab, block):
        assert view.dtype == np.float16
        assert view.flags.c_contiguous
        assert view.flags.writeable
        assert view.flags.aligned
        assert not view.flags.owndata
    assert slab.strides[0] == pool.block_bytes == block.nbytes
    assert block.ctypes.data == slab[2].ctypes.data


def test_block_and_slab_are_the_same_memory(pool: kvpool.Pool) -> None:
    pool.slab[:] = 0
    pool.block(1)[1, 0, 1, 2, 4] = 7.0
    assert pool.slab[1, 1, 0, 1, 2, 4] == 7.0
    assert np.count_nonzero(pool.slab) == 1


def test_every_plane_of_every_block_is_distinct(pool: kvpool.Pool) -> None:
    n = pool.slab.size
    pool.slab[:] = np.arange(n, dtype=np.float16).reshape(pool.slab.shape)
    for i in range(pool.n_blocks):
        assert np.array_equal(pool.block(i), pool.slab[i])
    raw = np.frombuffer(memoryview(pool.slab).cast("B"), np.float16)
    assert np.array_equal(raw, np.arange(n, dtype=np.float16))


def test_blocks_of_64_bytes_are_64_byte_aligned(make_pool: MakePool) -> None:
    pool = make_pool(8, block_tokens=16, head_dim=8)
    assert all(pool.block(i).ctypes.data % 64 == 0 for i in range(8))


def test_buffer_protocol(pool: kvpool.Pool) -> None:
    view = memoryview(pool.block(1))
    assert (view.format, view.shape, view.readonly) == ("e", (2, 2, 2, 3, 5), False)
    assert view.nbytes == pool.block_bytes
    view.cast("B")[:2] = b"\x00\x3c"
    assert pool.slab[1, 0, 0, 0, 0, 0] == 1.0


def test_dlpack_shares_the_memory(pool: kvpool.Pool) -> None:
    again = np.from_dlpack(pool.slab)
    pool.slab[3] = 2.0
    assert (again[3] == 2.0).all()
    assert again.ctypes.data == pool.slab.ctypes.data


def test_torch_reads_and_writes_views(pool: kvpool.Pool) -> None:
    torch = pytest.importorskip("torch")
    pool.slab[:] = 0
    for tensor in (torch.from_numpy(pool.slab), torch.from_dlpack(pool.slab)):
        assert tensor.dtype == torch.float16
        assert tuple(tensor.shape) == pool.slab.shape
        assert tensor.data_ptr() == pool.slab.ctypes.data
        tensor[2] += 1.5
    assert (pool.block(2) == 3.0).all()
    kept = torch.from_dlpack(pool.block(2))
    pool.close()
    del pool
    assert bool((kept == 3.0).all())


def test_torch_tensors_are_rows_of_ids(pool: kvpool.Pool) -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor(pool.alloc(3).astype(np.int64))
    pool.ref(ids)
    assert pool.refs(ids).tolist() == [2, 2, 2]
    assert pool.refs(ids[0]) == 2
    with pytest.raises(kvpool.ArgumentTypeError, match="float32"):
        pool.unref(torch.tensor([1.0]))


def test_jax_reads_views(make_pool: MakePool) -> None:
    jax = pytest.importorskip("jax")
    pool = make_pool(4, block_tokens=16, head_dim=8)
    pool.slab[:] = 0.25
    array = jax.dlpack.from_dlpack(pool.slab)
    assert array.shape == pool.slab.shape
    assert array.dtype == np.float16
    assert float(array.astype("float32").sum()) == 0.25 * pool.slab.size
