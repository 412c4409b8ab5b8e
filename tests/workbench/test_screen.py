"""Plain text in a pipe and without rich, tables and colour with it, one document under --json."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvpool.workbench
from kvpool.workbench.screen import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(screen: Screen) -> None:
    screen.line("a [bold]word[/bold]", "bad")
    screen.table(["name", "what"], [["x", "one"], ["y", "two"]])
    with screen.progress("building", 2) as progress:
        progress.step()


def test_a_pipe_gets_plain_text() -> None:
    out = io.StringIO()
    show(Screen(stream=out))
    assert out.getvalue() == ("a [bold]word[/bold]\nname  what\n----  ----\nx     one\ny     two\n")


def test_a_terminal_with_rich_gets_colour_and_markup_is_not_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    show(Screen(stream=out))
    assert "\x1b[" in out.getvalue()
    assert "[bold]word[/bold]" in out.getvalue()
    assert "building 1/2" in out.getvalue()


def test_a_terminal_without_rich_gets_plain_tables_and_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    out = Terminal()
    show(Screen(stream=out))
    assert "x     one" in out.getvalue()
    assert "building 1/2" in out.getvalue()


def test_json_is_one_document_and_nothing_else() -> None:
    out = Terminal()
    screen = Screen(as_json=True, stream=out)
    show(screen)
    screen.result({"passed": True})
    assert json.loads(out.getvalue()) == {"passed": True}


def test_tables_fold_cells_but_never_a_name() -> None:
    out = io.StringIO()
    name = "a_name_that_somebody_will_search_for" * 2
    Screen(stream=out).table(["test", "why"], [[name, "words " * 60]])
    lines = out.getvalue().splitlines()
    assert any(name in line for line in lines)
    assert max(map(len, lines)) <= 120


def test_a_closed_stdout_is_one_line() -> None:
    ol = [sys.executable, "-m", "kvpool.workbench", "tests", "rt.04"]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *ol]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stderr == "ol: stdout is closed\n"


# L8.3 is a course in Python: its suite is about the package. `ol` imports it for that alone.
OF_THE_PACKAGE = {"cache_suite.py", "ownpool.py"}


def test_the_workbench_imports_nothing_else_of_the_package() -> None:
    package = Path(kvpool.workbench.__file__).parent
    for path in sorted(set(package.glob("*.py")) - {package / name for name in OF_THE_PACKAGE}):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, path.name
                assert node.level == 1 or (node.module or "").split(".")[0] != "kvpool", path.name
            elif isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
                assert roots <= set(sys.stdlib_module_names), path.name


def test_only_the_course_of_the_cache_needs_the_package() -> None:
    code = "import sys, kvpool.workbench.app; print(*(m for m in sys.modules if 'workbench' in m))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    names = {name.rpartition(".")[2] for name in loaded.stdout.split()}
    assert "app" in names
    assert not names & {"cache_check", "cache_suite", "ownpool"}
