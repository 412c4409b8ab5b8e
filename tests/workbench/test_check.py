"""`ol check`, `ol tdd`, `ol diff` from end to end: what a learner sees, right and wrong."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from kvpool.workbench import patches
from kvpool.workbench.assets import OWN_TESTS, POOL_C, Assets
from kvpool.workbench.workspace import Workspace

from .workbench_support import Ol, OlJson, needs_compiler

pytestmark = needs_compiler


def mutate(workspace: Path, assets: Assets, bug: str) -> None:
    """Plants one of the chapter's bugs in the workspace's kv_pool.c."""
    [patch] = patches.parse((assets.mutants / f"rt.04/{bug}.patch").read_text())
    assert patch.path == str(POOL_C)
    file = workspace / POOL_C
    file.write_text(patches.apply(patch, file.read_text()))


def insert(workspace: Path, function: str, line: str) -> None:
    """Puts a line at the start of a function of the workspace's kv_pool.c."""
    file = workspace / POOL_C
    text, n = re.subn(
        rf"(^tl_status {function}\([^{{;]*\{{\n)", rf"\1    {line}\n", file.read_text(), flags=re.M
    )
    assert n == 1
    file.write_text(text)


def test_the_reference_passes_and_then_the_diff_is_shown(solved: Path, ol: Ol) -> None:
    code, text = ol("diff", "rt.04", "--dir", solved)
    assert code == 1
    assert "ol check rt.04" in text

    code, text = ol("check", "rt.04", "--dir", solved)
    assert code == 0, text
    assert "20 of 20 tests passed" in text
    assert "32 of 32 planted bugs" in text
    assert "tl_crc32c is not in your file" in text  # the reference keeps it in another unit
    assert text.rstrip().endswith("PASSED")

    code, text = ol("diff", "rt.04", "--dir", solved)
    assert (code, text.strip()) == (0, "no difference")
    with (solved / POOL_C).open("a") as file:
        file.write("/* a change after the check */\n")
    code, _ = ol("diff", "rt.04", "--dir", solved)
    assert code == 1
    Workspace.find(solved).remember(True)
    code, text = ol("diff", "rt.04", "--dir", solved)
    assert code == 0
    assert "-/* a change after the check */" in text


def test_the_stub_fails_every_test_and_nothing_is_graded(workspace: Path, ol_json: OlJson) -> None:
    code, document = ol_json("check", "rt.04", "--dir", workspace)
    assert code == 1
    assert not document["passed"]
    assert {test["result"] for test in document["pool"]["tests"]} == {"failed"}
    assert len(document["pool"]["tests"]) == 20
    assert "own_tests" not in document


# ---- five typical mistakes ----------------------------------------------------------------------


def test_a_revived_block_left_on_the_list_is_named_as_such(
    solved: Path, assets: Assets, ol: Ol
) -> None:
    mutate(solved, assets, "s11")
    code, text = ol("check", "rt.04", "--dir", solved)
    assert code == 1
    assert "FAIL a_revived_block_is_never_evicted" in text
    assert "test_kv_pool.c:" in text
    told = " ".join(text.split())
    assert (
        "Nearly the same tests fail with this mistake: "
        "Forgetting to unlink a revived block from the LRU" in told
    )
    assert "graded once the 20 pass" in text
    assert text.rstrip().endswith("NOT YET")


def test_a_write_past_the_end_is_shown_where_it_happens(solved: Path, ol: Ol) -> None:
    insert(solved, "tl_kv_unref", "{ char *x = tl_alloc(4, 1); x[4] = 1; tl_free(x); }")
    code, text = ol("check", "rt.04", "--dir", solved, "--only", "pool")
    assert code == 1
    assert "heap-buffer-overflow" in text
    line = next(
        i
        for i, line in enumerate((solved / POOL_C).read_text().splitlines(), 1)
        if "x[4] = 1" in line
    )
    assert f"in tl_kv_unref, kv_pool.c:{line}" in text


def test_a_loop_without_end_is_a_failed_test_not_a_hang(solved: Path, ol: Ol) -> None:
    insert(solved, "tl_kv_alloc", "for (volatile int i = 0; i == 0;) {}")
    code, text = ol("check", "rt.04", "--dir", solved, "--only", "pool")
    assert code == 1
    assert "no end after 5 s: a loop that does not stop" in text
    assert "not run, because 3 tests found no end" in text


def test_a_null_pointer_is_a_failed_test_with_its_place(solved: Path, ol: Ol) -> None:
    insert(solved, "tl_kv_lookup", "hash = *(volatile uint64_t *)(hash == 1 ? &hash : NULL);")
    code, text = ol("check", "rt.04", "--dir", solved, "--only", "pool")
    assert code == 1
    assert "null pointer" in text or "SEGV" in text
    assert "kv_pool.c:" in text
    assert re.search(r"\d+ of 20 tests passed", text)


def test_a_file_that_does_not_compile_is_shown_with_its_first_error(solved: Path, ol: Ol) -> None:
    file = solved / POOL_C
    file.write_text(file.read_text().replace("return TL_OK;", "return TL_OK", 1))
    code, text = ol("check", "rt.04", "--dir", solved)
    assert code == 1
    assert "kv_pool.c does not build" in text
    assert re.search(r"c/src/runtime/kv_pool\.c:\d+:\d+: error: expected", text)
    assert str(solved) not in text  # short paths


def test_a_missing_function_is_named(workspace: Path, ol: Ol) -> None:
    file = workspace / POOL_C
    file.write_text(file.read_text().replace("tl_kv_cow(", "tl_kv_copy_on_write("))
    code, text = ol("check", "rt.04", "--dir", workspace)
    assert code == 1
    assert "does not define: tl_kv_cow" in text


