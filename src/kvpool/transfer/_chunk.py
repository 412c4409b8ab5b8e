"""KvChunk as bytes, read and written without a copy of the payload.

    before     0a len handle_id | 10 block_hash | 18 block_index | 20 n_blocks_total
               28 kv_format | 32 len                                        made first
    payload    one envelope, exported straight between the two
    after      3d -> 38 crc32c                                             known beforehand

The generated KvChunk copies a payload three times before gRPC copies it once more: into the
message, out of it as it is serialized, and at the other end out of the parsed message; at 1 MiB a
block that is a third of the throughput (docs/transfer.md). The two are compared in the tests.

``crc32c`` needs no pass over the payload. A message followed by its own CRC-32C, as an envelope is,
has one and the same CRC whatever it says: ENVELOPE_CRC. The other way round, bytes with that CRC
end in the CRC of what is before, since each value of the last four bytes gives another result. So
``crc32c == ENVELOPE_CRC`` and an envelope that import finds sound are, together, exactly what
``crc32c(payload) == crc32c`` and a sound envelope are.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ENVELOPE_CRC", "Chunk", "decode_chunk", "encode_chunk", "frame"]

#: crc32c(m + le32(crc32c(m))) for every m.
ENVELOPE_CRC = 0x48674BC7

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_MASK64 = 2**64 - 1


class Chunk(NamedTuple):
    """One KvChunk. ``payload`` is a view of the message it came in."""

    handle_id: str
    block_hash: int
    block_index: int
    n_blocks_total: int
    kv_format: int
    payload: bytes | memoryview
    crc32c: int


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value) if value else b""


def frame(
    handle_id: str,
    block_hash: int,
    block_index: int,
    n_blocks_total: int,
    kv_format: int,
    payload_bytes: int,
    crc32c: int,
) -> tuple[bytes, bytes]:
    """What stands before and after a payload of so many bytes; without one, all and nothing."""
    handle = handle_id.encode()
    before = b"".join(
        (
            b"\x0a" + _varint(len(handle)) + handle if handle else b"",
            _field(2, block_hash),
            _field(3, block_index),
            _field(4, n_blocks_total),
            _field(5, kv_format),
            b"\x32" + _varint(payload_bytes) if payload_bytes else b"",
        )
    )
    return before, _field(7, crc32c)


def encode_chunk(chunk: Chunk) -> bytes:
    """The message of a chunk whose payload is at hand.

    >>> decode_chunk(encode_chunk(Chunk("h", 7, 0, 1, 1, b"", 0))).block_hash
    7
    """
    before, after = frame(*chunk[:5], len(chunk.payload), chunk.crc32c)
    return before + bytes(chunk.payload) + after


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError(f"the message ends inside a number at offset {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK64, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number of more than ten bytes before offset {at}")


def decode_chunk(data: bytes) -> Chunk:
    """Reads a message as protobuf does: the last of equal fields counts, unknown ones are skipped.

    Raises ValueError, naming the offset, for bytes that are no message.
    """
    numbers = [0] * 8
    handle, payload = "", memoryview(b"")
    at, end = 0, len(data)
    while at < end:
        start = at
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if number == 0 or tag >= 2**32:
            raise ValueError(f"no field number at offset {start}")
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            if number in (2, 3, 4, 5, 7):
                numbers[number] = value
        elif kind == _LEN:
            size, at = _read_varint(data, at)
            if size > end - at:
                raise ValueError(f"field {number} at offset {start}: {size} bytes, {end - at} left")
            if number == 1:
                handle = data[at : at + size].decode()  # UnicodeDecodeError is a ValueError
            elif number == 6:
                payload = memoryview(data)[at : at + size]
            at += size
        elif kind in (_I32, _I64):
            at += 4 if kind == _I32 else 8
            if at > end:
                raise ValueError(f"the message ends inside field {number} at offset {start}")
        else:
            raise ValueError(f"field {number} at offset {start}: wire type {kind} is not read")
    _, _, name, index, total, version, _, crc = numbers
    low = 2**32 - 1
    return Chunk(handle, name, index & low, total & low, version & low, payload, crc & low)
