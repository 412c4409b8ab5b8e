"""Keeps compiled objects from one `ol check` to the next.

A learner checks dozens of times, and all but one file are the same each time: the tests, the
library, 32 mutants of it. An object is kept under a digest of everything that went into it: the
compiler, the flags, the file and every header that it reaches, by name and content.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ObjectCache", "reached_headers"]

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_MAX_OBJECTS = 400


def reached_headers(source: Path, include: Sequence[Path]) -> list[tuple[str, Path]]:
    """The headers that a file includes with quotes, at any depth: as written, and where found.

    Looks where a compiler looks: beside the including file, then in ``include``, in order.
    """
    found: dict[Path, str] = {}
    todo = [source]
    while todo:
        file = todo.pop()
        for name in _INCLUDE.findall(file.read_text("utf-8", "replace")):
            for folder in (file.parent, *include):
                header = (folder / name).resolve()
                if header.is_file():
                    if header not in found:
                        found[header] = name
                        todo.append(header)
                    break
    return [(name, header) for header, name in found.items()]


@functools.lru_cache(maxsize=4096)
def _digest(path: Path, size: int, mtime_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _content(path: Path) -> str:
    stat = path.stat()
    return _digest(path, stat.st_size, stat.st_mtime_ns)


class ObjectCache:
    """A folder of objects, each beside the warnings that the compiler gave for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def key(self, compiler: Sequence[str], source: Path, include: Sequence[Path]) -> str:
        """The digest of what goes into an object. Only names, not places: a mutant is built in
        another folder each time."""
        parts = [*compiler, source.name, _content(source)]
        for name, header in sorted(reached_headers(source, include)):
            parts += [name, _content(header)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def get(self, key: str, out: Path) -> str | None:
        """Copies an object to ``out`` and returns its warnings; None when it is not there."""
        try:
            shutil.copyfile(self.folder / f"{key}.o", out)
            return (self.folder / f"{key}.txt").read_text(encoding="utf-8")
        except OSError:
            return None

    def put(self, key: str, out: Path, warnings: str) -> None:
        """Keeps an object. A cache that cannot be written is no error."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            for suffix, data in ((".txt", warnings.encode()), (".o", out.read_bytes())):
                handle, name = tempfile.mkstemp(dir=self.folder)
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(name, self.folder / (key + suffix))

    def prune(self) -> None:
        """Removes the oldest objects beyond a few hundred."""
        with contextlib.suppress(OSError):
            objects = sorted(self.folder.glob("*.o"), key=lambda path: path.stat().st_mtime)
            for path in objects[:-_MAX_OBJECTS]:
                path.with_suffix(".txt").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
