"""What ``kvpool inspect`` measures in the blocks of a file, a few megabytes at a time.

A block's payload is ``(n_layers, 2, n_kv_heads, block_tokens, head_dim)``, and a file may say that
it is as large as it likes. It is walked in spans of at most 4 MiB: as many whole planes (one
layer's K or V) as fit, else as many heads of a plane, else a part of a head's rows. Holes are not
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.wire import EnvelopeFile

__all__ = ["Summary", "layer_means", "spans", "summaries"]

_SPAN_BYTES = 1 << 22


@dataclass
class Summary:
    """Minimum, maximum and mean of the values that are not NaN, and how many are."""

    minimum: float = np.inf
    maximum: float = -np.inf
    total: float = 0.0
    count: int = 0
    n_nan: int = 0

    def add(self, values: NDArray[np.float16] | None, n: int) -> None:
        """Takes in n values; None stands for zeros."""
        if values is None:
            self.minimum, self.maximum = min(self.minimum, 0.0), max(self.maximum, 0.0)
            self.count += n
            return
        wide = values.astype(np.float32).reshape(-1)
        nan = np.isnan(wide)
        if nan.any():
            self.n_nan += int(nan.sum())
            wide = wide[~nan]
        if len(wide):
            self.minimum = min(self.minimum, float(wide.min()))
            self.maximum = max(self.maximum, float(wide.max()))
            with np.errstate(invalid="ignore"):  # infinities of both signs have no mean
                self.total += float(wide.sum(dtype=np.float64))
            self.count += len(wide)

    @property
    def mean(self) -> float:
        """NaN when there are no numbers."""
        return self.total / self.count if self.count else float("nan")


Span = tuple[int, int, "NDArray[np.float16] | None"]


def spans(file: EnvelopeFile, index: int, n_tokens: int) -> Iterator[Span]:
    """Pieces of a block: (first plane, values of a plane, float16 or None for zeros).

    The array is ``(planes, ...)``; only positions below n_tokens are in it. It is a view of a
    buffer that the next piece overwrites.
    """
    size, layers, heads, dim = file.header.shape
    row, head = 2 * dim, 2 * dim * size
    buffer = memoryview(bytearray(min(_SPAN_BYTES, file.header.block_bytes)))
    if head * heads <= _SPAN_BYTES:
        step = _SPAN_BYTES // (head * heads)
        for plane in range(0, 2 * layers, step):
            n = min(step, 2 * layers - plane)
            view = buffer[: n * heads * head]
            full = file.read_payload(index, plane * heads * head, view)
            values = np.frombuffer(view, "<f2").reshape(n, heads, size, dim)[:, :, :n_tokens]
            for k in range(n):
                yield plane + k, heads * n_tokens * dim, values[k : k + 1] if full else None
        return
    for plane in range(2 * layers):
        base = plane * heads * head
        if head <= _SPAN_BYTES:
            step = _SPAN_BYTES // head
            for first in range(0, heads, step):
                n = min(step, heads - first)
                view = buffer[: n * head]
                full = file.read_payload(index, base + first * head, view)
                values = np.frombuffer(view, "<f2").reshape(1, n, size, dim)[:, :, :n_tokens]
                yield plane, n * n_tokens * dim, values if full else None
            continue
        for first in range(heads):
            for at in range(0, n_tokens * row, _SPAN_BYTES):
                view = buffer[: min(_SPAN_BYTES, n_tokens * row - at)]
                full = file.read_payload(index, base + first * head + at, view)
                yield plane, len(view) // 2, np.frombuffer(view, "<f2")[None] if full else None


def summaries(file: EnvelopeFile, index: int, n_tokens: int) -> tuple[Summary, Summary]:
    """Of the K and of the V of a block's first n_tokens positions."""
    both = Summary(), Summary()
    for plane, n, values in spans(file, index, n_tokens):
        both[plane % 2].add(values, n)
    return both


def layer_means(file: EnvelopeFile, n_columns: int) -> tuple[NDArray[np.float64], int]:
    """Mean |K| and |V| by layer and position: float64 ``(2, n_layers, columns)``, and positions.

    Of more positions than ``n_columns`` neighbours share a column. NaN counts as nothing. Only for
    blocks whose planes fit a span.
    """
    _, layers, heads, dim = file.header.shape
    fills = [int(n) for _, some in file.records() for n in some]
    total = sum(fills)
    width = max(1, min(total, n_columns))
    sums = np.zeros((2, layers, width))
    counts = np.zeros(width)
    at = 0
    for index, n_tokens in enumerate(fills):
        columns = np.arange(at, at + n_tokens) * width // max(total, 1)
        np.add.at(counts, columns, heads * dim)
        for plane, _, values in spans(file, index, n_tokens):
            if values is not None:
                row = np.nansum(np.abs(values[0].astype(np.float64)), axis=(0, 2))
                np.add.at(sums[plane % 2, plane // 2], columns, row)
        at += n_tokens
    return sums / np.maximum(counts, 1), total
