"""From logits to the next token: the most likely one, or a seeded draw."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Sampler"]


class Sampler:
    """Picks the tokens of one sample.

    Args:
        temperature: 0 picks the largest logit (of equal ones the first); above 0 draws from
            ``softmax(logits / temperature)``.
        seed, sample: name the stream of random numbers. Every sample has a stream of its own, which
            depends on nothing else: not on how many samples there are, nor on other prompts.

    >>> logits = np.array([0.0, 2.0, 1.0], dtype=np.float32)
    >>> Sampler().pick(logits)
    1
    >>> a, b = Sampler(1.0, seed=7, sample=0), Sampler(1.0, seed=7, sample=0)
    >>> [a.pick(logits) for _ in range(5)] == [b.pick(logits) for _ in range(5)]
    True
    """

    def __init__(self, temperature: float = 0.0, seed: int = 0, sample: int = 0) -> None:
        self.temperature = temperature
        self._random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(sample,)))

    def pick(self, logits: NDArray[np.float32]) -> int:
        """The id of the next token, from (vocab_size,) logits."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        scaled = (logits.astype(np.float64) - logits.max()) / self.temperature
        heights = np.cumsum(np.exp(scaled))
        drawn = np.searchsorted(heights, self._random.random() * heights[-1], side="right")
        return int(min(drawn, len(logits) - 1))
