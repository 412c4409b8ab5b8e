"""Export and import: the worked envelope, every kind of buffer, and hostile bytes."""

from __future__ import annotations

import mmap
import struct
import tempfile
from collections.abc import Callable

import numpy as np
import pytest

import kvpool
from pool_support import ENVELOPE, H0, MakePool, registered


def state(pool: kvpool.Pool) -> object:
    """Everything that can be seen of a pool from outside."""
    ids = range(pool.n_blocks)
    rows = [pool.refs(ids), pool.fill(ids), pool.hash(ids)]
    return pool.stats, [r.tolist() for r in rows], pool.slab.tobytes()


def resealed(envelope: bytes, offset: int, value: bytes) -> bytes:
    """The envelope with some bytes replaced and a valid checksum again."""
    body = bytearray(envelope[:-4])
    body[offset : offset + len(value)] = value
    return bytes(body) + struct.pack("<I", kvpool.crc32c(body))


@pytest.fixture
def example(pool: kvpool.Pool) -> kvpool.Pool:
    """A pool whose block 0 is the worked example's."""
    block = pool.alloc()
    k, v = pool.block(block)[0]
    k[:] = [[[1, 2], [3, 4]]]
    v[:] = [[[0.5, -1], [0, 0.25]]]
    pool.set_fill(block, 2)
    pool.register(block, H0)
    return pool


def test_the_worked_envelope_byte_for_byte(example: kvpool.Pool) -> None:
    assert example.export([0]) == ENVELOPE
    assert len(ENVELOPE) == example.export_bytes(1) == 60
    assert kvpool.crc32c(ENVELOPE[:-4]) == 0x4F0B541C


def test_the_worked_envelope_arrives(pool: kvpool.Pool) -> None:
    ids = pool.import_(ENVELOPE)
    assert ids.dtype == np.uint32
    assert ids.tolist() == [0]
    assert pool.block(0).tolist() == [[[[[1, 2], [3, 4]]], [[[0.5, -1], [0, 0.25]]]]]
    assert (pool.refs(0), pool.fill(0), pool.hash(0)) == (1, 2, H0)
    assert pool.export(ids) == ENVELOPE


def test_positions_past_the_fill_are_zeros(pool: kvpool.Pool) -> None:
    block = pool.alloc()
    pool.block(block)[:] = 9
    pool.set_fill(block, 1)
    payload = np.frombuffer(pool.export([block])[40:56], np.float16)
    assert payload.tolist() == [9, 9, 0, 0, 9, 9, 0, 0]


@pytest.mark.parametrize("fill_big", [False, True])
def test_a_sequence_goes_around(make_pool: MakePool, fill_big: bool) -> None:
    shape = {"block_tokens": 16, "n_layers": 4, "n_kv_heads": 2, "head_dim": 32}
    n = 40 if fill_big else 3  # 32 KiB a block: below and above where the GIL is released
    a, b = make_pool(n, **shape), make_pool(n + 2, **shape)
    rng = np.random.default_rng(0)
    ids = a.alloc(n)
    a.slab[:] = rng.standard_normal(a.slab.shape).astype(np.float16)
    a.set_fill(ids, [16] * (n - 1) + [5])
    a.register(ids[:-1], range(1, n))
    envelope = a.export(ids)
    assert len(envelope) == a.export_bytes(n)
    arrived = b.import_(envelope)
    assert b.hash(arrived).tolist() == [*range(1, n), 0]
    assert b.fill(arrived).tolist() == [16] * (n - 1) + [5]
    assert np.array_equal(b.slab[arrived[:-1]], a.slab[ids[:-1]])
    assert b.export(arrived) == envelope
    assert b.lookup(1) == arrived[0]


def test_blocks_travel_in_the_order_given(make_pool: MakePool) -> None:
    a, b = make_pool(), make_pool()
    ids = a.alloc(3)
    a.slab[:3] = np.arange(3).reshape(3, 1, 1, 1, 1, 1)
    a.set_fill(ids, 2)
    arrived = b.import_(a.export([2, 0, 1, 2]))
    assert [float(b.block(i).max()) for i in arrived] == [2, 0, 1, 2]


def test_an_empty_envelope_is_valid(pool: kvpool.Pool) -> None:
    envelope = pool.export([])
    assert len(envelope) == pool.export_bytes(0) == 32
    assert pool.import_(envelope).shape == (0,)


def test_export_refuses_blocks_that_a_reader_would_refuse(pool: kvpool.Pool) -> None:
    ids = pool.alloc(2)
    pool.set_fill(ids, [2, 0])
    for row, text in ((ids, "fill 0"), ([0, 2], "nobody holds block 2"), ([0, 9], "out of range")):
        with pytest.raises(kvpool.InvalidArgument, match=text):
            pool.export(row)


