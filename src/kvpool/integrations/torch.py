"""PyTorch: slabs as tensors, and a pool whose slab is a tensor of yours, on any device.

    slab_tensor(pool)     the slab of a kvpool.Pool as a CPU tensor, no copy
    TorchPool(slab)       a pool of ids over your tensor: the values stay where they are

                          ids, references, names        values
    Pool                  C                             C, float16, HND
    TorchPool             C, a pool of ids              your tensor: any device, HND or NHD

What kernels take from a TorchPool:

    layer(l)              (pages, 2, ...)               FlashInfer
    kv(l)                 K and V, page = block id      FlashAttention, varlen_attn, vLLM on CPU
    pages(l), page_scale  K and V, all layers' pages    kernels that want pages without gaps
    flashinfer_tables     indptr, indices, last_page_len of sequences

An envelope of format 1 carries float16. A TorchPool of bfloat16 or float32 therefore does not
export or import: float32 values would be rounded and bfloat16 ones, whose exponent is wider, could
become infinite, and the receiver would have no way to tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import kvpool
from kvpool import (
    ArgumentTypeError,
    BlockManager,
    CorruptEnvelope,
    InvalidArgument,
    Pool,
    Sequence,
)

from ._values import Layout, Values

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

__all__ = ["FlashInferTables", "Layout", "TorchPool", "flashinfer_tables", "slab_tensor"]


def slab_tensor(pool: Pool) -> torch.Tensor:
    """The slab of a pool as a CPU tensor of the same memory: no copy, writable.

    Returns float16 ``(n_blocks, n_layers, 2, n_kv_heads, block_tokens, head_dim)``; of a TorchPool
    its own slab. The tensor keeps the memory alive, also after ``pool.close()``.

    Raises:
        InvalidArgument: the pool is closed.
        Unsupported: a pool of ids, unless it is a TorchPool.

    >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=4)
    >>> slab = slab_tensor(pool)
    >>> slab[2] = 1.5
    >>> float(pool.block(2).sum())
    24.0
    """
    return pool.slab if isinstance(pool, TorchPool) else torch.from_numpy(pool.slab)


class TorchPool(Pool):
    """A pool whose slab is a tensor you own: any device, float16, bfloat16 or float32.

    Everything a :class:`kvpool.Pool` does, it does; a :class:`kvpool.BlockManager` works on it. The
    pool keeps ids, references, fills and names. Blocks that are shared and written are copied in
    the slab, on its device, before ``cow`` or an append returns: on the current stream, so kernels
    launched after it see the copy.

    Args:
        slab: ``(n_blocks, n_layers, 2, n_kv_heads, block_tokens, head_dim)`` for the layout HND,
            ``(n_blocks, n_layers, 2, block_tokens, n_kv_heads, head_dim)`` for NHD; contiguous. Its
            contents are left alone. The pool keeps it alive; do not resize it, and give it to one
            pool only.
        layout: the order within a page. Envelopes are the same for both: export and import
            transpose, on the device.

    ``block``, ``slab`` and the views are tensors. ``export`` gathers on the device and goes through
    one host buffer, pinned when the device is CUDA; ``import_`` validates the whole envelope with
    the C reader, in host memory, before it takes a block.

    Raises:
        ArgumentTypeError: slab is no tensor.
        DtypeMismatch: slab is of another dtype.
        InvalidArgument: another shape, not contiguous, requires grad; a layout of another name.

    >>> slab = torch.zeros(8, 2, 2, 1, 4, 16)            # 8 blocks of 4 tokens, 2 layers, 1 head
    >>> pool = TorchPool(slab)
    >>> pool
    TorchPool(n_blocks=8, block_tokens=4, n_layers=2, n_kv_heads=1, head_dim=16; free=8, used=0, \
cached=0, evictions=0)
    >>> id = pool.alloc()
    >>> pool.ref(id)
    >>> slab[id] = 1.0
    >>> copy = pool.cow(id)                              # a fork writes: copied in the tensor
    >>> bool((slab[copy] == 1.0).all())
    True
    """

    def __init__(self, slab: torch.Tensor, *, layout: Layout = "HND") -> None:
        values = Values(slab, layout)
        super().__init__(values.n_blocks, copy=values.copy, **values.dims)
        self._values = values  # which does not know the pool: no cycle of references

    @classmethod
    def empty(
        cls, n_blocks: int, block_tokens: int = 16, *, n_layers: int, n_kv_heads: int,
        head_dim: int, dtype: torch.dtype = torch.float16,
        device: torch.device | str | int | None = None, layout: Layout = "HND",
    ) -> Self:  # fmt: skip
        """A pool over a new slab, uninitialised: ``device`` and ``dtype`` as for ``torch.empty``.

        Raises:
            InvalidArgument: a number is below 1, or a layout of another name.
            ArgumentTypeError: one is no integer.

        >>> TorchPool.empty(4, n_layers=1, n_kv_heads=2, head_dim=8, layout="NHD").slab.shape
        torch.Size([4, 1, 2, 16, 2, 8])
        """
        for name, value in (
            ("n_blocks", n_blocks), ("block_tokens", block_tokens), ("n_layers", n_layers),
            ("n_kv_heads", n_kv_heads), ("head_dim", head_dim),
        ):  # fmt: skip
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
                found = f"{value!r:.100} ({type(value).__name__})"
                raise ArgumentTypeError(f"{name}: expected an integer, found {found}")
            if value < 1:
                raise InvalidArgument(f"{name}: expected at least 1, found {value}")
        page = [n_kv_heads, block_tokens] if layout == "HND" else [block_tokens, n_kv_heads]
        slab = torch.empty(n_blocks, n_layers, 2, *page, head_dim, dtype=dtype, device=device)
        return cls(slab, layout=layout)

    # ---- values ------------------------------------------------------------------------------

    @property
    def slab(self) -> torch.Tensor:  # type: ignore[override]
        """The tensor itself."""
        return self._values.slab

    @property
    def layout(self) -> Layout:
        """The order within a page: "HND" or "NHD"."""
        return self._values.layout

    @property
    def device(self) -> torch.device:
        """Where the slab is."""
        return self._values.slab.device

    @property
    def dtype(self) -> str:
        """What the values are: 'float16', 'bfloat16' or 'float32'."""
        return str(self._values.slab.dtype).removeprefix("torch.")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's values in the slab."""
        return self._values.block_bytes

    def block(self, id: int | np.integer[Any]) -> torch.Tensor:  # type: ignore[override]
        """One block of the slab, in its layout: a view.

        Raises:
            InvalidArgument: the id is out of range, or the pool is closed.
        """
        self.refs(int(id))
        return self._values.slab[int(id)]

    # ---- for kernels -------------------------------------------------------------------------

    def layer(self, layer: int) -> torch.Tensor:
        """The pages of one layer: a view that FlashInfer takes, whose page numbers are block ids.

        HND: ``(n_blocks, 2, n_kv_heads, block_tokens, head_dim)``; NHD: ``(n_blocks, 2,
        block_tokens, n_kv_heads, head_dim)``. The last three dimensions are without gaps.

        Raises:
            InvalidArgument: the layer is out of range.

        >>> pool = TorchPool.empty(4, 2, n_layers=3, n_kv_heads=1, head_dim=8)
        >>> pool.layer(1).shape
        torch.Size([4, 2, 1, 2, 8])
        """
        if not 0 <= layer < self.n_layers:
            raise InvalidArgument(f"layer: expected 0 to {self.n_layers - 1}, found {layer}")
        return self._values.slab[:, layer]

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer: views whose page numbers are block ids, with gaps between pages.

        Raises:
            InvalidArgument: the layer is out of range.

        >>> pool = TorchPool.empty(4, 2, n_layers=3, n_kv_heads=1, head_dim=8, layout="NHD")
        >>> k, v = pool.kv(0)
        >>> k.shape, k.stride(0)                        # (blocks, positions, heads, dim)
        (torch.Size([4, 2, 1, 8]), 96)
        """
        pages = self.layer(layer)
        return pages[:, 0], pages[:, 1]

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer as pages without gaps; block ``b`` is page ``b * page_scale``.

        Each is the slab as one row of pages, all layers' K and V, beginning with this layer's K or
        V of block 0. ``mgr.block_tables(seqs, scale=pool.page_scale)`` has the page numbers.

        Raises:
            InvalidArgument: the layer is out of range.

        >>> pool = TorchPool.empty(4, 2, n_layers=3, n_kv_heads=1, head_dim=8, layout="NHD")
        >>> k, v = pool.pages(2)
        >>> pool.page_scale, k.shape, k.is_contiguous()
        (6, torch.Size([20, 2, 1, 8]), True)
        >>> k[3 * pool.page_scale].data_ptr() == pool.kv(2)[0][3].data_ptr()
        True
        """
        self.layer(layer)
        flat = self._values.slab.flatten(0, 2)
        return flat[2 * layer :], flat[2 * layer + 1 :]

    @property
    def page_scale(self) -> int:
        """What block ids are multiplied with for ``pages``: 2 * n_layers."""
        return 2 * self.n_layers

    # ---- the wire ----------------------------------------------------------------------------

    def export(self, ids: Any) -> bytes:
        """``Pool.export``: the bytes that a Pool with the same values writes, whatever the layout.

        Raises:
            Unsupported: the slab is not float16, which is all that format 1 carries.
            InvalidArgument: as ``Pool.export``.

        >>> pool = TorchPool(torch.ones(4, 1, 2, 2, 1, 2, dtype=torch.float16), layout="NHD")
        >>> ids = pool.alloc(1)
        >>> pool.set_fill(ids, 1)
        >>> other = kvpool.Pool(4, 2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> other.slab[other.import_(pool.export(ids))].ravel().tolist()
        [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
        """
        staged, at = self._staged(ids)
        return staged.export(at)

    def export_into(self, ids: Any, buffer: Buffer | NDArray[Any]) -> int:
        """``Pool.export_into``. Raises as ``export`` does."""
        staged, at = self._staged(ids)
        return staged.export_into(at, buffer)

    def export_iter(self, ids: Any, chunk_bytes: Any = 1 << 20) -> Iterator[bytes]:
        """``Pool.export_iter``; the values are gathered now. Raises as ``export`` does."""
        staged, at = self._staged(ids)
        return staged.export_iter(at, chunk_bytes)

    def export_pieces(self, ids: Any) -> list[memoryview]:
        """``Pool.export_pieces``, views of the host buffer. Raises as ``export`` does."""
        staged, at = self._staged(ids)
        return staged.export_pieces(at)

    def import_(self, buffer: Buffer | NDArray[Any]) -> NDArray[np.uint32]:
        """``Pool.import_``: the whole envelope is validated, then blocks are taken and written.

        Names become findable when the values are on their way to the device, in stream order. For a
        pool with a BlockManager, see ``import_sequence``.

        Raises:
            CorruptEnvelope, ShapeMismatch, PoolFull, InvalidArgument: as ``Pool.import_``; nothing
                has changed.
            Unsupported: the slab is not float16.

        >>> pool = TorchPool.empty(4, 2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> pool.import_(b"TLKV")
        Traceback (most recent call last):
        kvpool.errors.CorruptEnvelope: tl_kv_import: length 4, an envelope has at least 32 bytes
        """
        staged, fills, names = self._values.read(buffer)
        ids = self.alloc(len(fills))
        try:
            self.set_fill(ids, fills)
            self._values.scatter(ids, staged)
            named = names != 0
            self.register(ids[named], names[named])
        except BaseException:
            self.unref(ids)
            raise
        return ids

    def export_sequence(self, seq: Sequence) -> bytes:
        """``Sequence.export``: the computed tokens of a sequence of this pool's manager.

        Raises:
            Unsupported: the slab is not float16.
            InvalidArgument: the sequence is freed.
        """
        self._values.must_be_float16()
        n, tokens = seq.n_computed, self.block_tokens
        ids = seq.blocks[: -(-n // tokens)]
        with self._held(ids):
            fills = np.full(len(ids), tokens, np.uint32)
            names = self.hash(ids)
            if (
                n % tokens
            ):  # the block may hold more than is this sequence's, and have a name for it
                fills[-1], names[-1] = n % tokens, 0
            return self._values.stage(ids, fills, names).export(range(len(ids)))

    def import_sequence(
        self, manager: BlockManager, buffer: Buffer | NDArray[Any], tokens: Any, namespace: int = 0
    ) -> Sequence:
        """``BlockManager.import_sequence``: an envelope of these tokens, as a sequence.

        Blocks that the manager finds already are shared, not written again.

        Raises:
            CorruptEnvelope: no envelope, or not of these tokens: blocks, positions or names differ.
            ShapeMismatch, PoolFull: as ``Pool.import_``; nothing has changed.
            InvalidArgument: the manager is of another pool; tokens or namespace as for
                ``BlockManager.allocate``.
            Unsupported: the slab is not float16.

        >>> pools = [TorchPool.empty(4, 2, n_layers=1, n_kv_heads=1, head_dim=2) for _ in "ab"]
        >>> managers = [kvpool.BlockManager(pool) for pool in pools]
        >>> with managers[0].allocate([1, 2, 3]) as seq:
        ...     pools[0].slab[seq.blocks] = 2.0
        ...     seq.commit()
        ...     envelope = pools[0].export_sequence(seq)
        >>> with pools[1].import_sequence(managers[1], envelope, [1, 2, 3]) as seq:
        ...     len(seq), seq.n_computed
        (3, 3)
        """
        if manager.pool is not self:
            raise InvalidArgument("manager: expected one over this pool")
        staged, fills, names = self._values.read(buffer)
        row, size = np.asarray(tokens), self.block_tokens
        expected = kvpool.block_hashes(row, block_tokens=size, parent=namespace)
        wanted = np.minimum(size, len(row) - size * np.arange(-(-len(row) // size)))
        if not np.array_equal(fills, wanted):
            raise CorruptEnvelope(
                f"import_sequence: {fills.tolist()!s:.100} positions in the envelope's blocks, "
                f"{len(row)} tokens"
            )
        for i in np.flatnonzero(names):  # only full blocks have names
            if names[i] != expected[i]:
                raise CorruptEnvelope(
                    f"import_sequence: block {i} is named {names[i]:016x} in the envelope, its "
                    f"tokens give {expected[i]:016x}"
                )
        seq = manager.allocate(row, namespace=namespace, resumed=True, match_last=True)
        try:
            first = seq.n_cached // size
            self._values.scatter(seq.blocks[first:], staged[first:])
            seq.commit()
        except BaseException:
            seq.free()
            raise
        return seq

    # ---- what the wire needs -----------------------------------------------------------------

    @contextmanager
    def _held(self, ids: NDArray[Any]) -> Iterator[None]:
        """References of our own, so that nobody frees what is being read."""
        self.ref(ids)
        try:
            yield
        finally:
            self.unref(ids)

    def _staged(self, ids: Any) -> tuple[Pool, NDArray[np.intp]]:
        """A pool in host memory with the blocks `ids`, and where in it each of them is."""
        self._values.must_be_float16()
        row = np.array(ids)
        if row.ndim != 1:
            raise ArgumentTypeError(f"ids: expected a row of block ids, found {ids!r:.100}")
        with self._held(row):
            blocks, at = np.unique(row.astype(np.int64), return_inverse=True)
            names, fills = self.hash(blocks), self.fill(blocks)
            for i in np.flatnonzero(fills[at] == 0):
                raise InvalidArgument(
                    f"export: block {row[i]} (position {i}) has fill 0, a reader would refuse it"
                )
            return self._values.stage(blocks, fills, names), at


# ---- tables ------------------------------------------------------------------------------------


class FlashInferTables(NamedTuple):
    """A batch of sequences as FlashInfer's ``plan`` takes it: int32, on one device.

    ``indptr`` ``(n_seqs + 1,)``, ``indices`` ``(blocks,)``, ``last_page_len`` ``(n_seqs,)``.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


def flashinfer_tables(
    manager: BlockManager, seqs: Iterable[Sequence], *, device: torch.device | str | None = None
) -> FlashInferTables:
    """The block ids of sequences, and how far the last block of each is filled.

    Raises:
        InvalidArgument: a sequence is empty (its last page would be), freed, or another manager's.

    >>> pool = TorchPool.empty(8, 2, n_layers=1, n_kv_heads=1, head_dim=8)
    >>> mgr = kvpool.BlockManager(pool)
    >>> with mgr.allocate([1, 2, 3]) as a, mgr.allocate([4, 5]) as b:
    ...     flashinfer_tables(mgr, [a, b])
    FlashInferTables(indptr=tensor([0, 2, 3], dtype=torch.int32), \
indices=tensor([0, 1, 2], dtype=torch.int32), last_page_len=tensor([1, 2], dtype=torch.int32))
    """
    row = list(seqs)
    table, lengths = manager.block_tables(row), manager.seq_lens(row)
    if (lengths == 0).any():
        raise InvalidArgument(f"seqs[{int(np.argmin(lengths))}]: the sequence is empty")
    size = manager.pool.block_tokens
    n_blocks = -(-lengths // size)
    indptr = np.concatenate([[0], np.cumsum(n_blocks)]).astype(np.int32)
    indices = table[np.arange(table.shape[1]) < n_blocks[:, None]]
    last = (lengths - (n_blocks - 1) * size).astype(np.int32)
    return FlashInferTables(*(torch.from_numpy(x).to(device) for x in (indptr, indices, last)))
