"""The second clock: requests come when the trace says, and take the time that rates give them.

    arrival --> waiting --> prefill --> decode ... --> done
                 ^           one at a    a block more for every block_tokens tokens
                 |           time        |
                 +------ preempted: -----+
                         no room for a running one's next block: the last one that came in
                         gives its blocks back and waits at the front

A request starts when its whole prompt fits: hits and new blocks in one call. Prefill serves one
prompt at a time, ``(prompt - hits) / prefill_rate`` seconds each, and makes its blocks findable at
its end. Each answer then grows at ``decode_rate`` tokens a second. With n > 1 the prompt is forked,
and answers share its full blocks. Answers are never findable: a trace does not tell their hashes.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Sequence as Row
from dataclasses import dataclass, field

import numpy as np

import kvpool

from .errors import TraceError
from .in_flight import Served, at_least_one, make_manager
from .request import UNIT, Request
from .result import Result

__all__ = ["RealTime"]

_BLOCK = np.zeros(UNIT, np.uint32)


@dataclass(eq=False)
class _Run:
    """A request between its arrival and its end."""

    request: Request
    arrival: float
    produced: int = 0  # tokens of each answer that were there at its last preemption
    started: int = 0  # times it was let in; events of earlier ones are out of date
    grown: int = 0  # blocks that each answer has
    decode_at: float = 0.0
    sequences: list[kvpool.Sequence] = field(default_factory=list)


class RealTime:
    """Feed it batches of requests by rising arrival time; ``result`` is right after each.

    Args:
        n_blocks: of the pool.
        block_tokens: tokens that a block of the trace stands for.
        prefill_rate: prompt tokens a second, of the whole engine.
        decode_rate: tokens a second of each answer.
        max_running: requests that run at a time.
        watermark: blocks that new requests leave to running ones.
        speed: how many times faster than in the trace requests come.

    Raises TraceError for a setting that makes no sense, and what the manager says about the rest.

    >>> from kvpool.replay import make_request
    >>> clock = RealTime(4, 16, prefill_rate=32, decode_rate=16)
    >>> _ = clock.feed([make_request(at, [1, 2], 32, 32) for at in (0.0, 0.5)])
    >>> _ = clock.finish()
    >>> clock.result.requests, clock.result.waited, clock.result.occupancy.peak
    (2, 0, 4)
    """

    def __init__(
        self,
        n_blocks: int,
        block_tokens: int,
        *,
        prefill_rate: float,
        decode_rate: float,
        max_running: int = 256,
        watermark: int = 0,
        speed: float = 1.0,
    ) -> None:
        at_least_one(block_tokens=block_tokens, max_running=max_running)
        for name, rate in (("prefill_rate", prefill_rate), ("decode_rate", decode_rate)):
            if not 1e-9 <= rate <= 1e12:  # times stay numbers that can be added up
                raise TraceError(f"{name} is {rate}, expected 1e-9 to 1e12 tokens a second")
        if not 1e-9 <= speed <= 1e9:
            raise TraceError(f"speed is {speed}, expected 1e-9 to 1e9")
        self.manager = make_manager(n_blocks, watermark)
        self.result = Result("real time", n_blocks, block_tokens)
        self._prefill_rate, self._decode_rate = prefill_rate, decode_rate
        self._max_running, self._speed = max_running, speed
        self._now = 0.0
        self._first: float | None = None
        self._events: list[tuple[float, int, int, _Run]] = []
        self._n_events = 0
        self._waiting: deque[_Run] = deque()
        self._running: dict[_Run, None] = {}  # in the order in which they came in
        self._prefill_free = 0.0
        self._evictions = 0
        self._served: list[tuple[Request, int, float]] = []

    def feed(self, batch: Row[Request]) -> Served:
        """Lets these requests come; returns those that were let in meanwhile."""
        begin = time.process_time()
        for request in batch:
            if self._first is None:
                self._first = request.arrival_s
            arrival = max((request.arrival_s - self._first) / self._speed, self._now)
            self._advance(arrival)
            self._now = arrival
            self._waiting.append(_Run(request, arrival))
            result = self.result
            result.requests += 1
            result.prompt_blocks += request.n_blocks
            result.prompt_tokens += request.input_length
            self._admit()
            if self._waiting and self._waiting[-1].request is request:
                result.waited += 1
            self._look()
        self.result.processor_s += time.process_time() - begin
        return self._take_served()

    def finish(self) -> Served:
        """Runs until everything is done."""
        begin = time.process_time()
        self._advance(float("inf"))
        self.result.processor_s += time.process_time() - begin
        return self._take_served()

    def _take_served(self) -> Served:
        served, self._served = self._served, []
        return Served([s[0] for s in served], [s[1] for s in served], [s[2] for s in served])

    # ---- events ----------------------------------------------------------------------------

    def _advance(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._now, _, started, run = heapq.heappop(self._events)
            if started == run.started and run in self._running:
                self._step(run)
                self._look()

    def _at(self, when: float, run: _Run) -> None:
        self._n_events += 1  # events of the same time happen in the order they were made
        heapq.heappush(self._events, (when, self._n_events, run.started, run))

    def _look(self) -> None:
        stats, result = self.manager.pool.stats, self.result
        result.occupancy.add(self._now, stats.used)
        result.waiting.add(self._now, len(self._waiting))
        result.evictions += (stats.evictions - self._evictions) % 2**32
        self._evictions = stats.evictions

    def _step(self, run: _Run) -> None:
        """Prefill is done, an answer needs its next block, or the request is."""
        request, size = run.request, self.result.block_tokens
        total = self._blocks_of(request, request.output_length)
        resumes = False
        if run.grown < 0:  # prefill is done
            for sequence in run.sequences:
                sequence.commit(self._prompt(request).size)
            if run.started == 1:
                self.result.first_token_s.add([self._now - run.arrival])
            run.decode_at = self._now
            run.grown = self._blocks_of(request, run.produced)
            resumes = run.grown > 0  # it has the blocks of what it had produced
        room = -request.input_length % size
        if run.grown >= total and not resumes:
            self._end(run)
            return
        if not resumes:
            if not self._grow(run, 1 if run.grown == 0 and room else UNIT):
                return
            run.grown += 1
        if run.grown >= total:
            tokens = request.output_length
        else:  # until what it has is full
            tokens = (room or size) + (run.grown - 1) * size
        when = run.decode_at + (tokens - run.produced) / self._decode_rate
        self._at(max(when, self._now), run)

    def _blocks_of(self, request: Request, n_tokens: int) -> int:
        """Growths that so many tokens of an answer take, filling a partial block included."""
        size = self.result.block_tokens
        room = -request.input_length % size
        if n_tokens == 0:
            return 0
        return -(-max(n_tokens - room, 0) // size) + (room > 0)

    # ---- room ------------------------------------------------------------------------------

    def _prompt(self, request: Request) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        """A partial last block has one token instead of two."""
        units = request.units
        return units[:-1] if request.input_length % self.result.block_tokens else units

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            run = self._waiting[0]
            if not self._start(run):
                if self._running:
                    return
                self.result.rejected += 1  # alone, and still no room
            self._waiting.popleft()

    def _start(self, run: _Run) -> bool:
        request, resumed = run.request, run.started > 0
        tokens = self._prompt(request)
        try:
            first = self.manager.allocate(tokens, resumed=resumed)
        except kvpool.PoolFull:
            return False
        run.sequences = [first]
        again = 0
        if resumed and run.produced:  # what it had produced is computed again
            grown = self._blocks_of(request, run.produced)
            units = UNIT * grown - (1 if request.input_length % self.result.block_tokens else 0)
            again = run.produced * request.n
            try:
                run.sequences += [first.fork() for _ in range(request.n - 1)]
                for sequence in run.sequences:
                    sequence.append(np.zeros(units, np.uint32))
            except kvpool.PoolFull:
                self.manager.free(run.sequences)
                run.sequences = []
                return False
        hit_blocks = first.n_cached // UNIT
        hit_tokens = min(hit_blocks * self.result.block_tokens, request.input_length)
        if not resumed:
            self.result.hit_blocks += hit_blocks
            self.result.hit_tokens += hit_tokens
            self.result.wait_s.add([self._now - run.arrival])
            self._served.append((request, hit_blocks, self._now))
        run.started += 1
        run.grown = -1
        self._running[run] = None
        begin = max(self._now, self._prefill_free)
        work = request.input_length - hit_tokens + again
        self._prefill_free = begin + work / self._prefill_rate
        self._at(self._prefill_free, run)
        return True

    def _grow(self, run: _Run, units: int) -> bool:
        """So many tokens more for each answer. False when the run itself had to go."""
        request = run.request
        while len(run.sequences) < request.n:
            run.sequences.append(run.sequences[0].fork())
        for sequence in run.sequences:
            while True:
                try:
                    sequence.append(_BLOCK[:units])
                    break
                except kvpool.PoolFull:
                    victim = next(reversed(self._running))
                    if victim is run and len(self._running) == 1:
                        self.result.rejected += 1
                        self._end(run, count=False)
                        return False
                    self._preempt(victim)
                    if victim is run:
                        return False
        return True

    def _preempt(self, run: _Run) -> None:
        if run.grown > 0:
            seconds = self._now - run.decode_at
            done = run.produced + int(seconds * self._decode_rate)
            run.produced = min(done, run.request.output_length)
        self.manager.free(run.sequences)
        run.sequences = []
        del self._running[run]
        self._waiting.appendleft(run)
        self.result.preemptions += 1

    def _end(self, run: _Run, count: bool = True) -> None:
        self.manager.free(run.sequences)
        run.sequences = []
        del self._running[run]
        if count:
            self.result.output_tokens += run.request.output_length * run.request.n
        self._admit()
