"""The charts as one picture, by matplotlib: for papers and slides."""

from __future__ import annotations

from typing import Any

from .charts import COLORS
from .errors import MissingPackage, TraceError
from .figures import POLICY_COLORS
from .study import Study

__all__ = ["plot"]


def plot(study: Study, path: str) -> None:
    """Writes a picture; its kind follows the name: .png, .svg, .pdf.

    Raises MissingPackage without matplotlib, TraceError when the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage.of("matplotlib", "pictures", "plot") from error

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2)
    figure.suptitle(f"{study.name}: {study.reuse.requests:,} requests")
    _curve(study, axes[0, 0])
    _occupancy(study, axes[0, 1])
    _bars(study.reuse.depth_histogram.bars(), axes[1, 0], "reuse distance (blocks)", "blue")
    _bars(study.reuse.hit_age_s.bars(), axes[1, 1], "age of hits (s)", "teal")
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def _color(name: str) -> str:
    return COLORS[name][0]


def _curve(study: Study, ax: Any) -> None:
    total = max(study.reuse.blocks, 1)
    sizes, rates = zip(*study.curve(), strict=True)
    for name, hits in study.policy_hits.items():
        if name != "lru":
            ax.plot(
                study.policy_sizes, [100 * h / total for h in hits],
                color=_color(POLICY_COLORS[name]), lw=1.2, label=name,
                ls="--" if name == "optimal" else "-",
            )  # fmt: skip
    ax.plot(sizes, [100 * r for r in rates], color=_color("blue"), lw=2.2, label="lru, every size")
    dots = [(r.n_blocks, 100 * r.block_hit_rate) for r in study.results]
    ax.plot(*zip(*dots, strict=True), "o", mfc="white", color=_color("ink"), label="replayed")
    ax.axhline(100 * study.ceiling, color=_color("muted"), ls=":", lw=1)
    ax.set(xscale="log", xlabel=f"pool size (blocks of {study.block_tokens})")
    ax.set(ylabel="blocks hit (%)", ylim=(0, None))
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)


def _occupancy(study: Study, ax: Any) -> None:
    points = list(study.primary.occupancy.points())
    real = study.primary.clock == "real time"
    at = [t / 3600 if real else t for t, _, _ in points]
    ax.plot(at, [peak for _, _, peak in points], color=_color("amber"), lw=0.8, label="peak")
    ax.plot(at, [mean for _, mean, _ in points], color=_color("blue"), lw=1.2, label="mean")
    ax.set(xlabel="hours" if real else "requests", ylabel="blocks in use", ylim=(0, None))
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)


def _bars(bars: list[tuple[float, float, int]], ax: Any, label: str, color: str) -> None:
    shown = [bar for bar in bars if bar[0] > 0]
    if shown:
        ax.bar(
            [a for a, _, _ in shown], [n for *_, n in shown],
            width=[(b - a) * 0.92 for a, b, _ in shown], align="edge", color=_color(color),
        )  # fmt: skip
    ax.set(xscale="log", xlabel=label, ylabel="block uses")
    ax.grid(alpha=0.3, axis="y")
