"""The decode side without its network: pushes arrive chunk by chunk, handles are claimed.

    begin --> Push.add, add, ... add(last) --> pending --> claim(handle, tokens) --> Sequence
                |                                |
                |  error, cut, silence           |  release, time to live, wrong tokens
                v                                v
              every block it took is given back

Who is believed what. The sender is trusted to have computed K and V from the tokens it was given;
a name is not proof of anything, since it can be forged, so:

- A block that arrives gets no name before it is claimed. Nobody else can be given it, neither
  another push that asks for the name it came with nor a prompt, and one that is let go is free.
- "You hold it" is granted only for blocks in the manager's prefix index, whose tokens the manager
  has seen, never for blocks that merely carry the name.
- A claim brings the tokens. The names of the blocks that arrived must be those of these tokens, and
  each deduplicated block must, at that moment, be proven to be exactly this prefix. A forged name
  fails here, and so does a block that was computed before a ``reset``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import BlockManager, Sequence, block_hashes
from ..errors import CorruptEnvelope, InvalidArgument, KvPoolError, NotFound
from ._session import Push, note
from .limits import (
    KV_FORMAT,
    MAX_PAYLOAD_BYTES,
    Ack,
    Limits,
    Pending,
    TransferRefused,
    TransferStats,
    shown,
)

__all__ = ["KvReceiver", "Push"]


class KvReceiver:
    """What the decode side holds of pushes: in flight, and complete until they are claimed.

    Args:
        manager: of the pool that the blocks go to.
        limits: bounds on what is held.
        clock: seconds, monotonic; for tests.

    All methods may be called from many threads at once. Every block in flight or unclaimed is held
    by the receiver; after ``close`` none is. Silent pushes and unclaimed handles end in ``expire``,
    which a server calls once a second.

    Raises:
        InvalidArgument: an envelope of one block of this pool is larger than a payload may be.

    Source: seed section 6 (L10.6); docs/transfer.md.

    >>> import kvpool
    >>> from kvpool.transfer import KvReceiver, chunks
    >>> a, b = [kvpool.BlockManager(kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1,
    ...                                         head_dim=8)) for _ in "ab"]
    >>> receiver = KvReceiver(b)
    >>> with a.allocate([1, 2, 3, 4, 5]) as seq:
    ...     seq.commit()
    ...     with receiver.begin() as push:
    ...         acks = [push.add(chunk) for chunk in chunks("my-handle", seq)]
    >>> acks
    [None, Ack(handle_id='my-handle', blocks_received=2, blocks_deduped=0)]
    >>> receiver.claim("my-handle", [1, 2, 3, 4, 5])
    Sequence(n_tokens=5, n_cached=0, n_computed=5, n_blocks=2)
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager
        self.limits = limits if limits is not None else Limits()
        pool = manager.pool
        if pool.export_bytes(1) > MAX_PAYLOAD_BYTES:
            raise InvalidArgument(
                f"KvReceiver: a block's envelope has {pool.export_bytes(1)} bytes, a payload at "
                f"most {MAX_PAYLOAD_BYTES}: fewer block_tokens"
            )
        self._max_held = self.limits.max_held_blocks or pool.n_blocks - manager.watermark
        self._clock = clock
        self._lock = threading.Lock()  # never held while a Push's own lock is waited for
        self._pushing: set[Push] = set()
        self._handles: dict[str, Push] = {}  # in flight
        self._pending: dict[str, Push] = {}
        self._claiming: dict[str, Push] = {}  # pending again if their claim leaves them
        self._held = 0
        self._stats = TransferStats()
        self._closed = False

    # ---- what a server calls ---------------------------------------------------------------

    def has_blocks(self, hashes: Iterable[int], kv_format: int = KV_FORMAT) -> NDArray[np.bool_]:
        """Which of these names could be deduplicated now: bool ``(n,)``. Takes no reference.

        Raises:
            TransferRefused: FAILED_PRECONDITION for another kv_format, RESOURCE_EXHAUSTED for more
                names than ``limits.max_hashes``.

        Source: seed section 6 (L10.6).

        >>> import kvpool
        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> KvReceiver(kvpool.BlockManager(pool)).has_blocks([7])
        array([False])
        """
        if kv_format != KV_FORMAT:
            raise TransferRefused(
                "FAILED_PRECONDITION", f"kv_format {kv_format}, this side reads {KV_FORMAT}"
            )
        if not isinstance(hashes, Sized):
            hashes = list(hashes)
        if len(hashes) > self.limits.max_hashes:  # before they are copied
            raise TransferRefused(
                "RESOURCE_EXHAUSTED",
                f"{len(hashes)} names, this side looks up to {self.limits.max_hashes} up at once",
            )
        names = hashes if isinstance(hashes, np.ndarray) else list(hashes)
        found: NDArray[np.bool_] = self.manager.find(names) >= 0
        return found

    def begin(self, on_abort: Callable[[], object] | None = None) -> Push:
        """A new push, to be used in a ``with`` block: what it took goes back unless it completes.

        Raises:
            TransferRefused: RESOURCE_EXHAUSTED with ``limits.max_pushes`` in flight, UNAVAILABLE
                after ``close``.

        >>> import kvpool
        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> receiver = KvReceiver(kvpool.BlockManager(pool))
        >>> with receiver.begin():
        ...     receiver.stats.n_pushing
        1
        """
        push = Push(self, on_abort)
        with self._lock:
            if self._closed:
                raise TransferRefused("UNAVAILABLE", "the receiver is closed")
            if len(self._pushing) >= self.limits.max_pushes:
                raise TransferRefused(
                    "RESOURCE_EXHAUSTED", f"{len(self._pushing)} pushes are in flight: the limit"
                )
            self._pushing.add(push)
        return push

    def release(self, handle_id: str) -> bool:
        """Lets go of a handle, complete or in flight; False, and no error, for an unknown one.

        >>> import kvpool
        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> KvReceiver(kvpool.BlockManager(pool)).release("never pushed")
        False
        """
        with self._lock:
            held = self._pending.pop(handle_id, None)
            self._claiming.pop(handle_id, None)
            pushing = self._handles.get(handle_id)
            if held is not None:
                self._add(released=1)
        if held is not None:
            self._give_back(held)
            note(logging.INFO, "released", handle_id, blocks=len(held.ids))
            return True
        if pushing is None:
            return False
        return self._stop(pushing, "released") or self.release(handle_id)  # it was just completed

    def expire(self) -> int:
        """Ends what has waited too long: pushes that fell silent, handles nobody claimed. How many.

        >>> import kvpool
        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> KvReceiver(kvpool.BlockManager(pool)).expire()
        0
        """
        now = self._clock()
        with self._lock:
            late = [h for h, p in self._pending.items() if now - p.touched >= self.limits.ttl_s]
            ended = [self._pending.pop(handle) for handle in late]
            self._add(expired=len(ended))
            silent = [p for p in self._pushing if now - p.touched >= self.limits.idle_s]
        for push in ended:
            self._give_back(push)
            note(logging.WARNING, "expired", push.handle_id, blocks=len(push.ids))
        return len(ended) + sum(
            self._stop(push, f"no chunk for {self.limits.idle_s:g} s") for push in silent
        )

    def _stop(self, push: Push, reason: str) -> bool:
        stopped = push.abort(reason)
        if stopped and push.on_abort is not None:
            push.on_abort()
        return stopped

    # ---- what the engine calls -------------------------------------------------------------

    def claim(self, handle_id: str, tokens: Any, namespace: int = 0) -> Sequence:
        """The Sequence of a complete push, given the tokens its blocks were computed from.

        All of ``tokens`` count as computed, and the full blocks become findable, as by ``commit``.
        The push must have brought exactly so many positions, the names of its blocks must be those
        of these tokens under ``namespace``, and each deduplicated block must now be proven to be
        this very prefix. Blocks without a name are taken on trust. The handle is gone afterwards.

        Args:
            tokens: as for ``BlockManager.allocate``: uint32 values, ``(n,)``.
            namespace: the root they were computed under.

        Raises:
            NotFound: never pushed, not complete, or claimed, released or expired.
            CorruptEnvelope: the blocks are not proven to be of these tokens; all are given back,
                and the handle is gone.
            InvalidArgument: ``tokens`` or ``namespace`` is out of range; the handle stays.

        Source: seed section 6 (L10.6); docs/design/prefix-proof.md.
        """
        self.expire()
        with self._lock:
            push = self._pending.pop(handle_id, None)
            if push is not None:
                self._claiming[handle_id] = push
        if push is None:
            raise NotFound(
                f"claim: no complete push {shown(handle_id)}: never pushed, or claimed, released "
                "or expired already"
            )
        try:
            self._compare(push, tokens, namespace)
            sequence = self.manager.adopt(push.ids, tokens, namespace, proven=push.deduped)
        except CorruptEnvelope as error:
            self._give_back(push)
            with self._lock:
                self._unclaim(handle_id, push)
                self._add(failed=1)
            note(logging.WARNING, "claim refused", handle_id, reason=error)
            raise
        except BaseException:
            with self._lock:
                stays = self._unclaim(handle_id, push)
                if stays:
                    self._pending[handle_id] = push
                else:
                    self._add(released=1)
            if not stays:
                self._give_back(push)
            raise
        with self._lock:
            self._unclaim(handle_id, push)
            self._held -= len(push.ids)
            self._add(claimed=1)
        note(logging.INFO, "claimed", handle_id, blocks=len(push.ids))
        return sequence

    def _unclaim(self, handle_id: str, push: Push) -> bool:
        """Under the lock: a claim has ended. False if the handle was released in the meantime; it
        may be somebody else's by now."""
        if self._claiming.get(handle_id) is not push:
            return False
        del self._claiming[handle_id]
        return True

    def _compare(self, push: Push, tokens: Any, namespace: int) -> None:
        """CorruptEnvelope where a push says itself that it is not of these tokens."""
        size, n_positions = self.manager.pool.block_tokens, sum(push.fills)
        names = block_hashes(tokens, size, namespace).tolist()
        if len(tokens) != n_positions:
            raise CorruptEnvelope(
                f"claim: {len(tokens)} tokens, the push brought {n_positions} positions"
            )
        for i, (found, expected) in enumerate(zip(push.hashes, names, strict=False)):
            if found not in (0, expected):
                raise CorruptEnvelope(
                    f"claim: block {i} came as {found:016x}, its tokens give {expected:016x}"
                )

    def pending(self) -> list[Pending]:
        """Complete pushes that wait to be claimed, oldest first.

        >>> import kvpool
        >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
        >>> KvReceiver(kvpool.BlockManager(pool)).pending()
        []
        """
        self.expire()
        now = self._clock()
        with self._lock:
            return [
                Pending(handle, len(p.ids), sum(p.fills), now - p.touched)
                for handle, p in self._pending.items()
            ]

    @property
    def stats(self) -> TransferStats:
        """What was received, and what is held now."""
        with self._lock:
            return self._stats._replace(
                n_pushing=len(self._pushing), n_pending=len(self._pending), held_blocks=self._held
            )

    def clear(self) -> int:
        """Ends everything in flight and lets go of every handle, as before a change of weights.

        Returns how many there were. ``BlockManager.reset`` does not know of pushed blocks: call
        this together with it, or put the revision into the namespace.
        """
        with self._lock:
            held, pushing = list(self._pending.values()), list(self._pushing)
            self._pending.clear()
            self._claiming.clear()
            self._add(released=len(held))
        for push in held:
            self._give_back(push)
        return len(held) + sum(self._stop(push, "the receiver was cleared") for push in pushing)

    def close(self) -> None:
        """``clear``, and no push begins any more. Again does nothing."""
        with self._lock:
            self._closed = True
        self.clear()

    # ---- what a push calls -----------------------------------------------------------------

    def _add(self, **counts: int) -> None:
        stats = self._stats
        self._stats = stats._replace(**{k: getattr(stats, k) + n for k, n in counts.items()})

    def _open(self, handle: str, push: Push) -> None:
        with self._lock:
            if handle in self._handles or handle in self._pending or handle in self._claiming:
                raise TransferRefused("ALREADY_EXISTS", f"handle_id {handle!r} is in use")
            n = len(self._handles) + len(self._pending) + len(self._claiming)
            if n >= self.limits.max_handles:
                raise TransferRefused(
                    "RESOURCE_EXHAUSTED", f"{self.limits.max_handles} handles are held: the limit"
                )
            self._handles[handle] = push

    def _reserve(self) -> None:
        with self._lock:
            if self._held >= self._max_held:
                raise TransferRefused(
                    "RESOURCE_EXHAUSTED", f"{self._held} blocks are held by pushes: the limit"
                )
            self._held += 1

    def _unreserve(self, n: int) -> None:
        with self._lock:
            self._held -= n

    def _count(self, n_bytes: int) -> None:
        with self._lock:
            self._add(bytes=n_bytes, **{"blocks_sent" if n_bytes else "blocks_deduped": 1})

    def _complete(self, push: Push, ack: Ack) -> None:
        with self._lock:
            self._pushing.discard(push)
            del self._handles[ack.handle_id]
            gone = self._closed
            if not gone:
                self._pending[ack.handle_id] = push
                self._add(pushes=1)
        if gone:  # close() has not seen it in either place
            self._give_back(push)
            raise TransferRefused("UNAVAILABLE", "the receiver is closed")
        note(
            logging.INFO, "complete", ack.handle_id, received=ack.blocks_received,
            deduped=ack.blocks_deduped,
        )  # fmt: skip

    def _drop(self, push: Push, reason: str, *, index: int, total: int) -> None:
        with self._lock:
            self._pushing.discard(push)
            if push.handle_id is not None:
                self._handles.pop(push.handle_id, None)
            self._add(failed=1)
        self._give_back(push)
        note(logging.WARNING, "push ended", push.handle_id, at=f"{index}/{total}", reason=reason)

    def _give_back(self, push: Push) -> None:
        """Tail first, as a sequence does: a cached chain loses its end before its beginning."""
        ids = push.ids[::-1]
        try:
            if ids:
                self.manager.pool.unref(ids)
        except KvPoolError:
            if not self.manager.pool.closed:
                raise
        with self._lock:
            self._held -= len(ids)
