"""``kvpool replay``: what hit rate a trace gets from pools of any size, and what limits it."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool import InvalidArgument, KvPoolError

from ._replay_options import add_trace_options, at_least, positive, size, sizes, trace_stream
from ._tables import clean, progress, size_text

if TYPE_CHECKING:
    from kvpool.replay.study import Study

_DEFAULT_SIZES = [1024, 4096, 16384, 65536]
_POLICIES = ("lru", "fifo", "lfu", "position", "s3-fifo", "tinylfu", "optimal")


def add_command(commands: Any) -> None:
    """Adds ``replay`` to the command line."""
    parser = commands.add_parser(
        "replay",
        help="replay a trace of requests: hit rate by pool size, occupancy, what to buy",
        description="Replays traces of requests through real block managers and works out every "
        "pool size at once. Without a trace: a sample workload. Files may be .gz or .zst, - is "
        "stdin.",
        allow_abbrev=False,
    )
    parser.add_argument("trace", nargs="*", metavar="TRACE")
    pool = parser.add_argument_group("the pool")
    pool.add_argument(
        "--blocks", type=sizes, metavar="N[,N...]",
        help="pool sizes to replay; the distributions are of the first (default: "
        "16384 of 1024,4096,16384,65536)",
    )  # fmt: skip
    pool.add_argument("--config", metavar="MODEL", help="config.json or GGUF: sizes in bytes, too")
    pool.add_argument(
        "--kv-dtype", default="auto", metavar="TYPE", help="f32, bf16, f16, fp8, int8"
    )
    pool.add_argument(
        "--memory", type=size, metavar="SIZE", help="with --config: the pool is this large"
    )
    clock = parser.add_argument_group("the clock")
    clock.add_argument(
        "--in-flight", type=at_least(1), metavar="N",
        help="N requests at a time, first in first out (default: 64)",
    )  # fmt: skip
    clock.add_argument("--real-time", action="store_true", help="requests come when the trace says")
    clock.add_argument(
        "--prefill-rate", type=positive, metavar="R", help="prompt tokens/s of the engine"
    )
    clock.add_argument("--decode-rate", type=positive, metavar="R", help="tokens/s of each answer")
    clock.add_argument(
        "--max-running", type=at_least(1), default=256, metavar="N", help="(default 256)"
    )
    clock.add_argument(
        "--watermark", type=at_least(0), default=0, metavar="N",
        help="blocks that new requests leave to running ones (default 0)",
    )  # fmt: skip
    clock.add_argument(
        "--speed", type=positive, default=1.0, metavar="X", help="requests come X times as fast"
    )
    clock.add_argument(
        "--outputs", action="store_true", help="in flight: hold blocks for whole answers, too"
    )
    clock.add_argument(
        "--samples", type=at_least(1, 1024), metavar="N", help="answers to each prompt, by forks"
    )
    parser.add_argument(
        "--match-last", action="store_true",
        help="a prompt's last block may be hit, too (engines leave the last token to compute)",
    )  # fmt: skip
    parser.add_argument(
        "--policies", default="auto", metavar="LIST",
        help=f"orders of eviction to simulate: all, none, or some of {','.join(_POLICIES)} "
        "(default: all for traces up to 2 million blocks)",
    )  # fmt: skip
    parser.add_argument(
        "--max-blocks", type=at_least(1024), default=2**22, metavar="N",
        help="largest pool size that is worked out; bounds memory (default 4,194,304)",
    )  # fmt: skip
    add_trace_options(parser)
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")
    out.add_argument("--csv", metavar="FILE", help="the hit curve as CSV; - is stdout")
    out.add_argument("--report", metavar="FILE", help="one HTML page with charts")
    out.add_argument("--plot", metavar="FILE", help="the charts as PNG or SVG (needs matplotlib)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replays, shows, writes. Returns the exit code: 130 after Ctrl-C."""
    _check(args)
    study = _study(args)
    if args.csv:
        _write_csv(study, args.csv)
    if args.report:
        from kvpool.replay.report import render

        _write(args.report, render(study))
    if args.plot:
        from kvpool.replay.plot import plot

        plot(study, args.plot)
    if args.json:
        print(json.dumps(study.to_json(), indent=1))
    elif args.csv != "-":
        _show(study)
    if study.interrupted and sys.stderr is not None:
        print(
            f"kvpool replay: interrupted after {study.primary.requests:,} requests; these are the "
            "results so far",
            file=sys.stderr,
        )
    return 130 if study.interrupted else 0


