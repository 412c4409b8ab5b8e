"""What `ol` prints: tables, marks and progress on a terminal, plain text in a pipe.

With ``rich`` installed and a terminal to write to, tables are drawn and words are coloured. Without
either the same lines come out as plain text. With ``--json`` nothing is printed but one JSON
document at the end.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["Progress", "Screen"]

_PIPE_WIDTH = 120
_STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "dim": "dim", "head": "bold"}


class Progress:
    """Counts what is done on one line of a terminal; silent elsewhere."""

    def __init__(self, stream: TextIO | None, label: str, total: int) -> None:
        self._stream, self._label, self._total, self._done = stream, label, total, 0
        self._draw()

    def step(self) -> None:
        """One more is done. May be called from any thread."""
        self._done += 1
        self._draw()

    def _draw(self) -> None:
        if self._stream is not None:
            self._stream.write(f"\r{self._label} {self._done}/{self._total}\x1b[K")
            self._stream.flush()

    def clear(self) -> None:
        if self._stream is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class Screen:
    """Writes to stdout; every method is silent under ``--json``."""

    def __init__(self, *, as_json: bool = False, stream: TextIO | None = None) -> None:
        self.as_json = as_json
        self._stream = stream if stream is not None else sys.stdout
        terminal = self._stream.isatty() and os.environ.get("TERM", "") != "dumb"
        self._terminal = terminal and not as_json
        self._console: Any = None
        if self._terminal and "NO_COLOR" not in os.environ:
            try:
                console = importlib.import_module("rich.console")
                self._console = console.Console(file=self._stream, highlight=False)
            except ImportError:
                pass  # plain text will do

    @property
    def width(self) -> int:
        return (
            shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns if self._terminal else _PIPE_WIDTH
        )

    def line(self, text: str = "", style: str = "") -> None:
        """One line, or several."""
        if self.as_json:
            return
        if self._console is not None:
            self._console.print(text, style=_STYLES.get(style), markup=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def head(self, text: str) -> None:
        self.line(text, "head")

    def wrapped(self, text: str, indent: str, style: str = "") -> None:
        """A paragraph, folded to the width; later lines stand under the first."""
        hanging = " " * len(indent)
        for part in textwrap.wrap(
            text,
            max(self.width, 40),
            initial_indent=indent,
            subsequent_indent=hanging,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [indent.rstrip()]:
            self.line(part, style)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table. Plain: columns side by side, folded so that the whole fits the width."""
        if self.as_json:
            return
        if self._console is not None:
            rich_table = importlib.import_module("rich.table").Table
            rich_text = importlib.import_module("rich.text").Text
            table = rich_table(header_style="bold")
            for column in columns:
                table.add_column(column, overflow="fold")
            for row in rows:
                table.add_row(*[rich_text(cell) for cell in row])
            self._console.print(table)
            return
        widths = _fit([columns, *rows], self.width)
        for row in [columns, ["-" * width for width in widths], *rows]:
            cells = [_fold(cell, width) for cell, width in zip(row, widths, strict=True)]
            for i in range(max(len(cell) for cell in cells)):
                parts = [
                    (cell[i] if i < len(cell) else "").ljust(width)
                    for cell, width in zip(cells, widths, strict=True)
                ]
                self._stream.write("  ".join(parts).rstrip() + "\n")
        self._stream.flush()

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Progress]:
        """A count on the terminal while something takes its time."""
        progress = Progress(self._stream if self._terminal else None, label, total)
        try:
            yield progress
        finally:
            progress.clear()

    def result(self, document: dict[str, Any]) -> None:
        """The JSON document of ``--json``; otherwise nothing."""
        if self.as_json:
            json.dump(document, self._stream, indent=2)
            self._stream.write("\n")


def _fold(text: str, width: int) -> list[str]:
    """Lines of a cell. Words stay whole, so that a name can be searched for."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _fit(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Column widths that fit, if the longest words let them: the widest columns give way first."""
    widths = [max([1, *map(len, column)]) for column in zip(*rows, strict=True)]
    least = [
        max([1, *(len(word) for cell in column for word in cell.split())])
        for column in zip(*rows, strict=True)
    ]
    room = width - 2 * (len(widths) - 1)
    while sum(widths) > room:
        able = [i for i, size in enumerate(widths) if size > least[i]]
        if not able:
            break
        widths[max(able, key=lambda i: widths[i])] -= 1
    return widths
