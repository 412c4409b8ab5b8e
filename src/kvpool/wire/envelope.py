"""A whole envelope in memory, over the buffer it is in.

    buffer   [ header ] [ hash 8 | n_tokens 4 | payload P ] [ hash | n_tokens | payload ] ...
    hashes                ^--------- 12 + P ----------^
    n_tokens                       ^--------- 12 + P ----------^
    payload                                     ^--------- 12 + P ----------^

The three arrays are views of the buffer with a stride of one record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvpool import Pool
from kvpool._core import EnvelopeHeader

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HEADER_BYTES", "RECORD_BYTES", "TRAILER_BYTES", "Block", "Envelope", "Shape"]

HEADER_BYTES, RECORD_BYTES, TRAILER_BYTES = 28, 12, 4

#: What an envelope's dimensions are held to: a pool's, or ``(block_tokens, n_layers, n_kv_heads,
#: head_dim)``; with None they may be any but 0.
Shape: TypeAlias = Pool | tuple[int, int, int, int] | None


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One block of an envelope.

    ``payload`` is float16 ``(n_layers, 2, n_kv_heads, block_tokens, head_dim)``; of its positions
    the first ``n_tokens`` hold data.

    >>> import numpy as np
    >>> block = Block(0, hash=0, n_tokens=1, payload=np.ones((3, 2, 1, 4, 8), np.float16))
    >>> block.name, block.k.shape
    (None, (3, 1, 1, 8))
    """

    index: int
    """Its place in the envelope."""
    hash: int
    """The block's name, or 0 for none: a partial tail, or a block that was not registered."""
    n_tokens: int
    """Positions that hold data, 1 to block_tokens."""
    payload: NDArray[np.float16]
    """K and V; a view."""

    @property
    def name(self) -> int | None:
        """The hash, or None when there is none, as ``Pool.hash`` says it."""
        return self.hash or None

    @property
    def k(self) -> NDArray[np.float16]:
        """K of the positions that hold data: ``(n_layers, n_kv_heads, n_tokens, head_dim)``."""
        return self.payload[:, 0, :, : self.n_tokens]

    @property
    def v(self) -> NDArray[np.float16]:
        """V of the positions that hold data: ``(n_layers, n_kv_heads, n_tokens, head_dim)``."""
        return self.payload[:, 1, :, : self.n_tokens]


class Envelope:
    """An envelope over any C-contiguous buffer, validated whole before anything of it is read.

    Args:
        buffer: bytes, bytearray, memoryview, mmap, a NumPy array, ....
        shape: what the dimensions must be, see ``Shape``.

    The arrays are read-only views of the buffer and keep it alive. They show what it holds when
    they are read: a buffer that is written after the validation shows that. (An mmap of a file that
    somebody cuts short ends the process with SIGBUS: use ``EnvelopeFile`` for files that are not
    yours.)

    Raises:
        CorruptEnvelope: a rule of the format is broken; the text says which, and where.
        ShapeMismatch: the dimensions are others than ``shape``.
        InvalidArgument: no C-contiguous buffer.

    Source: seed section 2.4; formats/kv-block.md.

    >>> import kvpool
    >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> ids = pool.alloc(1)
    >>> pool.set_fill(ids, 2)
    >>> pool.register(ids, [7])
    array([ True])
    >>> data = pool.export(ids)
    >>> [block] = Envelope(data, pool)
    >>> block.hash, block.n_tokens, block.payload.shape
    (7, 2, (1, 2, 1, 2, 2))
    >>> Envelope(data[:-1] + b"?")
    Traceback (most recent call last):
    kvpool.errors.CorruptEnvelope: tl_kv_envelope_check: CRC-32C ... at offset 56, ... (rule 3)
    """

    __slots__ = ("hashes", "header", "n_tokens", "payload")

    header: EnvelopeHeader
    """Dimensions, sizes and checksum."""
    hashes: NDArray[np.uint64]
    """The names: uint64 ``(n_blocks,)``, 0 for none."""
    n_tokens: NDArray[np.uint32]
    """Positions that hold data: uint32 ``(n_blocks,)``."""
    payload: NDArray[np.float16]
    """K and V: float16 ``(n_blocks, n_layers, 2, n_kv_heads, block_tokens, head_dim)``."""

    def __init__(self, buffer: Buffer | NDArray[Any], shape: Shape = None) -> None:
        header = EnvelopeHeader.check(buffer, shape)
        size, layers, heads, dim = header.shape
        n, record = header.n_blocks, RECORD_BYTES + header.block_bytes
        self.header = header
        dims = (layers, 2, heads, size, dim)
        if n == 0:  # the dimensions of no blocks may be anything, and their product no array
            fits = 0 < header.block_bytes < 1 << 62
            self.hashes, self.n_tokens = np.empty(0, "<u8"), np.empty(0, "<u4")
            self.payload = np.empty((0, *(dims if fits else (0, 2, 0, 0, 0))), "<f2")
            return
        raw: Any = buffer
        # frombuffer keeps the memoryview and so the bytes' export; ndarray() alone would not.
        data = np.frombuffer(memoryview(raw).toreadonly(), np.uint8)
        self.hashes = np.ndarray((n,), "<u8", data, HEADER_BYTES, (record,))
        self.n_tokens = np.ndarray((n,), "<u4", data, HEADER_BYTES + 8, (record,))
        strides = [2]
        for d in reversed(dims[1:]):
            strides.append(strides[-1] * d)
        self.payload = np.ndarray(
            (n, *dims), "<f2", data, HEADER_BYTES + RECORD_BYTES, (record, *reversed(strides))
        )

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, index: int) -> Block:
        """Block ``index``; negative ones count from the end. IndexError."""
        index = range(len(self))[index]
        return Block(index, int(self.hashes[index]), int(self.n_tokens[index]), self.payload[index])

    def __iter__(self) -> Iterator[Block]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Envelope({self.header!r})"
