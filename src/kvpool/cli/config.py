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
        description="Prints one path or the version, for build scripts: "
        "cc -I$(kvpool config --include) program.c $(kvpool config --library)",
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--include", action="store_true", help="the directory of the C headers")
    which.add_argument("--library", action="store_true", help="the path of the shared library")
    which.add_argument("--version", action="store_true", help="the version of the package")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints what was asked for; KvPoolError if it was not installed."""
    if args.version:
        print(__version__)
    elif args.include:
        path = Path(get_include())
        if not (path / "tinyllm.h").is_file():
            raise KvPoolError(f"no C headers in {path}: the package was built without them")
        print(path)
    else:
        try:
            print(get_library())
        except FileNotFoundError as error:
            raise KvPoolError(f"{error}: the package was built without it") from error
    return 0
