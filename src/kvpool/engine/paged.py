"""One pass over a pool: which tokens are computed, and where their K and V go.

    Span    a sequence, and how many of its tokens come next     what the scheduler decides
    Batch   the same as arrays: tokens, positions, slots,        what the model and the kernel read
            block tables, lengths

The manager knows the blocks of each sequence; here they become one table for the whole batch, in a
buffer that is kept from pass to pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import kvpool
from kvpool import BlockManager, Pool

__all__ = ["Batch", "BatchMaker", "Span", "blocks_needed", "narrow"]

_HALF_MAX = np.float32(np.finfo(np.float16).max)


def blocks_needed(n_prompt: int, max_tokens: int, n: int, block_tokens: int) -> int:
    """Blocks that n samples of one prompt can hold at most, at the same time.

    The full blocks of the prompt are shared; the rest is every sample's own. The last token of a
    sample is never fed back, so it needs no room.

    >>> blocks_needed(n_prompt=40, max_tokens=10, n=4, block_tokens=16)     # 2 + 4 * 2
    10
    """
    shared = n_prompt // block_tokens
    positions = n_prompt + max_tokens - 1
    return shared + n * (-(-positions // block_tokens) - shared)


def narrow(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """float32 to float16, round to nearest even; what is too large becomes +-65504, not infinity.

    >>> narrow(np.array([1.0, 1e6], dtype=np.float32))
    array([1.00e+00, 6.55e+04], dtype=float16)
    """
    return np.clip(values, -_HALF_MAX, _HALF_MAX).astype(np.float16)


class Span(NamedTuple):
    """The next ``len(tokens)`` tokens of a sequence, from its first one that is not computed on."""

    sequence: kvpool.Sequence
    tokens: Sequence[int]


class Batch(NamedTuple):
    """The rows of one pass. Spans of one row come first, so that they are one call of the kernel.

    Attributes:
        pool: whose blocks are read and written.
        tokens, positions: (n_rows,) int64.
        blocks, offsets: (n_rows,) int64: the block and the position in it of each row's K and V.
        tables: (n_spans, columns) int32 block ids, -1 behind the last; a view of a kept buffer,
            valid until the next batch is made.
        lengths: (n_spans,) int32: tokens of each sequence up to the end of its span.
        n_single: how many spans have one row.
        longer: (first row, one past the last row) of each of the other spans.
    """

    pool: Pool
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    tables: NDArray[np.int32]
    lengths: NDArray[np.int32]
    n_single: int
    longer: list[tuple[int, int]]

    def store(self, layer: int, kv: NDArray[np.float32]) -> None:
        """Writes K and V, (n_rows, 2, n_kv_heads, head_dim), through a view of the slab."""
        self.pool.slab[self.blocks, layer, :, :, self.offsets] = narrow(kv)


class BatchMaker:
    """Makes batches of the sequences of one manager; keeps the buffer of their tables.

    >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> manager = BlockManager(pool)
    >>> one, two = manager.allocate([1, 2, 3, 4, 5]), manager.allocate([6])
    >>> batch, rows = BatchMaker(manager).make([Span(one, [1, 2, 3, 4, 5]), Span(two, [6])])
    >>> batch.tokens.tolist(), batch.tables.tolist(), batch.n_single, batch.longer
    ([6, 1, 2, 3, 4, 5], [[2, -1], [0, 1]], 1, [(1, 6)])
    >>> rows                                        # where the rows of each span are
    [(1, 6), (0, 1)]
    >>> manager.free([one, two])
    """

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self._tables = np.empty(0, dtype=np.int32)

    def make(self, spans: Sequence[Span]) -> tuple[Batch, list[tuple[int, int]]]:
        """The batch of ``spans`` and, for each of them, (first row, one past its last row)."""
        order = sorted(range(len(spans)), key=lambda i: len(spans[i].tokens) > 1)
        spans = [spans[i] for i in order]
        sequences = [span.sequence for span in spans]
        counts = np.array([len(span.tokens) for span in spans], dtype=np.int64)
        starts = np.array([sequence.n_computed for sequence in sequences], dtype=np.int64)
        ends = np.cumsum(counts)
        rows = [(int(end - n), int(end)) for n, end in zip(counts, ends, strict=True)]
        n_single = int(np.count_nonzero(counts == 1))
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        size = self.manager.pool.block_tokens
        slots = self.manager.slot_mapping(sequences, starts, counts)
        batch = Batch(
            pool=self.manager.pool,
            tokens=np.concatenate([np.asarray(span.tokens, dtype=np.int64) for span in spans]),
            positions=positions,
            blocks=slots // size,
            offsets=slots % size,
            tables=self._fill_tables(sequences),
            lengths=(starts + counts).astype(np.int32),
            n_single=n_single,
            longer=rows[n_single:],
        )
        where: list[tuple[int, int]] = [(0, 0)] * len(order)
        for i, place in zip(order, rows, strict=True):
            where[i] = place
        return batch, where

    def _fill_tables(self, sequences: list[kvpool.Sequence]) -> NDArray[np.int32]:
        columns = max(sequence.n_blocks for sequence in sequences)
        n = len(sequences) * columns
        if n > len(self._tables):
            self._tables = np.empty(2 * n, dtype=np.int32)
        out = self._tables[:n].reshape(len(sequences), columns)
        return self.manager.block_tables(sequences, out=out)
