"""An engine whose K and V follow from the prefix, so that a wrong hit shows; and faulty tiers.

``Engine.answer(tokens)`` allocates, holds every block that needs no prefill against what it has to
be, "computes" the others, commits, frees, and gives n_cached.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvpool
from kvpool.tiers import Key, MemoryTier, Tier, TierStack, TierStats

B, SHAPE = 4, (2, 2, 1, 4, 2)  # (n_layers, 2, n_kv_heads, block_tokens, head_dim)


def content(namespace: int, prefix: Sequence[int]) -> NDArray[np.float16]:
    """K and V of the last block of a prefix."""
    data = struct.pack(f"<Q{len(prefix)}I", namespace, *prefix)
    seed = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float16)


class Engine:
    """A pool, a manager with tiers, and answers whose K and V can be told."""

    def __init__(self, tiers: Any, n_blocks: int = 16, **options: Any) -> None:
        self.pool = kvpool.Pool(n_blocks, B, n_layers=2, n_kv_heads=1, head_dim=2)
        if not isinstance(tiers, TierStack):
            options.setdefault("timeout_s", 20)  # the machine may be busy
            tiers = TierStack(tiers, model="test", **options)
        self.manager = kvpool.BlockManager(self.pool, tiers=tiers)
        self.tiers = tiers

    def answer(self, tokens: Sequence[int], namespace: int = 0, **options: Any) -> int:
        tokens = list(tokens)
        with self.manager.allocate(tokens, namespace=namespace, **options) as seq:
            n_cached = seq.n_cached
            assert n_cached == seq.n_computed
            self.check(seq, tokens, namespace, n_cached)
            for i in range(n_cached // B, len(tokens) // B):
                self.pool.block(seq.blocks[i])[:] = content(namespace, tokens[: (i + 1) * B])
            seq.commit()
        return n_cached

    def check(
        self, seq: kvpool.Sequence, tokens: Sequence[int], namespace: int, n_tokens: int
    ) -> None:
        for i in range(n_tokens // B):
            expected = content(namespace, tokens[: (i + 1) * B])
            np.testing.assert_array_equal(self.pool.block(seq.blocks[i]), expected)

    def flush(self) -> None:
        assert self.tiers.flush(20)

    def forget(self) -> None:
        """The pool loses every cached block."""
        self.manager.evict(range(self.pool.n_blocks))

    @property
    def stats(self) -> Any:
        [stats] = self.tiers.stats()
        return stats

    def close(self) -> None:
        self.manager.check()
        self.manager.close()
        assert self.pool.stats.used == 0
        self.pool.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.manager.close()
        self.pool.close()


class Faulty(Tier):
    """A memory tier that does as it is told: ``fault`` is called with (call, keys, records)."""

    def __init__(self, size_bytes: int = 1 << 20) -> None:
        self.name = "faulty"
        self.inner = MemoryTier(size_bytes)
        self.on_get: Callable[[Sequence[Key], list[Any]], Any] = lambda keys, records: records
        self.on_put: Callable[[Sequence[Any]], None] = lambda items: None
        self.on_delete: Callable[[Sequence[Key]], None] = lambda keys: None
        self.on_close: Callable[[], None] = lambda: None
        self.calls: list[tuple[str, int]] = []

    def put(self, items: Sequence[Any]) -> list[bool]:
        self.calls.append(("put", len(items)))
        self.on_put(items)
        return self.inner.put(items)

    def get(self, keys: Sequence[Key], out: Any = None) -> Any:
        self.calls.append(("get", len(keys)))
        return self.on_get(keys, self.inner.get(keys))

    def has(self, keys: Sequence[Key]) -> list[bool]:
        return self.inner.has(keys)

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        self.calls.append(("delete", len(keys)))
        self.on_delete(keys)
        return self.inner.delete(keys)

    def keys(self) -> Iterator[Key]:
        return self.inner.keys()

    def stats(self) -> TierStats:
        return self.inner.stats()

    def close(self) -> None:
        self.calls.append(("close", 0))
        self.on_close()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits for something that another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kvpool-")}