# ---- the grade ----------------------------------------------------------------------------------


def test_tests_that_miss_the_required_bug_fail_whatever_their_score(
    solved: Path, ol_json: OlJson
) -> None:
    for name in ("lookup_hit_is_not_evicted", "unref_caches_registered_blocks",
                 "partial_blocks_not_registered"):  # fmt: skip
        (solved / OWN_TESTS / f"{name}.c").unlink()
    code, document = ol_json("check", "rt.04", "--dir", solved, "--only", "tests")
    own = document["own_tests"]
    assert code == 1
    assert own["score"] >= own["threshold"]
    survivors = {entry["pitfall"]: entry["required"] for entry in own["survivors"]}
    assert survivors["Forgetting to unlink a revived block from the LRU"] is True


def test_too_few_bugs_noticed_is_a_fail_with_the_survivors_by_pitfall(solved: Path, ol: Ol) -> None:
    for path in (solved / OWN_TESTS).glob("*.c"):
        if path.stem not in ("lookup_hit_is_not_evicted", "hash_chain_by_hand"):
            path.unlink()
    code, text = ol("check", "rt.04", "--dir", solved, "--only", "tests")
    assert code == 1
    assert re.search(r"Your 2 tests notice \d+ of 32 planted bugs: \d+%, a pass is 70%", text)
    assert "Copy on write keeping the writer's reference" in text
    assert "cow_copies_only_when_shared" in text
    assert not re.search(r"\bs15\b", text)  # pitfalls, not patches
    assert "Tests of the chapter that you have not written: alloc_all_or_nothing" in text


def test_a_test_that_fails_on_the_reference_grades_nothing(solved: Path, ol: Ol) -> None:
    (solved / OWN_TESTS / "wrong.c").write_text(
        '#include "tl_test_kv.h"\n'
        "TL_TEST(asks_for_more_than_promised) {\n"
        "    tl_kv_pool *p = kv_new(2, 2, 1, 1, 2);\n"
        "    uint32_t id;\n"
        "    TL_OK_(tl_kv_alloc(p, 1, &id));\n"
        "    TL_EQ(id, 1);\n"
        "    tl_kv_pool_destroy(p);\n"
        "}\n"
    )
    code, text = ol("check", "rt.04", "--dir", solved, "--only", "tests")
    assert code == 1
    assert "asks_for_more_than_promised: wrong.c:6: id is 0" in text
    assert "does not promise" in text


def test_no_tests_at_all_are_told_where_to_begin(workspace: Path, ol: Ol) -> None:
    code, text = ol("check", "rt.04", "--dir", workspace, "--only", "tests")
    assert code == 1
    assert "example.c" in text


# ---- red, green ---------------------------------------------------------------------------------


def test_red_and_green_of_the_reference_tests(solved: Path, ol: Ol) -> None:
    code, text = ol("tdd", "red", "rt.04", "--dir", solved)
    assert code == 0, text
    assert "RED" in text
    code, text = ol("tdd", "green", "rt.04", "--dir", solved)
    assert code == 0, text
    assert "GREEN" in text


def test_a_test_that_passes_on_the_stub_is_not_red(workspace: Path, ol_json: OlJson) -> None:
    (workspace / OWN_TESTS / "empty.c").write_text(
        '#include "tl_test.h"\nTL_TEST(proves_nothing) {\n    TL_EQ(1, 1);\n}\n'
    )
    code, document = ol_json("tdd", "red", "rt.04", "--dir", workspace)
    assert code == 1
    assert document["tests"][0] == {"name": "proves_nothing", "result": "passed", "reason": ""}


def test_green_on_the_stub_fails_and_says_why(workspace: Path, assets: Assets, ol: Ol) -> None:
    name = "hash_chain_by_hand.c"
    shutil.copyfile(
        next(p for p in assets.own_tests if p.name == name), workspace / OWN_TESTS / name
    )
    code, text = ol("tdd", "green", "rt.04", "--dir", workspace)
    assert code == 1
    assert "NOT GREEN" in text
    assert "hash_chain_by_hand.c:" in text


# ---- machines that lack something ---------------------------------------------------------------


def test_no_compiler_is_exit_code_3_with_what_to_install(
    solved: Path, ol: Ol, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CC", raising=False)
    code, text = ol("check", "rt.04", "--dir", solved)
    assert code == 3
    assert "no C compiler" in text
    assert "build-essential" in text


def test_a_compiler_without_sanitizers_is_told_and_can_be_gone_without(
    solved: Path, ol: Ol, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = shutil.which("cc") or shutil.which("gcc")
    fake = tmp_path / "plain-cc"
    fake.write_text(
        "#!/bin/sh\n"
        'for word in "$@"; do case "$word" in -fsanitize=*)\n'
        '    echo "cannot find libasan" >&2; exit 1;; esac; done\n'
        f'exec {real} "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    code, text = ol("check", "rt.04", "--dir", solved)
    assert code == 3
    assert "cannot find libasan" in text
    assert "--no-sanitize" in text
    code, text = ol("check", "rt.04", "--dir", solved, "--only", "pool", "--no-sanitize")
    assert code == 0, text


def test_cc_of_the_environment_has_to_exist(
    solved: Path, ol: Ol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    code, text = ol("check", "rt.04", "--dir", solved)
    assert code == 3
    assert "no-such-compiler" in text
    assert os.environ["CC"] == "no-such-compiler"
