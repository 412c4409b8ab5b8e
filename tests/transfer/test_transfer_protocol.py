"""The bytes of tl.kv.v1: the field numbers, the generated code, and the codec beside it."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool
from kvpool.transfer._chunk import ENVELOPE_CRC, Chunk, decode_chunk, encode_chunk

pb: Any = pytest.importorskip("kvpool.transfer.kv_transfer_pb2", reason="needs kvpool[transfer]")
ROOT = Path(__file__).resolve().parents[2]

# The protocol's table. Engines in other languages rely on these numbers.
TABLE = {
    "HasBlocksRequest": "repeated uint64 block_hashes = 1; uint32 kv_format = 2",
    "HasBlocksResponse": "repeated bool present = 1",
    "KvChunk": "string handle_id = 1; uint64 block_hash = 2; uint32 block_index = 3; "
    "uint32 n_blocks_total = 4; uint32 kv_format = 5; bytes payload = 6; uint32 crc32c = 7",
    "KvAck": "string handle_id = 1; uint32 blocks_received = 2; uint32 blocks_deduped = 3",
    "ReleaseRequest": "string handle_id = 1",
    "ReleaseResponse": "",
}
TYPES = {4: "uint64", 13: "uint32", 8: "bool", 9: "string", 12: "bytes"}


def test_the_messages_have_the_fields_of_the_protocol() -> None:
    found = {}
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        found[name] = "; ".join(
            f"{'repeated ' if f.is_repeated else ''}{TYPES[f.type]} {f.name} = {f.number}"
            for f in message.fields
        )
    assert found == TABLE
    [service] = pb.DESCRIPTOR.services_by_name.values()
    assert service.full_name == "tl.kv.v1.KvTransferService"
    methods = {m.name: (m.input_type.name, m.output_type.name) for m in service.methods}
    assert methods == {
        "HasBlocks": ("HasBlocksRequest", "HasBlocksResponse"),
        "PushKv": ("KvChunk", "KvAck"),
        "Release": ("ReleaseRequest", "ReleaseResponse"),
    }


def test_the_generated_code_is_what_the_protos_give() -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/protos.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_installed_package_has_the_protos() -> None:
    for name in ("kv_transfer.proto", "handover.proto"):
        installed = resources.files("kvpool.transfer").joinpath(name).read_text()
        assert installed == (ROOT / "src/kvpool/transfer" / name).read_text()


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
chunk_strategy = st.builds(
    Chunk, st.text(max_size=140), u64, u32, u32, u32, st.binary(max_size=300), u32
)


def fields(message: Any) -> tuple[Any, ...]:
    return tuple(getattr(message, name) for name in Chunk._fields)


@given(chunk_strategy)
def test_the_codec_writes_and_reads_what_the_generated_code_does(chunk: Chunk) -> None:
    message = pb.KvChunk(**chunk._asdict())
    assert encode_chunk(chunk) == message.SerializeToString()
    assert decode_chunk(message.SerializeToString()) == chunk


@given(chunk_strategy, st.binary(max_size=40), st.data())
@settings(max_examples=500)
def test_the_codec_reads_and_refuses_the_bytes_that_the_generated_code_does(
    chunk: Chunk, noise: bytes, data: st.DataObject
) -> None:
    """Random bytes, cut, repeated and damaged messages: the same fields, or both refuse."""
    good = encode_chunk(chunk)
    at = data.draw(st.integers(0, len(good)))
    for message in (noise, good[:at], good[:at] + noise, noise + good, good + good[at:]):
        try:
            expected = fields(pb.KvChunk.FromString(message))
        except Exception:
            with pytest.raises(ValueError):
                decode_chunk(message)
            continue
        try:
            assert decode_chunk(message) == expected
        except ValueError as error:
            assert "wire type" in str(error)  # groups, which proto3 has not: refused here


@pytest.mark.parametrize(
    "message",
    [
        b"\x0a",  # a length is missing
        b"\x0a\x05abc",  # a string longer than what is left
        b"\x32\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a payload of 2^64 - 1 bytes
        b"\x10" + b"\xff" * 10 + b"\x01",  # a number of eleven bytes
        b"\x0a\x01\xff",  # no UTF-8
        b"\x00",  # field 0
        b"\x3d\x01\x02",  # 4 bytes announced, 2 there
        b"\x39\x01",  # 8 bytes announced
    ],
)
def test_malformed_messages_are_refused_by_both(message: bytes) -> None:
    with pytest.raises(ValueError):
        decode_chunk(message)
    with pytest.raises(Exception):  # noqa: B017 protobuf's own
        pb.KvChunk.FromString(message)


def test_fields_of_later_versions_are_skipped() -> None:
    chunk = Chunk("h", 1, 2, 3, 1, b"p", 4)
    later = b"\x40\x07" + b"\x4a\x03abc" + b"\x55abcd" + b"\x59abcdefgh"  # 8 to 11
    assert decode_chunk(later + encode_chunk(chunk) + later) == chunk
    assert fields(pb.KvChunk.FromString(later + encode_chunk(chunk) + later)) == chunk


@given(st.binary(max_size=200), st.integers(1, 2**32 - 1))
def test_every_envelope_has_the_same_checksum_and_nothing_else_has(data: bytes, xor: int) -> None:
    crc = kvpool.crc32c(data)
    assert kvpool.crc32c(data + crc.to_bytes(4, "little")) == ENVELOPE_CRC
    assert kvpool.crc32c(data + (crc ^ xor).to_bytes(4, "little")) != ENVELOPE_CRC
