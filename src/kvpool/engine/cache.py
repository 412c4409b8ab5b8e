"""Where K and V live: in the blocks of a pool, or in one contiguous array.

The model sees a :class:`KVSequence` and does not know which. A sequence is a list of tokens, of
which the first ``n_computed`` have their K and V in the cache:

    open(prompt)      finds the longest known prefix, takes blocks for the rest: all or nothing
    write, read       layer by layer, while the model computes; through a view of the slab, no copy
    commit(n)         the values are there: fills are set, full blocks become findable by their hash
    append(token)     room for one more; a partial block that a fork also holds is copied first
    fork()            the same past: one reference more on each block, nothing is copied
    free()            every block back, the last one first

``paged`` has the cache that does all this, by way of a :class:`kvpool.BlockManager`; here are what
the two have in common and the reference that the paged one must equal bit by bit. Both hold
float16, rounded to nearest even.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool import PoolFull

__all__ = [
    "ContiguousCache",
    "ContiguousSequence",
    "KVCache",
    "KVSequence",
    "narrow",
    "widen",
]

_HALF_MAX = np.float32(np.finfo(np.float16).max)


class KVSequence(Protocol):
    """The tokens of one sequence and the K and V of those computed so far."""

    tokens: list[int]
    n_computed: int

    def write(self, layer: int, kv: NDArray[np.float32]) -> None:
        """Stores (n, 2, n_kv_heads, head_dim), K and V, of the tokens from ``n_computed`` on."""

    def read(self, layer: int, n: int, out: NDArray[np.float32]) -> None:
        """Fills ``out`` (2, n_kv_heads, n_keys, head_dim) with K and V of the first n positions,
        and with zeros behind them."""

    def commit(self, n: int) -> None:
        """The next n tokens are written in every layer: ``n_computed`` grows."""

    def append(self, token: int) -> None:
        """One more token, to be computed. PoolFull changes nothing."""

    def fork(self) -> KVSequence:
        """A second sequence with the same past and a future of its own."""

    def free(self) -> None:
        """Gives everything back. Calling it again does nothing."""


class KVCache(Protocol):
    """What makes sequences."""

    def open(self, tokens: Sequence[int]) -> KVSequence:
        """A sequence for a prompt. ``n_computed`` tokens are there already, never all of them."""


def narrow(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """float32 to float16, round to nearest even; what is too large becomes +-65504, not infinity.

    >>> narrow(np.array([1.0, 1e6], dtype=np.float32))
    array([1.00e+00, 6.55e+04], dtype=float16)
    """
    return np.clip(values, -_HALF_MAX, _HALF_MAX).astype(np.float16)


def widen(values: NDArray[np.float32]) -> None:
    """Turns float16 bit patterns, sign-extended to 32 bits in ``values``, into float32, in place.

        sign-extended   s s s s ... s s e e e e e m m m m m m m m m m
        << 13           s s s s e e e e e m m m m m m m m m m 0 0 ... 0
        & 0x8FFFFFFF    s 0 0 0 e e e e e m m m m m m m m m m 0 0 ... 0     a float32 that is
        * 2**112        exact: the two formats' exponent biases differ by 127 - 15 = 112

    Subnormals come out right as well, since the multiplication normalizes them. Finite values only
    (``narrow`` makes no other). Seven times as fast as ``astype``, which converts one by one.
    """
    bits = values.view(np.uint32)
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, 0x8FFFFFFF, out=bits)
    np.multiply(values, np.float32(2.0**112), out=values)


class ContiguousCache:
    """The reference: every sequence has an array of its own for ``max_tokens`` positions.

    >>> cache = ContiguousCache(n_layers=1, n_kv_heads=1, head_dim=2, max_tokens=8)
    >>> cache.open([1, 2, 3]).n_computed                     # nothing is ever shared
    0
    """

    def __init__(self, *, n_layers: int, n_kv_heads: int, head_dim: int, max_tokens: int) -> None:
        self.shape = (n_layers, 2, n_kv_heads, max_tokens, head_dim)

    def open(self, tokens: Sequence[int]) -> ContiguousSequence:
        """A sequence with room for ``max_tokens``. PoolFull: the prompt is longer."""
        if len(tokens) > self.shape[3]:
            raise PoolFull(f"{len(tokens)} positions needed, there are {self.shape[3]}")
        return ContiguousSequence(list(tokens), np.empty(self.shape, dtype=np.float16))


class ContiguousSequence:
    """One array (n_layers, 2, n_kv_heads, max_tokens, head_dim) float16. See KVSequence."""

    def __init__(self, tokens: list[int], values: NDArray[np.float16]) -> None:
        self.tokens = tokens
        self.n_computed = 0
        self._values = values

    def write(self, layer: int, kv: NDArray[np.float32]) -> None:
        """Stores (n, 2, n_kv_heads, head_dim)."""
        end = self.n_computed + len(kv)
        self._values[layer, :, :, self.n_computed : end] = narrow(kv).transpose(1, 2, 0, 3)

    def read(self, layer: int, n: int, out: NDArray[np.float32]) -> None:
        """Widens one layer into ``out``."""
        bits = out.view(np.int32)
        bits[:, :, :n] = self._values[layer, :, :, :n].view(np.int16)
        bits[:, :, n:] = 0
        widen(out)

    def commit(self, n: int) -> None:
        """``n_computed`` grows."""
        self.n_computed += n

    def append(self, token: int) -> None:
        """One more token. PoolFull: the array ends here."""
        if len(self.tokens) == self._values.shape[3]:
            raise PoolFull(f"the array holds {len(self.tokens)} positions")
        self.tokens.append(int(token))

    def fork(self) -> ContiguousSequence:
        """Copies the whole array."""
        child = ContiguousSequence(self.tokens.copy(), self._values.copy())
        child.n_computed = self.n_computed
        return child

    def free(self) -> None:
        """Lets the array go."""
        self._values = self._values[:, :, :, :0].copy()
        self.tokens, self.n_computed = [], 0
