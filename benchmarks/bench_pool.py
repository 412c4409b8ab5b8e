"""What kvpool costs from Python: nanoseconds a block or a call, and bytes a second.

    python benchmarks/bench_pool.py [--json FILE] [--check] [--blocks N] [--rounds N] [-k TEXT]

Each figure is the median of many short rounds; the rounds of all measurements are interleaved, so
that a busy moment of the machine does not fall on one of them. ``limit`` is what a figure may be at
most; with --check, exit code 1 says that one is missed. A machine that runs other programs
gives figures that are too high: compare figures of one run, with ``empty_call`` for a yardstick.

The JSON is ``{name: {"value": number, "unit": text, "limit": number or absent}}``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import kvpool

ROUND_SECONDS = 0.002


@dataclass
class Measurement:
    name: str
    call: Callable[[], object]
    unit: str = "ns"
    per: float = 1.0  # what one call is divided by: blocks, or bytes
    limit: float | None = None
    times: list[float] = field(default_factory=list)
    repeats: int = 1

    def calibrate(self) -> None:
        self.call()
        while True:
            elapsed = self.round()
            if elapsed * self.repeats >= ROUND_SECONDS / 2:
                break
            self.repeats *= 2
        self.times.clear()

    def round(self) -> float:
        """Seconds a call, over one round."""
        call, repeats = self.call, range(self.repeats)
        start = time.perf_counter()
        for _ in repeats:
            call()
        elapsed = (time.perf_counter() - start) / len(repeats)
        self.times.append(elapsed)
        return elapsed

    @property
    def value(self) -> float:
        seconds = statistics.median(self.times)
        return self.per / seconds / 1e9 if self.unit == "GB/s" else seconds * 1e9 / self.per

    @property
    def missed(self) -> bool:
        return self.limit is not None and self.value > self.limit


def measurements(n_blocks: int) -> list[Measurement]:
    """Every measurement, each over its own state, so that they can be interleaved."""
    rng = np.random.default_rng(0)
    tiny = kvpool.Pool(n_blocks, n_layers=1, n_kv_heads=1, head_dim=1)
    hit = tiny.alloc()
    tiny.set_fill(hit, 16)
    name = kvpool.block_hash(0, range(16))
    tiny.register(hit, name)

    chain = kvpool.block_hashes(rng.integers(0, 50_000, 256 * 16))
    prompt = tiny.alloc(256)
    tiny.set_fill(prompt, 16)
    tiny.register(prompt, chain)

    def lookup_row() -> None:
        tiny.unref(tiny.lookup(chain))

    def lookup_one() -> None:
        tiny.lookup(name)

    def request() -> None:
        """One request of 16 blocks: hash, look up, allocate, register, give back."""
        tokens = request_tokens[next(turn)]
        hashes = kvpool.block_hashes(tokens)
        found = tiny.lookup(hashes)
        n_hits = int((found >= 0).sum())
        ids = tiny.alloc(16 - n_hits)
        tiny.set_fill(ids, 16)
        tiny.register(ids, hashes[n_hits:])
        tiny.unref(found[:n_hits])
        tiny.unref(ids)

    request_tokens = rng.integers(0, 50_000, (64, 256))
    turn = itertools.cycle(range(len(request_tokens)))

    # 30 layers, 3 heads of 64: 360 KiB a block.
    model = kvpool.Pool(192, n_layers=30, n_kv_heads=3, head_dim=64)
    ids = model.alloc(64)
    model.slab[:] = 0.5
    model.set_fill(ids, 16)
    envelope = model.export(ids)
    shared = model.alloc()
    model.ref(shared)

    def cow() -> None:
        copy = model.cow(shared)
        model.unref(copy)
        model.ref(shared)

    tokens16 = rng.integers(0, 50_000, 16)
    tokens4096 = rng.integers(0, 50_000, 4096)
    as_list, as_u32 = tokens16.tolist(), tokens16.astype(np.uint32)
    scratch = np.empty(len(envelope), np.uint8)
    source = np.frombuffer(envelope, np.uint8)
    nothing: list[int] = []

    one = Measurement
    return [
        one("empty_call", lambda: len(nothing)),
        one("alloc1_unref", lambda: tiny.unref(tiny.alloc())),
        one("alloc16_unref_per_block", lambda: tiny.unref(tiny.alloc(16)), per=16, limit=50),
        one("alloc256_unref_per_block", lambda: tiny.unref(tiny.alloc(256)), per=256, limit=8),
        one("lookup_hit", lookup_one, limit=120),
        one("lookup_miss", lambda: tiny.lookup(1), limit=120),
        one("lookup256_unref_per_block", lookup_row, per=256),
        one("request16_per_block", request, per=16),
        one("refs_scalar", lambda: tiny.refs(hit)),
        one("block_view", lambda: tiny.block(hit), limit=150),
        one("slab_view", lambda: tiny.slab),
        one("stats", lambda: tiny.stats),
        one("block_hash_list16", lambda: kvpool.block_hash(0, as_list)),
        one("block_hash_uint32_16", lambda: kvpool.block_hash(0, as_u32)),
        one("block_hashes_4096_per_block", lambda: kvpool.block_hashes(tokens4096), per=256),
        one("cow_copy", cow, "GB/s", model.block_bytes),
        one("export", lambda: model.export(ids), "GB/s", len(envelope)),
        one("import", lambda: model.unref(model.import_(envelope)), "GB/s", len(envelope)),
        one("crc32c", lambda: kvpool.crc32c(envelope), "GB/s", len(envelope)),
        one("memcpy", lambda: np.copyto(scratch, source), "GB/s", len(envelope)),
    ]


def create_seconds(n_blocks: int) -> float:
    start = time.perf_counter()
    kvpool.Pool(n_blocks, block_tokens=1, n_layers=1, n_kv_heads=1, head_dim=1).close()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a limit is missed")
    parser.add_argument("--blocks", type=int, default=4096, help="blocks of the small-block pool")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("-k", metavar="TEXT", default="", help="only figures with TEXT in the name")
    args = parser.parse_args()

    todo = [m for m in measurements(args.blocks) if args.k in m.name]
    for m in todo:
        m.calibrate()
    for _ in range(args.rounds):
        for m in todo:
            m.round()
    if args.k in "create_10M":
        create = Measurement("create_10M", lambda: None, "s", 1e9, limit=1.0)
        create.times = [create_seconds(10_000_000) for _ in range(3)]
        todo.append(create)

    figures: dict[str, dict[str, object]] = {}
    for m in todo:
        figures[m.name] = {"value": round(m.value, 3), "unit": m.unit}
        note = ""
        if m.limit is not None:
            figures[m.name]["limit"] = m.limit
            note = f"  (limit {m.limit:g}{', MISSED' if m.missed else ''})"
        print(f"{m.name:<30} {m.value:>10.2f} {m.unit}{note}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=2)
            file.write("\n")
    return 1 if args.check and any(m.missed for m in todo) else 0


if __name__ == "__main__":
    sys.exit(main())
