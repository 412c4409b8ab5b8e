"""Sequences in the blocks of a pool, by way of a :class:`kvpool.BlockManager`.

    PagedSequence   tokens     t0 t1 ... t15 | t16 ...         Pool
      kvpool.Sequence  blocks  [ 7,            3 ]     ---->     slab: block 7, block 3

The manager knows which blocks a sequence has, finds prefixes, copies what is shared before it is
written, and gives blocks back. What is left to do here is to put K and V where it says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import kvpool
from kvpool import BlockManager, InvalidArgument

from .cache import narrow, widen

__all__ = ["PagedCache", "PagedSequence", "blocks_needed"]


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


class PagedCache:
    """Sequences whose K and V are the blocks of one pool, shared by prefix.

    Args:
        manager: of a pool that has the model's dimensions. Its ``prefix_cache`` says whether the
            blocks of earlier prompts are found again; its ``stats`` count.

    Attributes:
        manager: the manager. Whoever made it closes it.
        peak_used: the largest number of blocks in use when a sequence of this cache took some.

    A cache is a view: several may stand on one manager, and find each other's blocks.

    >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=2)
    >>> cache = PagedCache(BlockManager(pool))
    >>> first = cache.open([1, 2, 3, 4, 5, 6])
    >>> first.write(0, np.zeros((6, 2, 1, 2), dtype=np.float32))     # what a model does
    >>> first.commit(6)
    >>> first.free()
    >>> second = cache.open([1, 2, 3, 4, 9])
    >>> second.n_computed                            # one full block was there
    4
    >>> second.free()
    >>> cache.manager.stats.hit_tokens, cache.peak_used, pool.stats.used
    (4, 2, 0)
    """

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.peak_used = 0
        pool = self._pool = manager.pool
        self._slab: NDArray[np.float16] = pool.slab
        # The slab as a list of panels: the positions of one block, for one layer, K or V, and head.
        self._panels = self._slab.view(np.int16).reshape(-1, pool.block_tokens * pool.head_dim)
        self._panels_of_a_layer = np.arange(2 * pool.n_kv_heads).reshape(2, pool.n_kv_heads, 1)

    def open(self, tokens: Sequence[int]) -> PagedSequence:
        """A sequence for a prompt, with blocks for all of it.

        The longest prefix of full blocks that is known is taken over, at most
        ``(len(tokens) - 1) // block_tokens`` of them: the last token is always computed, because
        its logits are what comes next.

        Raises:
            PoolFull: not enough blocks for the rest; nothing has changed.
            InvalidArgument: no tokens.
        """
        if not len(tokens):
            raise InvalidArgument("open: a prompt has at least one token")
        held = self.manager.allocate(tokens)
        return PagedSequence(self, held, [int(token) for token in tokens], held.n_cached)

    def _panel_ids(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """(2, n_kv_heads, len(blocks)): where the panels of layer 0 are in ``_panels``."""
        first = blocks * (self._pool.n_layers * self._panels_of_a_layer.size)
        ids: NDArray[np.int64] = first + self._panels_of_a_layer
        return ids

    def _note_peak(self) -> None:
        self.peak_used = max(self.peak_used, self._pool.stats.used)


class PagedSequence:
    """A sequence in a :class:`PagedCache`, made by ``open`` and ``fork``. See KVSequence.

    Attributes:
        tokens, n_computed: what the manager's sequence has, at hand for the model.
    """

    def __init__(
        self, cache: PagedCache, held: kvpool.Sequence, tokens: list[int], n_computed: int
    ) -> None:
        self.tokens = tokens
        self.n_computed = n_computed
        self._cache = cache
        self._held = held
        self._size = cache._pool.block_tokens
        self._look_up_blocks()

    @property
    def table(self) -> NDArray[np.uint32]:
        """The block ids, in order: (n_blocks,) uint32. A copy."""
        return self._held.blocks

    def _look_up_blocks(self) -> None:
        """The ids once for all layers of the passes to come, until the next ``append``."""
        self._blocks = self._held.blocks.astype(np.int64)
        self._panel_ids = self._cache._panel_ids(self._blocks)
        self._cache._note_peak()

    def append(self, token: int) -> None:
        """One more token, and room for it.

        Only the block that holds the last positions can be partial and shared with a fork: it is
        copied on write. Full blocks stay shared for ever.

        Raises:
            PoolFull: the sequence and the pool are as they were.
        """
        self._held.append(token)
        self.tokens.append(int(token))
        self._look_up_blocks()

    def write(self, layer: int, kv: NDArray[np.float32]) -> None:
        """Stores (n, 2, n_kv_heads, head_dim) through the slab, wherever the blocks are."""
        slab, size, start = self._cache._slab, self._size, self.n_computed
        values = narrow(kv)
        if len(kv) == 1:
            slab[self._blocks[start // size], layer, :, :, start % size] = values[0]
        else:
            positions = np.arange(start, start + len(kv))
            slab[self._blocks[positions // size], layer, :, :, positions % size] = values

    def read(self, layer: int, n: int, out: NDArray[np.float32]) -> None:
        """Gathers one layer by the block table: one ``take``, then one copy that widens.

        ``out`` is (2, n_kv_heads, n_keys, head_dim), C-contiguous. What is gathered and copied are
        the bits of the float16 values; they become float32 in ``out``, all at once.
        """
        bits, n_blocks = out.view(np.int32), -(-n // self._size)
        of_layer = layer * self._cache._panels_of_a_layer.size
        gathered = self._cache._panels.take(self._panel_ids[..., :n_blocks] + of_layer, axis=0)
        in_order = gathered.reshape(*out.shape[:2], n_blocks * self._size, out.shape[3])
        bits[:, :, :n] = in_order[:, :, :n]
        bits[:, :, n:] = 0
        widen(out)

    def commit(self, n: int) -> None:
        """The next n tokens are written: their full blocks become findable."""
        self._held.commit(self.n_computed + n)
        self.n_computed += n

    def fork(self) -> PagedSequence:
        """A second sequence over the same blocks. Everything known has to be computed."""
        assert self.n_computed == len(self.tokens), "fork after commit"
        return PagedSequence(self._cache, self._held.fork(), self.tokens.copy(), self.n_computed)

    def free(self) -> None:
        """Gives every block back, the last one first; again does nothing.

        Cached blocks are evicted oldest first, so a prefix loses its end before its beginning.
        """
        if not self._held.is_freed:
            self._held.free()
        self.tokens, self.n_computed = [], 0
        self._blocks, self._panel_ids = self._blocks[:0], self._panel_ids[..., :0]