BUFFERS: dict[str, Callable[[bytes], object]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "slice": lambda e: memoryview(b"x" + e + b"y")[1:-1],
    "numpy u8": lambda e: np.frombuffer(e, np.uint8),
    "numpy f4": lambda e: np.frombuffer(e, np.float32),
    "numpy 2-D": lambda e: np.frombuffer(e, np.float16).reshape(2, 15),
    "numpy unaligned": lambda e: np.frombuffer(b"x" + e, np.uint8)[1:],
    "bytes subclass": type("B", (bytes,), {}),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_import_reads_any_contiguous_buffer(pool: kvpool.Pool, kind: str) -> None:
    assert pool.import_(BUFFERS[kind](ENVELOPE)).tolist() == [0]
    assert pool.export([0]) == ENVELOPE


def test_import_reads_a_mapped_file(pool: kvpool.Pool) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(ENVELOPE)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert pool.import_(mapped).tolist() == [0]
        with pytest.raises(kvpool.InvalidArgument, match=r"mmap\.mmap has no C-contiguous"):
            pool.import_(mapped)  # closed


def test_import_refuses_what_is_no_contiguous_buffer(pool: kvpool.Pool) -> None:
    for wrong in ("text", 5, None, [1, 2], object()):
        with pytest.raises(kvpool.ArgumentTypeError, match="buffer: expected bytes"):
            pool.import_(wrong)
    doubled = np.repeat(np.frombuffer(ENVELOPE, np.uint8), 2)
    for strided in (doubled[::2], memoryview(doubled)[::2]):
        assert bytes(strided) == ENVELOPE
        with pytest.raises(kvpool.InvalidArgument, match="no C-contiguous buffer") as error:
            pool.import_(strided)
        assert error.value.__cause__ is not None


def test_the_buffer_is_let_go_of(pool: kvpool.Pool) -> None:
    buffer = bytearray(ENVELOPE)
    pool.import_(buffer)
    buffer.append(0)  # BufferError while somebody holds it
    with pytest.raises(kvpool.CorruptEnvelope):
        pool.import_(buffer)
    buffer.append(0)


def test_every_bit_flip_is_refused_and_changes_nothing(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.unref(registered(pool, 5, value=1.0))  # cached: a careless import would evict it
    pool.slab[1:] = 0
    before = state(pool)
    for bit in range(8 * len(ENVELOPE)):
        flipped = bytearray(ENVELOPE)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(kvpool.CorruptEnvelope):
            pool.import_(flipped)
    assert state(pool) == before


def test_every_truncation_is_refused_and_changes_nothing(pool: kvpool.Pool) -> None:
    before = pool.stats
    for n in range(len(ENVELOPE)):
        with pytest.raises(kvpool.CorruptEnvelope):
            pool.import_(ENVELOPE[:n])
    for more in (b"\0", ENVELOPE):
        with pytest.raises(kvpool.CorruptEnvelope):
            pool.import_(ENVELOPE + more)
    assert pool.stats == before


@pytest.mark.parametrize(
    ("offset", "value", "error", "text"),
    [
        (4, b"\2\0", kvpool.CorruptEnvelope, "version 2"),
        (6, b"\0\0", kvpool.CorruptEnvelope, "dtype 0"),
        (0, b"KVTL", kvpool.CorruptEnvelope, "magic"),
        (8, b"\2\0\0\0", kvpool.CorruptEnvelope, "length 60"),
        (8, b"\xff\xff\xff\xff", kvpool.CorruptEnvelope, "length 60"),
        (36, b"\0\0\0\0", kvpool.CorruptEnvelope, "n_tokens 0"),
        (36, b"\3\0\0\0", kvpool.CorruptEnvelope, "n_tokens 3"),
        (36, b"\1\0\0\0", kvpool.CorruptEnvelope, "has a hash but only 1 of 2"),
    ],
)
def test_illegal_fields_under_a_valid_checksum(
    pool: kvpool.Pool, offset: int, value: bytes, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        pool.import_(resealed(ENVELOPE, offset, value))
    assert pool.stats == (4, 0, 0, 0)


@pytest.mark.parametrize(
    "shape", [{"block_tokens": 4}, {"n_layers": 2}, {"n_kv_heads": 2}, {"head_dim": 4}]
)
def test_another_shape_is_refused(make_pool: MakePool, shape: dict[str, int]) -> None:
    other = make_pool(**shape)
    with pytest.raises(kvpool.ShapeMismatch, match=f"{next(iter(shape))} .*, the pool has"):
        other.import_(ENVELOPE)
    swapped = resealed(resealed(ENVELOPE, 24, b"\1\0\0\0"), 20, b"\2\0\0\0")  # same length
    with pytest.raises(kvpool.ShapeMismatch):
        make_pool().import_(swapped)


def test_an_import_without_room_takes_nothing(make_pool: MakePool) -> None:
    a, b = make_pool(), make_pool(3)
    ids = a.alloc(3)
    a.set_fill(ids, 2)
    b.alloc(1)
    b.unref(registered(b, 5))
    before = state(b)
    with pytest.raises(kvpool.PoolFull, match="3 blocks needed, 1 are free and 1 cached"):
        b.import_(a.export(ids))
    assert state(b) == before


def test_an_import_keeps_the_first_holder_of_a_hash(pool: kvpool.Pool) -> None:
    first = registered(pool, H0)
    (arrived,) = pool.import_(ENVELOPE)
    assert arrived != first
    assert pool.hash([first, arrived]).tolist() == [H0, 0]
    assert pool.lookup(H0) == first


def test_sizes_do_not_overflow_silently() -> None:
    pool = kvpool.Pool(1, block_tokens=64, n_layers=64, n_kv_heads=64, head_dim=128)
    n = 2**32 - 1
    assert pool.export_bytes(n) == 28 + n * (12 + pool.block_bytes) + 4
    block = pool.alloc()
    pool.set_fill(block, 1)
    with pytest.raises(MemoryError):
        pool.export(np.full(2**22, block))  # 2 ** 48 bytes
