"""The hit curve of one pass is, to the block, what real pools of each size hit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_support import BLOCKS, CEILING, conversation, request, sequential_hits

import kvpool
from kvpool.replay import (
    POLICIES,
    InFlight,
    Names,
    Reuse,
    ReuseStack,
    Served,
    TraceError,
    make_plan,
    make_request,
    open_trace,
    policy_hits,
    simulate,
)

Prompts = list[list[int]]

# Prompts that share beginnings: each goes along an earlier one for a while, then its own way.
prompts = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 12), st.lists(st.integers(0, 3), max_size=8)),
    min_size=1,
    max_size=60,
)


def grow(steps: list[tuple[int, int, list[int]]]) -> Prompts:
    made: Prompts = []
    for which, kept, more in steps:
        prefix = made[which % len(made)][:kept] if made else []
        made.append(([*prefix, *more] or [0])[:14])
    return made


def served(prompts: Prompts) -> Served:
    return Served([request(*ids) for ids in prompts], [0] * len(prompts), [0.0] * len(prompts))


@settings(max_examples=150, deadline=None)
@given(prompts)
def test_the_curve_is_what_pools_of_every_size_hit(steps: list[tuple[int, int, list[int]]]) -> None:
    made = grow(steps)
    reuse = Reuse(match_last=True)
    reuse.feed(served(made))
    longest = max(map(len, made))
    assert reuse.longest == longest
    for n_blocks in {longest, longest + 1, longest + 3, 20, 35, 60} - set(range(longest)):
        clock = InFlight(n_blocks, 16, in_flight=1, match_last=True)
        clock.feed([request(*ids) for ids in made])
        clock.manager.check()
        assert clock.result.rejected == 0
        assert int(reuse.hits(n_blocks)) == clock.result.hit_blocks
        assert clock.result.hit_blocks == sequential_hits(made, n_blocks)


@settings(max_examples=100, deadline=None)
@given(prompts)
def test_policies_agree_with_the_curve_and_none_beats_optimal(
    steps: list[tuple[int, int, list[int]]],
) -> None:
    made = grow(steps)
    reuse = Reuse(match_last=True)
    reuse.feed(served(made))
    names = reuse.names()
    assert names is not None
    sizes = [reuse.longest, reuse.longest + 2, 30, 500]
    sizes = [size for size in sizes if size >= reuse.longest]
    hits = simulate(make_plan(names), list(POLICIES), sizes)
    assert hits["lru"] == reuse.hits(sizes).tolist()
    for found in hits.values():
        assert all(a <= b for a, b in zip(found, hits["optimal"], strict=True))
        assert found[-1] == reuse.seen_before  # with room for everything they are all the same


@pytest.mark.parametrize("n_blocks", [247, 1_000, 2_000, 10_000, 50_000])
def test_the_curve_of_the_real_trace_is_exact(n_blocks: int) -> None:
    clock = InFlight(n_blocks, 512, in_flight=1, match_last=True)
    strict = InFlight(n_blocks, 512, in_flight=1)
    reuse, never_last = Reuse(match_last=True, keep_names=False), Reuse(keep_names=False)
    with open_trace([conversation()]) as trace:
        for batch in trace:
            reuse.feed(clock.feed(batch))
            never_last.feed(strict.feed(batch))
    assert (reuse.blocks, reuse.seen_before, reuse.longest) == (BLOCKS, CEILING, 247)
    assert int(reuse.hits(n_blocks)) == clock.result.hit_blocks
    # Where the last block is never matched, the pool keeps one copy where the curve moves it.
    assert abs(int(never_last.hits(n_blocks)) - strict.result.hit_blocks) <= 2


def test_ages_retention_and_lifetimes_are_those_of_the_stamps() -> None:
    reuse = Reuse(match_last=True, sizes=[2])
    for i in range(130):
        at = float(i)
        reuse.feed(Served([request(1, at=at)], [int(i > 0)], [at]))
        reuse.feed(Served([request(100 + i, at=at)], [0], [at]))
    assert reuse.age_s.total == 129
    assert reuse.age_s.quantile(0.5) == pytest.approx(1, rel=0.1)
    assert reuse.hit_age_s.total == 129
    kept = reuse.retention_s[2]  # sampled: the block at depth 2 was used in the same second
    assert kept.total == 260 // 64
    assert kept.quantile(1.0) < 0.01
    lifetimes, once = reuse.lifetimes()
    assert (lifetimes.total, once) == (1, 130)
    assert lifetimes.quantile(0.5) == pytest.approx(129, rel=0.1)


@pytest.mark.parametrize("times", [[0.0] * 4, [5.0, 2.0, 5.0, 3.0], [0.0, 1.0, 0.0, 1.0]])
def test_what_is_used_once_is_told_without_times_and_with_times_that_fall(
    times: list[float],
) -> None:
    reuse = Reuse(match_last=True)
    prompts = [(1, 2), (1, 3), (4,), (1, 2)]
    requests = [request(*ids, at=at) for ids, at in zip(prompts, times, strict=True)]
    reuse.feed(Served(requests[:2], [0, 1], times[:2]))
    reuse.feed(Served(requests[2:], [0, 2], times[2:]))
    lifetimes, once = reuse.lifetimes()
    assert (once, lifetimes.total) == (2, 2)  # 3 and 4; 1 and 2
    assert reuse.distinct == 4
    ages = [times[1] - times[0], times[3] - times[1], times[3] - times[0]]
    assert reuse.age_s.total == 3
    assert reuse.age_s.zeros == sum(age <= 0 for age in ages)


def test_prefixes_and_sessions_are_counted() -> None:
    reuse = Reuse(match_last=True)
    a = make_request(0.0, [1, 2, 3, 4], 64, session="a")
    b = make_request(0.0, [1, 2, 9], 48, session="b")
    reuse.feed(Served([a, b, a], [0, 2, 4], [0.0, 0.0, 0.0]))
    rows = {row["blocks"]: row for row in reuse.top_prefixes(5)}
    assert (rows[4]["requests"], rows[4]["hits"]) == (2, 1)
    assert (rows[2]["requests"], rows[2]["hits"]) == (3, 2)
    assert reuse.top_sessions(1) == [{"session": "a", "requests": 2, "blocks": 8, "hit_blocks": 4}]


def test_a_stack_forgets_only_what_is_deeper_than_it_must_hold() -> None:
    stack = ReuseStack(100)
    rng = random.Random(1)
    order: list[int] = []
    for step in range(5000):
        key = rng.randrange(150)
        depths, stamps = stack.use([key], float(step))
        at = order.index(key) + 1 if key in order else 0
        if 0 < at <= 100:
            assert depths[0] == at
        assert (depths[0] == 0) == bool(np.isnan(stamps[0]))
        if at:
            order.remove(key)
        order.insert(0, key)


def test_arrays_that_describe_no_trace_are_refused() -> None:
    none = 2**32 - 1
    with pytest.raises(ValueError, match="starts"):
        policy_hits(0, [0, 1], [0, 1], [none, none], 2)
    with pytest.raises(ValueError, match="policy"):
        policy_hits(7, [0], [0, 1], [none], 2)
    with pytest.raises(ValueError, match="must follow its parent"):
        policy_hits(0, [0, 1], [0, 2], [none, none], 2)
    with pytest.raises(ValueError, match=r"starts\[2\] falls"):
        policy_hits(0, [0], [0, 2**40, 1], [none], 2)
    with pytest.raises(ValueError, match="max_keys"):
        ReuseStack(0)
    for ids in ([-1], [2**64], "ab", [None]):
        with pytest.raises(TraceError, match="ids: expected integers"):
            make_request(0.0, ids, 16)
    assert make_plan(Names(np.zeros(0, np.uint64), np.zeros(1, np.uint64))).blocks.size == 0


@pytest.mark.parametrize("seed", range(4))
def test_fifo_lru_and_optimal_are_those_of_kvcache_simulator(seed: int) -> None:
    """kvcache-simulator (PyPI) counts the hits of the second half of a trace, once its cache was
    full; ours do when told where to begin."""
    policies = pytest.importorskip("kvcache_sim.policies")
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.trace import TraceData

    rng = random.Random(seed)
    made: Prompts = []
    for i in range(600):
        prefix = made[rng.randrange(max(0, i - 80), i)][: rng.randrange(15)] if i else []
        made.append([*prefix, *(rng.randrange(10**6) for _ in range(rng.randrange(1, 9)))][:20])
    flat = [x for ids in made for x in ids]
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in made])])
    theirs = build_execution_plan(
        TraceData(flat, [1] * len(flat), starts.tolist(), 1, len(made), 0, len(flat), 0, 0, 0), 0.5
    )
    reuse = Reuse(match_last=True)
    reuse.feed(served(made))
    names = reuse.names()
    assert names is not None
    ours = make_plan(names)
    compared = 0
    for name in ("fifo", "lru", "optimal"):
        for size in (40, 150, 600):
            result = policies.simulate_policy(theirs, name, size)
            if result.measurementMode != "fixed_window":
                continue  # its cache was not full in time: it counts nothing
            number = list(POLICIES).index(name)
            assert policy_hits(number, *ours, size, theirs.warmup_requests) == result.hitTokens
            compared += 1
    assert compared >= 6


@settings(max_examples=60, deadline=None)
@given(prompts)
def test_a_batch_is_its_requests_one_by_one(steps: list[tuple[int, int, list[int]]]) -> None:
    requests = [request(*ids) for ids in grow(steps)]
    one, many = ReuseStack(1000), ReuseStack(1000)
    times = np.arange(len(requests), dtype=np.float64)
    units = np.concatenate([r.units for r in requests])
    names, depths, stamps = many.use_batch(units, [r.n_blocks for r in requests], times, 2)
    alone = [kvpool.block_hashes(r.units, 2) for r in requests]
    found = [one.use(keys, at) for keys, at in zip(alone, times, strict=True)]
    assert names.tolist() == np.concatenate(alone).tolist()
    assert depths.tolist() == np.concatenate([d for d, _ in found]).tolist()
    np.testing.assert_array_equal(stamps, np.concatenate([s for _, s in found]))
    assert len(one) == len(many)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (([1, 2, 3, 4], [1], [0.0], 2), "a sum of 2, found 1"),
        (([1, 2, 3, 4], [3], [0.0], 2), "a sum of 2, found more"),
        (([1, 2, 3], [1], [0.0], 2), "a sum of 1"),
        (([1, 2], [1], [0.0, 1.0], 2), "times: expected 1"),
        (([1, 2], [1], [0.0], 0), "block_tokens"),
        (([1, 2**32], [1], [0.0], 2), "tokens"),
        (([1, 2], [2**64 - 1], [0.0], 2), "found more"),
    ],
)
def test_a_batch_that_does_not_add_up_changes_nothing(arguments: Any, why: str) -> None:
    tokens, lengths, times, size = arguments
    stack = ReuseStack(10)
    with pytest.raises(ValueError, match=why):
        stack.use_batch(tokens, lengths, np.array(times), size)
    assert len(stack) == 0
