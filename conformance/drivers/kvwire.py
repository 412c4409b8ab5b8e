"""The KV block format, version 1, in Python: a second writing of formats/kv-block.md.

Laid out like that page, section by section, with the standard library only, and sharing nothing
with the kvpool package: where the two disagree, one of them misreads the page. The golden files are
written by this module. It is a parity driver as well:

    python kvwire.py          cases in, envelopes out (conformance/README.md)
    python kvwire.py --read   envelopes in, statuses out
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

# ---- 1. the name of a block ---------------------------------------------------------------------

FNV_BASIS = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3


def u16(x: int) -> bytes:
    return x.to_bytes(2, "little")


def u32(x: int) -> bytes:
    return x.to_bytes(4, "little")


def u64(x: int) -> bytes:
    return x.to_bytes(8, "little")


def fnv1a64(data: bytes) -> int:
    h = FNV_BASIS
    for byte in data:
        h = (h ^ byte) * FNV_PRIME % 2**64
    return h


def block_hash(parent: int, tokens: list[int]) -> int:
    """The name of a full block after the block named ``parent`` (0 for the first)."""
    return fnv1a64(u64(parent) + b"".join(u32(token) for token in tokens)) or 1


# ---- 2. the envelope ----------------------------------------------------------------------------

MAGIC = b"TLKV"
VERSION = 1
DTYPE_F16 = 1
HEADER_BYTES = 28
RECORD_BYTES = 12
TRAILER_BYTES = 4

CRC_POLYNOMIAL = 0x82F63B78


def _crc_step(r: int) -> int:
    for _ in range(8):
        r = r >> 1 ^ (CRC_POLYNOMIAL if r & 1 else 0)
    return r


CRC_TABLE = [_crc_step(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    r = 0xFFFFFFFF
    for byte in data:
        r = r >> 8 ^ CRC_TABLE[(r ^ byte) & 0xFF]
    return r ^ 0xFFFFFFFF


@dataclass(frozen=True)
class Shape:
    """B, L, H and D of the page."""

    block_tokens: int
    n_layers: int
    n_kv_heads: int
    head_dim: int

    @property
    def payload_bytes(self) -> int:
        """P."""
        return self.n_layers * 2 * self.n_kv_heads * self.block_tokens * self.head_dim * 2

    def envelope_bytes(self, n_blocks: int) -> int:
        return HEADER_BYTES + n_blocks * (RECORD_BYTES + self.payload_bytes) + TRAILER_BYTES


@dataclass(frozen=True)
class Block:
    """One record. ``payload`` is [layer][K, V][head][position][dim], float16, P bytes."""

    block_hash: int
    n_tokens: int
    payload: bytes


def header(shape: Shape, n_blocks: int) -> bytes:
    return (
        MAGIC
        + u16(VERSION)
        + u16(DTYPE_F16)
        + u32(n_blocks)
        + u32(shape.block_tokens)
        + u32(shape.n_layers)
        + u32(shape.n_kv_heads)
        + u32(shape.head_dim)
    )


def zero_past(shape: Shape, payload: bytes, n_tokens: int) -> bytes:
    """The payload with the positions at and past ``n_tokens`` made zeros."""
    row = shape.head_dim * 2
    head = shape.block_tokens * row
    kept = n_tokens * row
    return b"".join(
        payload[at : at + kept] + bytes(head - kept) for at in range(0, len(payload), head)
    )


def seal(body: bytes) -> bytes:
    """The bytes with their checksum behind them."""
    return body + u32(crc32c(body))


def write(shape: Shape, blocks: list[Block]) -> bytes:
    """The envelope of the blocks."""
    records = [
        u64(b.block_hash) + u32(b.n_tokens) + zero_past(shape, b.payload, b.n_tokens)
        for b in blocks
    ]
    return seal(header(shape, len(blocks)) + b"".join(records))


# ---- 3. what a reader refuses -------------------------------------------------------------------


class Refused(Exception):
    """``status`` is the name of the tl_status, ``rule`` the number in the page's table."""

    def __init__(self, status: str, rule: int, reason: str) -> None:
        super().__init__(f"{status}, rule {rule}: {reason}")
        self.status, self.rule = status, rule


def field(data: bytes, at: int, n_bytes: int) -> int:
    return int.from_bytes(data[at : at + n_bytes], "little")


