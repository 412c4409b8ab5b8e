"""`ol parity kv.wire.v1`: does an implementation write the bytes that everybody else writes?

The protocol is in conformance/README.md. A driver is a command; it gets all cases at once and may
hang, die or print rubbish: the suite goes on and says so.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .assets import Assets
from .build import PoolBuilder, explain_build_error
from .envelope import first_difference
from .process import Finished, run
from .toolchain import BuildError, find_toolchain
from .workspace import Workspace, cache_folder

__all__ = ["Driver", "DriverReport", "load_cases", "own_drivers", "run_driver"]

SUITE = "kv.wire.v1"
DRIVER_LIMIT_S = 60.0
_NOT_FOR_DRIVERS = ("envelope", "why")


@dataclass(frozen=True)
class Driver:
    """A command that speaks the protocol; ``skipped`` says why there is none."""

    name: str
    command: tuple[str, ...] = ()
    skipped: str = ""
    broken: str = ""
    reads: bool = True
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class DriverReport:
    """What one driver answered. ``failures`` maps a case to what is wrong with its answer."""

    driver: str
    skipped: str = ""
    n_cases: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    differences: dict[str, dict[str, Any]] = field(default_factory=dict)
    ending: str = ""
    stderr: str = ""

    @property
    def passed(self) -> bool:
        return not self.failures and not self.ending and not self.skipped and self.n_cases > 0

    def as_json(self) -> dict[str, Any]:
        return {
            "driver": self.driver,
            "passed": self.passed,
            "skipped": self.skipped,
            "cases": self.n_cases,
            "failures": self.failures,
            "differences": self.differences,
            "ending": self.ending,
            "stderr": self.stderr[-2000:],
        }


# ---- cases --------------------------------------------------------------------------------------


def load_cases(assets: Assets) -> list[dict[str, Any]]:
    """The cases with their golden envelopes; the worked example first."""
    paths = sorted((assets.conformance / "cases").glob("*.json"))
    cases = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return sorted(cases, key=lambda case: not case["name"].startswith("worked"))


def load_envelopes(assets: Assets, folder: str) -> list[dict[str, Any]]:
    """The entries of ``formats/<folder>/manifest.json``, each with its bytes under ``data``."""
    where = assets.root / "formats" / folder
    manifest = json.loads((where / "manifest.json").read_text(encoding="utf-8"))
    return [
        {**entry, "data": (where / entry["file"]).read_bytes()} for entry in manifest["envelopes"]
    ]


# ---- drivers ------------------------------------------------------------------------------------


def own_drivers(assets: Assets, scratch: Path, workspace: Workspace | None) -> list[Driver]:
    """The learner's driver in a workspace; elsewhere the project's three."""
    folder = assets.conformance / "drivers"
    if workspace is not None:
        return [_c_driver("your kv_pool.c", assets, scratch, workspace)]
    python = Driver("Python", (sys.executable, str(folder / "kvwire.py")))
    return [_c_driver("C", assets, scratch, None), python, _rust_driver(folder, scratch)]


def _c_driver(name: str, assets: Assets, scratch: Path, workspace: Workspace | None) -> Driver:
    chain = find_toolchain(scratch / "try", cache=cache_folder(workspace))
    builder = PoolBuilder(assets, chain, scratch / "driver-c")
    try:
        pool = builder.pool(assets.pool_c if workspace is None else workspace.pool_c)
        main = builder.folder / "driver.o"
        chain.compile(assets.conformance / "drivers/driver.c", main, [assets.include])
        program = builder.link("driver", pool, [main])
    except BuildError as error:
        root = assets.root if workspace is None else workspace.root
        return Driver(name, broken="\n".join(explain_build_error(error, root)))
    return Driver(name, (str(program),), env=chain.env)


def _rust_driver(folder: Path, scratch: Path) -> Driver:
    rustc = shutil.which("rustc")
    if rustc is None:
        return Driver("Rust", skipped="there is no rustc on this machine")
    program = scratch / "driver-rs"
    command: list[str | Path] = [
        rustc,
        "--edition",
        "2021",
        "-O",
        "-o",
        program,
        folder / "driver.rs",
    ]
    done = run(command, timeout_s=180, merge=True, cwd=scratch, daemons=True)
    if done.code != 0:
        return Driver("Rust", broken=f"rustc: {done.stdout.strip()[:2000] or done.ending()}")
    return Driver("Rust", (str(program),))


def custom_driver(command: str, *, reads: bool) -> Driver:
    """A driver from ``--driver``: a command line, split as a shell would."""
    return Driver(command, tuple(shlex.split(command)), reads=reads)


# ---- running ------------------------------------------------------------------------------------


def run_driver(driver: Driver, assets: Assets, limit_s: float = DRIVER_LIMIT_S) -> DriverReport:
    """Gives a driver every case, and every envelope if it reads; compares byte for byte."""
    report = DriverReport(driver.name, skipped=driver.skipped)
    if driver.skipped:
        return report
    cases = load_cases(assets)
    report.n_cases = len(cases)
    if driver.broken:
        report.ending, report.stderr = "it does not build", driver.broken
        return report

    def judge_case(case: dict[str, Any], answer: dict[str, Any]) -> str:
        text = answer.get("hex")
        try:
            found = bytes.fromhex(text if isinstance(text, str) else "?")
        except ValueError:
            return f'no {{"hex": ...}}: {str(answer)[:80]}'
        difference = first_difference(bytes.fromhex(case["envelope"]), found)
        if difference is None:
            return ""
        report.differences[case["name"]] = difference.as_json()
        return str(difference)

    requests = [{k: v for k, v in c.items() if k not in _NOT_FOR_DRIVERS} for c in cases]
    _ask(driver, driver.command, requests, [c["name"] for c in cases], report, limit_s,
         lambda i, answer: judge_case(cases[i], answer))  # fmt: skip
    if driver.reads and not report.ending:
        _read_envelopes(driver, assets, report, limit_s)
    return report


def _read_envelopes(driver: Driver, assets: Assets, report: DriverReport, limit_s: float) -> None:
    entries = [e for name in ("golden", "golden-errors") for e in load_envelopes(assets, name)]

    def judge(i: int, answer: dict[str, Any]) -> str:
        entry = entries[i]
        if answer.get("status") == entry["status"]:
            return ""
        found = answer.get("status", answer)
        return f"read as {found}, must be {entry['status']} ({entry['reason']})"

    requests = [{**entry["pool"], "hex": entry["data"].hex()} for entry in entries]
    names = [f"{entry['file']}" for entry in entries]
    report.n_cases += len(entries)
    _ask(driver, (*driver.command, "--read"), requests, names, report, limit_s, judge)


def _ask(
    driver: Driver,
    command: Sequence[str],
    requests: Sequence[dict[str, Any]],
    names: Sequence[str],
    report: DriverReport,
    limit_s: float,
    judge: Callable[[int, dict[str, Any]], str],
) -> None:
    """One run of a driver: all requests in, one line each out."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    try:
        done = run(command, timeout_s=limit_s, stdin=lines.encode(), env=driver.env)
    except OSError as error:
        report.ending = f"it cannot be started: {error.strerror or error}"
        return
    answers = [line for line in done.stdout.splitlines() if line.strip()]
    for i, name in enumerate(names):
        if i >= len(answers):
            report.failures[name] = "no answer"
            continue
        try:
            answer = json.loads(answers[i])
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            report.failures[name] = f"no JSON object: {answers[i][:80]!r}"
        elif problem := judge(i, answer):
            report.failures[name] = problem
    report.ending = _bad_ending(done, len(answers), len(names))
    if report.ending or report.failures:
        report.stderr = done.stderr.strip()


def _bad_ending(done: Finished, n_answers: int, n_requests: int) -> str:
    """What is wrong with how a driver ended, or nothing."""
    if done.timed_out or done.flooded or done.code != 0:
        return done.ending()
    if n_answers != n_requests:
        return f"{n_answers} lines for {n_requests} requests"
    return ""
