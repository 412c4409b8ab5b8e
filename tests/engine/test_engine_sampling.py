"""Picking tokens: greedy, and draws that anybody can repeat."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.engine.sampling import Sampler

LOGITS = np.array([0.0, 3.0, 1.0, 3.0, -np.inf, -2.0], dtype=np.float32)


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert Sampler().pick(LOGITS) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    sampler, n = Sampler(temperature, seed=1), 20_000
    counts = np.bincount([sampler.pick(LOGITS) for _ in range(n)], minlength=6)
    expected = np.exp(LOGITS.astype(np.float64) / temperature)
    expected *= n / expected.sum()
    assert counts[4] == 0
    # five standard deviations: fails once in a million seeds, and this one is fixed
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected + 1)).all()


def test_a_tiny_temperature_is_greedy_and_a_huge_one_does_not_overflow() -> None:
    sampler = Sampler(1e-300)
    assert {sampler.pick(LOGITS) for _ in range(50)} == {1, 3}
    assert Sampler(1e300).pick(LOGITS * np.float32(1e30)) in range(6)


def test_each_sample_has_a_stream_of_its_own_that_can_be_repeated() -> None:
    def draws(seed: int, sample: int) -> list[int]:
        sampler = Sampler(1.0, seed, sample)
        return [sampler.pick(np.zeros(1000, np.float32)) for _ in range(20)]

    streams = [draws(seed, sample) for seed in (0, 1) for sample in (0, 1, 2)]
    assert len({tuple(stream) for stream in streams}) == 6
    assert draws(1, 2) == streams[-1]
