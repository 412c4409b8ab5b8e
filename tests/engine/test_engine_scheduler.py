"""Who runs, who waits, who gives way."""

from __future__ import annotations

import numpy as np
import pytest
from engine_support import run_alone, run_together

import kvpool
from kvpool import InvalidArgument, PoolFull
from kvpool.engine.engine import Engine
from kvpool.engine.generate import generate, prefill
from kvpool.engine.paged import blocks_needed
from kvpool.engine.request import Request
from kvpool.engine.speculative import PromptLookup


def numbers(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 260, n).tolist()


# ---- a pass -------------------------------------------------------------------------------------


def test_a_pass_mixes_decode_with_chunks_of_prompts(tiny, manager_of) -> None:
    """Budget 16: two samples get their token first, the prompt of 50 what is left."""
    with Engine(tiny.model, manager_of(50), max_seqs=4, max_step_tokens=16) as engine:
        for seed in (1, 2):
            engine.add(Request(numbers(8, seed), max_tokens=40))
        first = engine.step()
        assert (first.n_decode, first.n_prefill, len(first.admitted)) == (0, 16, 2)
        engine.add(Request(numbers(50, 3), max_tokens=5))
        rows = [(step.n_decode, step.n_prefill) for step in (engine.step() for _ in range(5))]
        assert rows == [(2, 14), (2, 14), (2, 14), (2, 8), (3, 0)]


def test_one_call_feeds_the_whole_batch(tiny, manager_of, monkeypatch) -> None:
    """A decode step is one append, one table, one pass: whatever the number of sequences."""
    manager = manager_of(100)
    calls: list[str] = []

    class Counting:
        def __getattr__(self, name: str):
            value = getattr(manager, name)
            if callable(value):
                calls.append(name)
            return value

    with Engine(tiny.model, Counting(), max_seqs=20) as engine:  # type: ignore[arg-type]
        for seed in range(20):
            engine.add(Request(numbers(5, seed), max_tokens=10))
        engine.step()
        calls.clear()
        step = engine.step()
        assert step.n_decode == 20
        assert sorted(calls) == ["append", "block_tables", "commit", "slot_mapping"]


def test_the_table_of_a_batch_stays_in_one_buffer(tiny, manager_of) -> None:
    with Engine(tiny.model, manager_of(100)) as engine:
        for seed in range(3):
            engine.add(Request(numbers(20, seed), max_tokens=10))
        engine.step()
        buffer = engine._maker._tables
        for _ in range(5):
            engine.step()
        assert engine._maker._tables is buffer


# ---- admission ----------------------------------------------------------------------------------


def test_a_request_is_admitted_when_all_its_blocks_are_there(tiny, manager_of) -> None:
    manager = manager_of(10, 4)
    with Engine(tiny.model, manager) as engine:
        big = engine.add(Request(numbers(24, 1), max_tokens=4))  # 6 blocks, then a seventh
        next_ = engine.add(Request(numbers(20, 2), max_tokens=4))  # 5 blocks: not now
        small = engine.add(Request(numbers(3, 3), max_tokens=4))  # would fit, but does not pass
        assert engine.step().admitted == (big,)
        assert engine.scheduler.waiting == [next_, small]
        while not big.is_done:
            assert not engine.step().admitted
        assert engine.step().admitted == (next_, small)


def test_the_watermark_stays_free(tiny, manager_of) -> None:
    manager = manager_of(10, 4, watermark=3)
    with Engine(tiny.model, manager) as engine:
        engine.add(Request(numbers(16, 1), max_tokens=2))
        engine.add(Request(numbers(16, 2), max_tokens=2))
        assert len(engine.step().admitted) == 1  # 4 + 4 + 3 > 10
        assert manager.pool.stats.used == 4


def test_no_more_sequences_than_max_seqs(tiny, manager_of) -> None:
    asked = [{"prompt": numbers(5, i), "n": 2, "max_tokens": 6} for i in range(5)]
    run = run_together(tiny, manager_of(100), asked, max_seqs=5)
    assert max(step.n_decode for step in run.steps) == 4  # two requests of two samples


