"""Builds a learner's kv_pool.c with programs of tests, and says in plain words why it does not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .assets import Assets
from .process import run
from .toolchain import BuildError, Toolchain

__all__ = ["PoolBuild", "PoolBuilder"]

_FUNCTION = re.compile(r"^TL_API [^;(]*?\b(tl_\w+)\(", re.MULTILINE)
_WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter")

# Its place in the library is a unit of its own, so a pool file without it can still be linked.
_MAY_BE_THE_LIBRARYS = frozenset({"tl_crc32c"})


@dataclass(frozen=True)
class PoolBuild:
    """A compiled pool file. ``borrowed``: functions of kv_pool.h that it leaves to the library."""

    object: Path
    warnings: str
    borrowed: tuple[str, ...]


class PoolBuilder:
    """Compiles a pool file against the library's other units."""

    def __init__(self, assets: Assets, chain: Toolchain, folder: Path) -> None:
        self.assets, self.chain, self.folder = assets, chain, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._below: Path | None = None

    @property
    def include(self) -> list[Path]:
        return [self.assets.include, self.assets.src, self.assets.tests]

    def below(self) -> Path:
        """A static library of the units that a pool stands on."""
        if self._below is None:
            objects = self.chain.compile_all(
                self.assets.helper_units, self.folder / "below", self.include
            )
            self._below = self.chain.archive(objects, self.folder / "libbelow.a")
        return self._below

    def pool(self, source: Path) -> PoolBuild:
        """Compiles a kv_pool.c. Raises :class:`BuildError`."""
        out = self.folder / "kv_pool.o"
        warnings = self.chain.compile(source, out, self.include, _WARNINGS)
        missing = self._interface() - self._defined(out)
        absent = sorted(missing - _MAY_BE_THE_LIBRARYS)
        if absent:
            raise BuildError(
                f"{source.name} is not the whole interface",
                f"{source.name} does not define: {', '.join(absent)}\n"
                "every function of tinyllm/kv_pool.h has to be there (the stub has them all)",
            )
        return PoolBuild(out, warnings, tuple(sorted(missing)))

    def tests(self, name: str, sources: Sequence[Path]) -> list[Path]:
        """Compiles tests and the test helpers. Raises :class:`BuildError`."""
        all_sources = [*sources, *self.assets.test_helpers]
        return self.chain.compile_all(all_sources, self.folder / name, self.include)

    def link(self, name: str, pool: PoolBuild, objects: Sequence[Path]) -> Path:
        """A program over the learner's pool. Raises :class:`BuildError`."""
        return self.chain.link([*objects, pool.object, self.below()], self.folder / name)

    def _interface(self) -> frozenset[str]:
        header = self.assets.include / "tinyllm/kv_pool.h"
        return frozenset(_FUNCTION.findall(header.read_text(encoding="utf-8")))

    def _defined(self, file: Path) -> frozenset[str]:
        """The functions a file defines; the whole interface where nobody can say."""
        nm = shutil.which("nm")
        if nm is None:
            return self._interface()
        listed = run([nm, "-g", file], timeout_s=30)
        symbols = re.findall(r"^[0-9a-f]+ T _?(\w+)$", listed.stdout, re.MULTILINE)
        return frozenset(symbols)


_ERROR = re.compile(r"(?:^|\s)(?:fatal )?error: ")


def explain_build_error(error: BuildError, root: Path, limit: int = 12) -> list[str]:
    """The lines of a compiler's or linker's output that matter, with short paths."""
    text = error.text.replace(str(root) + "/", "")
    undefined = sorted(set(re.findall(r"undefined reference to `(\w+)'", text)))
    twice = sorted(set(re.findall(r"multiple definition of `(\w+)'", text)))
    if undefined or twice:
        told = [f"{name} is used but nobody defines it" for name in undefined]
        told += [f"{name} is defined twice" for name in twice]
        return told[:limit]
    lines = text.strip().splitlines()
    errors = [i for i, line in enumerate(lines) if _ERROR.search(line)]
    if not errors:
        return lines[:limit]
    shown: list[str] = []
    for i in errors:
        for line in lines[i : i + 3]:  # the error, the source line, the caret
            if line not in shown and (
                line is lines[i] or line.lstrip()[:1].isdigit() or "|" in line
            ):
                shown.append(line)
        if len(shown) >= limit:
            break
    more = len(errors) - sum(bool(_ERROR.search(line)) for line in shown)
    return shown + ([f"... and {more} more errors"] if more > 0 else [])
