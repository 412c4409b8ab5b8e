"""Plants bugs and sees whether tests notice: the one implementation behind `make mutants` and the
grading of `ol check`.

A mutant is a patch over the library (c/mutants/README.md). Only the units that the patch reaches
are compiled again; they are linked before a static library of the unchanged rest, from which the
linker then takes only what is still missing. One mutant costs a third of a second to build and a
tenth to run, under AddressSanitizer and UBSan.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import patches
from .assets import Assets
from .process import run
from .testprogram import TestRun, run_tests
from .toolchain import BuildError, Toolchain, dependents, n_jobs
from .trouble import Trouble

__all__ = [
    "Grade",
    "Kill",
    "Manifest",
    "Mutant",
    "Suite",
    "Workshop",
    "load_kills",
    "load_manifest",
    "resembling",
]

MUTANT_TEST_LIMIT_S = 10
MUTANT_LIMIT_S = 40.0


@dataclass(frozen=True)
class Mutant:
    """One planted bug; the keys of its manifest entry."""

    id: str
    patch: Path
    pitfall: str
    plants: str
    tests: tuple[str, ...]
    required: bool = False
    suite: str = "rt04"
    cpu_disable: str = ""


@dataclass(frozen=True)
class Manifest:
    """The planted bugs of one folder."""

    module: str
    threshold: float
    mutants: tuple[Mutant, ...]

    @property
    def pitfalls(self) -> dict[str, str]:
        return {mutant.id: mutant.pitfall for mutant in self.mutants}


def load_manifest(folder: Path) -> Manifest:
    """Reads ``folder/manifest.json``. Raises :class:`Trouble` when it is not one."""
    path = folder / "manifest.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        mutants = [
            Mutant(
                id=entry["id"],
                patch=folder / entry.get("patch", f"{entry['id']}.patch"),
                pitfall=entry.get("pitfall", entry.get("plants", "")),
                plants=entry["plants"],
                tests=tuple(entry.get("tests", ())),
                required=bool(entry.get("required", False)),
                suite=entry.get("suite", "rt04"),
                cpu_disable=entry.get("cpu_disable", ""),
            )
            for entry in data["mutants"]
        ]
        return Manifest(data.get("module", ""), float(data.get("threshold", 1.0)), tuple(mutants))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Trouble(f"{path} is no manifest of planted bugs: {error!r}") from None


def load_kills(folder: Path) -> dict[str, frozenset[str]]:
    """``folder/kills.json``: for each mutant every test of the chapter that fails on it.

    ``scripts/mutants.py --write-kills`` writes it. Empty where there is none: it serves hints only.
    """
    try:
        kills = json.loads((folder / "kills.json").read_text(encoding="utf-8"))
        return {bug: frozenset(tests) for bug, tests in kills.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def resembling(failed: frozenset[str], kills: dict[str, frozenset[str]]) -> list[str]:
    """The mutants on which nearly the same tests fail, the most alike first; two at most.

    Alike are sets that share two thirds of their union.

    >>> kills = {"s1": frozenset("abc"), "s2": frozenset("ab"), "s3": frozenset("xyz")}
    >>> resembling(frozenset("abc"), kills)
    ['s1', 's2']
    """
    likeness = {
        bug: len(failed & tests) / len(failed | tests) for bug, tests in kills.items() if tests
    }
    alike = [bug for bug, share in likeness.items() if share > 0.66]
    return sorted(alike, key=lambda bug: (-likeness[bug], bug))[:2]


@dataclass(frozen=True)
class Kill:
    """What one suite said to one mutant.

    ``state``: ``killed``; ``survived``, every test passed; ``broken``, the patch does not apply or
    its result does not compile. ``tests`` are those that failed; ``how`` adds ``timeout``,
    ``sanitizer`` or ``crash``.
    """

    mutant: Mutant
    suite: str
    state: str
    tests: tuple[str, ...] = ()
    how: str = ""
    note: str = ""
    seconds: float = 0.0

    @property
    def missed(self) -> tuple[str, ...]:
        """Tests that the manifest names and that passed all the same."""
        return tuple(name for name in self.mutant.tests if name not in self.tests)


@dataclass(frozen=True)
class Suite:
    """A program of tests, all but the library: its objects and the names in it."""

    name: str
    objects: tuple[Path, ...]
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grade:
    """How many of the planted bugs a set of tests notices."""

    kills: tuple[Kill, ...]
    threshold: float

    @property
    def survivors(self) -> list[Mutant]:
        return [kill.mutant for kill in self.kills if kill.state == "survived"]

    @property
    def killed(self) -> int:
        return sum(kill.state == "killed" for kill in self.kills)

    @property
    def score(self) -> float:
        return self.killed / len(self.kills) if self.kills else 0.0

    @property
    def required_survivors(self) -> list[Mutant]:
        return [mutant for mutant in self.survivors if mutant.required]

    @property
    def passed(self) -> bool:
        return self.score >= self.threshold and not self.required_survivors


class Workshop:
    """The unchanged units of a library, compiled once, and a place to build mutants of them."""

    def __init__(
        self, assets: Assets, chain: Toolchain, folder: Path, units: Sequence[Path]
    ) -> None:
        self.assets, self.chain, self.folder, self.units = assets, chain, folder, units
        self._library: Path | None = None

    @property
    def include(self) -> list[Path]:
        return [self.assets.include, self.assets.src]

    @property
    def test_include(self) -> list[Path]:
        return [*self.include, self.assets.tests]

    def library(self) -> Path:
        """The units as they are, as a static library."""
        if self._library is None:
            objects = self.chain.compile_all(self.units, self.folder / "library", self.include)
            self._library = self.chain.archive(objects, self.folder / "libunits.a")
        return self._library

    def suite(self, name: str, sources: Iterable[Path]) -> Suite:
        """Compiles a program of tests and asks for its names. Raises :class:`BuildError`.

        Named ``unit/...``, only the tests that a mutant's entry names are run over the mutant.
        """
        folder = self.folder / f"suite-{name.replace('/', '-')}"
        objects = self.chain.compile_all(
            [*sources, *self.assets.test_helpers], folder, self.test_include
        )
        program = self.chain.link([*objects, self.library()], folder / "reference")
        listed = run([program, "--list"], timeout_s=30, env=self.chain.env)
        names = tuple(listed.stdout.split())
        if listed.code != 0 or not names:
            raise BuildError(f"running {name}", f"it lists no tests ({listed.ending()})")
        return Suite(name, tuple(objects), names)

    def run_reference(self, suite: Suite, names: Sequence[str] = ()) -> TestRun:
        """The suite, or some of its tests, over the library as it is."""
        program = self.folder / f"suite-{suite.name.replace('/', '-')}" / "reference"
        return run_tests(
            program,
            expected=suite.tests,
            names=names,
            env=self.chain.env,
            test_limit_s=60,
            limit_s=120,
        )

    def mutate(self, mutant: Mutant) -> list[Path]:
        """The objects of a mutant that differ from the library's.

        Raises :class:`patches.PatchError` and :class:`BuildError`.
        """
        folder = self.overlay(mutant, Path("c/src"))
        changed = {
            (self.assets.src / path.relative_to(folder / "src")).resolve()
            for path in (folder / "src").rglob("*.[ch]")
        }
        include = [folder / "src", *self.include]
        objects = []
        for unit in dependents(changed, self.units, self.include):
            mutated = folder / "src" / unit.relative_to(self.assets.src)
            out = folder / f"{unit.stem}.o"
            self.chain.compile(mutated if mutated.is_file() else unit, out, include)
            objects.append(out)
        if not objects:
            raise patches.PatchError(f"{mutant.patch.name} reaches no unit of the library")
        return objects

    def overlay(self, mutant: Mutant, below: Path) -> Path:
        """Writes the patched files to the mutant's folder, named as below ``below``."""
        folder = self.folder / "mutants" / mutant.id
        shutil.rmtree(folder, ignore_errors=True)
        try:
            diff = patches.parse(mutant.patch.read_text(encoding="utf-8"))
        except OSError as error:
            raise patches.PatchError(f"{mutant.patch}: {error.strerror}") from None
        for patch in diff:
            original = self.assets.root / patch.path
            if ".." in Path(patch.path).parts or not original.is_file():
                raise patches.PatchError(f"{patch.path}: there is no such file")
            out = folder / below.name / Path(patch.path).relative_to(below)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(
                patches.apply(patch, original.read_text(encoding="utf-8")), encoding="utf-8"
            )
        return folder

    def attack(self, mutant: Mutant, suites: Sequence[Suite]) -> list[Kill]:
        """Builds a mutant once and runs each suite over it."""
        start = time.monotonic()
        try:
            objects = self.mutate(mutant)
            kills = [self._run_over(mutant, suite, objects) for suite in suites]
        except (patches.PatchError, BuildError, ValueError) as error:
            note = "; ".join(str(error).splitlines()[:2])[:400]
            seconds = time.monotonic() - start
            return [Kill(mutant, s.name, "broken", note=note, seconds=seconds) for s in suites]
        shutil.rmtree(self.folder / "mutants" / mutant.id, ignore_errors=True)
        return kills

    def _run_over(self, mutant: Mutant, suite: Suite, objects: Sequence[Path]) -> Kill:
        start = time.monotonic()
        program = self.folder / "mutants" / mutant.id / f"{suite.name.replace('/', '-')}.exe"
        self.chain.link([*suite.objects, *objects, self.library()], program)
        env = dict(self.chain.env)
        if mutant.cpu_disable:
            env["TL_CPU_DISABLE"] = mutant.cpu_disable
        result = run_tests(
            program,
            expected=suite.tests,
            names=mutant.tests if suite.name.startswith("unit/") else (),
            env=env,
            test_limit_s=MUTANT_TEST_LIMIT_S,
            limit_s=MUTANT_LIMIT_S,
        )
        failed = tuple(sorted(result.failed_names))
        how = ""
        if result.hung:
            how = "timeout"
        elif any("ERROR: AddressSanitizer" in test.text for test in result.failed):
            how = "sanitizer"
        elif result.missing and not failed:
            how = "crash"
        state = "survived" if result.passed else "killed"
        return Kill(mutant, suite.name, state, failed, how, "", time.monotonic() - start)

    def grade(
        self,
        manifest: Manifest,
        suite: Suite,
        on_kill: Callable[[Kill], None] | None = None,
    ) -> Grade:
        """Runs the suite over every mutant of the manifest, on all cores."""
        self.library()

        def one(mutant: Mutant) -> Kill:
            [kill] = self.attack(mutant, [suite])
            if on_kill is not None:
                on_kill(kill)
            return kill

        with ThreadPoolExecutor(n_jobs()) as pool:
            kills = tuple(pool.map(one, manifest.mutants))
        broken = [kill for kill in kills if kill.state == "broken"]
        if broken:
            raise Trouble(
                f"planted bug {broken[0].mutant.id} is itself broken: {broken[0].note}",
                "this is a fault of the installation, not of your tests",
            )
        return Grade(kills, manifest.threshold)