def test_who_begins_like_a_prompt_in_the_making_waits_for_it(tiny, manager_of) -> None:
    shared = numbers(64, 1)
    with Engine(tiny.model, manager_of(100), max_seqs=8, max_step_tokens=40) as engine:
        first = engine.add(Request([*shared, 5], max_tokens=4))
        like = engine.add(Request([*shared, 6], max_tokens=4))
        other = engine.add(Request(numbers(20, 2), max_tokens=4))
        assert engine.step().admitted == (first,)  # 40 of its 65 tokens
        assert engine.step().admitted == (other,)  # passes the one that waits
        assert engine.step().admitted == (like,)
        assert like.n_cached == 64
        engine.run()
    assert first.samples[0].finish == like.samples[0].finish == "length"


def test_who_shares_less_than_a_block_does_not_wait(tiny, manager_of) -> None:
    shared = numbers(15, 1)
    with Engine(tiny.model, manager_of(100)) as engine:
        engine.add(Request([*shared, 5, 6], max_tokens=4))
        engine.add(Request([*shared, 7, 8], max_tokens=4))
        assert len(engine.step().admitted) == 2
    with Engine(tiny.model, manager_of(100, prefix_cache="none")) as engine:
        for _ in range(2):  # equal ones, but nothing is ever found
            engine.add(Request(numbers(60, 1), max_tokens=4))
        assert len(engine.step().admitted) == 2


# ---- giving way ---------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_comes_back_first(tiny, manager_of) -> None:
    manager = manager_of(9, 4)
    asked = [{"prompt": numbers(8, i), "max_tokens": 12} for i in range(4)]
    with Engine(tiny.model, manager) as engine:
        requests = [engine.add(Request(**options)) for options in asked]
        order: list[tuple[str, int]] = []
        while engine.is_busy:
            step = engine.step()
            for name in ("preempted", "admitted", "finished"):
                order += [(name, request.number) for request in getattr(step, name)]
    # four prompts of 2 blocks; at the first token each needs a third: 12 of 9
    assert order[:5] == [
        ("admitted", 0), ("admitted", 1), ("admitted", 2), ("admitted", 3), ("preempted", 3),
    ]  # fmt: skip
    preempted = [n for name, n in order if name == "preempted"]
    assert 0 not in preempted  # the oldest never gives way
    assert [n for name, n in order if name == "finished"] == [0, 1, 2, 3]
    assert [r.n_preempted for r in requests] == [preempted.count(i) for i in range(4)]
    assert [r.samples[0].tokens for r in requests] == [
        tokens[0] for tokens in run_alone(tiny, asked).tokens
    ]


def test_nobody_is_admitted_in_a_pass_that_preempts(tiny, manager_of) -> None:
    asked = [{"prompt": numbers(8, i), "max_tokens": 12} for i in range(6)]
    run = run_together(tiny, manager_of(9, 4), asked)
    assert any(step.preempted for step in run.steps)
    assert not any(step.preempted and step.admitted for step in run.steps)


def test_one_sample_comes_back_as_one_trunk(tiny, manager_of) -> None:
    """All it had is looked up at once: of blocks that are still there nothing is computed again."""
    asked = [{"prompt": numbers(8, i), "max_tokens": 12} for i in range(4)]
    run = run_together(tiny, manager_of(9, 4), asked)
    assert run.count("preempted") > 0
    assert max(step.n_decode for step in run.steps) <= 4  # a row for each, never what it had


def test_a_preempted_request_is_counted_once(tiny, manager_of) -> None:
    manager = manager_of(9, 4)
    run = run_together(
        tiny, manager, [{"prompt": numbers(8, i), "max_tokens": 12} for i in range(4)]
    )
    assert run.count("preempted") > 0
    assert manager.stats.prompt_tokens == 4 * 8


