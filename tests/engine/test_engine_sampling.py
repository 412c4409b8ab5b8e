"""Picking tokens: greedy, and draws that anybody can repeat."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool import InvalidArgument
from kvpool.engine.sampling import Sampler

LOGITS = np.array([0.0, 3.0, 1.0, 3.0, -np.inf, -2.0], dtype=np.float32)


def counts(sampler: Sampler, n: int) -> np.ndarray:
    return np.bincount([sampler.pick(LOGITS) for _ in range(n)], minlength=6)


def agree(found: np.ndarray, weights: np.ndarray) -> bool:
    """Within five standard deviations: fails once in a million seeds, and these are fixed."""
    expected = weights * found.sum() / weights.sum()
    return bool((np.abs(found - expected) < 5 * np.sqrt(expected + 1)).all())


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert Sampler().pick(LOGITS) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    found = counts(Sampler(temperature, seed=1), 20_000)
    assert found[4] == 0
    assert agree(found, np.exp(LOGITS.astype(np.float64) / temperature))


def test_top_k_draws_among_the_largest_and_of_equal_ones_the_first() -> None:
    weights = np.exp(LOGITS.astype(np.float64))
    for k, kept in ((1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (99, range(6))):
        found = counts(Sampler(1.0, seed=2, top_k=k), 5_000)
        rest = np.zeros(6)
        rest[list(kept)] = weights[list(kept)]
        assert agree(found, rest)
        assert not found[rest == 0].any()


def test_top_p_draws_among_the_fewest_that_reach_it() -> None:
    weights = np.exp(LOGITS.astype(np.float64))
    shares = np.sort(weights / weights.sum())[::-1].cumsum()  # of 1, 3, 2, 0, 5
    cases = (
        (1e-9, [1]),
        (shares[0] + 1e-6, [1, 3]),
        (shares[1] + 1e-6, [1, 2, 3]),
        (1.0, range(6)),
    )
    for p, kept in cases:
        found = counts(Sampler(1.0, seed=3, top_p=p), 5_000)
        rest = np.zeros(6)
        rest[list(kept)] = weights[list(kept)]
        assert agree(found, rest), p
        assert not found[rest == 0].any()
    both = counts(Sampler(1.0, seed=3, top_k=1, top_p=0.99), 100)
    assert both[1] == 100


def test_a_tiny_temperature_is_greedy_and_a_huge_one_does_not_overflow() -> None:
    sampler = Sampler(1e-300)
    assert {sampler.pick(LOGITS) for _ in range(50)} == {1, 3}
    assert Sampler(1e300).pick(LOGITS * np.float32(1e30)) in range(6)


def draws(seed: int, sample: int, n: int = 20, n_drawn: int = 0) -> list[int]:
    sampler = Sampler(1.0, seed, sample, n_drawn=n_drawn)
    return [sampler.pick(np.zeros(1000, np.float32)) for _ in range(n)]


def test_each_sample_has_a_stream_of_its_own_that_can_be_repeated() -> None:
    streams = [draws(seed, sample) for seed in (0, 1) for sample in (0, 1, 2)]
    assert len({tuple(stream) for stream in streams}) == 6
    assert draws(1, 2) == streams[-1]


def test_a_stream_can_be_continued_elsewhere() -> None:
    for k in (0, 1, 7, 20):
        assert draws(4, 2, 20 - k, n_drawn=k) == draws(4, 2)[k:]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_what_is_out_of_range_is_refused(options, text) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Sampler(**options)
