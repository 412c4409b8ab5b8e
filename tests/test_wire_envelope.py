"""kvpool.wire over a buffer: what import accepts is read, what it refuses is refused alike."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool
from kvpool.wire import Envelope, EnvelopeHeader, StreamReader
from pool_support import ENVELOPE, H0

FORMATS = Path(__file__).resolve().parent.parent / "formats"
GOLDEN = sorted((FORMATS / "golden").glob("*.tlkv"))
ERRORS = json.loads((FORMATS / "golden-errors/manifest.json").read_text())["envelopes"]


def test_the_worked_example_is_read_without_a_copy() -> None:
    data = bytearray(ENVELOPE)
    envelope = Envelope(data)
    [block] = envelope
    assert (block.index, block.hash, block.name, block.n_tokens) == (0, H0, H0, 2)
    assert block.payload.tolist() == [[[[[1, 2], [3, 4]]], [[[0.5, -1], [0, 0.25]]]]]
    assert block.k.tolist() == [[[[1, 2], [3, 4]]]]
    assert block.v.tolist() == [[[[0.5, -1], [0, 0.25]]]]
    assert envelope.header.crc32c == 0x4F0B541C
    assert envelope.header.shape == (2, 1, 1, 2)
    assert np.shares_memory(envelope.payload, np.frombuffer(data, np.uint8))
    for array in (envelope.hashes, envelope.n_tokens, envelope.payload, block.payload):
        assert not array.flags.writeable
    with pytest.raises(BufferError):
        data.extend(b"x")  # it is held for as long as it is looked at


def test_blocks_are_a_row() -> None:
    envelope = Envelope((FORMATS / "golden/layers_heads_and_a_tail.tlkv").read_bytes())
    blocks = list(envelope)
    assert len(envelope) == len(blocks) == envelope.header.n_blocks > 1
    assert envelope[-1].index == len(blocks) - 1
    assert envelope[-1].name is None
    for bad in (len(blocks), -len(blocks) - 1):
        with pytest.raises(IndexError):
            envelope[bad]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_every_golden_envelope_is_what_a_pool_says_it_is(path: Path) -> None:
    data = path.read_bytes()
    envelope = Envelope(data)
    header = envelope.header
    pool = kvpool.Pool(
        max(header.n_blocks, 1),
        block_tokens=header.block_tokens,
        n_layers=header.n_layers,
        n_kv_heads=header.n_kv_heads,
        head_dim=header.head_dim,
    )
    ids = pool.import_(data)
    assert Envelope(data, pool).header.block_bytes == pool.block_bytes
    assert header.size_bytes == len(data)
    assert envelope.n_tokens.tolist() == pool.fill(ids).tolist()
    assert envelope.payload.tobytes() == pool.slab[ids].tobytes()
    names = pool.hash(ids)
    assert all(h in (n, 0) or n == 0 for h, n in zip(envelope.hashes, names, strict=True))


@pytest.mark.parametrize("case", ERRORS, ids=lambda c: Path(c["file"]).stem)
def test_every_hostile_envelope_is_refused_by_the_rule_it_breaks(case: dict) -> None:
    data = (FORMATS / "golden-errors" / case["file"]).read_bytes()
    pool = kvpool.Pool(**case["pool"])
    if case["rule"] == 0:  # no room: not the envelope's fault
        assert len(Envelope(data, pool)) > pool.n_blocks
        return
    refusal = kvpool.ShapeMismatch if case["rule"] == 5 else kvpool.CorruptEnvelope
    with pytest.raises(refusal, match=rf"\(rule {case['rule']}\)$") as from_check:
        Envelope(data, pool)
    with pytest.raises(refusal) as from_import:
        pool.import_(data)
    assert str(from_check.value).split(": ", 1)[1] == str(from_import.value).split(": ", 1)[1]


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, "u1")])
def test_any_buffer(make) -> None:
    assert Envelope(make(ENVELOPE))[0].hash == H0


def test_a_mapping() -> None:
    with mmap.mmap(-1, len(ENVELOPE)) as mapping:
        mapping[:] = ENVELOPE
        envelope = Envelope(mapping)
        assert envelope[0].hash == H0
        del envelope


@pytest.mark.parametrize("bad", [None, 3, "TLKV", memoryview(ENVELOPE * 2)[::2], [1, 2]])
def test_what_is_no_buffer_is_told(bad: object) -> None:
    with pytest.raises(kvpool.InvalidArgument, match="buffer"):
        Envelope(bad)


def test_a_shape_is_a_pool_or_four_integers(pool: kvpool.Pool) -> None:
    assert len(Envelope(ENVELOPE, pool)) == len(Envelope(ENVELOPE, (2, 1, 1, 2))) == 1
    with pytest.raises(kvpool.ShapeMismatch, match=r"n_layers 1 at offset 16, .* 3 \(rule 5\)"):
        Envelope(ENVELOPE, (2, 3, 1, 2))
    with pytest.raises(kvpool.InvalidArgument, match=r"shape: expected .* found 3 integers"):
        Envelope(ENVELOPE, (2, 3, 1))
    with pytest.raises(kvpool.ArgumentTypeError, match="shape"):
        Envelope(ENVELOPE, "2112")


def test_an_empty_envelope_of_giant_dimensions() -> None:
    data = (FORMATS / "golden/no_blocks.tlkv").read_bytes()
    assert len(Envelope(data)) == 0
    giant = bytearray(data[:-4])
    for product in (b"\xff" * 16, b"\xff\xff\xff\x7f" + b"\1\0\0\0" * 3):
        giant[12:28] = product
        sealed = bytes(giant) + kvpool.crc32c(giant).to_bytes(4, "little")
        envelope = Envelope(sealed)
        assert list(envelope) == []
        assert envelope.payload.shape[0] == 0
        assert list(StreamReader([sealed])) == []
    giant[12:28] = bytes(16)
    sealed = bytes(giant) + kvpool.crc32c(giant).to_bytes(4, "little")
    for read in (Envelope, lambda data: StreamReader([data])):
        with pytest.raises(kvpool.ShapeMismatch, match=r"block_tokens 0 .* at least 1 \(rule 5\)"):
            read(sealed)


def test_the_steps_say_what_they_need() -> None:
    header = EnvelopeHeader(ENVELOPE[:28])
    assert header.size_bytes == 60
    assert header.crc32c == 0
    header.check_crc(0x4F0B541C, kvpool.crc32c(ENVELOPE[:-4]))
    assert header.crc32c == 0x4F0B541C
    with pytest.raises(kvpool.InvalidArgument, match="first 28 bytes, found 27"):
        EnvelopeHeader(ENVELOPE[:27])
    with pytest.raises(kvpool.InvalidArgument, match="records: expected 12 bytes"):
        header.check_records(0, 1, ENVELOPE[28:39], 0)
    with pytest.raises(kvpool.InvalidArgument, match="blocks 1 to 2, the envelope has 1"):
        header.check_records(1, 1, ENVELOPE[28:40], 0)
    with pytest.raises(kvpool.InvalidArgument, match="records: expected"):
        header.check_records(0, 3, ENVELOPE, 1 << 63)


VALID = [path.read_bytes() for path in GOLDEN if path.stat().st_size < 4096]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutations_are_judged_as_import_judges_them(data: st.DataObject) -> None:
    """Buffer, stream and import give the same verdict, in one line; nothing else is ever raised."""
    envelope = bytearray(data.draw(st.sampled_from(VALID)))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, max(0, min(len(envelope), 48) - 1)))
        envelope[at : at + 4] = data.draw(
            st.binary(min_size=1, max_size=4)
            | st.sampled_from([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\1\0\0\0", b"\0\0\0\x80"])
        )
    cut = data.draw(st.none() | st.integers(0, len(envelope)))
    envelope = envelope[:cut]
    if data.draw(st.booleans()) and len(envelope) >= 4:
        envelope[-4:] = kvpool.crc32c(envelope[:-4]).to_bytes(4, "little")
    pool = kvpool.Pool(128, block_tokens=4, n_layers=2, n_kv_heads=1, head_dim=3)

    def verdict(read) -> str | None:
        try:
            read()
        except kvpool.PoolFull:
            return None
        except (kvpool.CorruptEnvelope, kvpool.ShapeMismatch) as error:
            text = str(error)
            assert "\n" not in text
            assert text.endswith(tuple(f"(rule {n})" for n in range(1, 7)))
            return type(error).__name__ + text.split(": ", 1)[1]
        return None

    by_check = verdict(lambda: Envelope(envelope, pool))
    assert by_check == verdict(lambda: pool.import_(envelope))
    size = data.draw(st.none() | st.just(len(envelope)))
    step = data.draw(st.integers(1, 64))
    chunks = [envelope[i : i + step] for i in range(0, len(envelope), step)]
    reader: list[StreamReader] = []

    def stream() -> None:
        reader.append(StreamReader(iter(chunks), pool, size_bytes=size))
        for block in reader[0]:
            assert 1 <= block.n_tokens <= 4
            block.payload.sum()

    by_stream = verdict(stream)
    assert bool(reader and reader[0].verified) == (by_stream is None)
    if by_check is None:
        assert by_stream is None
    elif by_stream is None:  # bytes behind the end are the next reader's
        assert "length" in by_check
