"""A request: one prompt, what is asked about it, and what came of it."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import kvpool
from kvpool import ArgumentTypeError, InvalidArgument

from .sampling import Sampler

if TYPE_CHECKING:
    from .speculative import PromptLookup

__all__ = ["Request", "Sample", "whole"]


def whole(name: str, value: object, least: int | None = None) -> int:
    """An argument that is a whole number, as an int.

    Raises:
        ArgumentTypeError: it is no integer; a bool is none.
        InvalidArgument: it is below ``least``.

    >>> whole("n", 2.0)
    Traceback (most recent call last):
    kvpool.errors.ArgumentTypeError: n: expected an integer, found 2.0 (float)
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = f"{value!r:.100} ({type(value).__name__})"
        raise ArgumentTypeError(f"{name}: expected an integer, found {found}") from None
    if least is not None and number < least:
        raise InvalidArgument(f"{name} is {number}: not at least {least}")
    return number


#: A length to this power is far from infinite and from zero.
MAX_LENGTH_PENALTY = 10


class Sample:
    """One answer, or one beam.

    Attributes:
        tokens: generated so far.
        finish: "" while it runs; then "stop" (the model ended it), "length", "abort" or "error".
        score: of a beam: the sum of its tokens' log-probabilities.
        sequence: its blocks, while it has any. Tokens that are not in it yet are *behind*.
        candidates: of a beam whose logits are known: (score, token), best first.
    """

    def __init__(self, tokens: Sequence[int] = (), sampler: Sampler | None = None) -> None:
        self.tokens = list(tokens)
        self.finish = ""
        self.score = 0.0
        self.sequence: kvpool.Sequence | None = None
        self.sampler = sampler
        self.candidates: list[tuple[float, int]] = []
        self.lookup: PromptLookup | None = None

    def __repr__(self) -> str:
        return f"Sample(n_tokens={len(self.tokens)}, finish={self.finish!r})"


