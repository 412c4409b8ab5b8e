"""``kvpool inspect``: what is in files of envelopes, as text, JSON or a picture."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool import InvalidArgument, KvPoolError, StorageError
from kvpool.wire import EnvelopeFile, token_digests

from ._envelopes import EXIT_BAD, each_file, names_of, namespace_arg, one_line, tokens_arg
from ._measure import Summary, layer_means, summaries
from ._tables import clean

_ROWS = 40
_COLUMNS = 2000
_PLANE_BYTES = 1 << 22


def add_command(commands: Any) -> None:
    """Adds ``inspect`` to the command line."""
    parser = commands.add_parser(
        "inspect",
        help="show what is in files of envelopes",
        description="Checks each file by every rule of the format and shows its header, a table of "
        "its blocks and its checksum. A file that breaks a rule is told in one line. Exit code: 0; "
        "1 a file is not valid, or not of the tokens given; 2 one could not be read.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument(
        "--tokens", metavar="IDS", help="the prompt's token ids (1,2,3 or a file): check the chain"
    )
    parser.add_argument(
        "--namespace", type=namespace_arg, metavar="N", help="its root (default: the seal's, or 0)"
    )
    parser.add_argument("--all", action="store_true", help=f"all blocks, not the first {_ROWS}")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each file")
    parser.add_argument(
        "--plot", metavar="IMAGE", help="draw |K| and |V| by layer and position (.png, .svg, .pdf)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows the files; the exit code."""
    if args.plot is not None and len(args.files) != 1:
        raise InvalidArgument(f"--plot: expected one FILE, found {len(args.files)}")
    if args.plot is not None and not args.plot.lower().endswith((".png", ".svg", ".pdf")):
        raise InvalidArgument(
            f"--plot {args.plot}: expected a name that ends in .png, .svg or .pdf"
        )
    tokens = tokens_arg(args.tokens) if args.tokens is not None else None

    def look(path: str) -> int:
        try:
            with EnvelopeFile(path) as file:
                file.verify()
                chain = _Chain(file, tokens, args.namespace) if tokens is not None else None
                (_print_json if args.json else _print_text)(file, chain, args.all)
                if args.plot is not None:
                    _plot(file, args.plot)
                return EXIT_BAD if chain is not None and chain.wrong else 0
        except KvPoolError as error:
            if args.json:
                text = one_line(error).removeprefix(f"{path}: ")
                print(json.dumps({"file": path, "valid": False, "error": text}))
            raise

    return each_file("inspect", args.files, look)


