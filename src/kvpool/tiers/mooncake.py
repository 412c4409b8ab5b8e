"""Blocks in a Mooncake Store: the memory that every engine of a fleet lends, under one master.

    mooncake://10.0.0.1:50051?segment=16GiB&hostname=10.0.0.7

``segment`` is what this engine lends (0: nothing, it only reads and writes what others lend);
``hostname`` is the address at which the others reach it.

What the store does, measured with release 0.3.13, and what this adapter makes of it:

- A get of what is missing is ``b""``, and so is a get that failed. ``batch_get_into`` tells them
  apart by a code for each key, so it is what is used; a transfer that failed is a counted miss.
- A put on a key that is there gives 0 and keeps the old bytes. So does this tier; what a reader has
  refused is deleted first.
- A key that was read has a lease, and cannot be removed for some seconds. Here it is removed by
  force: whoever reads it meanwhile checks what he reads.
- Status 0 is no proof of replication: with ``replicas=2`` and one engine alive there is one copy.
  The copies are counted after each put.
- Blocks vanish: under memory pressure, and with the engine that lent the memory. ``is_exist`` says
  yes for a while after that. Both are misses.
- ``setup`` without a master holds the whole process, GIL and all, for 90 seconds: whether somebody
  listens is looked at first. A transfer from an engine that hangs takes 30 seconds, and a call to a
  master that is gone 4: those are the stack's deadline to cut short.
"""

from __future__ import annotations

import ctypes
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult

from kvpool import InvalidArgument, TransferError

from .record import Key
from .registry import Options, port, shown
from .tier import Tier, TierStats

