"""As much SVG as the figures need: text, boxes, arrows. The same bytes anywhere."""

from __future__ import annotations

from xml.sax.saxutils import escape

__all__ = ["INK", "MUTED", "Drawing"]

INK, MUTED, PAPER = "#1f2933", "#5c6b7a", "#ffffff"
_FONT = "font-family='ui-sans-serif, system-ui, Helvetica, Arial, sans-serif'"
_MONO = "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, monospace'"


class Drawing:
    """Collects shapes; `text()` is the file."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        stroke: str = INK,
        *,
        dashed: bool = False,
        radius: float = 6,
    ) -> None:
        dash = " stroke-dasharray='4 3'" if dashed else ""
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{radius:g}' "
            f"fill='{fill}' stroke='{stroke}' stroke-width='1.3'{dash}/>"
        )

    def label(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        color: str = INK,
        anchor: str = "start",
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        weight = " font-weight='600'" if bold else ""
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' {_MONO if mono else _FONT} font-size='{size}' "
            f"fill='{color}' text-anchor='{anchor}'{weight}>{escape(text)}</text>"
        )

    def path(self, d: str, *, color: str = INK, arrow: bool = True, dashed: bool = False) -> None:
        head = " marker-end='url(#arrow)'" if arrow else ""
        dash = " stroke-dasharray='4 3'" if dashed else ""
        self.parts.append(
            f"<path d='{d}' fill='none' stroke='{color}' stroke-width='1.5'{dash}{head}/>"
        )

    def text(self) -> str:
        return "\n".join(
            [
                f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' "
                f"width='{self.width}' height='{self.height}' role='img'>",
                f"<title>{escape(self.title)}</title>",
                "<defs><marker id='arrow' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' "
                "markerHeight='7' orient='auto-start-reverse'>"
                f"<path d='M0 0 L10 5 L0 10 z' fill='{INK}'/></marker></defs>",
                f"<rect width='{self.width}' height='{self.height}' fill='{PAPER}'/>",
                *self.parts,
                "</svg>\n",
            ]
        )
