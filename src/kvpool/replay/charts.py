"""Charts as SVG: lines, areas, dots and bars on two axes, with a legend. No script, no font files.

Colours are CSS variables, so that a page can turn them dark; a picture by itself carries its own
(``standalone``). Widths are in CSS pixels: a page shows a narrow drawing on a phone and a wide one
elsewhere, so that letters have their size on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

__all__ = ["COLORS", "Axis", "Chart", "count", "duration", "percent"]

COLORS = {
    "ink": ("#17202b", "#e8edf3"),
    "muted": ("#5b6878", "#9aa7b6"),
    "grid": ("#e3e8ee", "#2b3541"),
    "paper": ("#ffffff", "#161c24"),
    "blue": ("#1d63d8", "#6ea8ff"),
    "green": ("#0a8754", "#3ecf8e"),
    "amber": ("#c2700a", "#f0b14a"),
    "violet": ("#7a3fd0", "#b594ff"),
    "pink": ("#c92a6a", "#ff85b3"),
    "teal": ("#0b7f8c", "#4fd0dd"),
}
_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"

Point = tuple[float, float]


def count(x: float) -> str:
    """12k, 3.5M: two digits and a unit.

    >>> count(950), count(12_000), count(3_500_000), count(0)
    ('950', '12k', '3.5M', '0')
    """
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= scale * 0.9995:
            return f"{x / scale:.3g}{unit}"
    return f"{x:.3g}"


def percent(x: float) -> str:
    """A share.

    >>> percent(0.125), percent(0.3)
    ('12.5%', '30%')
    """
    return f"{100 * x:.3g}%"


def duration(seconds: float) -> str:
    """The nearest of ms, s, min, h, d.

    >>> duration(0.02), duration(90), duration(7200)
    ('20 ms', '1.5 min', '2 h')
    """
    if seconds == 0:
        return "0 s"
    for scale, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


class Axis:
    """A scale from ``low`` to ``high``, straight or logarithmic, and its ticks."""

    def __init__(
        self,
        low: float,
        high: float,
        *,
        log: bool = False,
        label: str = "",
        text: Callable[[float], str] = count,
        second: Callable[[float], str] | None = None,
        ticks: Sequence[float] | None = None,
    ) -> None:
        self.low, self.high, self.log = low, high if high > low else low + 1, log
        self.label, self.text, self.second = label, text, second
        self._ticks = ticks

    def place(self, x: float) -> float:
        """0 at low, 1 at high; outside it is cut."""
        if self.log:
            x, low, high = (math.log(max(v, 1e-300)) for v in (x, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(max((x - low) / (high - low), 0.0), 1.0)

    def ticks(self, n: int) -> list[float]:
        """About n round values."""
        if self._ticks is not None:
            skip = max(1, math.ceil(len(self._ticks) / max(n, 1)))
            return list(self._ticks)[::skip]
        if not self.log:
            raw = (self.high - self.low) / max(n, 1)
            unit = 10.0 ** math.floor(math.log10(raw))
            step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
            first = math.ceil(self.low / step - 1e-9)
            return [i * step for i in range(first, int(self.high / step + 1e-9) + 1)]
        decades = math.log10(self.high / self.low)
        factors = (1, 2, 5) if decades * 3 <= n + 1 else (1, 3) if decades * 2 <= n + 1 else (1,)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        every = max(1, math.ceil(decades / max(n, 1)))
        found = [f * 10.0**e for e in range(first, last + 1, every) for f in factors]
        return [x for x in found if self.low * 0.999 <= x <= self.high * 1.001]


class Chart:
    """Collects what is to be drawn; ``svg`` draws it at a width.

    >>> chart = Chart("Hits", Axis(1, 100, log=True), Axis(0, 1, text=percent))
    >>> chart.line([(1, 0.1), (100, 0.9)], "blue", "LRU")
    >>> "<path" in chart.svg(400) and "LRU" in chart.svg(400)
    True
    """

    def __init__(self, title: str, x: Axis, y: Axis, name: str = "") -> None:
        self.title, self.x, self.y, self.name = title, x, y, name
        self._legend: list[tuple[str, str, str]] = []  # kind, color, text
        self._shapes: list[Callable[[_Frame], str]] = []

    def line(
        self,
        points: Sequence[Point],
        color: str,
        text: str = "",
        *,
        width: float = 2.2,
        dashed: bool = False,
        area: bool = False,
        steps: bool = False,
    ) -> None:
        """A line through the points; ``area`` fills what is under it."""
        if text:
            self._legend.append(("dash" if dashed else "line", color, text))
        points = list(points)
        dash = " stroke-dasharray='5 4'" if dashed else ""

        def draw(frame: _Frame) -> str:
            places = [frame.at(x, y) for x, y in points]
            if not places:
                return ""
            d = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
            for x, y in places[1:]:
                d += f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}"
            fill = ""
            if area:
                bottom = frame.bottom
                end = f"L{places[-1][0]:.1f} {bottom:.1f}L{places[0][0]:.1f} {bottom:.1f}Z"
                fill = f"<path d='{d}{end}' fill='var(--{color})' opacity='.13'/>"
            return (
                f"{fill}<path d='{d}' fill='none' stroke='var(--{color})' stroke-width='{width}' "
                f"stroke-linejoin='round' stroke-linecap='round'{dash}/>"
            )

        self._shapes.append(draw)

    def dots(self, points: Sequence[Point], color: str, text: str = "") -> None:
        """A ring at each point."""
        if text:
            self._legend.append(("dot", color, text))
        points = list(points)

        def draw(frame: _Frame) -> str:
            rings = ""
            for x, y in points:
                cx, cy = frame.at(x, y)
                rings += (
                    f"<circle cx='{cx:.1f}' cy='{cy:.1f}' r='4.5' fill='var(--paper)' "
                    f"stroke='var(--{color})' stroke-width='2.2'/>"
                )
            return rings

        self._shapes.append(draw)

    def level(self, y: float, color: str, text: str) -> None:
        """A dashed line at one height, with its text on it."""

        def draw(frame: _Frame) -> str:
            _, cy = frame.at(self.x.low, y)
            above = cy - frame.top > 18
            return (
                f"<path d='M{frame.left:.1f} {cy:.1f}H{frame.right:.1f}' fill='none' "
                f"stroke='var(--{color})' stroke-width='1.4' stroke-dasharray='3 4'/>"
                f"<text x='{frame.left + 6:.1f}' y='{cy - 6 if above else cy + 15:.1f}' "
                f"class='s' fill='var(--{color})'>{escape(text)}</text>"
            )

        self._shapes.append(draw)

    def bars(self, bars: Sequence[tuple[float, float, float]], color: str, text: str = "") -> None:
        """(from, to, height) each."""
        if text:
            self._legend.append(("box", color, text))
        bars = list(bars)

        def draw(frame: _Frame) -> str:
            shapes = ""
            for begin, end, height in bars:
                x0, y0 = frame.at(begin, height)
                x1, _ = frame.at(end, height)
                if x1 - x0 < 0.5 or height <= 0:
                    continue
                shapes += (
                    f"<rect x='{x0 + 1:.1f}' y='{y0:.1f}' width='{max(x1 - x0 - 2, 1):.1f}' "
                    f"height='{frame.bottom - y0:.1f}' rx='2' fill='var(--{color})'/>"
                )
            return shapes

        self._shapes.append(draw)

    def svg(self, width: int, *, standalone: bool = False, css: str = "") -> str:
        """The drawing, ``width`` pixels wide."""
        narrow = width < 500
        legend, legend_height = self._draw_legend(width)
        second = self.x.second is not None
        left, right = (44 if narrow else 52), width - (12 if narrow else 18)
        top = 14 + legend_height
        bottom = top + (210 if narrow else 270)
        height = bottom + 24 + (16 if second else 0) + (22 if self.x.label else 4)
        frame = _Frame(self.x, self.y, left, right, top, bottom)
        parts = [legend]
        for y in self.y.ticks(4 if narrow else 5):
            _, cy = frame.at(self.x.low, y)
            parts.append(f"<path d='M{left} {cy:.1f}H{right}' stroke='var(--grid)'/>")
            parts.append(_text(left - 7, cy + 4, self.y.text(y), "end"))
        for x in self.x.ticks(4 if narrow else 8):
            cx, _ = frame.at(x, self.y.low)
            label = self.x.text(x)
            half = 3.4 * max(len(label), len(self.x.second(x)) if self.x.second else 0)
            anchor = "end" if cx + half > width else "middle"
            at = width - 2 if anchor == "end" else cx
            parts.append(f"<path d='M{cx:.1f} {bottom}v5' stroke='var(--muted)'/>")
            parts.append(_text(at, bottom + 19, label, anchor))
            if self.x.second is not None:
                parts.append(_text(at, bottom + 35, self.x.second(x), anchor, "s"))
        parts += [shape(frame) for shape in self._shapes]
        parts.append(
            f"<path d='M{left} {bottom}H{right}' stroke='var(--muted)' stroke-width='1.2'/>"
        )
        if self.x.label:
            parts.append(_text((left + right) / 2, height - 6, self.x.label, "middle", "s"))
        style = _style() if standalone else ""
        paper = (
            f"<rect width='{width}' height='{height}' fill='var(--paper)'/>" if standalone else ""
        )
        data = f" data-left='{left}' data-right='{right}' data-top='{top}' data-bottom='{bottom}'"
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' role='img' class='chart {css}'{data}>"
            f"<title>{escape(self.title)}</title>{style}{paper}{''.join(parts)}</svg>"
        )

    def _draw_legend(self, width: int) -> tuple[str, int]:
        x, y, parts = 8.0, 14.0, []
        for kind, color, text in self._legend:
            need = 34 + 6.7 * len(text)
            if x > 8 and x + need > width:
                x, y = 8.0, y + 20
            fill = f"var(--{color})"
            if kind in ("line", "dash"):
                dash = " stroke-dasharray='5 3'" if kind == "dash" else ""
                parts.append(
                    f"<path d='M{x} {y - 4}h18' stroke='{fill}' stroke-width='2.6'{dash}/>"
                )
            elif kind == "dot":
                parts.append(
                    f"<circle cx='{x + 9}' cy='{y - 4}' r='4.5' fill='var(--paper)' "
                    f"stroke='{fill}' stroke-width='2.2'/>"
                )
            else:
                parts.append(
                    f"<rect x='{x + 3}' y='{y - 10}' width='12' height='12' rx='2' fill='{fill}'/>"
                )
            parts.append(_text(x + 24, y, text, "start", "l"))
            x += need
        return "".join(parts), int(y) + 6 if self._legend else 0


class _Frame:
    """Where values lie in the drawing."""

    def __init__(
        self, x: Axis, y: Axis, left: float, right: float, top: float, bottom: float
    ) -> None:
        self.x, self.y = x, y
        self.left, self.right, self.top, self.bottom = left, right, top, bottom

    def at(self, x: float, y: float) -> Point:
        return (
            self.left + self.x.place(x) * (self.right - self.left),
            self.bottom - self.y.place(y) * (self.bottom - self.top),
        )


def _text(x: float, y: float, text: str, anchor: str, css: str = "t") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' class='{css}'>{escape(text)}</text>"
    )


TEXT_CSS = (
    f"text{{font-family:{_FONT};font-size:12px;fill:var(--muted)}}"
    "text.l{fill:var(--ink);font-size:12.5px}text.s{font-size:11.5px}"
)


def _style() -> str:
    colors = ";".join(f"--{name}:{light}" for name, (light, _) in COLORS.items())
    return f"<style>svg{{{colors}}}{TEXT_CSS}</style>"
