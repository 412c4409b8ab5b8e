"""Checksums, hashes, exports and imports from Python, against their peers and against memcpy.

    python benchmarks/bench_bytes.py [--json FILE] [--c FILE] [--rounds N] [--quick]

Peers are measured when they are installed: ``crc32c``, ``google-crc32c``, ``awscrt`` and
``fastcrc`` (ISA-L, which has no Python package, is in the C benchmark). Contestants of one table
run in turn, round after round, and a ratio is the median of the rounds' ratios: what the machine
does besides falls on all of them. Times are the thread's own: nothing here uses another thread.
``--c FILE`` takes the JSON of the C benchmark (bench_bytes --json) along. The JSON is
``{name: {"value": number, "unit": text, "ratio": number, "to": name}}``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvpool

Call = Callable[[], object]


def peers() -> dict[str, Callable[[Any], int]]:
    """What computes CRC-32C on this machine, by name."""
    found: dict[str, Callable[[Any], int]] = {}
    for name, module, attribute in (
        ("crc32c", "crc32c", "crc32c"),
        ("google-crc32c", "google_crc32c", "value"),
        ("awscrt", "awscrt.checksums", "crc32c"),
        ("fastcrc", "fastcrc", "crc32.iscsi"),
    ):
        try:
            value = importlib.import_module(module)
        except ImportError:
            continue
        for part in attribute.split("."):
            value = getattr(value, part)
        found[name] = value  # type: ignore[assignment]
    return found


class Tables:
    """Runs contests, prints them, and keeps what the JSON will hold."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.results: dict[str, dict[str, object]] = {}

    def contest(
        self, title: str, calls: dict[str, Call], *, n_bytes: int = 0, items: int = 1, to: str = ""
    ) -> dict[str, float]:
        """Times `calls` in turn; ratios are to `to`, or to the best of the others."""
        repeats = {}
        for name, call in calls.items():
            call()
            start = time.thread_time()
            call()
            repeats[name] = max(1, int(0.002 / (time.thread_time() - start + 1e-9)))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, call in calls.items():
                start = time.thread_time()
                for _ in range(repeats[name]):
                    call()
                times[name].append((time.thread_time() - start) / repeats[name])
        medians = {name: statistics.median(t) for name, t in times.items()}
        if not to:
            to = min(
                (n for n in calls if n != "kvpool"), key=lambda n: medians[n], default="kvpool"
            )
        print(f"\n{title}")
        for name in calls:
            ratio = statistics.median(t / y for t, y in zip(times[name], times[to], strict=True))
            value = n_bytes / medians[name] / 1e9 if n_bytes else medians[name] / items * 1e9
            unit = "GB/s" if n_bytes else "ns"
            print(f"  {name:<22} {value:10.2f} {unit:<5} {ratio:7.3f} of {to}'s time")
            self.results[f"{title}/{name}"] = {
                "value": round(value, 3), "unit": unit, "ratio": round(ratio, 4), "to": to,
            }  # fmt: skip
        return medians


def crc(tables: Tables) -> None:
    rng = np.random.default_rng(1)
    for label, n in (("64 KiB", 1 << 16), ("1 MiB", 1 << 20), ("64 MiB", 1 << 26)):
        data = rng.integers(0, 256, n, dtype=np.uint8).tobytes()
        want = kvpool.crc32c(data)
        calls: dict[str, Call] = {"kvpool": lambda data=data: kvpool.crc32c(data)}
        for name, fn in peers().items():
            assert fn(data) == want, name
            calls[name] = lambda fn=fn, data=data: fn(data)
        tables.contest(f"crc32c, {label}", calls, n_bytes=n)


def hashes(tables: Tables) -> None:
    rng = np.random.default_rng(2)
    for label, below in (("ids below 50,000", 50_000), ("ids below 2^18", 1 << 18)):
        tokens = rng.integers(0, below, 12_000, dtype=np.uint32)
        tables.contest(
            f"block hash, 12,000 tokens, {label}",
            {"kvpool": lambda tokens=tokens: kvpool.block_hashes(tokens)},
            items=len(tokens) // 16,
        )


def envelopes(tables: Tables) -> None:
    """Blocks of 1 MiB: 32 layers, 8 heads, 16 tokens, 64 dimensions."""
    for n in (1, 16):
        pool = kvpool.Pool(256, n_layers=32, n_kv_heads=8, head_dim=64, touch=True)
        ids = pool.alloc(n)
        pool.slab[:] = 1.5
        pool.set_fill(ids, 16)
        size = pool.export_bytes(n)
        buffer = bytearray(size)
        source = pool.slab[ids[0] : ids[0] + n].reshape(-1).view(np.uint8)
        target = np.frombuffer(buffer, np.uint8)[40 : 40 + source.size]
        assert pool.export_into(ids, buffer) == size
        envelope = bytes(buffer)

        def parts(pool: kvpool.Pool = pool, ids: np.ndarray = ids) -> None:
            for _ in pool.export_iter(ids):
                pass

        tables.contest(
            f"export of {n} x 1 MiB",
            {
                "memcpy": lambda source=source, target=target: np.copyto(target, source),
                "export": lambda pool=pool, ids=ids: pool.export(ids),
                "export_into": lambda pool=pool, ids=ids, buffer=buffer: pool.export_into(
                    ids, buffer
                ),
                "export_iter": parts,
                "export_pieces": lambda pool=pool, ids=ids: pool.export_pieces(ids),
            },
            n_bytes=size,
            to="memcpy",
        )
        # The blocks that an import takes, and those that memcpy writes, move through the slab.
        place = iter(range(1 << 62))

        def to_slab(
            pool: kvpool.Pool = pool, n: int = n, place=place, target: np.ndarray = target
        ) -> None:
            at = next(place) * n % (256 - n)
            np.copyto(pool.slab[at : at + n].reshape(-1).view(np.uint8), target)

        fresh = kvpool.Pool(256, n_layers=32, n_kv_heads=8, head_dim=64, touch=True)
        names = iter(range(1, 1 << 62, 2 * n))

        def take(pool: kvpool.Pool = fresh, n: int = n, names=names, data=envelope) -> None:
            got = pool.import_(data)
            pool.register(got, range(first := next(names), first + n))
            pool.unref(got)

        tables.contest(
            f"import of {n} x 1 MiB",
            {"memcpy": to_slab, "import_": take},
            n_bytes=size,
            to="memcpy",
        )
        fresh.close()
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--c", type=Path, help="take the C benchmark's JSON along")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    args = parser.parse_args()
    tables = Tables(5 if args.quick else args.rounds)
    crc(tables)
    hashes(tables)
    envelopes(tables)
    if args.json:
        cpu = next(
            (
                line.split(":")[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")
            ),
            platform.processor(),
        )
        report: dict[str, object] = {
            "machine": {"cpu": cpu, "python": platform.python_version()},
            "python": tables.results,
        }
        if args.c:
            report["c"] = json.loads(args.c.read_text())
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
