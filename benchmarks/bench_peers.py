"""kvpool against other engines' block managers: the replay of a trace, in alternating pairs.

    python benchmarks/bench_peers.py --trace ../shared/traces/conversation.jsonl

The peers are run from their own wheels, downloaded without dependencies into build/peers/ and
imported with stand-ins for everything around their block managers (peers/standins.py). A peer that
cannot be had is left out, and what was answered is said. The protocol is in peers/replay.py.

Each figure is processor time, the median over the rounds; each ratio is the median of the ratios of
pairs, in which the peer and kvpool run one after the other, the first of them in turn. Before each
run the garbage of the last one is collected, and what was prepared is frozen, so that no side's
collector walks the other's objects.

What is hard about it for kvpool: the peers get their hashes for nothing, while kvpool hashes every
block twice (its name and its proof) within its time; a block is one token long, so that nothing of
the cost per token is hidden behind blocks; and the requests are short, 24 blocks on average, so
that the cost of a call counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from peers.nano_vllm_peer import NanoVllm  # noqa: E402
from peers.replay import Kvpool, Peer, Requests, Result, read_trace  # noqa: E402
from peers.sglang_peer import SglangRadix  # noqa: E402
from peers.vllm_peer import VLLM, VllmBlockPool, VllmManager  # noqa: E402
from peers.wheels import PeerMissing  # noqa: E402

IN_FLIGHT = 64
# Hits of vLLM 0.33 in the conversation trace of Mooncake, (last block may match, never matches).
VLLM_HITS = {2_000: (15_665, 15_645), 10_000: (61_046, 60_971), 50_000: (102_290, 102_165)}
TARGETS = {"BlockPool": 25.0, "KVCacheManager": 40.0}
SLOW_S = 10.0  # a peer that takes longer than this for one run is run once


def run(peer: Peer, prepared: Any, n_blocks: int, match_last: bool) -> tuple[float, Result]:
    gc.collect()
    gc.freeze()
    started = time.process_time()
    result = peer.replay(prepared, n_blocks, IN_FLIGHT, match_last)
    elapsed = time.process_time() - started
    gc.unfreeze()
    return elapsed, result


def compare(
    peer: Peer, requests: Requests, sizes: list[int], rounds: int, match_last: bool
) -> list[dict[str, Any]]:
    """One row for each pool size: both times, their ratio, both hit counts."""
    ours = Kvpool()
    prepared = {side.name: side.prepare(requests) for side in (peer, ours)}
    n_blocks_asked = sum(map(len, requests))
    rows = []
    for size in sizes:
        times: dict[str, list[float]] = {peer.name: [], ours.name: []}
        hits: dict[str, Result] = {}
        for i in range(rounds):
            for side in (peer, ours) if i % 2 == 0 else (ours, peer):
                elapsed, hits[side.name] = run(side, prepared[side.name], size, match_last)
                times[side.name].append(elapsed)
            if times[peer.name][0] > SLOW_S:
                break
        pairs = zip(times[peer.name], times[ours.name], strict=True)
        rows.append(
            {
                "peer": peer.name,
                "n_blocks": size,
                "match_last": match_last,
                "rounds": len(times[peer.name]),
                "peer_ns_per_block": round(
                    statistics.median(times[peer.name]) / n_blocks_asked * 1e9, 1
                ),
                "kvpool_ns_per_block": round(
                    statistics.median(times[ours.name]) / n_blocks_asked * 1e9, 1
                ),
                "ratio": round(statistics.median(theirs / own for theirs, own in pairs), 1),
                "peer_hits": hits[peer.name].hits,
                "kvpool_hits": hits[ours.name].hits,
                "peer_freed_early": hits[peer.name].freed_early,
                "kvpool_freed_early": hits[ours.name].freed_early,
            }
        )
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['peer']:32} {row['n_blocks']:>7,} {'last' if row['match_last'] else 'no last':>8}"
        f" {row['peer_ns_per_block']:>10,.0f} {row['kvpool_ns_per_block']:>8,.0f}"
        f" {row['ratio']:>8,.1f}x {row['peer_hits']:>9,} {row['kvpool_hits']:>9,}",
        flush=True,
    )


def attempt(name: str, make: Callable[[], list[Peer]]) -> tuple[list[Peer], list[str]]:
    try:
        return make(), []
    except PeerMissing as error:
        return [], [str(error)]
    except (ImportError, AttributeError, TypeError, SyntaxError) as error:
        return [], [f"{name} does not import under the stand-ins: {error!r}"]


def available(cache: Path, vllm: str, sglang: str, nano: str) -> tuple[list[Peer], list[str]]:
    """The peers that can be run here, and why the others cannot."""
    peers: list[Peer] = []
    missing: list[str] = []

    def vllm_peers() -> list[Peer]:
        modules = VLLM(vllm, cache)
        return [VllmBlockPool(modules), VllmManager(modules)]

    makers: list[tuple[str, Callable[[], list[Peer]]]] = [
        (vllm, vllm_peers),
        (sglang, lambda: [SglangRadix(sglang, cache)]),
        (nano, lambda: [NanoVllm(nano, cache)]),
    ]
    for name, make in makers:
        made, why = attempt(name, make)
        peers += made
        missing += why
    return peers, missing


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Which targets hold, worst case first; hits that differ from vLLM's by more than 0.1%."""
    lines = []
    for kind, target in TARGETS.items():
        ratios = [row["ratio"] for row in rows if row["peer"].endswith(kind)]
        if ratios:
            verdict = "reached" if min(ratios) >= target else "NOT reached"
            lines.append(f"{kind}: at least {min(ratios):.1f}x, target {target:.0f}x, {verdict}")
    for row in rows:
        expected = VLLM_HITS.get(row["n_blocks"])
        if "vLLM" in row["peer"] and not row["peer"].startswith("nano") and expected is not None:
            known = expected[0 if row["match_last"] else 1]
            if abs(row["kvpool_hits"] - known) > known / 1000:
                lines.append(
                    f"hits at {row['n_blocks']:,}: {row['kvpool_hits']:,}, vLLM's {known:,}"
                )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = os.environ.get("KVPOOL_TRACES", str(ROOT.parent / "shared" / "traces"))
    parser.add_argument(
        "--trace",
        type=Path,
        default=Path(default) / "conversation.jsonl",
        help="JSON lines with hash_ids (default: conversation.jsonl under $KVPOOL_TRACES)",
    )
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "peers")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(VLLM_HITS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="+", help="only peers whose name contains one of these")
    parser.add_argument("--vllm", default="vllm==0.33.0", help="what pip is asked for")
    parser.add_argument("--sglang", default="sglang==0.5.23")
    parser.add_argument("--nano-vllm", default="nano-vllm-npu==0.0.2")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    if not options.trace.is_file():
        print(
            f"no trace at {options.trace}: give one with --trace, or its folder in KVPOOL_TRACES.\n"
            "The conversation trace of Mooncake (FAST '25) is the one that the figures are about."
        )
        return 0
    requests = read_trace(options.trace)
    peers, missing = available(options.cache, options.vllm, options.sglang, options.nano_vllm)
    for line in missing:
        print(f"left out: {line}")
    if options.peers:
        peers = [p for p in peers if any(word in p.name for word in options.peers)]
    load = os.getloadavg()
    print(
        f"{options.trace.name}: {len(requests):,} requests, {sum(map(len, requests)):,} blocks, "
        f"{IN_FLIGHT} in flight; Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"load {load[0]:.1f}"
    )
    print(
        f"{'peer':32} {'blocks':>7} {'match':>8} {'peer ns':>10} {'ours ns':>8} {'ratio':>9} "
        f"{'hits':>9} {'ours':>9}"
    )
    rows: list[dict[str, Any]] = []
    for peer in peers:
        for match_last in (True, False):
            if match_last or not isinstance(peer, NanoVllm):  # it has no other way
                rows += compare(peer, requests, options.sizes, options.rounds, match_last)
    print(*verdicts(rows), sep="\n")
    if options.json is not None:
        report = {
            "trace": options.trace.name,
            "requests": len(requests),
            "blocks": sum(map(len, requests)),
            "in_flight": IN_FLIGHT,
            "clock": "processor time",
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load": [round(load[0], 1), round(os.getloadavg()[0], 1)],
            "left_out": missing,
            "rows": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
