"""Pushing 1 MiB blocks over loopback, against a bare grpcio stream of the same bytes.

    python benchmarks/bench_transfer.py [--json FILE] [--pairs N] [--blocks N]

Two server processes, one client process. ``bare`` streams the very messages of a push, exported
beforehand, to a handler that drops them: no envelope is made, checked or stored. ``ours`` is
``KvClient.push`` to a KvServer whose pool has nothing cached: each block is exported as it is sent,
its checksum verified, its bytes stored. They alternate; what counts is the median of the ratios.

Then where the time of a block goes, each part by itself, and HasBlocks of 10,000 names.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

import kvpool
from kvpool.transfer import AioKvServer, KvClient, KvReceiver, KvServer, Limits, Plan
from kvpool.transfer._chunk import decode_chunk
from kvpool.transfer.sender import messages
from kvpool.transfer.settings import MAX_MESSAGE_BYTES, server_options

SHAPE = {"block_tokens": 16, "n_layers": 32, "n_kv_heads": 8, "head_dim": 64}  # P is 1 MiB
N_NAMES = 10_000


def serve_bare(ready: Any) -> None:
    def drop(requests: Any, context: Any) -> bytes:
        return str(sum(len(data) for data in requests)).encode()

    server = grpc.server(futures.ThreadPoolExecutor(4), options=server_options(100))
    method = grpc.stream_unary_rpc_method_handler(drop)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("b", {"P": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ready.put(f"127.0.0.1:{port}")
    server.wait_for_termination()


def serve_ours(ready: Any, n_blocks: int) -> None:
    pool = kvpool.Pool(2 * n_blocks, touch=True, **SHAPE)
    receiver = KvReceiver(kvpool.BlockManager(pool, prefix_cache="none"))
    with KvServer(receiver) as server:
        ready.put(server.address)
        server.wait()


def serve_ours_aio(ready: Any, n_blocks: int) -> None:
    import asyncio

    async def main() -> None:
        pool = kvpool.Pool(2 * n_blocks, touch=True, **SHAPE)
        receiver = KvReceiver(kvpool.BlockManager(pool, prefix_cache="none"))
        async with AioKvServer(receiver) as server:
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


def run(pairs: int, n_blocks: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ready: Any = context.Queue()
    processes = []

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
    try:
        channel = grpc.insecure_channel(start(serve_bare), limit)
        bare = channel.stream_unary("/b/P")
        for name, target in (("threads", serve_ours), ("asyncio", serve_ours_aio)):
            with KvClient(start(target, n_blocks)) as client:
                ratios, ours_s, bare_s = [], [], []
                for i in range(pairs + 1):
                    took_bare = seconds(lambda: bare(iter(made)))
                    started = time.perf_counter()
                    result = client.push(seq, keep=True)
                    took_ours = time.perf_counter() - started
                    client.release(result.handle_id)
                    assert result.blocks_sent == n_blocks
                    if i:  # the first of each warms up
                        ratios.append(took_bare / took_ours)
                        ours_s.append(took_ours)
                        bare_s.append(took_bare)
            out[name] = {
                "ratio": statistics.median(ratios),
                "ratios": sorted(round(r, 3) for r in ratios),
                "ours_GB_s": n_bytes / statistics.median(ours_s) / 1e9,
                "bare_GB_s": n_bytes / statistics.median(bare_s) / 1e9,
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
    for name in ("threads", "asyncio"):
        side = found[name]
        print(
            f"push, {name}: {side['ours_GB_s']:.2f} GB/s, bare stream {side['bare_GB_s']:.2f}, "
            f"median of {args.pairs} ratios {side['ratio']:.2f} ({side['ratios']})"
        )
    for name, us in found["us_a_block"].items():
        print(f"  {us:7.1f} us  {name}")
    print(f"HasBlocks of {N_NAMES} names: {found['has_blocks_10000_ms']:.1f} ms")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