def test_forks_share_the_prompt_and_own_the_rest(tiny, manager_of) -> None:
    """n = 4: the full blocks of the prompt once, and four times what comes after them."""
    for n_prompt in (32, 40, 47):
        manager = manager_of(64)
        options = {"n": 4, "max_tokens": 20, "temperature": 1.0}
        request = generate(tiny.model, manager, list(range(5, 5 + n_prompt)), **options)
        assert len({tuple(sample.tokens) for sample in request.samples}) == 4
        shared, end = n_prompt // 16, n_prompt + 19
        assert request.peak_blocks == shared + 4 * (-(-end // 16) - shared)
        assert request.peak_blocks == blocks_needed(n_prompt, 20, 4, 16) == manager.stats.peak_used


def test_a_sample_that_ends_gives_its_blocks_back_at_once(tiny, manager_of) -> None:
    prompt, options = numbers(70), {"temperature": 1.0, "n": 2, "max_tokens": 40}
    first, second = generate(tiny.model, manager_of(200, 1), prompt, **options).samples
    end = next(i for i, token in enumerate(first.tokens) if token not in second.tokens)
    manager, used = manager_of(200, 1), []
    request = generate(
        tiny.model, manager, prompt, stop_tokens=[first.tokens[end]],
        check=lambda: used.append(manager.pool.stats.used), **options,
    )  # fmt: skip
    assert [sample.finish for sample in request.samples] == ["stop", "length"]
    assert request.samples[0].tokens == first.tokens[:end]
    assert used[-1] == len(prompt) + 38  # the second alone, before its last step


def test_drafts_never_preempt_anybody(tiny, manager_of) -> None:
    """A guess takes only blocks that are there."""
    phrase = numbers(6) * 5
    needed = blocks_needed(30, 20, 1, 4)
    asked = [{"prompt": phrase, "max_tokens": 20}] * 2
    run = run_together(tiny, manager_of(2 * needed, 4, "none"), asked, n_drafts=8)
    assert run.count("n_accepted") > 0
    assert run.count("preempted") == 0


def test_drafts_stay_within_the_budget_of_a_pass(tiny, manager_of, monkeypatch) -> None:
    """Three sequences that always guess 6 tokens, and 8 rows."""
    monkeypatch.setattr(PromptLookup, "propose", lambda self, n: [5] * n)
    asked = [{"prompt": numbers(5, i), "max_tokens": 30} for i in range(3)]
    run = run_together(tiny, manager_of(100), asked, n_drafts=6, max_seqs=3, max_step_tokens=8)
    rows = [step.n_decode for step in run.steps if step.n_decode - step.n_drafted == 3]
    assert max(rows) == 8
    assert rows.count(8) > 20


def test_a_stop_token_among_right_guesses_ends_the_answer(tiny, manager_of, monkeypatch) -> None:
    prompt, options = numbers(6, 8), {"max_tokens": 20, "temperature": 4.0, "seed": 3}
    answer = generate(tiny.model, manager_of(20), prompt, **options).samples[0].tokens
    assert len(set(answer)) > 10

    def oracle(self: PromptLookup, n: int) -> list[int]:
        n_known = len(self) - len(prompt)
        return answer[n_known : n_known + n]

    monkeypatch.setattr(PromptLookup, "propose", oracle)
    for stop in answer:
        options |= {"stop_tokens": [stop], "n_drafts": 8}
        request = generate(tiny.model, manager_of(20), prompt, **options)
        assert request.samples[0].tokens == answer[: answer.index(stop)]
        assert request.samples[0].finish == "stop"


def test_wrong_guesses_leave_nothing_behind(tiny, manager_of, monkeypatch) -> None:
    """They are cut off before they are committed: nothing findable, no block copied."""
    asked = [{"prompt": numbers(9, i), "max_tokens": 20} for i in range(2)]
    plain = manager_of(60, 2)
    expected = run_together(tiny, plain, asked)
    monkeypatch.setattr(PromptLookup, "propose", lambda self, n: [5] * n)
    manager = manager_of(60, 2)
    run = run_together(tiny, manager, asked, n_drafts=5)
    assert run.tokens == expected.tokens
    assert run.count("n_drafted") > 100
    assert run.count("n_accepted") == sum(
        token == 5 for group in run.tokens for tokens in group for token in tokens[1:]
    )
    assert manager.stats.copies == 0
    assert manager.stats.n_findable == plain.stats.n_findable


def test_who_comes_back_leaves_blocks_for_those_before_it(tiny, manager_of) -> None:
    """Samples take blocks of their own when they part: nobody is admitted into those and preempted
    at once."""
    asked = [
        {"prompt": numbers(20, 0), "max_tokens": 12},
        {"prompt": numbers(7, 1), "max_tokens": 30, "n": 3, "temperature": 1.0},
        {"prompt": numbers(26, 2), "max_tokens": 4},
        {"prompt": numbers(6, 3), "max_tokens": 5},
    ]
    for prefix_cache in ("hash", "none"):
        manager = manager_of(29, 4, prefix_cache)
        with Engine(tiny.model, manager, max_seqs=8, max_step_tokens=16) as engine:
            requests = [engine.add(Request(**options)) for options in asked]
            since: dict[int, int] = {}
            clock = 0
            while engine.is_busy:
                step = engine.step()
                clock += 1
                for request in step.admitted:
                    since[request.number] = clock
                for request in step.preempted:
                    assert clock - since[request.number] > 1
        assert [r.error for r in requests] == [None] * 4


# ---- what does not fit --------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_the_numbers(tiny, manager_of) -> None:
    manager = manager_of(9, 4, watermark=1)
    for prompt, options, needed in ((20, {}, 10), (5, {"n": 4}, 21), (8, {"beams": 2}, 12)):
        options = {"max_tokens": 20, **options}
        width = options.get("beams") or options.get("n", 1)
        assert blocks_needed(prompt, 20, width, 4) == needed
        with Engine(tiny.model, manager) as engine:
            fine = engine.add(Request(numbers(5), max_tokens=3))
            with pytest.raises(
                PoolFull, match=f"can need {needed} blocks of 4 tokens .* has 9, of"
            ):
                engine.add(Request(numbers(prompt), **options))
            engine.run()
        assert fine.samples[0].finish == "length"


def test_a_pool_of_exactly_blocks_needed_is_enough(tiny, manager_of) -> None:
    for n_prompt, n in ((16, 1), (17, 3), (31, 4)):
        options = {"n": n, "max_tokens": 9, "temperature": 2.0}
        needed = blocks_needed(n_prompt, 9, n, 4)
        assert needed == {1: 6, 3: 4 + 3 * 3, 4: 7 + 4 * 3}[n]
        request = generate(tiny.model, manager_of(needed, 4), numbers(n_prompt), **options)
        assert request.n_preempted == 0
        with pytest.raises(PoolFull):
            generate(tiny.model, manager_of(needed - 1, 4), numbers(n_prompt), **options)


def test_a_pool_whose_blocks_others_hold_fails_one_request_after_the_other(
    tiny, manager_of
) -> None:
    """Not for ever, and not those that fit."""
    manager = manager_of(10, 4)
    theirs = manager.allocate(numbers(28))
    with Engine(tiny.model, manager) as engine:
        big = engine.add(Request(numbers(20, 1), max_tokens=4))
        growing = engine.add(Request(numbers(8, 2), max_tokens=16))
        small = engine.add(Request(numbers(6, 3), max_tokens=4))
        engine.run()
    assert isinstance(big.error, PoolFull)
    assert isinstance(growing.error, PoolFull)
    assert [r.samples[0].finish for r in (big, growing, small)] == ["error", "error", "length"]
    assert len(growing.samples[0].tokens) > 1
    theirs.free()


REFUSED = {
    "at least one token": {"prompt": []},
    "n is 0": {"n": 0},
    "max_tokens is 0": {"max_tokens": 0},
    "beams is -1": {"beams": -1},
    "n is 3: 2 beams": {"n": 3, "beams": 2},
    "beams and temperature": {"beams": 2, "temperature": 1.0},
    "length_penalty is inf": {"beams": 2, "length_penalty": float("inf")},
    "length_penalty is nan": {"beams": 2, "length_penalty": float("nan")},
    "length_penalty is -10.5: not in -10..10": {"beams": 2, "length_penalty": -10.5},
    "temperature is -1": {"temperature": -1},
    "top_p is 2": {"top_p": 2},
    "generated: only one sample": {"n": 2, "generated": [1]},
    "generated has 5 of max_tokens 5": {"generated": [1] * 5, "max_tokens": 5},
    "longer than the model's context of 512": {"prompt": [5] * 500, "max_tokens": 13},
    "token 271 is not in 0..270": {"prompt": [5, 271]},
    "token -1 is not in 0..270": {"prompt": [5, -1]},
    "65 samples of one prompt, but max_seqs is 64": {"n": 65, "max_tokens": 1},
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_request_names_what_is_wrong(tiny, manager_of, text) -> None:
    with Engine(tiny.model, manager_of(2000)) as engine:
        with pytest.raises(InvalidArgument, match=text):
            engine.add(Request(**{"prompt": [5, 6], **REFUSED[text]}))
        assert not engine.is_busy


WHOLE = ("n", "max_tokens", "beams", "top_k", "seed", "prompt", "generated", "stop_tokens")


@pytest.mark.parametrize("wrong", [2.5, float("nan"), True, "3", None])
@pytest.mark.parametrize("name", WHOLE)
def test_a_request_takes_whole_numbers(name, wrong) -> None:
    value = [7, wrong] if name in ("prompt", "generated", "stop_tokens") else wrong
    with pytest.raises(kvpool.ArgumentTypeError, match=f"^{name}: expected an integer, found"):
        Request(**{"prompt": [5, 6], name: value})


@pytest.mark.parametrize("penalty", [-10, 10])
def test_every_length_penalty_that_is_taken_ranks(tiny, manager_of, penalty) -> None:
    with Engine(tiny.model, manager_of(300)) as engine:
        request = engine.add(Request([5], beams=2, max_tokens=200, length_penalty=penalty))
        engine.run()
    assert request.error is None
    assert len(request.samples) == 1


def test_an_engine_refuses_what_does_not_go_together(tiny, minute, manager_of) -> None:
    for options in ({"max_seqs": 0}, {"max_seqs": 9, "max_step_tokens": 8}, {"n_drafts": -1}):
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            Engine(tiny.model, manager_of(4), **options)
    for name in ("max_seqs", "max_step_tokens", "n_drafts"):
        with pytest.raises(kvpool.ArgumentTypeError, match=f"{name}: expected an integer"):
            Engine(tiny.model, manager_of(4), **{name: 1.5})
    for work in (generate, prefill):
        with pytest.raises(InvalidArgument, match="max_step_tokens is 0: not at least 1"):
            work(tiny.model, manager_of(4), [5, 6], max_step_tokens=0)
    with pytest.raises(InvalidArgument, match="n_layers: the pool has 3, the model 2"):
        Engine(minute.model, manager_of(4))
    with Engine(tiny.model, manager_of(4)) as engine:
        request = engine.add(Request([5], max_tokens=2))
        with pytest.raises(InvalidArgument, match="added before"):
            engine.add(request)
        engine.run()
    assert request.samples[0].finish == "length"


# ---- guessing -----------------------------------------------------------------------------------


def test_what_followed_last_time_is_proposed() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3])
    assert lookup.propose(3) == [4, 9, 2]  # three agree: 1 2 3
    lookup.extend([7, 2, 3])
    assert lookup.propose(2) == [7, 2]  # the latest of 2 3 that goes on
    assert lookup.propose(1) == [7]
    lookup.extend([200])
    assert lookup.propose(5) == []
    assert PromptLookup([1]).propose(5) == []
    assert len(lookup) == 15


def test_a_lookup_knows_the_same_at_once_and_piece_by_piece() -> None:
    tokens = np.random.default_rng(1).integers(0, 4, 200).tolist()
    whole, grown = PromptLookup(tokens), PromptLookup([])
    for token in tokens:
        grown.extend([token])
    for n in range(6):
        assert whole.propose(n) == grown.propose(n)


def test_a_lookup_finds_what_a_search_finds() -> None:
    random = np.random.default_rng(2)
    n_found = 0
    for _ in range(200):
        tokens = random.integers(0, 6, int(random.integers(1, 40))).tolist()
        expected: list[int] = []
        for size in (3, 2):
            places = [
                end
                for end in range(size, len(tokens))
                if tokens[end - size : end] == tokens[-size:]
            ]
            if places:
                expected = tokens[places[-1] : places[-1] + 5]
                break
        assert PromptLookup(tokens).propose(5) == expected
        n_found += bool(expected)
    assert n_found > 50