def _check(args: argparse.Namespace) -> None:
    if args.real_time and args.in_flight:
        raise InvalidArgument("--real-time and --in-flight are two clocks: give one")
    if args.real_time and not (args.prefill_rate and args.decode_rate):
        raise InvalidArgument("--real-time needs --prefill-rate and --decode-rate, in tokens/s")
    if not args.real_time and (args.prefill_rate or args.decode_rate):
        raise InvalidArgument("--prefill-rate and --decode-rate are of --real-time")
    if args.memory is not None and not args.config:
        raise InvalidArgument("--memory needs --config: without a model a block has no bytes")
    if args.memory is not None and args.blocks:
        raise InvalidArgument("--memory and --blocks both say how large the pool is: give one")
    for name in _policy_names(args):
        if name not in _POLICIES:
            raise InvalidArgument(f"--policies: {name!r}, expected some of {','.join(_POLICIES)}")
    if args.plot and not args.plot.lower().endswith((".png", ".svg", ".pdf")):
        raise InvalidArgument(
            f"--plot {args.plot}: expected a name that ends in .png, .svg or .pdf"
        )
    _check_outputs(args)


def _check_outputs(args: argparse.Namespace) -> None:
    """What cannot be written is told before a trace is read for an hour."""
    for option in ("csv", "report", "plot"):
        path = getattr(args, option)
        if path is None or (option == "csv" and path == "-"):
            continue
        folder = Path(path).parent
        why = (
            "no such folder" if not folder.is_dir()
            else "it is a folder" if not path or Path(path).is_dir()
            else "no permission" if not os.access(path if Path(path).exists() else folder, os.W_OK)
            else None
        )  # fmt: skip
        if why is not None:
            raise InvalidArgument(f"--{option} {path}: {why}")


def _policy_names(args: argparse.Namespace) -> list[str]:
    if args.policies in ("auto", "all"):
        return list(_POLICIES)
    return [] if args.policies == "none" else [p.strip() for p in args.policies.split(",")]


