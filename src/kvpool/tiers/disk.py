"""Records in one preallocated file: ``disk:/var/cache/kv.slab?size=10GiB``.

    0         head 4096     magic, version, sizes, CRC-32C; at 2048 the process that has it open
    4096      table         128 bytes a slot: key, length of the record, stamp, CRC-32C; or zeros
    hints_at  hints         8 bytes a slot: when it was used last. Order only, so no checksum
    data_at   slots         one record each, slot_bytes apart, a multiple of 4096

Order of writes. A slot is taken: its entry is cleared, its record is written, then its entry. So
when the process is killed at any point, every entry in the table has its whole record behind it.
When the machine dies, what the system had not written yet is lost in any order and any part: an
entry may be there without its record. The record's own checksums and digest (``Layout.open``) tell
that, so it is a miss. With ``sync=data`` the records of a put are on the disk before their entries
are written, and both are when it returns: for caches that took long to fill. The default is not to
wait: what is lost was a cache of the last seconds.

Reads and writes go through the system's page cache, with pread and pwrite. O_DIRECT measured no
faster (docs/tiers.md), and a mapped file ends the process when somebody cuts it short.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import SplitResult, unquote

import numpy as np

from kvpool import Busy, InvalidArgument, StorageError, Unsupported, crc32c
from kvpool.wire.files import storage_errors

from .record import Key
from .registry import Options, shown
from .tier import Tier, TierStats

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Path = str | os.PathLike[str]

__all__ = ["DiskTier"]

log = logging.getLogger(__name__)

_MAGIC, _VERSION, _PAGE = b"TLKD", 1, 4096
_HEAD = struct.Struct("<4sIQQQQQ")  # magic, version, file, slot, n_slots, hints_at, data_at
_OWNER_AT = 2048
_KEY = struct.Struct("<16sQQ32s")
_ENTRY = struct.Struct("<64sQI48x")  # key, stamp, length; and a CRC-32C of these 124 bytes
_ENTRY_BYTES = 128
_DEFAULT_BYTES, _LEAST_BYTES = 10 << 30, 1 << 16
_CHUNK = 1 << 20
_RUN = 256  # slots of one system call; Linux takes 1024 pieces
_NAME = "kvpool.slab"  # in a directory


class _Shape(NamedTuple):
    """Where things are in the file; ``slot_bytes`` 0 while nobody knows how long a record is."""

    file_bytes: int
    slot_bytes: int = 0
    n_slots: int = 0
    hints_at: int = 0
    data_at: int = 0

    @classmethod
    def of(cls, file_bytes: int, record_bytes: int) -> _Shape:
        slot = -(-record_bytes // _PAGE) * _PAGE
        n = max(0, file_bytes - 3 * _PAGE) // (slot + _ENTRY_BYTES + 8)
        hints_at = _PAGE + -(-n * _ENTRY_BYTES // _PAGE) * _PAGE
        data_at = hints_at + -(-n * 8 // _PAGE) * _PAGE
        return cls(file_bytes, slot, n, hints_at, data_at)

    def is_sane(self) -> bool:
        return not self.slot_bytes or (
            self == _Shape.of(self.file_bytes, self.slot_bytes)
            and self.data_at + self.n_slots * self.slot_bytes <= self.file_bytes
        )

    def pack(self) -> bytes:
        head = _HEAD.pack(_MAGIC, _VERSION, *self)
        return head + struct.pack("<I", crc32c(head))


def _entry(key: bytes, stamp: int, length: int) -> bytes:
    entry = _ENTRY.pack(key, stamp, length)
    return entry + struct.pack("<I", crc32c(entry))


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The parts of a list in which each number is the one before plus 1, at most _RUN long."""
    first = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1 or i - first == _RUN:
            yield first, i
            first = i


