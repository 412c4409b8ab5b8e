"""Tables and bars for the commands: rich on a terminal that has it, plain text elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["clean", "parse_size", "print_table", "progress", "size_text"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def parse_size(text: str) -> int:
    """Bytes: 80GiB, 24 GB, 1.5TiB, 4096.

    >>> parse_size("1.5GiB"), parse_size("2GB"), parse_size("12")
    (1610612736, 2000000000, 12)
    """
    number = text.strip().rstrip("BbIiKkMmGgTt ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is no size such as 80GiB") from None
    if not 0 < size < 2**60:
        raise ValueError(f"{text!r} is not above 0 and below 2**60 bytes")
    return int(size)


def size_text(n_bytes: float) -> str:
    """GiB and so on.

    >>> size_text(131072), size_text(5 * 2**30)
    ('128 KiB', '5 GiB')
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.4g} {unit}"
    return f"{n_bytes:.4g} B"


def clean(text: str) -> str:
    """Without the control characters by which a name in a trace could steer the terminal.

    >>> clean("a\\x1b[2Jb")
    'a?[2Jb'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; the first column is text, the others are numbers, but those without a name.

    One that a terminal is too narrow for is turned on its side, or else wraps: no number is cut.
    """
    title, rows = clean(title), [[clean(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        try:
            from rich.box import SIMPLE_HEAD
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            pass
        else:
            console = Console(highlight=False)
            head, rows, width = _fitted(head, rows, console.width)
            table = Table(
                box=SIMPLE_HEAD, show_edge=False, pad_edge=False, title=Text(title),
                title_justify="left", title_style="bold",
            )  # fmt: skip
            for i, name in enumerate(head):
                table.add_column(
                    Text(name), justify="right" if i and (name or not any(head)) else "left"
                )
            for row in rows:
                table.add_row(*(Text(cell) for cell in row))
            console.width = max(console.width, width)
            console.print(table, width=width)
            console.print()
            return
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for line in lines:
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())
    print()


def _fitted(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> tuple[Sequence[str], Sequence[Sequence[str]], int]:
    """The table or its transpose, whichever fits, and the width it takes."""
    needs = []
    turned = list(zip(head, *rows, strict=True))
    for first, *others in ([head, *rows], turned):
        columns = zip(first, *others, strict=True)
        needs.append(sum(max(map(len, column)) for column in columns) + 3 * (len(first) - 1))
    if needs[0] > width >= needs[1]:
        return turned[0], turned[1:], needs[1]
    return head, rows, max(needs[0], 1)


Advance = Callable[[float, int, str], None]


@contextmanager
def progress(what: str, total: float | None) -> Iterator[Advance]:
    """Gives a callable (done, n, "requests"): a bar on stderr, with rate and time left.

    ``done`` is in the unit of ``total``; nothing is shown in a pipe, or without rich.
    """
    console: Any = None
    if sys.stderr is not None and sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            console = Console(stderr=True)
        except ImportError:
            console = None
    if console is None:
        yield lambda done, n, what: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%" if total else ""),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total, text="")
        begin, last = time.monotonic(), float("-inf")

        def advance(done: float, n: int, what: str) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last > 0.05:
                last = now
                text = f"{n:,} {what}, {n / max(now - begin, 1e-6):,.0f}/s"
                bar.update(task, completed=done, text=text)

        yield advance