def read(data: bytes, shape: Shape, room: int | None = None) -> list[Block]:
    """The blocks of an envelope for a pool of this shape with ``room`` blocks to give.

    Raises :class:`Refused`. A name that an earlier block of the envelope took is dropped.
    """
    if len(data) < HEADER_BYTES + TRAILER_BYTES:
        raise Refused("TL_EFORMAT", 1, f"{len(data)} bytes, fewer than 32")
    n = field(data, 8, 4)
    found = Shape(field(data, 12, 4), field(data, 16, 4), field(data, 20, 4), field(data, 24, 4))
    if len(data) != found.envelope_bytes(n):
        announced = found.envelope_bytes(n)
        raise Refused("TL_EFORMAT", 1, f"{len(data)} bytes, the header announces {announced}")
    if data[:4] != MAGIC:
        raise Refused("TL_EFORMAT", 2, f"magic {data[:4].hex(' ')}")
    if crc32c(data[:-4]) != field(data, len(data) - 4, 4):
        raise Refused("TL_EFORMAT", 3, "crc32c")
    if (field(data, 4, 2), field(data, 6, 2)) != (VERSION, DTYPE_F16):
        raise Refused("TL_EFORMAT", 4, f"version {field(data, 4, 2)}, dtype {field(data, 6, 2)}")
    if found != shape:
        raise Refused("TL_ESHAPE", 5, f"{found}, the pool has {shape}")
    blocks = []
    names: set[int] = set()
    for i in range(n):
        at = HEADER_BYTES + i * (RECORD_BYTES + shape.payload_bytes)
        name, n_tokens = field(data, at, 8), field(data, at + 8, 4)
        if not 1 <= n_tokens <= shape.block_tokens:
            raise Refused("TL_EFORMAT", 6, f"block {i} has n_tokens {n_tokens}")
        if name != 0 and n_tokens != shape.block_tokens:
            raise Refused("TL_EFORMAT", 6, f"block {i} has a name and {n_tokens} tokens")
        payload = data[at + RECORD_BYTES : at + RECORD_BYTES + shape.payload_bytes]
        blocks.append(Block(0 if name in names else name, n_tokens, payload))
        names.add(name)
    if room is not None and n > room:
        raise Refused("TL_EFULL", 0, f"{n} blocks, room for {room}")
    return blocks


# ---- a parity driver ----------------------------------------------------------------------------


def shape_of(case: dict[str, Any]) -> Shape:
    return Shape(case["block_tokens"], case["n_layers"], case["n_kv_heads"], case["head_dim"])


def blocks_of(case: dict[str, Any]) -> list[Block]:
    """The blocks an engine would have after computing the case's tokens.

    ``values`` are [position][layer][K, V][head][dim]; a payload is [layer][K, V][head][position]
    [dim]. Unused positions hold 0xFFFF, as stale data would.
    """
    shape, tokens, values = shape_of(case), case["tokens"], case["values"]
    B, D = shape.block_tokens, shape.head_dim
    rows = shape.n_layers * 2 * shape.n_kv_heads  # of D values, for each position
    if len(values) != len(tokens) * rows * D:
        raise ValueError(f"{len(values)} values for {len(tokens)} tokens of {rows} x {D}")
    blocks = []
    parent = 0
    for start in range(0, len(tokens), B):
        n_tokens = min(B, len(tokens) - start)
        payload = bytearray(b"\xff" * shape.payload_bytes)
        for position in range(n_tokens):
            for row in range(rows):
                at = ((start + position) * rows + row) * D
                to = (row * B + position) * D * 2
                payload[to : to + D * 2] = b"".join(u16(v) for v in values[at : at + D])
        name = block_hash(parent, tokens[start : start + B]) if n_tokens == B else 0
        blocks.append(Block(name, n_tokens, bytes(payload)))
        parent = name
    return blocks


def answer_case(case: dict[str, Any]) -> dict[str, Any]:
    """Exports, imports into a second pool and exports that."""
    shape = shape_of(case)
    first = write(shape, blocks_of(case))
    return {"hex": write(shape, read(first, shape)).hex()}


def answer_read(request: dict[str, Any]) -> dict[str, Any]:
    """The status that a pool of the given shape and size gives to an envelope."""
    try:
        read(bytes.fromhex(request["hex"]), shape_of(request), request["n_blocks"])
    except Refused as refused:
        return {"status": refused.status}
    return {"status": "TL_OK"}


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--read"]):
        print("usage: kvwire.py [--read]", file=sys.stderr)
        return 2
    answer = answer_read if arguments else answer_case
    for line in sys.stdin:
        if line.strip():
            print(json.dumps(answer(json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
