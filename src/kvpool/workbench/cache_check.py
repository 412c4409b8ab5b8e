"""`ol check L8.3`: the paged cache's tests over a learner's own pool, or over the reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .assets import CACHE_MODULE, find_assets
from .build import PoolBuilder, explain_build_error
from .cache_suite import TESTS
from .screen import Screen
from .testprogram import TestRun, run_tests
from .toolchain import BuildError, Toolchain
from .workspace import Workspace

__all__ = [
    "NEEDS_POOL",
    "CacheCheck",
    "OwnSource",
    "about",
    "cache_as_json",
    "catalog",
    "check_cache",
    "report_cache",
]

NEEDS_POOL = "needs rt.04: build it, or pass --ref-deps"

TEST_LIMIT_S = 20
RUN_LIMIT_S = 120.0


@dataclass
class CacheCheck:
    """The suite's tests over one pool. ``pool``: "workspace", "reference", or "" for none."""

    pool: str = ""
    build_error: list[str] = field(default_factory=list)
    run: TestRun | None = None

    @property
    def passed(self) -> bool:
        return self.run is not None and self.run.passed


@dataclass(frozen=True)
class OwnSource:
    """A learner's pool and what to build it with."""

    chain: Toolchain
    workspace: Workspace


def check_cache(own: OwnSource | None, scratch: Path, screen: Screen) -> CacheCheck:
    """Builds a learner's kv_pool.c as a library and runs the suite over it; None: over our pool."""
    options: Sequence[str | Path] = []
    found = CacheCheck("reference" if own is None else "workspace")
    if own is not None:
        try:
            options = ["--library", _build(own, scratch, screen)]
        except BuildError as error:
            found.build_error = explain_build_error(error, own.workspace.root)
            return found
    with screen.progress("testing", len(TESTS)) as progress:
        found.run = run_tests(
            [sys.executable, "-m", "kvpool.workbench.cache_suite", *options],
            expected=list(TESTS),
            test_limit_s=TEST_LIMIT_S,
            limit_s=RUN_LIMIT_S,
            env={"PYTHONOPTIMIZE": ""},  # the tests are assertions
            on_test=lambda _: progress.step(),
        )
    return found


def _build(own: OwnSource, scratch: Path, screen: Screen) -> Path:
    # Python is no program with AddressSanitizer in it; memory errors are what rt.04 looks for.
    plain = replace(own.chain.plain(), extra=(*own.chain.extra, "-fPIC"))
    builder = PoolBuilder(find_assets(), plain, scratch / "cache")
    with screen.progress("building", 2) as progress:
        built = builder.pool(own.workspace.pool_c)
        progress.step()
        objects = [built.object, builder.below()]
        library = plain.link(objects, scratch / "kv_pool.so", ("-shared",))
        progress.step()
    return library


def report_cache(found: CacheCheck, screen: Screen) -> None:
    """Prints the tests and the verdict."""
    if found.run is None:
        screen.line("kv_pool.c does not build:", "bad")
        for line in found.build_error:
            screen.line("  " + line)
    else:
        for test in found.run.tests:
            if test.result == "passed":
                screen.line(f"ok   {test.name}", "good")
                continue
            screen.line(f"FAIL {test.name}", "bad")
            screen.wrapped(test.failure().headline, "     ")
            if test.name in TESTS:
                screen.wrapped(about(test.name), "     it checks: ", "dim")
        if found.run.missing:
            screen.line(f"not run: {', '.join(found.run.missing)}", "warn")
        n = sum(test.result == "passed" for test in found.run.tests)
        whose = "the reference's pool" if found.pool == "reference" else "your pool"
        screen.line(
            f"{n} of {len(TESTS)} tests passed, over {whose}", "good" if found.passed else "bad"
        )
    screen.line()
    screen.line("PASSED" if found.passed else "NOT YET", "good" if found.passed else "bad")


def about(name: str) -> str:
    """What a test of the suite checks, in one line."""
    return (TESTS[name].__doc__ or "").strip()


def catalog() -> list[dict[str, str]]:
    """The suite's tests in their order, with what each checks."""
    return [{"name": name, "checks": about(name)} for name in TESTS]


def cache_as_json(found: CacheCheck) -> dict[str, Any]:
    """The same for graders."""
    document: dict[str, Any] = {
        "command": "check",
        "module": CACHE_MODULE,
        "passed": found.passed,
        "pool": found.pool,
        "builds": not found.build_error,
        "build_error": found.build_error,
        "tests": [],
        "not_run": [],
    }
    if found.run is not None:
        document["not_run"] = found.run.missing
        for test in found.run.tests:
            record: dict[str, Any] = {"name": test.name, "result": test.result, "ms": test.ms}
            if test.result == "failed":
                record["reason"] = test.failure().headline
            document["tests"].append(record)
    return document
