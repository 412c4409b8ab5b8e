"""The charts of a study: what the report shows, and what docs/sizing.md has as pictures."""

from __future__ import annotations

from collections.abc import Callable

from .charts import Axis, Chart, count, duration, percent
from .study import Study
from .tally import LogHistogram

__all__ = ["POLICY_COLORS", "figures", "size_text"]

POLICY_COLORS = {
    "optimal": "green",
    "lru": "blue",
    "s3-fifo": "amber",
    "tinylfu": "violet",
    "lfu": "pink",
    "position": "teal",
    "fifo": "muted",
}
_TIMES = (0.001, 0.01, 0.1, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 6 * 3600, 86400, 7 * 86400)


def figures(study: Study) -> list[tuple[Chart, str]]:
    """Each chart and what it means, in the order in which a page shows them."""
    found = []
    if study.has_hashes and study.reuse.seen_before:
        found.append((_hit_curve(study), _about_curve(study)))
    if study.policy_hits:
        found.append((_policies(study), _about_policies(study)))
    found.append((_occupancy(study), _about_occupancy(study)))
    if study.has_hashes and study.reuse.seen_before:
        found.append((_distances(study), _about_distances(study)))
        age = study.reuse.hit_age_s
        if age.total > age.zeros:
            found.append((_ages(age), _about_ages(study)))
    if study.primary.clock == "real time" and study.primary.waiting.peak:
        found.append((_waiting(study), "Requests that have come and do not fit yet."))
    return found


def size_text(study: Study) -> Callable[[float], str] | None:
    """What a pool of so many blocks takes, for an axis; None where no model was given."""
    per_block = study.bytes_per_block
    if per_block is None:
        return None

    def text(blocks: float) -> str:
        size = blocks * per_block
        for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if size >= scale:
                return f"{size / scale:.3g} {unit}"
        return f"{size:.3g} B"

    return text


def _size_axis(study: Study, low: float, high: float) -> Axis:
    second = size_text(study)
    label = f"pool size in blocks of {study.block_tokens} tokens"
    return Axis(low, high, log=True, label=label, second=second)


def _hit_curve(study: Study) -> Chart:
    curve = study.curve()
    dots = [
        (result.n_blocks, result.block_hit_rate)
        for result in study.results
        if result.n_blocks >= study.reuse.longest
    ]
    low = min([curve[0][0], *(x for x, _ in dots)])
    high = max([curve[-1][0] * 1.3, *(x * 1.2 for x, _ in dots)])
    top = _round_up(max(study.ceiling, 0.01) * 1.12)
    chart = Chart(
        "Hit rate by pool size", _size_axis(study, low, high), Axis(0, top, text=percent), "curve"
    )
    chart.level(study.ceiling, "muted", f"everything kept: {percent(study.ceiling)}")
    optimal = study.policy_hits.get("optimal")
    if optimal:
        total = max(study.reuse.blocks, 1)
        points = [(s, h / total) for s, h in zip(study.policy_sizes, optimal, strict=True)]
        chart.line(points, "green", "best possible", width=1.8, dashed=True)
    chart.line([*curve, (int(high), curve[-1][1])], "blue", "LRU, every size", area=True)
    chart.dots(dots, "ink", "replayed")
    return chart


def _about_curve(study: Study) -> str:
    knees = dict(study.knees())
    text = (
        "The line is exact for one request after the other: a block counts where a pool of that "
        "size still holds it. The rings are replays through a real pool"
        + (
            f", {study.settings.get('in_flight')} requests in flight. "
            if study.primary.clock == "in flight"
            else ", with the times of the trace. "
        )
        + f"Half of all that can be hit takes {count(knees[0.5])} blocks, nine tenths "
        f"{count(knees[0.9])}."
    )
    if study.policy_hits.get("optimal"):
        text += " The dashed line knows the future: no order of eviction gets above it."
    return text


def _policies(study: Study) -> Chart:
    total = max(study.reuse.blocks, 1)
    sizes = study.policy_sizes
    top = _round_up(max(max(hits) for hits in study.policy_hits.values()) / total * 1.08)
    chart = Chart(
        "Other orders of eviction",
        _size_axis(study, sizes[0], sizes[-1]),
        Axis(0, top, text=percent),
        "policies",
    )
    for name, color in POLICY_COLORS.items():
        if name in study.policy_hits:
            points = [(s, h / total) for s, h in zip(sizes, study.policy_hits[name], strict=True)]
            own = name == "lru"
            chart.line(points, color, name, width=3 if own else 1.8, dashed=name == "optimal")
    return chart


def _about_policies(study: Study) -> str:
    gains = []
    lru = study.policy_hits.get("lru", [])
    for name, hits in study.policy_hits.items():
        if name in ("lru", "optimal"):
            continue
        best = max(
            ((n - own, i) for i, (n, own) in enumerate(zip(hits, lru, strict=False))),
            default=(0, 0),
        )
        if best[0] > 0:
            gains.append((best[0], name, study.policy_sizes[best[1]], lru[best[1]]))
    if not gains:
        return "Simulated one request after the other. None of them beats LRU here at any size."
    gain, name, size, base = max(gains)
    points = 100 * gain / max(study.reuse.blocks, 1)
    return (
        "Simulated one request after the other. The largest gain over LRU that does not know the "
        f"future: {name} at {count(size)} blocks, {points:.1f} points"
        + (f" ({gain / base:.0%} more hits)." if base else ".")
    )


