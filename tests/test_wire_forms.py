"""export_into, export_iter and export_pieces: whatever the form, the bytes of export."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import kvpool


@pytest.fixture
def pool() -> kvpool.Pool:
    return kvpool.Pool(8, block_tokens=16, n_layers=2, n_kv_heads=2, head_dim=8)


@pytest.fixture
def ids(pool: kvpool.Pool) -> np.ndarray:
    """Full and partial blocks, two of them registered, with values that tell places apart."""
    blocks = pool.alloc(5)
    pool.slab.reshape(-1)[:] = np.arange(pool.slab.size) % 2039
    pool.set_fill(blocks, [16, 16, 3, 16, 1])
    pool.register(blocks[:2], [7, 8])
    return blocks


def test_pieces_joined_are_the_envelope(pool: kvpool.Pool, ids: np.ndarray) -> None:
    pieces = pool.export_pieces(ids)
    assert b"".join(pieces) == pool.export(ids)
    assert len(pieces) == 2 * 3 + 1  # three full blocks, and what is between them
    assert all(piece.readonly for piece in pieces)
    assert b"".join(pool.export_pieces([])) == pool.export([])


def test_a_full_block_is_sent_from_the_slab(pool: kvpool.Pool, ids: np.ndarray) -> None:
    piece = np.frombuffer(pool.export_pieces(ids)[1], np.uint8)
    assert np.shares_memory(piece, pool.slab)


def test_pieces_outlive_the_pool(pool: kvpool.Pool, ids: np.ndarray) -> None:
    want, pieces = pool.export(ids), pool.export_pieces(ids)
    pool.close()
    del pool
    gc.collect()
    assert b"".join(pieces) == want


@pytest.mark.parametrize("chunk_bytes", [0, 1, 5000, 1 << 20, 1 << 63])
def test_parts_joined_are_the_envelope(
    pool: kvpool.Pool, ids: np.ndarray, chunk_bytes: int
) -> None:
    parts = list(pool.export_iter(ids, chunk_bytes))
    assert b"".join(parts) == pool.export(ids)
    if chunk_bytes == 1:
        assert len(parts) == len(ids)  # at least one block each
    assert b"".join(pool.export_iter([], chunk_bytes)) == pool.export([])


def test_an_iterator_whose_block_is_gone_says_so(pool: kvpool.Pool, ids: np.ndarray) -> None:
    parts = pool.export_iter(ids, 1)
    next(parts)
    pool.unref(ids[4])
    with pytest.raises(kvpool.InvalidArgument, match="nobody holds"):
        list(parts)


def test_ids_are_checked_before_the_first_part(pool: kvpool.Pool) -> None:
    with pytest.raises(kvpool.InvalidArgument, match="nobody holds"):
        pool.export_iter([0])


@pytest.mark.parametrize("make", [bytearray, lambda n: memoryview(bytearray(n)), np.zeros])
def test_export_into_writes_the_envelope_and_nothing_else(
    pool: kvpool.Pool, ids: np.ndarray, make
) -> None:
    want = pool.export(ids)
    buffer = make(len(want) + 8)
    assert pool.export_into(ids, buffer) == len(want)
    found = bytes(memoryview(buffer).cast("B"))
    assert found[: len(want)] == want
    assert not any(found[len(want) :])


def test_export_into_refuses_what_it_cannot_fill(pool: kvpool.Pool, ids: np.ndarray) -> None:
    size = pool.export_bytes(len(ids))
    small = bytearray(size - 1)
    with pytest.raises(kvpool.InvalidArgument, match=f"at least {size} bytes, found {size - 1}"):
        pool.export_into(ids, small)
    assert not any(small)
    for bad in (bytes(size), memoryview(bytearray(2 * size))[::2], 3, None):
        with pytest.raises(kvpool.ArgumentTypeError, match="writable C-contiguous"):
            pool.export_into(ids, bad)


def test_a_closed_pool_exports_nothing(pool: kvpool.Pool, ids: np.ndarray) -> None:
    parts = pool.export_iter(ids)
    pool.close()
    for call in (lambda: pool.export_pieces(ids), lambda: next(parts)):
        with pytest.raises(kvpool.InvalidArgument, match="closed"):
            call()
    with pytest.raises(kvpool.InvalidArgument, match="closed"):
        pool.export_into(ids, bytearray(100000))


def test_two_threads_on_one_iterator_get_each_part_once_or_an_error() -> None:
    pool = kvpool.Pool(64, block_tokens=64, n_layers=4, n_kv_heads=4, head_dim=64)
    ids = pool.alloc(64)  # 512 KiB each
    pool.slab[:] = 1.0
    pool.set_fill(ids, 64)
    whole = pool.export(ids)

    def take(iterator: Iterator[bytes], parts: list[bytes], refused: list[str]) -> None:
        while True:
            try:
                parts.append(next(iterator))
            except StopIteration:
                return
            except kvpool.InvalidArgument as e:
                refused.append(str(e))

    for _ in range(5):
        shared: tuple[Iterator[bytes], list[bytes], list[str]]
        shared = (pool.export_iter(ids, chunk_bytes=1), [], [])
        threads = [threading.Thread(target=take, args=shared) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _, parts, refused = shared
        assert sum(map(len, parts)) == len(whole)
        assert all("another thread" in text for text in refused)


def test_a_part_of_the_own_slab_is_no_buffer(pool: kvpool.Pool, ids: np.ndarray) -> None:
    envelope = pool.export(ids[:2])
    raw = pool.slab.reshape(-1).view(np.uint8)
    tail = raw[-len(envelope) :]
    tail[:] = np.frombuffer(envelope, np.uint8)
    before, stats = raw.tobytes(), pool.stats
    mgr = kvpool.BlockManager(pool)
    calls = {
        "export_into": [
            lambda: pool.export_into(ids, raw),
            lambda: pool.export_into([], raw[-32:]),
        ],
        "import_": [lambda: pool.import_(tail), lambda: mgr.import_(tail)],
        "import_sequence": [lambda: mgr.import_sequence(tail, range(32))],
    }
    for name, some in calls.items():
        for call in some:
            with pytest.raises(kvpool.InvalidArgument, match=f"^{name}: buffer: expected memory"):
                call()
    assert (raw.tobytes(), pool.stats) == (before, stats)
    other = kvpool.Pool(8, block_tokens=16, n_layers=2, n_kv_heads=2, head_dim=8)
    assert other.import_(tail).tolist() == [0, 1]  # another pool's slab is memory like any
    assert pool.export_into(ids[:1], other.slab) == pool.export_bytes(1)
