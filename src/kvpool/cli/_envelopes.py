"""What inspect, verify and diff share: each file's trouble is one line and an exit code."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpool import (
    CorruptEnvelope,
    InvalidArgument,
    KvPoolError,
    ShapeMismatch,
    StorageError,
    block_hashes,
)

from ._tables import clean

__all__ = ["EXIT_BAD", "EXIT_TROUBLE", "each_file", "namespace_arg", "one_line", "tokens_arg"]

EXIT_BAD, EXIT_TROUBLE = 1, 2
_MAX_TOKENS_BYTES = 1 << 28


def one_line(error: BaseException) -> str:
    """The text of an error without line breaks, and without the name of the C function."""
    return re.sub(r"^tl_kv_\w+: ", "", " ".join(str(error).split()))


def each_file(command: str, paths: Sequence[str], look: Callable[[str], int]) -> int:
    """Calls look(path) for each; what it raises is told in one line. The worst exit code."""
    return max(_one_file(command, path, look) for path in paths)


def _one_file(command: str, path: str, look: Callable[[str], int]) -> int:
    try:
        return look(path)
    except BrokenPipeError:
        raise
    except (KvPoolError, OSError, MemoryError) as error:
        if sys.stderr is not None:
            sys.stdout.flush()
            text = one_line(error).removeprefix(f"{path}: ")
            print(clean(f"kvpool {command}: {path}: {text}"), file=sys.stderr)
        return EXIT_BAD if isinstance(error, (CorruptEnvelope, ShapeMismatch)) else EXIT_TROUBLE


def tokens_arg(text: str) -> NDArray[np.uint32]:
    """``--tokens``: ids with commas or spaces between them, or a file of them."""
    if not re.fullmatch(r"[\d,\s]*", text):
        try:
            with open(text, "rb") as file:
                data = file.read(_MAX_TOKENS_BYTES + 1)
        except OSError as error:
            raise StorageError(f"--tokens {text}: {error.strerror or error}") from error
        if len(data) > _MAX_TOKENS_BYTES:
            raise InvalidArgument(f"--tokens {text}: more than {_MAX_TOKENS_BYTES} bytes")
        name, text = text, data.decode("ascii", "replace").strip().strip("[]")
    else:
        name = "the list"
    items = re.split(r"[,\s]+", text.strip(", \t\r\n"))
    items = [] if items == [""] else items
    for i, item in enumerate(items):
        if not re.fullmatch(r"\d{1,10}", item) or int(item) >= 1 << 32:
            raise InvalidArgument(
                f"--tokens: token {i} of {Path(name).name}: expected an id of 0 to 2**32 - 1, "
                f"found {item[:20]!r}"
            )
    return np.array([int(item) for item in items], np.uint32)


def namespace_arg(text: str) -> int:
    """``--namespace``: an integer of 64 bits, decimal or 0x..."""
    try:
        value = int(text, 0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
    if not 0 <= value < 1 << 64:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..2**64 - 1")
    return value


def names_of(tokens: NDArray[np.uint32], block_tokens: int, namespace: int) -> NDArray[np.uint64]:
    """The names that the full blocks of a prompt have."""
    return block_hashes(tokens, block_tokens, namespace)
