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

import kvpool
from kvpool._core import ReuseStack

from .in_flight import Served
from .request import UNIT
from .tally import LogHistogram, TopTable

__all__ = ["Names", "Reuse"]

_MAX_NAMES = 8_000_000
_AT = 2 ** np.arange(32) - 1  # where the first 1, 2, 4, ... blocks end
_SAMPLE = 64  # requests from one sample of the retention to the next


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

    def feed(self, served: Served) -> None:
        """Takes these requests in, after those before."""
        begin = time.process_time()
        depths, ages, hit_ages = [], [], []
        cut = None if self.match_last else -1
        for request, hits, at in served:
            names = kvpool.block_hashes(request.units, UNIT)
            depth, last = self.stack.use(names, at)
            depths.append(depth[:cut])
            ages.append(at - last[:cut])
            if hits:
                hit_ages.append(at - last[:hits])
            n = len(names)
            self.requests += 1
            self.blocks += n
            self.longest = max(self.longest, n)
            if request.session is not None:
                self.sessions.add(request.session, 1, n, hits)
            self._count_prefixes(names[_AT[: n.bit_length()]].tolist(), hits)
            if self.requests % _SAMPLE == 0:
                self._sample(at)
            if self._chunks is not None:
                self._chunks.append(names)
                self._lengths.append(n)
                if self.blocks > _MAX_NAMES:
                    self._chunks, self._lengths = None, []
        if depths:
            self._count(np.concatenate(depths))
            self.age_s.add(np.concatenate(ages))
        if hit_ages:
            self.hit_age_s.add(np.concatenate(hit_ages))
        self.processor_s += time.process_time() - begin

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

    def _count_prefixes(self, names: list[int], hits: int) -> None:
        """The names of the first 1, 2, 4, ... blocks; the loop is Python's, so it is kept short."""
        rows = self.prefixes.rows
        for i, name in enumerate(names):
            row = rows.get((name, i))
            if row is None:
                self.prefixes.add((name, i), 1, int(hits >= 1 << i))
                rows = self.prefixes.rows
            else:
                row[0] += 1
                row[1] += hits >= 1 << i

    def _sample(self, at: float) -> None:
        for size, histogram in self.retention_s.items():
            _, _, last = self.stack.read(size, 1)
            histogram.add(at - last)

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
            histogram.add((last - first)[again])
        return histogram, once

    def top_prefixes(self, n: int) -> list[dict[str, Any]]:
        """Beginnings that many requests share: the longest measured (1, 2, 4, ... blocks) of each.

        Sorted by the blocks that sharing saves: (requests - 1) * blocks.
        """
        rows = []
        for (name, i), (uses, hits) in self.prefixes.top(4 * n + 1000):
            if uses > 1:
                rows.append({"prefix": f"{name:016x}", "blocks": 1 << i, "requests": uses})
                rows[-1]["hits"] = hits
        rows.sort(key=lambda row: -(row["requests"] - 1) * row["blocks"])
        return rows[:n]

    def top_sessions(self, n: int) -> list[dict[str, Any]]:
        """Sessions with the most requests, where the trace has sessions."""
        return [
            {"session": name, "requests": row[0], "blocks": row[1], "hit_blocks": row[2]}
            for name, row in self.sessions.top(n)
        ]
