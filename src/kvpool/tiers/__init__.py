"""Lower tiers: blocks that the pool evicts live on, on disk or on other machines.

    record     Layout, Key      what is stored: one block, sealed with what it is of
    tier       Tier             the protocol of a store; MemoryTier, AsyncTier
    registry   open_tier        stores by URL: disk:/path?size=10GiB
    disk       DiskTier         the embedded default: one preallocated file
    stack      TierStack        the tiers under a block manager: write-behind, lookups, promotion
    level      LevelStats       one of them, at arm's length

docs/tiers.md says which tier when.
"""

from __future__ import annotations

from .level import Histogram, LevelStats
from .record import Key, Layout, RecordRefused, verify_record
from .registry import SCHEMES, open_tier
from .stack import TierStack, attach
from .tier import AsyncTier, MemoryTier, Tier, TierStats

__all__ = [
    "SCHEMES",
    "AsyncTier",
    "Histogram",
    "Key",
    "Layout",
    "LevelStats",
    "MemoryTier",
    "RecordRefused",
    "Tier",
    "TierStack",
    "TierStats",
    "attach",
    "open_tier",
    "verify_record",
]
