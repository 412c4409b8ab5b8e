"""Blocks in an object store that speaks S3: the blocks of a prefix packed, many to an object.

    s3://bucket/some/prefix?endpoint=http://10.0.0.9:8333&region=us-east-1

Small objects are slow, so what one put brings of one prefix becomes one object, a pack, named by
the key of its first block:

    [ magic, version, n ] [ n entries: key, offset, bytes ] [ CRC-32C of the table ] [ n records ]

How a reader finds a block without listing anything:

- An engine that has nothing of a prefix begins at block 0, whose key is the name of a pack: one
  range read gives the table and the records. The next pack is named by the key of the block after
  this one's last, and so on along the prefix.
- An engine whose pool has the beginning goes on in the middle of a pack. It got that beginning from
  this store, or wrote it there, so it has seen the pack's table, and remembers which block is where
  (the latest ``_N_PLACES`` of them): one range read.

So a lookup is one request for each pack, hit or miss. After a miss nothing further along the prefix
is asked for. A block in the middle of a pack that this process has never seen is a miss; it is
computed, and written once more, in a pack that begins with it.

A put is put-if-absent: when two engines write the same pack, the first one's stays. A block cannot
be taken out of a pack: to delete it deletes the pack. Objects never expire by themselves; give the
bucket a lifecycle rule.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult

from kvpool import InvalidArgument, TransferError, crc32c

from .record import HEAD_BYTES, Key
from .registry import Options, shown
from .tier import Tier, TierStats

try:
    import obstore
    from obstore import exceptions
    from obstore.store import S3Store
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError("s3 tiers need obstore: pip install 'kvpool[s3]'") from error

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["S3Tier", "open_url"]

_MAGIC, _VERSION = b"TLKP", 1
_HEAD = struct.Struct("<4sHH")
_ENTRY = struct.Struct("<16sQQ32sQQ")  # layout, namespace, hash, digest, offset, bytes
_MOST_BLOCKS = 64  # in a pack
_TABLE_BYTES = _HEAD.size + _MOST_BLOCKS * _ENTRY.size + 4  # at most
_MOST_BYTES = 1 << 30  # of one record
_READ_BYTES = 16 << 20  # at a time
_N_PLACES = 200_000
_INDEX_AT = HEAD_BYTES + 16  # of a record: its seal's first token and last


class _Place(NamedTuple):
    pack: str
    offset: int
    n_bytes: int


class _Damaged(Exception):
    """An object with a pack's name is no pack."""


def pack(items: Sequence[tuple[Key, memoryview]]) -> tuple[bytes, list[int]]:
    """The table of a pack, and where in the object each record is."""
    at = _HEAD.size + len(items) * _ENTRY.size + 4
    table, offsets = bytearray(_HEAD.pack(_MAGIC, _VERSION, len(items))), []
    for key, record in items:
        table += _ENTRY.pack(*key, at, len(record))
        offsets.append(at)
        at += len(record)
    table += struct.pack("<I", crc32c(table))
    return bytes(table), offsets


def unpack(data: memoryview) -> list[tuple[Key, int, int]]:
    """``(key, offset, bytes)`` of each record of a pack that begins with ``data``. _Damaged."""
    if len(data) < _HEAD.size:
        raise _Damaged("too short")
    magic, version, n = _HEAD.unpack(data[: _HEAD.size])
    end = _HEAD.size + n * _ENTRY.size
    if magic != _MAGIC or version != _VERSION or not 0 < n <= _MOST_BLOCKS or len(data) < end + 4:
        raise _Damaged("no table")
    if struct.unpack("<I", data[end : end + 4])[0] != crc32c(data[:end]):
        raise _Damaged("the table's checksum")
    entries, at = [], end + 4
    for i in range(n):
        *key, offset, n_bytes = _ENTRY.unpack_from(data, _HEAD.size + i * _ENTRY.size)
        if offset != at or not 0 < n_bytes <= _MOST_BYTES:
            raise _Damaged("an entry")
        entries.append((Key(*key), offset, n_bytes))
        at += n_bytes
    return entries


