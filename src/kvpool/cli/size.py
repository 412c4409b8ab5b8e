"""``kvpool size``: what a model's KV cache takes, what fits, and what a GiB more would bring."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from kvpool import InvalidArgument

from ._replay_options import add_trace_options, at_least, size, trace_stream
from ._tables import clean, print_table, progress, size_text

if TYPE_CHECKING:
    from kvpool.replay import Reuse
    from kvpool.replay.model_shape import ModelShape

_GIB = 2**30


def add_command(commands: Any) -> None:
    """Adds ``size`` to the command line."""
    parser = commands.add_parser(
        "size",
        help="bytes a token, blocks, sequences; with a trace, what each GiB brings",
        description="Works out a model's KV cache from transformers' config.json or a GGUF file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", required=True, metavar="MODEL", help="config.json, its folder, or a GGUF file"
    )
    parser.add_argument("--memory", type=size, metavar="SIZE", help="of the device: 80GiB")
    parser.add_argument(
        "--weights", type=size, default=0, metavar="SIZE", help="what weights and the rest take"
    )
    parser.add_argument(
        "--kv-dtype", default="auto", metavar="TYPE",
        help="f32, bf16, f16, fp8, int8 (default: as the model, 2 bytes)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=_lengths, metavar="N[,N...]", help="of sequences, in tokens"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--trace", nargs="+", metavar="TRACE", help="what would hit how much")
    add_trace_options(parser)
    parser.set_defaults(run=run)


def _lengths(text: str) -> list[int]:
    parse = at_least(1)
    return [parse(part.strip()) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Reads the model, and the trace if there is one; prints. Returns the exit code."""
    from kvpool.replay.model_shape import read_shape

    shape = read_shape(args.config, args.kv_dtype)
    pool_bytes = None
    if args.memory is not None:
        pool_bytes = args.memory - args.weights
        if pool_bytes <= 0:
            raise InvalidArgument(
                f"--weights {size_text(args.weights)} leave nothing of --memory "
                f"{size_text(args.memory)}"
            )
    block_tokens = args.block_tokens or 16
    lengths = args.lengths or _usual_lengths(shape)
    document = _document(shape, pool_bytes, block_tokens, lengths)
    interrupted = False
    if args.trace:
        reuse, trace_block_tokens, interrupted = _read_trace(args)
        document["trace"] = _bought(shape, reuse, trace_block_tokens, pool_bytes)
        document["trace"]["interrupted"] = interrupted
    if args.json:
        print(json.dumps(document, indent=1))
    else:
        _show(document)
    return 130 if interrupted else 0


def _usual_lengths(shape: ModelShape) -> list[int]:
    limit = shape.max_tokens or 131072
    return [n for n in (1024, 4096, 8192, 32768, 131072) if n <= limit] or [limit]


def _document(
    shape: ModelShape, pool_bytes: int | None, block_tokens: int, lengths: list[int]
) -> dict[str, Any]:
    per_block = shape.bytes_per_token * block_tokens
    document: dict[str, Any] = {
        "model": shape.name,
        "formula": shape.formula(),
        "notes": list(shape.notes),
        "layers": shape.layers,
        "window_layers": shape.window_layers,
        "window": shape.window,
        "bytes_per_token": shape.bytes_per_token,
        "block_tokens": block_tokens,
        "bytes_per_block": per_block,
        "sequences": [],
    }
    if pool_bytes is not None:
        blocks = pool_bytes // per_block
        document |= {"pool_bytes": pool_bytes, "blocks": blocks, "tokens": blocks * block_tokens}
    for n in lengths:
        row: dict[str, Any] = {"tokens": n, "bytes": shape.sequence_bytes(n, block_tokens)}
        if shape.window_layers:
            row["bytes_windows_freed"] = shape.sequence_bytes(n, block_tokens, windows=True)
        if pool_bytes is not None:
            row["concurrent"] = pool_bytes // per_block // math.ceil(n / block_tokens)
            if shape.window_layers:
                row["concurrent_windows_freed"] = pool_bytes // row["bytes_windows_freed"]
        document["sequences"].append(row)
    return document