class _Chain:
    """Whether the blocks' names are those of a prompt, and its digest the seal's.

    The envelope may begin anywhere in the prompt: where its seal says, or where the first of its
    names stands in the prompt's chain.
    """

    def __init__(
        self, file: EnvelopeFile, tokens: NDArray[np.uint32], namespace: int | None
    ) -> None:
        seal, size = file.seal, file.header.block_tokens
        root = namespace if namespace is not None else seal.namespace if seal else 0
        self.names = names_of(tokens, size, root)
        self.first, self.is_placed = (seal.first_token // size if seal else 0), seal is not None
        self.right = self.nameless = self.wrong = 0
        self.text = ""
        if seal is not None:
            digests = token_digests(tokens[: seal.n_tokens], size, root)
            if seal.namespace != root:
                self._bad(f"the seal is of namespace {seal.namespace:#x}, not {root:#x}")
            elif len(tokens) < seal.n_tokens or digests[-1:] != [seal.digest]:
                self._bad(f"the {seal.n_tokens} tokens of the seal are others")
        i = 0
        for hashes, n_tokens in file.records():
            for hash_, n in zip(hashes.tolist(), n_tokens.tolist(), strict=True):
                self._look(i, hash_, n, size, len(tokens))
                i += 1
        if not self.text:
            self.text = f"{self.right} of {i} blocks have the names of these tokens"
            self.text += f", {self.nameless} have none" if self.nameless else ""
            self.text += ", and the seal is theirs" if seal is not None else ""

    def _bad(self, text: str) -> None:
        self.wrong += 1
        self.text = self.text or text

    def _look(self, i: int, hash_: int, n_tokens: int, size: int, n: int) -> None:
        if not self.is_placed and hash_:
            found = np.flatnonzero(self.names == hash_)
            if len(found) and found[0] >= i:
                self.first = int(found[0]) - i
            self.is_placed = True
        at = self.first + i
        if not hash_:
            self.nameless += 1
            if at * size + n_tokens > n:
                self._bad(f"block {i} ends at token {at * size + n_tokens}, there are {n}")
        elif at < len(self.names) and hash_ == int(self.names[at]):
            self.right += 1
        else:
            want = f"{int(self.names[at]):016x}" if at < len(self.names) else "none"
            self._bad(f"block {i} is named {hash_:016x}, its tokens give {want}")


def _blocks(file: EnvelopeFile, n: int) -> Iterator[tuple[int, int, int, Summary, Summary]]:
    i = 0
    for hashes, n_tokens in file.records():
        for hash_, fill in zip(hashes.tolist(), n_tokens.tolist(), strict=True):
            if i == n:
                return
            yield i, hash_, fill, *summaries(file, i, fill)
            i += 1


def _print_text(file: EnvelopeFile, chain: _Chain | None, everything: bool) -> None:
    h, seal = file.header, file.seal
    print(clean(file.path))
    print(
        f"  envelope   version {h.version}, float16, {h.size_bytes:,} bytes\n"
        f"  blocks     {h.n_blocks:,} of {h.block_tokens} tokens, {h.block_bytes:,} bytes each\n"
        f"  model      {h.n_layers} layers, {h.n_kv_heads} KV heads, head_dim {h.head_dim}\n"
        f"  crc32c     {h.crc32c:08x}, right"
    )
    if seal is not None:
        end = f"tokens {seal.first_token} to {seal.n_tokens}" if seal.n_tokens else "no tokens"
        print(f"  seal       {end}, namespace {seal.namespace:#x}, digest {seal.digest.hex()[:16]}")
    if chain is not None:
        print(f"  chain      {'WRONG: ' if chain.wrong else ''}{chain.text}")
    shown = h.n_blocks if everything else min(h.n_blocks, _ROWS)
    if shown:
        columns = "".join(f"{x:>10}" for x in ("min", "max", "mean", "NaN"))
        print(f"{'':32}{'K':>10}{'':30}{'V':>10}")
        print(f"{'block':>7}  {'hash':16} {'tokens':>6}{columns}{columns}")
    for i, hash_, n_tokens, *both in _blocks(file, shown):
        name = f"{hash_:016x}" if hash_ else "-"
        values = "".join(
            f"{_short(s.minimum if s.count else math.nan):>10}"
            f"{_short(s.maximum if s.count else math.nan):>10}{_short(s.mean):>10}{s.n_nan:>10}"
            for s in both
        )
        print(f"{i:>7}  {name:16} {n_tokens:>6}{values}")
    if shown < h.n_blocks:
        print(f"{'...':>7}  {h.n_blocks - shown:,} more blocks (--all shows them)")


def _short(x: float) -> str:
    return "-" if math.isnan(x) else f"{x:.4g}"


def _print_json(file: EnvelopeFile, chain: _Chain | None, everything: bool) -> None:
    """One line, written block by block: it may be longer than memory."""
    h, seal = file.header, file.seal
    names = (
        "version", "dtype", "n_blocks", "block_tokens", "n_layers", "n_kv_heads", "head_dim",
        "block_bytes", "size_bytes",
    )  # fmt: skip
    document: dict[str, Any] = {"file": file.path, "valid": True}
    document["header"] = {name: getattr(h, name) for name in names}
    document["crc32c"] = f"{h.crc32c:08x}"
    if seal is not None:
        document["seal"] = {
            "namespace": f"{seal.namespace:016x}", "first_token": seal.first_token,
            "n_tokens": seal.n_tokens, "digest": seal.digest.hex(),
        }  # fmt: skip
    if chain is not None:
        document["chain"] = {"right": not chain.wrong, "text": chain.text}
    print(json.dumps(document)[:-1], end=', "blocks": [')
    for i, hash_, n_tokens, k, v in _blocks(file, h.n_blocks):
        block = {
            "hash": f"{hash_:016x}" if hash_ else None, "n_tokens": n_tokens,
            "k": _summary(k), "v": _summary(v),
        }  # fmt: skip
        print(", " if i else "", json.dumps(block), sep="", end="")
    print("]}")


def _summary(s: Summary) -> dict[str, Any]:
    values = (s.minimum, s.maximum, s.mean) if s.count else (math.nan,) * 3
    numbers = [x if math.isfinite(x) else None if math.isnan(x) else str(x) for x in values]
    return dict(zip(("min", "max", "mean"), numbers, strict=True)) | {"n_nan": s.n_nan}


def _plot(file: EnvelopeFile, image: str) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KvPoolError(
            f"--plot needs {error.name}: pip install 'kvpool[plot]' brings it"
        ) from error
    h = file.header
    if h.block_tokens * h.n_kv_heads * h.head_dim * 2 > _PLANE_BYTES:
        raise InvalidArgument(f"--plot: K of one layer of a block is above {_PLANE_BYTES} bytes")
    if h.n_blocks == 0:
        raise InvalidArgument("--plot: the envelope has no blocks")
    means, n_positions = layer_means(file, _COLUMNS)
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, values, name in zip(figure.subplots(2, 1, sharex=True), means, "KV", strict=True):
        shown = axes.imshow(
            values, aspect="auto", interpolation="nearest", origin="lower",
            extent=(0, n_positions, -0.5, h.n_layers - 0.5),
        )  # fmt: skip
        axes.set_ylabel("layer")
        axes.set_title(f"mean |{name}|", loc="left", fontsize=10)
        figure.colorbar(shown, ax=axes, pad=0.01)
    axes.set_xlabel("position")
    figure.suptitle(clean(os.path.basename(file.path)), fontsize=11)
    try:
        figure.savefig(image, dpi=120)
    except OSError as error:
        raise StorageError(f"--plot {image}: {error.strerror or error}") from error
