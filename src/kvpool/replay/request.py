"""One request of a trace, whatever the trace's format."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_TOKENS", "Request", "n_blocks_of"]

MAX_TOKENS = 2**27  # of a prompt or an answer: a line that says more is wrong


class Request(NamedTuple):
    """A prompt by the names of its blocks, and the length of its answer.

    ``ids``: uint64 ``(ceil(input_length / block_tokens),)``, one for each block of the prompt, the
    last of which may be partial. Equal ids at the same place behind equal ids are equal prompts.

    >>> Request(0.0, np.arange(2, dtype=np.uint64), 24, 100).n
    1
    """

    arrival_s: float
    ids: NDArray[np.uint64]
    input_length: int
    output_length: int
    session: str | None = None
    n: int = 1  # answers to one prompt, by forks


def n_blocks_of(n_tokens: int, block_tokens: int) -> int:
    """Blocks that so many tokens take.

    >>> n_blocks_of(17, 16)
    2
    """
    return -(-n_tokens // block_tokens)
