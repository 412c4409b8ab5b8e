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
from collections.abc import Sequence as Row
from typing import NamedTuple

import numpy as np

import kvpool

from .request import Request, n_blocks_of
from .result import Result

__all__ = ["UNIT", "InFlight", "Served", "make_manager"]

UNIT = 2  # tokens of the pool's blocks
_SAMPLE = 16  # requests from one look at the pool to the next


class Served(NamedTuple):
    """A request that was let in, the blocks it hit, and when."""

    request: Request
    hit_blocks: int
    at: float


def make_manager(n_blocks: int, watermark: int = 0) -> kvpool.BlockManager:
    """A manager over a pool whose blocks hold next to nothing: 8 bytes each."""
    pool = kvpool.Pool(n_blocks, block_tokens=UNIT, n_layers=1, n_kv_heads=1, head_dim=1)
    return kvpool.BlockManager(pool, watermark=watermark)


class InFlight:
    """Feed it batches of requests; ``result`` is right after each.

    Args:
        n_blocks: of the pool.
        block_tokens: tokens that a block of the trace stands for.
        in_flight: requests that run at a time.
        match_last: a prompt's last block may be hit too. Engines leave the last token to compute,
            so by default it is not.
        outputs: requests hold the blocks of their whole answer, too, from their start.

    >>> def request(*ids):
    ...     return Request(0.0, np.array(ids, np.uint64), 16 * len(ids), 0)
    >>> clock = InFlight(8, 16, in_flight=1)
    >>> [served.hit_blocks for served in clock.feed([request(1, 2, 3), request(1, 2, 4)])]
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
        self.manager = make_manager(n_blocks)
        self.result = Result("in flight", n_blocks, block_tokens)
        self._in_flight, self._match_last, self._outputs = in_flight, match_last, outputs
        self._running: deque[list[kvpool.Sequence]] = deque()
        self._evictions = 0

    def feed(self, batch: Row[Request]) -> list[Served]:
        """Serves these requests, after those before."""
        begin = time.process_time()
        result, pool = self.result, self.manager.pool
        number = result.requests
        hits: list[int] = []
        for i in range(0, len(batch), _SAMPLE):
            self._serve(batch[i : i + _SAMPLE], hits)
            stats = pool.stats
            result.occupancy.add(float(number + len(hits)), stats.used)
            result.evictions += (stats.evictions - self._evictions) % 2**32
            self._evictions = stats.evictions
        result.occupancy.peak = max(result.occupancy.peak, self.manager.stats.peak_used)
        result.processor_s += time.process_time() - begin
        return self._count(batch, hits)

    def _serve(self, batch: Row[Request], hits: list[int]) -> None:
        """The loop that the clock is for."""
        allocate, match_last = self.manager.allocate, self._match_last
        running, limit, result = self._running, self._in_flight, self.result
        for request in batch:
            if len(running) == limit:
                for sequence in running.popleft():
                    sequence.free()
            tokens = request.ids.view(np.uint32)
            while True:
                try:
                    sequence = allocate(tokens, match_last=match_last)
                except kvpool.PoolFull:
                    if not running:
                        result.rejected += 1
                        hits.append(0)
                        break
                    for sequence in running.popleft():
                        sequence.free()
                    result.freed_early += 1
                    continue
                sequence.commit()
                hits.append(sequence.n_cached // UNIT)
                if self._outputs:
                    self._answer(request, sequence)
                else:
                    running.append([sequence])
                break

    def _answer(self, request: Request, first: kvpool.Sequence) -> None:
        """Takes the blocks of all answers; frees the oldest requests where they do not fit."""
        room = -request.input_length % self.result.block_tokens
        n_blocks = n_blocks_of(max(request.output_length - room, 0), self.result.block_tokens)
        tokens = np.zeros(UNIT * n_blocks, np.uint32)
        sequences = [first]
        sequences += [first.fork() for _ in range(request.n - 1)]
        for sequence in sequences:
            while True:
                try:
                    sequence.append(tokens)
                    break
                except kvpool.PoolFull:
                    if not self._running:
                        self.result.rejected += 1
                        self.manager.free(sequences)
                        return
                    self.manager.free(self._running.popleft())
                    self.result.freed_early += 1
        self.result.output_tokens += request.n * request.output_length
        self._running.append(sequences)

    def _count(self, batch: Row[Request], hits: list[int]) -> list[Served]:
        result, size = self.result, self.result.block_tokens
        result.requests += len(batch)
        served = []
        for request, n in zip(batch, hits, strict=True):
            result.prompt_blocks += len(request.ids)
            result.prompt_tokens += request.input_length
            result.hit_blocks += n
            result.hit_tokens += min(n * size, request.input_length)
            served.append(Served(request, n, request.arrival_s))
        return served

    def finish(self) -> list[Served]:
        """The end of the trace."""
        return []