class S3Tier(Tier):
    """Records in packs in an S3 bucket.

    Args:
        bucket, prefix: where the packs are.
        endpoint: of a store that is not Amazon's; ``http://`` is believed without TLS.
        region: of the bucket.
        timeout_s: how long a request is waited for.
        retries: how often one that failed is tried again.

    Credentials are the environment's, as for every S3 client: ``AWS_ACCESS_KEY_ID`` and
    ``AWS_SECRET_ACCESS_KEY``, a web identity or the machine's role.

    Raises:
        InvalidArgument: an option is out of range.
        TransferError: the bucket cannot be listed.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str = "",
        region: str = "",
        timeout_s: float = 5.0,
        retries: int = 1,
    ) -> None:
        if not 0.001 <= timeout_s < 1e6:
            raise InvalidArgument(f"timeout: expected more than 0 seconds, found {timeout_s}")
        if not 0 <= retries <= 100:
            raise InvalidArgument(f"retries: expected 0 to 100, found {retries}")
        if "@" in endpoint:  # the client's errors would tell them
            raise InvalidArgument(
                f"endpoint: credentials are the environment's, found {shown(endpoint)!r}"
            )
        self.name = f"s3:{bucket}" + (f"/{prefix}" if prefix else "")
        self._prefix = f"{prefix}/" if prefix else ""
        self._lock = Lock()
        self._places: OrderedDict[Key, _Place] = OrderedDict()
        self._counts = dict.fromkeys(("requests", "packs", "present", "damaged"), 0)
        options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
        options |= {"region": region} if region else {}
        wait = f"{round(timeout_s * 1000)}ms"
        self._store: Any = S3Store(
            bucket,
            client_options={
                "timeout": wait,
                "connect_timeout": wait,
                "allow_http": endpoint.startswith("http:"),
            },
            retry_config={"max_retries": retries},
            **options,
        )
        with self._told("open"):
            obstore.list_with_delimiter(self._store, f"{self._prefix}none")

    @contextmanager
    def _told(self, call: str) -> Iterator[None]:
        try:
            yield
        except (exceptions.BaseError, OSError) as error:
            text = str(error).split("\n\nDebug")[0]
            raise TransferError(f"{self.name}: {call}: {type(error).__name__}: {text}") from error

    def _count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self._counts[what] += n

    # ---- places ----------------------------------------------------------------------------------

    def _place(self, key: Key) -> _Place | None:
        with self._lock:
            place = self._places.get(key)
            if place is not None:
                self._places.move_to_end(key)
            return place

    def _remember(self, name: str, entries: Sequence[tuple[Key, int, int]]) -> None:
        with self._lock:
            for key, offset, n_bytes in entries:
                # the pack that begins with a block is the one its readers find
                if key not in self._places or name.endswith(key.text):
                    self._places[key] = _Place(name, offset, n_bytes)
            while len(self._places) > _N_PLACES:
                self._places.popitem(last=False)

    def _forget(self, name: str) -> None:
        with self._lock:
            for key in [key for key, place in self._places.items() if place.pack == name]:
                del self._places[key]

    def _read(self, name: str, start: int, n_bytes: int) -> memoryview | None:
        """Bytes of an object, fewer where it ends; None: it is not there."""
        self._count("requests")
        try:
            result = obstore.get(self._store, name, options={"range": (start, start + n_bytes)})
            return memoryview(result.bytes())
        except FileNotFoundError:
            return None
        except exceptions.GenericError as error:
            if "416" not in str(error):
                raise
            return memoryview(b"")  # an empty object has no range

    def _look(self, key: Key, n_bytes: int = 0) -> memoryview | None:
        """Reads the beginning of the pack that begins with a block and remembers its table."""
        name = self._prefix + key.text
        data = self._read(name, 0, _TABLE_BYTES + n_bytes)
        if data is None:
            return None
        try:
            entries = unpack(data)
            if entries[0][0] != key:
                raise _Damaged("of another block")
        except _Damaged:
            self._count("damaged")
            raise
        self._remember(name, entries)
        return data

    # ---- the protocol ----------------------------------------------------------------------------

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        records = [(key, memoryview(data).cast("B")) for key, data in items]
        held = [False] * len(items)
        with self._told("put"):
            for first, end in _runs(records):
                while first < end:
                    key = records[first][0]
                    if self._place(key) is None and self._probe(key):
                        self._write(records[first:end])
                    n = first
                    while first < end and self._place(records[first][0]) is not None:
                        held[first] = True
                        first += 1
                    if first == n:  # an object in its way that is no pack, or gone again
                        first += 1
        return held

    def _probe(self, key: Key) -> bool:
        """Whether no pack begins with a block; one that is there is remembered."""
        try:
            found = self._look(key)
        except _Damaged:
            return False
        self._count("present", found is not None)
        return found is None

    def _write(self, items: Sequence[tuple[Key, memoryview]]) -> None:
        new = list(items)
        for i, (key, _) in enumerate(items):
            if i and self._place(key) is not None:
                new = new[:i]
                break
        name = self._prefix + new[0][0].text
        table, offsets = pack(new)
        self._count("requests")
        try:
            obstore.put(
                self._store, name, [table, *(record for _, record in new)], mode="create",
                use_multipart=False,
            )  # fmt: skip
        except (exceptions.AlreadyExistsError, FileExistsError):  # somebody was faster
            self._probe(new[0][0])
            return
        self._count("packs")
        entries = zip(new, offsets, strict=True)
        self._remember(name, [(key, offset, len(data)) for (key, data), offset in entries])

    def get(
        self, keys: Sequence[Key], out: Sequence[memoryview] | None = None
    ) -> list[Buffer | None]:
        records: list[Buffer | None] = [None] * len(keys)
        is_lost, i = False, 0
        with self._told("get"):
            while i < len(keys):
                place, data = self._place(keys[i]), None
                if place is None and not is_lost:
                    room = sum(len(view) for view in out[i:]) if out is not None else 0
                    try:
                        data = self._look(keys[i], min(room, _READ_BYTES))
                    except _Damaged:
                        records[i] = b"?"  # no record: whoever asked has it deleted
                    place = self._place(keys[i])
                if place is None:
                    is_lost, i = True, i + 1
                    continue
                if place.n_bytes > (_MOST_BYTES if out is None else len(out[i])):
                    records[i], i = b"?", i + 1
                    continue
                i += self._take(keys[i:], place, data, records, i)
        return records

    def _take(
        self,
        keys: Sequence[Key],
        place: _Place,
        data: memoryview | None,
        records: list[Buffer | None],
        at: int,
    ) -> int:
        """Records that follow each other in a pack, by one range read or out of ``data``, the
        pack's beginning; how many."""
        places = [place]
        for key in keys[1:]:
            following, last = self._place(key), places[-1]
            end = last.offset + last.n_bytes
            if following is None or (following.pack, following.offset) != (place.pack, end):
                break
            if end + following.n_bytes - place.offset > _READ_BYTES:
                break
            places.append(following)
        size, start = places[-1].offset + places[-1].n_bytes - place.offset, place.offset
        if data is None or len(data) < start + size:
            data, start = self._read(place.pack, start, size), 0
        if data is None:
            self._forget(place.pack)  # deleted by somebody else
            return len(places)
        for i, each in enumerate(places, at):
            offset = start + each.offset - place.offset
            records[i] = data[offset : offset + each.n_bytes] or b"?"
        return len(places)

    def has(self, keys: Sequence[Key]) -> list[bool]:
        found = []
        with self._told("has"):
            for key in keys:
                place = self._place(key)
                name = self._prefix + key.text if place is None else place.pack
                found.append(self._read(name, 0, 1) is not None)
        return found

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        """Deletes the packs that the blocks are in, with whatever else is in them."""
        places = [self._place(key) for key in keys]
        found: list[bool] = []
        gone: set[str] = set()
        with self._told("delete"):
            for key, place in zip(keys, places, strict=True):
                name = self._prefix + key.text if place is None else place.pack
                if name not in gone and self._read(name, 0, 1) is not None:
                    self._count("requests")
                    obstore.delete(self._store, name)
                    gone.add(name)
                self._forget(name)
                found.append(name in gone)
        return found

    def keys(self) -> Iterator[Key]:
        with self._told("keys"):
            for chunk in obstore.list(self._store, self._prefix or None):
                for meta in chunk:
                    yield from self._keys_of(meta["path"])

    def _keys_of(self, path: str) -> list[Key]:
        try:
            first = Key.parse(path[len(self._prefix) :])
            if self._look(first) is None:
                return []
        except (InvalidArgument, _Damaged):
            return []
        with self._lock:
            return [key for key, place in self._places.items() if place.pack == path]

    def stats(self) -> TierStats:
        """Counts: ``requests``, ``packs`` (written), ``present`` (packs that were there already),
        ``damaged`` (objects that are no packs)."""
        with self._lock:
            return TierStats(counts=dict(self._counts))


