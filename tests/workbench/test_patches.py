"""Patches apply exactly or not at all."""

from __future__ import annotations

import pytest

from kvpool.workbench.assets import Assets
from kvpool.workbench.patches import PatchError, apply, parse

DIFF = """\
a planted bug
--- a/c/x.c
+++ b/c/x.c
@@ -2,3 +2,4 @@ int f(void)
 two
-three
+THREE
+and more
 four
"""
TEXT = "one\ntwo\nthree\nfour\nfive\n"


def test_a_patch_applies_where_it_says() -> None:
    [patch] = parse(DIFF)
    assert patch.path == "c/x.c"
    assert apply(patch, TEXT) == "one\ntwo\nTHREE\nand more\nfour\nfive\n"


def test_lines_may_have_moved_either_way() -> None:
    [patch] = parse(DIFF)
    assert apply(patch, "new\n" * 50 + TEXT).endswith("two\nTHREE\nand more\nfour\nfive\n")
    assert apply(patch, "two\nthree\nfour\n") == "two\nTHREE\nand more\nfour\n"


def test_of_two_places_the_nearest_is_meant() -> None:
    [patch] = parse(DIFF)
    far = "two\nthree\nfour\n" + "x\n" * 30
    assert apply(patch, TEXT + far).count("THREE") == 1
    assert apply(patch, TEXT + far).startswith("one\ntwo\nTHREE")


def test_a_second_hunk_follows_the_shift_of_the_first() -> None:
    diff = "--- a/x\n+++ b/x\n@@ -1 +1,3 @@\n-a\n+a\n+b\n+c\n@@ -3,1 +5,1 @@\n-same\n+other\n"
    [patch] = parse(diff)
    assert apply(patch, "a\nsame\nsame\nsame\n") == "a\nb\nc\nsame\nother\nsame\n"


@pytest.mark.parametrize("text", ["", "one\ntwo\nthree \nfour\n", "two\nfour\n"])
def test_a_context_that_is_not_there_is_refused(text: str) -> None:
    [patch] = parse(DIFF)
    with pytest.raises(PatchError, match=r"hunk 1 .* does not apply"):
        apply(patch, text)


@pytest.mark.parametrize(
    "diff",
    ["", "nothing here", "--- a/x\n+++ b/x\n", "@@ -1 +1 @@\n-a\n+b\n", DIFF.rsplit("\n", 2)[0]],
)
def test_what_is_no_diff_is_refused(diff: str) -> None:
    with pytest.raises(PatchError):
        parse(diff)


def test_every_patch_of_the_chapter_applies_and_changes_something(assets: Assets) -> None:
    paths = sorted((assets.mutants / "rt.04").glob("*.patch"))
    assert len(paths) == 32
    for path in paths:
        for patch in parse(path.read_text()):
            before = (assets.root / patch.path).read_text()
            assert apply(patch, before) != before, path.name
