"""vLLM's BlockPool and KVCacheManager, from vLLM's wheel, under the protocol of replay.py.

What vLLM does not have to do here: its requests arrive with their block hashes computed (SHA-256
of each block, 1.9 us, is left out of its time), carry no sampling parameters, and no scheduler, no
events and no metrics run. So its figures are lower bounds.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .replay import Requests, Result
from .standins import isolated
from .wheels import unpacked

__all__ = ["VLLM", "VllmBlockPool", "VllmManager"]

REAL = (
    "vllm.distributed.kv_events",
    "vllm.utils.hashing",
    "vllm.utils.math_utils",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.kv_cache_metrics",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.request",
)
# vLLM declares its events as msgspec structs and its sockets as zmq ones; none is made here.
HOLLOW = ("vllm", "torch", "cbor2", "zmq", "msgspec", "xxhash", "prometheus_client")


class VLLM:
    """vLLM's modules, loaded once."""

    def __init__(self, requirement: str, cache: Path) -> None:
        members = [name.replace(".", "/") + ".py" for name in REAL]
        self.root, self.version = unpacked(requirement, members, cache)
        overrides: dict[str, dict[str, object]] = {
            "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
            "torch": {"float16": "float16"},
        }
        with isolated(self.root, packages=HOLLOW, real=REAL, overrides=overrides):
            self.block_pool = importlib.import_module("vllm.v1.core.block_pool")
            self.manager = importlib.import_module("vllm.v1.core.kv_cache_manager")
            self.interface = importlib.import_module("vllm.v1.kv_cache_interface")
            self.request = importlib.import_module("vllm.v1.request")
            self.new_manager(8)  # whatever is imported late is imported now

    def new_manager(self, n_blocks: int) -> Any:
        """A KVCacheManager over n_blocks usable blocks of one token, its null block on top."""
        spec = self.interface.FullAttentionSpec(
            block_size=1, num_kv_heads=1, head_size=1, dtype="float16"
        )
        config = self.interface.KVCacheConfig(
            num_blocks=n_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[self.interface.KVCacheGroupSpec(["layer"], spec)],
        )
        return self.manager.KVCacheManager(
            config, max_model_len=1 << 20, scheduler_block_size=1, hash_block_size=1
        )


def _hashes(ids: Sequence[int]) -> list[bytes]:
    """32 bytes a block, as SHA-256 gives them. The trace's ids are chained names already."""
    return [i.to_bytes(32, "big") for i in ids]


class VllmBlockPool:
    """BlockPool, driven as directly as it can be: no per-request bookkeeping around it."""

    def __init__(self, vllm: VLLM) -> None:
        self.vllm = vllm
        self.name = f"vLLM {vllm.version} BlockPool"

    def prepare(self, requests: Requests) -> Any:
        return [SimpleNamespace(block_hashes=_hashes(ids)) for ids in requests]

    def replay(self, prepared: Any, n_blocks: int, in_flight: int, match_last: bool) -> Result:
        pool = self.vllm.block_pool.BlockPool(n_blocks + 1, True, 1)
        running: deque[Any] = deque()
        groups = [0]
        hits = preempted = 0
        for request in prepared:
            if len(running) == in_flight:
                pool.free_blocks(reversed(running.popleft()))
            hashes = request.block_hashes
            n = len(hashes)
            limit = n if match_last else n - 1
            blocks = []
            for at in range(limit):
                found = pool.get_cached_block(hashes[at], groups)
                if found is None:
                    break
                blocks.append(found[0])
            n_hits = len(blocks)
            while True:
                leaving = sum(block.ref_cnt == 0 for block in blocks)
                if n - n_hits + leaving <= pool.get_num_free_blocks():
                    break
                pool.free_blocks(reversed(running.popleft()))
                preempted += 1
            pool.touch(blocks)
            blocks += pool.get_new_blocks(n - n_hits)
            pool.cache_full_blocks(request, blocks, n_hits, n, 1, 0)
            running.append(blocks)
            hits += n_hits
        return Result(hits, preempted)


class VllmManager:
    """KVCacheManager: what vLLM's scheduler calls for each request."""

    def __init__(self, vllm: VLLM) -> None:
        self.vllm = vllm
        self.name = f"vLLM {vllm.version} KVCacheManager"

    def prepare(self, requests: Requests) -> Any:
        waiting = self.vllm.request.RequestStatus.WAITING
        return [
            SimpleNamespace(
                request_id=str(i),
                block_hashes=_hashes(ids),
                num_tokens=len(ids),
                num_prompt_tokens=len(ids),
                num_computed_tokens=0,
                num_in_flight_tokens=0,
                num_preemptions=0,
                shared_prefix_boundary=0,
                replay_start=0,
                skip_reading_prefix_cache=False,
                status=waiting,
            )
            for i, ids in enumerate(requests)
        ]

    def replay(self, prepared: Any, n_blocks: int, in_flight: int, match_last: bool) -> Result:
        manager = self.vllm.new_manager(n_blocks)
        running: deque[Any] = deque()
        hits = preempted = 0
        for request in prepared:
            if len(running) == in_flight:
                manager.free(running.popleft())
            n = request.num_tokens
            while True:
                blocks, n_hits, _ = manager.get_computed_blocks(request, n if match_last else None)
                if manager.allocate_slots(request, n - n_hits, n_hits, blocks) is not None:
                    break
                manager.free(running.popleft())
                preempted += 1
            running.append(request)
            hits += n_hits
        return Result(hits, preempted)
