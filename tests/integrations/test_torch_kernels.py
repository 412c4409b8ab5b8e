"""The views that attention kernels take, each read exactly as its kernel reads it.

The kernels themselves need a GPU. What is checked here is the contract between a view and its
kernel: addresses are computed from what the kernel is given (strides, tables, lengths) by the
kernel's own formula, out of the flat memory of the slab, and attention over the values found there
must be attention over the values that were written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import kvpool

torch = pytest.importorskip("torch", reason="needs torch")

from kvpool.integrations.torch import TorchPool, flashinfer_tables  # noqa: E402

L, H, B, D, GROUP = 3, 2, 4, 8, 2
LENGTHS = [1, B, B + 1, 3 * B - 1]


class Batch(NamedTuple):
    pool: TorchPool
    manager: kvpool.BlockManager
    seqs: list[kvpool.Sequence]
    keys: list[Any]  # (layer, position, head, dim) of each sequence
    values: list[Any]


@pytest.fixture(params=["HND", "NHD"])
def batch(request: pytest.FixtureRequest) -> Any:
    """Sequences whose blocks are all over the slab, with random values of known places."""
    rng = torch.Generator().manual_seed(3)
    pool = TorchPool.empty(24, B, n_layers=L, n_kv_heads=H, head_dim=D, layout=request.param)
    pool.slab.fill_(float("nan"))  # what a kernel must not read
    manager = kvpool.BlockManager(pool)
    gaps = [manager.allocate([i]) for i in range(9)]
    seqs = [manager.allocate(range(100 * n, 100 * n + n)) for n in LENGTHS]
    manager.free(gaps[::2])
    for seq in seqs:
        seq.append(range(7))
    manager.free(gaps[1::2])
    keys = [torch.randn(L, len(s), H, D, generator=rng).half() for s in seqs]
    values = [torch.randn(L, len(s), H, D, generator=rng).half() for s in seqs]
    for seq, k, v in zip(seqs, keys, values, strict=True):
        for i in range(len(seq)):
            page = pool.slab[int(seq.blocks[i // B])]  # (layer, 2, ...)
            where = (slice(None), slice(None), i % B) if request.param == "HND" else (
                slice(None), i % B)  # fmt: skip
            page[:, 0][where] = k[:, i]
            page[:, 1][where] = v[:, i]
    yield Batch(pool, manager, seqs, keys, values)
    manager.free(seqs)


def attention(q: Any, k: Any, v: Any) -> Any:
    """softmax(q k^T / sqrt(d)) v in float64: q (heads, dim), k and v (position, head, dim)."""
    k, v = (x.double().repeat_interleave(GROUP, dim=1) for x in (k, v))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q.double(), k) / D**0.5, dim=-1)
    return torch.einsum("hn,nhd->hd", weights, v)


def at(view: Any, offsets: Any) -> Any:
    """Elements of a view's memory, `offsets` from its first, wherever the view says it ends."""
    flat = view.as_strided((view.untyped_storage().nbytes() // 2,), (1,), 0)
    return flat[view.storage_offset() + offsets]


def check(batch: Batch, layer: int, read: Any) -> None:
    """read(i) is K and V of sequence i as the kernel finds them, (position, head, dim)."""
    for i, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        k, v = read(i)
        assert bool((k == keys[layer]).all())
        assert bool((v == values[layer]).all())
        q = torch.randn(H * GROUP, D, generator=torch.Generator().manual_seed(i))
        assert torch.equal(attention(q, k, v), attention(q, keys[layer], values[layer]))


@pytest.mark.parametrize("layer", range(L))
def test_flashinfer_reads_a_layer(batch: Batch, layer: int) -> None:
    """FlashInfer 0.7.4, include/flashinfer/page.cuh: paged_kv_t::get_length, get_elem_offset."""
    cache = batch.pool.layer(layer)
    k_cache, v_cache = cache.unbind(dim=1)  # flashinfer/utils.py: _unpack_paged_kv_cache
    assert k_cache.stride() == v_cache.stride()  # csrc/batch_decode.cu insists
    strides = k_cache.stride()
    stride_page = strides[0]
    stride_n, stride_h = (
        (strides[2], strides[1]) if batch.pool.layout == "HND" else (strides[1], strides[2])
    )
    assert stride_page < 2**32  # paged_kv_t keeps uint32
    indptr, indices, last_page_len = flashinfer_tables(batch.manager, batch.seqs)
    assert {t.dtype for t in (indptr, indices, last_page_len)} == {torch.int32}

    def read(i: int) -> tuple[Any, Any]:
        length = int((indptr[i + 1] - indptr[i] - 1) * B + last_page_len[i])
        position = torch.arange(length)[:, None, None]
        page = indices[int(indptr[i]) + position // B].long()
        head, dim = torch.arange(H)[:, None], torch.arange(D)
        offsets = page * stride_page + head * stride_h + position % B * stride_n + dim
        return at(k_cache, offsets), at(v_cache, offsets)

    check(batch, layer, read)


@pytest.mark.parametrize("batch", ["NHD"], indirect=True)
@pytest.mark.parametrize("layer", range(L))
@pytest.mark.parametrize("without_gaps", [False, True])
def test_flash_attention_and_varlen_read_pages(
    batch: Batch, layer: int, without_gaps: bool
) -> None:
    """flash-attn 2.8.3, csrc/flash_attn/flash_api.cpp: k_batch_stride = k.stride(0),
    k_row_stride = k.stride(-3), k_head_stride = k.stride(-2), the last dimension contiguous; a
    position's page is block_table[i][position // page_block_size]. torch.nn.attention.varlen takes
    the same (2.13)."""
    scale = batch.pool.page_scale if without_gaps else 1
    k, v = batch.pool.pages(layer) if without_gaps else batch.pool.kv(layer)
    assert k.shape[1:] == (B, H, D)
    assert k.stride(-1) == 1
    assert k.is_contiguous() == without_gaps
    table = torch.from_numpy(batch.manager.block_tables(batch.seqs, scale=scale))
    seqused = torch.from_numpy(batch.manager.seq_lens(batch.seqs))
    assert table.dtype == seqused.dtype == torch.int32

    def read(i: int) -> tuple[Any, Any]:
        position = torch.arange(int(seqused[i]))[:, None, None]
        page = table[i][position // k.shape[1]].long()
        assert int(page.max()) < min(len(k), len(v))
        head, dim = torch.arange(H)[:, None], torch.arange(D)
        offsets = page * k.stride(0) + position % k.shape[1] * k.stride(-3) + head * k.stride(-2)
        return at(k, offsets + dim), at(v, offsets + dim)

    check(batch, layer, read)


@pytest.mark.parametrize("batch", ["HND"], indirect=True)
@pytest.mark.parametrize("layer", range(L))
def test_vllm_on_cpu_reads_k_and_v(batch: Batch, layer: int) -> None:
    """vLLM 0.33, v1/attention/backends/cpu_attn.py: key_cache and value_cache are
    (num_blocks, num_kv_heads, block_size, head_size), two strided views of one tensor a layer."""
    k, v = batch.pool.kv(layer)
    theirs = torch.empty(24, H, B, 2 * D, dtype=torch.float16)  # as vLLM allocates a layer
    key_cache, _ = theirs.view(24, H, B * 2, -1).chunk(2, dim=2)
    assert k.shape == v.shape == key_cache.shape
    assert k.stride()[2:] == key_cache.stride()[2:] == (D, 1)
    table = torch.from_numpy(batch.manager.block_tables(batch.seqs))

    def read(i: int) -> tuple[Any, Any]:
        position = torch.arange(len(batch.seqs[i]))[:, None, None]
        page = table[i][position // B].long()
        head, dim = torch.arange(H)[:, None], torch.arange(D)
        offsets = page * k.stride(0) + head * k.stride(1) + position % B * k.stride(2) + dim
        return at(k, offsets), at(v, offsets)

    check(batch, layer, read)


def test_views_are_written_through(batch: Batch) -> None:
    """What a kernel that appends writes is in the block: slot_mapping numbers positions."""
    slots = batch.manager.slot_mapping(batch.seqs[:1], 0, len(batch.seqs[0]))
    for layer in range(L):
        for view, of in zip(batch.pool.kv(layer), (batch.keys, batch.values), strict=True):
            for i, slot in enumerate(slots.tolist()):
                page = view[slot // B]
                row = page[:, slot % B] if batch.pool.layout == "HND" else page[slot % B]
                row += 1
                assert bool((row == of[0][layer, i] + 1).all())
    sent = batch.pool.export_sequence(batch.seqs[0]) if batch.seqs[0].n_computed else b""
    assert sent == b""  # nothing was committed, so nothing is sent
    batch.seqs[0].commit()
    pool = kvpool.Pool(4, B, n_layers=L, n_kv_heads=H, head_dim=D)
    ids = pool.import_(batch.pool.export_sequence(batch.seqs[0]))
    flat = pool.slab[ids].transpose(0, 4, 1, 2, 3, 5).reshape(-1, L, 2, H, D)
    n = len(batch.seqs[0])
    expected = np.stack([batch.keys[0].numpy(), batch.values[0].numpy()], axis=1)
    assert np.array_equal(flat[:n], expected.transpose(2, 0, 1, 3, 4) + np.float16(1))


def test_flashinfer_tables_of_empty_and_freed_sequences() -> None:
    pool = TorchPool.empty(4, 2, n_layers=1, n_kv_heads=1, head_dim=2)
    mgr = kvpool.BlockManager(pool)
    with mgr.allocate([1]) as a, mgr.allocate([]) as b:
        with pytest.raises(kvpool.InvalidArgument, match=r"seqs\[1\]: the sequence is empty"):
            flashinfer_tables(mgr, [a, b])
    with pytest.raises(kvpool.InvalidArgument, match="freed"):
        flashinfer_tables(mgr, [a])
    tables = flashinfer_tables(mgr, [])
    assert [t.tolist() for t in tables] == [[0], [], []]


@pytest.mark.parametrize("layer", [-1, L])
def test_layers_out_of_range(layer: int) -> None:
    pool = TorchPool.empty(2, 2, n_layers=L, n_kv_heads=1, head_dim=2)
    for view in (pool.layer, pool.kv, pool.pages):
        with pytest.raises(kvpool.InvalidArgument, match=f"expected 0 to 2, found {layer}"):
            view(layer)
