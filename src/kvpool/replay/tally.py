"""Numbers of a stream in bounded memory: histograms, a series over time, tables of the largest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["LogHistogram", "Series", "TopTable"]


class LogHistogram:
    """Counts by size, four bins for each doubling: 9 % wide to either side.

    >>> histogram = LogHistogram(0.001)
    >>> histogram.add([0.5, 1.0, 1.0, 700.0])
    >>> histogram.total, round(histogram.quantile(0.5), 1), round(histogram.quantile(1.0))
    (4, 0.9, 680)
    """

    _PER_DOUBLING = 4

    def __init__(self, smallest: float) -> None:
        self.smallest = smallest
        self.counts: NDArray[np.int64] = np.zeros(48 * self._PER_DOUBLING, np.int64)
        self.zeros = 0  # at or below the smallest

    def add(self, values: ArrayLike) -> None:
        """Counts each value; NaN is left out."""
        x = np.asarray(values, np.float64)
        x = x[~np.isnan(x)]
        above = x[x > self.smallest]
        self.zeros += len(x) - len(above)
        if len(above):
            bins = np.log2(above / self.smallest) * self._PER_DOUBLING
            bins = np.minimum(bins, len(self.counts) - 1).astype(
                np.int64
            )  # infinity is in the last
            self.counts += np.bincount(bins, minlength=len(self.counts))

    @property
    def total(self) -> int:
        """How many were counted."""
        return int(self.counts.sum()) + self.zeros

    def edge(self, i: int) -> float:
        """Where bin i begins."""
        return float(self.smallest * 2.0 ** (i / self._PER_DOUBLING))

    def quantile(self, q: float) -> float:
        """The middle of the bin that holds it; 0 for what is below the smallest, NaN for none."""
        if self.total == 0:
            return float("nan")
        rank = max(q * self.total, 1) - self.zeros
        if rank <= 0:
            return 0.0
        i = int(np.searchsorted(np.cumsum(self.counts), rank))
        return float(self.edge(i) * 2.0 ** (0.5 / self._PER_DOUBLING))

    def below(self, limit: float) -> float:
        """The share at or below a limit that is a bin's edge, or near one."""
        i = round(np.log2(limit / self.smallest) * self._PER_DOUBLING)
        return float(self.counts[:i].sum() + self.zeros) / max(self.total, 1)

    def bars(self) -> list[tuple[float, float, int]]:
        """(from, to, count) for each doubling from the first that has any to the last."""
        per = self._PER_DOUBLING
        sums = self.counts.reshape(-1, per).sum(axis=1)
        bars = [(0.0, self.smallest, self.zeros)] if self.zeros else []
        used = np.flatnonzero(sums)
        if len(used):
            bars += [
                (self.edge(i * per), self.edge((i + 1) * per), int(sums[i]))
                for i in range(int(used[0]), int(used[-1]) + 1)
            ]
        return bars

    def to_json(self) -> dict[str, Any]:
        """Total, quantiles and bars."""
        names = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        quantiles = {k: round(self.quantile(q), 6) for k, q in names.items()} if self.total else {}
        return {"total": self.total, **quantiles, "bars": self.bars()}


class Series:
    """Values over time in at most 1,024 buckets: the mean by time, and the peak, of each.

    >>> series = Series()
    >>> for i in range(100_000):
    ...     series.add(float(i), i % 10)
    >>> len(list(series.points())) <= 1024, round(series.mean, 2), series.peak
    (True, 4.5, 9)
    """

    _MAX = 1024

    def __init__(self) -> None:
        self.peak = 0
        self._area, self._time = 0.0, 0.0
        self._last: tuple[float, int] | None = None
        self._buckets: list[list[float]] = []  # begin, duration, area, peak
        self._width = 0.0

    def add(self, at: float, value: int) -> None:
        """From ``at`` on it is ``value``; ``at`` never falls."""
        if self._last is not None:
            before, held = self._last
            self._hold(before, max(at - before, 0.0), held)
        self._last = (at, value)
        self.peak = max(self.peak, value)

    def _hold(self, begin: float, duration: float, value: int) -> None:
        self._area += duration * value
        self._time += duration
        last = self._buckets[-1] if self._buckets else None
        if last is not None and begin - last[0] < self._width:
            last[1] += duration
            last[2] += duration * value
            last[3] = max(last[3], value)
            return
        self._buckets.append([begin, duration, duration * value, value])
        if len(self._buckets) > self._MAX:
            pairs = zip(self._buckets[::2], self._buckets[1::2], strict=False)
            odd = self._buckets[-1:] if len(self._buckets) % 2 else []
            self._buckets = [
                [a[0], a[1] + b[1], a[2] + b[2], max(a[3], b[3])] for a, b in pairs
            ] + odd
            span = self._buckets[-1][0] - self._buckets[0][0]
            self._width = max(2 * span / self._MAX, self._width)

    @property
    def mean(self) -> float:
        """By time; the last value where no time passed."""
        if self._time > 0:
            return self._area / self._time
        return float(self._last[1]) if self._last else 0.0

    def points(self, n: int = 1024) -> Iterator[tuple[float, float, float]]:
        """(time, mean, peak) of each bucket, or of so many together that there are up to n."""
        step = -(-len(self._buckets) // n) if self._buckets else 1
        for i in range(0, len(self._buckets), step):
            group = self._buckets[i : i + step]
            time = sum(bucket[1] for bucket in group)
            peak = max(bucket[3] for bucket in group)
            yield group[0][0], sum(b[2] for b in group) / time if time > 0 else peak, peak


class TopTable:
    """Sums by key for those with the most, in bounded memory.

    Where there are more than twice ``limit`` keys, those with the least are forgotten: sums of rare
    keys may then be too low, and ``exact`` is False.

    >>> table = TopTable(limit=2)
    >>> for key in "abacabad":
    ...     table.add(key, 1, 10)
    >>> table.top(1), table.exact
    ([('a', [4, 40])], True)
    """

    def __init__(self, limit: int = 20_000) -> None:
        self._limit = limit
        self.rows: dict[Any, list[int]] = {}
        self.exact = True

    def add(self, key: Any, *amounts: int) -> None:
        """Adds to the key's sums; the first one decides who is largest."""
        row = self.rows.get(key)
        if row is None:
            self.rows[key] = list(amounts)
            if len(self.rows) > 2 * self._limit:
                self.rows = dict(self.top(self._limit))
                self.exact = False
        else:
            for i, amount in enumerate(amounts):
                row[i] += amount

    def __len__(self) -> int:
        return len(self.rows)

    def top(self, n: int) -> list[tuple[Any, list[int]]]:
        """The n largest, largest first."""
        return sorted(self.rows.items(), key=lambda item: -item[1][0])[:n]
