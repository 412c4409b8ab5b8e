"""What ``kvpool replay`` shows on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvpool.replay.charts import count, duration, percent

from ._tables import clean, print_table, size_text

if TYPE_CHECKING:
    from kvpool.replay.study import Study

_BAR = 30


def show(study: Study) -> None:
    """Sums, the replays, the hit curve, the policies, the distributions."""
    reuse = study.reuse
    print(
        f"{clean(study.name)}: {study.primary.requests:,} requests, "
        f"{study.primary.prompt_tokens:,} prompt tokens, "
        f"{study.primary.prompt_blocks:,} blocks of {study.block_tokens}"
        + (f", {duration(study.duration_s)}" if study.duration_s else "")
    )
    for note in study.notes:
        print(f"note: {clean(note)}")
    if study.problems.count:
        print(f"note: {study.problems.count:,} bad lines left out")
        for line in study.problems.first:
            print(f"      {clean(line)}")
    print()
    _replays(study)
    if study.has_hashes and reuse.seen_before:
        _curve(study)
        _distributions(study)
        _prefixes(study)
    if study.policy_hits:
        _policies(study)


def _replays(study: Study) -> None:
    real = study.primary.clock == "real time"
    head = ["blocks", *(["memory"] if study.bytes_per_block else [])]
    head += ["hit tokens", "hit blocks", "hits", "evicted", "mean used", "peak used", "rejected"]
    head += ["waited", "preempted", "wait p50", "wait p99"] if real else ["ended early"]
    rows = []
    for result in study.results:
        row = [f"{result.n_blocks:,}"]
        if study.bytes_per_block:
            row.append(size_text(result.n_blocks * study.bytes_per_block))
        row += [f"{100 * result.hit_rate:.2f}%", f"{100 * result.block_hit_rate:.2f}%"]
        row += [f"{result.hit_blocks:,}", f"{result.evictions:,}"]
        row += [f"{result.occupancy.mean:,.0f}", f"{result.occupancy.peak:,}"]
        row.append(f"{result.rejected:,}")
        if real:
            row += [f"{result.waited:,}", f"{result.preemptions:,}"]
            row += [
                duration(result.wait_s.quantile(q)) if result.wait_s.total else ""
                for q in (0.5, 0.99)
            ]
        else:
            row.append(f"{result.freed_early:,}")
        rows.append(row)
    how = "real time" if real else f"{study.settings.get('in_flight')} requests in flight"
    print_table(f"replayed, {how}", head, rows)


def _curve(study: Study) -> None:
    ceiling = max(study.ceiling, 1e-9)
    rows = []
    full = _full_block()
    for n, rate in study.curve(13):
        bar = full * round(_BAR * rate / ceiling)
        row = [count(n), f"{100 * rate:.2f}%", count(n * study.block_tokens)]
        if study.bytes_per_block:
            row.append(size_text(n * study.bytes_per_block))
        rows.append([*row, bar.ljust(_BAR)])
    head = ["blocks", "hit blocks", "tokens", *(["memory"] if study.bytes_per_block else []), ""]
    print_table(
        f"every size at once: LRU, one request after the other; ceiling {100 * ceiling:.2f}% "
        f"({study.reuse.seen_before:,} of {study.reuse.blocks:,} blocks)",
        head,
        rows,
    )


def _full_block() -> str:
    try:
        "█".encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "█"


def _distributions(study: Study) -> None:
    reuse, size = study.reuse, study.primary.n_blocks
    lifetimes, once = reuse.lifetimes()
    rows = [
        ["reuse distance, blocks", *(count(reuse.depth_histogram.quantile(q)) for q in _QUANTILES)],
        ["time since last use", *(_time(reuse.age_s.quantile(q)) for q in _QUANTILES)],
        [
            f"the same, hits at {count(size)} blocks",
            *(_time(reuse.hit_age_s.quantile(q)) for q in _QUANTILES),
        ],
        ["life of reused blocks", *(_time(lifetimes.quantile(q)) for q in _QUANTILES)],
    ]
    for n, kept in reuse.retention_s.items():
        if kept.total:
            row = [f"unused stay at {count(n)} blocks"]
            rows.append([*row, *(_time(kept.quantile(q)) for q in _QUANTILES)])
    print_table("distributions", ["", *(f"{100 * q:g}%" for q in _QUANTILES)], rows)
    share = percent(once / max(reuse.distinct, 1))
    print(f"{once:,} of {reuse.distinct:,} different blocks ({share}) were used once only")
    shares = [
        f"{percent(reuse.hit_age_s.below(limit))} within {duration(limit)}"
        for limit in (1, 10, 60, 600, 3600)
    ]
    if reuse.hit_age_s.total:
        print(f"hits by age at {count(size)} blocks: {', '.join(shares)}")
    print()


_QUANTILES = (0.1, 0.5, 0.9, 0.99)


def _time(seconds: float) -> str:
    return duration(seconds) if seconds == seconds else "-"


def _prefixes(study: Study) -> None:
    rows = [
        [row["prefix"][:8], f"{row['blocks']:,}", f"{row['requests']:,}", f"{row['hits']:,}"]
        for row in study.reuse.top_prefixes(6)
    ]
    print_table("beginnings shared most", ["prefix", "blocks", "requests", "hit whole"], rows)
    sessions = [
        [row["session"], f"{row['requests']:,}", f"{row['blocks']:,}", f"{row['hit_blocks']:,}"]
        for row in study.reuse.top_sessions(6)
    ]
    if sessions:
        head = ["session", "requests", "blocks", "hit blocks"]
        print_table("sessions with most requests", head, sessions)


def _policies(study: Study) -> None:
    total = max(study.reuse.blocks, 1)
    n = len(study.policy_sizes)
    picks = sorted({round(i * (n - 1) / 5) for i in range(6)})
    rows = [
        [name, *(f"{100 * hits[i] / total:.2f}%" for i in picks)]
        for name, hits in study.policy_hits.items()
    ]
    head = ["policy", *(count(study.policy_sizes[i]) for i in picks)]
    print_table("hit blocks by order of eviction and pool size (simulated)", head, rows)
