"""What a replay costs: reading a trace, the loop over the real manager, and every size at once.

    python benchmarks/bench_replay.py [--trace ../shared/traces/conversation.jsonl] [--json FILE]

Without the trace a synthetic one is made. Processor time, medians of rounds in which all take
turns, so that what else the machine does falls on all alike. The garbage collector is off while
something is timed, as a service would freeze its heap; figures with it on stand beside them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvpool
from kvpool.replay import InFlight, Request, Reuse, make_plan, open_trace, policy_hits, synthesize
from kvpool.replay._about import POLICIES
from kvpool.replay.in_flight import make_manager
from kvpool.replay.synth import to_rows

SIZES = (2_000, 10_000, 50_000)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def read(path: Path) -> list[list[Request]]:
    with open_trace([str(path)]) as trace:
        return list(trace)


def replay(batches: list[list[Request]], n_blocks: int) -> InFlight:
    clock = InFlight(n_blocks, 512)
    for batch in batches:
        clock.feed(batch)
    return clock


def bare(requests: list[Request], n_blocks: int) -> int:
    """The protocol with nothing around it: what the clock can cost at least."""
    manager = make_manager(n_blocks)
    running: deque[kvpool.Sequence] = deque()
    for request in requests:
        if len(running) == 64:
            running.popleft().free()
        sequence = manager.allocate(request.units)
        sequence.commit()
        running.append(sequence)
    return manager.stats.hit_blocks


def reuse(batches: list[list[Request]]) -> Reuse:
    clock, found = InFlight(10_000, 512), Reuse()
    served = [clock.feed(batch) for batch in batches]
    for batch in served:
        found.feed(batch)
    return found


def stack(names: list[Any]) -> kvpool.replay.ReuseStack:
    found = kvpool.replay.ReuseStack(2**22)
    for row in names:
        found.use(row, 0.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, default=Path("../shared/traces/conversation.jsonl"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    path = args.trace
    if not path.is_file():
        path = Path(folder.name, "synthetic.jsonl")
        with path.open("w") as file:
            for batch in synthesize(seed=1, requests=4000):
                file.writelines(json.dumps(row) + "\n" for row in to_rows(batch))
    batches = read(path)
    requests = [request for batch in batches for request in batch]
    blocks = sum(request.n_blocks for request in requests)
    names = [kvpool.block_hashes(request.units, 2) for request in requests]
    known = reuse(batches).names()
    assert known is not None
    plan = make_plan(known)
    print(
        f"{path.name}: {len(requests):,} requests, {blocks:,} blocks, {path.stat().st_size:,} bytes"
    )

    work: dict[str, tuple[float, str, Callable[[], Any]]] = {
        "read": (path.stat().st_size / 1e6, "MB/s", lambda: read(path)),
        **{
            f"replay, {n:,} blocks": (blocks, "ns/block", lambda n=n: replay(batches, n))
            for n in SIZES
        },
        "the manager's calls alone": (blocks, "ns/block", lambda: bare(requests, 10_000)),
        "stack distances": (blocks, "ns/block", lambda: stack(names)),
        "replay and reuse": (blocks, "ns/block", lambda: reuse(batches)),
        **{
            f"policy {name}, 10,000 blocks": (
                blocks,
                "ns/block",
                lambda i=i: policy_hits(i, *plan, 10_000),
            )
            for i, name in enumerate(POLICIES)
        },
    }
    found: dict[str, dict[str, float]] = {}
    for collector in (False, True):
        times: dict[str, list[float]] = {name: [] for name in work}
        gc.collect()
        if not collector:
            gc.disable()
        for _ in range(args.rounds):
            for name, (_, _, run) in work.items():
                times[name].append(timed(run)[0])
        gc.enable()
        for name, (amount, unit, _) in work.items():
            median = statistics.median(times[name])
            value = amount / median if unit == "MB/s" else 1e9 * median / amount
            key = f"{unit}, collector on" if collector else unit
            found.setdefault(name, {})[key] = round(value, 1)
    for name, values in found.items():
        print(f"{name:<32}" + "".join(f"{v:>10,.1f} {k}" for k, v in values.items()))
    if args.json:
        args.json.write_text(
            json.dumps({"requests": len(requests), "blocks": blocks, **found}, indent=1)
        )


if __name__ == "__main__":
    main()
