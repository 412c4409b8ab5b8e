"""What the tests of the replay share: requests, a plain model of a pool, the real trace."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool.replay import Request, make_request

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [os.environ.get("KVPOOL_TRACES"), str(ROOT.parent / "shared" / "traces")]

BLOCKS = 288_500  # of the conversation trace
CEILING = 105_710  # of them seen before


def conversation() -> str:
    """Mooncake's conversation trace (FAST '25), from KVPOOL_TRACES or ../shared/traces."""
    for folder in filter(None, FOLDERS):
        path = Path(folder) / "conversation.jsonl"
        if path.is_file():
            return str(path)
    pytest.skip("conversation.jsonl is neither in KVPOOL_TRACES nor in ../shared/traces")


def request(
    *ids: int, length: int | None = None, at: float = 0.0, out: int = 0, size: int = 16, n: int = 1
) -> Request:
    """A prompt of full blocks, or of ``length`` tokens."""
    return make_request(at, ids, length or size * len(ids), out, n=n)


def sequential_hits(prompts: Sequence[Sequence[int]], n_blocks: int) -> int:
    """One request after the other through an LRU pool, in dictionaries; last blocks match."""
    cached: OrderedDict[tuple[int, ...], None] = OrderedDict()  # oldest first
    hits = 0
    for ids in prompts:
        prefixes = [tuple(ids[: i + 1]) for i in range(len(ids))]
        for prefix in prefixes:
            if prefix not in cached:
                break
            hits += 1
        for prefix in reversed(prefixes):
            cached.pop(prefix, None)
            cached[prefix] = None
        while len(cached) > n_blocks:
            cached.popitem(last=False)
    return hits
