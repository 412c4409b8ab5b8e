// What Python says about the functions of attention.cpp. The examples run as doctests.
#pragma once

namespace kvpool::docs {

constexpr const char *thread_pool =
    R"(Threads for the kernels: ``n_threads`` work on a call, the calling thread among them.

``None`` is one for each processor that this process may use. One object serves a whole program: it
may be used from many threads, whose calls then follow one another. Between calls its threads sleep.
Results do not depend on it: the same bits with any number of threads, or with ``threads=None``.
In a child of ``os.fork`` the caller does all the work itself.

Raises:
    InvalidArgument: ``n_threads`` is 0 or above 1024.
    MemoryError: the system started fewer threads.

>>> with kvpool.attention.ThreadPool(2) as threads:
...     threads.n_threads
2
)";

constexpr const char *n_threads = "How many threads work on a call, the caller included.";

constexpr const char *thread_pool_close =
    R"(Ends the threads, when the calls that use them are done. A closed pool cannot be used again.

>>> threads = kvpool.attention.ThreadPool(2)
>>> threads.close()
>>> threads
ThreadPool(2) closed
)";

constexpr const char *paged_decode =
    R"(Attention of one query for each sequence, over the blocks where its K and V lie.

Args:
    q: float32 ``(B, H, head_dim)``, one position for each of B sequences. H is a multiple of the
        pool's ``n_kv_heads``; query head h reads KV head ``h // (H // n_kv_heads)``.
    pool: the blocks; they must be held by the caller, and their positions written.
    layer: 0 to ``pool.n_layers - 1``.
    block_tables: integers ``(B, max_blocks)``, as ``BlockManager.block_tables`` gives them; row b's
        first ``ceil(context_lens[b] / block_tokens)`` are read, whatever stands behind them.
    context_lens: integers ``(B,)``: the positions of a sequence, the query's own included, which is
        the last.
    scale: of the scores; ``1 / sqrt(head_dim)`` when None.
    window: how many positions a query sees, its own included; 0 is all.
    out: where the result goes, float32 C-contiguous like q; must not overlap it. A new array when
        None.
    threads: a ``ThreadPool``; None: this thread alone.

Returns ``out``: float32 ``(B, H, head_dim)``.

A row's bits do not depend on the batch around it, on threads, block ids or the block size, and
are those of ``paged_prefill`` at that position (docs/attention.md). The GIL is released for all but
the smallest calls, and the pool's lock is not held: others may alloc and free meanwhile.

Raises:
    InvalidArgument: a context of no position or of more blocks than its row has, an id, layer or
        shape out of range, ``scale`` NaN or above 2.3e38, ``out`` of another shape, or part
        of q or the pool.
    ArgumentTypeError: q or out are no float32 arrays.
    ShapeMismatch: heads or head_dim unlike the pool's.
    Unsupported: the pool has no memory of its own, or belongs to another process.

Source: seed L9.4; Kwon et al. (SOSP 2023), section 4.3; Milakov and Gimelshein, Online normalizer
calculation for softmax (2018); Dao et al., FlashAttention (2022).

>>> import numpy as np
>>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
>>> table = pool.alloc(2)
>>> for i, value in enumerate([1.0, 2.0, 6.0]):      # V of three positions; their K are equal
...     pool.slab[table[i // 2], 0, 0, 0, i % 2] = 1.0
...     pool.slab[table[i // 2], 0, 1, 0, i % 2] = value
>>> q = np.ones((1, 1, 2), dtype=np.float32)
>>> kvpool.attention.paged_decode(q, pool, 0, [table], [3])
array([[[3., 3.]]], dtype=float32)
>>> kvpool.attention.paged_decode(q, pool, 0, [table], [3], window=2)
array([[[4., 4.]]], dtype=float32)
)";

constexpr const char *paged_prefill =
    R"(Causal attention of the last T positions of one sequence, over the blocks of its K and V.

Args:
    q: float32 ``(T, H, head_dim)``; query t stands at position ``context_len - T + t`` and sees the
        positions up to its own. K and V of all ``context_len`` positions are written already.
    block_table: integers, at least ``ceil(context_len / block_tokens)``.
    context_len: positions of the sequence, T at least.

The other arguments, the errors and what may be relied on are those of ``paged_decode``: row t has
the bits of a decode at ``context_len - T + t + 1`` positions, so that a prompt may be cut into
chunks anywhere.

Returns ``out``: float32 ``(T, H, head_dim)``.

>>> import numpy as np
>>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
>>> table = pool.alloc(2)
>>> for i, value in enumerate([1.0, 2.0, 6.0]):
...     pool.slab[table[i // 2], 0, 0, 0, i % 2] = 1.0
...     pool.slab[table[i // 2], 0, 1, 0, i % 2] = value
>>> q = np.ones((3, 1, 2), dtype=np.float32)
>>> kvpool.attention.paged_prefill(q, pool, 0, table, 3)[:, 0, 0]
array([1. , 1.5, 3. ], dtype=float32)
)";

} // namespace kvpool::docs
