"""SGLang's RadixCache, from SGLang's wheel, under the protocol of replay.py.

A tree of token runs instead of a table of blocks: with one token a page it can match what a table
of larger blocks cannot. Its tensors of slot numbers are NumPy arrays here, which are quicker to
slice; the allocator of slots is a list. Both make it faster than it is.
"""

from __future__ import annotations

import importlib
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from .replay import Requests, Result
from .standins import isolated
from .wheels import unpacked

__all__ = ["SglangRadix"]

BASE = "sglang.srt.mem_cache."
REAL = tuple(
    BASE + name
    for name in (
        "base_prefix_cache",
        "cache_init_params",
        "events",
        "evict_policy",
        "radix_cache",
        "utils",
    )
)
HOLLOW = ("sglang", "torch", "triton", "msgspec", "zmq")


class _Tensor(np.ndarray[Any, np.dtype[np.int64]]):
    """As much of a one-dimensional tensor as the tree uses."""

    def clone(self) -> _Tensor:
        return _tensor(self.copy())


def _tensor(values: Any, **_: object) -> _Tensor:
    return np.asarray(values, np.int64).view(_Tensor)


class _Slots:
    """The allocator of KV slots: a list of free ones."""

    device = "cpu"

    def __init__(self, n_slots: int) -> None:
        self.free = list(range(n_slots))

    def alloc(self, n: int) -> list[int]:
        at = len(self.free) - n
        taken, self.free[at:] = self.free[at:], []
        return taken

    def free_segment(self, slots: Any, start_pos: int = 0) -> None:
        self.free.extend(slots.tolist())


class SglangRadix:
    def __init__(self, requirement: str, cache: Path) -> None:
        members = [name.replace(".", "/") + ".py" for name in REAL]
        root, version = unpacked(requirement, members, cache)
        torch = {
            "Tensor": _Tensor,
            "int64": np.int64,
            "device": lambda name: name,
            "empty": lambda *shape, **_: _tensor([]),
            "tensor": _tensor,
        }
        with isolated(root, packages=HOLLOW, real=REAL, overrides={"torch": torch}):
            self.radix = importlib.import_module(BASE + "radix_cache")
            self.base = importlib.import_module(BASE + "base_prefix_cache")
            self.radix.RadixCache.create_simulated(mock_allocator=_Slots(1))
        self.name = f"SGLang {version} RadixCache"

    def prepare(self, requests: Requests) -> Any:
        return [array("q", ids) for ids in requests]

    def replay(self, prepared: Any, n_blocks: int, in_flight: int, match_last: bool) -> Result:
        slots = _Slots(n_blocks)
        tree = self.radix.RadixCache.create_simulated(mock_allocator=slots)
        key, base = self.radix.RadixKey, self.base
        running: deque[Any] = deque()
        hits = freed_early = 0
        for ids in prepared:
            if len(running) == in_flight:
                tree.dec_lock_ref(running.popleft())
            n = len(ids)
            wanted = key(ids, limit=None if match_last else n - 1)
            found = tree.match_prefix(base.MatchPrefixParams(key=wanted))
            n_hits, node = found.device_prefix_len, found.last_device_node
            tree.inc_lock_ref(node)
            need = n - n_hits
            while len(slots.free) + tree.evictable_size() < need:
                tree.dec_lock_ref(running.popleft())
                freed_early += 1
            if len(slots.free) < need:
                tree.evict(base.EvictParams(num_tokens=need - len(slots.free)))
            new = slots.alloc(need)
            values = _tensor(new if n_hits == 0 else [0] * n_hits + new)  # the tree has its own
            held = tree.insert(base.InsertParams(key=key(ids), value=values))
            if held.prefix_len > n_hits:  # computed twice: the tree keeps the first
                slots.free_segment(values[n_hits : held.prefix_len])
            tree.inc_lock_ref(held.last_device_node)
            tree.dec_lock_ref(node)
            running.append(held.last_device_node)
            hits += n_hits
        return Result(hits, freed_early)
