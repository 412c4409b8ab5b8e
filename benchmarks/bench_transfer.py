"""Pushing 1 MiB blocks over loopback, against a bare grpcio stream of the same bytes.

    python benchmarks/bench_transfer.py [--json FILE] [--pairs N] [--blocks N]

One client process, a process for each server. ``bare`` streams the very messages of a push, made
beforehand, to a handler that drops them: no envelope is made, checked or stored. ``ours`` is
``KvClient.push`` to a KvServer whose pool has nothing cached: each block is exported as it is sent,
its checksum verified, its bytes stored. They take turns; what counts is the median of
the ratios of neighbours. "kept" servers have called ``keep_freed_memory``, as ``kvpool serve``
does; a bare one with it shows what that alone brings. CPU time of client and server together is
shown too: on a machine that others use it is steadier than the clock.

Then where the time of a block goes, each part by itself, and HasBlocks of 10,000 names.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

import kvpool
from kvpool.transfer import (
    AioKvServer,
    KvClient,
    KvReceiver,
    KvServer,
    Limits,
    Plan,
    keep_freed_memory,
)
from kvpool.transfer._chunk import decode_chunk
from kvpool.transfer.sender import messages
from kvpool.transfer.settings import MAX_MESSAGE_BYTES

SHAPE = {"block_tokens": 16, "n_layers": 32, "n_kv_heads": 8, "head_dim": 64}  # P is 1 MiB
N_NAMES = 10_000


def serve_bare(ready: Any, keep: bool) -> None:
    def drop(requests: Any, context: Any) -> bytes:
        return str(sum(len(data) for data in requests)).encode()

    if keep:
        keep_freed_memory()
    limit = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    server = grpc.server(futures.ThreadPoolExecutor(4), options=limit)
    method = grpc.stream_unary_rpc_method_handler(drop)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("b", {"P": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ready.put(f"127.0.0.1:{port}")
    server.wait_for_termination()


def make_receiver(n_blocks: int, keep: bool) -> KvReceiver:
    if keep:
        keep_freed_memory()
    pool = kvpool.Pool(2 * n_blocks, touch=True, **SHAPE)
    return KvReceiver(kvpool.BlockManager(pool, prefix_cache="none"))


def serve_threads(ready: Any, keep: bool, n_blocks: int) -> None:
    with KvServer(make_receiver(n_blocks, keep)) as server:
        ready.put(server.address)
        server.wait()


def serve_asyncio(ready: Any, keep: bool, n_blocks: int) -> None:
    import asyncio

    async def main() -> None:
        async with AioKvServer(make_receiver(n_blocks, keep)) as server:
            ready.put(server.address)
            await asyncio.Event().wait()

    asyncio.run(main())


def serve_names(ready: Any) -> None:
    pool = kvpool.Pool(N_NAMES, block_tokens=16, n_layers=1, n_kv_heads=1, head_dim=8)
    manager = kvpool.BlockManager(pool)
    with manager.allocate(range(16 * N_NAMES)) as seq:
        seq.commit()
    receiver = KvReceiver(manager, limits=Limits())
    with KvServer(receiver) as server:
        ready.put(server.address)
        server.wait()


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def best_us(call: Callable[[int], Any], n: int) -> float:
    """Microseconds a call: the best of five rounds over n different blocks."""

    def round_() -> None:
        for i in range(n):
            call(i)

    return min(seconds(round_) for _ in range(5)) / n * 1e6


def cpu_s(pid: int) -> float:
    """User and system seconds of a process, so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(pairs: int, n_blocks: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ready: Any = context.Queue()
    processes: list[Any] = []

    def start(target: Any, *args: Any) -> str:
        process = context.Process(target=target, args=(ready, *args), daemon=True)
        process.start()
        processes.append(process)
        address: str = ready.get(timeout=60)
        return address

    pool = kvpool.Pool(n_blocks, touch=True, **SHAPE)
    pool.slab[:] = 1.5
    manager = kvpool.BlockManager(pool)
    seq = manager.allocate(range(n_blocks * 16))
    seq.commit()
    plan = Plan.of(seq)
    made = [data for data, _ in messages("x" * 32, seq, plan)]
    n_bytes = sum(map(len, made))
    limit = [("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
    out: dict[str, Any] = {"block_bytes": pool.block_bytes, "n_blocks": n_blocks, "pairs": pairs}
    sides: dict[str, Callable[[], Any]] = {}

    def add_bare(name: str, keep: bool) -> None:
        stream = grpc.insecure_channel(start(serve_bare, keep), limit).stream_unary("/b/P")
        sides[name] = lambda: stream(iter(made))

    def add_ours(name: str, target: Any, keep: bool) -> None:
        client = KvClient(start(target, keep, n_blocks))

        def push() -> Any:
            result = client.push(seq, keep=True)
            assert result.blocks_sent == n_blocks
            return lambda: client.release(result.handle_id)

        sides[name] = push

    try:
        add_bare("bare", False)
        add_ours("threads", serve_threads, False)
        add_ours("threads, kept", serve_threads, True)
        add_ours("asyncio", serve_asyncio, False)
        add_ours("asyncio, kept", serve_asyncio, True)
        add_bare("bare, kept", True)
        wall: dict[str, list[float]] = {name: [] for name in sides}
        cpu: dict[str, list[float]] = {name: [] for name in sides}
        for i in range(pairs + 1):
            for (name, side), process in zip(sides.items(), processes, strict=True):
                before = cpu_s(os.getpid()) + cpu_s(process.pid)
                started = time.perf_counter()
                release = side()
                took = time.perf_counter() - started
                used = cpu_s(os.getpid()) + cpu_s(process.pid) - before
                if callable(release):
                    release()
                if i:  # the first of each warms up
                    wall[name].append(took)
                    cpu[name].append(used)
        for name in sides:
            out[name] = {
                "GB_s": n_bytes / statistics.median(wall[name]) / 1e9,
                "ratio": statistics.median(
                    b / o for b, o in zip(wall["bare"], wall[name], strict=True)
                ),
                "cpu_us_a_block": sum(cpu[name]) / pairs / n_blocks * 1e6,
                "cpu_ratio": sum(cpu["bare"]) / sum(cpu[name]),
            }
        other = kvpool.Pool(n_blocks, touch=True, **SHAPE)
        receiver = kvpool.BlockManager(other)
        payloads = [decode_chunk(data).payload for data in made]
        taken: list[int] = []

        def import_(i: int) -> None:
            if i == 0 and taken:
                other.unref(taken)
                taken.clear()
            taken.append(int(receiver.import_(payloads[i], named=False)[0]))

        out["us_a_block"] = {
            "export, between the message's other fields": best_us(
                lambda i: seq.export_block(i, before=b"x" * 60, after=b"y" * 6), n_blocks
            ),
            "reading the message": best_us(lambda i: decode_chunk(made[i]), n_blocks),
            "import: checksum, rules, copy": best_us(import_, n_blocks),
        }
        names = kvpool.block_hashes(range(16 * N_NAMES)).tolist()
        with KvClient(start(serve_names)) as client:
            assert all(client.has_blocks(names))
            times = [seconds(lambda: client.has_blocks(names)) for _ in range(21)]
        out["has_blocks_10000_ms"] = statistics.median(times) * 1e3
    finally:
        for process in processes:
            process.kill()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=256)
    args = parser.parse_args()
    found = run(args.pairs, args.blocks)
    print(f"{args.pairs} rounds; ratio: time of the bare stream over this one's")
    for name, side in found.items():
        if isinstance(side, dict) and "ratio" in side:
            print(
                f"  {name:14} {side['GB_s']:5.2f} GB/s  ratio {side['ratio']:.2f}  "
                f"CPU {side['cpu_us_a_block']:6.0f} us a block, ratio {side['cpu_ratio']:.2f}"
            )
    for name, us in found["us_a_block"].items():
        print(f"  {us:7.1f} us  {name}")
    print(f"HasBlocks of {N_NAMES} names: {found['has_blocks_10000_ms']:.1f} ms")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
