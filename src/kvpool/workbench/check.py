"""`ol check`: the verdict on a learner's pool, and the grade of a learner's tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .assets import Assets
from .build import PoolBuilder, explain_build_error
from .catalog import read_catalog, test_names
from .mutation import Grade, Workshop, load_manifest
from .screen import Screen
from .testprogram import TestRun, run_tests
from .toolchain import BuildError, Toolchain
from .workspace import Workspace

__all__ = ["CHAPTER_NAMES", "Check", "PoolCheck", "TestsCheck", "check_own_tests", "check_pool"]

TEST_LIMIT_S = 5
RUN_LIMIT_S = 90.0

CHAPTER_NAMES = (
    "hash_chain_by_hand",
    "alloc_all_or_nothing",
    "unref_caches_registered_blocks",
    "double_unref_refused",
    "lookup_hit_is_not_evicted",
    "cow_copies_shared_blocks",
    "partial_blocks_not_registered",
    "roundtrip_and_bit_flip",
)


@dataclass
class PoolCheck:
    """The 20 tests over a learner's file."""

    build_error: list[str] = field(default_factory=list)
    warnings: str = ""
    borrowed: tuple[str, ...] = ()
    run: TestRun | None = None

    @property
    def passed(self) -> bool:
        return self.run is not None and self.run.passed


@dataclass
class TestsCheck:
    """The learner's tests over the reference and over every planted bug."""

    __test__ = False

    n_tests: int = 0
    names: list[str] = field(default_factory=list)
    problem: list[str] = field(default_factory=list)
    grade: Grade | None = None

    @property
    def passed(self) -> bool:
        return self.grade is not None and self.grade.passed


@dataclass
class Check:
    """Both halves; ``None`` is a half that was not asked for or not reached."""

    pool: PoolCheck | None = None
    tests: TestsCheck | None = None

    @property
    def passed(self) -> bool:
        halves = [half for half in (self.pool, self.tests) if half is not None]
        return bool(halves) and all(half.passed for half in halves)


# ---- the pool -----------------------------------------------------------------------------------


def check_pool(
    assets: Assets, chain: Toolchain, scratch: Path, workspace: Workspace, screen: Screen
) -> PoolCheck:
    """Builds the workspace's kv_pool.c and runs the 20 tests over it."""
    builder = PoolBuilder(assets, chain, scratch / "pool")
    found = PoolCheck()
    try:
        with screen.progress("building", 3) as progress:
            built = builder.pool(workspace.pool_c)
            progress.step()
            objects = builder.tests("chapter", [assets.chapter_test])
            progress.step()
            program = builder.link("chapter-tests", built, objects)
    except BuildError as error:
        found.build_error = explain_build_error(error, workspace.root)
        return found
    found.warnings, found.borrowed = built.warnings, built.borrowed
    names = [entry.name for entry in read_catalog(assets.chapter_test)]
    with screen.progress("testing", len(names)) as progress:
        found.run = run_tests(
            program,
            expected=names,
            env=chain.env,
            test_limit_s=TEST_LIMIT_S,
            limit_s=RUN_LIMIT_S,
            on_test=lambda _: progress.step(),
        )
    return found


# ---- the learner's tests ------------------------------------------------------------------------


def check_own_tests(
    assets: Assets, chain: Toolchain, scratch: Path, workspace: Workspace, screen: Screen
) -> TestsCheck:
    """The workspace's own tests: do they pass on the reference, and which bugs do they notice?"""
    sources = workspace.own_tests
    found = TestsCheck(names=test_names(sources))
    found.n_tests = len(found.names)
    if not found.names:
        folder = workspace.root / "c/tests/rt04-kv-pool"
        found.problem = [
            f"there are no tests in {folder}",
            "example.c there shows the form; write some, then: ol tdd red rt.04",
        ]
        return found
    manifest = load_manifest(assets.mutants / "rt.04")
    workshop = Workshop(assets, chain, scratch / "grade", assets.pool_units)
    try:
        suite = workshop.suite("own", sources)
    except BuildError as error:
        found.problem = [f"{error.step}:", *explain_build_error(error, workspace.root)]
        return found
    reference = workshop.run_reference(suite)
    if not reference.passed:
        found.problem = _on_the_reference(reference)
        return found
    with screen.progress("planting bugs", len(manifest.mutants)) as progress:
        found.grade = workshop.grade(manifest, suite, on_kill=lambda _: progress.step())
    return found


def _on_the_reference(run: TestRun) -> list[str]:
    lines = ["your tests have to pass on a correct pool, and on the reference these do not:"]
    lines += [f"{test.name}: {test.failure().headline}" for test in run.failed]
    if run.missing:
        ending = run.ended.ending() if run.ended is not None else "it was not run"
        lines.append(f"{', '.join(run.missing)}: not reached, the program ended with {ending}")
    lines.append("each asks for something that tinyllm/kv_pool.h does not promise")
    return lines
