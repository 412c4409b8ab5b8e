"""nano-vllm's block manager: 120 lines that compare tokens on every hash hit.

nano-vllm itself is not on PyPI; nano-vllm-npu packages its block manager unchanged. It always lets
the last block match, asks for room as if nothing would hit, and takes a cached block out of its
free list by a search through it.
"""

from __future__ import annotations

import importlib
from collections import deque
from pathlib import Path
from typing import Any

from .replay import Requests, Result
from .standins import isolated
from .wheels import PeerMissing, unpacked

__all__ = ["NanoVllm"]

PACKAGE = "nanovllmnpu"
REAL = tuple(f"{PACKAGE}.{name}" for name in ("engine.block_manager", "engine.sequence"))


class NanoVllm:
    def __init__(self, requirement: str, cache: Path) -> None:
        try:
            importlib.import_module("xxhash")
        except ImportError:
            raise PeerMissing("nano-vllm needs xxhash: pip install xxhash") from None
        members = [name.replace(".", "/") + ".py" for name in REAL]
        root, version = unpacked(requirement, members, cache)
        with isolated(root, packages=(PACKAGE,), real=REAL):
            self.sequence = importlib.import_module(REAL[1]).Sequence
            self.manager = importlib.import_module(REAL[0]).BlockManager
        self.sequence.block_size = 1
        self.name = f"nano-vllm ({requirement.partition('==')[0]} {version})"

    def prepare(self, requests: Requests) -> Any:
        return requests

    def replay(self, prepared: Any, n_blocks: int, in_flight: int, match_last: bool) -> Result:
        manager, sequence = self.manager(n_blocks, 1), self.sequence
        running: deque[Any] = deque()
        hits = freed_early = 0
        for ids in prepared:
            if len(running) == in_flight:
                manager.deallocate(running.popleft())
            new = sequence(ids)
            while not manager.can_allocate(new):
                manager.deallocate(running.popleft())
                freed_early += 1
            manager.allocate(new)
            hits += new.num_cached_tokens
            running.append(new)
        return Result(hits, freed_early)
