"""``kvpool trace synth``: a trace from a seed, and what is in it."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import sys
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from kvpool import KvPoolError

from ._replay_options import at_least
from ._tables import print_table, progress

_WORKLOADS = ("mixed", "chat", "agents", "shared", "few-shot")


def add_command(commands: Any) -> None:
    """Adds ``trace`` to the command line."""
    parser = commands.add_parser("trace", help="make traces", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    synth = actions.add_parser(
        "synth",
        help="a synthetic trace from a seed",
        description="Writes a synthetic trace in Qwen-Bailian's format (hash_ids of --block-tokens "
        "tokens), and prints its distributions. The same seed gives the same bytes.",
        allow_abbrev=False,
    )
    synth.add_argument("--workload", choices=_WORKLOADS, default="mixed", help="(default mixed)")
    synth.add_argument(
        "--requests", type=at_least(1), default=5000, metavar="N", help="(default 5000)"
    )
    synth.add_argument("--seed", type=at_least(0), default=0, metavar="S", help="(default 0)")
    synth.add_argument(
        "--block-tokens", type=at_least(1, 2**16), default=16, metavar="N", help="(default 16)"
    )
    synth.add_argument(
        "--out", metavar="FILE", help="where to: .gz and .zst are compressed, - is stdout"
    )
    synth.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the trace, prints its distributions (on stderr when the trace goes to stdout)."""
    from kvpool.replay import WORKLOADS, synthesize
    from kvpool.replay.synth import to_rows

    lengths: list[tuple[int, int, int]] = []
    seen: set[int] = set()
    blocks = again = 0
    first = last = None
    sessions: dict[str | None, int] = {}
    with _output(args.out) as out, progress("making", float(args.requests)) as bar:
        stream = synthesize(
            args.workload, seed=args.seed, requests=args.requests, block_tokens=args.block_tokens
        )
        for batch in stream:
            for request in batch:
                lengths.append((request.input_length, request.output_length, request.n_blocks))
                sessions[request.session] = sessions.get(request.session, 0) + 1
                ids = request.ids.tolist()
                blocks += len(ids)
                again += sum(id in seen for id in ids)
                seen.update(ids)
                first = request.arrival_s if first is None else first
                last = request.arrival_s
            if out is not None:
                for row in to_rows(batch):
                    out.write(json.dumps(row, separators=(",", ":")) + "\n")
            bar(float(len(lengths)), len(lengths), "requests")
    file = sys.stderr if args.out == "-" else sys.stdout
    if file is None:
        return 0
    about = (
        WORKLOADS[args.workload].about if args.workload in WORKLOADS else "all workloads at once"
    )
    table = np.array(lengths)
    turns = np.array(list(sessions.values()))
    before, sys.stdout = sys.stdout, file
    try:
        print(
            f"{args.workload}: {about}\n{len(lengths):,} requests of {len(sessions):,} sessions in "
            f"{(last or 0) - (first or 0):,.0f} s; {blocks:,} blocks of {args.block_tokens}, "
            f"{again:,} of them ({again / max(blocks, 1):.1%}) seen before\n"
        )
        rows = [
            [
                name,
                *(f"{np.quantile(x, q):,.0f}" for q in (0.1, 0.5, 0.9, 0.99)),
                f"{x.mean():,.1f}",
            ]
            for name, x in (
                ("prompt tokens", table[:, 0]),
                ("answer tokens", table[:, 1]),
                ("turns of a session", turns),
            )
        ]
        print_table("distributions", ["", "10%", "50%", "90%", "99%", "mean"], rows)
    finally:
        sys.stdout = before
    return 0


@contextmanager
def _output(path: str | None) -> Any:
    if path is None:
        yield None
        return
    if path == "-":
        yield sys.stdout
        return
    if path.endswith(".zst"):
        try:
            import zstandard
        except ImportError as error:
            from kvpool.replay import MissingPackage

            raise MissingPackage.of("zstandard", "zst files") from error
    try:
        with open(path, "wb") as raw:
            compressed: IO[bytes] | Any = raw
            if path.endswith(".gz"):
                compressed = gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="")
            elif path.endswith(".zst"):
                compressed = zstandard.ZstdCompressor().stream_writer(raw, closefd=False)
            with io.TextIOWrapper(compressed, encoding="utf-8", write_through=False) as text:
                yield text
    except OSError as error:
        raise KvPoolError(f"{path}: {error.strerror or error}") from error
