"""One run over a trace, put together: the replays, the reuse, the policies, and their numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .in_flight import InFlight
from .policies import make_plan, simulate
from .readers.source import Problems
from .real_time import RealTime
from .request import Request
from .result import Result
from .reuse import Reuse

__all__ = ["AUTO_POLICIES", "Study", "curve_sizes"]

AUTO_POLICIES = 2_000_000  # blocks of a trace up to which policies are simulated unasked


@dataclass
class Study:
    """What the report shows. ``main`` says which replay the distributions belong to."""

    name: str
    format: str
    block_tokens: int
    has_hashes: bool
    clocks: Sequence[InFlight | RealTime]
    reuse: Reuse
    settings: dict[str, Any]
    main: int = 0
    problems: Problems = field(default_factory=lambda: Problems(skip=False))
    bytes_per_block: float | None = None
    policy_sizes: list[int] = field(default_factory=list)
    policy_hits: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    parse_s: float = 0.0
    parsed_bytes: int = 0
    duration_s: float = 0.0
    interrupted: bool = False

    @property
    def results(self) -> list[Result]:
        """One for each pool size."""
        return [clock.result for clock in self.clocks]

    @property
    def primary(self) -> Result:
        """The replay that the distributions belong to."""
        return self.results[self.main]

    @property
    def ceiling(self) -> float:
        """The hit rate, by blocks, of a pool that never evicts."""
        return self.reuse.seen_before / max(self.reuse.blocks, 1)

    def run(
        self,
        batches: Iterable[list[Request]],
        *,
        limit: int | None = None,
        advance: Callable[[int], None] = lambda requests: None,
    ) -> None:
        """Replays the whole stream. Ctrl-C ends it early, and ``interrupted`` says so."""
        arrivals = _Arrivals()
        done = 0
        try:
            for batch in self._timed(batches):
                if limit is not None and done + len(batch) > limit:
                    batch = batch[: limit - done]
                for i in range(0, len(batch), 512):  # small steps: a bar that moves, a quick Ctrl-C
                    part = batch[i : i + 512]
                    self._feed(part)
                    arrivals.add(part)
                    done += len(part)
                    advance(done)
                if done == limit:
                    break
            self._feed(None)
        except KeyboardInterrupt:
            self.interrupted = True
        self.duration_s = arrivals.span

    def _feed(self, part: list[Request] | None) -> None:
        """To every pool; None is the end. The main one's order of service is that of the reuse."""
        for i, clock in enumerate(self.clocks):
            served = clock.finish() if part is None else clock.feed(part)
            if i == self.main:
                self.reuse.feed(served)

    def _timed(self, batches: Iterable[list[Request]]) -> Iterator[list[Request]]:
        stream = iter(batches)
        while True:
            begin = time.process_time()
            batch = next(stream, None)
            self.parse_s += time.process_time() - begin
            if batch is None:
                return
            yield batch

    def simulate(
        self, names: Sequence[str], n_sizes: int = 12, advance: Callable[[], None] = lambda: None
    ) -> None:
        """Adds the policies, at sizes spread over the curve. Nothing for a trace that was not kept,
        or where nothing is ever used again."""
        trace = self.reuse.names()
        if trace is None or not self.reuse.seen_before:
            return
        sizes = curve_sizes(self.reuse, n_sizes).tolist()
        self.policy_sizes = sizes
        try:
            self.policy_hits = simulate(
                make_plan(trace), names, sizes, match_last=self.reuse.match_last, progress=advance
            )
        except KeyboardInterrupt:
            self.interrupted, self.policy_sizes = True, []

    def curve(self, n: int = 160) -> list[tuple[int, float]]:
        """(pool size, hit rate by blocks) under LRU, from the longest request on."""
        sizes = curve_sizes(self.reuse, n)
        hits = self.reuse.hits(sizes)
        total = max(self.reuse.blocks, 1)
        return [(int(s), float(h) / total) for s, h in zip(sizes, hits, strict=True)]

    def knees(self) -> list[tuple[float, int]]:
        """(share of the ceiling, smallest pool size that reaches it)."""
        floor = max(self.reuse.longest, 1)
        return [
            (share, max(self.reuse.size_for(share * self.reuse.seen_before), floor))
            for share in (0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything, as numbers."""
        lifetimes, once = self.reuse.lifetimes()
        reuse = self.reuse
        return {
            "trace": self.name,
            "format": self.format,
            "block_tokens": self.block_tokens,
            "has_hashes": self.has_hashes,
            "settings": self.settings,
            "interrupted": self.interrupted,
            "bad_lines": {"count": self.problems.count, "first": self.problems.first},
            "requests": self.primary.requests,
            "blocks": self.primary.prompt_blocks,
            "distinct_blocks": reuse.distinct,
            "longest_request_blocks": reuse.longest,
            "duration_s": self.duration_s,
            "replays": [result.to_json() for result in self.results],
            "ceiling": {"hit_blocks": reuse.seen_before, "block_hit_rate": round(self.ceiling, 6)},
            "curve": {
                "exact_from_blocks": reuse.longest,
                "exact_to_blocks": reuse.max_blocks,
                "points": [(size, round(rate, 6)) for size, rate in self.curve()],
                "share_of_ceiling": self.knees(),
            },
            "policies": {
                "sizes": self.policy_sizes,
                "hit_blocks": self.policy_hits,
            },
            "reuse_distance_blocks": reuse.depth_histogram.to_json(),
            "reuse_age_s": reuse.age_s.to_json(),
            "hit_age_s": reuse.hit_age_s.to_json(),
            "block_lifetime_s": {"used_once": once, **lifetimes.to_json()},
            "retention_s": {str(size): h.to_json() for size, h in reuse.retention_s.items()},
            "prefixes": reuse.top_prefixes(20),
            "sessions": reuse.top_sessions(20),
            "occupancy": [
                [round(at, 3), round(mean, 1), peak]
                for at, mean, peak in self.primary.occupancy.points()
            ],
            "parse": {
                "bytes": self.parsed_bytes,
                "seconds": round(self.parse_s, 4),
                "mb_per_s": round(self.parsed_bytes / max(self.parse_s, 1e-9) / 1e6, 1),
            },
            "notes": self.notes,
        }


class _Arrivals:
    """From the first to the last arrival, in seconds."""

    def __init__(self) -> None:
        self._first, self._last = float("inf"), float("-inf")

    def add(self, batch: list[Request]) -> None:
        if batch:
            times = [request.arrival_s for request in batch]
            self._first = min(self._first, *times, float("inf"))
            self._last = max(self._last, *times, float("-inf"))

    @property
    def span(self) -> float:
        return max(self._last - self._first, 0.0)


def curve_sizes(reuse: Reuse, n: int) -> Any:
    """Sizes for a curve, evenly spaced by ratio: int64, rising, without duplicates."""
    low = max(reuse.longest, 1)
    high = max(reuse.size_for(reuse.seen_before), 2 * low)
    return np.unique(np.geomspace(low, high, n).round().astype(np.int64))
