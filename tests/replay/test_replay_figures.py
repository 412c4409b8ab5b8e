"""The pictures and tables of docs/sizing.md are what the code makes of the real trace now."""

from __future__ import annotations

import subprocess
import sys

from replay_support import ROOT, conversation


def test_the_committed_figures_and_tables_are_up_to_date() -> None:
    script = ROOT / "docs" / "figures" / "sizing.py"
    done = subprocess.run(
        [sys.executable, script, conversation(), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_shows_every_picture() -> None:
    page = (ROOT / "docs" / "sizing.md").read_text()
    names = [path.name for path in (ROOT / "docs" / "figures").glob("sizing-*.svg")]
    assert len(names) == 5
    for name in names:
        assert f"figures/{name}" in page
