"""Plants every bug of c/mutants and sees to it that the tests notice: `make mutants`.

    python scripts/mutants.py                 all of them
    python scripts/mutants.py --only s11 x03  some
    python scripts/mutants.py --no-python     without the Python suite

What has to hold, else the exit code is 1:

- every test passes on the unchanged library;
- every patch applies and compiles;
- a bug of the chapter (rt.04) is noticed by each test that its entry names, and by the eight of
  c/tests/rt04-kv-pool;
- a bug of our own (extra) is noticed by the suite that its entry names.

The Python suite runs over the chapter's bugs too, and what it notices is reported: some of them
it cannot see, because the binding does not go that way.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
# The workbench imports nothing of kvpool, so this needs no built package; at the end of the path,
# so that no module of kvpool hides one of the standard library.
sys.path.append(str(ROOT / "src/kvpool"))

import mutants_python  # noqa: E402

workbench = importlib.import_module("workbench")
for _name in ("assets", "mutation", "process", "screen", "toolchain", "trouble"):
    importlib.import_module(f"workbench.{_name}")
mutation = workbench.mutation

FOLDER = ROOT / "build/ol-mutants"


class Run:
    """One run of the program: what is built, what was found, what is wrong."""

    def __init__(self, screen: Any) -> None:
        self.screen = screen
        self.wrong: list[str] = []
        self.kills: dict[str, list[Any]] = {}
        shutil.rmtree(FOLDER / "mutants", ignore_errors=True)
        self.assets = workbench.assets.Assets(ROOT)
        self.chain = workbench.toolchain.find_toolchain(FOLDER / "try", cache=FOLDER / "cache")
        self.workshop = mutation.Workshop(
            self.assets, self.chain, FOLDER, self.assets.library_units
        )
        self.suites: dict[str, Any] = {}
        self.python: Any = None

    def prepare(self, mutants: list[Any], names: Iterable[str]) -> None:
        """Builds the suites and runs each over the unchanged library."""
        self.workshop.library()
        wanted = sorted(set(names) - {"python"})
        with ThreadPoolExecutor(workbench.toolchain.n_jobs()) as pool:
            for name, problem in zip(wanted, pool.map(self._suite, wanted), strict=True):
                if problem:
                    self.wrong.append(f"{name}: {problem}")
                    continue
                # Of a unit's tests only those that an entry names have to hold here.
                named = {test for m in mutants if m.suite == name for test in m.tests}
                names_of_unit = sorted(named) if name.startswith("unit/") else []
                reference = self.workshop.run_reference(self.suites[name], names_of_unit)
                if not reference.passed:
                    failed = ", ".join(sorted(reference.failed_names)) or "it does not run"
                    self.wrong.append(f"{name} fails on the unchanged library: {failed}")

    def _suite(self, name: str) -> str:
        """Builds one suite; returns what is wrong with it."""
        if name == "rt04":
            sources = [self.assets.chapter_test]
        elif name == "own":
            sources = self.assets.own_tests
        else:
            sources = [self.assets.tests / f"{name.removeprefix('unit/')}.c"]
        try:
            self.suites[name] = self.workshop.suite(name, sources)
        except mutation.BuildError as error:
            return str(error)
        return ""

    def prepare_python(self) -> None:
        """The same for the Python suite."""
        suite = mutants_python.PythonSuite(ROOT, FOLDER / "python", workbench)
        suite.prepare()
        passed, failed, ending = suite.run(suite.package("reference", []))
        if not passed:
            what = ", ".join(failed) or ending
            self.wrong.append(f"the Python suite does not pass on the unchanged library: {what}")
        self.python = suite

    def attack(self, mutants: list[Any], suites: Callable[[Any], list[str]]) -> None:
        """Every mutant against its suites, on all cores."""

        def one(mutant: Any) -> None:
            names = suites(mutant)
            in_c = [self.suites[name] for name in names if name != "python"]
            found = self.workshop.attack(mutant, in_c) if in_c else []
            if "python" in names and self.python is not None:
                found.append(self.python.attack(mutant, self.workshop))
            self.kills[mutant.id] = found
            progress.step()

        with (
            self.screen.progress("planting bugs", len(mutants)) as progress,
            ThreadPoolExecutor(workbench.toolchain.n_jobs()) as pool,
        ):
            list(pool.map(one, mutants))

    def judge(self, mutant: Any, required: set[str]) -> None:
        """Notes what the requirements say about one mutant."""
        for kill in self.kills[mutant.id]:
            if kill.state == "broken":
                self.wrong.append(f"{mutant.id}: {kill.note}")
            elif kill.suite not in required:
                continue
            elif kill.state == "survived":
                self.wrong.append(f"{mutant.id} survives {kill.suite}: {mutant.plants}")
            elif kill.suite == mutant.suite and kill.missed:
                missed = ", ".join(kill.missed)
                self.wrong.append(f"{mutant.id} is not noticed by {missed}, as its entry says")


def _row(mutant: Any, kills: list[Any]) -> list[str]:
    """One line of the table: what each suite said."""
    cells = []
    for kill in kills:
        text = {"survived": "survives", "broken": "BROKEN", "killed": "killed"}[kill.state]
        if kill.state == "killed" and kill.tests:
            text = f"{len(kill.tests)}: {kill.tests[0]}" if len(kill.tests) > 1 else kill.tests[0]
            named = [name for name in mutant.tests if name in kill.tests]
            if named and kill.suite == mutant.suite:
                others = len(kill.tests) - len(named)
                text = ", ".join(named) + (f" and {others} more" if others else "")
        if kill.how:
            text += f" ({kill.how.splitlines()[0]})"
        cells.append(f"{kill.suite}: {text}")
    return [mutant.id, mutant.pitfall, "; ".join(cells)]


def main() -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(description="Plants every bug and runs the tests over it.")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutants alone")
    parser.add_argument("--no-python", action="store_true", help="leave the Python suite out")
    parser.add_argument(
        "--write-kills",
        action="store_true",
        help="note in c/mutants/rt.04/kills.json which of the 20 tests fail on each bug",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    start = time.monotonic()
    screen = workbench.screen.Screen(as_json=args.json)

    folders = {name: ROOT / "c/mutants" / name for name in ("rt.04", "extra")}
    chapter, extra = (list(mutation.load_manifest(f).mutants) for f in folders.values())
    wrong = _patches_without_entry(folders, [*chapter, *extra])
    if args.only:
        known = {mutant.id for mutant in [*chapter, *extra]}
        if unknown := set(args.only) - known:
            parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
        chapter = [mutant for mutant in chapter if mutant.id in args.only]
        extra = [mutant for mutant in extra if mutant.id in args.only]

    run = Run(screen)
    run.wrong += wrong
    names = {mutant.suite for mutant in extra} | ({"rt04", "own"} if chapter else set())
    run.prepare(extra, names)
    lacking = mutants_python.missing_tools()
    if args.no_python:
        extra = [mutant for mutant in extra if mutant.suite != "python"]
    elif lacking:
        run.wrong.append(f"the Python suite needs {', '.join(lacking)} (or give --no-python)")
    else:
        run.prepare_python()
    if not run.wrong:
        run.attack(chapter, lambda _: ["rt04", "own", "python"])
        run.attack(extra, lambda mutant: [mutant.suite])
        for mutant in chapter:
            run.judge(mutant, {"rt04", "own"})
        for mutant in extra:
            run.judge(mutant, {mutant.suite})
    if not args.only and not run.wrong:
        _compare_kills(run, folders["rt.04"] / "kills.json", args.write_kills, screen)
    _report(run, [*chapter, *extra], time.monotonic() - start, screen)
    return 1 if run.wrong else 0


def _patches_without_entry(folders: dict[str, Path], mutants: list[Any]) -> list[str]:
    known = {mutant.patch for mutant in mutants}
    files = {path for folder in folders.values() for path in folder.glob("*.patch")}
    return [f"{path.relative_to(ROOT)} has no entry" for path in sorted(files - known)]


def _compare_kills(run: Run, path: Path, write: bool, screen: Any) -> None:
    """`ol check` compares a learner's failed tests with these; they are hints, never a verdict."""
    kills = {
        bug: sorted(kill.tests)
        for bug, found in sorted(run.kills.items())
        for kill in found
        if kill.suite == "rt04" and kill.mutant.patch.parent == path.parent
    }
    lines = ",\n".join(f"  {json.dumps(bug)}: {json.dumps(tests)}" for bug, tests in kills.items())
    text = "{\n" + lines + "\n}\n"
    if write:
        path.write_text(text, encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != text:
        screen.line("note: kills.json is not up to date: scripts/mutants.py --write-kills", "warn")


def _report(run: Run, mutants: list[Any], seconds: float, screen: Any) -> None:
    seen = [mutant for mutant in mutants if mutant.id in run.kills]
    screen.table(
        ["bug", "what", "noticed by"], [_row(mutant, run.kills[mutant.id]) for mutant in seen]
    )
    python = [k for kills in run.kills.values() for k in kills if k.suite == "python"]
    if python:
        n_killed = sum(kill.state == "killed" for kill in python)
        screen.line(f"The Python suite notices {n_killed} of the {len(python)} it was shown.")
    for line in run.wrong:
        screen.line(line, "bad")
    verdict = f"{len(run.wrong)} problems" if run.wrong else "all noticed"
    style = "bad" if run.wrong else "good"
    screen.line(f"{len(seen)} planted bugs, {verdict}, {seconds:.0f} s", style)
    document = {
        "passed": not run.wrong,
        "seconds": round(seconds, 1),
        "problems": run.wrong,
        "mutants": {
            mutant.id: {
                kill.suite: {"state": kill.state, "tests": list(kill.tests), "how": kill.how}
                for kill in run.kills[mutant.id]
            }
            for mutant in seen
        },
    }
    if screen.as_json:
        print(json.dumps(document, indent=2))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except workbench.trouble.Trouble as trouble:
        print(f"mutants: {trouble.what}\n    {trouble.remedy}", file=sys.stderr)
        sys.exit(3)
