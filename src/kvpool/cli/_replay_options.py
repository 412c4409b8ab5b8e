"""Options that ``kvpool replay`` and ``kvpool size`` share, and the reading of their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ._tables import parse_size

__all__ = ["add_trace_options", "at_least", "positive", "size", "sizes", "trace_stream"]


def at_least(minimum: int, maximum: int = 2**31) -> Callable[[str], int]:
    """A parser of whole numbers; 4k and 2M are understood."""

    def parse(text: str) -> int:
        scale = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower(), 1)
        try:
            value = round(float(text[:-1]) * scale) if scale > 1 else int(text.replace("_", ""))
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text} is not in {minimum}..{maximum}")
        return value

    return parse


def positive(text: str) -> float:
    """A parser of rates: numbers above 0, of which times are that can be added up."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 1e-9 <= value <= 1e12:
        raise argparse.ArgumentTypeError(f"{text} is not in 1e-9..1e12")
    return value


def sizes(text: str) -> list[int]:
    """Pool sizes in blocks, with commas between."""
    parse = at_least(1)
    return [parse(part.strip()) for part in text.split(",")]


def size(text: str) -> int:
    """Bytes, with a unit; 0 is none."""
    try:
        return 0 if text.strip() == "0" else parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_trace_options(parser: Any) -> None:
    """What says how a trace is read."""
    group = parser.add_argument_group("reading traces")
    group.add_argument(
        "--format",
        choices=("mooncake", "bailian", "azure", "burstgpt", "events", "tokens"),
        help="(default: told from the content)",
    )
    group.add_argument(
        "--block-tokens", type=at_least(1, 2**20), metavar="N",
        help="tokens of a block (default: the format's)",
    )  # fmt: skip
    group.add_argument("--skip-bad", action="store_true", help="leave bad lines out and count them")
    group.add_argument(
        "--synthetic-prefix", type=at_least(1, 2**24), default=0, metavar="TOKENS",
        help="for traces without hashes: all prompts begin with the same TOKENS tokens",
    )  # fmt: skip
    group.add_argument(
        "--limit", type=at_least(1), metavar="N", help="read the first N requests only"
    )


def trace_stream(args: argparse.Namespace) -> Any:
    """The trace of the command line, or the sample workload: a context manager that iterates."""
    from kvpool.replay import open_trace

    if args.trace:
        return open_trace(
            args.trace,
            format=args.format,
            block_tokens=args.block_tokens,
            skip_bad=args.skip_bad,
            synthetic_prefix=args.synthetic_prefix,
        )
    return _Sample(args.block_tokens or 16)


class _Sample:
    """The workload that is always there: `kvpool trace synth --seed 0`, made as it is read."""

    REQUESTS = 4000

    def __init__(self, block_tokens: int) -> None:
        from kvpool.replay.readers.source import Problems

        self.format, self.block_tokens, self.has_hashes = "synth", block_tokens, True
        self.paths = ["sample workload"]
        self.problems = Problems(skip=False)
        self.position, self.size = 0, self.REQUESTS

    def __iter__(self) -> Any:
        from kvpool.replay import synthesize

        for batch in synthesize(seed=0, requests=self.REQUESTS, block_tokens=self.block_tokens):
            self.position += len(batch)
            yield batch

    def __enter__(self) -> _Sample:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass
