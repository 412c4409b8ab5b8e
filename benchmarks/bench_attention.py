"""Paged attention against what an engine does without it: gather, then PyTorch's SDPA.

    python benchmarks/bench_attention.py [--threads N] [--json FILE] [--rounds N]

Both sides read the same float16 blocks of one pool, in the order of random block tables, on the
same number of threads, and take turns; a figure is the median of a round's ratios. The pool is
larger than the caches. For each context length:

    kvpool         attention.paged_decode(q, pool, layer, tables, lens)
    gather + SDPA  index_select of the blocks, K and V made contiguous, one call of
                   scaled_dot_product_attention for all sequences: in float16, and converted to
                   float32, the faster of the two

Needs PyTorch (`pip install torch==2.13.0`); without it, it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
from kvpool.attention import ThreadPool, paged_decode

#: context, sequences, KV heads, query heads for each, head_dim
SHAPES = [
    (512, 16, 8, 4, 128),
    (2048, 8, 8, 4, 128),
    (8192, 2, 8, 4, 128),
    (32768, 1, 8, 4, 128),
    (512, 32, 3, 3, 64),
    (4096, 8, 3, 3, 64),
    (4096, 4, 8, 1, 128),
    (4096, 4, 4, 8, 128),
]
BLOCK_TOKENS = 16


def measure(torch: Any, shape: tuple[int, ...], n_threads: int, rounds: int) -> dict[str, Any]:
    context, n_seqs, n_kv_heads, group, dim = shape
    n_blocks = -(-context // BLOCK_TOKENS)
    block_bytes = 4 * n_kv_heads * BLOCK_TOKENS * dim
    n_layers = max(1, (96 << 20) // (n_seqs * n_blocks * block_bytes))  # past the caches
    rng = np.random.default_rng(1)
    with (
        kvpool.Pool(
            n_seqs * n_blocks, BLOCK_TOKENS, n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=dim
        ) as pool,
        ThreadPool(n_threads) as threads,
    ):
        slab = pool.slab
        for layer in range(n_layers):
            values = rng.standard_normal(slab[:, layer].shape, dtype=np.float32)
            slab[:, layer] = values
        tables = rng.permutation(pool.alloc(n_seqs * n_blocks)).reshape(n_seqs, -1)
        tables32, lens = tables.astype(np.int32), np.full(n_seqs, context, dtype=np.int32)
        q = rng.standard_normal((n_seqs, n_kv_heads * group, dim)).astype(np.float32)
        out = np.empty_like(q)
        tensor, index = (
            torch.from_numpy(slab),
            torch.from_numpy(tables.reshape(-1).astype(np.int64)),
        )
        # The query heads of a KV head as the rows of one product: half the time of enable_gqa.
        torch_q = torch.from_numpy(q).view(n_seqs, n_kv_heads, group, dim)

        def ours(layer: int) -> Any:
            return paged_decode(q, pool, layer, tables32, lens, out=out, threads=threads)

        def theirs(dtype: Any, layer: int) -> Any:
            kv = tensor[:, layer].index_select(0, index)
            kv = kv.view(n_seqs, -1, 2, n_kv_heads, BLOCK_TOKENS, dim).permute(2, 0, 3, 1, 4, 5)
            kv = kv.reshape(2, n_seqs, n_kv_heads, -1, dim)[:, :, :, :context]
            k, v = kv.to(dtype).unbind(0)
            return torch.nn.functional.scaled_dot_product_attention(torch_q.to(dtype), k, v)

        calls = {
            "kvpool": ours,
            "sdpa_f16": lambda layer: theirs(torch.float16, layer),
            "sdpa_f32": lambda layer: theirs(torch.float32, layer),
        }
        want = theirs(torch.float32, 0).reshape(q.shape).numpy()
        np.testing.assert_allclose(ours(0), want, atol=1e-4)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 1):
            for name, call in calls.items():
                start = time.perf_counter()
                call(turn % n_layers)
                times[name].append(time.perf_counter() - start)
        peer = min(("sdpa_f16", "sdpa_f32"), key=lambda name: statistics.median(times[name][1:]))
        ratios = [b / a for a, b in zip(times["kvpool"][1:], times[peer][1:], strict=True)]
    return {
        "context": context, "sequences": n_seqs, "kv_heads": n_kv_heads, "group": group,
        "head_dim": dim, "threads": n_threads, "peer": peer,
        "kvpool_ms": 1e3 * statistics.median(times["kvpool"][1:]),
        "peer_ms": 1e3 * statistics.median(times[peer][1:]),
        "times_faster": statistics.median(ratios),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("bench_attention: PyTorch is not installed (pip install torch==2.13.0): skipped")
        return 0
    rows = []
    print("context seqs kv_heads group dim threads | kvpool ms | gather + SDPA ms | times faster")
    for n_threads in sorted({1, args.threads}):
        torch.set_num_threads(n_threads)
        for shape in SHAPES:
            row = measure(torch, shape, n_threads, args.rounds)
            rows.append(row)
            print(
                f"{row['context']:7} {row['sequences']:4} {row['kv_heads']:8} {row['group']:5} "
                f"{row['head_dim']:3} {n_threads:7} | {row['kvpool_ms']:9.2f} | "
                f"{row['peer_ms']:7.2f} {row['peer']:8} | {row['times_faster']:.1f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