class Request:
    """One prompt and what is asked about it; filled in while it is answered.

    Args:
        prompt: token ids, at least one.
        n: samples, or with ``beams`` how many of the best to keep.
        max_tokens: of each sample.
        temperature, top_k, top_p, seed: see :class:`~kvpool.engine.sampling.Sampler`. Sample i
            draws from the stream (seed, i), in any company.
        stop_tokens: ids that end a sample, and are not part of it.
        beams: above 0: beam search of this width instead of sampling.
        length_penalty: a finished beam ranks by ``score / len(tokens) ** length_penalty``; in
            -10..10, so that no length makes it infinite.
        on_token: called with (sample index, token) for every token as it is picked; of beams, at
            the end. If it raises, this request fails and no other.
        generated: tokens that were generated elsewhere already (n is 1): the answer goes on behind
            them, and its random numbers too.
        sequence: blocks that hold K and V of the first tokens of prompt + generated (from
            ``import_sequence``, say). The request takes it over: whatever happens, it is freed.

    Attributes:
        samples: the answers; of beam search, best first, once it is done.
        error: why it failed, or None.
        n_cached: of the prompt's tokens, those that were found in the prefix cache.
        n_preempted: how often it had to give its blocks back, to be computed again.
        peak_blocks: the most blocks it held at once.
        added_s, started_s, first_token_s, finished_s: ``time.perf_counter()``, 0.0 before.

    Raises:
        InvalidArgument: an argument is out of range; ``sequence`` is of other tokens. It was not
            taken over then.
        ArgumentTypeError: a whole number was expected.

    >>> request = Request([1, 2, 3], max_tokens=5, temperature=0.8, seed=1)
    >>> request.is_done, len(request.samples)
    (False, 1)
    >>> Request([], max_tokens=5)
    Traceback (most recent call last):
    kvpool.errors.InvalidArgument: prompt: a prompt has at least one token
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        n: int = 1,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_tokens: Collection[int] = (),
        beams: int = 0,
        length_penalty: float = 1.0,
        on_token: Callable[[int, int], None] | None = None,
        generated: Sequence[int] = (),
        sequence: kvpool.Sequence | None = None,
    ) -> None:
        self.prompt = [whole("prompt", token) for token in prompt]
        if not self.prompt:
            raise InvalidArgument("prompt: a prompt has at least one token")
        generated = [whole("generated", token) for token in generated]
        n, max_tokens = whole("n", n, 1), whole("max_tokens", max_tokens, 1)
        beams, top_k, seed = (
            whole("beams", beams, 0),
            whole("top_k", top_k, 0),
            whole("seed", seed, 0),
        )
        if beams and n > beams:
            raise InvalidArgument(f"n is {n}: {beams} beams have no more answers than that")
        if beams and temperature:
            raise InvalidArgument("beams and temperature: beam search draws nothing")
        if not abs(length_penalty) <= MAX_LENGTH_PENALTY:
            raise InvalidArgument(
                f"length_penalty is {length_penalty}: not in "
                f"{-MAX_LENGTH_PENALTY}..{MAX_LENGTH_PENALTY}"
            )
        if generated and (n > 1 or beams):
            raise InvalidArgument("generated: only one sample can go on behind it")
        if len(generated) >= max_tokens:
            raise InvalidArgument(f"generated has {len(generated)} of max_tokens {max_tokens}")
        self.n, self.max_tokens, self.beams = n, max_tokens, beams
        self.length_penalty, self.stop_tokens = (
            length_penalty,
            frozenset(whole("stop_tokens", token) for token in stop_tokens),
        )
        self.on_token = on_token
        n_drawn = len(generated)
        self.samples = [
            Sample(
                generated,
                Sampler(temperature, seed, i, top_k=top_k, top_p=top_p, n_drawn=n_drawn),
            )
            for i in range(n)
        ]
        if beams:
            self.samples = [Sample()]  # they part at the first token
        self.finished_beams: list[Sample] = []
        self.trunk: kvpool.Sequence | None = None  # what all samples share, until it is computed
        self.handed: kvpool.Sequence | None = None
        self.number = -1  # the order of arrival, given by the engine
        self.error: BaseException | None = None
        self.n_cached = self.n_preempted = self.peak_blocks = 0
        self.added_s = self.started_s = self.first_token_s = self.finished_s = 0.0
        if sequence is not None:
            self._take_over(sequence)

    def _take_over(self, sequence: kvpool.Sequence) -> None:
        known, n = self.prompt + self.samples[0].tokens, sequence.n_computed
        if sequence.tokens[:n].tolist() != known[:n]:
            raise InvalidArgument(
                f"sequence: its {n} computed tokens are not the first of the {len(known)} given"
            )
        self.handed = sequence

    def __repr__(self) -> str:
        return f"Request({self.number}, {len(self.prompt)} prompt tokens, {self.samples})"

    @property
    def width(self) -> int:
        """Sequences it can have at the same time."""
        return self.beams or self.n

    @property
    def n_tokens(self) -> int:
        """Tokens generated, over all samples."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def live(self) -> list[Sample]:
        """The samples that are not finished."""
        return [sample for sample in self.samples if not sample.finish]

    @property
    def is_done(self) -> bool:
        """Every sample came to its end, whichever."""
        return not self.live

    @property
    def prefill_s(self) -> float:
        """Seconds from its admission to its first token; 0.0 before."""
        return max(0.0, self.first_token_s - self.started_s)

    @property
    def decode_s(self) -> float:
        """Seconds from its first token to its last, or until now."""
        if not self.first_token_s:
            return 0.0
        return (self.finished_s or time.perf_counter()) - self.first_token_s

    # ---- what the scheduler and the engine ask ---------------------------------------------------

    def common_tokens(self) -> list[int]:
        """The prompt and the generated tokens that all live samples begin with."""
        columns = zip(*(sample.tokens for sample in self.live), strict=False)
        shared = itertools.takewhile(lambda ids: len(set(ids)) == 1, columns)
        return self.prompt + [ids[0] for ids in shared]

    def sequences(self) -> list[kvpool.Sequence]:
        """The sequences that hold blocks for it now."""
        held = [self.trunk, self.handed, *(sample.sequence for sample in self.samples)]
        return [sequence for sequence in held if sequence is not None]

    def free(self) -> None:
        """Gives all its blocks back. What is known of its samples stays."""
        for sequence in self.sequences():
            if not sequence.is_freed:
                sequence.free()
        self.trunk = self.handed = None
        for sample in self.samples:
            sample.sequence = None
            sample.candidates = []
