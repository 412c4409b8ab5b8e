"""`ol start`, `ol tests`, usage errors: everything that needs no compiler."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.workbench.assets import OWN_TESTS, POOL_C, Assets, templates
from kvpool.workbench.workspace import Workspace

from .workbench_support import Ol, OlJson


def test_start_makes_a_workspace_with_a_stub_headers_and_an_example(workspace: Path) -> None:
    text = (workspace / POOL_C).read_text()
    assert 'tl_set_last_error("tl_kv_alloc: not written yet");' in text
    headers = {path.name for path in (workspace / "c/include/tinyllm").iterdir()}
    assert headers == {"abi.h", "ds.h", "kv_pool.h", "numerics.h"}
    assert [path.name for path in (workspace / OWN_TESTS).iterdir()] == ["example.c"]
    assert "Three passes" in (workspace / "README.md").read_text()


def test_start_never_overwrites_without_force(workspace: Path, ol: Ol) -> None:
    mine = workspace / POOL_C
    mine.write_text("/* three days of work */")
    code, text = ol("start", "rt.04", "--dir", workspace)
    assert code == 2
    assert "--force" in text
    assert mine.read_text() == "/* three days of work */"
    test = workspace / OWN_TESTS / "my_test.c"
    test.write_text("/* mine */")
    code, _ = ol("start", "rt.04", "--dir", workspace, "--force")
    assert code == 0
    assert "not written yet" in mine.read_text()
    assert test.read_text() == "/* mine */"


def test_one_file_in_the_way_and_nothing_is_written(tmp_path: Path, ol: Ol) -> None:
    (tmp_path / "README.md").write_text("somebody's")
    code, text = ol("start", "rt.04", "--dir", tmp_path)
    assert code == 2
    assert "README.md" in text
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_the_stub_defines_every_function_of_the_header(assets: Assets) -> None:
    header = (assets.include / "tinyllm/kv_pool.h").read_text()
    stub = (templates() / "kv_pool.c").read_text()
    functions = set(re.findall(r"^TL_API [^;(]*?\b(tl_\w+)\(", header, re.MULTILINE))
    assert len(functions) == 19
    for name in functions:
        assert re.search(rf"^\w.*\b{name}\(", stub, re.MULTILINE), name
        assert f'"{name}: not written yet"' in stub, name


def test_the_catalogue_has_the_twenty_tests_and_the_pitfalls(ol_json: OlJson, ol: Ol) -> None:
    code, document = ol_json("tests", "rt.04")
    assert code == 0
    names = [test["name"] for test in document["tests"]]
    assert len(names) == 20
    assert names[0] == "hand_example_block_hash_chain"
    assert all(test["checks"] and test["why"] and test["kind"] for test in document["tests"])
    caught = {bug for test in document["tests"] for bug in test["catches"]}
    assert caught == set(document["pitfalls"])
    assert len(caught) == 32
    code, text = ol("tests", "rt.04")
    assert code == 0
    for name in names:
        assert name in text
    assert "\x1b" not in text  # a pipe gets plain text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "rt.05"], "no module rt.05"),
        (["diff", "L8.3"], "no file of its own"),
        (["parity", "kv.wire.v2"], "no suite kv.wire.v2"),
        (["parity", "kv.wire.v1", "--read"], "--driver"),
        (["tdd", "blue", "rt.04"], "blue"),
        (["frobnicate"], "frobnicate"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(ol: Ol, words: list[str], said: str) -> None:
    code, text = ol(*words)
    assert code == 2
    assert said in text


def test_a_folder_that_is_no_workspace_is_told_how_to_make_one(tmp_path: Path, ol: Ol) -> None:
    for words in (["check"], ["diff"], ["tdd", "red"]):
        code, text = ol(*words, "rt.04", "--dir", tmp_path)
        assert code == 2
        assert "ol start rt.04" in text


def test_a_workspace_is_found_from_below(workspace: Path) -> None:
    assert Workspace.find(workspace / OWN_TESTS).root == workspace.resolve()


def test_no_file_of_the_project_is_taken_for_a_workspace(assets: Assets) -> None:
    checkout = Path(__file__).resolve().parents[2]
    assert Workspace.at(checkout / "c/src/runtime") is None
    assert Workspace.at(assets.root) is None


def test_the_program_runs_as_a_module_and_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.workbench", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    for command in ("start", "tests", "check", "parity", "diff", "tdd"):
        assert command in done.stdout
    assert "exit code is the verdict" in done.stdout
