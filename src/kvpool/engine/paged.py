"""Sequences in the blocks of a :class:`kvpool.Pool`: prefix hits, copy on write, commit, free.

    PagedCache                                          Pool
      PagedSequence  tokens  t0 t1 ... t15 | t16 ...      slab
                     table   [ 7,            3 ]   ---->    block 7, block 3
                     names   [ h0 ]                ---->  prefix index: h0 -> block 7

Hashes are computed once. One becomes findable only in ``commit``, after the values behind it are
written: nobody can find a block that is not complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool import InvalidArgument, Pool, block_hashes

from .cache import narrow, widen

__all__ = ["PagedCache", "PagedSequence", "blocks_needed"]

_NO_BLOCKS: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)


def blocks_needed(n_prompt: int, max_tokens: int, n: int, block_tokens: int) -> int:
    """Blocks that n samples of one prompt can hold at most, at the same time.

    The full blocks of the prompt are shared; the rest is every sample's own. The last token of a
    sample is never fed back, so it needs no room.

    >>> blocks_needed(n_prompt=40, max_tokens=10, n=4, block_tokens=16)     # 2 + 4 * 2
    10
    """
    shared = n_prompt // block_tokens
    positions = n_prompt + max_tokens - 1
    return shared + n * (-(-positions // block_tokens) - shared)


class _Name(NamedTuple):
    """What a full block is called: the format's chained hash, and a digest of the same prefix that
    cannot be collided on purpose."""

    hash: int
    digest: bytes


_ROOT = _Name(0, bytes(16))


class PagedCache:
    """Sequences whose K and V are the blocks of one pool, shared by prefix.

    Args:
        pool: its dimensions are the model's. Only this cache may register blocks in it while both
            are in use.
        prefix_cache: find the blocks of earlier prompts again, and register new ones. Off: every
            prompt is computed from its first token.

    Attributes:
        pool: the pool.
        prompt_tokens, hit_tokens: tokens of all prompts so far, and how many of them were found.
        peak_used: the largest number of blocks in use at one time.

    A hash of the format can be collided on purpose, so a hit counts only if the block was
    registered for the same tokens: a 16-byte BLAKE2b digest of the whole prefix is kept beside each
    registered block and compared.

    >>> import kvpool
    >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> cache = PagedCache(pool)
    >>> first = cache.open([1, 2, 3, 4, 5, 6])
    >>> first.write(0, np.zeros((6, 2, 1, 2), dtype=np.float32))     # what a model does
    >>> first.commit(6)
    >>> first.free()
    >>> second = cache.open([1, 2, 3, 4, 9])
    >>> second.n_computed                            # one full block was there
    4
    >>> second.free()
    >>> pool.stats
    Stats(free=7, used=0, cached=1, evictions=0)
    """

    def __init__(self, pool: Pool, prefix_cache: bool = True) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.prompt_tokens = 0
        self.hit_tokens = 0
        self.peak_used = 0
        self._slab: NDArray[np.float16] = pool.slab
        # The slab as a list of panels: the positions of one block, for one layer, K or V, and head.
        self._panels = self._slab.view(np.int16).reshape(-1, pool.block_tokens * pool.head_dim)
        self._panels_of_a_layer = np.arange(2 * pool.n_kv_heads).reshape(2, pool.n_kv_heads, 1)
        self._digests: dict[int, bytes] = {}  # of the blocks this cache registered, by block id

    def open(self, tokens: Sequence[int]) -> PagedSequence:
        """A sequence for a prompt, with blocks for all of it.

        The longest prefix of full blocks that is known is taken over, at most
        ``(len(tokens) - 1) // block_tokens`` of them: the last token is always computed, because
        its logits are what comes next.

        Raises:
            PoolFull: not enough blocks for the rest; the hits are given back.
            InvalidArgument: no tokens.
        """
        if not len(tokens):
            raise InvalidArgument("open: a prompt has at least one token")
        sequence = PagedSequence(self)
        try:
            sequence._start(tokens)
        except BaseException:
            sequence.free()
            raise
        self.prompt_tokens += len(tokens)
        self.hit_tokens += sequence.n_computed
        return sequence

    def _panel_ids(self, blocks: NDArray[np.int64], layer: int) -> NDArray[np.int64]:
        """(2, n_kv_heads, len(blocks)): where the panels of a layer are in ``_panels``."""
        first = (blocks * self.pool.n_layers + layer) * self._panels_of_a_layer.size
        ids: NDArray[np.int64] = first + self._panels_of_a_layer
        return ids

    def _note_peak(self) -> None:
        self.peak_used = max(self.peak_used, self.pool.stats.used)


class PagedSequence:
    """A sequence in a :class:`PagedCache`: tokens and a table of block ids. See KVSequence."""

    def __init__(self, cache: PagedCache) -> None:
        self.tokens: list[int] = []
        self.n_computed = 0
        self._cache = cache
        self._size = cache.pool.block_tokens
        self._table = _NO_BLOCKS
        self._names: list[_Name] = []  # of the full blocks, as far as they are known

    @property
    def table(self) -> NDArray[np.uint32]:
        """The block ids, in order: (n_blocks,) uint32. A copy."""
        ids: NDArray[np.uint32] = self._table.copy()
        return ids

    def _start(self, tokens: Sequence[int]) -> None:
        cache, pool, size = self._cache, self._cache.pool, self._size
        self.tokens = [int(token) for token in tokens]
        if cache.prefix_cache:
            self._name_blocks(len(tokens) // size)
            for name in self._names[: (len(tokens) - 1) // size]:
                block = pool.lookup(name.hash)
                if block is None:
                    break
                self._table = np.append(self._table, np.uint32(block))  # held: free() returns it
                if cache._digests.get(block) != name.digest:
                    pool.unref(block)
                    self._table = self._table[:-1]
                    break
        self.n_computed = len(self._table) * size
        rest = pool.alloc(-(-len(tokens) // size) - len(self._table))
        self._table = np.concatenate([self._table, rest])
        cache._note_peak()

    def _name_blocks(self, n: int) -> None:
        """Computes the names of the first n blocks, those that are not known yet."""
        size, done = self._size, len(self._names)
        parent = self._names[-1] if done else _ROOT
        digest = parent.digest
        ids = np.asarray(self.tokens[done * size : n * size], dtype=np.uint32)
        for i, block_hash in enumerate(block_hashes(ids, size, parent.hash)):
            piece = ids[i * size : (i + 1) * size].astype("<u4").tobytes()
            digest = blake2b(digest + piece, digest_size=16).digest()
            self._names.append(_Name(int(block_hash), digest))

    def append(self, token: int) -> None:
        """One more token, and room for it.

        Only the block that holds the last positions can be partial and shared with a fork: it is
        copied on write. Full blocks stay shared for ever.

        Raises:
            PoolFull: the sequence and the pool are as they were.
        """
        pool, tail = self._cache.pool, len(self.tokens) // self._size
        if tail == len(self._table):
            self._table = np.append(self._table, np.uint32(pool.alloc()))
            self._cache._note_peak()
        elif pool.refs(int(self._table[tail])) > 1:
            self._table[tail] = pool.cow(int(self._table[tail]))
            self._cache._note_peak()
        self.tokens.append(int(token))

    def write(self, layer: int, kv: NDArray[np.float32]) -> None:
        """Stores (n, 2, n_kv_heads, head_dim) through the slab, wherever the blocks are."""
        slab, size, start = self._cache._slab, self._size, self.n_computed
        values = narrow(kv)
        if len(kv) == 1:
            slab[self._table[start // size], layer, :, :, start % size] = values[0]
        else:
            positions = np.arange(start, start + len(kv))
            slab[self._table[positions // size], layer, :, :, positions % size] = values

    def read(self, layer: int, n: int, out: NDArray[np.float32]) -> None:
        """Gathers one layer by the block table: one ``take``, then one copy that widens.

        ``out`` is (2, n_kv_heads, n_keys, head_dim), C-contiguous. What is gathered and copied are
        the bits of the float16 values; they become float32 in ``out``, all at once.
        """
        bits = out.view(np.int32)
        blocks = self._table[: -(-n // self._size)].astype(np.int64)
        gathered = self._cache._panels.take(self._cache._panel_ids(blocks, layer), axis=0)
        in_order = gathered.reshape(*out.shape[:2], len(blocks) * self._size, out.shape[3])
        bits[:, :, :n] = in_order[:, :, :n]
        bits[:, :, n:] = 0
        widen(out)

    def commit(self, n: int) -> None:
        """Sets the fills, then registers the blocks that became full, in order."""
        cache, size, start = self._cache, self._size, self.n_computed
        end = start + n
        assert end <= len(self.tokens), "commit what was opened or appended"
        touched = np.arange(start // size, -(-end // size))
        cache.pool.set_fill(self._table[touched], np.minimum(size, end - touched * size))
        self.n_computed = end
        if cache.prefix_cache and end // size > start // size:
            self._name_blocks(end // size)
            for i in range(start // size, end // size):
                block, name = int(self._table[i]), self._names[i]
                if cache.pool.register(block, name.hash):  # else: this one stays private
                    cache._digests[block] = name.digest

    def fork(self) -> PagedSequence:
        """A second sequence over the same blocks. Everything known has to be computed."""
        assert self.n_computed == len(self.tokens), "fork after commit"
        child = PagedSequence(self._cache)
        child.tokens, child._names = self.tokens.copy(), self._names.copy()
        child.n_computed = self.n_computed
        self._cache.pool.ref(self._table)
        child._table = self._table.copy()
        return child

    def free(self) -> None:
        """Gives every block back, the last one first.

        Cached blocks are evicted oldest first, so a prefix loses its end before its beginning.
        """
        table, self._table = self._table, _NO_BLOCKS
        self._cache.pool.unref(table[::-1])
        self.tokens, self.n_computed, self._names = [], 0, []
