"""What ``kvpool serve`` and ``kvpool push`` have in common: options, certificates, the model."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool import KvPoolError, namespace

from .generate import _at_least, _load

if TYPE_CHECKING:
    from kvpool.engine.llama import Llama
    from kvpool.engine.tokenizer import Tokenizer

__all__ = ["add_model_options", "load", "needs_grpc", "read_file", "read_token"]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that both sides must agree on, and how fast each computes."""
    parser.add_argument("--model", metavar="PATH", help="any Llama-architecture GGUF file")
    parser.add_argument(
        "--block-tokens", type=_at_least(1), default=16, metavar="N", help="a block (default 16)"
    )
    parser.add_argument("--blocks", type=_at_least(1), metavar="N", help="of the pool")
    parser.add_argument(
        "--threads", type=_at_least(1), metavar="N", help="of the computation (default: all cores)"
    )
    parser.add_argument(
        "--token-file", metavar="PATH", help="the bearer token: the first line of a file"
    )


def needs_grpc() -> None:
    """One line instead of a traceback where the transfer extra is missing."""
    try:
        import grpc  # noqa: F401
        import grpc_health  # noqa: F401
    except ImportError as error:
        raise KvPoolError(
            f"the package {error.name!r} is missing: pip install 'kvpool[transfer]'"
        ) from error


def read_file(option: str, path: str | None) -> bytes | None:
    """The bytes of a file that an option names; None without one."""
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise KvPoolError(f"{option} {path}: {error.strerror or error}") from error


def read_token(path: str | None) -> str | None:
    """The token, which is kept out of the command line because anybody can see that."""
    data = read_file("--token-file", path)
    if data is None:
        return None
    try:
        return data.decode("ascii").partition("\n")[0].strip()
    except UnicodeDecodeError as error:
        raise KvPoolError(f"--token-file {path}: not ASCII ({error})") from error


def load(
    args: argparse.Namespace, show: Any, check: Callable[[], None]
) -> tuple[Llama, Tokenizer, str, int]:
    """The model, its tokenizer, its name, and the root of its namespace.

    The root is made of the name and of every byte of the file, so blocks of another model, or of
    another quantization of this one, are refused and not read wrongly.
    """
    model, tokenizer, name, path = _load(args, show, check)
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            check()
            digest.update(piece)
    return model, tokenizer, name, namespace(model=name, revision=digest.digest())
