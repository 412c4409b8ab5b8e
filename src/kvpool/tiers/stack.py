"""The tiers under a block manager: blocks are written behind, and found again before they are
computed.

    commit    a block is full and findable: its record is copied for the tiers' queues, and that is
              all the engine waits for                                              written()
    allocate  what the pool does not have is asked for, tier after tier, in the order of the prefix
              and up to a deadline; each record is checked whole, then copied into a block that is
              the sequence's own; then all of them become findable at once          allocate()

Nothing that a tier does changes what an engine answers. Wrong bytes are a miss (``Layout.open``), a
late answer is a miss, an exception is a miss; what is not found is computed.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool import BlockManager, Busy, Fit, InvalidArgument, Pool
from kvpool import Sequence as BlockSequence
from kvpool.wire import token_digests

from .level import Job, Level, LevelStats, Slots
from .record import ENVELOPE_AT, Key, Layout, RecordRefused
from .registry import open_tier
from .tier import Tier

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["TierStack", "attach"]

_CHUNK_BYTES = 8 << 20  # of a get: one is read while the one before is checked and copied
_N_CHAINS = 256  # sequences whose digests are kept between commits


class TierStack:
    """Tiers, fastest first, for one ``BlockManager(pool, tiers=stack)``.

    Args:
        tiers: tiers, or URLs of them (``open_tier``). The manager closes them.
        model, revision, secret: see ``Layout``. Say at least which model, here or in every
            namespace: K and V of two models with equal shapes are told apart by nothing else.
        timeout_s: the longest that one ``allocate`` waits for all tiers together.
        queue_bytes: memory for blocks that wait to be written, for each tier.
        close_timeout_s: how long ``close`` goes on writing what is queued.

    Raises:
        InvalidArgument: a number is out of range, an unknown URL; and what opening a tier raises.

    >>> import kvpool
    >>> from kvpool.tiers import MemoryTier, TierStack
    >>> def answer(manager):                      # an engine
    ...     with manager.allocate(range(10)) as seq:
    ...         manager.pool.slab[seq.blocks] = 0.5
    ...         seq.commit()
    ...         return seq.n_cached
    >>> pool = kvpool.Pool(4, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> manager = kvpool.BlockManager(pool, tiers=TierStack([MemoryTier(1 << 20)], model="m"))
    >>> answer(manager), manager.tiers.flush(10)
    (0, True)
    >>> manager.evict(range(4))                   # the pool has lost them
    >>> answer(manager), manager.tiers.stats()[0].hits
    (8, 2)
    >>> manager.close()
    """

    def __init__(
        self,
        tiers: Iterable[Tier | str],
        *,
        model: str = "",
        revision: str = "",
        secret: bytes | None = None,
        timeout_s: float = 1.0,
        queue_bytes: int = 128 << 20,
        close_timeout_s: float = 10.0,
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("close_timeout_s", close_timeout_s)):
            if not 0 <= value < 1e9:
                raise InvalidArgument(f"{name}: expected 0 or more seconds, found {value}")
        if queue_bytes < 0:
            raise InvalidArgument(f"queue_bytes: expected 0 or more, found {queue_bytes}")
        self._options: dict[str, Any] = {"model": model, "revision": revision, "secret": secret}
        Layout(1, n_layers=1, n_kv_heads=1, head_dim=1, **self._options)  # refuses wrong ones now
        self.timeout_s, self._queue_bytes = timeout_s, queue_bytes
        self._close_timeout_s = close_timeout_s
        self._tiers: list[Tier] = []
        opened: list[Tier] = []
        try:
            for tier in [tiers] if isinstance(tiers, str) else tiers:
                if isinstance(tier, str):
                    opened.append(open_tier(tier))
                    self._tiers.append(opened[-1])
                elif isinstance(tier, Tier):
                    self._tiers.append(tier)
                else:
                    raise InvalidArgument(
                        f"tiers: expected Tiers and URLs, found {type(tier).__name__}"
                    )
        except BaseException:
            for tier in opened:
                tier.close()
            raise
        self._pool: Pool | None = None
        self._levels: list[Level] = []
        self._lock = threading.Lock()
        self._flights: dict[Key, threading.Event] = {}
        self._chains: OrderedDict[int, tuple[NDArray[np.uint32], list[bytes]]] = OrderedDict()
        self._forgotten: set[int] = set()
        self._has_forgotten_all = False
        self.epoch = 0
        """How often the weights have changed, or might have: what was begun before goes no
        further."""
        self._buffers: list[list[memoryview]] = []

    def _attach(self, pool: Pool) -> None:
        if self._pool is not None:
            raise Busy("the tiers have a block manager already, or had one")
        pool.block(0)  # K and V that are out of reach cannot be kept: the pool says so
        self.layout = Layout.of(pool, **self._options)
        size = self.layout.record_bytes
        for tier in self._tiers:
            tier.expect(size)
        limit = self._queue_bytes // size
        self._slots = Slots(size, limit * max(1, len(self._tiers)))
        self._chunk = max(1, _CHUNK_BYTES // size)
        self._pool, self._pid = pool, os.getpid()
        names: list[str] = []
        for tier in self._tiers:
            n = names.count(tier.name)
            names.append(tier.name)
            name = f"{tier.name}#{n + 1}" if n else tier.name
            self._levels.append(Level(tier, name, size, limit))
        # Also when the manager is dropped without close, and at the interpreter's end. The threads
        # know their level and not this object.
        self._finalize = weakref.finalize(
            self, _close, self._levels, self._pid, self._close_timeout_s
        )

    # ---- up --------------------------------------------------------------------------------------

    def allocate(
        self,
        manager: BlockManager,
        tokens: Any,
        namespace: Any,
        max_cached_tokens: Any,
        resumed: Any,
        match_last: Any,
    ) -> BlockSequence:
        """What ``manager.allocate`` calls; see there."""

        def here(tokens: Any) -> BlockSequence:
            return manager._allocate_in_pool(
                tokens, namespace, max_cached_tokens, resumed, match_last
            )

        def look() -> Fit:
            return manager.can_allocate(
                tokens,
                namespace=namespace,
                max_cached_tokens=max_cached_tokens,
                match_last=match_last,
            )

        size, fit = self.layout.block_tokens, look()  # which refuses wrong arguments
        most = (len(tokens) - (not match_last)) // size
        if max_cached_tokens is not None:
            most = min(most, int(max_cached_tokens) // size)
        first = fit.n_cached // size
        if not fit.fits or first >= most or not self._is_asked(int(namespace)):
            return here(tokens)
        with self._lock:
            layout, epoch = self.layout, self.epoch
            if not self._is_used(int(namespace)):
                epoch = -1
        deadline = time.monotonic() + self.timeout_s
        tokens = np.array(tokens, np.uint32)
        keys = layout.keys(tokens[: most * size], int(namespace))
        while True:
            with self._lock:
                other = self._flights.get(keys[first])
                if other is None:
                    flight = self._flights[keys[first]] = threading.Event()
                    break
            if not other.wait(max(0.0, deadline - time.monotonic())):
                return here(tokens)
            before, fit = first, look()
            first = fit.n_cached // size
            if not fit.fits or first >= most or first == before:  # nothing left, or nothing there
                return here(tokens)
        try:
            seq = here(tokens)
            try:
                # A reset is told here before the manager does it (forget), so a sequence that is
                # there now is from before the reset, and what it is given is not findable after it.
                if self.epoch == epoch:
                    at = self._fill(seq, keys, deadline)
                    if at > seq.n_cached and self.epoch == epoch:
                        seq.found(at, counted=not resumed)
            except BaseException:
                seq.__exit__()
                raise
            return seq
        finally:
            with self._lock:
                del self._flights[keys[first]]
            flight.set()

    def _is_used(self, namespace: int) -> bool:
        return not (self._has_forgotten_all or namespace in self._forgotten)

    def _is_asked(self, namespace: int) -> bool:
        return self._is_used(namespace) and any(level.can_read() for level in self._levels)

    def _fill(self, seq: BlockSequence, keys: list[Key], deadline: float) -> int:
        """Copies the blocks that follow the sequence's cached ones, as many as are found; the
        tokens up to there."""
        size, ids = self.layout.block_tokens, seq.blocks
        at = seq.n_cached // size
        missed: dict[Level, int] = {}
        while at < len(keys):
            for i, level in enumerate(self._levels):
                if missed.get(level) == at or not level.can_read():
                    continue
                n = self._read(i, keys[at:], ids[at : len(keys)], deadline)
                at += n
                missed[level] = at
                if n:
                    break
            else:
                break
        for level, where in missed.items():
            if where == at:
                level.count("misses", len(keys) - at)
        return at * size

    def _read(self, index: int, keys: list[Key], ids: NDArray[np.uint32], deadline: float) -> int:
        """Blocks from one tier into the pool's blocks ``ids``; how many, from the first on."""
        level, n, sent, pending = self._levels[index], 0, 0, deque[Job]()
        try:
            while True:
                while len(pending) < 2 and sent < len(keys):
                    part = keys[sent : sent + self._chunk]
                    job = self._job(part)
                    pending.append(job)
                    level.ask(job)
                    sent += len(part)
                if not pending:
                    return n
                job = pending[0]
                if not job.wait(deadline):
                    level.timed_out(job, had_progress=n > 0)
                    return n
                if job.error is not None:
                    return n
                for key, record in zip(job.keys, job.result, strict=True):
                    if record is None or not self._take(index, key, record, int(ids[n])):
                        return n
                    n += 1
                pending.popleft().let_go()
        finally:
            for job in pending:
                job.let_go()

    def _job(self, keys: list[Key]) -> Job:
        """A get with memory for its records, which comes back once nobody uses it."""
        with self._lock:
            buffers = self._buffers.pop() if self._buffers else None
        if buffers is None:
            size = self.layout.record_bytes
            whole = memoryview(bytearray(size * self._chunk))
            buffers = [whole[i * size : (i + 1) * size] for i in range(self._chunk)]

        def release() -> None:
            with self._lock:
                if len(self._buffers) < 4:
                    self._buffers.append(buffers)

        return Job(keys, buffers[: len(keys)], release)

    def _take(self, index: int, key: Key, record: Buffer, block: int) -> bool:
        """Checks a record and copies its K and V into a block that nobody can find yet."""
        level = self._levels[index]
        try:
            payload = self.layout.open(record, key)
        except RecordRefused as error:
            level.refuse(error.reason, key)
            return False
        except Exception:  # a tier may give anything
            level.refuse("bytes", key)
            return False
        assert self._pool is not None
        self._pool.block(block)[:] = payload
        level.count("hits")
        level.count("hit_bytes", self.layout.record_bytes)
        for upper in self._levels[:index]:
            slot = self._slots.take() if upper.can_write() else None
            if slot is None:
                upper.count("dropped")
                continue
            slot.view[:] = memoryview(record).cast("B")
            upper.offer(key, slot)
            slot.let_go()
        return True

    # ---- down ------------------------------------------------------------------------------------

    def written(
        self,
        epoch: int,
        namespace: int,
        seq: int,
        tokens: NDArray[np.uint32],
        first: int,
        ids: NDArray[np.uint32],
        names: NDArray[np.uint64],
    ) -> None:
        """What ``commit`` calls: blocks ``first ...`` of these tokens became findable.

        ``epoch`` is that of before the commit: if it is over, the blocks are of weights that
        ``layout`` does not name any more. ``seq`` tells the sequence from others; ``names`` is 0
        where a block has none. The caller holds the blocks meanwhile. Whatever goes wrong, the
        engine does not hear of it.
        """
        try:
            with self._lock:
                layout, is_used = self.layout, epoch == self.epoch and self._is_used(namespace)
            if is_used:
                self._write(layout, namespace, seq, tokens, first, ids, names)
        except Exception as error:
            for level in self._levels:
                level.count("errors")
                level.note(f"write: {type(error).__name__}: {error}")

    def _write(
        self,
        layout: Layout,
        namespace: int,
        seq: int,
        tokens: NDArray[np.uint32],
        first: int,
        ids: NDArray[np.uint32],
        names: NDArray[np.uint64],
    ) -> None:
        digests: list[bytes] = []
        assert self._pool is not None
        for i in np.flatnonzero(names).tolist():
            takers = [level for level in self._levels if level.can_write()]
            slot = self._slots.take() if takers else None
            if slot is None:
                takers = []
            for level in self._levels:
                if level not in takers:
                    level.count("dropped")
            if slot is None:
                continue
            try:
                if not digests:
                    digests = self._digests(namespace, seq, tokens)
                key = Key(layout.id, namespace, int(names[i]), digests[first + i])
                self._pool.export_into(ids[i : i + 1], slot.view[ENVELOPE_AT:])
                layout.seal(slot.view, key, first + i)
                for level in takers:
                    level.offer(key, slot)
            finally:
                slot.let_go()

    def _digests(self, namespace: int, seq: int, tokens: NDArray[np.uint32]) -> list[bytes]:
        """The chain of a sequence. What was computed at its last commit is used again as far as
        the tokens are the same: it may have been cut and have gone on with others."""
        size = self.layout.block_tokens
        with self._lock:
            known, digests = self._chains.pop(seq, (tokens[:0], []))
        n = min(len(known), len(tokens))
        other = np.flatnonzero(known[:n] != tokens[:n])
        n = int(other[0]) if len(other) else n
        digests = digests[: n // size]
        parent = digests[-1] if digests else None
        digests += token_digests(tokens[len(digests) * size :], size, namespace, parent)
        with self._lock:
            self._chains[seq] = tokens, digests
            while len(self._chains) > _N_CHAINS:
                self._chains.popitem(last=False)
        return digests

    # ---- the rest --------------------------------------------------------------------------------

    def forget(self, namespace: int | None = None) -> None:
        """What ``manager.reset`` calls before it begins: the weights have changed. The tiers cannot
        know, so they are left alone from now on, for this namespace or for all; see ``renew``."""
        with self._lock:
            self.epoch += 1
            if namespace is None:
                self._has_forgotten_all = True
            else:
                self._forgotten.add(int(namespace))

    def renew(self, *, model: str | None = None, revision: str | None = None) -> None:
        """Says what the weights are now, after ``manager.reset``; the tiers are used again.

        Raises InvalidArgument: nothing is different, so old blocks would be found again.
        """
        options = dict(self._options)
        options |= {} if model is None else {"model": model}
        options |= {} if revision is None else {"revision": revision}
        if options == self._options:
            raise InvalidArgument("renew: expected another model or revision than before")
        with self._lock:
            self.epoch += 1
            self._options = options
            if self._pool is not None:
                self.layout = Layout.of(self._pool, **options)
            self._forgotten.clear()
            self._has_forgotten_all = False

    def stats(self) -> list[LevelStats]:
        """What each tier holds and did, in their order."""
        return [level.stats() for level in self._levels]

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything that was committed is written or dropped. False: it is not yet."""
        deadline = time.monotonic() + timeout_s
        drained = [level.drain(deadline) for level in self._levels]  # each of them
        return all(drained)

    def close(self) -> None:
        """Writes what is queued for at most ``close_timeout_s``, ends the threads, closes the
        tiers. Requests that wait for a tier go on without it. The manager's close calls it."""
        if self._pool is None:
            for tier in self._tiers:
                tier.close()
        else:
            self._finalize()

    def __repr__(self) -> str:
        return f"TierStack({[tier.name for tier in self._tiers]})"


def _close(levels: Sequence[Level], pid: int, timeout_s: float) -> None:
    if os.getpid() != pid:  # in a child of fork() there are no threads, and nothing is ours
        return
    if any(level.is_own_thread() for level in levels):
        # The garbage collector has come here in a thread of theirs, which may hold a lock of
        # theirs, and cannot wait for itself.
        threading.Thread(target=_close, args=(levels, pid, timeout_s), daemon=True).start()
        return
    deadline = time.monotonic() + timeout_s
    for level in levels:
        level.stop_reading()
    for level in levels:
        level.close(deadline)


def attach(pool: Pool, tiers: Any) -> TierStack:
    """What ``BlockManager(pool, tiers=...)`` calls: the stack, at work for this pool."""
    stack = tiers if isinstance(tiers, TierStack) else TierStack(tiers)
    try:
        stack._attach(pool)
    except BaseException:
        if stack is not tiers:
            stack.close()
        raise
    return stack
