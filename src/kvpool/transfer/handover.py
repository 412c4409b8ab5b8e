"""The request that goes with the blocks: kvpool.handover.v1, beside tl.kv.v1.

The prefill side has computed a prompt's K and V and picked the first token. What the decode side
needs to go on as if it had done so itself is in a `Handover`: the tokens, and how to pick the next
ones, the random numbers that are used up included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .. import Sequence
from ..errors import InvalidArgument
from .handover_pb2 import ContinueRequest
from .limits import TransferRefused

__all__ = ["Answer", "Continue", "Handover"]


@dataclass(frozen=True)
class Handover:
    """One request, on its way from prefill to decode.

    Args:
        handle_id: of a push that is complete.
        tokens: the pushed blocks are the K and V of exactly these.
        namespace: the root they were computed under; it names the model.
        picked: tokens of the answer that the prefill side has picked already, in order.
        max_tokens: of the answer, the picked ones among them.
        temperature: 0 is greedy.
        seed, sample: name the stream of random numbers.
        draws: numbers of that stream that are used up.
        top_k: draw among so many of the most likely tokens; 0 for all.
        top_p: draw among the most likely tokens that together reach this probability.
    """

    handle_id: str
    tokens: list[int]
    namespace: int = 0
    picked: list[int] = field(default_factory=list)
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    sample: int = 0
    draws: int = 0
    top_k: int = 0
    top_p: float = 1.0

    def to_message(self) -> ContinueRequest:
        """The protobuf message.

        Raises:
            InvalidArgument: a field has no room in it, or is of another type.
        """
        try:
            return ContinueRequest(**vars(self))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"Handover: {error}") from error

    @classmethod
    def of(cls, message: ContinueRequest) -> Handover:
        """From a message.

        Raises:
            TransferRefused: INVALID_ARGUMENT for a temperature that is negative or no number, a
                top_p out of range, no tokens, and for more picked ones than ``max_tokens``.
        """
        found = cls(
            message.handle_id, list(message.tokens), message.namespace, list(message.picked),
            message.max_tokens, message.temperature, message.seed, message.sample, message.draws,
            message.top_k, message.top_p or 1.0,
        )  # fmt: skip
        wrong = None
        if not (math.isfinite(found.temperature) and found.temperature >= 0):
            wrong = f"temperature {found.temperature}"
        elif not 0 < found.top_p <= 1:
            wrong = f"top_p {found.top_p}"
        elif not found.tokens:
            wrong = "no tokens"
        elif len(found.picked) > found.max_tokens:
            wrong = f"{len(found.picked)} picked tokens, max_tokens is {found.max_tokens}"
        if wrong is not None:
            raise TransferRefused("INVALID_ARGUMENT", f"Continue: {wrong}")
        return found


@dataclass(frozen=True)
class Answer:
    """A part of an answer: the next tokens, or none yet, and in the last one why it ends."""

    tokens: list[int]
    finish: str = ""


#: What an engine gives a server: generates from a claimed sequence, and frees it.
Continue = Callable[[Handover, Sequence], Iterator[Answer]]
