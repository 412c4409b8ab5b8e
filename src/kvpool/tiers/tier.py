"""The protocol of a tier: a place that keeps records, under keys, and may lose any of them.

    put(items) -> [bool]      get(keys) -> [record or None]      has(keys)      delete(keys)
    keys()                    stats()                            close()

Every call is a batch, and a batch of a prefix is in the order of the prefix. A tier decides nothing
about what is right: it keeps bytes and gives bytes back, and whoever asked checks them
(``Layout.open``). So a tier may lose what it likes, answer late, raise what it likes or give back
nonsense: that costs time, never an answer.

Rules that an implementation keeps:

- ``put`` gives True for a record that is held when it returns, be it for this call or an earlier
  one: whether bytes under a key are replaced is the tier's choice. False: not kept (full, too
  large, read-only). Errors that concern the whole store are raised. The buffers are the caller's:
  a tier copies what it wants to keep past the call.
- ``get`` gives None for what is not there. ``out`` may be given, one writable view for each key,
  of the size of a record: a tier that can reads into them and gives back the part it filled; any
  other ignores it and gives its own bytes, which nobody changes afterwards.
- ``has`` may be wrong either way. ``delete`` gives True for what was there.
- One thread calls ``put`` and ``delete`` while another calls ``get`` and ``has``; ``stats`` comes
  from anywhere; ``close`` comes last, from anywhere, twice perhaps, and while a call that hangs is
  still under way.
- The constructor raises when its options are wrong or the store cannot be opened: the operator
  reads that. Later troubles raise StorageError (this machine) or TransferError (another), or
  whatever the client library raises.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from kvpool import InvalidArgument, Unsupported

from .record import Key

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

__all__ = ["AsyncTier", "MemoryTier", "Tier", "TierStats"]

T = TypeVar("T")


@dataclass(frozen=True)
class TierStats:
    """What a tier holds; None where it does not know."""

    n_records: int | None = None
    size_bytes: int | None = None
    """What the records take."""
    capacity_bytes: int | None = None
    """What they may take."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What this kind of tier counts besides: ``evicted``, ``corrupt``, ...."""


class Tier(ABC):
    """A place that keeps records. See the module for the rules."""

    name: str
    """How stats and metrics call it: the scheme, and what tells it from another of its kind."""

    def expect(self, record_bytes: int) -> None:  # noqa: B027
        """Told once, before anything else, how long the records will be. InvalidArgument where
        such ones cannot be kept."""

    @abstractmethod
    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        """Keeps records; True for each that is held now."""

    @abstractmethod
    def get(
        self, keys: Sequence[Key], out: Sequence[memoryview] | None = None
    ) -> list[Buffer | None]:
        """The records, None for each that is not there."""

    @abstractmethod
    def has(self, keys: Sequence[Key]) -> list[bool]:
        """Whether a record is there, as far as the tier knows; cheaper than reading it."""

    @abstractmethod
    def delete(self, keys: Sequence[Key]) -> list[bool]:
        """Drops records; True for each that was there."""

    def keys(self) -> Iterator[Key]:
        """All keys, for the tools; Unsupported where the store cannot list them."""
        raise Unsupported(f"{self.name}: this tier cannot list what it holds")

    def stats(self) -> TierStats:
        """What it holds and has counted."""
        return TierStats()

    def close(self) -> None:  # noqa: B027
        """Writes what must be written and lets go of everything; a second time does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class MemoryTier(Tier):
    """Records in this process's memory, up to ``size_bytes``; the least recently used goes first.

    A tier above a slow one, where host memory is larger than the pool; and the simplest tier there
    is, to read before writing another.

    >>> from kvpool.tiers import Layout
    >>> key = Layout(2, n_layers=1, n_kv_heads=1, head_dim=2).keys([1, 2])[0]
    >>> tier = MemoryTier(1000)
    >>> tier.put([(key, b"a record")]), tier.get([key]), tier.delete([key]), tier.get([key])
    ([True], [b'a record'], [True], [None])
    """

    def __init__(self, size_bytes: int, name: str = "memory") -> None:
        if size_bytes <= 0:
            raise InvalidArgument(f"size_bytes: expected at least 1, found {size_bytes}")
        self.name, self._capacity, self._size, self._evicted = name, size_bytes, 0, 0
        self._records: OrderedDict[Key, bytes] = OrderedDict()
        self._lock = Lock()

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        held = []
        for key, data in reversed(items):  # the end of a prefix goes before its beginning
            record = bytes(data)
            with self._lock:
                self._size += len(record) - len(self._records.pop(key, b""))
                self._records[key] = record
                while self._size > self._capacity:
                    self._size -= len(self._records.popitem(last=False)[1])
                    self._evicted += 1
                held.append(key in self._records)
        return held[::-1]

    def get(
        self, keys: Sequence[Key], out: Sequence[memoryview] | None = None
    ) -> list[Buffer | None]:
        with self._lock:
            for key in reversed(keys):
                if key in self._records:
                    self._records.move_to_end(key)
            return [self._records.get(key) for key in keys]

    def has(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            return [key in self._records for key in keys]

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            records = [self._records.pop(key, None) for key in keys]
            self._size -= sum(len(record) for record in records if record is not None)
        return [record is not None for record in records]

    def keys(self) -> Iterator[Key]:
        with self._lock:
            return iter(list(self._records))

    def stats(self) -> TierStats:
        with self._lock:
            n, size = len(self._records), self._size
        return TierStats(n, size, self._capacity, {"evicted": self._evicted})

    def close(self) -> None:
        with self._lock:
            self._records.clear()
            self._size = 0


class AsyncTier:
    """Any tier for asyncio: the same calls, awaited, on threads of their own.

    A cancelled call is not waited for; the tier finishes it, and what it gives is dropped. As for
    the tier itself: one writer and one reader at a time, here one thread for each.

    >>> import asyncio
    >>> from kvpool.tiers import Layout
    >>> key = Layout(2, n_layers=1, n_kv_heads=1, head_dim=2).keys([1, 2])[0]
    >>> async def main():
    ...     async with AsyncTier(MemoryTier(1000)) as tier:
    ...         return await tier.put([(key, b"a record")]), await tier.get([key])
    >>> asyncio.run(main())
    ([True], [b'a record'])
    """

    def __init__(self, tier: Tier) -> None:
        self.tier, self.name = tier, tier.name
        self._writer = ThreadPoolExecutor(1, f"kvpool-{tier.name}-put")
        self._reader = ThreadPoolExecutor(1, f"kvpool-{tier.name}-get")

    async def _run(self, executor: Executor, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, call, *args)

    async def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        """``Tier.put``."""
        return await self._run(self._writer, self.tier.put, items)

    async def get(
        self, keys: Sequence[Key], out: Sequence[memoryview] | None = None
    ) -> list[Buffer | None]:
        """``Tier.get``."""
        return await self._run(self._reader, self.tier.get, keys, out)

    async def has(self, keys: Sequence[Key]) -> list[bool]:
        """``Tier.has``."""
        return await self._run(self._reader, self.tier.has, keys)

    async def delete(self, keys: Sequence[Key]) -> list[bool]:
        """``Tier.delete``."""
        return await self._run(self._writer, self.tier.delete, keys)

    async def stats(self) -> TierStats:
        """``Tier.stats``."""
        return await self._run(self._reader, self.tier.stats)

    async def close(self) -> None:
        """Lets the calls that run come to their end, then closes the tier."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._writer.shutdown)
        await loop.run_in_executor(None, self._reader.shutdown)
        await loop.run_in_executor(None, self.tier.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