def _study(args: argparse.Namespace) -> Study:
    from kvpool.replay import InFlight, RealTime, Reuse
    from kvpool.replay.study import AUTO_POLICIES, Study

    with trace_stream(args) as trace:
        per_block = None
        if args.config:
            from kvpool.replay.model_shape import read_shape

            shape = read_shape(args.config, args.kv_dtype)
            per_block = float(shape.bytes_per_token * trace.block_tokens)
        wanted = args.blocks or _DEFAULT_SIZES
        first = wanted[0] if args.blocks else 16384
        if args.memory is not None and per_block:
            first = int(args.memory // per_block)
            if first < 1:
                raise InvalidArgument(
                    f"--memory {size_text(args.memory)} is less than a block of "
                    f"{trace.block_tokens} tokens ({size_text(per_block)})"
                )
            wanted = sorted({max(first // 4, 1), max(first // 2, 1), first, 2 * first})
        wanted = sorted(set(wanted))
        settings: dict[str, Any] = {"match_last": args.match_last}
        clocks: list[InFlight | RealTime]
        try:
            if args.real_time:
                rates = {"prefill_rate": args.prefill_rate, "decode_rate": args.decode_rate}
                more = {"max_running": args.max_running, "speed": args.speed}
                settings = {"clock": "real time", **rates, **more, "watermark": args.watermark}
                clocks = [
                    RealTime(n, trace.block_tokens, watermark=args.watermark, **rates, **more)
                    for n in wanted
                ]
            else:
                settings = {"clock": "in flight", "in_flight": args.in_flight or 64, **settings}
                clocks = [
                    InFlight(
                        n, trace.block_tokens, in_flight=args.in_flight or 64,
                        match_last=args.match_last, outputs=args.outputs,
                    )
                    for n in wanted
                ]  # fmt: skip
        except MemoryError as error:
            raise KvPoolError(f"no memory for pools of {wanted} blocks: lower --blocks") from error
        reuse = Reuse(
            max_blocks=args.max_blocks, match_last=args.match_last, sizes=wanted,
            keep_names=args.policies != "none",
        )  # fmt: skip
        name = Path(trace.paths[0]).name if args.trace else trace.paths[0]
        name = clean(name) + (f" and {len(trace.paths) - 1} more" if len(trace.paths) > 1 else "")
        study = Study(
            name, trace.format, trace.block_tokens, trace.has_hashes, clocks, reuse, settings,
            main=wanted.index(first), problems=trace.problems, bytes_per_block=per_block,
        )  # fmt: skip
        with progress("replaying", trace.size) as bar:
            batches = _with_samples(trace, args.samples) if args.samples else trace
            study.run(
                batches, limit=args.limit,
                advance=lambda done: bar(float(trace.position), done, "requests"),
            )  # fmt: skip
        study.parsed_bytes = trace.position if args.trace else 0
    if not study.primary.requests and not study.interrupted:
        raise KvPoolError(f"{name}: no requests in it")
    _notes(study, args)
    names = _policy_names(args)
    if (
        names
        and not study.interrupted
        and (args.policies != "auto" or reuse.blocks <= AUTO_POLICIES)
    ):
        with progress("other policies", float(12 * len(names))) as bar:
            done = iter(range(1, 12 * len(names) + 1))

            def step() -> None:
                n = next(done, 0)
                bar(float(n), n, "simulations")

            study.simulate(names, 12, step)
    return study


def _with_samples(trace: Any, n: int) -> Any:
    for batch in trace:
        yield [request._replace(n=n) for request in batch]


def _notes(study: Study, args: argparse.Namespace) -> None:
    if not args.trace:
        study.notes.append("A workload made by kvpool trace synth --seed 0, not a log of real use.")
    if not study.has_hashes:
        study.notes.append(
            f"The format {study.format} has no hashes, so nothing is known to be shared: this is "
            "occupancy only. --synthetic-prefix TOKENS lets all prompts begin alike."
        )
    if args.synthetic_prefix and study.format in ("azure", "burstgpt"):
        study.notes.append(
            f"Hits are of a synthetic prefix: all prompts begin with the same "
            f"{args.synthetic_prefix:,} tokens. The trace itself does not say what is shared."
        )
    if study.format == "events":
        study.notes.append(
            "A log of KV events tells what was computed, not what was only hit: real hit rates are "
            "higher."
        )
    rejected = study.primary.rejected
    if rejected:
        study.notes.append(
            f"{rejected:,} requests do not fit into {study.primary.n_blocks:,} blocks even alone; "
            f"the longest has {study.reuse.longest:,} blocks."
        )
    if study.reuse.distinct > study.reuse.max_blocks:
        study.notes.append(
            f"Reuse from deeper than {study.reuse.max_blocks:,} blocks is not counted; "
            "--max-blocks raises that."
        )


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvPoolError(f"{path}: {error.strerror or error}") from error


def _write_csv(study: Study, path: str) -> None:
    head = ["blocks", "tokens", "bytes", "lru_block_hit_rate"]
    rows: list[list[Any]] = []
    for n, rate in study.curve():
        size_bytes = round(n * study.bytes_per_block) if study.bytes_per_block else ""
        rows.append([n, n * study.block_tokens, size_bytes, f"{rate:.6f}"])
    if path == "-":
        csv.writer(sys.stdout, lineterminator="\n").writerows([head, *rows])
        return
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([head, *rows])
    except OSError as error:
        raise KvPoolError(f"{path}: {error.strerror or error}") from error


def _show(study: Study) -> None:
    from ._replay_show import show

    show(study)
