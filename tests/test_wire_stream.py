"""Streams: one block at a time, unverified until the end, and nothing left behind by a bad one."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvpool
from kvpool.wire import Envelope, StreamReader, StreamWriter, import_stream
from pool_support import ENVELOPE

SHAPE = {"block_tokens": 4, "n_layers": 2, "n_kv_heads": 3, "head_dim": 8}
DIMS = tuple(SHAPE.values())


@pytest.fixture
def pool() -> Iterator[kvpool.Pool]:
    pool = kvpool.Pool(12, **SHAPE)
    yield pool
    pool.check()


@pytest.fixture
def envelope() -> bytes:
    """Five blocks: named, unnamed, and a tail of three positions."""
    pool = kvpool.Pool(5, **SHAPE)
    ids = pool.alloc(5)
    pool.slab.reshape(-1)[:] = np.arange(pool.slab.size) % 2039
    pool.set_fill(ids, [4, 4, 4, 4, 3])
    pool.register(ids[:3], [11, 12, 13])
    return pool.export(ids)


def in_chunks(data: bytes, size: int) -> Iterator[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size))


def by_socket(data: bytes) -> socket.socket:
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs:
            theirs.sendall(data)

    threading.Thread(target=send, daemon=True).start()
    return ours


SOURCES: dict[str, Callable[[bytes], object]] = {
    "file": io.BytesIO,
    "socket": by_socket,
    "socket file": lambda data: by_socket(data).makefile("rb"),
    "bytes one by one": lambda data: in_chunks(data, 1),
    "chunks": lambda data: in_chunks(data, 1000),
    "empty chunks between": lambda data: [b"", data[:30], b"", b"", bytearray(data[30:])],
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_stream_gives_the_blocks_of_the_envelope(source, envelope: bytes) -> None:
    opened = source(envelope)
    reader = StreamReader(opened, DIMS)
    assert not reader.verified
    want = Envelope(envelope)
    n = 0
    for block in reader:
        assert (block.index, block.hash, block.n_tokens) == (
            n, int(want.hashes[n]), int(want.n_tokens[n]),
        )  # fmt: skip
        assert block.payload.tobytes() == want.payload[n].tobytes()
        assert not reader.verified
        n += 1
    assert n == 5
    assert reader.verified
    assert reader.header.crc32c == want.header.crc32c
    with pytest.raises(kvpool.InvalidArgument, match="iterated before"):
        list(reader)
    if hasattr(opened, "close"):
        opened.close()


def test_envelopes_may_follow_one_another(envelope: bytes) -> None:
    source = io.BytesIO(envelope + ENVELOPE + b"rest")
    assert len(list(StreamReader(source))) == 5
    assert len(list(StreamReader(source))) == 1
    assert source.read() == b"rest"


def test_a_stream_that_ends_early_says_where(envelope: bytes) -> None:
    ends = [0, 1, 27, 28, 39, 40, 41, len(envelope) - 5, len(envelope) - 4, len(envelope) - 1]
    for end in ends:
        text = rf"ended at offset {end}, expected {len(envelope) if end >= 28 else 32} bytes \(rule"
        with pytest.raises(kvpool.CorruptEnvelope, match=text):
            list(StreamReader(io.BytesIO(envelope[:end])))


def test_only_the_end_tells_a_flipped_bit(envelope: bytes) -> None:
    flipped = bytearray(envelope)
    flipped[100] ^= 1
    reader = StreamReader(io.BytesIO(flipped))
    blocks = iter(reader)
    assert [next(blocks).n_tokens for _ in range(5)] == [4, 4, 4, 4, 3]
    with pytest.raises(kvpool.CorruptEnvelope, match=r"CRC-32C .* \(rule 3\)"):
        next(blocks)
    assert not reader.verified


def test_a_large_block_is_refused_before_memory_is_taken() -> None:
    head = bytearray(ENVELOPE[:28])
    head[12:28] = b"\0\0\0\x40" + b"\1\0\0\0" * 2 + b"\0\0\1\0"  # a block of 2**48 bytes
    with pytest.raises(kvpool.Unsupported, match=r"a block of \d+ bytes, max_block_bytes is 2684"):
        StreamReader([head])
    with pytest.raises(kvpool.Unsupported, match="max_block_bytes is 15"):
        StreamReader([ENVELOPE], max_block_bytes=15)
    assert len(list(StreamReader([ENVELOPE], max_block_bytes=16))) == 1


def test_what_is_no_source_or_sink_is_told() -> None:
    with pytest.raises(kvpool.InvalidArgument, match="source: expected an object with readinto"):
        StreamReader(3)
    with pytest.raises(kvpool.InvalidArgument, match="sink: expected an object with sendall"):
        StreamWriter(3, DIMS, 1)


def test_bytes_are_a_source_and_other_chunks_are_told(pool: kvpool.Pool, envelope: bytes) -> None:
    for source in (envelope, bytearray(envelope), memoryview(envelope)):
        assert [block.n_tokens for block in StreamReader(source)] == [4, 4, 4, 4, 3]
    assert import_stream(pool, envelope).tolist() == [0, 1, 2, 3, 4]
    for bad, name in (("abc", "str"), ([5], "int"), ([[]], "list"), (["x"], "str")):
        with pytest.raises(kvpool.InvalidArgument, match=f"iterable of bytes, found {name} in it"):
            StreamReader(bad)


def test_what_a_function_gets_it_may_keep(pool: kvpool.Pool) -> None:
    ids = pool.alloc(1)
    pool.slab[ids] = 3
    kept: list[bytes] = []
    with StreamWriter(kept.append, pool, 1) as writer:
        writer.write(pool.block(ids[0]))
    pool.slab[ids] = 4  # the block's memory is the pool's, and used again
    assert Envelope(b"".join(kept), pool)[0].payload.max() == 3


# ---- writing ------------------------------------------------------------------------------------


def test_written_block_by_block_it_is_the_same_envelope(envelope: bytes) -> None:
    file = io.BytesIO()
    want = Envelope(envelope)
    with StreamWriter(file, DIMS, len(want)) as writer:
        for block in want:
            writer.write(block.payload, block.n_tokens, block.hash)
    assert file.getvalue() == envelope


def test_a_socket_and_a_raw_pipe_are_sinks(envelope: bytes) -> None:
    want = Envelope(envelope)
    ours, theirs = socket.socketpair()
    with ours, theirs, StreamWriter(theirs, DIMS, len(want)) as writer:
        for block in want:
            writer.write(block.payload, block.n_tokens, block.hash)
        writer.close()
        assert len(list(StreamReader(ours, DIMS))) == 5
    r, w = os.pipe()
    with open(w, "wb", buffering=0) as sink, open(r, "rb", buffering=0) as source:
        with StreamWriter(sink, DIMS, 1) as writer:
            writer.write(want[0].payload)
        assert [block.n_tokens for block in StreamReader(source)] == [4]


def test_the_writer_refuses_what_no_reader_would_take() -> None:
    zeros = np.zeros((2, 2, 3, 4, 8), np.float16)
    file = io.BytesIO()
    writer = StreamWriter(file, DIMS, 1)
    size = len(file.getvalue())
    for bad in (
        lambda: writer.write(zeros, 0),
        lambda: writer.write(zeros, 5),
        lambda: writer.write(zeros, 3, hash=7),
        lambda: writer.write(zeros[1:]),
        lambda: writer.write(zeros.astype(np.float32)),
        lambda: writer.write(zeros, -1),
        lambda: writer.write(zeros, 1 << 32),
        lambda: writer.write(zeros, 4.0),
        lambda: writer.write(zeros, hash=-1),
        lambda: writer.write(zeros, hash=1 << 64),
        lambda: writer.write(zeros, hash="7"),
        writer.close,
    ):
        with pytest.raises(kvpool.InvalidArgument):
            bad()
    assert len(file.getvalue()) == size
    writer.write(zeros, np.uint32(4), np.uint64(2**64 - 1))
    with pytest.raises(kvpool.InvalidArgument, match="all 1 blocks are written"):
        writer.write(zeros)
    for n_blocks in (-1, 1 << 32, 1.5, "1", None):
        with pytest.raises(kvpool.InvalidArgument, match="n_blocks"):
            StreamWriter(file, DIMS, n_blocks)
    for shape in (
        5,
        "abcd",
        (4.0, 2, 3, 8),
        (4, 2, 3),
        (0, 1, 1, 1),
        (1 << 32, 1, 1, 1),
        None,
        ((1 << 32) - 1,) * 4,
    ):
        with pytest.raises(kvpool.InvalidArgument, match="shape"):
            StreamWriter(file, shape, 1)


def test_a_writer_that_fails_leaves_a_stream_that_ended_early() -> None:
    file = io.BytesIO()

    def fail() -> None:
        with StreamWriter(file, DIMS, 1) as writer:
            writer.write(np.zeros((2, 2, 3, 4, 8), np.float16))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with pytest.raises(kvpool.CorruptEnvelope, match="ended at offset"):
        list(StreamReader(io.BytesIO(file.getvalue())))


# ---- into a pool --------------------------------------------------------------------------------


def test_import_stream_is_import(pool: kvpool.Pool, envelope: bytes) -> None:
    twin = kvpool.Pool(12, **SHAPE)
    ids, want = import_stream(pool, io.BytesIO(envelope)), twin.import_(envelope)
    assert ids.tolist() == want.tolist()
    assert pool.slab[ids].tobytes() == twin.slab[want].tobytes()
    assert pool.fill(ids).tolist() == [4, 4, 4, 4, 3]
    assert pool.hash(ids).tolist() == [11, 12, 13, 0, 0]
    assert pool.export(ids) == envelope


def test_a_bad_stream_gives_every_block_back(pool: kvpool.Pool, envelope: bytes) -> None:
    flipped = envelope[:200] + bytes([envelope[200] ^ 1]) + envelope[201:]
    for data in (flipped, envelope[:-1], envelope[:1000]):
        with pytest.raises(kvpool.CorruptEnvelope):
            import_stream(pool, io.BytesIO(data))
        assert pool.stats == (12, 0, 0, 0)
        assert pool.lookup([11, 12, 13]).tolist() == [-1, -1, -1]

    def breaks() -> Iterator[bytes]:
        yield envelope[:500]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        import_stream(pool, breaks())
    assert pool.stats == (12, 0, 0, 0)


def test_nothing_is_findable_before_the_end(pool: kvpool.Pool, envelope: bytes) -> None:
    def watch() -> Iterator[bytes]:
        for chunk in in_chunks(envelope, 64):
            assert pool.lookup([11, 12, 13]).tolist() == [-1, -1, -1]
            yield chunk

    import_stream(pool, watch())
    assert min(pool.lookup([11, 12, 13])) >= 0


def test_no_room_is_told_before_a_payload_is_read(envelope: bytes) -> None:
    small = kvpool.Pool(4, **SHAPE)
    source = io.BytesIO(envelope)
    with pytest.raises(kvpool.PoolFull):
        import_stream(small, source)
    assert source.tell() == 28
    assert small.stats == (4, 0, 0, 0)


LARGE = """
import resource, socket, sys, threading
import numpy as np
from kvpool.wire import StreamReader, StreamWriter

