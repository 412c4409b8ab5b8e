from __future__ import annotations

from typing import NamedTuple

__all__ = ["Stats"]


class Stats(NamedTuple):
    """How many blocks a pool has in each state; ``free + used + cached == n_blocks``, always.

    The three states: seed section 2.1. ``evictions`` counts cached blocks that were reclaimed for
    new data since the pool was created, modulo 2**32.

    >>> import kvpool
    >>> pool = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=4)
    >>> ids = pool.alloc(3)
    >>> pool.stats
    Stats(free=1, used=3, cached=0, evictions=0)
    """

    free: int
    used: int
    cached: int
    evictions: int
