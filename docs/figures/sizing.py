"""The pictures and the tables of docs/sizing.md, from Mooncake's conversation trace.

    python docs/figures/sizing.py TRACE            writes the pictures, prints the tables
    python docs/figures/sizing.py TRACE --check    exit code 1 when a picture or a table is old

The trace is conversation.jsonl of Mooncake (FAST '25, github.com/kvcache-ai/Mooncake).
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvpool.replay import POLICIES, InFlight, RealTime, Reuse, make_plan, open_trace, simulate
from kvpool.replay.charts import count, percent
from kvpool.replay.figures import figures
from kvpool.replay.study import Study

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "sizing.md"
BLOCK = 512 * 131_072  # bytes: Llama-3.1-8B, 16-bit KV
GIB = 2**30
IN_FLIGHT = (2_000, 5_000, 10_000, 20_000, 50_000)
POLICY_SIZES = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
WANTED = {
    "curve": "sizing-curve.svg",
    "policies": "sizing-policies.svg",
    "distances": "sizing-distances.svg",
    "ages": "sizing-ages.svg",
}


def in_flight(trace: str) -> Study:
    clocks = [InFlight(n, 512) for n in IN_FLIGHT]
    reuse = Reuse(sizes=IN_FLIGHT)
    settings = {"in_flight": 64}
    study = Study("conversation.jsonl", "mooncake", 512, True, clocks, reuse, settings, main=2)
    study.bytes_per_block = float(BLOCK)
    with open_trace([trace]) as batches:
        study.run(batches)
    study.simulate(list(POLICIES), 24)
    return study


def real_time(trace: str) -> Study:
    clocks = [
        RealTime(n, 512, prefill_rate=120_000, decode_rate=25, speed=2, max_running=1024)
        for n in (2_048, 4_096, 16_384)
    ]
    study = Study("conversation.jsonl", "mooncake", 512, True, clocks, Reuse(keep_names=False), {})
    study.main = 1
    with open_trace([trace]) as batches:
        study.run(batches)
    return study


def tables(study: Study, timed: Study) -> list[str]:
    """Rows of the page's tables."""
    reuse, rows = study.reuse, []
    total = reuse.blocks
    for gib in (16, 64, 128, 256, 512, 1024, 2048, 4096):
        blocks = gib * GIB // BLOCK
        hits = int(reuse.hits(blocks))
        rows.append(f"| {gib:,} GiB | {blocks:,} | {100 * hits / total:.1f} % |")
    names = reuse.names()
    assert names is not None
    hits_by = simulate(make_plan(names), list(POLICIES), POLICY_SIZES, match_last=False)
    for name, found in hits_by.items():
        cells = " | ".join(f"{100 * n / total:.1f}" for n in found)
        rows.append(f"| {name} | {cells} |")
    for result in timed.results:
        wait = result.wait_s.quantile(0.5)
        rows.append(
            f"| {result.n_blocks:,} | {100 * result.hit_rate:.1f} % | "
            f"{result.occupancy.mean:,.0f} | {result.occupancy.peak:,} | {result.waited:,} | "
            f"{result.preemptions:,} | {wait:.0f} s |"
        )
    for result in study.results:
        sequential = int(reuse.hits(result.n_blocks))
        rows.append(f"| {result.n_blocks:,} | {sequential:,} | {result.hit_blocks:,} |")
    return rows


def main(arguments: list[str]) -> int:
    paths = [argument for argument in arguments if not argument.startswith("--")]
    study, timed = in_flight(paths[0]), real_time(paths[0])
    pictures = {
        WANTED[chart.name]: chart.svg(760, standalone=True)
        for chart, _ in figures(study)
        if chart.name in WANTED
    }
    (occupancy,) = [chart for chart, _ in figures(timed) if chart.name == "occupancy"]
    pictures["sizing-occupancy.svg"] = occupancy.svg(760, standalone=True)
    rows = tables(study, timed)
    stale = []
    page = PAGE.read_text() if PAGE.is_file() else ""
    for name, text in pictures.items():
        path = HERE / name
        if "--check" not in arguments:
            path.write_text(text + "\n")
        elif not path.is_file() or path.read_text() != text + "\n":
            stale.append(name)
    if "--check" in arguments:
        stale += [row for row in rows if row not in page]
    else:
        print("\n".join(rows))
        knees = ", ".join(f"{percent(share)} {count(n)}" for share, n in study.knees())
        print(f"ceiling {study.ceiling:.4f}, longest {study.reuse.longest}; knees {knees}")
    if stale:
        print("out of date:", *stale, sep="\n")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
