"""Where the chapter's files are: the C sources, the tests, the planted bugs, the parity cases.

They exist once, in the repository. A wheel carries a copy under ``kvpool/workbench/data``, laid out
like the repository's root, so every path below is the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .trouble import Trouble

__all__ = ["Assets", "find_assets"]

MODULE = "rt.04"
CACHE_MODULE = "L8.3"
POOL_C = Path("c/src/runtime/kv_pool.c")
OWN_TESTS = Path("c/tests/rt04-kv-pool")

# What `ol start` gives a learner to read: the interfaces, without this implementation's extras.
LEARNER_HEADERS = ("abi.h", "ds.h", "kv_pool.h", "numerics.h")


@dataclass(frozen=True)
class Assets:
    """The folder that holds ``c/``, ``conformance/`` and ``formats/``, and what is in it."""

    root: Path

    @property
    def include(self) -> Path:
        return self.root / "c/include"

    @property
    def src(self) -> Path:
        return self.root / "c/src"

    @property
    def tests(self) -> Path:
        return self.root / "c/tests"

    @property
    def pool_c(self) -> Path:
        return self.root / POOL_C

    @property
    def chapter_test(self) -> Path:
        return self.tests / "rt04/test_kv_pool.c"

    @property
    def own_tests(self) -> list[Path]:
        return sorted((self.root / OWN_TESTS).glob("*.c"))

    @property
    def test_helpers(self) -> list[Path]:
        return [self.tests / "tl_test.c", self.tests / "tl_count_alloc.c"]

    @property
    def mutants(self) -> Path:
        return self.root / "c/mutants"

    @property
    def conformance(self) -> Path:
        return self.root / "conformance"

    @property
    def helper_units(self) -> list[Path]:
        """The units below the pool: what a learner's kv_pool.c is linked with."""
        below = [*(self.src / "numerics").glob("*.c"), *(self.src / "ds").glob("*.c")]
        return sorted([*below, self.src / "runtime/abi.c"])

    @property
    def pool_units(self) -> list[Path]:
        """The pool of the chapter and what is below it."""
        return [*self.helper_units, self.pool_c]

    @property
    def library_units(self) -> list[Path]:
        """Every unit of the library."""
        return sorted(self.src.glob("*/*.c"))


def find_assets() -> Assets:
    """The installed copy, or the repository this module runs from."""
    here = Path(__file__).resolve().parent
    for root in (here / "data", here.parents[2]):
        if (root / POOL_C).is_file():
            return Assets(root)
    raise Trouble(
        "the chapter's files are not in this installation of kvpool",
        "install a wheel of kvpool, or work from a checkout of its repository",
    )


def templates() -> Path:
    """The files that only `ol start` uses: the stub, the commented test, the README."""
    return Path(__file__).resolve().parent / "templates"