try:
    from mooncake.store import MooncakeDistributedStore, ReplicaStatus, ReplicateConfig
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError(
        "mooncake tiers need Mooncake and libibverbs (Debian: libibverbs1): "
        f"pip install 'kvpool[mooncake]' ({error})"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MooncakeTier", "open_url"]

# Codes of the store.
_NO_SPACE, _INVALID, _MISSING, _RPC_FAILED = -200, -600, -704, -900

_LEAST_SEGMENT = 16 << 20  # the store's own limit
_STAGING_BYTES = 8 << 20  # registered memory, for each direction; more if a record needs it


class _Staging:
    """Memory that the store reads from and writes to."""

    def __init__(self, store: Any) -> None:
        self._store, self.address = store, 0
        self.view = memoryview(b"")

    def room(self, n_bytes: int) -> memoryview:
        """At least so many bytes. TransferError: the store does not take them."""
        if n_bytes > len(self.view):
            memory = bytearray(n_bytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            code = self._store.register_buffer(address, n_bytes)
            if code != 0:
                raise TransferError(f"mooncake: register_buffer: code {code}")
            if self.address:
                self._store.unregister_buffer(self.address)
            self.address, self.view = address, memoryview(memory)
        return self.view


class MooncakeTier(Tier):
    """Records in a Mooncake Store, over TCP or RDMA.

    Args:
        host, port: of the master.
        hostname: the address at which other engines reach this one; by default that of the
            interface which leads to the master.
        segment_bytes: memory that this engine lends, 16 MiB or more, or 0. It is gone with the
            engine.
        buffer_bytes: the client's own buffer.
        metadata: the metadata server, or ``P2PHANDSHAKE`` for none.
        protocol, devices: ``tcp``, or ``rdma`` and its devices.
        replicas: copies of each block, on as many engines.
        timeout_s: how long the master's port is waited for when the tier is opened.

    Raises:
        InvalidArgument: an option is out of range.
        TransferError: the master cannot be reached, or refuses.
    """

    def __init__(
        self,
        host: str = "localhost",
        port: int = 50051,
        *,
        hostname: str = "",
        segment_bytes: int = 1 << 30,
        buffer_bytes: int = 16 << 20,
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        replicas: int = 1,
        timeout_s: float = 2.0,
    ) -> None:
        if segment_bytes != 0 and segment_bytes < _LEAST_SEGMENT:
            raise InvalidArgument(f"segment: expected 0 or at least 16 MiB, found {segment_bytes}")
        if buffer_bytes <= 0:
            raise InvalidArgument(f"buffer: expected at least 1 byte, found {buffer_bytes}")
        if not 1 <= replicas <= 64:
            raise InvalidArgument(f"replicas: expected 1 to 64, found {replicas}")
        if not 0 < timeout_s < 1e9:
            raise InvalidArgument(f"timeout: expected more than 0 seconds, found {timeout_s}")
        self.name, self._replicas = f"mooncake:{host}:{port}", replicas
        names = ("full", "failed", "unreadable", "under_replicated")
        self._counts = dict.fromkeys(names, 0)
        self._lock, self._n_calls, self._is_closed = Lock(), 0, False
        try:
            with socket.create_connection((host, port), timeout_s) as probe:
                hostname = hostname or probe.getsockname()[0]
        except OSError as error:
            raise TransferError(f"{self.name}: open: no master: {error}") from error
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(
            hostname, metadata, segment_bytes, buffer_bytes, protocol, devices, f"{host}:{port}"
        )
        if code != 0:
            raise TransferError(f"{self.name}: open: setup: code {code}")
        self._config = ReplicateConfig()
        self._config.replica_num = replicas
        self._to_put, self._to_get = _Staging(self._store), _Staging(self._store)

    @contextmanager
    def _call(self) -> Iterator[Any]:
        """The store, which is not closed under a call: the last one that ends closes it."""
        with self._lock:
            if self._is_closed:
                raise TransferError(f"{self.name} is closed")
            self._n_calls += 1
        try:
            yield self._store
        finally:
            with self._lock:
                self._n_calls -= 1
                is_last = self._is_closed and self._n_calls == 0
            if is_last:
                self._store.close()

    def _count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self._counts[what] += n

    def _check(self, call: str, codes: Sequence[int], n: int) -> None:
        if len(codes) != n:
            raise TransferError(f"{self.name}: {call}: {len(codes)} codes for {n} keys")
        if _RPC_FAILED in codes:
            raise TransferError(f"{self.name}: {call}: the master does not answer")

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        held: list[bool] = []
        records = [memoryview(data).cast("B") for _, data in items]
        with self._call() as store:
            for first, end in _batches([len(data) for data in records]):
                sizes = [len(data) for data in records[first:end]]
                view, at, pointers = self._to_put.room(max(sum(sizes), _STAGING_BYTES)), 0, []
                for data in records[first:end]:
                    view[at : at + len(data)] = data
                    pointers.append(self._to_put.address + at)
                    at += len(data)
                names = [key.text for key, _ in items[first:end]]
                codes = store.batch_put_from(names, pointers, sizes, self._config)
                self._check("put", codes, len(names))
                held += [code == 0 for code in codes]
                self._note(store, names, codes)
        return held

    def _note(self, store: Any, names: list[str], codes: list[int]) -> None:
        """Counts what came of a put."""
        failed = [code for code in codes if code not in (0, _NO_SPACE)]
        self._count("full", codes.count(_NO_SPACE))
        self._count("failed", len(failed))
        if len(failed) == len(codes):
            raise TransferError(f"{self.name}: put: codes {sorted(set(failed))}")
        if self._replicas > 1:
            found = store.batch_get_replica_desc(names)
            for name, code in zip(names, codes, strict=True):
                copies = [d for d in found.get(name, ()) if d.status == ReplicaStatus.COMPLETE]
                self._count("under_replicated", code == 0 and len(copies) < self._replicas)

    def get(
        self, keys: Sequence[Key], out: Sequence[memoryview] | None = None
    ) -> list[Buffer | None]:
        records: list[Buffer | None] = []
        names, n_failed = [key.text for key in keys], 0
        with self._call() as store:
            if out is None:
                sizes = [max(0, store.get_size(name)) for name in names]
            else:
                sizes = [len(view) for view in out]
            for first, end in _batches(sizes):
                view, at, offsets = (
                    self._to_get.room(max(sum(sizes[first:end]), _STAGING_BYTES)),
                    0,
                    [],
                )
                for size in sizes[first:end]:
                    offsets.append(at)
                    at += size
                pointers = [self._to_get.address + offset for offset in offsets]
                codes = store.batch_get_into(names[first:end], pointers, sizes[first:end])
                self._check("get", codes, end - first)
                for i, code in enumerate(codes, first):
                    found = view[offsets[i - first] :][:code] if code > 0 else None
                    if found is None:
                        # longer than it can be: no record, and whoever asked has it deleted
                        too_long = code == _INVALID and sizes[i] > 0
                        records.append(b"?" if too_long else None)
                        n_failed += code not in (0, _MISSING, _INVALID)
                    elif out is None:
                        records.append(bytes(found))
                    else:
                        out[i][:code] = found
                        records.append(out[i][:code])
        self._count("unreadable", n_failed)
        if n_failed and not any(records):
            raise TransferError(f"{self.name}: get: {n_failed} transfers failed: an owner is gone")
        return records

    def has(self, keys: Sequence[Key]) -> list[bool]:
        with self._call() as store:
            codes = store.batch_is_exist([key.text for key in keys]) if keys else []
        self._check("has", codes, len(keys))
        return [code == 1 for code in codes]

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        with self._call() as store:
            codes = store.batch_remove([key.text for key in keys], True) if keys else []
        self._check("delete", codes, len(keys))
        return [code == 0 for code in codes]

    def stats(self) -> TierStats:
        """Counts: ``full`` and ``failed`` (blocks that were not stored, for want of memory or
        because their owner is gone), ``unreadable`` (blocks whose transfer failed),
        ``under_replicated`` (blocks with fewer copies than were asked for)."""
        with self._lock:
            return TierStats(counts=dict(self._counts))

    def close(self) -> None:
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            is_idle = self._n_calls == 0
        if is_first and is_idle:
            self._store.close()


def _batches(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of records that fit the staging memory, or are one."""
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > _STAGING_BYTES:
            yield first, i
            first, total = i, 0
        total += size
    if first < len(sizes):
        yield first, len(sizes)


def open_url(url: SplitResult, options: Options) -> MooncakeTier:
    """``mooncake://master:port?segment=..``; see the module."""
    match = re.fullmatch(r"([^:@\[\]]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?", url.netloc)
    if match is None or url.path.strip("/"):
        raise InvalidArgument(
            f"mooncake: expected mooncake://host:port, found {shown(url.netloc + url.path)!r}"
        )
    segment, buffer = options.size("segment", 1 << 30), options.size("buffer", 16 << 20)
    hostname, metadata = options.text("hostname"), options.text("metadata", "P2PHANDSHAKE")
    protocol, devices = options.text("protocol", "tcp"), options.text("devices")
    replicas, timeout = options.integer("replicas", 1), options.seconds("timeout", 2)
    options.done()
    return MooncakeTier(
        match[1].strip("[]"),
        port("mooncake", match[2], 50051),
        hostname=hostname,
        segment_bytes=segment or 0,
        buffer_bytes=buffer or 0,
        metadata=metadata,
        protocol=protocol,
        devices=devices,
        replicas=replicas,
        timeout_s=timeout,
    )
