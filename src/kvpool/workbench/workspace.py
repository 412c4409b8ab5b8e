"""A learner's folder: made by `ol start`, read by everything else.

c/src/runtime/kv_pool.c      the file to write
c/include/tinyllm/*.h        the interfaces, to read
c/tests/rt04-kv-pool/*.c     the learner's own tests
c/tests/tl_test*.h           the helpers for them, to read
formats/kv-block.md          the bytes of an envelope
.ol/                         what passed last; safe to delete
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from .assets import LEARNER_HEADERS, OWN_TESTS, POOL_C, Assets, templates
from .trouble import UsageError

__all__ = ["Workspace", "cache_folder", "create"]


@dataclass(frozen=True)
class Workspace:
    """An existing workspace; ``root`` holds ``c/``."""

    root: Path

    @classmethod
    def find(cls, folder: Path) -> Workspace:
        """The workspace at ``folder`` or above it. Raises :class:`UsageError`."""
        start = folder.resolve()
        for root in (start, *start.parents):
            if (root / POOL_C).is_file() and not (root / "c/mutants").is_dir():
                return cls(root)
        raise UsageError(
            f"{start} is no workspace: there is no {POOL_C} in it or above it. "
            "Make one with: ol start rt.04 --dir DIR"
        )

    @classmethod
    def at(cls, folder: Path) -> Workspace | None:
        """The same, or None."""
        try:
            return cls.find(folder)
        except UsageError:
            return None

    @property
    def pool_c(self) -> Path:
        return self.root / POOL_C

    @property
    def own_tests(self) -> list[Path]:
        return sorted((self.root / OWN_TESTS).glob("*.c"))

    @property
    def _state(self) -> Path:
        return self.root / ".ol/passed.json"

    def _digest(self) -> str:
        return hashlib.sha256(self.pool_c.read_bytes()).hexdigest()

    def remember(self, passed: bool) -> None:
        """Notes that this very kv_pool.c passed its check, or that it did not."""
        if not passed:
            self._state.unlink(missing_ok=True)
            return
        self._state.parent.mkdir(exist_ok=True)
        self._state.write_text(json.dumps({"kv_pool.c": self._digest()}) + "\n", encoding="utf-8")

    def has_passed(self) -> bool:
        """Whether the file as it is now passed its last check."""
        try:
            noted = json.loads(self._state.read_text(encoding="utf-8"))
            return bool(noted["kv_pool.c"] == self._digest())
        except (OSError, ValueError, KeyError, TypeError):
            return False


def cache_folder(workspace: Workspace | None) -> Path | None:
    """Where compiled objects are kept: in the workspace, or where OL_CACHE says."""
    if asked := os.environ.get("OL_CACHE"):
        return Path(asked)
    return None if workspace is None else workspace.root / ".ol/cache"


def create(assets: Assets, folder: Path, *, force: bool = False) -> list[Path]:
    """Writes a workspace and returns the files, relative to ``folder``.

    Nothing is written when one of them exists already, unless ``force``; tests of the learner's own
    are never touched. Raises :class:`UsageError`.
    """
    if (folder / "c/mutants").is_dir():
        raise UsageError(f"{folder} is a checkout of the project, not a place for a workspace")
    here = templates()
    files: dict[Path, Path] = {
        POOL_C: here / "kv_pool.c",
        OWN_TESTS / "example.c": here / "example.c",
        Path("README.md"): here / "README.md",
        Path(".gitignore"): here / "gitignore",
        Path("formats/kv-block.md"): assets.root / "formats/kv-block.md",
    }
    for name in LEARNER_HEADERS:
        files[Path("c/include/tinyllm") / name] = assets.include / "tinyllm" / name
    for helper in sorted(assets.tests.glob("tl_*.h")):
        if "kv_pool_ext.h" not in helper.read_text(encoding="utf-8"):
            files[Path("c/tests") / helper.name] = helper
    there = [path for path in files if (folder / path).exists()]
    if there and not force:
        raise UsageError(
            f"{folder / there[0]} exists already"
            + (f", and {len(there) - 1} more" if len(there) > 1 else "")
            + "; nothing was written. --force overwrites them, your kv_pool.c included"
        )
    for path, source in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / path)
    return sorted(files)
