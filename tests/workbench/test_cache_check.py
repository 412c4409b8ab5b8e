"""`ol check L8.3`: the paged cache's tests over a learner's pool, and over the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.workbench.assets import POOL_C, Assets
from kvpool.workbench.cache_suite import TESTS, main
from kvpool.workbench.workspace import Workspace

from .test_check import insert, mutate
from .workbench_support import Ol, OlJson, needs_compiler

NEEDS = "needs rt.04: build it, or pass --ref-deps"


def test_without_a_workspace_it_stops(tmp_path: Path, ol: Ol) -> None:
    assert ol("check", "L8.3", "--dir", tmp_path) == (1, NEEDS + "\n")


@needs_compiler
def test_a_pool_that_has_not_passed_is_not_used(solved: Path, ol: Ol, ol_json: OlJson) -> None:
    assert ol("check", "L8.3", "--dir", solved) == (1, NEEDS + "\n")
    code, document = ol_json("check", "L8.3", "--dir", solved)
    assert code == 1
    assert (document["passed"], document["needs"], document["error"]) == (False, "rt.04", NEEDS)
    Workspace.find(solved).remember(True)
    with (solved / POOL_C).open("a") as file:
        file.write("/* changed since */\n")
    assert ol("check", "L8.3", "--dir", solved) == (1, NEEDS + "\n")


@needs_compiler
def test_a_pool_that_has_passed_passes(solved: Path, ol: Ol, ol_json: OlJson) -> None:
    Workspace.find(solved).remember(True)
    code, text = ol("check", "L8.3", "--dir", solved)
    assert code == 0, text
    assert f"{len(TESTS)} of {len(TESTS)} tests passed, over your pool" in text
    assert text.rstrip().endswith("PASSED")
    code, document = ol_json("check", "L8.3", "--dir", solved)
    assert (code, document["pool"], document["passed"]) == (0, "workspace", True)
    assert [test["name"] for test in document["tests"]] == list(TESTS)


def test_the_reference_serves_anywhere(tmp_path: Path, ol: Ol, ol_json: OlJson) -> None:
    code, text = ol("check", "L8.3", "--ref-deps", "--dir", tmp_path)
    assert code == 0, text
    assert "over the reference's pool" in text
    code, document = ol_json("check", "L8.3", "--ref-deps", "--dir", tmp_path)
    assert (code, document["pool"], document["not_run"]) == (0, "reference", [])


# The pitfalls of the chapter that a cache can see: what a block holds, who shares it, who gets it.
BUGS = {
    "s14": "cached_blocks_make_room",  # evictions are not counted
    "s15": "a_fork_shares_until_it_writes",  # copy on write keeps the writer's reference
    "s16": "a_fork_shares_until_it_writes",  # a shared block is written in place
    "s19": "what_is_appended_is_gathered",  # K and V share one slab
}


@needs_compiler
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_pool_is_caught(bug: str, solved: Path, assets: Assets, ol: Ol) -> None:
    mutate(solved, assets, bug)
    Workspace.find(solved).remember(True)  # as if rt.04 had not noticed
    code, text = ol("check", "L8.3", "--dir", solved)
    assert code == 1, text
    assert f"FAIL {BUGS[bug]}" in text
    assert "cache_suite.py:" in text
    assert text.rstrip().endswith("NOT YET")


@needs_compiler
@pytest.mark.parametrize(
    ("function", "test"),
    [
        ("tl_kv_unref", "freed_blocks_serve_others"),
        ("tl_kv_set_fill", "fill_is_what_every_layer_holds"),
    ],
)
def test_a_function_that_does_nothing_is_caught(
    function: str, test: str, solved: Path, ol: Ol
) -> None:
    insert(solved, function, "if (p) return TL_OK;")
    Workspace.find(solved).remember(True)
    code, text = ol("check", "L8.3", "--dir", solved)
    assert code == 1, text
    assert f"FAIL {test}" in text


@needs_compiler
def test_a_crash_and_a_loop_are_failed_tests(solved: Path, ol: Ol) -> None:
    insert(solved, "tl_kv_cow", "*(volatile int *)(uintptr_t)id = 1;")
    Workspace.find(solved).remember(True)
    code, text = ol("check", "L8.3", "--dir", solved)
    assert code == 1
    assert "killed by signal 11" in text
    assert "ok   values_are_rounded_to_nearest_even" in text


@needs_compiler
def test_a_file_that_does_not_build_is_said(solved: Path, ol: Ol, ol_json: OlJson) -> None:
    file = solved / POOL_C
    file.write_text(file.read_text().replace("return TL_OK;", "return TL_OK", 1))
    Workspace.find(solved).remember(True)
    code, text = ol("check", "L8.3", "--dir", solved)
    assert code == 1
    assert "kv_pool.c does not build" in text
    code, document = ol_json("check", "L8.3", "--dir", solved)
    assert (code, document["builds"]) == (1, False)


def test_the_tests_are_listed(ol: Ol) -> None:
    code, text = ol("tests", "L8.3")
    assert code == 0
    assert all(name in text for name in TESTS)


def test_what_does_not_belong_is_a_wrong_command_line(tmp_path: Path, ol: Ol) -> None:
    for words in (
        ("check", "L8.3", "--only", "pool"),
        ("check", "rt.04", "--ref-deps"),
        ("start", "L8.3"),
        ("tdd", "red", "L8.3"),
    ):
        code, text = ol(*words, "--dir", tmp_path)
        assert code == 2, text
        assert "belongs to" in text or "L8.3 has no file of its own" in text


def test_the_suite_as_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.split() == list(TESTS)
    assert main(["--isolate", "out_of_blocks_changes_nothing"]) == 0
    assert capsys.readouterr().out.endswith("1 passed, 0 failed\n")
