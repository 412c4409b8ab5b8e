"""What the block manager costs from Python: a request, a decode step, and bytes a block.

    python benchmarks/bench_manager.py [--json FILE] [--check] [--rounds N] [--big BLOCKS]

A request is allocate, commit and free of a prompt of 12,000 tokens in blocks of 16, given as a
uint32 array: with nothing of it cached (blocks are free, or each one has to be evicted first), and
with all of it. A decode step is 256 sequences of about
1,000 tokens that get one token each, are committed, and have their block tables brought up to date
in the caller's buffer: three calls. Both are measured in a small pool and in a huge one with 10,000
other sequences alive, and ``big/…`` is the ratio of the two.

Each figure is the median of many rounds. They come in runs, and the runs of all measurements take
turns, so that a busy moment of the machine does not fall on one of them; the first rounds of a run,
which find the caches full of another one's data, do not count. A machine that runs other programs
gives figures that are too high. ``limit``
is what a figure may be at most; with --check, exit code 1 says that one is missed.

The JSON is ``{name: {"value": number, "unit": text, "limit": number or absent}}``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvpool

B = 16
N_PROMPT, N_SEQS = 12_000, 256
RUN, WARM_UP = 40, 8  # rounds in a run, and those at its beginning that do not count
LIMITS = {
    "prompt, nothing cached": 120.0,
    "prompt, all cached": 80.0,
    "decode step of 256": 25.0,
    "bytes a block": 112.0,
}
RATIO_LIMIT = 3.0

Tokens = NDArray[np.uint32]


class Bench:
    """One pool with its manager, and the sequences that decode in it."""

    def __init__(self, n_blocks: int, n_background: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool = kvpool.Pool(n_blocks, B, n_layers=1, n_kv_heads=1, head_dim=1)
        self.mgr = kvpool.BlockManager(self.pool)
        self.background = [self.mgr.allocate(self.tokens(1000)) for _ in range(n_background)]
        self.mgr.commit(self.background)
        self.seqs = [self.mgr.allocate(self.tokens(900 + i % 200)) for i in range(N_SEQS)]
        self.lengths = [len(seq) for seq in self.seqs]
        self.next = self.tokens(N_SEQS)
        self.table = np.empty((N_SEQS, 80), np.int32)

    def tokens(self, n: int) -> Tokens:
        return self.rng.integers(0, 50_000, n, dtype=np.uint32)

    def request(self, tokens: Tokens) -> float:
        start = time.perf_counter_ns()
        seq = self.mgr.allocate(tokens)
        seq.commit()
        seq.free()
        return (time.perf_counter_ns() - start) / (N_PROMPT // B)

    def prompts(self, n: int) -> Iterator[tuple[str, float]]:
        self.mgr.reset()  # blocks are free: nothing has to be evicted
        for _ in range(n):
            prompt = self.tokens(N_PROMPT)
            yield "prompt, nothing cached", self.request(prompt)
            yield "prompt, all cached", self.request(prompt)

    def evicting(self, n: int) -> Iterator[tuple[str, float]]:
        while self.pool.stats.free:
            self.request(self.tokens(N_PROMPT))
        for _ in range(n):
            yield "prompt, nothing cached, evicting", self.request(self.tokens(N_PROMPT))

    def steps(self, n: int) -> Iterator[tuple[str, float]]:
        mgr, seqs, table = self.mgr, self.seqs, self.table
        for _ in range(n):
            start = time.perf_counter_ns()
            mgr.append(seqs, self.next)
            mgr.commit(seqs)
            mgr.block_tables(seqs, out=table)
            yield "decode step of 256", (time.perf_counter_ns() - start) / 1000
        for seq, length in zip(seqs, self.lengths, strict=True):
            seq.truncate(length)

    def bytes_a_block(self) -> float:
        return (self.pool.meta_bytes + self.mgr.meta_bytes) / self.pool.n_blocks


def measure(rounds: int, big: int) -> dict[str, dict[str, object]]:
    benches = {"": Bench(50_000, 0, 1), "big pool, ": Bench(big, 10_000, 2)}
    figures: dict[str, list[float]] = {}
    for _ in range(-(-rounds // (RUN - WARM_UP))):
        for label, bench in benches.items():
            runs = [bench.prompts, bench.steps]
            if not label:  # filling the huge pool would take minutes
                runs.append(bench.evicting)
            for run in runs:
                values: dict[str, list[float]] = {}
                for name, value in run(RUN):
                    values.setdefault(label + name, []).append(value)
                for name, row in values.items():
                    figures.setdefault(name, []).extend(row[WARM_UP:])
    result: dict[str, dict[str, object]] = {}

    def add(name: str, value: float, unit: str, limit: float | None) -> None:
        result[name] = {"value": round(value, 3), "unit": unit}
        if limit is not None:
            result[name]["limit"] = limit

    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, value in medians.items():
        add(name, value, "us" if "decode" in name else "ns/block", LIMITS.get(name))
    for name in LIMITS:
        if name in medians:
            ratio = medians["big pool, " + name] / medians[name]
            add("big / small, " + name, ratio, "times", RATIO_LIMIT)
    add("bytes a block", benches["big pool, "].bytes_a_block(), "bytes", LIMITS["bytes a block"])
    for bench in benches.values():
        bench.mgr.check()
        bench.mgr.close()
        bench.pool.close()
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    parser.add_argument("--rounds", type=int, default=192)
    parser.add_argument("--big", type=int, default=10_000_000, help="blocks of the huge pool")
    args = parser.parse_args(argv)
    figures = measure(args.rounds, args.big)
    missed = False
    for name, figure in figures.items():
        limit = figure.get("limit")
        over = isinstance(limit, float) and float(str(figure["value"])) > limit
        missed |= over
        note = f"   limit {limit:g}{'  MISSED' if over else ''}" if limit is not None else ""
        print(f"{name:36} {figure['value']:>10} {figure['unit']:9}{note}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
