"""Runs a program of tests (c/tests/tl_test.h) and understands what it says.

One line a test, ``ok``, ``FAIL`` or ``skip``; what was printed before the line belongs to it. With
``--isolate`` each test is a process of its own, so a crash or an endless loop is one failed test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .process import Finished, run

__all__ = ["Failure", "Outcome", "TestRun", "run_tests"]

_VERDICT = re.compile(r"^(ok  |FAIL|skip) (\w+) \(([\d.]+) ms\)$")
_CHECK = re.compile(r"^(?P<file>\S*?)(?P<name>[\w.-]+\.(?:[ch]|py)):(?P<line>\d+): (?P<text>.*)$")
_ASAN = re.compile(r"ERROR: AddressSanitizer:? (.*)")
_UBSAN = re.compile(r"^(?P<file>\S+):(?P<line>\d+):\d+: runtime error: (?P<text>.*)$")
_FRAME = re.compile(r"^\s*#\d+ 0x[0-9a-f]+ in (?P<function>\S+) (?P<file>\S+?):(?P<line>\d+)")
_TIMEOUT = re.compile(r"^\s*no end after (\d+) s$")
_ENDED = re.compile(r"^\s*(killed by signal .*|the process ended with code .*)$")

MAX_TIMEOUTS = 3  # a loop that never ends is in every test: three are enough to see it


@dataclass(frozen=True)
class Failure:
    """Why a test failed: one headline and the places that belong to it."""

    headline: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """One test: ``passed``, ``failed`` or ``skipped``, and everything it printed."""

    name: str
    result: str
    ms: float
    text: str

    @property
    def hung(self) -> bool:
        return any(_TIMEOUT.match(line) for line in self.text.splitlines())

    def failure(self, own_file: str = "") -> Failure:
        """The reason in words. ``own_file`` is the name of the file whose frames matter."""
        lines = self.text.splitlines()
        details: list[str] = []
        headline = ""
        for line in lines:
            if match := _ASAN.search(line):
                headline = headline or f"AddressSanitizer: {_plain_asan(match[1])}"
            elif match := _UBSAN.match(line):
                where = f"{Path(match['file']).name}:{match['line']}"
                headline = headline or f"UBSan: {match['text']} at {where}"
            elif match := _TIMEOUT.match(line):
                headline = headline or (
                    f"no end after {match[1]} s: a loop that does not stop, or a list that has "
                    "become a circle"
                )
            elif match := _CHECK.match(line):
                headline = headline or f"{match['name']}:{match['line']}: {match['text']}"
            elif line.startswith(("    with ", "counting allocator:")):
                details.append(line.strip())
            elif (match := _ENDED.match(line)) and not headline:
                headline = match[1]
        frames = [m for line in lines if (m := _FRAME.match(line))]
        in_own = [m for m in frames if Path(m["file"]).name == own_file]
        details += [f"in {m['function']}, {own_file}:{m['line']}" for m in in_own[:3]]
        if frames and not in_own:
            m = frames[0]
            details.append(f"in {m['function']}, {Path(m['file']).name}:{m['line']}")
        return Failure(headline or "it failed without saying why", tuple(dict.fromkeys(details)))


def _plain_asan(text: str) -> str:
    """``heap-buffer-overflow on address 0x... at pc ...`` without the numbers."""
    return re.sub(r" (on|at) (unknown )?address .*", "", text).strip()


@dataclass
class TestRun:
    """A program's tests, and how the program itself ended."""

    __test__ = False  # not a test of ours, whatever pytest thinks of the name

    tests: list[Outcome] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    ended: Finished | None = None

    @property
    def passed(self) -> bool:
        return (
            bool(self.tests)
            and not self.missing
            and not self.failed
            and self.ended is not None
            and self.ended.code == 0
        )

    @property
    def failed(self) -> list[Outcome]:
        return [test for test in self.tests if test.result == "failed"]

    @property
    def failed_names(self) -> frozenset[str]:
        return frozenset(test.name for test in self.failed)

    @property
    def hung(self) -> bool:
        timed_out = self.ended is not None and self.ended.timed_out
        return timed_out or any(test.hung for test in self.tests)


def run_tests(
    program: Path | Sequence[str | Path],
    *,
    expected: Sequence[str] | None = None,
    names: Sequence[str] = (),
    test_limit_s: int = 10,
    limit_s: float = 120,
    env: dict[str, str] | None = None,
    isolate: bool = True,
    on_test: Callable[[Outcome], None] | None = None,
) -> TestRun:
    """Runs the program's tests, or the named ones, each in a process of its own.

    ``program`` is a file, or a command.

    ``expected`` are the names that have to appear (by default what ``--list`` says); those that do
    not, because the program died or ran out of time first, end up in ``missing``. After
    ``MAX_TIMEOUTS`` tests without an end the rest is not run.
    """
    found = TestRun()
    start = [program] if isinstance(program, Path) else list(program)
    if expected is None:
        listed = run([*start, "--list"], timeout_s=20, env=env)
        if listed.code != 0:
            found.ended = listed
            return found
        expected = listed.stdout.split()
    if names:
        expected = names
    text: list[str] = []

    def see(line: str) -> bool:
        match = _VERDICT.match(line)
        if match is None:
            text.append(line)
            return False
        word = {"ok  ": "passed", "FAIL": "failed", "skip": "skipped"}[match[1]]
        outcome = Outcome(match[2], word, float(match[3]), "\n".join(text))
        text.clear()
        found.tests.append(outcome)
        if on_test is not None:
            on_test(outcome)
        return sum(test.hung for test in found.tests) >= MAX_TIMEOUTS

    options = ["--isolate", "--timeout", str(test_limit_s)] if isolate else []
    command = [*start, *options, *names]
    found.ended = run(command, timeout_s=limit_s, merge=True, env=env, on_line=see)
    seen = {test.name for test in found.tests}
    found.missing = [name for name in expected if name not in seen]
    return found
