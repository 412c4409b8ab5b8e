"""Every pool size at once: what was used again, how soon, and from how deep.

A request's blocks are looked up in one :class:`ReuseStack`; the depth of a block is the size of the
smallest pool that would still hold it. The counts of all depths are the hit curve: for a pool of N
blocks that serves one request after the other, the hits are the blocks with a depth up to N, to the
block, for every N from the longest request on. (A pool that cannot hold a request cannot serve it.)
A block's depth is always above that of the blocks before it, because sequences give their blocks
back tail first, so a hit never has a gap before it.

Not allowed to match, a last block counts as a miss. The manager then computes it again into a block
of its own while the first copy keeps the name, so by such copies a real pool can be a few blocks
off: 2 of 288,500 on Mooncake's conversation trace (docs/sizing.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Row
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool._core import ReuseStack

from .in_flight import Served
from .request import UNIT, Request
from .tally import LogHistogram, TopTable

__all__ = ["Names", "Reuse"]

_MAX_NAMES = 8_000_000
_STEP = 256  # requests that go to the stack in one call
_SAMPLE = 64  # requests from one sample of the retention to the next, at least


class Names(NamedTuple):
    """A whole trace: uint64 names of blocks, and where each request begins among them."""

    names: NDArray[np.uint64]
    starts: NDArray[np.uint64]


class Reuse:
    """Feed it what was served, in order; its numbers are right after each batch.

    Args:
        max_blocks: pool sizes up to here are exact; memory is bounded by it.
        match_last: a prompt's last block may be hit too.
        sizes: pool sizes for which ``retention`` is sampled.
        keep_names: keep the whole trace (up to 8 million blocks) for ``names``.

    >>> from kvpool.replay import make_request
    >>> reuse = Reuse(match_last=True)
    >>> requests = [make_request(0.0, ids, 16) for ids in ([1, 2], [3], [1, 2])]
    >>> reuse.feed(Served(requests, [0, 0, 0], [0.0, 1.0, 2.0]))
    >>> reuse.hits([1, 2, 3]).tolist(), reuse.blocks, reuse.longest
    ([0, 1, 2], 5, 2)
    """

    def __init__(
        self,
        *,
        max_blocks: int = 2**22,
        match_last: bool = False,
        sizes: Row[int] = (),
        keep_names: bool = True,
    ) -> None:
        self.max_blocks, self.match_last = max_blocks, match_last
        self.stack = ReuseStack(max_blocks)
        self.requests = self.blocks = self.longest = self.seen_before = 0
        self.depth_histogram = LogHistogram(1)
        self.age_s = LogHistogram(1e-3)  # of everything used again
        self.hit_age_s = LogHistogram(1e-3)  # of what the replay hit
        self.retention_s = {size: LogHistogram(1e-3) for size in sizes}
        self.sessions = TopTable()
        self.prefixes = TopTable()
        self.processor_s = 0.0
        self._counts: NDArray[np.int64] = np.zeros(1024, np.int64)  # by depth
        self._chunks: list[NDArray[np.uint64]] | None = [] if keep_names else None
        self._lengths: list[int] = []
        self._times: NDArray[np.float64] = np.full(1024, np.nan)  # of each request

    def feed(self, served: Served) -> None:
        """Takes these requests in, after those before."""
        begin = time.process_time()
        for i in range(0, len(served), _STEP):
            requests = served.requests[i : i + _STEP]
            self._feed(requests, served.hit_blocks[i : i + _STEP], served.at[i : i + _STEP])
        self.processor_s += time.process_time() - begin

    def _feed(self, requests: Row[Request], hits: Row[int], at: Row[float]) -> None:
        lengths = [len(request.units) // UNIT for request in requests]
        units = np.concatenate([request.units for request in requests])
        times = np.asarray(at, np.float64)
        numbers = self._note_times(times)
        names, depths, last = self.stack.use_batch(units, lengths, numbers, UNIT)
        n = np.array(lengths)
        ends = np.cumsum(n)
        ages = np.repeat(times, n) - self._time_of(last)
        place = np.arange(len(names)) - np.repeat(ends - n, n)  # of each block in its prompt
        if not self.match_last:
            depths[ends[n > 0] - 1] = 0
        self._count(depths)
        self.age_s.add(ages[depths > 0])
        self.hit_age_s.add(ages[place < np.repeat(np.asarray(hits), n)])
        firsts = np.flatnonzero((place & (place + 1)) == 0)  # the first 1, 2, 4, ... blocks
        self._count_prefixes(names[firsts].tolist(), place[firsts].tolist(), lengths, hits)
        for request, blocks, hit in zip(requests, lengths, hits, strict=True):
            if request.session is not None:
                self.sessions.add(request.session, 1, blocks, hit)
        before = self.requests
        self.requests += len(requests)
        self.blocks += len(names)
        self.longest = max(self.longest, *lengths)
        if self.requests // _SAMPLE > before // _SAMPLE:
            self._sample(float(times[-1]))
        if self._chunks is not None:
            self._chunks.append(names)
            self._lengths += lengths
            if self.blocks > _MAX_NAMES:
                self._chunks, self._lengths = None, []

    def _note_times(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """The numbers of these requests. The stack is given those and not times, of which a trace
        may have none, or the same ones twice."""
        begin, end = self.requests, self.requests + len(times)
        while end >= len(self._times):  # the last place stays NaN
            self._times = np.concatenate([self._times, np.full(len(self._times), np.nan)])
        self._times[begin:end] = times
        return np.arange(begin, end, dtype=np.float64)

    def _time_of(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """When these requests came; NaN for NaN."""
        return self._times[np.nan_to_num(numbers, nan=-1).astype(np.int64)]

    def _count(self, depths: NDArray[np.uint64]) -> None:
        found = depths[depths > 0].astype(np.int64)
        if not len(found):
            return
        deepest = int(found.max())
        if deepest >= len(self._counts):
            counts = np.zeros(2 * deepest, np.int64)
            counts[: len(self._counts)] = self._counts
            self._counts = counts
        np.add.at(self._counts, found, 1)
        self.seen_before += len(found)
        self.depth_histogram.add(found)

    def _count_prefixes(
        self, names: list[int], places: list[int], lengths: Row[int], hits: Row[int]
    ) -> None:
        """The names of the first 1, 2, 4, ... blocks; the loop is Python's, so it is kept short."""
        rows, owner = self.prefixes.rows, -1
        owners = iter(range(len(lengths)))
        for name, place in zip(names, places, strict=True):
            if place == 0:
                owner = next(i for i in owners if lengths[i])
            hit = hits[owner] > place
            row = rows.get((name, place))
            if row is None:
                self.prefixes.add((name, place), 1, int(hit))
                rows = self.prefixes.rows
            else:
                row[0] += 1
                row[1] += hit

    def _sample(self, at: float) -> None:
        for size, histogram in self.retention_s.items():
            _, _, last = self.stack.read(size, 1)
            histogram.add(at - self._time_of(last))

    # ---- what it comes to --------------------------------------------------------------------

    def hits(self, sizes: Any) -> NDArray[np.int64]:
        """Blocks hit in pools of these sizes: int64 of the same shape."""
        sums = np.cumsum(self._counts)
        n = np.minimum(np.asarray(sizes, np.int64), len(sums) - 1)
        return np.asarray(sums[n])

    def size_for(self, hits: float) -> int:
        """The smallest pool with so many hits; the deepest reuse where there are not as many."""
        sums = np.cumsum(self._counts)
        return int(min(np.searchsorted(sums, min(hits, sums[-1])), len(sums) - 1))

    @property
    def distinct(self) -> int:
        """Different blocks that are remembered."""
        return len(self.stack)

    def names(self) -> Names | None:
        """The whole trace; None when it was too long, or not kept."""
        if self._chunks is None:
            return None
        starts = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.uint64)
        flat = np.concatenate(self._chunks) if self._chunks else np.zeros(0, np.uint64)
        return Names(flat, starts)

    def lifetimes(self) -> tuple[LogHistogram, int]:
        """From first to last use, of blocks that were used again; and how many never were."""
        histogram, once = LogHistogram(1e-3), 0
        for depth in range(1, len(self.stack) + 1, 1 << 20):
            _, first, last = self.stack.read(depth, 1 << 20)
            again = last > first
            once += int((~again).sum())
            histogram.add((self._time_of(last) - self._time_of(first))[again])
        return histogram, once

    def top_prefixes(self, n: int) -> list[dict[str, Any]]:
        """Beginnings that many requests share: the longest measured (1, 2, 4, ... blocks) of each.

        Sorted by the blocks that sharing saves: (requests - 1) * blocks.
        """
        rows = []
        for (name, place), (uses, hits) in self.prefixes.top(4 * n + 1000):
            if uses > 1:
                rows.append({"prefix": f"{name:016x}", "blocks": place + 1, "requests": uses})
                rows[-1]["hits"] = hits
        rows.sort(key=lambda row: -(row["requests"] - 1) * row["blocks"])
        return rows[:n]

    def top_sessions(self, n: int) -> list[dict[str, Any]]:
        """Sessions with the most requests, where the trace has sessions."""
        return [
            {"session": name, "requests": row[0], "blocks": row[1], "hit_blocks": row[2]}
            for name, row in self.sessions.top(n)
        ]