def _read_trace(args: argparse.Namespace) -> tuple[Reuse, int, bool]:
    from kvpool.replay import Reuse, Served

    reuse, done, interrupted = Reuse(keep_names=False), 0, False
    # --block-tokens is the pool's; a trace's blocks are what its hashes say.
    with trace_stream(argparse.Namespace(**{**vars(args), "block_tokens": None})) as trace:
        if not trace.has_hashes:
            raise InvalidArgument(
                f"{trace.paths[0]}: the format {trace.format} has no hashes, so it cannot "
                "tell what would be hit (--synthetic-prefix TOKENS assumes something)"
            )
        with progress("reading the trace", trace.size) as bar:
            try:
                for batch in trace:
                    if args.limit is not None:
                        batch = batch[: args.limit - done]
                    times = [request.arrival_s for request in batch]
                    reuse.feed(Served(batch, [0] * len(batch), times))
                    done += len(batch)
                    bar(float(trace.position), done, "requests")
                    if done == args.limit:
                        break
            except KeyboardInterrupt:
                interrupted = True
        return reuse, trace.block_tokens, interrupted


def _bought(
    shape: ModelShape, reuse: Reuse, block_tokens: int, pool_bytes: int | None
) -> dict[str, Any]:
    """The hit rate of each GiB: a row for each, or for each doubling where that is many."""
    per_block = shape.bytes_per_token * block_tokens
    most = max(reuse.size_for(reuse.seen_before), reuse.longest) * per_block
    top = max(1, math.ceil(most / _GIB))
    gibs = [float(2**i) for i in range(math.ceil(math.log2(top)) + 1)]
    if top <= 16:
        gibs = [float(n) for n in range(1, top + 1)]
    if pool_bytes is not None:
        gibs = sorted({*gibs, pool_bytes / _GIB})
    floor = reuse.longest
    rows, before, last = [], 0.0, 0.0
    total = max(reuse.blocks, 1)
    for gib in gibs:
        blocks = int(gib * _GIB // per_block)
        fits = blocks >= floor
        rate = float(reuse.hits(blocks)) / total if fits else 0.0
        rows.append(
            {
                "gib": round(gib, 3),
                "blocks": blocks,
                "holds_longest_request": fits,
                "block_hit_rate": round(rate, 6),
                "points_per_gib": round(100 * (rate - before) / (gib - last), 4),
            }
        )
        before, last = rate, gib
    return {
        "requests": reuse.requests,
        "blocks": reuse.blocks,
        "block_tokens": block_tokens,
        "bytes_per_block": per_block,
        "longest_request_blocks": floor,
        "ceiling": round(reuse.seen_before / total, 6),
        "rows": rows,
    }


def _show(document: dict[str, Any]) -> None:
    print(clean(f"{document['model']}: {document['formula']}"))
    for note in document["notes"]:
        print(clean(f"note: {note}"))
    if document["window_layers"]:
        print(
            f"note: {document['window_layers']} of {document['layers']} layers look back "
            f"{document['window']:,} tokens only; a pool whose blocks hold all layers keeps "
            "everything, one with a pool for each kind of layer does not"
        )
    print(f"a block of {document['block_tokens']} tokens: {size_text(document['bytes_per_block'])}")
    if "pool_bytes" in document:
        print(
            f"{size_text(document['pool_bytes'])} for the cache: {document['blocks']:,} blocks, "
            f"{document['tokens']:,} tokens"
        )
    print()
    windows = any("bytes_windows_freed" in row for row in document["sequences"])
    head = ["tokens", "memory", *(["windows freed"] if windows else [])]
    if "pool_bytes" in document:
        head += ["at once", *(["windows freed"] if windows else [])]
    rows = []
    for row in document["sequences"]:
        cells = [f"{row['tokens']:,}", size_text(row["bytes"])]
        if windows:
            cells.append(size_text(row["bytes_windows_freed"]))
        if "pool_bytes" in document:
            cells.append(f"{row['concurrent']:,}")
            if windows:
                cells.append(f"{row['concurrent_windows_freed']:,}")
        rows.append(cells)
    print_table("sequences", head, rows)
    if "trace" in document:
        _show_trace(document["trace"])


def _show_trace(trace: dict[str, Any]) -> None:
    rows = []
    for row in trace["rows"]:
        rate = (
            f"{100 * row['block_hit_rate']:.2f}%" if row["holds_longest_request"] else "too small"
        )
        cells = [f"{row['gib']:g}", f"{row['blocks']:,}", rate, f"{row['points_per_gib']:.3f}"]
        rows.append(cells)
    title = (
        f"{trace['requests']:,} requests, blocks of {trace['block_tokens']}: hit blocks by cache "
        f"size (ceiling {100 * trace['ceiling']:.2f}%)"
    )
    print_table(title, ["GiB", "blocks", "hit blocks", "points per GiB"], rows)
    print(
        "LRU, one request after the other: what running requests hold comes on top.\n"
        f"The longest request takes {trace['longest_request_blocks']:,} blocks, "
        f"{size_text(trace['longest_request_blocks'] * trace['bytes_per_block'])}."
    )
