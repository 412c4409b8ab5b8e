"""The figure and the tables of docs/engine.md are what the code does now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import engine_support  # noqa: F401  (skips without the model extra)

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"


def test_the_committed_trace_and_tables_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, FIGURES / "engine.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
