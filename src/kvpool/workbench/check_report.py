"""What `ol check` says: the verdict for a person, and the same as JSON for a grader."""

from __future__ import annotations

from typing import Any

from .assets import Assets
from .catalog import CatalogEntry, read_catalog
from .check import CHAPTER_NAMES, Check, PoolCheck, TestsCheck
from .mutation import Manifest, load_kills, load_manifest, resembling
from .screen import Screen
from .testprogram import Outcome, TestRun
from .workspace import Workspace

__all__ = ["check_as_json", "report_check"]


def report_check(check: Check, assets: Assets, workspace: Workspace, screen: Screen) -> None:
    """Prints both halves and the verdict."""
    catalog = {entry.name: entry for entry in read_catalog(assets.chapter_test)}
    manifest = load_manifest(assets.mutants / "rt.04")
    if check.pool is not None:
        _report_pool(check.pool, catalog, manifest, workspace, screen)
        for pitfall in _resembles(check.pool, assets, manifest):
            screen.wrapped(pitfall, "Nearly the same tests fail with this mistake: ", "warn")
    if check.tests is not None:
        _report_tests(check.tests, catalog, screen)
    elif check.pool is not None and not check.pool.passed:
        screen.line(
            "Your own tests are graded once the 20 pass (now: ol check rt.04 --only tests)."
        )
    screen.line()
    if check.passed:
        screen.line("PASSED", "good")
    else:
        screen.line("NOT YET", "bad")


def _report_pool(
    pool: PoolCheck,
    catalog: dict[str, CatalogEntry],
    manifest: Manifest,
    workspace: Workspace,
    screen: Screen,
) -> None:
    if pool.run is None:
        screen.line(f"{workspace.pool_c.name} does not build:", "bad")
        for line in pool.build_error:
            screen.line("  " + line)
        screen.line("Nothing was run. The first error is the one to mend.")
        return
    if pool.warnings:
        screen.line("The compiler warns:", "warn")
        for line in pool.warnings.strip().splitlines()[:12]:
            screen.line("  " + line.replace(str(workspace.root) + "/", ""))
    for name in pool.borrowed:
        screen.line(f"note: {name} is not in your file; the library's own was linked", "warn")
    for test in pool.run.tests:
        if test.result == "failed":
            _report_failure(test, catalog.get(test.name), manifest, workspace, screen)
        else:
            screen.line(f"ok   {test.name}", "good" if test.result == "passed" else "warn")
    if pool.run.missing:
        ended = pool.run.ended
        why = f"{_n_hung(pool.run)} tests found no end" if _n_hung(pool.run) else "the program "
        if not _n_hung(pool.run):
            why += f"ended early ({ended.ending()})" if ended is not None else "did not run"
        screen.line(f"not run, because {why}: {', '.join(pool.run.missing)}", "warn")
    n_passed = sum(test.result == "passed" for test in pool.run.tests)
    n_all = len(pool.run.tests) + len(pool.run.missing)
    screen.line(f"{n_passed} of {n_all} tests passed", "good" if pool.passed else "bad")


def _resembles(pool: PoolCheck, assets: Assets, manifest: Manifest) -> list[str]:
    """Pitfalls on which nearly the same tests fail, when it is not most of them."""
    if pool.run is None or not 0 < len(pool.run.failed) < 15:
        return []
    kills = load_kills(assets.mutants / "rt.04")
    bugs = resembling(pool.run.failed_names, kills)
    return [manifest.pitfalls[bug] for bug in bugs if bug in manifest.pitfalls]


def _n_hung(run: TestRun) -> int:
    return sum(test.hung for test in run.tests)


def _report_failure(
    test: Outcome,
    entry: CatalogEntry | None,
    manifest: Manifest,
    workspace: Workspace,
    screen: Screen,
) -> None:
    failure = test.failure(workspace.pool_c.name)
    screen.line(f"FAIL {test.name}", "bad")
    screen.wrapped(failure.headline, "     ")
    for detail in failure.details:
        screen.wrapped(detail, "     ")
    if entry is not None:
        screen.wrapped(entry.checks, "     it checks: ", "dim")
        usual = [manifest.pitfalls[i] for i in entry.catches if i in manifest.pitfalls]
        if usual:
            screen.wrapped("; ".join(usual), "     for example: ", "dim")


def _report_tests(tests: TestsCheck, catalog: dict[str, CatalogEntry], screen: Screen) -> None:
    screen.line()
    if tests.grade is None:
        screen.line("Your own tests cannot be graded:", "bad")
        for line in tests.problem:
            screen.wrapped(line, "  ")
        return
    grade = tests.grade
    noun = "test notices" if tests.n_tests == 1 else "tests notice"
    screen.line(
        f"Your {tests.n_tests} {noun} {grade.killed} of {len(grade.kills)} planted bugs: "
        f"{grade.score:.0%}, a pass is {grade.threshold:.0%}",
        "good" if grade.score >= grade.threshold else "bad",
    )
    if grade.survivors:
        by_bug = {bug: entry.name for entry in catalog.values() for bug in entry.catches}
        rows = [
            [
                mutant.pitfall,
                "required" if mutant.required else "",
                ", ".join(mutant.tests) or by_bug.get(mutant.id, ""),
            ]
            for mutant in grade.survivors
        ]
        screen.line("Not noticed:")
        screen.table(["pitfall", "", "how the 20 see it"], rows)
    for mutant in grade.required_survivors:
        screen.line(f'Required, and not noticed: "{mutant.pitfall}".', "bad")
    absent = [name for name in CHAPTER_NAMES if name not in tests.names]
    if absent and not grade.passed:
        screen.wrapped(", ".join(absent), "Tests of the chapter that you have not written: ")


def check_as_json(check: Check, assets: Assets, workspace: Workspace) -> dict[str, Any]:
    """The same for graders."""
    manifest = load_manifest(assets.mutants / "rt.04")
    catalog = {entry.name: entry for entry in read_catalog(assets.chapter_test)}
    document: dict[str, Any] = {"command": "check", "module": "rt.04", "passed": check.passed}
    if check.pool is not None:
        pool = check.pool
        tests = []
        for test in pool.run.tests if pool.run is not None else []:
            record: dict[str, Any] = {"name": test.name, "result": test.result, "ms": test.ms}
            if test.result == "failed":
                failure = test.failure(workspace.pool_c.name)
                catches = catalog[test.name].catches if test.name in catalog else ()
                record["reason"] = failure.headline
                record["details"] = list(failure.details)
                record["for_example"] = [
                    manifest.pitfalls[i] for i in catches if i in manifest.pitfalls
                ]
            tests.append(record)
        document["pool"] = {
            "passed": pool.passed,
            "builds": pool.run is not None,
            "build_error": pool.build_error,
            "from_the_library": list(pool.borrowed),
            "tests": tests,
            "not_run": pool.run.missing if pool.run is not None else [],
            "resembles": _resembles(pool, assets, manifest),
        }
    if check.tests is not None:
        grade = check.tests.grade
        own: dict[str, Any] = {
            "passed": check.tests.passed,
            "tests": check.tests.names,
            "problem": check.tests.problem,
        }
        if grade is not None:
            own |= {
                "planted": len(grade.kills),
                "killed": grade.killed,
                "score": round(grade.score, 4),
                "threshold": grade.threshold,
                "survivors": [
                    {"pitfall": m.pitfall, "required": m.required} for m in grade.survivors
                ],
            }
        document["own_tests"] = own
    return document