def _occupancy(study: Study) -> Chart:
    result = study.primary
    points = list(result.occupancy.points(180))
    real = result.clock == "real time"
    end = max(points[-1][0] if points else 1, 1e-9)
    begin = points[0][0] if points else 0
    if real:
        scale, unit = next(
            (s, u) for s, u in ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
            if end >= 2 * s or s == 1
        )  # fmt: skip
        x = Axis(begin / scale, end / scale, label=f"{unit} since the first request")
    else:
        scale, x = 1, Axis(begin, end, label="requests so far")
    peak = max(result.occupancy.peak, 1)
    show_limit = peak > 0.5 * result.n_blocks
    high = result.n_blocks * 1.1 if show_limit else peak * 1.15
    chart = Chart(f"Blocks in use, of {count(result.n_blocks)}", x, Axis(0, high), "occupancy")
    chart.line([(at / scale, top) for at, _, top in points], "amber", "peak", width=1.2)
    chart.line([(at / scale, mean) for at, mean, _ in points], "blue", "mean", area=True, width=2)
    if show_limit:
        chart.level(result.n_blocks, "muted", "the whole pool")
    return chart


def _about_occupancy(study: Study) -> str:
    result = study.primary
    share = result.occupancy.mean / max(result.n_blocks, 1)
    text = (
        f"Blocks that running requests hold, in the pool of {count(result.n_blocks)}: "
        f"{percent(share)} of it in the mean, {count(result.occupancy.peak)} at the peak. The rest "
        "caches."
    )
    if result.clock == "real time":
        text += f" {result.waited:,} requests had to wait, {result.preemptions:,} were preempted."
    return text


def _distances(study: Study) -> Chart:
    size, reuse = study.primary.n_blocks, study.reuse
    edges = [1]
    while edges[-1] < max(reuse.size_for(reuse.seen_before), 2):
        edges.append(edges[-1] * 2)
    total = max(reuse.seen_before, 1)
    inside, outside = [], []
    for a in edges[:-1]:
        b = 2 * a
        low, mid, high = (
            int(reuse.hits(n)) for n in (a - 1 if a > 1 else 0, min(max(size, a - 1), b - 1), b - 1)
        )
        inside.append((a, b, (mid - low) / total))
        outside.append((a, b, (high - low) / total if b - 1 > size else 0.0))
    top = _round_up(max(max(h for *_, h in outside), max(h for *_, h in inside)) * 1.1)
    x = Axis(1, edges[-1], log=True, label="blocks used since (reuse distance)")
    chart = Chart("How far back reuse reaches", x, Axis(0, top, text=percent), "distances")
    chart.bars(outside, "amber", f"lost with {count(size)} blocks")
    chart.bars(inside, "blue", "held")
    return chart


def _about_distances(study: Study) -> str:
    reuse = study.reuse
    once = 1 - reuse.seen_before / max(reuse.blocks, 1)
    return (
        f"Of all block uses {percent(once)} are new, and no pool can hit them. The others, by how "
        "many different blocks were used in between: a pool of LRU order holds those up to its own "
        "size."
    )


def _ages(age: LogHistogram) -> Chart:
    total = max(age.total, 1)
    bars = [(begin, end, n / total) for begin, end, n in age.bars() if begin > 0]
    low, high = bars[0][0], bars[-1][1]
    ticks = [t for t in _TIMES if low <= t <= high]
    shares = [h for *_, h in bars]
    if age.zeros:  # requests with the same time: a bar of its own, before the axis begins
        bars.append((low / 4, low / 2, age.zeros / total))
        shares.append(bars[-1][2])
        ticks.insert(0, low / 8**0.5)
        low /= 4

    def text(seconds: float) -> str:
        return "0" if age.zeros and seconds < low * 2 else duration(seconds)

    x = Axis(low, high, log=True, label="time since the last use", text=text, ticks=ticks)
    chart = Chart(
        "Age of what was hit", x, Axis(0, _round_up(max(shares) * 1.1), text=percent), "ages"
    )
    chart.bars(bars, "teal", "share of hits")
    return chart


def _about_ages(study: Study) -> str:
    age = study.reuse.hit_age_s
    text = (
        f"Half of the hits in the pool of {count(study.primary.n_blocks)} blocks are on something "
        f"used within {duration(age.quantile(0.5))}, nine tenths within "
        f"{duration(age.quantile(0.9))}."
    )
    kept = study.reuse.retention_s.get(study.primary.n_blocks)
    if kept is not None and kept.total:
        text += f" A block that nobody uses stays for about {duration(kept.quantile(0.5))}."
    return text


def _waiting(study: Study) -> Chart:
    points = list(study.primary.waiting.points(180))
    end = max(points[-1][0], 1e-9)
    scale, unit = (
        (3600, "hours") if end > 7200 else (60, "minutes") if end > 120 else (1, "seconds")
    )
    x = Axis(0, end / scale, label=f"{unit} since the first request")
    chart = Chart("Requests waiting", x, Axis(0, study.primary.waiting.peak * 1.1), "waiting")
    chart.line([(at / scale, peak) for at, _, peak in points], "pink", "peak", area=True, width=1.4)
    return chart


def _round_up(x: float) -> float:
    """The next value an axis can end at: 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten."""
    if x <= 0:
        return 1.0
    power = 10.0 ** len(str(int(x))) / 10 if x >= 1 else 1.0
    while power > x:
        power /= 10
    return next(power * m for m in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if power * m >= x)
