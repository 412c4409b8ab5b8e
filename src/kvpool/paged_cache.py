"""A paged KV cache in plain Python over a pool: sequences that append, fork and are gathered again.

:class:`PagedKVCache` is the interface of seed L8.3. It keeps a list of block ids and, for each
layer, a length; everything else is the pool's: who holds a block, which are free, what is copied
when a shared one is written. It is written to be read, and to check a pool with: a pool of another
kind serves as well (:class:`BlockPool` says what it must do), and ``ol check L8.3`` runs it over a
learner's. Engines use :class:`kvpool.BlockManager`, which shares prefixes too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ._stats import Stats
from .errors import ArgumentTypeError, InvalidArgument, OutOfBlocks, PoolFull

if TYPE_CHECKING:  # numpy.typing takes a while to import
    from numpy.typing import NDArray

    Half = NDArray[np.float16]
    Floats = NDArray[np.floating[Any]]

__all__ = ["BlockPool", "PagedKVCache"]


class Planes(Protocol):
    """A block's values: ``planes[layer, is_v]`` is float16 (n_kv_heads, block_tokens, head_dim)."""

    def __getitem__(self, at: tuple[int, int], /) -> Half: ...


class BlockPool(Protocol):
    """What a cache asks of a pool; :class:`kvpool.Pool` has it all, and so may another."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def stats(self) -> Stats: ...
    def alloc(self, n: int) -> Row[int] | NDArray[np.uint32]: ...
    def ref(self, ids: list[int]) -> None: ...
    def unref(self, ids: list[int]) -> None: ...
    def cow(self, ids: int) -> int: ...
    def set_fill(self, ids: int, n_tokens: int) -> None: ...
    def block(self, id: int) -> Planes: ...


@dataclass
class _Sequence:
    lens: list[int]  # positions, of each layer
    blocks: list[int] = field(default_factory=list)


class PagedKVCache:
    """K and V of many sequences, a layer at a time, in the blocks of a pool.

    A sequence is an int. Layers are appended to one after another, so their lengths may differ; a
    block's fill is the number of its positions that every layer holds. K and V are stored as
    float16, rounded to nearest, ties to even.

    A fork shares its parent's blocks. Whoever appends to a block that another sequence holds gets a
    copy of it first: a shared block is never written. Blocks that are cached in the pool are taken
    when none is free, as by ``Pool.alloc``.

    Args:
        pool: the blocks, a ``kvpool.Pool`` or anything that does what ``BlockPool`` says. It stays
            the caller's: ``close`` gives the blocks back and leaves the pool open.

    A call that raises has changed nothing. One cache is for one thread at a time. A block that
    somebody outside of the cache holds as well is copied like a shared one; the room for that copy
    cannot be foreseen.

    Source: seed L8.3; Kwon et al. (SOSP 2023), section 4.

    >>> import numpy as np
    >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> cache = kvpool.PagedKVCache(pool)
    >>> a = cache.add_seq()
    >>> k = np.arange(6.0).reshape(1, 3, 2)             # three positions
    >>> cache.append(a, 0, k, -k)
    >>> b = cache.fork(a)                               # shares both blocks
    >>> cache.append(b, 0, k[:, :1], k[:, :1])          # the half-full one is copied
    >>> cache.block_table(a), cache.block_table(b)
    (array([0, 1], dtype=int32), array([0, 2], dtype=int32))
    >>> cache.gather(b, 0)[0][0]
    array([[0., 1.],
           [2., 3.],
           [4., 5.],
           [0., 1.]], dtype=float16)
    >>> cache.close()
    >>> pool.stats
    Stats(free=4, used=0, cached=0, evictions=0)
    """

    def __init__(self, pool: BlockPool) -> None:
        """A cache without sequences; takes no block."""
        self._pool = pool
        self._sequences: dict[int, _Sequence] = {}
        self._holders: Counter[int] = Counter()  # sequences of this cache that hold a block
        self._next = 0
        self._closed = False

    # ---- sequences ------------------------------------------------------------------------------

    def add_seq(self) -> int:
        """A new, empty sequence. Takes no block.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> cache = kvpool.PagedKVCache(pool)
        >>> cache.add_seq(), cache.add_seq()
        (0, 1)
        """
        self._check_open()
        return self._keep(_Sequence([0] * self._pool.n_layers))

    def fork(self, seq: int) -> int:
        """A new sequence with all that ``seq`` holds. Copies nothing: every block is shared.

        Raises:
            InvalidArgument: the cache has no such sequence.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> cache = kvpool.PagedKVCache(pool)
        >>> child = cache.fork(cache.add_seq())
        >>> cache.seq_len(child, 0)
        0
        """
        parent = self._get(seq)
        self._pool.ref(parent.blocks)
        self._holders.update(parent.blocks)
        return self._keep(_Sequence(list(parent.lens), list(parent.blocks)))

    def free(self, seq: int) -> None:
        """Ends a sequence and gives its references back.

        Raises:
            InvalidArgument: the cache has no such sequence.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> cache = kvpool.PagedKVCache(pool)
        >>> cache.free(cache.add_seq())
        """
        self._drop(self._get(seq).blocks)
        del self._sequences[seq]

    def close(self) -> None:
        """Ends all sequences; the pool stays open. A closed cache cannot be used again.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> with kvpool.PagedKVCache(pool) as cache:
        ...     seq = cache.add_seq()
        """
        for seq in [] if self._closed else list(self._sequences):
            self.free(seq)
        self._closed = True

    def __enter__(self) -> PagedKVCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- values ---------------------------------------------------------------------------------

    def append(self, seq: int, layer: int, k: Floats, v: Floats) -> None:
        """Appends T positions to one layer of a sequence.

        Args:
            k, v: float arrays ``(n_kv_heads, T, head_dim)``, stored as float16 (round to nearest
                even; what is too large becomes infinite).

        Raises:
            OutOfBlocks: the pool has too few blocks for the new positions and for the copies of
                shared ones. Nothing has changed, no block was evicted.
            InvalidArgument: no such sequence or layer, or another shape.
            ArgumentTypeError: no float arrays.

        >>> import numpy as np
        >>> pool = kvpool.Pool(1, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> cache = kvpool.PagedKVCache(pool)
        >>> seq = cache.add_seq()
        >>> k = np.ones((1, 3, 2))
        >>> cache.append(seq, 0, k, k)
        Traceback (most recent call last):
        kvpool.errors.OutOfBlocks: append: 2 blocks needed, 1 is free or cached
        >>> cache.seq_len(seq, 0)
        0
        """
        held = self._get(seq)
        self._check_layer(layer)
        k16, v16 = self._halves(k, "k"), self._halves(v, "v")
        if k16.shape != v16.shape:
            raise InvalidArgument(f"v: expected the shape of k, {k16.shape}, found {v16.shape}")
        size = self._pool.block_tokens
        start = held.lens[layer]
        end = start + k16.shape[1]
        if start == end:
            return
        self._make_room(held, start // size, -(-end // size))
        for index in range(start // size, -(-end // size)):
            first = index * size
            a, b = max(start, first), min(end, first + size)
            planes = self._pool.block(held.blocks[index])
            planes[layer, 0][:, a - first : b - first] = k16[:, a - start : b - start]
            planes[layer, 1][:, a - first : b - first] = v16[:, a - start : b - start]
        complete = min(held.lens)
        held.lens[layer] = end
        # Only this layer grew, so what is complete now and was not before was written just now.
        for index in range(complete // size, -(-min(held.lens) // size)):
            filled = min(min(held.lens) - index * size, size)
            if filled > complete - index * size:
                self._pool.set_fill(held.blocks[index], filled)

    def gather(self, seq: int, layer: int) -> tuple[Half, Half]:
        """All K and V of one layer, copied: two float16 ``(n_kv_heads, seq_len, head_dim)``.

        Raises:
            InvalidArgument: no such sequence or layer.

        >>> import numpy as np
        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> cache = kvpool.PagedKVCache(pool)
        >>> seq = cache.add_seq()
        >>> cache.append(seq, 0, np.ones((1, 3, 2)), np.zeros((1, 3, 2)))
        >>> [x.shape for x in cache.gather(seq, 0)]
        [(1, 3, 2), (1, 3, 2)]
        """
        held = self._get(seq)
        self._check_layer(layer)
        n, size = held.lens[layer], self._pool.block_tokens
        k = np.empty((self._pool.n_kv_heads, n, self._pool.head_dim), dtype=np.float16)
        v = np.empty_like(k)
        for first in range(0, n, size):
            planes = self._pool.block(held.blocks[first // size])
            filled = min(size, n - first)
            k[:, first : first + filled] = planes[layer, 0][:, :filled]
            v[:, first : first + filled] = planes[layer, 1][:, :filled]
        return k, v

    # ---- what is there --------------------------------------------------------------------------

    def seq_len(self, seq: int, layer: int) -> int:
        """Positions that one layer of a sequence holds.

        Raises:
            InvalidArgument: no such sequence or layer.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> cache = kvpool.PagedKVCache(pool)
        >>> cache.seq_len(cache.add_seq(), 0)
        0
        """
        held = self._get(seq)
        self._check_layer(layer)
        return held.lens[layer]

    def block_table(self, seq: int) -> NDArray[np.int32]:
        """The sequence's block ids in order, int32, as ``attention.paged_prefill`` takes them.

        Raises:
            InvalidArgument: no such sequence.

        >>> pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
        >>> cache = kvpool.PagedKVCache(pool)
        >>> cache.block_table(cache.add_seq())
        array([], dtype=int32)
        """
        return np.array(self._get(seq).blocks, dtype=np.int32)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that appends can still take: the pool's free and cached ones."""
        stats = self._pool.stats
        return stats.free + stats.cached

    @property
    def stats(self) -> Stats:
        """The pool's counts: ``Stats(free, used, cached, evictions)``."""
        return self._pool.stats

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._sequences)} sequences"
        return f"PagedKVCache({state})"

    # ---- inside ---------------------------------------------------------------------------------

    def _make_room(self, held: _Sequence, first: int, end: int) -> None:
        """Makes blocks first..end - 1 of a sequence its own to write; all or nothing."""
        old = range(first, min(end, len(held.blocks)))
        n_new = max(0, end - len(held.blocks))
        n_copies = sum(self._holders[held.blocks[index]] > 1 for index in old)
        if n_new + n_copies > self.num_free_blocks:
            self._out_of_blocks(n_new + n_copies)
        try:
            new = [int(id) for id in self._pool.alloc(n_new)] if n_new else []
        except PoolFull:  # another thread took them since
            self._out_of_blocks(n_new + n_copies)
        for index in old:
            before = held.blocks[index]
            try:
                after = int(self._pool.cow(before))
            except PoolFull:
                self._pool.unref(new)
                self._out_of_blocks(n_new + n_copies)
            if after != before:
                self._holders[before] -= 1
                self._holders[after] += 1
                held.blocks[index] = after
        held.blocks += new
        self._holders.update(new)

    def _out_of_blocks(self, needed: int) -> None:
        there = self.num_free_blocks
        raise OutOfBlocks(
            f"append: {needed} block{'s' if needed != 1 else ''} needed, "
            f"{there} {'is' if there == 1 else 'are'} free or cached"
        )

    def _halves(self, values: Floats, name: str) -> Half:
        if not isinstance(values, np.ndarray) or not np.issubdtype(values.dtype, np.floating):
            kind = values.dtype if isinstance(values, np.ndarray) else type(values).__name__
            raise ArgumentTypeError(f"{name}: expected a NumPy array of floats, found {kind}")
        heads, dim = self._pool.n_kv_heads, self._pool.head_dim
        if values.ndim != 3 or (values.shape[0], values.shape[2]) != (heads, dim):
            raise InvalidArgument(
                f"{name}: expected (n_kv_heads, T, head_dim) = ({heads}, T, {dim}), "
                f"found {values.shape}"
            )
        with np.errstate(over="ignore"):
            return values.astype(np.float16, copy=False)

    def _keep(self, sequence: _Sequence) -> int:
        seq = self._next
        self._next += 1
        self._sequences[seq] = sequence
        return seq

    def _drop(self, blocks: list[int]) -> None:
        self._pool.unref(blocks)
        self._holders.subtract(blocks)
        for block in blocks:
            if self._holders[block] == 0:
                del self._holders[block]

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("the cache is closed")

    def _get(self, seq: int) -> _Sequence:
        self._check_open()
        held = self._sequences.get(seq) if _is_int(seq) else None
        if held is None:
            raise InvalidArgument(f"seq: expected a sequence of this cache, found {seq!r}")
        return held

    def _check_layer(self, layer: int) -> None:
        if not _is_int(layer) or not 0 <= layer < self._pool.n_layers:
            raise InvalidArgument(
                f"layer: expected 0 to {self._pool.n_layers - 1}, found {layer!r}"
            )


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
