"""Lower tiers: what the disk tier costs over a plain file, and what it saves.

    python benchmarks/bench_tiers.py [--dir FOLDER] [--tokens 4000] [--skip-model] [--json FILE]

Three parts, each with its two sides in turn in one run, and medians of their ratios:

    file    records of SmolLM2's size (360 KiB) in batches of 22: DiskTier.put against pwrite of the
            same bytes into a plain preallocated file, DiskTier.get against preadv of them. Wall
            time, and processor time of the thread, which other programs change less. The bytes come
            out of the page cache, so what is compared is the code, not the disk.
    ttft    a prompt of 4,000 tokens: computed from nothing, and by a new manager over the disk tier
            (the pool is empty each time): the time to its first token, the last tokens' pass and
            the picking included. ``cold`` drops the file from the page cache first.
    decode  steps of 8 sequences with blocks written behind to the disk, and without: the same
            tokens, the steps in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
from kvpool.tiers import Key, Layout, TierStack
from kvpool.tiers.disk import DiskTier

ASKED = {"put": 0.8, "get": 0.8, "ttft": 20.0, "decode": 0.03}
CHUNK = 22


def measured(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the wall and on this thread's processor."""
    wall, cpu = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - wall, time.thread_time() - cpu


def in_turn(pairs: int, one: Callable[[int], Any], other: Callable[[int], Any]) -> dict[str, float]:
    """Ratios one / other of the pairs: medians of wall and processor time, and of the fastest."""
    times: list[list[tuple[float, float]]] = [[], []]
    for i in range(pairs):
        for which in ((0, 1), (1, 0))[i % 2]:
            times[which].append(measured(lambda w=which, i=i: (one, other)[w](i)))  # type: ignore[misc]
    ratios = [statistics.median(a[k] / b[k] for a, b in zip(*times, strict=True)) for k in (0, 1)]
    best = [min(t[0] for t in side) for side in times]
    return {"wall": ratios[0], "cpu": ratios[1], "best": best[0] / best[1], "best_s": best[1]}


