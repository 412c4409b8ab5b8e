"""The memory layer for the KV cache of LLM engines.

A :class:`Pool` owns one slab of fixed-size blocks. A sequence is a list of block ids; blocks are
shared by reference counts, copied when a shared one is written, found again by the hash of the
tokens before them, and moved between processes as checksummed envelopes.

>>> import kvpool
>>> pool = kvpool.Pool(n_blocks=64, block_tokens=4, n_layers=2, n_kv_heads=1, head_dim=8)
>>> prompt = [11, 12, 13, 14, 15, 16, 17, 18, 19]
>>> hashes = kvpool.block_hashes(prompt, block_tokens=4)     # one for each full block
>>> pool.lookup(hashes)                                      # a new prompt: no hit
array([-1, -1])
>>> ids = pool.alloc(3)                                      # blocks for 9 tokens
>>> pool.block(ids[0])[:] = 0.5                              # (layer, K or V, head, token, dim)
>>> pool.set_fill(ids, [4, 4, 1])
>>> pool.register(ids[:2], hashes)                           # full blocks can be found from now on
array([ True,  True])
>>> pool.unref(ids)
>>> pool.stats
Stats(free=62, used=0, cached=2, evictions=0)
>>> pool.lookup(hashes)                                      # the same prompt again
array([0, 1])
"""

from __future__ import annotations

from . import attention, errors
from ._config import get_include, get_library
from ._core import BlockManager, Pool, Sequence, abi_version, block_hash, block_hashes, crc32c
from ._manager import BlockEvent, EventType, Fit, ManagerStats
from ._stats import Stats
from .errors import (
    ArgumentTypeError,
    Busy,
    CorruptEnvelope,
    DtypeMismatch,
    InvalidArgument,
    KvPoolError,
    NotFound,
    OutOfBlocks,
    PoolFull,
    ShapeMismatch,
    StorageError,
    TransferError,
    Unsupported,
)
from .namespaces import namespace
from .paged_cache import PagedKVCache

__version__ = "0.1.0"

__all__ = [
    "ArgumentTypeError",
    "BlockEvent",
    "BlockManager",
    "Busy",
    "CorruptEnvelope",
    "DtypeMismatch",
    "EventType",
    "Fit",
    "InvalidArgument",
    "KvPoolError",
    "ManagerStats",
    "NotFound",
    "OutOfBlocks",
    "PagedKVCache",
    "Pool",
    "PoolFull",
    "Sequence",
    "ShapeMismatch",
    "Stats",
    "StorageError",
    "TransferError",
    "Unsupported",
    "__version__",
    "abi_version",
    "attention",
    "block_hash",
    "block_hashes",
    "crc32c",
    "errors",
    "get_include",
    "get_library",
    "namespace",
]
