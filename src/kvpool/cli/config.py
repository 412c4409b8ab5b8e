"""``kvpool config``: where the installed C headers and the shared library are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvpool import KvPoolError, __version__, get_include, get_library


def add_command(commands: Any) -> None:
    """Adds ``config`` to the command line."""
    parser = commands.add_parser(
        "config",
        help="print where the C headers and the shared library are",
        description="Prints what is asked for, one line each in the order include, library, "
        "version; all three without an option. For build scripts: "
        "cc -I$(kvpool config --include) program.c $(kvpool config --library)",
        allow_abbrev=False,
    )
    parser.add_argument("--include", action="store_true", help="the directory of the C headers")
    parser.add_argument("--library", action="store_true", help="the path of the shared library")
    parser.add_argument("--version", action="store_true", help="the version of the package")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints what was asked for; KvPoolError, and nothing is printed, if it was not installed."""
    everything = not (args.include or args.library or args.version)
    lines: list[str] = []
    if args.include or everything:
        lines.append(_include())
    if args.library or everything:
        lines.append(_library())
    if args.version or everything:
        lines.append(__version__)
    print("\n".join(lines))
    return 0


def _include() -> str:
    path = Path(get_include())
    if not (path / "tinyllm.h").is_file():
        raise KvPoolError(f"no C headers in {path}: the package was built without them")
    return str(path)


def _library() -> str:
    try:
        return get_library()
    except FileNotFoundError as error:
        raise KvPoolError(f"{error}: the package was built without it") from error
