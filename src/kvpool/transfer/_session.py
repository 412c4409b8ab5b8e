"""One push in flight: every rule of the protocol that a chunk can break is checked here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import crc32c
from ..errors import CorruptEnvelope, InvalidArgument, PoolFull, ShapeMismatch
from ._chunk import ENVELOPE_CRC, Chunk
from .limits import KV_FORMAT, MAX_PAYLOAD_BYTES, Ack, TransferRefused, handle_fault, shown

if TYPE_CHECKING:
    from .receiver import KvReceiver

__all__ = ["Push", "note"]

_log = logging.getLogger("kvpool.transfer")
_ONE_BLOCK = (1).to_bytes(4, "little")


def note(level: int, text: str, handle: str | None, **fields: Any) -> None:
    """A line for people, and the same as attributes of the record for machines."""
    if _log.isEnabledFor(level):
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        extra = {"handle_id": handle, **{f"kv_{name}": value for name, value in fields.items()}}
        _log.log(level, "%s handle=%s %s", text, handle, told, extra=extra)


class Push:
    """One push in flight, made by ``KvReceiver.begin``; any exception ends it and frees its blocks.

    ``add`` is called by one thread at a time; ``abort`` by any. ``on_abort``, if set, is called
    when somebody else has ended it: the receiver for its silence, or a ``release``.
    """

    def __init__(self, receiver: KvReceiver, on_abort: Callable[[], object] | None = None) -> None:
        self.handle_id: str | None = None
        self.on_abort = on_abort
        self.ids: list[int] = []
        self.hashes: list[int] = []
        self.fills: list[int] = []
        self.deduped: list[int] = []
        self.touched = receiver._clock()
        self._receiver = receiver
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._total = 0
        self._ended: str | None = None
        self._code = "FAILED_PRECONDITION"  # of one chunk more

    def add(self, chunk: Chunk) -> Ack | None:
        """Takes the next chunk; the ack when it was the last one.

        Raises:
            TransferRefused: see docs/transfer.md for every code. The push is over, and every block
                it took is given back.
        """
        with self._lock:
            if self._ended is not None:
                raise TransferRefused(self._code, f"the push has ended: {self._ended}")
            try:
                self._take(chunk)
            except BaseException as error:
                self._end(str(error) or type(error).__name__)
                raise
            self.touched = self._receiver._clock()
            if len(self.ids) < self._total:
                return None
            self._ended = "it is complete"
            ack = Ack(chunk.handle_id, len(self.ids) - len(self.deduped), len(self.deduped))
            self._receiver._complete(self, ack)
            return ack

    def abort(self, reason: str) -> bool:
        """Gives back what it took; False, and nothing, when it is complete or has ended.

        A chunk that comes all the same is CANCELLED.
        """
        with self._lock:
            ended = self._end(reason)
            if ended:
                self._code = "CANCELLED"
            return ended

    @property
    def ended(self) -> str | None:
        """Why it takes no more chunks; None while it does."""
        return self._ended

    def __enter__(self) -> Push:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort("the stream ended before the last block" if exc_info[1] is None else "cancelled")

    # Under the lock from here on.

    def _end(self, reason: str) -> bool:
        if self._ended is not None:
            return False
        self._ended = reason
        self._receiver._drop(self, reason, index=len(self.ids), total=self._total)
        return True

    def _take(self, chunk: Chunk) -> None:
        if chunk.kv_format != KV_FORMAT:
            raise TransferRefused(
                "FAILED_PRECONDITION",
                f"kv_format {chunk.kv_format}, this side reads {KV_FORMAT}",
            )
        if self.handle_id is None:
            self._open(chunk)
        index = len(self.ids)
        for field, found, expected in (
            ("handle_id", chunk.handle_id, self.handle_id),
            ("n_blocks_total", chunk.n_blocks_total, self._total),
            ("block_index", chunk.block_index, index),
        ):
            if found != expected:
                raise TransferRefused(
                    "INVALID_ARGUMENT",
                    f"chunk {index}: {field} {shown(found)}, expected {shown(expected)}",
                )
        if chunk.block_hash in self._seen:
            raise TransferRefused(
                "INVALID_ARGUMENT",
                f"chunk {index}: block_hash {chunk.block_hash:016x} for a second block",
            )
        self._receiver._reserve()
        try:
            if len(chunk.payload):
                self._import(index, chunk)
            else:
                self._deduplicate(index, chunk)
        except BaseException:
            if len(self.ids) == index:  # else it is given back with the others
                self._receiver._unreserve(1)
            raise
        self.hashes.append(chunk.block_hash)
        if chunk.block_hash:
            self._seen.add(chunk.block_hash)
        self._receiver._count(len(chunk.payload))

    def _open(self, chunk: Chunk) -> None:
        handle, total = chunk.handle_id, chunk.n_blocks_total
        if (fault := handle_fault(handle)) is not None:
            raise TransferRefused("INVALID_ARGUMENT", fault)
        if total == 0:
            raise TransferRefused("INVALID_ARGUMENT", "n_blocks_total 0: a push has a block")
        limit = min(self._receiver.limits.max_blocks, self._receiver.manager.pool.n_blocks)
        if total > limit:
            raise TransferRefused(
                "RESOURCE_EXHAUSTED", f"n_blocks_total {total}, this side takes up to {limit}"
            )
        self._receiver._open(handle, self)
        self.handle_id, self._total = handle, total

    def _import(self, index: int, chunk: Chunk) -> None:
        payload = chunk.payload
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TransferRefused(
                "INVALID_ARGUMENT",
                f"chunk {index}: a payload of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES}",
            )
        if chunk.crc32c != ENVELOPE_CRC:
            actual = crc32c(payload)
            raise TransferRefused(
                "DATA_LOSS",
                f"chunk {index}: crc32c {chunk.crc32c:08x}, the payload has {actual:08x}"
                if actual != chunk.crc32c
                else f"chunk {index}: the payload does not end in its own CRC-32C",
            )
        if len(payload) >= 12 and payload[8:12] != _ONE_BLOCK:
            n = int.from_bytes(payload[8:12], "little")
            raise TransferRefused(
                "DATA_LOSS", f"chunk {index}: an envelope with n_blocks {n} at offset 8, expected 1"
            )
        manager = self._receiver.manager
        try:
            [block] = manager.import_(payload, named=False)
        except (CorruptEnvelope, ShapeMismatch) as error:
            raise TransferRefused("DATA_LOSS", f"chunk {index}: {error}") from error
        except (PoolFull, MemoryError) as error:
            raise TransferRefused("RESOURCE_EXHAUSTED", f"chunk {index}: {error}") from error
        except InvalidArgument as error:  # the manager or the pool is closed
            raise TransferRefused("UNAVAILABLE", str(error)) from error
        self.ids.append(int(block))
        name, fill = int.from_bytes(payload[28:36], "little"), manager.pool.fill(int(block))
        self.fills.append(fill)
        what = None
        if name not in (0, chunk.block_hash):
            what = f"block_hash {chunk.block_hash:016x}, its envelope says {name:016x}"
        elif fill < manager.pool.block_tokens and (chunk.block_hash or index + 1 < self._total):
            what = f"a block of {fill} tokens, which only the last can be, without a block_hash"
        if what is not None:
            raise TransferRefused("INVALID_ARGUMENT", f"chunk {index}: {what}")

    def _deduplicate(self, index: int, chunk: Chunk) -> None:
        if chunk.crc32c != 0:
            raise TransferRefused(
                "DATA_LOSS", f"chunk {index}: crc32c {chunk.crc32c:08x} without a payload"
            )
        if chunk.block_hash == 0:
            raise TransferRefused(
                "INVALID_ARGUMENT", f"chunk {index}: neither a payload nor a block_hash"
            )
        manager = self._receiver.manager
        try:
            [block] = manager.find([chunk.block_hash], take=True).tolist()
        except InvalidArgument as error:
            raise TransferRefused("UNAVAILABLE", str(error)) from error
        if block < 0:
            raise TransferRefused(
                "NOT_FOUND", f"chunk {index}: block {chunk.block_hash:016x} is not here"
            )
        self.ids.append(block)
        self.fills.append(manager.pool.block_tokens)
        self.deduped.append(index)
