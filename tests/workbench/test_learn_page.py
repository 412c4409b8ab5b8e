"""The code of docs/learn.md runs and says what the page says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/learn.md"


def test_the_worked_example_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "learn.md", str(PAGE), 0)
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    result = doctest.DocTestRunner(optionflags=flags).run(test)
    assert result.attempted > 30
    assert result.failed == 0


def test_the_page_names_every_command_of_the_chapter() -> None:
    text = PAGE.read_text()
    for command in ("start", "tests", "tdd red", "tdd green", "check", "diff"):
        assert re.search(rf"ol {command} rt\.04", text), command
    assert "ol parity kv.wire.v1" in text
    assert "the reference's own drivers: no workspace here" in " ".join(text.split())


def test_the_page_counts_no_lines_of_code() -> None:
    assert not re.search(r"\d+ lines", PAGE.read_text())