def _runs(records: Sequence[tuple[Key, memoryview]]) -> Iterator[tuple[int, int]]:
    """Records that follow each other in a prefix, as far as their seals tell."""

    def place(record: memoryview) -> tuple[int, int]:
        if len(record) < _INDEX_AT + 16:
            return -1, -2
        first, end = struct.unpack_from("<QQ", record, _INDEX_AT)
        return first, end

    first = 0
    for i in range(1, len(records) + 1):
        is_end = i == len(records) or i - first == _MOST_BLOCKS
        if not is_end:
            (before, (key, record)) = records[i - 1], records[i]
            same = before[0][:2] == key[:2]
            is_end = not same or place(before[1])[1] != place(record)[0]
        if is_end:
            yield first, i
            first = i


def open_url(url: SplitResult, options: Options) -> S3Tier:
    """``s3://bucket/prefix?endpoint=..``; see the module."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", url.netloc):
        bucket = shown(url.netloc)
        raise InvalidArgument(f"s3: expected s3://bucket/prefix, found {bucket!r} as a bucket")
    endpoint, region = options.text("endpoint"), options.text("region")
    timeout, retries = options.seconds("timeout", 5), options.integer("retries", 1)
    options.done()
    return S3Tier(
        url.netloc,
        url.path.strip("/"),
        endpoint=endpoint,
        region=region,
        timeout_s=timeout,
        retries=retries,
    )
