"""One tier of a stack, held at arm's length: its calls run on two threads of its own.

    engine's thread                     this tier's threads
    ask(keys) --> Job  ...............> reader: tier.get
         wait(deadline) <.............. result, error, or the deadline passes: the job is abandoned
    offer(key, slot) --> queue .......> writer: tier.put, tier.delete
         never waits; a full queue drops and counts

A tier that raises or is late is left alone for a while: 1 s, then 2, 4, ... up to a minute, until a
call succeeds again. One that hangs is left alone until the call comes back.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from .record import Key
from .tier import Tier, TierStats

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Histogram", "Job", "Level", "LevelStats", "Slot", "Slots"]

_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_BACKOFF_S, _BACKOFF_MOST_S = 1.0, 60.0
_BATCH_BYTES = 8 << 20  # of a put: large enough for the disk, small enough to end soon


class Histogram(NamedTuple):
    """Times of calls: ``counts[i]`` were at most ``bounds[i]`` seconds, the last ones longer.

    >>> Histogram.of([0.002, 5.0, 99.0]).counts
    (0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1)
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total_s: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Histogram:
        """The histogram of some times."""
        recorder = _Recorder()
        for seconds in times:
            recorder.add(seconds)
        return recorder.snapshot()


class _Recorder:
    def __init__(self) -> None:
        self.counts, self.total_s = [0] * (len(_BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        at = next((i for i, bound in enumerate(_BOUNDS) if seconds <= bound), len(_BOUNDS))
        self.counts[at] += 1
        self.total_s += seconds

    def snapshot(self) -> Histogram:
        return Histogram(_BOUNDS, tuple(self.counts), self.total_s)


@dataclass(frozen=True)
class LevelStats:
    """What one tier of a stack did since the manager was made."""

    name: str
    is_healthy: bool
    """Whether it is asked now: not backing off, not hanging."""
    hits: int
    """Blocks that it gave, verified and put into the pool."""
    misses: int
    """Blocks that it was asked for and did not give."""
    hit_bytes: int
    """Bytes of the records behind the hits."""
    stored: int
    """Blocks that it keeps, as it says."""
    stored_bytes: int
    not_stored: int
    """Blocks that it was given and does not keep: full, too large, read-only."""
    dropped: int
    """Blocks that were not offered to it: its queue was full, or it was left alone."""
    queued: int
    """Blocks in the queue now."""
    errors: int
    """Calls that raised."""
    timeouts: int
    """Calls that were not waited for any longer."""
    refused: Mapping[str, int]
    """Records that were not what was asked for, by ``RecordRefused.reason``."""
    get_seconds: Histogram
    put_seconds: Histogram
    last_error: str
    """The text of the latest error; empty if there was none."""
    tier: TierStats
    """What the tier itself tells; while it is left alone, what it told before."""


class Slot:
    """Memory for one record, shared by the queues it is in."""

    __slots__ = ("_holders", "_slots", "view")

    def __init__(self, slots: Slots) -> None:
        self._slots, self._holders = slots, 1
        self.view = memoryview(bytearray(slots.record_bytes))

    def hold(self) -> None:
        with self._slots.lock:
            self._holders += 1

    def let_go(self) -> None:
        with self._slots.lock:
            self._holders -= 1
            if self._holders == 0:
                self._holders = 1
                self._slots.free.append(self)


class Slots:
    """At most ``limit`` records' worth of memory, made when it is needed and used again."""

    def __init__(self, record_bytes: int, limit: int) -> None:
        self.record_bytes, self.limit, self.n_made = record_bytes, limit, 0
        self.free: list[Slot] = []
        self.lock = threading.Lock()

    def take(self) -> Slot | None:
        """A slot that the caller holds, or None when all are in use."""
        with self.lock:
            if self.free:
                return self.free.pop()
            if self.n_made == self.limit:
                return None
            self.n_made += 1
        return Slot(self)


class Job:
    """A get on its way. ``result`` and ``error`` are there once ``wait`` has given True."""

    def __init__(
        self,
        keys: Sequence[Key],
        out: Sequence[memoryview] | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.keys, self.out, self._release = keys, out, release
        self.result: list[Buffer | None] = []
        self.error: BaseException | None = None
        self.is_abandoned = self.is_late = False
        self._done, self._lock, self._event = False, threading.Lock(), threading.Event()

    def wait(self, deadline: float) -> bool:
        """Whether it was done by then (``time.monotonic``)."""
        return self._event.wait(max(0.0, deadline - time.monotonic()))

    def finish(self) -> None:
        with self._lock:
            self._done = True
            abandoned = self.is_abandoned
        self._event.set()
        if abandoned:
            self._release()

    def cancel(self) -> None:
        """Whoever waits goes on now."""
        with self._lock:
            if not self._done:
                self.error = self.error or InterruptedError("the tiers are closed")
        self._event.set()

    def let_go(self) -> None:
        """Nobody looks at the result any more; ``release`` runs once the tier does not either."""
        with self._lock:
            self.is_abandoned = True
            done = self._done
        if done:
            self._release()


class Level:
    """A tier with its queues, threads, health and counters."""

    def __init__(self, tier: Tier, name: str, record_bytes: int, queue_limit: int) -> None:
        self.tier, self.name = tier, name
        self._record_bytes, self._limit = record_bytes, queue_limit
        self._batch = max(1, _BATCH_BYTES // record_bytes)
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)  # for the writer
        self._idle = threading.Condition(self._lock)  # for who waits for the writer
        self._puts: deque[tuple[Key, Slot]] = deque()
        self._queued: set[Key] = set()
        self._deletes: list[Key] = []
        self._gets: SimpleQueue[Job | None] = SimpleQueue()
        self._reading: Job | None = None
        self._jobs: set[Job] = set()  # on their way
        self._is_writing = self._is_closing = False
        self._blocked_until, self._backoff_s = 0.0, _BACKOFF_S
        self._n: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._get_s, self._put_s = _Recorder(), _Recorder()
        self._last_error, self._tier_stats = "", TierStats()
        self._threads = [
            threading.Thread(target=target, name=f"kvpool-{name}-{what}", daemon=True)
            for target, what in ((self._read_loop, "get"), (self._write_loop, "put"))
        ]
        for thread in self._threads:
            thread.start()

    # ---- health ----------------------------------------------------------------------------------

    def _is_blocked(self) -> bool:
        return self._is_closing or time.monotonic() < self._blocked_until

    def can_read(self) -> bool:
        """Whether it is worth asking."""
        with self._lock:
            hangs = self._reading is not None and self._reading.is_late
            return not hangs and not self._is_blocked()

    def can_write(self) -> bool:
        """Whether offering is worth a copy; if not, that is a drop for each block."""
        with self._lock:
            return not self._is_blocked() and len(self._puts) < self._limit

    def _failed(self, text: str) -> None:
        with self._lock:
            self._last_error = text
            self._blocked_until = time.monotonic() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_MOST_S)
            self._drop_queue()

    def _worked(self) -> None:
        with self._lock:
            self._blocked_until, self._backoff_s = 0.0, _BACKOFF_S

    # ---- reading ---------------------------------------------------------------------------------

    def ask(self, job: Job) -> None:
        """Sends a get on its way."""
        with self._lock:
            self._jobs.add(job)
            is_closing = self._is_closing
        if is_closing:
            job.cancel()
        self._gets.put(job)

    def _read_loop(self) -> None:
        while True:
            job = None  # or it would keep who asked alive until the next one comes
            job = self._gets.get()
            if job is None:
                return
            with self._lock:
                self._reading = job
            if job.is_abandoned or job.error is not None:
                self._end(job)
                continue
            began = time.monotonic()
            try:
                job.result = list(self.tier.get(job.keys, job.out))
                if len(job.result) != len(job.keys):
                    raise ValueError(f"get: {len(job.result)} records for {len(job.keys)} keys")
            except BaseException as error:  # whatever it is, it must not reach the engine
                job.error = error
                self.count("errors")
                self._failed(f"get: {type(error).__name__}: {error}")
            else:
                self._worked()
            with self._lock:
                self._get_s.add(time.monotonic() - began)
            self._end(job)

    def _end(self, job: Job) -> None:
        with self._lock:
            self._reading = None
            self._jobs.discard(job)
        job.finish()

    def timed_out(self, job: Job, *, had_progress: bool) -> None:
        """The caller waited as long as it would."""
        with self._lock:
            job.is_late = True
            # It may have waited behind a call that hangs and nobody waits for any more. If that did
            # not count as hanging, more and more jobs would queue up behind it.
            if self._reading is not None and self._reading.is_abandoned:
                self._reading.is_late = True
            self._n["timeouts"] += 1
        if not had_progress:
            self._failed("get: no answer before the deadline")

    def note(self, text: str) -> None:
        """Remembers the text of an error."""
        with self._lock:
            self._last_error = text

    def refuse(self, reason: str, key: Key) -> None:
        """A record was not what was asked for: count it and have it deleted, so that the block can
        be written again."""
        with self._lock:
            self._refused[reason] += 1
            if not self._is_closing and len(self._deletes) < self._limit:
                self._deletes.append(key)
                self._wake.notify()

    # ---- writing ---------------------------------------------------------------------------------

    def offer(self, key: Key, slot: Slot) -> None:
        """Puts a record into the queue, or drops it; it is held until it is written."""
        with self._lock:
            if key in self._queued:
                return
            if self._is_blocked() or len(self._puts) >= self._limit:
                self._n["dropped"] += 1
                return
            slot.hold()
            self._queued.add(key)
            self._puts.append((key, slot))
            self._wake.notify()

    def _drop_queue(self) -> None:
        self._n["dropped"] += len(self._puts)
        self._deletes.clear()
        while self._puts:
            key, slot = self._puts.pop()
            self._queued.discard(key)
            slot.let_go()

    def _write_loop(self) -> None:
        while True:
            with self._lock:
                while not (self._puts or self._deletes or self._is_closing):
                    self._idle.notify_all()
                    self._wake.wait()
                if not (self._puts or self._deletes):
                    self._idle.notify_all()
                    return
                n = min(self._batch, len(self._puts))
                batch = [self._puts.popleft() for _ in range(n)]
                deletes, self._deletes = self._deletes, []
                self._is_writing = True
            try:
                self._write(batch, deletes)
            except BaseException as error:  # as for reads
                self.count("errors")
                self._failed(f"put: {type(error).__name__}: {error}")
                self.count("dropped", len(batch))
            else:
                self._worked()
            with self._lock:
                self._is_writing = False
                for key, slot in batch:
                    self._queued.discard(key)
                    slot.let_go()

    def _write(self, batch: list[tuple[Key, Slot]], deletes: list[Key]) -> None:
        if deletes:
            self.tier.delete(deletes)
        if batch:
            began = time.monotonic()
            held = list(self.tier.put([(key, slot.view.toreadonly()) for key, slot in batch]))
            n = sum(map(bool, held))
            with self._lock:
                self._put_s.add(time.monotonic() - began)
                self._n["stored"] += n
                self._n["stored_bytes"] += n * self._record_bytes
                self._n["not_stored"] += len(batch) - n

    def drain(self, deadline: float) -> bool:
        """Waits until everything offered is written. False: not by then."""
        with self._lock:
            while self._puts or self._deletes or self._is_writing:
                if not self._idle.wait(max(0.0, deadline - time.monotonic())):
                    return not (self._puts or self._deletes or self._is_writing)
        return True

    # ---- counters and the end --------------------------------------------------------------------

    def count(self, what: str, n: int = 1) -> None:
        """Adds to one of the counters of LevelStats."""
        with self._lock:
            self._n[what] += n

    def stats(self) -> LevelStats:
        """A snapshot."""
        is_healthy = self.can_read()
        if is_healthy:  # one that hangs might hang here, too
            try:
                self._tier_stats = self.tier.stats()
            except Exception as error:
                self.note(f"stats: {type(error).__name__}: {error}")
        with self._lock:
            n = self._n
            return LevelStats(
                name=self.name,
                is_healthy=is_healthy,
                hits=n["hits"],
                misses=n["misses"],
                hit_bytes=n["hit_bytes"],
                stored=n["stored"],
                stored_bytes=n["stored_bytes"],
                not_stored=n["not_stored"],
                dropped=n["dropped"],
                queued=len(self._puts),
                errors=n["errors"],
                timeouts=n["timeouts"],
                refused=dict(self._refused),
                get_seconds=self._get_s.snapshot(),
                put_seconds=self._put_s.snapshot(),
                last_error=self._last_error,
                tier=self._tier_stats,
            )

    def is_own_thread(self) -> bool:
        """Whether one of its threads is asking."""
        return threading.current_thread() in self._threads

    def stop_reading(self) -> None:
        """Nobody is made to wait for an answer any more."""
        with self._lock:
            self._is_closing = True
            jobs = list(self._jobs)
            self._wake.notify()
        for job in jobs:
            job.cancel()

    def close(self, deadline: float) -> None:
        """Writes what is queued, as far as the time goes, and ends. A call that hangs is left."""
        drained = self.drain(deadline)
        with self._lock:
            self._is_closing = True
            if not drained:
                self._drop_queue()
            self._wake.notify()
        self._gets.put(None)
        closer = threading.Thread(target=self._close_tier, name=f"kvpool-{self.name}-close")
        closer.daemon = True
        grace = time.monotonic() + 0.5  # threads that do not hang are at their end
        for thread in self._threads:
            thread.join(max(0.0, max(deadline, grace) - time.monotonic()))
        closer.start()
        closer.join(max(0.5, deadline - time.monotonic()))

    def _close_tier(self) -> None:
        try:
            self.tier.close()
        except Exception as error:
            self.count("errors")
            with self._lock:
                self._last_error = f"close: {type(error).__name__}: {error}"
