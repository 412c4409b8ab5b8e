"""From logits to the next token: the most likely one, or a seeded draw."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvpool import InvalidArgument

__all__ = ["Sampler", "log_softmax"]


class Sampler:
    """Picks the tokens of one sample.

    Args:
        temperature: 0 picks the largest logit (of equal ones the first); above 0 draws from
            ``softmax(logits / temperature)``.
        seed, sample: name the stream of random numbers. Every sample has a stream of its own, which
            depends on nothing else: not on how many samples there are, nor on other prompts. A
            token takes one number of it.
        top_k: draw among the k largest logits only (of equal ones the first); 0 for all.
        top_p: draw among the most likely tokens that together reach this probability.
        n_drawn: how many tokens of the stream were drawn elsewhere: the next one continues it.

    Raises:
        InvalidArgument: an argument is out of range.

    >>> logits = np.array([0.0, 2.0, 1.0], dtype=np.float32)
    >>> Sampler().pick(logits)
    1
    >>> a, b = Sampler(1.0, seed=7, sample=0), Sampler(1.0, seed=7, sample=0, n_drawn=2)
    >>> [a.pick(logits) for _ in range(5)][2:] == [b.pick(logits) for _ in range(3)]
    True
    """

    def __init__(
        self,
        temperature: float = 0.0,
        seed: int = 0,
        sample: int = 0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        n_drawn: int = 0,
    ) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise InvalidArgument(f"temperature is {temperature}: not finite and at least 0")
        if top_k < 0:
            raise InvalidArgument(f"top_k is {top_k}: not at least 0")
        if not 0 < top_p <= 1:
            raise InvalidArgument(f"top_p is {top_p}: not above 0 and at most 1")
        if seed < 0:
            raise InvalidArgument(f"seed is {seed}: not at least 0")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        stream = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(sample,)))
        stream.advance(n_drawn)
        self._random = np.random.Generator(stream)

    def pick(self, logits: NDArray[np.float32]) -> int:
        """The id of the next token, from (vocab_size,) logits."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        scaled = (logits.astype(np.float64) - logits.max()) / self.temperature
        weights = np.exp(scaled)
        if self.top_k or self.top_p < 1:
            weights = self._most_likely(weights)
        heights = np.cumsum(weights)
        drawn = np.searchsorted(heights, self._random.random() * heights[-1], side="right")
        return int(min(drawn, len(logits) - 1))

    def _most_likely(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """The weights of the tokens to draw from, and 0 for the others."""
        order = np.argsort(-weights, kind="stable")[: self.top_k or None]
        heights = np.cumsum(weights[order])
        n = int(np.searchsorted(heights, self.top_p * heights[-1])) + 1
        kept = np.zeros_like(weights)
        kept[order[:n]] = weights[order[:n]]
        return kept


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities in float64.

    >>> np.exp(log_softmax(np.zeros(4, dtype=np.float32)))
    array([0.25, 0.25, 0.25, 0.25])
    """
    shifted = logits.astype(np.float64) - logits.max()
    scores: NDArray[np.float64] = shifted - math.log(np.exp(shifted).sum())
    return scores
