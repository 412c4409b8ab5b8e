"""The protocol of the replay, and this project's side of it.

Each hash id of a trace names one block of a prompt together with everything before it. Requests
come in the order of the trace. `in_flight` of them run at a time: before the next one starts, the
oldest is freed, tail first; where an allocation does not fit, the oldest are freed early until it
does. A request looks its longest cached prefix up (all of it, or all but the last block, which
real engines leave to compute), takes blocks for the rest, and its blocks become findable at once.

Every side gets its input in its own natural form, made before the clock starts, and its own loop,
so that no common interface stands between a manager and its calls.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

import kvpool

__all__ = ["Kvpool", "Peer", "Requests", "Result", "read_trace"]

Requests = Sequence[Sequence[int]]


class Result(NamedTuple):
    """hits: blocks found, over all requests; freed_early: requests freed to make room."""

    hits: int
    freed_early: int


class Peer(Protocol):
    """One side: `replay` is timed, `prepare` is not."""

    name: str

    def prepare(self, requests: Requests) -> Any: ...

    def replay(self, prepared: Any, n_blocks: int, in_flight: int, match_last: bool) -> Result: ...


def read_trace(path: Path) -> Requests:
    """The hash ids of each request of a Mooncake trace (JSON lines)."""
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


class Kvpool:
    """Through the Python API, verification on. A block of one token stands for a block of 512: the
    pool is never written, and a hash id is the token."""

    name = f"kvpool {kvpool.__version__}"

    def prepare(self, requests: Requests) -> Any:
        return [np.array(ids, np.uint32) for ids in requests]

    def replay(self, prepared: Any, n_blocks: int, in_flight: int, match_last: bool) -> Result:
        pool = kvpool.Pool(n_blocks, block_tokens=1, n_layers=1, n_kv_heads=1, head_dim=1)
        manager = kvpool.BlockManager(pool)
        allocate = manager.allocate
        running: deque[kvpool.Sequence] = deque()
        freed_early = 0
        for ids in prepared:
            if len(running) == in_flight:
                running.popleft().free()
            while True:
                try:
                    sequence = allocate(ids, match_last=match_last)
                    break
                except kvpool.PoolFull:
                    running.popleft().free()
                    freed_early += 1
            sequence.commit()
            running.append(sequence)
        return Result(manager.stats.hit_blocks, freed_early)
