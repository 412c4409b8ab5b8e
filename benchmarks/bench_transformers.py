"""transformers on a PagedCache against its own DynamicCache, in one run.

    python benchmarks/bench_transformers.py [--threads 2]

A random model of SmolLM2-135M's layers (3 KV heads of 64) with a small vocabulary. Decode: ms a
token behind a context, the two caches in turns, median of pairs. Prefix: seconds to the first token
of a prompt whose first part is in the store, and of the same prompt on a DynamicCache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvpool.integrations.transformers import PagedStore


def model_of_smollm(n_layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=576, intermediate_size=1536, num_hidden_layers=n_layers,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def decode(model: Any, cache: Any, ids: Any, steps: int) -> float:
    """ms a token, median of the steps."""
    model(ids, cache=cache, logits_to_keep=1)
    times = []
    for i in range(steps):
        begin = time.perf_counter()
        model(ids[:, i : i + 1], cache=cache)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model = model_of_smollm(args.layers)
    store = PagedStore(model, n_blocks=1200)
    print("rows  context  DynamicCache ms/token  PagedCache ms/token  ratio")
    for n_rows, context in ((1, 128), (1, 1024), (8, 256)):
        ids = torch.randint(0, 4096, (n_rows, context))
        pairs = []
        for _ in range(args.pairs):
            theirs = decode(model, DynamicCache(), ids, args.steps)
            with store.open() as cache:
                pairs.append((theirs, decode(model, cache, ids, args.steps)))
            store.manager.reset()
        ratio = statistics.median(b / a for a, b in pairs)
        a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{n_rows:4}  {context:7}  {a:21.2f}  {b:19.2f}  {ratio:5.2f}")

    prefix, whole = 512, 544
    ids = torch.randint(0, 4096, (1, whole))
    with store.open(ids[:, :prefix]) as cache:
        model(ids[:, :prefix], cache=cache, logits_to_keep=1)
    times: list[tuple[float, float]] = []
    for _ in range(args.pairs):
        begin = time.perf_counter()
        model(ids, cache=DynamicCache(), logits_to_keep=1)
        middle = time.perf_counter()
        with store.open(ids) as cache:
            model(ids[:, cache.n_skipped :], cache=cache, logits_to_keep=1)
            skipped = cache.n_skipped
        times.append((middle - begin, time.perf_counter() - middle))
    a, b = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"prompt of {whole}, {skipped} in the store: {a:.3f} s computed, {b:.3f} s continued")


if __name__ == "__main__":
    main()
