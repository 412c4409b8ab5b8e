"""Other orders of eviction than the pool's own, simulated over a whole trace.

LRU is the pool's. *optimal* is Belady's: it knows the future, and no order does better. Requests
come one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool._core import policy_hits

from ._about import POLICIES
from .errors import TraceError
from .reuse import Names

__all__ = ["POLICIES", "Plan", "make_plan", "simulate"]

_NONE = 2**32 - 1


class Plan(NamedTuple):
    """A trace as ``policy_hits`` takes it; blocks are numbered in the order of their first use."""

    blocks: NDArray[np.uint32]
    starts: NDArray[np.uint64]
    parents: NDArray[np.uint32]


def make_plan(trace: Names) -> Plan:
    """Numbers the blocks.

    >>> make_plan(Names(np.array([9, 7, 9, 8], np.uint64), np.array([0, 2, 4], np.uint64)))[0]
    array([0, 1, 0, 2], dtype=uint32)
    """
    unique, first, inverse = np.unique(trace.names, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(unique), np.uint32)
    rank[order] = np.arange(len(unique), dtype=np.uint32)
    blocks = rank[inverse.reshape(-1)]
    before = np.empty(len(blocks), np.uint32)
    before[1:] = blocks[:-1]
    begins = trace.starts[:-1].astype(np.int64)
    before[begins[begins < len(blocks)]] = _NONE
    parents = np.empty(len(unique), np.uint32)
    parents[blocks] = before
    return Plan(blocks, trace.starts, parents)


def simulate(
    plan: Plan,
    names: Sequence[str],
    sizes: Sequence[int],
    *,
    first_counted: int = 0,
    match_last: bool = True,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, list[int]]:
    """Blocks hit under each policy, for each cache size in blocks.

    ``progress`` is called after each of the ``len(names) * len(sizes)`` simulations.

    Raises TraceError for an unknown policy.
    """
    hits: dict[str, list[int]] = {}
    for name in names:
        if name not in POLICIES:
            raise TraceError(f"policy {name!r}: expected one of {', '.join(POLICIES)}")
        hits[name] = []
        for size in sizes:
            number = list(POLICIES).index(name)
            hits[name].append(policy_hits(number, *plan, size, first_counted, match_last))
            progress()
    return hits