class DiskTier(Tier):
    """Records in a preallocated file that never grows; the least recently used goes first.

    Args:
        path: of the file, or of a directory that it is in as ``kvpool.slab``. It is made when it
            is not there.
        size_bytes: of the file. None: that of the file that is there, or 10 GiB.
        sync: ``"none"``, or ``"data"``: see the module.
        create: make the file when it is not there, and begin one anew in which nothing can be used.

    One process has it at a time. What was used last is noted when it is closed and now and then,
    so after a crash the order is that of some time before.

    Damage costs what is damaged: an entry or a record that is not right is a miss. A file of
    another version of the format is begun anew, and so is one whose head is damaged; the log and
    ``counts`` tell. A file that cannot be written is read, and keeps nothing (``counts`` tells).

    Raises:
        InvalidArgument: the file is none of ours, has another size, or is made for smaller records.
        Busy: another process (or another DiskTier here) has it.
        StorageError: it cannot be opened or made; no space for it.

    >>> import os, tempfile
    >>> from kvpool.tiers import Layout
    >>> path = os.path.join(tempfile.mkdtemp(), "kv.slab")
    >>> [key] = Layout(2, n_layers=1, n_kv_heads=1, head_dim=2).keys([1, 2])
    >>> with DiskTier(path, 1 << 20) as tier:
    ...     tier.put([(key, b"a record")])
    [True]
    >>> with DiskTier(path) as tier:
    ...     bytes(tier.get([key])[0]), tier.stats().n_records
    (b'a record', 1)
    """

    def __init__(
        self,
        path: Path,
        size_bytes: int | None = None,
        *,
        sync: str = "none",
        create: bool = True,
    ) -> None:
        if size_bytes is not None and size_bytes < _LEAST_BYTES:
            raise InvalidArgument(f"size: expected at least {_LEAST_BYTES}, found {size_bytes}")
        if sync not in ("none", "data"):
            raise InvalidArgument(f"sync: expected none or data, found {sync!r}")
        self.path = os.fspath(path)
        if os.path.isdir(self.path):
            self.path = os.path.join(self.path, _NAME)
        self.name, self._sync = f"disk:{self.path}", sync == "data"
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._index: OrderedDict[bytes, int] = OrderedDict()  # key -> slot, oldest use first
        self._lengths: dict[int, int] = {}
        self._free: list[int] = []  # slots, the lowest last
        self._gap = memoryview(bytearray(_PAGE))  # what is read and written between records
        self._pinned: Counter[int] = Counter()  # slots that are being read
        self._orphans: set[int] = set()  # of these, the ones to free afterwards
        self._n_busy, self._is_closing = 0, False  # calls that use the descriptor now
        self._clock = self._uses = 0
        self._hints = np.zeros(0, np.uint64)
        self._fd = -1
        _open_tiers.add(self)
        try:
            with storage_errors(f"disk:{self.path}"):
                self._open(size_bytes, os.O_CREAT if create else 0)
        except BaseException:
            self._close_fd()
            raise

    # ---- opening ---------------------------------------------------------------------------------

    def _open(self, size_bytes: int | None, creating: int) -> None:
        flags = os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would wait
        self.is_read_only = False
        try:
            self._fd = os.open(self.path, flags | os.O_RDWR | creating, 0o600)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            self._fd = os.open(self.path, flags | os.O_RDONLY)
            self.is_read_only = True
            log.warning("%s: read-only: it is read, and keeps nothing new", self.name)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise InvalidArgument(f"{self.name}: no regular file")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_NB | fcntl.LOCK_EX)
        except BlockingIOError:
            pid = os.pread(self._fd, 32, _OWNER_AT).rstrip(b"\0").decode("ascii", "replace")
            raise Busy(f"{self.name}: process {pid or '?'} has it; one at a time") from None
        found = os.fstat(self._fd).st_size
        head = os.pread(self._fd, _HEAD.size + 4, 0)
        shape = self._read_head(head) if found else None
        if shape is not None and size_bytes not in (None, shape.file_bytes):
            raise InvalidArgument(
                f"{self.name}: has size {shape.file_bytes}, expected {size_bytes}: delete it, or "
                "move it aside and copy it (kvpool tier copy)"
            )
        if shape is None:
            if not creating:
                raise StorageError(f"{self.name}: nothing in it can be used; it is left as it is")
            if self.is_read_only:
                self._shape = _Shape(found)
                return
            if found:
                self._counts["begun_anew"] += 1
            shape = _Shape(size_bytes or (found if found >= _LEAST_BYTES else _DEFAULT_BYTES))
            os.ftruncate(self._fd, 0)
            try:
                self._allocate(shape.file_bytes)
            except OSError:
                os.ftruncate(self._fd, 0)  # of what was there, nothing could be used
                raise
            found = shape.file_bytes
        elif found < shape.file_bytes:
            self._counts["truncated"] += 1
            log.warning("%s: %d bytes of %d are there", self.name, found, shape.file_bytes)
        self._shape = shape
        self._read_table(found)
        if not self.is_read_only:
            if found < shape.file_bytes:
                self._allocate(shape.file_bytes)
            self._write(shape.pack(), 0)
            self._write(str(os.getpid()).encode().ljust(32, b"\0"), _OWNER_AT)

    def _read_head(self, head: bytes) -> _Shape | None:
        """What the head says; None when it says nothing that can be used, but the file is ours."""
        if head[:4] != _MAGIC:
            if head.strip(b"\0"):
                raise InvalidArgument(
                    f"{self.name}: not a file of this tier (it begins with {head[:4].hex(' ')}); "
                    "it is left as it is"
                )
            return None
        if len(head) == _HEAD.size + 4:
            _, version, *fields = _HEAD.unpack(head[: _HEAD.size])
            if version != _VERSION:
                log.warning(
                    "%s: format version %d, expected %d: begun anew", self.name, version, _VERSION
                )
                return None
            shape = _Shape(*fields)
            if head[_HEAD.size :] == struct.pack("<I", crc32c(head[:-4])) and shape.is_sane():
                return shape
        log.warning("%s: the head is damaged: begun anew", self.name)
        return None

    def _allocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(self._fd, size)  # no preallocation on this file system

    def _read_table(self, found: int) -> None:
        """Rebuilds the index from the entries that are right and whose slots are in the file."""
        shape = self._shape
        self._index.clear()
        self._hints = np.zeros(shape.n_slots, np.uint64)
        hints = self._pread(8 * shape.n_slots, shape.hints_at)
        self._hints[: len(hints) // 8] = np.frombuffer(hints, "<u8", len(hints) // 8)
        used: list[tuple[int, int, bytes, int]] = []
        seen: set[int] = set()
        step = _CHUNK // _ENTRY_BYTES
        for first in range(0, shape.n_slots, step):
            n = min(step, shape.n_slots - first)
            table = self._pread(n * _ENTRY_BYTES, _PAGE + first * _ENTRY_BYTES)
            n = len(table) // _ENTRY_BYTES
            rows = np.frombuffer(table, np.uint8, n * _ENTRY_BYTES).reshape(n, _ENTRY_BYTES)
            for i in np.flatnonzero(rows.any(axis=1)).tolist():
                entry, slot = table[i * _ENTRY_BYTES : (i + 1) * _ENTRY_BYTES], first + i
                key, stamp, length = _ENTRY.unpack(entry[:124])
                end = shape.data_at + slot * shape.slot_bytes + length
                if entry[124:] != struct.pack("<I", crc32c(entry[:124])):
                    self._counts["bad_entries"] += 1
                elif length > shape.slot_bytes or end > found:
                    self._counts["cut_off"] += 1
                else:
                    used.append((max(stamp, int(self._hints[slot])), slot, key, length))
        for stamp, slot, key, length in sorted(used):
            if key not in self._index:
                seen.add(slot)
            else:
                continue
            self._index[key], self._lengths[slot] = slot, length
            self._hints[slot] = stamp
            self._clock = max(self._clock, stamp)
        self._free = [slot for slot in range(shape.n_slots - 1, -1, -1) if slot not in seen]

    def expect(self, record_bytes: int) -> None:
        shape = self._shape
        if not shape.slot_bytes and not self.is_read_only:
            self._format(record_bytes)
        elif shape.slot_bytes < record_bytes and not self.is_read_only:
            raise InvalidArgument(
                f"{self.name}: made for records of up to {shape.slot_bytes} bytes, these have "
                f"{record_bytes}: delete it, or give another path"
            )

    def _format(self, record_bytes: int) -> None:
        """The first record says how long records are."""
        with self._lock, storage_errors(f"disk:{self.path}"):
            shape = _Shape.of(self._shape.file_bytes, record_bytes)
            if shape.n_slots == 0:
                raise InvalidArgument(
                    f"{self.name}: size {shape.file_bytes} has no room for one record of "
                    f"{record_bytes} bytes"
                )
            self._write(shape.pack(), 0)  # the rest of the file is zeros
            self._shape = shape
            self._hints = np.zeros(shape.n_slots, np.uint64)
            self._free = list(range(shape.n_slots - 1, -1, -1))

    # ---- bytes -----------------------------------------------------------------------------------

    def _write(self, data: Buffer, at: int) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            n = os.pwrite(self._fd, view, at)
            view, at = view[n:], at + n

    def _pread(self, n: int, at: int) -> bytes:
        """Up to n bytes; fewer only where the file ends."""
        parts = []
        while n > 0:
            part = os.pread(self._fd, n, at)
            if not part:
                break
            parts.append(part)
            n, at = n - len(part), at + len(part)
        return b"".join(parts)

    def _read_into(self, view: memoryview, at: int) -> bool:
        """Whether the file had all of it."""
        while len(view):
            n = os.preadv(self._fd, [view], at)
            if n == 0:
                return False
            view, at = view[n:], at + n
        return True

    def _slot_at(self, slot: int) -> int:
        return self._shape.data_at + slot * self._shape.slot_bytes

    # ---- the protocol ----------------------------------------------------------------------------

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        with self._busy():
            if self.is_read_only:
                self._counts["read_only"] += len(items)
                return [False] * len(items)
            records = {_KEY.pack(*key): memoryview(data).cast("B") for key, data in items}
            if records and not self._shape.slot_bytes:
                self._format(len(next(iter(records.values()))))
            slots: list[int] = []
            try:
                with self._lock:
                    new = [key for key in records if key not in self._index]
                    new = [key for key in new if self._fits(len(records[key]))]
                    self._take_slots(slots, len(new))
                slots.sort()
                # The slots are nobody else's now. What found none is the end of the batch.
                new = new[: len(slots)]
                self._write_runs(slots, [records[key] for key in new])
                if self._sync and slots:
                    os.fdatasync(self._fd)
                # The end of a prefix is the first to go: its stamp is the oldest.
                first = self._clock + len(slots)
                stamps = [first - i for i in range(len(slots))]
                self._write_entries(
                    slots,
                    [
                        _entry(key, stamp, len(records[key]))
                        for key, stamp in zip(new, stamps, strict=True)
                    ],
                )
                if self._sync and slots:
                    os.fdatasync(self._fd)
            except BaseException:
                with self._lock:
                    self._free += slots
                raise
            with self._lock:
                self._clock = max(self._clock, first)
                for key, slot, stamp in reversed(list(zip(new, slots, stamps, strict=True))):
                    self._index[key], self._hints[slot] = slot, stamp
                    self._lengths[slot] = len(records[key])
                return [_KEY.pack(*key) in self._index for key, _ in items]

    def _fits(self, length: int) -> bool:
        if length > self._shape.slot_bytes:
            self._counts["too_large"] += 1
        return length <= self._shape.slot_bytes

    def _take_slots(self, slots: list[int], n: int) -> None:
        """Adds up to n slots that are in nobody's way, their entries cleared."""
        while self._free and len(slots) < n:
            slots.append(self._free.pop())
        victims: list[bytes] = []
        for key, slot in self._index.items():
            if len(slots) + len(victims) >= n:
                break
            if not self._pinned[slot]:
                victims.append(key)
        old = sorted(self._index.pop(key) for key in victims)
        slots += old
        self._counts["evicted"] += len(old)
        self._counts["all_in_use"] += n - len(slots)
        self._write_entries(old, [bytes(_ENTRY_BYTES)] * len(old))

    def _write_entries(self, slots: list[int], entries: list[bytes]) -> None:
        """Entries of slots in ascending order; those that are side by side in one write."""
        for first, end in _runs(slots):
            self._write(b"".join(entries[first:end]), _PAGE + slots[first] * _ENTRY_BYTES)

    def _write_runs(self, slots: list[int], records: list[memoryview]) -> None:
        """Records into slots in ascending order; those that are side by side in one write."""
        size = self._shape.slot_bytes
        for first, end in _runs(slots):
            pieces: list[memoryview] = []
            for record in records[first:end]:
                pieces += record, self._gap[: size - len(record)]
            at, total = self._slot_at(slots[first]), (end - first) * size
            # Where a record is much shorter than a slot, a gap would be longer than its page.
            is_whole = sum(map(len, pieces)) == total
            n = os.pwritev(self._fd, pieces, at) if is_whole else 0
            if n < total:  # the rest, one after the other
                for i in range(first + n // size, end):
                    self._write(records[i], self._slot_at(slots[i]))

    def get(
        self, keys: Sequence[Key], out: Sequence[memoryview] | None = None
    ) -> list[Buffer | None]:
        with self._busy():
            packed = [_KEY.pack(*key) for key in keys]
            with self._lock:
                slots = [self._index.get(key) for key in packed]
                lengths = [0 if slot is None else self._lengths[slot] for slot in slots]
                self._pinned.update(slot for slot in slots if slot is not None)
            records: list[Buffer | None] = [None] * len(keys)
            try:
                where = [i for i, slot in enumerate(slots) if slot is not None]
                found = [slot for slot in slots if slot is not None]
                views = []
                for i in where:
                    view = out[i][: lengths[i]] if out is not None else memoryview(b"")
                    if len(view) < lengths[i]:
                        view = memoryview(bytearray(lengths[i]))
                    views.append(view)
                for first, end in _runs(found):
                    got = self._read_run(found[first:end], views[first:end])
                    for i, record in zip(where[first:end], got, strict=True):
                        records[i] = record
            finally:
                with self._lock:
                    self._let_go(packed, slots, records)
            return records

    def _read_run(self, slots: list[int], views: list[memoryview]) -> Sequence[memoryview | None]:
        """The records of slots that are side by side, in one read."""
        size = self._shape.slot_bytes
        pieces: list[memoryview] = []
        for view in views:
            pieces += view, self._gap[: size - len(view)]
        total = (len(views) - 1) * size + len(views[-1])
        try:
            is_whole = sum(map(len, pieces[:-1])) == total
            if is_whole and os.preadv(self._fd, pieces[:-1], self._slot_at(slots[0])) == total:
                return views
        except OSError:
            pass  # which of them it is, the next reads tell
        return [self._read_record(*pair) for pair in zip(slots, views, strict=True)]

    def _read_record(self, slot: int, view: memoryview) -> memoryview | None:
        try:
            if self._read_into(view, self._slot_at(slot)):
                return view
            what = "cut_off"
        except OSError as error:
            what = "unreadable"
            log.warning("%s: slot %d: %s", self.name, slot, error.strerror)
        with self._lock:
            self._counts[what] += 1
        return None

    def _let_go(
        self, keys: list[bytes], slots: list[int | None], records: list[Buffer | None]
    ) -> None:
        """After a read: what was read is used, what could not be read is dropped."""
        for key, slot, record in zip(
            reversed(keys), reversed(slots), reversed(records), strict=True
        ):
            if slot is None:
                continue
            self._pinned[slot] -= 1
            if not self._pinned[slot]:
                del self._pinned[slot]
                if slot in self._orphans:
                    self._orphans.discard(slot)
                    self._free.append(slot)
            if self._index.get(key) != slot:
                continue
            if record is None:
                self._drop(key)
            else:
                self._clock += 1
                self._hints[slot] = self._clock
                self._index.move_to_end(key)
        self._note_uses(len(keys))

    def _drop(self, key: bytes) -> bool:
        slot = self._index.pop(key, None)
        if slot is None:
            return False
        self._hints[slot] = 0
        if self._pinned[slot]:
            self._orphans.add(slot)
        else:
            self._free.append(slot)
        if not self.is_read_only:
            self._write(bytes(_ENTRY_BYTES), _PAGE + slot * _ENTRY_BYTES)
        return True

    def _note_uses(self, n: int) -> None:
        """Writes the hints now and then, so that a crash does not lose all of them."""
        self._uses += n
        if self._uses > 1024 + len(self._hints) // 4:
            self._write_hints()

    def _write_hints(self) -> None:
        self._uses = 0
        if not self.is_read_only and len(self._hints):
            with contextlib.suppress(OSError):  # they are hints
                self._write(self._hints.astype("<u8").tobytes(), self._shape.hints_at)

    def has(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            return [_KEY.pack(*key) in self._index for key in keys]

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        with self._busy(), self._lock:
            return [self._drop(_KEY.pack(*key)) for key in keys]

    def keys(self) -> Iterator[Key]:
        with self._lock:
            return iter([Key(*_KEY.unpack(key)) for key in self._index])

    def stats(self) -> TierStats:
        with self._lock:
            shape, n = self._shape, len(self._index)
            return TierStats(
                n, n * shape.slot_bytes, shape.n_slots * shape.slot_bytes or shape.file_bytes,
                dict(self._counts),
            )  # fmt: skip

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            if self._n_busy == 0:
                self._end()

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """A call that uses the descriptor: a close meanwhile is done at its end, so that nothing
        is ever written to whatever has the same number next."""
        with self._lock:
            if self._fd < 0 or self._is_closing:
                raise StorageError(f"{self.name}: closed")
            self._n_busy += 1
        try:
            with storage_errors(f"disk:{self.path}"):
                yield
        finally:
            with self._lock:
                self._n_busy -= 1
                if self._is_closing and self._n_busy == 0:
                    self._end()

    def _end(self) -> None:
        if self._fd < 0:
            return
        self._write_hints()
        if not self.is_read_only:
            with contextlib.suppress(OSError):
                self._write(bytes(32), _OWNER_AT)
                os.fdatasync(self._fd)
        self._close_fd()

    def _close_fd(self, *, in_child: bool = False) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if not in_child:  # or a child that has yet to close its descriptor would keep the lock
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


#: A child of fork() has the descriptors of its parent, and with them the lock; it gives them up.
_open_tiers: weakref.WeakSet[DiskTier] = weakref.WeakSet()


def _in_child() -> None:
    for tier in list(_open_tiers):
        tier._lock = threading.RLock()  # its holder may not be there
        with contextlib.suppress(OSError):
            tier._close_fd(in_child=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def open_url(url: SplitResult, options: Options) -> DiskTier:
    """``disk:/path?size=10GiB&sync=none``."""
    if url.netloc:
        where = shown(f"//{url.netloc}{url.path}")
        raise InvalidArgument(f"disk: expected disk:/path, found disk:{where}")
    path = unquote(url.path)
    if not path:
        raise InvalidArgument("disk: expected a path, as in disk:/var/cache/kv.slab?size=10GiB")
    if "\0" in path:
        raise InvalidArgument(f"disk: expected a path, found {path!r}, which has a zero byte")
    size = options.size("size")
    sync = options.choice("sync", "none", ("none", "data"))
    options.done()
    if not hasattr(os, "posix_fallocate"):
        raise Unsupported("disk: needs a POSIX system")
    return DiskTier(path, size, sync=sync, create=options.create)
