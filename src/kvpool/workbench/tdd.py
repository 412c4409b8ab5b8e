"""`ol tdd red` and `ol tdd green`: the learner's own tests before and after the code."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .assets import Assets, templates
from .build import PoolBuilder, explain_build_error
from .catalog import test_names
from .screen import Screen
from .testprogram import TestRun, run_tests
from .toolchain import BuildError, Toolchain
from .workspace import Workspace

__all__ = ["Tdd", "report_tdd", "run_tdd", "tdd_as_json"]

TEST_LIMIT_S = 5
RUN_LIMIT_S = 60.0


@dataclass
class Tdd:
    """``colour`` is red (every test fails on the stub) or green (every test passes on the file)."""

    colour: str
    problem: list[str] = field(default_factory=list)
    run: TestRun | None = None

    @property
    def wrong(self) -> list[str]:
        """Tests that did the other thing."""
        if self.run is None:
            return []
        unwanted = "passed" if self.colour == "red" else "failed"
        return [test.name for test in self.run.tests if test.result == unwanted]

    @property
    def passed(self) -> bool:
        if self.problem or self.run is None or not self.run.tests or self.run.missing:
            return False
        return not self.wrong


def run_tdd(
    colour: str, assets: Assets, chain: Toolchain, scratch: Path, workspace: Workspace
) -> Tdd:
    """Builds the workspace's own tests over the stub (red) or its kv_pool.c (green)."""
    found = Tdd(colour)
    sources = workspace.own_tests
    names = test_names(sources)
    if not names:
        found.problem = [
            "there are no tests in c/tests/rt04-kv-pool/; example.c there shows the form"
        ]
        return found
    builder = PoolBuilder(assets, chain, scratch / colour)
    stub = templates() / "kv_pool.c"
    try:
        objects = builder.tests("own", sources)
    except BuildError as error:
        found.problem = [
            f"your tests do not compile ({error.step}):",
            *explain_build_error(error, workspace.root),
        ]
        return found
    try:
        built = builder.pool(stub if colour == "red" else workspace.pool_c)
        program = builder.link("own-tests", built, objects)
    except BuildError as error:
        found.problem = [f"{error.step}:", *explain_build_error(error, workspace.root)]
        return found
    found.run = run_tests(
        program, expected=names, env=chain.env, test_limit_s=TEST_LIMIT_S, limit_s=RUN_LIMIT_S
    )
    return found


def report_tdd(tdd: Tdd, workspace: Workspace, screen: Screen) -> None:
    """Prints each test and the verdict."""
    for line in tdd.problem:
        screen.line(line, "bad")
    if tdd.run is not None:
        for test in tdd.run.tests:
            wanted = test.name not in tdd.wrong
            word = "fails " if test.result == "failed" else "passes"
            screen.line(f"{word} {test.name}", "good" if wanted else "bad")
            if test.result == "failed":
                failure = test.failure(workspace.pool_c.name)
                screen.wrapped(failure.headline, "       ", "dim")
                for detail in failure.details if tdd.colour == "green" else ():
                    screen.wrapped(detail, "       ", "dim")
        if tdd.run.missing:
            ending = tdd.run.ended.ending() if tdd.run.ended is not None else "it did not run"
            screen.line(f"not run ({ending}): {', '.join(tdd.run.missing)}", "warn")
    if tdd.passed:
        screen.line(
            "RED: every test fails against the stub, as it should before the code is there"
            if tdd.colour == "red"
            else "GREEN: every test passes on your kv_pool.c",
            "good",
        )
    elif tdd.wrong and tdd.colour == "red":
        screen.line("NOT RED: a test that passes against a stub proves nothing about a pool", "bad")
    else:
        screen.line(f"NOT {tdd.colour.upper()}", "bad")


def tdd_as_json(tdd: Tdd, workspace: Workspace) -> dict[str, Any]:
    tests = tdd.run.tests if tdd.run is not None else []
    return {
        "command": f"tdd {tdd.colour}",
        "module": "rt.04",
        "passed": tdd.passed,
        "problem": tdd.problem,
        "tests": [
            {
                "name": test.name,
                "result": test.result,
                "reason": test.failure(workspace.pool_c.name).headline
                if test.result == "failed"
                else "",
            }
            for test in tests
        ],
        "not_run": tdd.run.missing if tdd.run is not None else [],
    }
