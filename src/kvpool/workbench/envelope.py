"""Names the byte where two envelopes part: by field, not by offset alone.

Not a reader: it looks at what ought to be there, the golden bytes, which are known to be good.
"""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Difference", "first_difference", "place_of"]

HEADER_FIELDS = (
    (0, 4, "magic"),
    (4, 2, "version"),
    (6, 2, "dtype"),
    (8, 4, "n_blocks"),
    (12, 4, "block_tokens"),
    (16, 4, "n_layers"),
    (20, 4, "n_kv_heads"),
    (24, 4, "head_dim"),
)
_HEADER, _RECORD, _TRAILER = 28, 12, 4


@dataclass(frozen=True)
class Place:
    """A field of an envelope: its name, where it begins and how long it is."""

    field: str
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Difference:
    """The first field in which two envelopes differ. Offsets count from the envelope's start."""

    field: str
    offset: int
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.field} at offset {self.offset}: expected {self.expected}, found {self.found}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def place_of(golden: bytes, offset: int) -> Place:
    """The field of a good envelope that holds this byte.

    >>> golden = bytes(8) + bytes([1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])
    >>> place_of(golden + bytes(32), 47)
    Place(field='record 0, layer 0 K head 0 position 1 dim 1', offset=46, n_bytes=2)
    """
    for start, size, name in HEADER_FIELDS:
        if start <= offset < start + size:
            return Place(f"header field {name}", start, size)
    n, block_tokens, n_layers, n_kv_heads, head_dim = struct.unpack_from("<5I", golden, 8)
    payload = n_layers * 2 * n_kv_heads * block_tokens * head_dim * 2
    record, inside = divmod(offset - _HEADER, _RECORD + payload)
    if record >= n:
        return Place("crc32c", _HEADER + n * (_RECORD + payload), _TRAILER)
    start = _HEADER + record * (_RECORD + payload)
    if inside < 8:
        return Place(f"record {record}, block_hash", start, 8)
    if inside < _RECORD:
        return Place(f"record {record}, n_tokens", start + 8, 4)
    index = (inside - _RECORD) // 2
    rest, dim = divmod(index, head_dim)
    rest, position = divmod(rest, block_tokens)
    rest, head = divmod(rest, n_kv_heads)
    layer, is_v = divmod(rest, 2)
    name = f"layer {layer} {'KV'[is_v]} head {head} position {position} dim {dim}"
    return Place(f"record {record}, {name}", start + _RECORD + index * 2, 2)


def _show(place: Place, data: bytes) -> str:
    part = data[place.offset : place.offset + place.n_bytes]
    if len(part) < place.n_bytes:
        return f"the end after {len(data)} bytes"
    if place.field.endswith("magic"):
        return part.hex(" ")
    value = int.from_bytes(part, "little")
    if place.field.endswith("block_hash"):
        return f"0x{value:016x}"
    if place.field == "crc32c":
        return f"0x{value:08x}"
    if " dim " in place.field:
        return f"0x{value:04x} ({struct.unpack('<e', part)[0]:g})"
    return str(value)


def first_difference(golden: bytes, found: bytes) -> Difference | None:
    """Where ``found`` leaves the golden bytes, or None when it does not."""
    if golden == found:
        return None
    common = min(len(golden), len(found))
    offset = next((i for i in range(common) if golden[i] != found[i]), common)
    if offset == len(golden):
        return Difference("length", offset, f"{len(golden)} bytes", f"{len(found)} bytes")
    place = place_of(golden, offset)
    return Difference(place.field, place.offset, _show(place, golden), _show(place, found))
