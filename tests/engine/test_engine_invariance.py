"""The same tokens and the same logits, bit by bit, in any company and under any scheduling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_support import Loaded, Run, load, run_alone, run_together
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import BlockManager
from kvpool.engine.engine import Engine
from kvpool.engine.paged import blocks_needed
from kvpool.engine.request import Request


def mixture() -> list[dict[str, Any]]:
    """Greedy and seeded, one sample and several, long and short, with shared beginnings; one text
    that repeats itself, so that drafts are right now and then."""
    random = np.random.default_rng(0)
    system = random.integers(3, 260, 50).tolist()
    tails = [random.integers(3, 260, n).tolist() for n in (20, 1, 33, 14, 5, 64)]
    phrase = random.integers(3, 260, 6).tolist()
    asked: list[dict[str, Any]] = [
        {"prompt": system + tails[0]},
        {"prompt": system + tails[1], "temperature": 0.8, "seed": 1, "n": 3},
        {"prompt": system + tails[2], "max_tokens": 3},
        {"prompt": system + tails[0]},
        {"prompt": tails[3]},
        {"prompt": tails[4], "temperature": 1.5, "seed": 2, "top_k": 40},
        {"prompt": tails[5] + phrase * 4, "temperature": 0.3, "seed": 3, "top_p": 0.9, "n": 2},
        {"prompt": phrase * 5, "max_tokens": 30},
        {"prompt": system[:32], "n": 2, "temperature": 1.0},
    ]
    return [{"max_tokens": 20, **options} for options in asked]


@pytest.fixture(scope="module")
def alone(tiny: Loaded) -> Run:
    return run_alone(tiny, mixture())


def largest(block_tokens: int) -> int:
    """Blocks of the request that needs most."""
    return max(
        blocks_needed(len(a["prompt"]), a["max_tokens"], a.get("n", 1), block_tokens)
        for a in mixture()
    )


def check_same(run: Run, alone: Run) -> None:
    assert run.tokens == alone.tokens
    assert run.logits == alone.logits


def test_the_mixture_draws_different_samples(alone) -> None:
    assert len({tuple(tokens) for tokens in alone.tokens[1]}) == 3
    assert len({tuple(tokens) for group in alone.tokens for tokens in group}) > 10
    assert all(seen for group in alone.logits for seen in group)


@pytest.mark.parametrize("prefix_cache", ["hash", "none"])
@pytest.mark.parametrize("block_tokens", [1, 4, 16, 32])
def test_a_batch_in_blocks_of_any_size(tiny, manager_of, alone, block_tokens, prefix_cache) -> None:
    manager = manager_of(1200 // block_tokens, block_tokens, prefix_cache)
    run = run_together(tiny, manager, mixture())
    check_same(run, alone)
    assert run.count("preempted") == 0
    assert len(run.steps) < 60  # 29 alone for the longest
    assert (manager.stats.hit_tokens > 0) == (prefix_cache == "hash")


@pytest.mark.parametrize("chunk", [3, 7, 16, 33, 500])
def test_chunks_of_any_size(tiny, manager_of, alone, chunk) -> None:
    run = run_together(tiny, manager_of(100), mixture(), max_seqs=3, max_step_tokens=chunk)
    check_same(run, alone)
    assert max(step.n_prefill + step.n_decode for step in run.steps) <= chunk


@pytest.mark.parametrize("prefix_cache", ["hash", "none"])
@pytest.mark.parametrize(("block_tokens", "extra"), [(1, 0), (4, 0), (4, 3), (16, 1), (32, 0)])
def test_the_smallest_pools(tiny, manager_of, alone, block_tokens, extra, prefix_cache) -> None:
    """Requests are preempted and cached blocks evicted all the time."""
    manager = manager_of(largest(block_tokens) + extra, block_tokens, prefix_cache)
    run = run_together(tiny, manager, mixture(), max_step_tokens=64)
    check_same(run, alone)
    if block_tokens <= 16:
        assert run.count("preempted") > 0
    if prefix_cache == "hash":
        assert manager.pool.stats.evictions > 0


def test_a_watermark(tiny, manager_of, alone) -> None:
    run = run_together(tiny, manager_of(largest(4) + 9, 4, watermark=9), mixture())
    check_same(run, alone)


@pytest.mark.parametrize("n_drafts", [1, 2, 5])
@pytest.mark.parametrize("small", [False, True], ids=["large pool", "small pool"])
def test_drafts(tiny, manager_of, alone, n_drafts, small) -> None:
    manager = manager_of(largest(4) if small else 300, 4)
    run = run_together(tiny, manager, mixture(), n_drafts=n_drafts, max_step_tokens=64)
    check_same(run, alone)
    assert 0 < run.count("n_accepted") < run.count("n_drafted")


def test_drafts_take_fewer_passes(tiny, manager_of) -> None:
    asked = [mixture()[7]]
    plain = run_together(tiny, manager_of(20), asked)
    guessed = run_together(tiny, manager_of(20), asked, n_drafts=4)
    assert guessed.tokens == plain.tokens
    assert len(guessed.steps) < len(plain.steps)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads(tiny, manager_of, alone, threads) -> None:
    model = load(tiny.path, threads).model
    check_same(run_together(tiny, manager_of(100), mixture(), model=model), alone)


def test_a_second_time_everything_is_found_and_nothing_changes(tiny, manager_of, alone) -> None:
    manager = manager_of(200)
    for _ in range(2):
        check_same(run_together(tiny, manager, mixture()), alone)
    second = run_together(tiny, manager, mixture())
    assert [r.n_cached for r in second.requests] == [
        (len(r.prompt) - 1) // 16 * 16 for r in second.requests
    ]


def test_blocks_that_were_generated_are_found_too(tiny, manager_of) -> None:
    """A next turn contains the last answer: its blocks, computed one token at a time, serve the
    prompt that contains them, and nothing changes by it."""
    manager, prompt = manager_of(64), mixture()[0]["prompt"]
    first = run_together(tiny, manager, [{"prompt": prompt, "max_tokens": 30}])
    turn = {"prompt": prompt + first.tokens[0][0] + [7, 8, 9], "max_tokens": 10}
    second = run_together(tiny, manager, [turn])
    assert second.requests[0].n_cached == (len(prompt) + 29) // 16 * 16 > len(prompt)
    check_same(second, run_alone(tiny, [turn]))


# ---- any mixture, any pool ----------------------------------------------------------------------

PROMPT = st.builds(
    lambda head, n, tail: [3 + head] * n + [40 + token for token in tail],
    st.integers(0, 2),
    st.integers(0, 14),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
ASKED = st.fixed_dictionaries(
    {
        "prompt": PROMPT,
        "max_tokens": st.integers(1, 12),
        "seed": st.integers(0, 2),
        "stop_tokens": st.sampled_from([(), tuple(range(0, 279, 9))]),
    },
    optional={"temperature": st.sampled_from([0.7, 2.0]), "top_k": st.sampled_from([0, 5])},
).flatmap(
    lambda options: st.one_of(
        st.integers(1, 3).map(lambda n: {**options, "n": n}),
        st.integers(1, 3).map(
            lambda beams: {
                **{k: v for k, v in options.items() if k != "temperature"},
                "beams": beams,
                "n": beams,
            }
        ),
    )
)
ARRIVAL = st.tuples(ASKED, st.integers(0, 8), st.one_of(st.none(), st.integers(0, 12)))
ENGINE = st.fixed_dictionaries(
    {
        "max_seqs": st.integers(3, 8),
        "max_step_tokens": st.integers(8, 40),
        "n_drafts": st.sampled_from([0, 0, 1, 4]),
    }
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(ARRIVAL, min_size=1, max_size=7),
    st.sampled_from([1, 2, 3, 4, 16]),
    st.integers(0, 6),
    st.integers(0, 2),
    st.sampled_from(["hash", "none"]),
    ENGINE,
)
def test_any_mixture_gives_what_each_request_gives_alone(
    minute: Loaded, arrivals, block_tokens, extra, watermark, prefix_cache, engine
) -> None:
    """Requests arrive and are aborted in the middle of others; the pool holds little more than the
    largest of them."""
    needed = max(
        blocks_needed(len(a["prompt"]), a["max_tokens"], a.get("beams") or a["n"], block_tokens)
        for a, _, _ in arrivals
    )
    requests = [(Request(**asked), when, until) for asked, when, until in arrivals]
    with minute.pool(needed + watermark + extra, block_tokens) as pool:
        manager = BlockManager(pool, prefix_cache=prefix_cache, watermark=watermark)
        with Engine(minute.model, manager, **engine) as e:
            clock = 0
            while e.is_busy or any(when >= clock for _, when, _ in requests):
                for request, when, until in requests:
                    if when == clock:
                        e.add(request)
                    if until == clock and when <= until:
                        e.abort(request)
                step = e.step()
                assert step.n_decode + step.n_prefill <= engine["max_step_tokens"]
                manager.check()
                clock += 1
                assert clock < 2000, "it does not come to an end"
        assert pool.stats.used == 0
    for (request, _, _), (asked, _, _) in zip(requests, arrivals, strict=True):
        assert request.error is None
        key = repr(asked)
        if key not in KNOWN:
            KNOWN[key] = run_alone(minute, [asked]).requests[0]
        expected = KNOWN[key]
        if any(sample.finish == "abort" for sample in request.samples):
            if not request.beams:
                for sample, whole in zip(request.samples, expected.samples, strict=True):
                    assert sample.tokens == whole.tokens[: len(sample.tokens)]
        else:
            assert [(s.tokens, s.finish, s.score) for s in request.samples] == [
                (s.tokens, s.finish, s.score) for s in expected.samples
            ]


KNOWN: dict[str, Request] = {}
