"""Beam search against a few lines that recompute everything and share nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from engine_support import Loaded, run_together
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import BlockManager
from kvpool.engine.generate import generate, prefill
from kvpool.engine.paged import blocks_needed


def log_probabilities(loaded: Loaded, tokens: list[int]) -> np.ndarray:
    """Of what follows ``tokens``, from nothing."""
    with loaded.pool(len(tokens), 1) as pool:
        sequence, logits = prefill(loaded.model, BlockManager(pool), tokens)
        sequence.free()
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - math.log(np.exp(shifted).sum())  # np.log is off by one bit now and then


def reference(
    loaded: Loaded, prompt: list[int], width: int, max_tokens: int, stop: list[int], penalty: float
) -> list[tuple[float, list[int], str]]:
    """(score, tokens, finish), best first."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int], str]] = []
    while beams:
        options = []
        for i, (score, tokens) in enumerate(beams):
            scores = score + log_probabilities(loaded, prompt + tokens)
            options += [(-value, i, token) for token, value in enumerate(scores.tolist())]
        following: list[tuple[float, list[int]]] = []
        for place, (negative, i, token) in enumerate(sorted(options)):
            if len(following) == width:
                break
            if token not in stop:
                following.append((-negative, [*beams[i][1], token]))
            elif place < width:
                finished.append((-negative, beams[i][1], "stop"))
        if len(finished) >= width:
            break
        beams = following
        if len(beams[0][1]) == max_tokens:
            finished += [(score, tokens, "length") for score, tokens in beams]
            break
    finished.sort(key=lambda beam: -beam[0] / max(1, len(beam[1])) ** penalty)
    return finished[:width]


def answers(request) -> list[tuple[float, list[int], str]]:
    return [(sample.score, sample.tokens, sample.finish) for sample in request.samples]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(3, 40), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([[], list(range(0, 279, 7)), list(range(0, 279, 2))]),
    st.sampled_from([0.0, 1.0, 2.0]),
    st.sampled_from([1, 3, 16]),
    st.booleans(),
)
def test_it_finds_what_the_reference_finds(
    minute, prompt, width, max_tokens, stop, penalty, block_tokens, small
) -> None:
    needed = blocks_needed(len(prompt), max_tokens, width, block_tokens)
    with minute.pool(needed if small else 200, block_tokens) as pool:
        request = generate(
            minute.model,
            BlockManager(pool),
            prompt,
            beams=width,
            n=width,
            max_tokens=max_tokens,
            stop_tokens=stop,
            length_penalty=penalty,
            max_step_tokens=width + 3,
        )
        assert pool.stats.used == 0
    assert answers(request) == reference(minute, prompt, width, max_tokens, stop, penalty)


@pytest.mark.parametrize("prefix_cache", ["hash", "none"])
@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_beams_that_are_preempted_go_on_where_they_were(
    tiny, manager_of, block_tokens, prefix_cache
) -> None:
    random = np.random.default_rng(1)
    prompts = [random.integers(3, 260, n).tolist() for n in (9, 30, 17)]
    asked = [{"prompt": p, "beams": 3, "n": 3, "max_tokens": 18} for p in prompts]
    needed = max(blocks_needed(len(p), 18, 3, block_tokens) for p in prompts)
    manager = manager_of(needed + 2, block_tokens, prefix_cache)
    run = run_together(tiny, manager, asked)
    assert run.count("preempted") > 0
    for request, prompt in zip(run.requests, prompts, strict=True):
        assert answers(request) == reference(tiny, prompt, 3, 18, [], 1.0)


def test_beams_share_the_blocks_they_have_in_common(tiny, manager_of) -> None:
    manager, prompt = manager_of(100, 4), list(range(3, 43))
    run = run_together(tiny, manager, [{"prompt": prompt, "beams": 4, "max_tokens": 13}])
    assert manager.stats.copies > 0
    assert run.requests[0].peak_blocks <= blocks_needed(len(prompt), 13, 4, 4)
    assert len(run.requests[0].samples) == 1  # n best: one


def test_the_answer_is_told_at_the_end_and_in_order(tiny, manager_of) -> None:
    told: list[tuple[int, int]] = []
    request = generate(
        tiny.model, manager_of(50), [5, 6, 7], beams=3, n=2, max_tokens=5,
        on_token=lambda i, token: told.append((i, token)),
    )  # fmt: skip
    expected = [(i, t) for i, sample in enumerate(request.samples) for t in sample.tokens]
    assert told == expected
    assert len(expected) == 10
