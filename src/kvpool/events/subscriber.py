"""The other end: an index of what one publisher holds, kept in step with its stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from .publisher import import_zmq
from .wire import END, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent, KVEventBatch

__all__ = ["KVEventSubscriber", "PrefixIndex"]


class PrefixIndex:
    """The findable blocks of one publisher, as its events tell them.

    >>> from kvpool.events import BlockStored, PrefixIndex
    >>> index = PrefixIndex()
    >>> index.apply(BlockStored(block_hashes=[11, 12], parent_block_hash=None,
    ...                         token_ids=[1, 2, 3, 4], block_size=2))
    >>> index.match([11, 12, 13]), index.parents
    (2, {11: None, 12: 11})
    """

    def __init__(self) -> None:
        self.parents: dict[BlockHash, BlockHash | None] = {}

    def __len__(self) -> int:
        return len(self.parents)

    def apply(self, event: KVEvent) -> None:
        """Follows one event. Removing an unknown block, or storing a known one, is no error."""
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            for block_hash in event.block_hashes:
                self.parents[block_hash] = parent
                parent = block_hash
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                self.parents.pop(block_hash, None)
        else:
            self.parents.clear()

    def match(self, hashes: Iterable[BlockHash]) -> int:
        """How many blocks from the first on are there: ``match(block_hashes(tokens).tolist())``."""
        return sum(1 for _ in itertools.takewhile(self.parents.__contains__, hashes))


class KVEventSubscriber:
    """Follows one publisher and keeps its index; a gap is closed by replay, or the index emptied.

    Args:
        endpoint, replay_endpoint, topic: the publisher's. It may be vLLM's, of version 0.33.
        replay_timeout_s: how long to wait for each message of a replay.

    ``index`` is what the publisher holds, as far as it was heard, and never holds more than that:
    where batches are missing for good, or the publisher was replaced by another, it is emptied.
    ``lost`` counts the missing batches. One thread at a time uses a subscriber.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        replay_timeout_s: float = 1.0,
    ) -> None:
        zmq = import_zmq()
        self._zmq, self._context = zmq, zmq.Context.instance()
        self._replay_endpoint, self._timeout_s = replay_endpoint, replay_timeout_s
        self._unpack = msgspec.msgpack.Decoder(KVEventBatch)
        self._sub: Any = self._context.socket(zmq.SUB)
        self._sub.set_hwm(0)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._monitor: Any = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sub.connect(endpoint)
        self.index = PrefixIndex()
        self.next = 0  # the number that is due
        self.lost = 0
        self._heard = -1  # the last number on the SUB socket, which a replay can run ahead of
        self._ts = float("-inf")  # of the last batch taken
        self._cut_off = False  # the connection broke, and who is at its end now is not known

    def poll(self, timeout_s: float = 0.0) -> list[KVEventBatch]:
        """The batches that have come, oldest first, already followed by the index.

        Waits up to timeout_s for the first of them. Raises ``msgspec.DecodeError`` for a payload
        that is no batch.
        """
        batches: list[KVEventBatch] = []
        wait_ms = round(timeout_s * 1000)
        while self._sub.poll(wait_ms):
            wait_ms = 0
            _, number, payload = self._sub.recv_multipart()
            self._hear(int.from_bytes(number, "big"), self._unpack.decode(payload), batches)
        return batches

    def catch_up(self) -> list[KVEventBatch]:
        """Asks for everything that was missed so far, without waiting for the next batch."""
        batches: list[KVEventBatch] = []
        if self._replay_endpoint is not None:
            self._resume(batches)
        return batches

    def _hear(self, number: int, batch: KVEventBatch, batches: list[KVEventBatch]) -> None:
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            self._cut_off = True
        # Numbers behind `next` are old ones that a replay overtook, or a new publisher's.
        overtaken = self._heard < number < self.next and batch.ts <= self._ts
        self._heard = number
        if self._cut_off or (number != self.next and not overtaken):
            if self._replay_endpoint is not None:
                self._resume(batches)
            else:
                self._forget(next=self.next if number >= self.next else 0)
        if number > self.next:
            self._forget(next=number)
        if number == self.next:
            self._take(number, batch, batches)

    def _take(self, number: int, batch: KVEventBatch, batches: list[KVEventBatch]) -> None:
        for event in batch.events:
            self.index.apply(event)
        batches.append(batch)
        self.next, self._ts = number + 1, batch.ts

    def _forget(self, next: int) -> None:
        """What was told before cannot be relied on: the batches before `next` are missing."""
        self.index.apply(AllBlocksCleared())
        self.lost += max(0, next - self.next)
        self.next, self._cut_off = next, False

    def _resume(self, batches: list[KVEventBatch]) -> None:
        """Takes everything from `next` on that the publisher still has.

        It is asked for the last batch taken as well: one with another time in its place was sent by
        another publisher, which has come to this endpoint since, and then nothing heard before
        holds.
        """
        kept = self._ask(max(0, self.next - 1))
        if self.next > 0 and kept and kept[0][0] == self.next - 1 and kept[0][1].ts == self._ts:
            del kept[0]
        elif self.next > 0:
            kept = self._ask(0)
            same = bool(kept) and kept[0][0] > self.next  # most likely: it keeps so few
            self._forget(next=self.next if same else 0)
        self._cut_off = False
        if kept and kept[0][0] > self.next:
            self._forget(next=kept[0][0])
        for number, batch in kept:
            self._take(number, batch, batches)

    def _ask(self, start: int) -> list[tuple[int, KVEventBatch]]:
        """A replay: consecutive batches, the first of them `start` or the oldest one kept."""
        kept: list[tuple[int, KVEventBatch]] = []
        dealer = self._context.socket(self._zmq.DEALER)
        try:
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart((b"", start.to_bytes(8, "big")))
            while dealer.poll(round(self._timeout_s * 1000)):
                *_, number, payload = dealer.recv_multipart()
                at = int.from_bytes(number, "big")
                if number == END or (kept and at != kept[-1][0] + 1):
                    break
                kept.append((at, self._unpack.decode(payload)))
        finally:
            dealer.close(linger=0)
        return kept

    def close(self) -> None:
        """Closes the sockets; the index stays. Closing twice is no error."""
        if not self._sub.closed:
            self._sub.disable_monitor()
            self._monitor.close(linger=0)
        self._sub.close(linger=0)

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
