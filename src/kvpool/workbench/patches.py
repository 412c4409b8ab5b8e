"""Applies unified diffs: exactly, or not at all.

The planted bugs are patches, and a learner's machine may have neither ``patch`` nor ``git``. A
hunk's old lines have to be found word for word; they may have moved by any number of lines, as the
code around them changes. Where they are found more than once the nearest place wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["FilePatch", "PatchError", "apply", "parse"]

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """The diff is malformed, or its context is not in the file."""


@dataclass(frozen=True)
class Hunk:
    """Lines ``old`` of a file, from line ``at`` (0-based) if nothing moved, become ``new``."""

    at: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class FilePatch:
    """What a diff does to one file; ``path`` is without the leading ``a/`` or ``b/``."""

    path: str
    hunks: tuple[Hunk, ...]


def parse(text: str) -> list[FilePatch]:
    """The files of a unified diff, in order.

    >>> diff = "--- a/x.c\\n+++ b/x.c\\n@@ -1,2 +1,2 @@\\n one\\n-two\\n+2\\n"
    >>> [patch] = parse(diff)
    >>> patch.path, patch.hunks[0].old, patch.hunks[0].new
    ('x.c', ('one', 'two'), ('one', '2'))
    """
    files: list[FilePatch] = []
    path: str | None = None
    hunks: list[Hunk] = []
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        line = lines[i]
        if line.startswith("--- ") and i + 1 < len(lines) and lines[i + 1].startswith("+++ "):
            if path is not None:
                files.append(FilePatch(path, tuple(hunks)))
            path = re.sub(r"^b/", "", lines[i + 1][4:].split("\t")[0].strip())
            hunks = []
            i += 2
        elif header := _HUNK.match(line):
            if path is None:
                raise PatchError(f"line {i + 1}: a hunk before any file name")
            hunk, i = _hunk(lines, i + 1, header)
            hunks.append(hunk)
        else:
            i += 1  # prose before the first file, "index ..." lines
    if path is not None:
        files.append(FilePatch(path, tuple(hunks)))
    if not files or not all(f.hunks for f in files):
        raise PatchError("the diff changes nothing")
    return files


def _hunk(lines: list[str], i: int, header: re.Match[str]) -> tuple[Hunk, int]:
    n_old = 1 if header[2] is None else int(header[2])
    n_new = 1 if header[4] is None else int(header[4])
    old: list[str] = []
    new: list[str] = []
    while len(old) < n_old or len(new) < n_new:
        line = lines[i] if i < len(lines) else None
        if line is None or (line and line[0] not in " +-\\"):
            raise PatchError(f"line {i + 1}: the hunk is shorter than its header says")
        i += 1
        if line.startswith("\\"):  # "\ No newline at end of file"
            continue
        text = line[1:]
        if not line.startswith("+"):  # an empty line is an empty context line
            old.append(text)
        if not line.startswith("-"):
            new.append(text)
    return Hunk(int(header[1]) - (1 if n_old else 0), tuple(old), tuple(new)), i


def apply(patch: FilePatch, text: str) -> str:
    """``text`` with the patch applied. Raises :class:`PatchError` when a hunk is not found."""
    lines = text.split("\n")
    shift = 0  # how far the hunks so far have moved what follows
    for number, hunk in enumerate(patch.hunks, 1):
        wanted, size = list(hunk.old), len(hunk.old)
        expected = hunk.at + shift
        places = [i for i in range(len(lines) - size + 1) if lines[i : i + size] == wanted]
        if not places:
            raise PatchError(
                f"{patch.path}: hunk {number} (line {hunk.at + 1}) does not apply: "
                "its lines are not in the file"
            )
        at = min(places, key=lambda i: abs(i - expected))
        lines[at : at + size] = hunk.new
        shift = at - hunk.at + len(hunk.new) - size
    return "\n".join(lines)