N, SHAPE = 256, (16, 32, 8, 128)                      # 2 MiB a block, 512 MiB
payload = np.ones((32, 2, 8, 16, 128), np.float16)
ours, theirs = socket.socketpair()

def write():
    with theirs, StreamWriter(theirs, SHAPE, N) as writer:
        for i in range(N):
            writer.write(payload)

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
threading.Thread(target=write, daemon=True).start()
reader = StreamReader(ours, SHAPE)
n = sum(block.n_tokens for block in reader)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert (n, reader.verified) == (16 * N, True)
print(grown)
"""


def test_half_a_gibibyte_passes_through_a_few_megabytes() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(run.stdout) < 32 * 1024  # KiB: writer and reader, two blocks and the sockets


def test_a_hundred_gigabytes_are_announced_and_read_like_anything_else(tmp_path: Path) -> None:
    """Of a stream that long only what was sent is kept: the memory does not depend on n_blocks."""
    head = bytearray(ENVELOPE[:28])
    head[8:12] = (0xFFFFFFFF).to_bytes(4, "little")
    record = ENVELOPE[28:-4]

    def endless() -> Iterator[bytes]:
        yield bytes(head)
        for _ in range(10):
            yield record * 1000

    blocks = iter(StreamReader(endless()))
    assert sum(next(blocks).n_tokens for _ in range(10000)) == 20000
    with pytest.raises(kvpool.CorruptEnvelope, match=r"ended at offset 280028, expected 12025908"):
        next(blocks)