def files(folder: Path, pairs: int) -> dict[str, Any]:
    """DiskTier against a plain file."""
    layout = Layout(16, n_layers=30, n_kv_heads=3, head_dim=64)
    size, n_chunks = layout.record_bytes, 8
    data = np.random.default_rng(0).integers(0, 256, (CHUNK, size), dtype=np.uint8)
    into = np.ones((CHUNK, size), np.uint8)
    whole, views = memoryview(data.reshape(-1)), [memoryview(row) for row in data]
    out, target = [memoryview(row) for row in into], memoryview(into.reshape(-1))
    plain = os.open(folder / "plain", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(plain, 0, n_chunks * whole.nbytes)
    keys = [
        [Key(layout.id, 0, c * CHUNK + i, bytes(32)) for i in range(CHUNK)] for c in range(n_chunks)
    ]

    def plain_io(call: Callable[..., int], view: memoryview, at: int) -> None:
        while view:
            n = call(plain, [view], at)
            view, at = view[n:], at + n

    def put(i: int) -> None:
        held = tier.put(list(zip(keys[i % n_chunks], views, strict=True)))
        assert all(held)

    def get(i: int) -> None:
        assert None not in tier.get(keys[i % n_chunks], out)

    slots = (n_chunks * CHUNK + 1) * (size + 2 * 4096) + 65536
    with DiskTier(folder / "kv.slab", slots) as tier:
        for i in range(n_chunks):  # both files' pages are there
            plain_io(os.pwritev, whole, i * whole.nbytes)
            put(i)

        def put_again(i: int) -> None:
            tier.delete(keys[i % n_chunks])
            put(i)

        def write(i: int) -> None:
            plain_io(os.pwritev, whole, i % n_chunks * whole.nbytes)

        def read(i: int) -> None:
            plain_io(os.preadv, target, i % n_chunks * whole.nbytes)

        result = {"put": in_turn(pairs, write, put_again), "get": in_turn(pairs, read, get)}
    os.close(plain)
    for figures in result.values():
        figures["gb_s"] = whole.nbytes / figures["best_s"] / 1e9
    return result


def first_token(loaded: Any, prompt: list[int], stack: Any) -> tuple[float, int, int]:
    """Seconds from a prompt to its first token over an empty pool, n_cached, and the token."""
    from kvpool.engine.generate import generate

    model, cfg = loaded
    n_blocks = -(-len(prompt) // 16) + 2
    with (
        kvpool.Pool(
            n_blocks, n_layers=cfg.n_layers, n_kv_heads=cfg.n_kv_heads, head_dim=cfg.head_dim,
            touch=True,
        ) as pool,
        kvpool.BlockManager(pool, tiers=stack) as manager,
    ):  # fmt: skip
        began = time.perf_counter()
        request = generate(model, manager, prompt, max_tokens=1)
        seconds = time.perf_counter() - began
        return seconds, request.n_cached, request.samples[0].tokens[0]


def stack_of(folder: Path, **options: Any) -> TierStack:
    return TierStack(
        [DiskTier(folder / "ttft.slab", 256 << 20)], model="bench", timeout_s=60.0,
        queue_bytes=1 << 30, close_timeout_s=60.0, **options,
    )  # fmt: skip


def ttft(folder: Path, loaded: Any, n_tokens: int, repeats: int) -> dict[str, Any]:
    """The first token of a long prompt, computed and from the disk."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(1000, 40_000, n_tokens).tolist()
    computed, n_cached, token = first_token(loaded, prompt, stack_of(folder))
    assert n_cached == 0
    times: dict[str, list[float]] = {"warm": [], "cold": []}
    for _ in range(repeats):
        for kind, found in times.items():
            if kind == "cold":
                with (folder / "ttft.slab").open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            seconds, n_cached, same = first_token(loaded, prompt, stack_of(folder))
            assert n_cached == (n_tokens - 1) // 16 * 16, n_cached
            assert same == token
            found.append(seconds)
    again, _, same = first_token(loaded, prompt, None)  # computed a second time, after all that
    assert same == token
    slow = min(computed, again)
    return {
        "computed_s": slow,
        **{f"{kind}_s": statistics.median(found) for kind, found in times.items()},
        **{f"{kind}_ratio": slow / statistics.median(found) for kind, found in times.items()},
    }


def decode(folder: Path, loaded: Any, steps: int) -> dict[str, Any]:
    """What write-behind adds to a decode step."""
    from kvpool.engine.engine import Engine
    from kvpool.engine.request import Request

    model, cfg = loaded
    rng = np.random.default_rng(2)
    prompts = [rng.integers(1000, 40_000, 48).tolist() for _ in range(8)]
    engines, managers = [], []
    for tiers in (None, stack_of(folder)):
        pool = kvpool.Pool(
            8 * (steps // 16 + 8), n_layers=cfg.n_layers, n_kv_heads=cfg.n_kv_heads,
            head_dim=cfg.head_dim, touch=True,
        )  # fmt: skip
        managers.append(kvpool.BlockManager(pool, tiers=tiers))
        engines.append(Engine(model, managers[-1]))
        for prompt in prompts:
            engines[-1].add(Request(prompt, max_tokens=steps + 8))
    for engine in engines:
        while len(engine.scheduler.waiting) or any(r.trunk for r in engine.scheduler.running):
            engine.step()
    times: list[list[float]] = [[], []]
    cpus: list[list[float]] = [[], []]
    for i in range(steps):
        for which in ((0, 1), (1, 0))[i % 2]:
            wall, cpu = measured(engines[which].step)
            times[which].append(wall)
            cpus[which].append(cpu)
    # Blocks fill up every 16 steps, of all sequences at once: sums of 16 steps are compared.
    sums = [
        [sum(side[i : i + 16]) for i in range(0, len(side) // 16 * 16, 16)] for side in times + cpus
    ]
    overhead = [
        statistics.median(b / a for a, b in zip(sums[k], sums[k + 1], strict=True)) - 1
        for k in (0, 2)
    ]
    stats = managers[1].tiers.stats()[0]
    tokens = [[s.tokens for r in e.scheduler.running for s in r.samples] for e in engines]
    assert tokens[0] == tokens[1]
    for engine, manager in zip(engines, managers, strict=True):
        engine.close()
        manager.close()
    return {
        "wall": overhead[0],
        "cpu": overhead[1],
        "step_s": statistics.median(times[0]),
        "blocks": stats.stored + stats.queued,
        "dropped": stats.dropped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmarks of the lower tiers.")
    parser.add_argument("--dir", help="where the files are made (default: the system's)")
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--skip-model", action="store_true", help="only the part file")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": platform.machine(), "python": sys.version.split()[0]}
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        folder = Path(name)
        result["file"] = files(folder, args.pairs)
        for what, figures in result["file"].items():
            print(
                f"{what}: {figures['wall']:.2f} of the plain file by wall time, "
                f"{figures['cpu']:.2f} by processor time (asked: {ASKED[what]}); "
                f"fastest: {figures['best']:.2f}, {figures['gb_s']:.1f} GB/s",
                flush=True,
            )
        if not args.skip_model:
            from kvpool.engine.gguf_file import ModelFile, default_model_path
            from kvpool.engine.llama import Llama

            file = ModelFile(default_model_path())
            loaded = Llama(file), file.config
            result["ttft"] = figures = ttft(folder, loaded, args.tokens, args.repeats)
            print(
                f"first token of {args.tokens} tokens: computed {figures['computed_s']:.2f} s, "
                f"from the disk tier {figures['warm_s']:.3f} s ({figures['warm_ratio']:.0f} times "
                f"sooner), out of an empty page cache {figures['cold_s']:.3f} s "
                f"({figures['cold_ratio']:.0f}); asked: {ASKED['ttft']:.0f} times",
                flush=True,
            )
            result["decode"] = figures = decode(folder, loaded, args.steps)
            print(
                f"write-behind adds {100 * figures['wall']:+.1f} % to decode by wall time, "
                f"{100 * figures['cpu']:+.1f} % by processor time (asked: below 3 %); a step takes "
                f"{1e3 * figures['step_s']:.0f} ms, {figures['blocks']} blocks written, "
                f"{figures['dropped']} dropped"
            )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
