"""The events as they travel: vLLM's names and layout, as msgspec structs."""

from __future__ import annotations

from typing import Any

try:
    import msgspec
except ImportError as error:  # pragma: no cover
    raise ImportError("kvpool.events needs msgspec: pip install 'kvpool[events]'") from error

__all__ = ["END", "AllBlocksCleared", "BlockRemoved", "BlockStored", "KVEvent", "KVEventBatch"]

BlockHash = int | bytes  # ours are 64-bit integers; vLLM's may be SHA-256 digests


class BlockStored(msgspec.Struct, tag=True, gc=False, kw_only=True):
    """Blocks that became findable, each the parent of the next.

    ``parent_block_hash`` is the block before the first one, or None where that begins a prompt.
    ``token_ids`` are ``len(block_hashes) * block_size`` tokens.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False, kw_only=True):
    """Blocks that stopped being findable: the last findable copy of each is gone."""

    block_hashes: list[BlockHash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Nothing is findable any more, or nothing that was told before can be relied on."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one message carries. ``ts`` is seconds since the epoch."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


END = (-1).to_bytes(8, "big", signed=True)  # the number in the last message of a replay
