"""Beam search over forks: the best continuations of all beams together go on.

    beams                candidates (score, token), the best of each        the best of all
      A  -0.4  [the]  ->   cat -0.9    dog -1.3   <end> -1.6                [the cat] fork of A
      B  -0.7  [a]    ->   cat -1.1    man -2.0   ...                       [a cat]   fork of B
                                                                            [the dog] fork of A

A candidate that ends a text is set aside as finished, if it is among the ``width`` best at that
moment. The search ends when ``width`` texts are finished, or at ``max_tokens``, where the running
ones are finished too. They are ranked by ``score / len(tokens) ** length_penalty``.

Forks share all blocks; a fork that writes into a shared last block gets a copy of it.

Source: seed section 2.2; Kwon et al. (SOSP 2023), section 4.4.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .request import Request, Sample
from .sampling import log_softmax

__all__ = ["advance", "candidates", "rank"]


def candidates(score: float, logits: NDArray[np.float32], n: int) -> list[tuple[float, int]]:
    """The n best continuations of a beam as (score, token); of equal ones the smaller token first.

    >>> candidates(-1.0, np.log(np.array([0.25, 0.5, 0.25], dtype=np.float32)), 2)
    [(-1.693..., 1), (-2.386..., 0)]
    """
    scores = score + log_softmax(logits)
    n = min(n, len(scores))
    smallest = np.partition(scores, len(scores) - n)[len(scores) - n]
    tokens = np.flatnonzero(scores >= smallest)
    best = tokens[np.argsort(-scores[tokens], kind="stable")][:n]
    return [(float(scores[token]), int(token)) for token in best]


def advance(request: Request) -> None:
    """Replaces the beams of a request by the best of their candidates.

    Every live beam has its candidates, enough of them that ``width`` are left if some end a text.
    Beams are forked as often as they go on; those that do not are freed. At the end
    ``request.samples`` are the answers, best first.
    """
    width, beams = request.beams, request.live
    ranked = sorted(
        ((score, i, token) for i, beam in enumerate(beams) for score, token in beam.candidates),
        key=lambda entry: (-entry[0], entry[1], entry[2]),
    )
    survivors: list[tuple[Sample, int, float]] = []
    for place, (score, i, token) in enumerate(ranked):
        if token in request.stop_tokens:
            if place < width:
                request.finished_beams.append(_beam(beams[i].tokens, score, "stop"))
        else:
            survivors.append((beams[i], token, score))
        if len(survivors) == width:
            break
    if len(request.finished_beams) >= width:
        survivors = []
    children: list[Sample] = []
    request.samples = list(beams)
    for parent, token, score in survivors:
        child = _beam([*parent.tokens, token], score, "")
        if len(child.tokens) == request.max_tokens:
            child.finish = "length"
            request.finished_beams.append(child)
            continue
        assert parent.sequence is not None
        child.sequence = parent.sequence.fork()
        request.samples.append(child)  # one by one: after an exception the list has what is held
        children.append(child)
    for beam in beams:
        if beam.sequence is not None:
            beam.sequence.free()
            beam.sequence = None
    request.samples = children
    if not children:
        request.samples = rank(request.finished_beams, request.length_penalty)[: request.n]


def rank(beams: list[Sample], length_penalty: float) -> list[Sample]:
    """Finished beams, best first; of equal ones the one that finished first. An empty text counts
    as one token."""
    return sorted(beams, key=lambda beam: -beam.score / max(1, len(beam.tokens)) ** length_penalty)


def _beam(tokens: list[int], score: float, finish: str) -> Sample:
    beam = Sample(tokens)
    beam.score, beam.finish = score, finish
    return beam
