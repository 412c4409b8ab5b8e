"""Envelopes to and from a file, against cat of the same bytes to the same disk.

    python benchmarks/bench_wire_files.py [--mib 256] [--block-mib 1] [--repeats 9] [--dir DIR]

Alternating in one run, so that what else the machine does falls on all of them:

    cat      `cat A > B`, A being the envelope, in the page cache
    export   Sequence.export_iter and write to B: a megabyte is copied, with its checksum, while it
             is in the processor's cache, and handed to the system
    pieces   Pool.export_pieces and writev to B: nothing is copied here, but all is read before for
             the checksum
    save     Sequence.save to B: export, synced, without a name until it is whole
    cat+sync `cat A > B` and fsync: what save is to be compared with
    verify   EnvelopeFile.verify of A
    load     BlockManager.load of a saved file: two readings and the blocks
    cat>null `cat A > /dev/null`

Every ratio is the median of the pairs' ratios, cat's time over ours: above 1 we are faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvpool
from kvpool.wire import EnvelopeFile
from kvpool.wire.files import writev_all


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cat(source: str, target: str, *, sync: bool = False) -> Callable[[], object]:
    def run() -> None:
        with open(target, "wb") as out:
            subprocess.run(["cat", source], stdout=out, check=True)
            if sync:
                os.fsync(out.fileno())

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--block-mib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()

    n_layers = max(1, round(args.block_mib * (1 << 20) / (2 * 4 * 16 * 64 * 2)))
    shape = {"block_tokens": 16, "n_layers": n_layers, "n_kv_heads": 4, "head_dim": 64}
    block_bytes = n_layers * 2 * 4 * 16 * 64 * 2
    n = (args.mib << 20) // block_bytes
    pool = kvpool.Pool(n, **shape, touch=True)
    rng = np.random.default_rng(1)
    pool.slab[:] = rng.integers(0, 1 << 15, (n, 1, 1, 1, 1, 1), np.uint16).view(np.float16)
    tokens = np.arange(16 * n)
    manager = kvpool.BlockManager(pool)
    seq = manager.allocate(tokens)
    seq.commit()
    other = kvpool.BlockManager(kvpool.Pool(n, **shape, touch=True), prefix_cache="none")

    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        a, b, saved = (os.path.join(folder, name) for name in ("a", "b", "saved"))

        def export() -> None:
            with open(b, "wb", buffering=0) as file:
                for part in seq.export_iter():
                    file.write(part)

        def pieces() -> None:
            with open(b, "wb", buffering=0) as file:
                writev_all(file.fileno(), pool.export_pieces(seq.blocks))

        def verify() -> None:
            with EnvelopeFile(a) as file:
                file.verify(pool)

        def fresh(work: Callable[[], object]) -> Callable[[], object]:
            def run() -> float:
                Path(b).unlink(missing_ok=True)
                return seconds(work)

            return run

        seq.save(saved)
        Path(a).write_bytes(seq.export())
        size = os.path.getsize(a)
        pairs = {
            "export": (cat(a, b), export),
            "pieces": (cat(a, b), pieces),
            "save": (cat(a, b, sync=True), lambda: seq.save(b)),
            "verify": (cat(a, os.devnull), verify),
            "load": (cat(a, b), lambda: other.load(saved, tokens).free()),
        }
        rows = {}
        for name, (theirs, ours) in pairs.items():
            times = [(fresh(theirs)(), fresh(ours)()) for _ in range(args.repeats + 1)][1:]
            rows[name] = {
                "ratio": statistics.median(c / o for c, o in times),
                "low": min(c / o for c, o in times),
                "high": max(c / o for c, o in times),
                "cat_gb_s": size / statistics.median(c for c, _ in times) / 1e9,
                "ours_gb_s": size / statistics.median(o for _, o in times) / 1e9,
            }
    seq.free()
    print(f"{n} blocks of {block_bytes:,} bytes, {size:,} bytes; {args.repeats} pairs")
    print(f"{'':8}{'cat GB/s':>10}{'ours GB/s':>11}{'ratio':>8}   (of the pairs: lowest, highest)")
    for name, row in rows.items():
        print(
            f"{name:8}{row['cat_gb_s']:10.2f}{row['ours_gb_s']:11.2f}{row['ratio']:8.2f}   "
            f"({row['low']:.2f}, {row['high']:.2f})"
        )
    if args.json:
        args.json.write_text(json.dumps({"block_bytes": block_bytes, "n": n, "rows": rows}) + "\n")
    if rows["export"]["ratio"] < 0.8:
        sys.exit("export is below 0.8 of cat")


if __name__ == "__main__":
    main()
