"""JSON lines into typed rows, fast where all is well, and by name of the line where it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..errors import MissingPackage
from .source import Problems, Source

try:
    import msgspec
except ImportError as error:
    raise MissingPackage.of("msgspec", "JSON traces") from error

__all__ = ["Row", "json_rows", "msgspec"]

Row = msgspec.Struct


def json_rows(
    source: Source,
    decoder: Any,
    problems: Problems,
    why_bad: Callable[[Any], str | None],
    all_good: Callable[[list[Any]], Any] | None = None,
) -> Iterator[tuple[list[Any], Any]]:
    """Batches of decoded lines that ``why_bad`` says nothing about. Empty lines are left out.

    ``all_good`` looks at a whole batch at once: what it makes of it comes along, and None from it
    sends the lines through ``why_bad`` one by one.
    """
    for piece in source.pieces():
        good = None
        try:
            rows = decoder.decode_lines(piece.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            rows = None  # some line is bad: find it
        if rows is not None and all_good is not None:
            good = all_good(rows)
        if good is None and (rows is None or all_good is not None or any(map(why_bad, rows))):
            rows = list(_one_by_one(source.path, piece, decoder, problems, why_bad))
        if rows:
            yield rows, good


def _one_by_one(
    path: str, piece: Any, decoder: Any, problems: Problems, why_bad: Callable[[Any], str | None]
) -> Iterator[Any]:
    for number, line in enumerate(piece.data.split(b"\n"), start=piece.line):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            problems.add(path, number, str(error))
            continue
        why = why_bad(row)
        if why is None:
            yield row
        else:
            problems.add(path, number, why)
