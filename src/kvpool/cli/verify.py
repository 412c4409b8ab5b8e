"""``kvpool verify``: whether files are valid envelopes, said by the exit code."""

from __future__ import annotations

import argparse
from typing import Any

from kvpool.wire import EnvelopeFile

from ._envelopes import each_file


def add_command(commands: Any) -> None:
    """Adds ``verify`` to the command line."""
    parser = commands.add_parser(
        "verify",
        help="check files of envelopes; the exit code is the verdict",
        description="Holds each file to every reader rule of the format, and its seal, if it has "
        "one, to the envelope. Prints nothing about valid files. Exit code: 0 all are valid, 1 one "
        "is not, 2 one could not be read; a line on stderr says which rule, field and offset.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verifies the files; the exit code."""
    return each_file("verify", args.files, _verify)


def _verify(path: str) -> int:
    with EnvelopeFile(path) as file:
        file.verify()
    return 0
