"""The catalogue of a test program, read from its source.

``--catalog`` of the built program says the same; reading the source needs no compiler. A test of
ours compares the two.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["CatalogEntry", "read_catalog", "test_names"]

_STRING = r'"(?:[^"\\]|\\.)*"'
_TEXT = rf"(?:{_STRING}\s*)+"
_DOC = re.compile(
    rf"TL_TEST_DOC\(\s*(\w+)\s*,\s*({_TEXT}),\s*({_TEXT}),\s*({_TEXT}),\s*({_TEXT})\)"
)
_NAME = re.compile(r"^\s*TL_TEST(?:_DOC)?\(\s*(\w+)", re.MULTILINE)
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True)
class CatalogEntry:
    """One test, for people: what kind it is, what it checks, why, and the bugs it must catch."""

    name: str
    kind: str
    checks: str
    why: str
    catches: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "catches": list(self.catches)}


def _text(literals: str) -> str:
    """The value of adjacent C string literals; the sources use no escape but \\" and \\\\."""
    parts = re.findall(_STRING, literals)
    return "".join(_ESCAPE.sub(r"\1", part[1:-1]) for part in parts)


def read_catalog(source: Path) -> list[CatalogEntry]:
    """The documented tests of a C file, in its order."""
    text = source.read_text(encoding="utf-8")
    return [
        CatalogEntry(m[1], _text(m[2]), _text(m[3]), _text(m[4]), tuple(_text(m[5]).split()))
        for m in _DOC.finditer(text)
    ]


def test_names(sources: list[Path]) -> list[str]:
    """The names of all tests in C files, documented or not."""
    return [name for path in sources for name in _NAME.findall(path.read_text("utf-8", "replace"))]
