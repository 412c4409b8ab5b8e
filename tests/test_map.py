"""ARCHITECTURE.md names what is there: each unit of the runtime, each part of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src/kvpool"
PARTS = [
    *(path.name for path in sorted((ROOT / "c/src/runtime").glob("*.c"))),
    *(path.name for path in sorted(PACKAGE.glob("[!_]*.py"))),
    *(f"src/kvpool/{path.parent.name}/" for path in sorted(PACKAGE.glob("*/__init__.py"))),
]


@pytest.mark.parametrize("part", PARTS)
def test_the_map_names_every_part(part: str) -> None:
    assert f"`{part}`" in (ROOT / "ARCHITECTURE.md").read_text()
