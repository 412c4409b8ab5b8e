"""Matrix products whose rows do not depend on each other, in chunks, on all cores.

``rows @ matrix.T`` in one BLAS call is the fastest, but how a row is rounded then depends on how
many others there are. Here a row is multiplied with one chunk of the matrix at a time, by a
matrix-vector call of its own:

    matrix (n_out, n_in)        for each chunk of the matrix        (a thread takes some of them)
      [ chunk 0 ]  256 KiB          for each row
      [ chunk 1 ]                       out[row, chunk] = chunk @ row
      [   ...   ]

The chunks depend on the matrix alone, so a result has the same bits whatever the number of rows and
of threads. A chunk is read from memory once and serves all rows from the core's own cache.

The threads are this module's and not the BLAS library's: chunks are too small for that to start
its own. OpenBLAS's threads wait for each other by spinning, hundreds of times a token; when
something else needs the cores, every wait can last a time slice (measured on 2 busy cores: 15 times
slower; on 2 idle cores they gain a third at one row and nothing at 32).
"""

from __future__ import annotations

import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

__all__ = ["linear"]

Array = NDArray[np.float32]

_CHUNK_VALUES = 1 << 16  # float32 values of a chunk: 256 KiB, half of a small second-level cache
_WORTH_A_THREAD = 1 << 22  # multiplications below which waking a thread costs more than it gives


def linear(matrix: Array, rows: Array) -> Array:
    """``rows @ matrix.T``: (n_out, n_in) and (n, n_in) C-contiguous float32 give (n, n_out).

    A row's result has the same bits whatever n is and wherever in ``rows`` it stands.

    >>> w, x = np.eye(3, dtype=np.float32), np.ones((2, 3), dtype=np.float32)
    >>> linear(w, x).shape
    (2, 3)
    """
    (n_out, n_in), n = matrix.shape, len(rows)
    height = _chunk_height(n_out, n_in)
    n_chunks, rest = divmod(n_out, height)
    columns = rows[:, :, None]
    chunks = matrix[: n_out - rest].reshape(n_chunks, 1, height, n_in)
    products = np.empty((n_chunks, n, height, 1), dtype=np.float32)
    _multiply(chunks, columns, products)
    result: Array = products.transpose(1, 0, 2, 3).reshape(n, n_out - rest)
    if rest:
        tail = np.matmul(matrix[n_out - rest :], columns)[:, :, 0]
        result = np.concatenate([result, tail], axis=1)
    return result


@functools.cache
def _chunk_height(n_out: int, n_in: int) -> int:
    """Rows of a chunk: about _CHUNK_VALUES values; if possible without a rest at the end.

    >>> _chunk_height(960, 576), _chunk_height(49152, 576), _chunk_height(10, 4)
    (96, 96, 10)
    """
    limit = min(n_out, max(8, _CHUNK_VALUES // n_in // 8 * 8))
    return next((h for h in range(limit, limit // 2, -8) if n_out % h == 0), limit)


def _multiply(chunks: Array, columns: Array, out: Array) -> None:
    """``np.matmul(chunks, columns, out=out)``, the chunks dealt out to threads."""
    n_multiplications = out.size * chunks.shape[-1]
    parts = min(len(chunks), _n_cores()) if n_multiplications >= _WORTH_A_THREAD else 1
    bounds = [len(chunks) * part // parts for part in range(1, parts + 1)]
    others = [
        _threads().submit(np.matmul, chunks[a:b], columns, out[a:b])
        for a, b in itertools.pairwise(bounds)
    ]
    np.matmul(chunks[: bounds[0]], columns, out=out[: bounds[0]])  # releases the GIL
    for other in others:
        other.result()


@functools.cache
def _n_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, _n_cores() - 1), thread_name_prefix="kvpool-linear")


if hasattr(os, "register_at_fork"):  # a forked child has none of these threads
    os.register_at_fork(after_in_child=_threads.cache_clear)
