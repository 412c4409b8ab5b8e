"""A record comes back as the block it was, or not at all, and the reason is named."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

import kvpool
from kvpool.tiers import Key, Layout, RecordRefused
from kvpool.tiers.record import ENVELOPE_AT, HEAD_BYTES, PAYLOAD_AT
from pool_support import COLLIDING

B = 4
SECRET = b"a secret of the fleet"


def make(tokens, *, layout: Layout | None = None, value: float = 1.0, namespace: int = 0):
    """The record of the last full block of a prompt, with its key."""
    layout = layout or Layout(B, n_layers=2, n_kv_heads=1, head_dim=2)
    pool = kvpool.Pool(
        1, B, n_layers=layout.n_layers, n_kv_heads=layout.n_kv_heads, head_dim=layout.head_dim
    )
    key = layout.keys(tokens, namespace)[-1]
    block = pool.alloc()
    pool.block(block)[:] = value + np.arange(pool.block_bytes // 2).reshape(pool.block(0).shape)
    pool.set_fill(block, B)
    pool.register(block, key.hash)
    record = bytearray(layout.record_bytes)
    assert pool.export_into([block], memoryview(record)[ENVELOPE_AT:]) == len(record) - ENVELOPE_AT
    layout.seal(memoryview(record), key, len(tokens) // B - 1)
    return layout, key, record, pool.block(block).copy()


def reason(layout: Layout, data, key: Key) -> str:
    with pytest.raises(RecordRefused) as caught:
        layout.open(data, key)
    assert caught.value.reason in RecordRefused.REASONS
    return caught.value.reason


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_record_gives_the_block_back(secret) -> None:
    layout = Layout(B, n_layers=2, n_kv_heads=1, head_dim=2, secret=secret)
    layout, key, record, block = make(range(8), layout=layout)
    np.testing.assert_array_equal(layout.open(record, key), block)
    assert len(record) == layout.record_bytes


@pytest.mark.parametrize("secret", [None, SECRET])
def test_every_flipped_bit_is_refused(secret) -> None:
    layout = Layout(B, n_layers=2, n_kv_heads=1, head_dim=2, secret=secret)
    layout, key, record, _ = make(range(8), layout=layout)
    for bit in range(8 * len(record)):
        record[bit // 8] ^= 1 << bit % 8
        reason(layout, record, key)
        record[bit // 8] ^= 1 << bit % 8
    layout.open(record, key)


def test_every_length_but_the_right_one_is_refused() -> None:
    layout, key, record, _ = make(range(8))
    for n in range(len(record)):
        reason(layout, record[:n], key)
    assert reason(layout, bytes(record) + b"\0", key) == "length"
    assert reason(layout, b"", key) == "length"


def crc_again(record: bytearray, start: int, end: int) -> None:
    record[end : end + 4] = struct.pack("<I", kvpool.crc32c(record[start:end]))


def test_each_field_of_a_record_whose_checksums_are_right_is_held_to_the_key() -> None:
    layout, key, good, _ = make(range(8))

    def changed(at: int, data: bytes, *sums: tuple[int, int]) -> str:
        record = bytearray(good)
        record[at : at + len(data)] = data
        for start, end in sums:
            crc_again(record, start, end)
        return reason(layout, record, key)

    head, seal = (0, 60), (HEAD_BYTES, HEAD_BYTES + 76)
    envelope = (ENVELOPE_AT, len(good) - 4)
    assert changed(0, b"XLKR", head) == "head"
    assert changed(4, b"\2\0", head) == "version"
    assert changed(6, b"\1\0", head) == "tag"
    assert changed(8, b"\0" * 16, head) == "layout"
    assert changed(24, b"\1" * 32, head) == "tag"
    assert changed(HEAD_BYTES + 8, b"\1", seal) == "digest"  # the namespace
    assert changed(HEAD_BYTES + 32, b"\0" * 32, seal) == "digest"
    assert changed(HEAD_BYTES + 64, b"\0", seal) == "length"
    assert changed(HEAD_BYTES + 72, b"\0" * 4, seal) == "seal"
    assert changed(PAYLOAD_AT, b"\0" * 8, envelope) == "seal"  # another envelope under this seal
    assert changed(PAYLOAD_AT, b"\0" * 8) == "envelope"
    assert changed(PAYLOAD_AT - 12, b"\0" * 8, envelope) == "seal"


def reseal(layout: Layout, record: bytearray, key: Key) -> None:
    crc_again(record, ENVELOPE_AT, len(record) - 4)
    layout.seal(memoryview(record), key, 1)


def test_an_envelope_that_was_sealed_wrongly_is_refused() -> None:
    layout, key, good, _ = make(range(8))
    for at, data, expected in (
        (ENVELOPE_AT + 28, b"\0" * 8, "hash"),  # no name
        (ENVELOPE_AT + 28, b"\1" * 8, "hash"),  # another
        (ENVELOPE_AT + 12, struct.pack("<4I", 2 * B, 1, 1, 2), "shape"),  # as many bytes
        (ENVELOPE_AT + 36, struct.pack("<I", B + 1), "envelope"),
        (ENVELOPE_AT + 28, struct.pack("<QI", 0, B - 1), "hash"),  # a partial block
    ):
        record = bytearray(good)
        record[at : at + len(data)] = data
        reseal(layout, record, key)
        assert reason(layout, record, key) == expected


def test_records_of_other_prompts_namespaces_models_and_fleets_are_refused() -> None:
    layout, key, record, _ = make(range(8))
    _, _, other, _ = make([9, 1, 2, 3, 4, 5, 6, 7])  # the same last block behind another first
    assert reason(layout, other, key) == "digest"
    assert reason(layout, make(range(8), namespace=5)[2], key) == "digest"
    for options in ({"model": "m"}, {"revision": "2"}, {"secret": SECRET}):
        theirs = Layout(B, n_layers=2, n_kv_heads=1, head_dim=2, **options)
        _, their_key, their_record, _ = make(range(8), layout=theirs)
        assert their_key != key
        assert reason(layout, their_record, key) == "layout"
        assert reason(theirs, record, their_key) == "layout"


def test_who_does_not_know_the_secret_cannot_make_a_record() -> None:
    ours = Layout(B, n_layers=2, n_kv_heads=1, head_dim=2, secret=SECRET)
    forger = Layout(B, n_layers=2, n_kv_heads=1, head_dim=2, secret=b"0123456789abcdef")
    _, key, record, _ = make(range(8), layout=ours)
    object.__setattr__(forger, "id", ours.id)  # he has seen records, and knows their layout
    _, forged_key, forged, _ = make(range(8), layout=forger, value=7.0)
    assert forged_key == key
    assert reason(ours, forged, key) == "tag"
    forged[6:8] = b"\0\0"  # untagged
    forged[24:56] = bytes(32)
    crc_again(forged, 0, 60)
    assert reason(ours, forged, key) == "tag"
    ours.open(record, key)


def test_a_forged_name_is_another_key() -> None:
    """The collision of docs/prefix-caching.md: one FNV-1a name, two digests."""
    victim, forged = COLLIDING
    layout = Layout(16, n_layers=1, n_kv_heads=1, head_dim=2)
    [a], [b] = layout.keys(victim), layout.keys(forged)
    assert a.hash == b.hash
    assert a.digest != b.digest
    assert a.text != b.text


def test_keys_are_those_of_the_written_format() -> None:
    layout = Layout(4, n_layers=1, n_kv_heads=2, head_dim=3, model="m\u00fc", revision="r")
    text = struct.pack("<6I", 4, 1, 2, 3, 1, 1)
    for field in ("m\u00fc".encode(), b"r", b""):
        text += struct.pack("<Q", len(field)) + field
    person = b"kvpool.layout.1"
    assert layout.id == hashlib.blake2b(text, digest_size=16, person=person).digest()
    [key] = layout.keys([0, 1, 2, 3, 4], namespace=7)
    start = hashlib.blake2b(struct.pack("<Q", 7), digest_size=32, person=b"kvpool.seal.1").digest()
    block = start + struct.pack("<4I", 0, 1, 2, 3)
    assert key.digest == hashlib.blake2b(block, digest_size=32, person=b"kvpool.seal.1").digest()
    assert key.hash == kvpool.block_hash(7, [0, 1, 2, 3])
    assert Key.parse(key.text) == key
    for wrong in ("", "tlkv1", key.text[:-1], key.text.upper(), key.text.replace("tlkv1", "tlkv2")):
        with pytest.raises(kvpool.InvalidArgument, match="key: expected"):
            Key.parse(wrong)


def test_a_layout_refuses_what_is_no_layout() -> None:
    with pytest.raises(kvpool.InvalidArgument, match="secret: expected at least 16 bytes, found 3"):
        Layout(4, n_layers=1, n_kv_heads=1, head_dim=1, secret=b"abc")
    with pytest.raises(kvpool.InvalidArgument, match="layout: dimensions"):
        Layout(4, n_layers=0, n_kv_heads=1, head_dim=1)
    assert "secret" not in repr(Layout(4, n_layers=1, n_kv_heads=1, head_dim=1, secret=SECRET))
