"""The two clocks: hits of a known trace, and what happens when there is no room."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_support import conversation, request

from kvpool.replay import InFlight, RealTime, Request, TraceError, open_trace

# vLLM 0.33's own counts, and ours where they differ (docs/performance.md): a last block that must
# not match, computed twice, is kept once here.
HITS = {
    2_000: {True: (15_665, 15_665), False: (15_645, 15_645)},
    10_000: {True: (61_046, 61_046), False: (60_971, 60_974)},
    50_000: {True: (102_290, 102_290), False: (102_165, 102_172)},
}


@pytest.mark.parametrize("match_last", [True, False])
@pytest.mark.parametrize("n_blocks", HITS)
def test_hits_of_the_conversation_trace(n_blocks: int, match_last: bool) -> None:
    clock = InFlight(n_blocks, 512, in_flight=64, match_last=match_last)
    with open_trace([conversation()]) as trace:
        for batch in trace:
            clock.feed(batch)
    result = clock.result
    theirs, ours = HITS[n_blocks][match_last]
    assert result.hit_blocks == ours
    assert abs(ours - theirs) <= 0.001 * theirs
    assert (result.requests, result.prompt_blocks) == (12_031, 288_500)
    assert result.freed_early == (522 if n_blocks == 2_000 else 0)
    assert result.occupancy.peak <= n_blocks
    clock.manager.check()


def feed(clock: RealTime, requests: list[Request]) -> list[tuple[Request, int, float]]:
    return list(clock.feed(requests))


def finish(clock: RealTime) -> list[tuple[Request, int, float]]:
    return list(clock.finish())


def test_a_request_in_flight_holds_its_blocks_until_it_is_the_oldest() -> None:
    clock = InFlight(6, 16, in_flight=2)
    clock.feed([request(1, 2), request(3, 4)])
    assert clock.manager.pool.stats.used == 4
    clock.feed([request(5, 6)])
    assert clock.manager.pool.stats.used == 4
    clock.feed([request(7, 8, 9, 10, 11)])  # 5 of 6: both others have to go, one of them early
    assert (clock.manager.pool.stats.used, clock.result.freed_early) == (5, 1)
    clock.feed([request(*range(20, 27))])  # 7 of 6
    assert (clock.result.rejected, clock.result.requests) == (1, 5)


def test_at_the_end_of_a_trace_nothing_is_held() -> None:
    clock = InFlight(8, 16, in_flight=3, outputs=True)
    clock.feed([request(1, 2, n=2), request(1, 3)])
    assert clock.manager.pool.stats.used == 3
    clock.finish()
    assert (clock.manager.pool.stats.used, clock.manager.stats.n_seqs) == (0, 0)


def test_outputs_take_room_in_flight_and_forks_share_the_prompt() -> None:
    clock = InFlight(20, 16, in_flight=4, outputs=True)
    clock.feed([request(1, 2, 3, length=40, out=40, n=2)])
    # In flight every block counts as full: 3 shared, and for each answer 2 for its 40 - 8 tokens.
    assert clock.manager.pool.stats.used == 3 + 2 * 2
    clock.manager.check()


def test_real_time_takes_the_time_that_the_rates_say() -> None:
    clock = RealTime(100, 16, prefill_rate=100, decode_rate=10)
    served = feed(clock, [request(1, 2, length=32, out=20, at=5.0)])
    served += feed(clock, [request(1, 2, length=32, out=20, at=5.1)])  # waits for prefill, not room
    served += finish(clock)
    assert [hits for _, hits, _ in served] == [0, 0]  # the first one is not computed yet
    assert [round(at, 3) for *_, at in served] == [0.0, 0.1]
    result = clock.result
    # 0.32 s each, one after the other; then 2 s of decode
    assert result.first_token_s.quantile(0.0) == pytest.approx(0.32, rel=0.1)
    assert result.first_token_s.quantile(1.0) == pytest.approx(0.54, rel=0.1)
    assert result.occupancy._last is not None
    assert result.occupancy._last[0] == pytest.approx(2.64)
    assert (result.waited, result.preemptions, result.output_tokens) == (0, 0, 40)


def test_what_was_computed_is_hit_by_a_later_request_and_partial_blocks_are_not() -> None:
    clock = RealTime(100, 16, prefill_rate=1000, decode_rate=10)
    served = feed(clock, [request(1, 2, 3, length=40, at=0.0)])
    served += feed(clock, [request(1, 2, 3, length=40, at=1.0)])
    served += feed(clock, [request(1, 2, length=32, at=2.0)])
    served += finish(clock)
    # of 40 tokens two blocks are full; of 32 the last token is left to compute
    assert [hits for _, hits, _ in served] == [0, 2, 1]
    assert clock.result.hit_tokens == 48


def test_a_request_waits_until_there_is_room() -> None:
    clock = RealTime(4, 16, prefill_rate=1000, decode_rate=16)
    served = feed(clock, [request(1, 2, 3, length=33, out=16, at=0.0)])
    served += feed(clock, [request(7, 8, length=32, out=0, at=0.5)])
    assert len(served) == 1
    served += finish(clock)
    assert [round(at, 2) for *_, at in served] == [0.0, 1.03]
    assert (clock.result.waited, clock.result.waiting.peak) == (1, 1)
    assert clock.result.wait_s.quantile(1.0) == pytest.approx(0.53, rel=0.1)


def test_growing_answers_preempt_the_last_one_in() -> None:
    clock = RealTime(6, 16, prefill_rate=1e6, decode_rate=16)
    served = feed(
        clock, [request(1, 2, length=32, out=48, at=0.0), request(3, 4, length=32, out=48, at=0.1)]
    )
    served += finish(clock)
    result = clock.result
    assert len(served) == 2  # the one that came again is not served twice
    assert result.preemptions == 1
    assert (result.requests, result.rejected, result.output_tokens) == (2, 0, 96)
    assert result.prompt_tokens == 64
    clock.manager.check()
    assert clock.manager.pool.stats.used == 0


def test_forks_copy_the_partial_block_and_grow_apart() -> None:
    clock = RealTime(100, 16, prefill_rate=1e6, decode_rate=16)
    clock.feed([request(1, 2, length=20, out=28, at=0.0, n=3)])
    clock.finish()
    # one full block shared; each answer 12 tokens in its copy of the partial one, 16 in one more
    assert clock.result.occupancy.peak == 1 + 3 * 2
    assert clock.result.output_tokens == 3 * 28
    assert clock.manager.stats.copies == 2


def test_settings_that_make_no_sense_are_refused() -> None:
    """A clock without a request in flight would have no oldest one to end."""
    for name in ("in_flight", "block_tokens"):
        with pytest.raises(TraceError, match=f"{name} is 0, expected at least 1"):
            InFlight(8, **{"block_tokens": 16, name: 0})
    good = {"block_tokens": 16, "prefill_rate": 10.0, "decode_rate": 10.0}
    for name, value in (
        ("prefill_rate", 0.0),
        ("decode_rate", float("nan")),
        ("prefill_rate", 1e-300),
        ("speed", float("inf")),
        ("max_running", 0),
        ("block_tokens", -1),
    ):
        with pytest.raises(TraceError, match=f"{name} is {value}"):
            RealTime(8, **{**good, name: value})


def test_the_slowest_rates_give_times_that_are_numbers() -> None:
    clock = RealTime(8, 16, prefill_rate=1e-9, decode_rate=1e-9, speed=1e-9)
    clock.feed([request(1, 2, at=at, out=40) for at in (0.0, 1.0, 1e17)])
    clock.finish()
    result = clock.result.to_json()
    assert math.isfinite(result["wait_s"]["max"])
    assert math.isfinite(clock.result.occupancy.mean)
    assert clock.result.output_tokens == 120


def test_a_request_that_never_fits_is_rejected_and_the_rest_goes_on() -> None:
    clock = RealTime(3, 16, prefill_rate=1e6, decode_rate=16)
    served = feed(
        clock,
        [
            request(1, 2, 3, 4, at=0.0),  # its prompt alone
            request(5, out=100, at=0.1),  # with its answer
            request(6, out=16, at=0.2),
        ],
    )
    served += finish(clock)
    assert clock.result.rejected == 2
    assert clock.result.output_tokens == 16
    clock.manager.check()


requests = st.lists(
    st.tuples(
        st.floats(0, 3),  # since the one before
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
        st.integers(0, 15),  # short of full blocks
        st.integers(0, 60),
        st.integers(1, 3),
    ),
    max_size=25,
)


@settings(max_examples=120, deadline=None)
@given(requests, st.integers(2, 24), st.integers(1, 6), st.integers(0, 1))
def test_everything_that_comes_is_done_or_rejected(
    coming: list[tuple[float, list[int], int, int, int]], n_blocks: int, running: int, spare: int
) -> None:
    clock = RealTime(
        n_blocks, 16, prefill_rate=200, decode_rate=20, max_running=running, watermark=spare
    )
    at, wanted, served = 0.0, 0, 0
    for pause, ids, short, out, n in coming:
        at += pause
        row = request(*ids, length=16 * len(ids) - short, at=at, out=out, n=n)
        served += len(clock.feed([row]))
        wanted += out * n
        assert clock.manager.pool.stats.used <= n_blocks
    served += len(clock.finish())
    clock.manager.check()
    result = clock.result
    assert clock.manager.pool.stats.used == 0
    assert not clock._waiting
    assert not clock._running
    assert result.requests == len(coming)
    assert result.hit_tokens <= result.prompt_tokens
    assert result.occupancy.peak <= n_blocks
    if result.rejected == 0:
        assert result.output_tokens == wanted
        assert served == len(coming)
    else:
        assert result.output_tokens <= wanted
