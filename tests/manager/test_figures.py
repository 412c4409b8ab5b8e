"""The pictures of docs/prefix-caching.md are what the code does now."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"


def test_the_committed_figures_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, FIGURES / "prefix_caching.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.svg")), ids=lambda p: p.name)
def test_figures_are_well_formed_and_titled(path: Path) -> None:
    root = ET.parse(path).getroot()
    namespace = "{http://www.w3.org/2000/svg}"
    assert root.tag == namespace + "svg"
    assert (root.findtext(namespace + "title") or "").strip()
    page = (FIGURES.parent / "prefix-caching.md").read_text()
    assert not path.name.startswith("prefix-") or f"figures/{path.name}" in page
