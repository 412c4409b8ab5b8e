"""Attention that reads K and V where they lie: in a pool's blocks, through block tables.

``paged_decode`` takes one query for each of many sequences, ``paged_prefill`` many of one. Both
read float16 from the slab without a copy and compute in float32, and a row's bits depend on nothing
but what it attends to: not on the batch, chunks, threads or the block size (docs/attention.md).

>>> import kvpool, numpy as np
>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=2, n_kv_heads=1, head_dim=8)
>>> table = pool.alloc(2)                       # 7 positions need two blocks
>>> pool.slab[table] = 0.25
>>> q = np.zeros((7, 3, 8), dtype=np.float32)   # three query heads share the KV head
>>> prompt = kvpool.attention.paged_prefill(q, pool, 0, table, 7)
>>> last = kvpool.attention.paged_decode(q[-1:], pool, 0, [table], [7])
>>> np.array_equal(prompt[-1:], last)
True
"""

from __future__ import annotations

from ._core import ThreadPool, paged_decode, paged_prefill

__all__ = ["ThreadPool", "paged_decode", "paged_prefill"]
