"""One request of a trace, whatever the trace's format."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import TraceError

__all__ = ["MAX_TOKENS", "UNIT", "Request", "make_request", "n_blocks_of"]

MAX_TOKENS = 2**27  # of a prompt or an answer: a line that says more is wrong
UNIT = 2  # tokens that stand for a block: the halves of its id


class Request(NamedTuple):
    """A prompt by the names of its blocks, and the length of its answer.

    A block of a trace, however many tokens it has, goes through the pool as two: the 32-bit halves
    of its 64-bit id. ``units``: uint32 ``(2 * ceil(input_length / block_tokens),)``. Equal ids at
    the same place behind equal ids are equal prompts.
    """

    arrival_s: float
    units: NDArray[np.uint32]
    input_length: int
    output_length: int
    session: str | None = None
    n: int = 1  # answers to one prompt, by forks

    @property
    def ids(self) -> NDArray[np.uint64]:
        """One for each block of the prompt, the last of which may be partial."""
        return self.units.view(np.uint64)

    @property
    def n_blocks(self) -> int:
        """Blocks of the prompt."""
        return len(self.units) // UNIT


def make_request(
    arrival_s: float, ids: Any, input_length: int, output_length: int = 0, **more: Any
) -> Request:
    """A Request from the ids of its blocks, 0 to 2**64 - 1; raises TraceError for others.

    >>> request = make_request(0.0, [7, 8], 24)
    >>> request.ids.tolist(), request.n_blocks, request.n
    ([7, 8], 2, 1)
    """
    try:
        units = np.ascontiguousarray(ids, np.uint64).view(np.uint32)
    except (OverflowError, ValueError, TypeError) as error:
        raise TraceError(f"ids: expected integers of 0 to 2**64 - 1: {error}") from error
    return Request(arrival_s, units, input_length, output_length, **more)


def n_blocks_of(n_tokens: int, block_tokens: int) -> int:
    """Blocks that so many tokens take.

    >>> n_blocks_of(17, 16)
    2
    """
    return -(-n_tokens // block_tokens)
