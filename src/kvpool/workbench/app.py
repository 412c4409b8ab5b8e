"""The command line of `ol`: arguments in, one verdict out."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from . import check as checking
from . import check_report, parity, tdd
from .assets import CACHE_MODULE, MODULE, POOL_C, find_assets
from .catalog import read_catalog
from .mutation import load_manifest
from .screen import Screen
from .toolchain import BuildError, Toolchain, find_toolchain
from .trouble import EXIT_FAILED, EXIT_OK, EXIT_TROUBLE, EXIT_USAGE, Trouble, UsageError
from .workspace import Workspace, cache_folder, create

__all__ = ["main"]

_DESCRIPTION = """\
Works through the chapter rt.04, the paged KV block pool: makes a workspace, checks what you write
in it, grades your tests, compares your envelopes with the golden ones. L8.3, the paged cache, is
checked over the pool you wrote.

The exit code is the verdict: 0 yes, 1 no, 2 a wrong command line, 3 no verdict possible (there is
no compiler, say)."""


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON document, for graders")
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument("--dir", type=Path, default=Path("."), help="the workspace (default: here)")
    sanitize = argparse.ArgumentParser(add_help=False)
    sanitize.add_argument(
        "--no-sanitize",
        action="store_true",
        help="build without AddressSanitizer and UBSan, where the compiler has none",
    )
    parser = argparse.ArgumentParser(
        prog="ol", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str,
        text: str,
        run: Callable[[argparse.Namespace, Screen], int],
        *parents: argparse.ArgumentParser,
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, parents=[common, *parents])
        command.set_defaults(run=run)
        return command

    start = add("start", "make a workspace with a stub of kv_pool.c", _start, place)
    start.add_argument("module")
    start.add_argument("--force", action="store_true", help="overwrite what is there")
    tests = add("tests", "what the 20 tests check, and why", _tests)
    tests.add_argument("module")
    check = add(
        "check", "build your kv_pool.c, run the 20 tests, grade your own", _check, place, sanitize
    )
    check.add_argument("module")
    check.add_argument("--only", choices=["pool", "tests"], help="one half of the check of rt.04")
    check.add_argument(
        "--ref-deps", action="store_true", help="L8.3 over the reference's pool, not over yours"
    )
    suite = add("parity", "compare envelopes with the golden ones", _parity, place)
    suite.add_argument("suite")
    suite.add_argument(
        "--driver", action="append", metavar="COMMAND", help="a driver of your own; repeatable"
    )
    suite.add_argument(
        "--read", action="store_true", help="run --driver's reader (COMMAND --read) as well"
    )
    suite.add_argument(
        "--timeout", type=float, default=parity.DRIVER_LIMIT_S, help="seconds for each driver"
    )
    diff = add("diff", "your kv_pool.c against the reference, once it has passed", _diff, place)
    diff.add_argument("module")
    cycle = add("tdd", "your own tests: red on the stub, green on your file", _tdd, place, sanitize)
    cycle.add_argument("colour", choices=["red", "green"])
    cycle.add_argument("module")
    return parser


def _need_module(name: str) -> None:
    if name == CACHE_MODULE:
        raise UsageError(
            f"{CACHE_MODULE} has no file of its own; it is checked over the pool of {MODULE}: "
            f"ol check {CACHE_MODULE}"
        )
    if name != MODULE:
        raise UsageError(
            f"there is no module {name}; this version of the workbench has {MODULE} and "
            f"{CACHE_MODULE}"
        )


# ---- commands -----------------------------------------------------------------------------------


def _start(args: argparse.Namespace, screen: Screen) -> int:
    _need_module(args.module)
    folder: Path = args.dir
    try:
        files = create(find_assets(), folder, force=args.force)
    except OSError as error:
        raise Trouble(f"{folder} cannot be written: {error}", "choose another --dir") from None
    screen.line(f"A workspace for {MODULE} is in {folder.resolve()}: {len(files)} files.", "good")
    screen.line(f"You write {POOL_C}; README.md there has the order of the work.")
    screen.line(f"Next: {_go_to(folder)}ol tests {MODULE}")
    screen.result(
        {
            "command": "start",
            "module": MODULE,
            "dir": str(folder.resolve()),
            "files": [str(path) for path in files],
        }
    )
    return EXIT_OK


def _go_to(folder: Path) -> str:
    return "" if folder.resolve() == Path.cwd() else f"cd {folder} && "


def _tests(args: argparse.Namespace, screen: Screen) -> int:
    if args.module == CACHE_MODULE:
        return _cache_tests(screen)
    _need_module(args.module)
    assets = find_assets()
    entries = read_catalog(assets.chapter_test)
    pitfalls = load_manifest(assets.mutants / MODULE).pitfalls
    screen.table(
        ["test", "kind", "what it checks", "why", "planted bugs"],
        [[e.name, e.kind, e.checks, e.why, " ".join(e.catches)] for e in entries],
    )
    screen.line()
    screen.line(f"{len(entries)} tests. The planted bugs:")
    screen.table(["bug", "pitfall"], [list(item) for item in pitfalls.items()])
    screen.result(
        {
            "command": "tests",
            "module": MODULE,
            "tests": [entry.as_json() for entry in entries],
            "pitfalls": pitfalls,
        }
    )
    return EXIT_OK


def _cache_tests(screen: Screen) -> int:
    from . import cache_check  # the one part that needs the built package

    entries = cache_check.catalog()
    screen.table(["test", "what it checks"], [list(entry.values()) for entry in entries])
    screen.result({"command": "tests", "module": CACHE_MODULE, "tests": entries})
    return EXIT_OK


def _toolchain(args: argparse.Namespace, scratch: Path, workspace: Workspace) -> Toolchain:
    """The compiler, with objects kept from one check to the next."""
    cache = cache_folder(workspace)
    chain = find_toolchain(scratch / "try", sanitize=not args.no_sanitize, cache=cache)
    if chain.cache is not None:
        chain.cache.prune()
    return chain


def _check_cache(args: argparse.Namespace, screen: Screen) -> int:
    from . import cache_check

    if args.only is not None:
        raise UsageError(f"--only belongs to {MODULE}")
    workspace = Workspace.at(args.dir)
    if not args.ref_deps and (workspace is None or not workspace.has_passed()):
        screen.line(cache_check.NEEDS_POOL, "bad")
        screen.result(
            {
                "command": "check",
                "module": CACHE_MODULE,
                "passed": False,
                "needs": MODULE,
                "error": cache_check.NEEDS_POOL,
            }
        )
        return EXIT_FAILED
    with tempfile.TemporaryDirectory(prefix="ol-") as folder:
        scratch, pool = Path(folder), None
        if not args.ref_deps:
            assert workspace is not None
            pool = cache_check.OwnSource(_toolchain(args, scratch, workspace), workspace)
        found = cache_check.check_cache(pool, scratch, screen)
    cache_check.report_cache(found, screen)
    screen.result(cache_check.cache_as_json(found))
    return EXIT_OK if found.passed else EXIT_FAILED


def _check(args: argparse.Namespace, screen: Screen) -> int:
    if args.module == CACHE_MODULE:
        return _check_cache(args, screen)
    _need_module(args.module)
    if args.ref_deps:
        raise UsageError(f"--ref-deps belongs to {CACHE_MODULE}; {MODULE} needs no other module")
    assets, workspace = find_assets(), Workspace.find(args.dir)
    with tempfile.TemporaryDirectory(prefix="ol-") as folder:
        scratch = Path(folder)
        chain = _toolchain(args, scratch, workspace)
        found = checking.Check()
        if args.only != "tests":
            found.pool = checking.check_pool(assets, chain, scratch, workspace, screen)
        if args.only == "tests" or (args.only is None and found.passed):
            found.tests = checking.check_own_tests(assets, chain, scratch, workspace, screen)
    if args.only is None:
        workspace.remember(found.passed)
    check_report.report_check(found, assets, workspace, screen)
    screen.result(check_report.check_as_json(found, assets, workspace))
    return EXIT_OK if found.passed else EXIT_FAILED


def _parity(args: argparse.Namespace, screen: Screen) -> int:
    if args.suite != parity.SUITE:
        raise UsageError(f"there is no suite {args.suite}; this version has {parity.SUITE}")
    if args.read and not args.driver:
        raise UsageError("--read belongs to --driver; the project's own drivers always read")
    assets, workspace = find_assets(), Workspace.at(args.dir)
    tested, whose = "workspace", ""
    if args.driver:
        tested = "drivers"
    elif workspace is None:
        tested, whose = "reference", " of the reference's own drivers: no workspace here"
        screen.line(
            "Testing the reference's own drivers: no workspace here. Nothing of yours is tested; "
            "for that, run this in your workspace or give --driver.",
            "warn",
        )
    with tempfile.TemporaryDirectory(prefix="ol-") as folder:
        if args.driver:
            drivers = [parity.custom_driver(text, reads=args.read) for text in args.driver]
        else:
            drivers = parity.own_drivers(assets, Path(folder), workspace)
        reports = [parity.run_driver(driver, assets, args.timeout) for driver in drivers]
    for report in reports:
        _report_driver(report, screen)
    passed = all(report.passed or report.skipped for report in reports) and any(
        report.passed for report in reports
    )
    screen.line(("PARITY" if passed else "NO PARITY") + whose, "good" if passed else "bad")
    screen.result(
        {
            "command": "parity",
            "suite": parity.SUITE,
            "tested": tested,
            "passed": passed,
            "drivers": [report.as_json() for report in reports],
        }
    )
    return EXIT_OK if passed else EXIT_FAILED


def _report_driver(report: parity.DriverReport, screen: Screen) -> None:
    if report.skipped:
        screen.line(f"skip {report.driver}: {report.skipped}", "warn")
        return
    if report.passed:
        screen.line(f"ok   {report.driver}: {report.n_cases} cases, byte for byte", "good")
        return
    n_failed = len(report.failures)
    ending = f"; {report.ending}" if report.ending else ""
    screen.line(f"FAIL {report.driver}: {n_failed} of {report.n_cases} cases{ending}", "bad")
    unanswered = [name for name, what in report.failures.items() if what == "no answer"]
    for name, what in report.failures.items():
        if what != "no answer":
            screen.wrapped(f"{name}: {what}", "     ")
    if unanswered:
        screen.wrapped(", ".join(unanswered), "     no answer: ")
    for line in report.stderr.splitlines()[-10:]:
        screen.line(f"     | {line}", "dim")


def _diff(args: argparse.Namespace, screen: Screen) -> int:
    _need_module(args.module)
    assets, workspace = find_assets(), Workspace.find(args.dir)
    if not workspace.has_passed():
        screen.line(
            "The reference is shown once your file has passed: ol check rt.04. "
            "(A file that changed since then has to pass again.)",
            "warn",
        )
        screen.result({"command": "diff", "module": MODULE, "passed": False, "diff": None})
        return EXIT_FAILED
    lines = list(
        difflib.unified_diff(
            workspace.pool_c.read_text("utf-8", "replace").splitlines(),
            assets.pool_c.read_text("utf-8").splitlines(),
            f"yours/{POOL_C}",
            f"reference/{POOL_C}",
            lineterm="",
        )
    )
    for line in lines:
        style = {"+": "good", "-": "bad", "@": "dim"}.get(line[:1], "")
        screen.line(line, style)
    if not lines:
        screen.line("no difference")
    screen.result({"command": "diff", "module": MODULE, "passed": True, "diff": lines})
    return EXIT_OK


def _tdd(args: argparse.Namespace, screen: Screen) -> int:
    _need_module(args.module)
    assets, workspace = find_assets(), Workspace.find(args.dir)
    with tempfile.TemporaryDirectory(prefix="ol-") as folder:
        scratch = Path(folder)
        chain = _toolchain(args, scratch, workspace)
        found = tdd.run_tdd(args.colour, assets, chain, scratch, workspace)
    tdd.report_tdd(found, workspace, screen)
    screen.result(tdd.tdd_as_json(found, workspace))
    return EXIT_OK if found.passed else EXIT_FAILED


# ---- the program --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `ol` and returns its exit code.

    >>> main(["tests", "rt.05"])
    2
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as end:  # argparse has said why
        return EXIT_OK if end.code in (0, None) else EXIT_USAGE
    if sys.stdout is None:
        print("ol: stdout is closed", file=sys.stderr)
        return EXIT_TROUBLE
    screen = Screen(as_json=args.json)
    try:
        run: Callable[[argparse.Namespace, Screen], int] = args.run
        return run(args, screen)
    except UsageError as error:
        return _say(screen, EXIT_USAGE, str(error), "")
    except Trouble as trouble:
        return _say(screen, EXIT_TROUBLE, trouble.what, trouble.remedy)
    except BuildError as error:
        # A learner's build errors are told where they arise: this one is ours.
        return _say(screen, EXIT_TROUBLE, f"the library does not build here: {error}", "")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `ol ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _say(screen: Screen, code: int, what: str, remedy: str) -> int:
    print(f"ol: {what}", file=sys.stderr)
    if remedy:
        print(f"    {remedy}", file=sys.stderr)
    screen.result({"passed": False, "error": what, "remedy": remedy, "exit_code": code})
    return code
