"""The first clock: so many requests in flight, first in, first out; no times at all.

Before a request starts, the oldest is freed where ``in_flight`` are running, and then as many more,
oldest first, as it takes until the new one fits. Its blocks become findable at once. This is the
protocol that published hit counts of traces are made with, and the fastest way through one.

Both clocks run a real :class:`kvpool.BlockManager`. A block of its pool has two tokens and stands
for one block of the trace, however long that is: the two 32-bit halves of the block's id. Half of
it, one token, is a block that is not full, and so not findable.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Row

import numpy as np

import kvpool

from .errors import TraceError
from .request import UNIT, Request, n_blocks_of
from .result import Result

__all__ = ["InFlight", "Served", "at_least_one", "make_manager"]

_SAMPLE = 16  # requests from one look at the pool to the next


class Served:
    """Requests that were let in, the blocks that each one hit, and when: three rows in step."""

    __slots__ = ("at", "hit_blocks", "requests")

    def __init__(self, requests: Row[Request], hit_blocks: Row[int], at: Row[float]) -> None:
        self.requests, self.hit_blocks, self.at = requests, hit_blocks, at

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[tuple[Request, int, float]]:
        return zip(self.requests, self.hit_blocks, self.at, strict=True)


def make_manager(n_blocks: int, watermark: int = 0) -> kvpool.BlockManager:
    """A manager over a pool whose blocks hold next to nothing: 8 bytes each."""
    pool = kvpool.Pool(n_blocks, block_tokens=UNIT, n_layers=1, n_kv_heads=1, head_dim=1)
    return kvpool.BlockManager(pool, watermark=watermark)


def at_least_one(**settings: int) -> None:
    """Raises TraceError, which names the setting that is not."""
    for name, value in settings.items():
        if value < 1:
            raise TraceError(f"{name} is {value}, expected at least 1")


class InFlight:
    """Feed it batches of requests; ``result`` is right after each.

    Args:
        n_blocks: of the pool.
        block_tokens: tokens that a block of the trace stands for.
        in_flight: requests that run at a time.
        match_last: a prompt's last block may be hit too. Engines leave the last token to compute,
            so by default it is not.
        outputs: requests hold the blocks of their whole answer, too, from their start.

    Raises TraceError for a setting below 1, and what the pool says about ``n_blocks``.

    >>> from kvpool.replay import make_request
    >>> clock = InFlight(8, 16, in_flight=1)
    >>> clock.feed([make_request(0.0, [1, 2, 3], 48), make_request(0.0, [1, 2, 4], 48)]).hit_blocks
    [0, 2]
    >>> clock.result.hit_tokens, clock.result.prompt_tokens
    (32, 96)
    """

    def __init__(
        self,
        n_blocks: int,
        block_tokens: int,
        *,
        in_flight: int = 64,
        match_last: bool = False,
        outputs: bool = False,
    ) -> None:
        at_least_one(block_tokens=block_tokens, in_flight=in_flight)
        self.manager = make_manager(n_blocks)
        self.result = Result("in flight", n_blocks, block_tokens)
        self._in_flight, self._match_last, self._outputs = in_flight, match_last, outputs
        self._running: deque[kvpool.Sequence | _Answers] = deque()
        self._evictions = 0

    def feed(self, batch: Row[Request]) -> Served:
        """Serves these requests, after those before."""
        begin = time.process_time()
        result, pool = self.result, self.manager.pool
        number = result.requests
        cached: list[int] = []  # tokens of the pool, for each request
        for i in range(0, len(batch), _SAMPLE):
            self._serve(batch[i : i + _SAMPLE], cached)
            stats = pool.stats
            result.occupancy.add(float(number + len(cached)), stats.used)
            result.evictions += (stats.evictions - self._evictions) % 2**32
            self._evictions = stats.evictions
        result.occupancy.peak = max(result.occupancy.peak, self.manager.stats.peak_used)
        served = self._count(batch, cached)
        result.processor_s += time.process_time() - begin
        return served

    def _serve(self, batch: Row[Request], cached: list[int]) -> None:
        """The loop that the clock is for: some 15 nanoseconds a block of it are Python's."""
        allocate, match_last, outputs = self.manager.allocate, self._match_last, self._outputs
        running, limit = self._running, self._in_flight
        free_oldest, run, note = running.popleft, running.append, cached.append
        for request in batch:
            if len(running) == limit:
                free_oldest().free()
            while True:
                try:
                    sequence = allocate(request.units, match_last=match_last)
                except kvpool.PoolFull:
                    if running:
                        free_oldest().free()
                        self.result.freed_early += 1
                        continue
                    self.result.rejected += 1
                    note(0)
                    break
                sequence.commit()
                note(sequence.n_cached)
                if outputs:
                    self._answer(request, sequence)
                else:
                    run(sequence)
                break

    def _answer(self, request: Request, first: kvpool.Sequence) -> None:
        """Takes the blocks of all answers; frees the oldest requests where they do not fit."""
        room = -request.input_length % self.result.block_tokens
        n_blocks = n_blocks_of(max(request.output_length - room, 0), self.result.block_tokens)
        units = np.zeros(UNIT * n_blocks, np.uint32)
        answers = _Answers([first, *(first.fork() for _ in range(request.n - 1))])
        for sequence in answers.sequences:
            while True:
                try:
                    sequence.append(units)
                    break
                except kvpool.PoolFull:
                    if not self._running:
                        self.result.rejected += 1
                        answers.free()
                        return
                    self._running.popleft().free()
                    self.result.freed_early += 1
        self.result.output_tokens += request.n * request.output_length
        self._running.append(answers)

    def _count(self, batch: Row[Request], cached: list[int]) -> Served:
        result = self.result
        lengths = [request.input_length for request in batch]
        hits = [n // UNIT for n in cached]
        result.requests += len(batch)
        result.prompt_tokens += sum(lengths)
        result.prompt_blocks += sum([len(request.units) for request in batch]) // UNIT
        result.hit_blocks += sum(hits)
        size = result.block_tokens
        result.hit_tokens += sum([min(n * size, m) for n, m in zip(hits, lengths, strict=True)])
        return Served(batch, hits, [request.arrival_s for request in batch])

    def finish(self) -> Served:
        """The end of the trace: nothing runs any more."""
        while self._running:
            self._running.popleft().free()
        return Served([], [], [])


class _Answers:
    """Forks that are freed together."""

    def __init__(self, sequences: list[kvpool.Sequence]) -> None:
        self.sequences = sequences

    def free(self) -> None:
        for sequence in self.sequences:
            sequence.free()
