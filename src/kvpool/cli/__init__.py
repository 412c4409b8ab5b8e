"""The ``kvpool`` console command: one module for each of its commands.

Exit codes: 0 done; 1 a file is not valid, or differs (inspect, verify, diff); 2 the command line,
the model, the pool or a file is not right (one line on stderr says what); 130 stopped by Ctrl-C;
141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvpool import KvPoolError, __version__

from . import config, diff, generate, inspect, push, replay, serve, size, tier, trace, verify
from ._tables import clean

__all__ = ["main"]

EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line; argparse would print the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvpool",
        description="The memory layer for the KV cache of LLM engines.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvpool {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (generate, serve, push, tier, replay, size, trace, inspect, verify, diff, config):
        module.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; ``argv`` is ``sys.argv[1:]`` by default. Returns the exit code.

    >>> main(["config", "--version"])
    0.1.0
    0
    """
    args = _parser().parse_args(argv)
    name = f"kvpool {args.command}"
    if sys.stdout is None:
        return _fail(name, "stdout is closed", EXIT_USAGE)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the terminal's encoding lacks is a ?
        sys.stdout.reconfigure(errors="replace")
    try:
        code: int = args.run(args)
        sys.stdout.flush()  # a full disk or a closed pipe shows here, while it can be told
        return code
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return _fail(name, "interrupted", EXIT_INTERRUPTED)
    except (KvPoolError, OSError) as error:
        if isinstance(error, OSError):
            _silence_stdout()
        return _fail(name, str(error), EXIT_USAGE)
    except MemoryError as error:
        return _fail(name, f"out of memory ({error})", EXIT_USAGE)


def _fail(name: str, message: str, code: int) -> int:
    if sys.stderr is not None:  # print would turn to stdout
        print(clean(f"{name}: {' '.join(message.split())}"), file=sys.stderr)
    return code


def _silence_stdout() -> None:
    """Nothing can be written any more: keep the interpreter from trying once more at its exit."""
    with contextlib.suppress(AttributeError, OSError):  # there is no file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
