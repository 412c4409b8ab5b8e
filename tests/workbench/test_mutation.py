"""The mutation runner: what counts as noticed, as survived, as broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool.workbench.assets import Assets
from kvpool.workbench.mutation import Grade, Kill, Mutant, Suite, Workshop, load_manifest
from kvpool.workbench.toolchain import find_toolchain
from kvpool.workbench.trouble import Trouble

from .workbench_support import needs_compiler


def mutant(number: int, *, required: bool = False) -> Mutant:
    return Mutant(f"x{number}", Path("x.patch"), "a pitfall", "a bug", (), required)


def grade(states: list[str], required: int = -1) -> Grade:
    kills = [
        Kill(mutant(i, required=i == required), "own", state) for i, state in enumerate(states)
    ]
    return Grade(tuple(kills), 0.70)


def test_the_threshold_is_a_share_of_the_planted() -> None:
    assert grade(["killed"] * 7 + ["survived"] * 3).passed
    assert not grade(["killed"] * 6 + ["survived"] * 4).passed
    assert grade(["killed"] * 7 + ["survived"] * 3).score == pytest.approx(0.7)
    assert not grade([]).passed


def test_a_required_bug_has_to_be_noticed_whatever_the_score() -> None:
    states = ["survived"] + ["killed"] * 9
    assert grade(states, required=1).passed
    assert not grade(states, required=0).passed
    assert [m.id for m in grade(states, required=0).required_survivors] == ["x0"]


def test_the_chapter_has_its_32_bugs_and_requires_s11(assets: Assets) -> None:
    manifest = load_manifest(assets.mutants / "rt.04")
    ids = {entry.id for entry in manifest.mutants}
    assert ids == {f"s{n:02}" for n in range(1, 31) if n != 26} | {"m01", "m02", "m03"}
    assert manifest.threshold == pytest.approx(0.70)
    assert [entry.id for entry in manifest.mutants if entry.required] == ["s11"]
    assert all(entry.tests and entry.pitfall and entry.plants for entry in manifest.mutants)


def test_what_is_no_manifest_is_told(tmp_path: Path) -> None:
    with pytest.raises(Trouble, match="no manifest"):
        load_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"mutants": [{"id": "x"}]}))
    with pytest.raises(Trouble, match="no manifest"):
        load_manifest(tmp_path)


# ---- with a compiler ----------------------------------------------------------------------------

# The function that decides which block goes back to the cache or to the free list.
REAL = """\
--- a/c/src/runtime/kv_pool_impl.h
+++ b/c/src/runtime/kv_pool_impl.h
@@ -1,3 +1,3 @@
-    if (b->hash != 0) {
+    if (b->hash == 1) {
"""
HARMLESS = REAL.replace("+    if (b->hash == 1) {", "+    if (b->hash != 0u) {")
SYNTAX = REAL.replace("+    if (b->hash == 1) {", "+    if (b->hash {")
ELSEWHERE = REAL.replace("-    if (b->hash != 0) {", "-    if (no such line) {")


@pytest.fixture(scope="module")
def workshop(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("mutation")
    chain = find_toolchain(folder / "try", cache=folder / "cache")
    return Workshop(assets, chain, folder, assets.pool_units)


@pytest.fixture(scope="module")
def suite(workshop: Workshop, assets: Assets) -> Suite:
    own = [path for path in assets.own_tests if path.stem == "unref_caches_registered_blocks"]
    return workshop.suite("one", own)


def attack(workshop: Workshop, suite: Suite, folder: Path, diff: str) -> Kill:
    patch = folder / "x.patch"
    patch.write_text(diff.replace("@@ -1,3 +1,3 @@", "@@ -1,1 +1,1 @@"))
    [kill] = workshop.attack(Mutant("x", patch, "", "", ()), [suite])
    return kill


@needs_compiler
def test_a_bug_in_a_header_reaches_every_unit_that_includes_it(
    workshop: Workshop, suite: Suite, tmp_path: Path
) -> None:
    kill = attack(workshop, suite, tmp_path, REAL)
    assert (kill.state, kill.tests) == ("killed", ("unref_caches_registered_blocks",))


@needs_compiler
def test_a_change_that_changes_nothing_survives(
    workshop: Workshop, suite: Suite, tmp_path: Path
) -> None:
    assert attack(workshop, suite, tmp_path, HARMLESS).state == "survived"


@needs_compiler
@pytest.mark.parametrize(
    ("diff", "note"),
    [
        (SYNTAX, "compiling"),
        (ELSEWHERE, "does not apply"),
        (REAL.replace("kv_pool_impl.h", "gone.h"), "no such file"),
        (REAL.replace("c/src/runtime/kv_pool_impl.h", "../../etc/passwd"), "no such file"),
    ],
)
def test_a_patch_that_fails_is_broken_not_killed(
    workshop: Workshop, suite: Suite, tmp_path: Path, diff: str, note: str
) -> None:
    kill = attack(workshop, suite, tmp_path, diff)
    assert kill.state == "broken"
    assert note in kill.note


@needs_compiler
def test_the_unchanged_library_passes(workshop: Workshop, suite: Suite) -> None:
    assert workshop.run_reference(suite).passed
