"""The values of a TorchPool: copied, gathered into host memory and scattered from it.

    slab (device, HND or NHD)  -- index_select, transpose -->  staged blocks (host, HND, float16)
                               <-- index_copy_, transpose --   with a kvpool.Pool of their own

A staged block lies as format 1 has it, so the C library makes and reads the envelopes: nothing here
knows a byte of the format, and what comes from outside passes the one reader there is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool import (
    ArgumentTypeError,
    DtypeMismatch,
    InvalidArgument,
    Pool,
    PoolFull,
    Unsupported,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Layout", "Values"]

#: The order of a page's dimensions: heads before positions, as in format 1, or positions first.
Layout = Literal["HND", "NHD"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GATHERED_BYTES = 64 << 20  # of a slab's blocks, at most, in a second place on its device


class Dims(TypedDict):
    block_tokens: int
    n_layers: int
    n_kv_heads: int
    head_dim: int


class Values:
    """A slab, checked; ``dims`` are those of a pool over it, in ``Pool``'s names."""

    def __init__(self, slab: torch.Tensor, layout: Layout) -> None:
        if layout not in ("HND", "NHD"):
            raise InvalidArgument(f"layout: expected 'HND' or 'NHD', found {layout!r:.100}")
        _check(slab)
        n_blocks, n_layers, _, heads, tokens, head_dim = slab.shape
        if layout == "NHD":
            heads, tokens = tokens, heads
        self.slab = slab
        self.layout: Layout = layout
        self.n_blocks = n_blocks
        self.dims: Dims = {
            "block_tokens": tokens, "n_layers": n_layers, "n_kv_heads": heads, "head_dim": head_dim,
        }  # fmt: skip
        self.block_bytes: int = slab[0].nbytes
        self._shape, self._address = slab.shape, slab.data_ptr()

    # ---- on the device -----------------------------------------------------------------------

    def copy(self, sources: NDArray[np.uint32], destinations: NDArray[np.uint32]) -> None:
        """Copies blocks of the slab; all at once, for no source is a destination."""
        with self._writing():
            blocks = self.slab.index_select(0, self._index(sources))
            self.slab.index_copy_(0, self._index(destinations), blocks)

    def scatter(self, ids: NDArray[Any], staged: torch.Tensor) -> None:
        """Writes staged values into blocks."""
        with self._writing():
            for part in self._parts(len(ids)):
                blocks = self._turned(staged[part].to(self.slab.device))
                self.slab.index_copy_(0, self._index(ids[part]), blocks)

    def _gather(self, ids: NDArray[Any], staged: torch.Tensor) -> None:
        self._check_in_place()
        with torch.no_grad():
            for part in self._parts(len(ids)):
                blocks = self.slab.index_select(0, self._index(ids[part]))
                staged[part].copy_(self._turned(blocks))

    def _turned(self, blocks: torch.Tensor) -> torch.Tensor:
        """From the slab's layout to that of format 1, or back."""
        return blocks if self.layout == "HND" else blocks.transpose(-2, -3)

    def _parts(self, n: int) -> list[slice]:
        step = max(1, GATHERED_BYTES // self.block_bytes)
        return [slice(i, min(n, i + step)) for i in range(0, n, step)]

    def _index(self, ids: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.slab.device)

    def _writing(self) -> AbstractContextManager[object]:
        self._check_in_place()  # and a tensor made in inference mode is only written in it
        mode: AbstractContextManager[object] = (
            torch.inference_mode() if self.slab.is_inference() else torch.no_grad()
        )
        return mode

    def _check_in_place(self) -> None:
        """The tensor is its owner's, who may have resized it: then the ids mean nothing."""
        if self.slab.shape != self._shape or self.slab.data_ptr() != self._address:
            raise InvalidArgument(
                f"slab: the tensor was resized or moved: expected {tuple(self._shape)} where the "
                f"pool was made over it, found {tuple(self.slab.shape)}"
            )

    # ---- through the host --------------------------------------------------------------------

    def must_be_float16(self) -> None:
        """Raises Unsupported when format 1 cannot carry the values as they are."""
        if self.slab.dtype != torch.float16:
            name = str(self.slab.dtype).removeprefix("torch.")
            raise Unsupported(
                f"export, import: format 1 carries float16 and this slab is {name}: its values "
                "would be rounded" + (", or become infinite" if name == "bfloat16" else "")
            )

    def stage(self, ids: NDArray[Any], fills: NDArray[Any], names: NDArray[Any]) -> Pool:
        """A pool in host memory whose blocks 0, 1, 2, ... are these, all different."""
        pool, staged = self._staging(len(ids))
        self._gather(ids, staged)
        if len(ids):
            at = pool.alloc(len(ids))  # 0, 1, 2, ...: it is a fresh pool
            pool.set_fill(at, fills)
            pool.register(at[names != 0], names[names != 0])
        return pool

    def read(
        self, buffer: Buffer | NDArray[Any]
    ) -> tuple[torch.Tensor, NDArray[np.uint32], NDArray[np.uint64]]:
        """Staged values, fills and names of an envelope that is whole and of these dimensions."""
        self.must_be_float16()
        try:
            size = memoryview(buffer).nbytes  # type: ignore[arg-type]
        except TypeError:
            size = 0  # no buffer at all: the reader says so
        n = max(0, size - 32) // (12 + self.block_bytes)
        pool, staged = self._staging(min(n, self.n_blocks))
        try:
            at = pool.import_(buffer)
        except PoolFull:  # whole, and more than the pool itself has
            raise PoolFull(f"import_: {n} blocks needed, the pool has {self.n_blocks}") from None
        return staged[: len(at)], pool.fill(at), pool.hash(at)

    def _staging(self, n: int) -> tuple[Pool, torch.Tensor]:
        """An empty pool of n blocks (one at least) in host memory, and its slab."""
        d = self.dims
        shape = (d["n_layers"], 2, d["n_kv_heads"], d["block_tokens"], d["head_dim"])
        pinned = self.slab.device.type == "cuda"
        staged = torch.empty(max(1, n), *shape, dtype=torch.float16, pin_memory=pinned)
        return Pool(max(1, n), slab=staged.numpy(), **d), staged


def _check(slab: object) -> None:
    if not isinstance(slab, torch.Tensor):
        found = f"{slab!r:.100} ({type(slab).__name__})"
        raise ArgumentTypeError(f"slab: expected a tensor, found {found}")
    if slab.dtype not in DTYPES:
        raise DtypeMismatch(f"slab: expected float16, bfloat16 or float32, found {slab.dtype}")
    if slab.layout != torch.strided or slab.device.type == "meta":
        raise InvalidArgument(f"slab: expected memory, found {slab.layout} on {slab.device}")
    if slab.ndim != 6 or slab.shape[2] != 2 or 0 in slab.shape:
        raise InvalidArgument(
            "slab: expected (n_blocks, n_layers, 2, n_kv_heads, block_tokens, head_dim), for NHD "
            "block_tokens before n_kv_heads, all at least 1, found "
            f"{tuple(slab.shape)}"
        )
    if not slab.is_contiguous():
        raise InvalidArgument(f"slab: expected a contiguous tensor, found strides {slab.stride()}")
    if slab.requires_grad:
        raise InvalidArgument("slab: expected a tensor without requires_grad")
