"""``kvpool diff``: the first field in which two envelopes differ, and how many others do."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.wire import EnvelopeFile

from ._envelopes import EXIT_BAD, EXIT_TROUBLE, each_file

_HEADER, _RECORD = 28, 12
_SPAN_BYTES = 1 << 20  # even, so that no float16 lies across two spans


def add_command(commands: Any) -> None:
    """Adds ``diff`` to the command line."""
    parser = commands.add_parser(
        "diff",
        help="compare two files of envelopes, field by field",
        description="Names the first field that differs and counts the rest. The files are read by "
        "their headers: a wrong checksum is no hindrance. Exit code: 0 they are equal, and nothing "
        "is printed; 1 they differ; 2 one cannot be read as an envelope.",
        allow_abbrev=False,
    )
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compares the two files; the exit code."""
    with ExitStack() as files:
        pair: list[EnvelopeFile] = []

        def opened(path: str) -> int:
            pair.append(files.enter_context(EnvelopeFile(path)))
            pair[-1].header.accept()
            return 0

        if each_file("diff", [args.a, args.b], opened):
            return EXIT_TROUBLE
        differences = _Differences(*pair)
        if each_file("diff", [args.a], lambda path: differences.find()):
            return EXIT_TROUBLE
    if not differences.first:
        return 0
    print(f"first: {differences.first}")
    print(f"in all: {differences.counted()}")
    return EXIT_BAD


class _Differences:
    """What is found is noted in the order of the bytes."""

    def __init__(self, a: EnvelopeFile, b: EnvelopeFile) -> None:
        self.a, self.b = a, b
        self.first = ""
        self.fields: list[str] = []
        self.counts = {"hash": 0, "n_tokens": 0, "value": 0, "block": 0}
        self._last = {"hash": -1, "n_tokens": -1, "block": -1}

    def find(self) -> int:
        """Looks at seals, headers, blocks and checksums."""
        a, b = self.a, self.b
        if a.seal is not None and b.seal is not None:
            for name in ("namespace", "first_token", "n_tokens", "digest"):
                self._field(f"seal, {name}", getattr(a.seal, name), getattr(b.seal, name))
        else:
            self._field("seal", *("there" if file.seal else "none" for file in (a, b)))
        for name in ("n_blocks", "block_tokens", "n_layers", "n_kv_heads", "head_dim"):
            self._field(name, getattr(a.header, name), getattr(b.header, name))
        if a.header.shape == b.header.shape:
            record = _RECORD + a.header.block_bytes
            end = _HEADER + min(a.header.n_blocks, b.header.n_blocks) * record
            at = _HEADER
            while at < end:
                self._span(at, min(_SPAN_BYTES, end - at), record)
                at += _SPAN_BYTES
                # past what is a hole in both, but only by even steps: float16 stay whole
                at += max(0, min(a.next_data(at), b.next_data(at)) - at) & ~1 if at < end else 0
        self._field("crc32c", a.stored_crc(), b.stored_crc())
        return 0

    def _field(self, name: str, x: object, y: object) -> None:
        if x != y:
            self.fields.append(name)
            shown = [
                v.hex() if isinstance(v, bytes) else f"{v:08x}" if name == "crc32c" else v
                for v in (x, y)
            ]
            self.first = self.first or f"{name}: {shown[0]} and {shown[1]}"

    def _span(self, at: int, n: int, record: int) -> None:
        x, y = (self._bytes(file, at, n) for file in (self.a, self.b))
        if x is y is None:
            return
        x, y = (np.zeros(n, np.uint8) if z is None else z for z in (x, y))
        where = np.flatnonzero(x != y) + at - _HEADER
        if not len(where):
            return
        block, offset = where // record, where % record
        first = where[0]
        self._count("hash", block[offset < 8])
        self._count("n_tokens", block[(offset >= 8) & (offset < _RECORD)])
        in_payload = offset >= _RECORD
        self.counts["value"] += len(np.unique(where[in_payload] // 2))
        self._count("block", block[in_payload])
        if not self.first:
            self.first = self._describe(int(first), record)

    @staticmethod
    def _bytes(file: EnvelopeFile, at: int, n: int) -> NDArray[np.uint8] | None:
        data = bytearray(n)
        return np.frombuffer(data, np.uint8) if file.read(at, memoryview(data)) else None

    def _count(self, kind: str, blocks: NDArray[np.intp]) -> None:
        if len(blocks):
            found = np.unique(blocks)
            self.counts[kind] += len(found) - int(found[0] == self._last[kind])
            self._last[kind] = int(found[-1])

    def _describe(self, where: int, record: int) -> str:
        block, offset = divmod(where, record)
        if offset < 8:
            start, n, name = 0, 8, "hash"
        elif offset < _RECORD:
            start, n, name = 8, 4, "n_tokens"
        else:
            value = (offset - _RECORD) // 2
            start, n = _RECORD + 2 * value, 2
            size, _, heads, dim = self.a.header.shape
            rest, dim_at = divmod(value, dim)
            rest, position = divmod(rest, size)
            rest, head = divmod(rest, heads)
            layer, is_v = divmod(rest, 2)
            name = f"layer {layer}, {'KV'[is_v]}, head {head}, position {position}, dim {dim_at}"
        at = _HEADER + block * record + start
        shown = []
        for file in (self.a, self.b):
            data = bytearray(n)
            file.read(at, memoryview(data))
            number = int.from_bytes(data, "little")
            if n == 2:
                number_text = f"{np.frombuffer(data, '<f2')[0]:g} ({number:#06x})"
            else:
                number_text = f"{number:016x}" if n == 8 else str(number)
            shown.append(number_text)
        return f"block {block}, {name} (offset {at}): {shown[0]} and {shown[1]}"

    def counted(self) -> str:
        """How many fields of each kind differ."""
        c = self.counts
        parts = [*self.fields]
        parts += [f"{c[k]:,} {k if c[k] == 1 else p}" for k, p in
                  (("hash", "hashes"), ("n_tokens", "n_tokens")) if c[k]]  # fmt: skip
        if c["value"]:
            parts.append(
                f"{c['value']:,} value{'s'[: c['value'] != 1]} in {c['block']:,} "
                f"block{'s'[: c['block'] != 1]}"
            )
        n, m = self.a.header.n_blocks, self.b.header.n_blocks
        if n != m and self.a.header.shape == self.b.header.shape:
            parts.append(f"{abs(n - m):,} blocks that only {'A' if n > m else 'B'} has")
        return ", ".join(parts)
