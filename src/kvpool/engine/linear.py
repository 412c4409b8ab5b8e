"""Matrix products whose rows do not depend on each other, in chunks, on all cores.

``rows @ matrix.T`` in one BLAS call is the fastest for one shape, but how a row is rounded then
depends on how many others there are. Here every call has the same shape: a tile of TILE rows (zeros
where there are fewer) by one chunk of the matrix:

    matrix (n_out, n_in)        for each chunk of the matrix        (a thread takes some of them)
      [ chunk 0 ]  at most          for each tile of rows
      [ chunk 1 ]  256 KiB              out[tile, chunk] = tile @ chunk.T
      [   ...   ]

In a product of one shape a row is the same sum in the same order, wherever in the tile it stands
and whatever its neighbours are. So a result has the same bits for any number of rows and of
threads. A chunk is read from memory once and serves all tiles from the core's own cache.

Tiles of 2 or 8 rows are faster for few and for many rows. They are used where this BLAS adds up in
the same order as at TILE rows, which is found out by comparing all bits of one product.

Measured (Zen 4, OpenBLAS 0.3.31, one core, a 135M model): reading all matrices from memory takes
44 ms as matrix-vector calls; one row in a tile of 2 takes 46, of 4 takes 54, of 8 takes 66; 16 rows
take 172, 121 and 106. Such small products are multiplied in place, without packing.

The threads are this module's and not the BLAS library's: chunks are too small for that to start
its own (OpenBLAS: m * n * k above 2**18). Its threads wait for each other by spinning, hundreds of
times a token; when something else needs the cores, every wait can last a time slice.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

__all__ = ["TILE", "linear", "n_cores"]

Array = NDArray[np.float32]

#: Rows of a product. With _CHUNK_VALUES it stays below OpenBLAS's threshold for threads.
TILE = 4
_OTHER_TILES = (2, 8)
_CHUNK_VALUES = 1 << 16  # float32 values of a chunk: 256 KiB, half of a small second-level cache
_GROUP = 4  # chunks that a thread takes at a time
_WORTH_A_THREAD = 1 << 19  # matrix values below which waking a thread costs more than it gives


def linear(matrix: Array, rows: Array, threads: int | None = None) -> Array:
    """``rows @ matrix.T``: (n_out, n_in) and (n, n_in) C-contiguous float32 give (n, n_out).

    A row's result has the same bits whatever n is, wherever in ``rows`` it stands, and however many
    ``threads`` share the work (default: one for each core).

    >>> w, x = np.eye(3, dtype=np.float32), np.ones((2, 3), dtype=np.float32)
    >>> linear(w, x).shape
    (2, 3)
    """
    (n_out, n_in), n = matrix.shape, len(rows)
    height = _chunk_height(n_out, n_in)
    n_chunks, rest = divmod(n_out, height)
    sizes = _tile_sizes(height, rest, n_in)
    size = next((size for size in sizes if size >= n), sizes[-1])
    n_tiles = -(-n // size)
    if n % size:
        rows = np.concatenate([rows, np.zeros((n_tiles * size - n, n_in), dtype=np.float32)])
    tiles = rows.reshape(n_tiles, size, n_in)
    out = np.empty((n_tiles, size, n_out), dtype=np.float32)
    chunks = matrix[: n_out - rest].reshape(n_chunks, 1, height, n_in).swapaxes(2, 3)
    products = out[:, :, : n_out - rest].reshape(n_tiles, size, n_chunks, height)
    _multiply(tiles, chunks, products.transpose(2, 0, 1, 3), threads or n_cores())
    if rest:
        np.matmul(tiles, matrix[n_out - rest :].T, out=out[:, :, n_out - rest :])
    result: Array = out.reshape(-1, n_out)[:n]
    return result


@functools.cache
def _tile_sizes(height: int, rest: int, n_in: int) -> tuple[int, ...]:
    """Tiles that give the bits of TILE rows with chunks of ``height`` and ``rest``, ascending."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((8, n_in), dtype=np.float32)
    sizes = {TILE, *_OTHER_TILES}
    for n_out in filter(None, (height, rest)):
        chunk = random.standard_normal((n_out, n_in), dtype=np.float32)

        def product(size: int, chunk: Array = chunk) -> Array:
            result: Array = np.matmul(rows.reshape(-1, size, n_in), chunk.T).reshape(8, -1)
            return result

        expected = product(TILE)
        sizes -= {n for n in _OTHER_TILES if not np.array_equal(product(n), expected)}
    return tuple(sorted(sizes))


@functools.cache
def _chunk_height(n_out: int, n_in: int) -> int:
    """Rows of a chunk: up to _CHUNK_VALUES values; if possible without a rest at the end.

    >>> _chunk_height(960, 576), _chunk_height(49152, 576), _chunk_height(10, 4)
    (96, 96, 10)
    """
    limit = min(n_out, max(8, _CHUNK_VALUES // n_in // 8 * 8))
    return next((h for h in range(limit, limit // 2, -8) if n_out % h == 0), limit)


def _multiply(tiles: Array, chunks: Array, out: Array, threads: int) -> None:
    """``out[c, t] = tiles[t] @ chunks[c]``; a thread takes a group of chunks as long as there are
    any. One that gets no core in time has taken none, and nobody waits for it."""
    starts = range(0, len(chunks), _GROUP)
    n_values = chunks.size * max(1, len(tiles) // TILE)
    n_helpers = min(len(starts), threads) - 1 if n_values >= _WORTH_A_THREAD else 0
    if n_helpers < 1:
        np.matmul(tiles, chunks, out=out)
        return
    groups = deque(starts)

    def work() -> None:
        with contextlib.suppress(IndexError):  # no group is left
            while True:
                start = groups.popleft()
                group = slice(start, start + _GROUP)
                np.matmul(tiles, chunks[group], out=out[group])  # releases the GIL

    helpers = [_threads().submit(work) for _ in range(n_helpers)]
    work()
    for helper in helpers:
        if not helper.cancel():
            helper.result()


@functools.cache
def n_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, n_cores() - 1), thread_name_prefix="kvpool-linear")


if hasattr(os, "register_at_fork"):  # a forked child has none of these threads
    os.register_at_fork(after_in_child=_threads.cache_clear)
