"""Whatever happens, no block stays in use; and sequences that come from elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from engine_support import run_alone

import kvpool
from kvpool import InvalidArgument, PoolFull
from kvpool.engine.engine import Engine
from kvpool.engine.generate import generate, prefill
from kvpool.engine.request import Request
from kvpool.engine.sampling import Sampler


def numbers(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 260, n).tolist()


class Boom(Exception):
    pass


def exploding(original, after: int, error: type[BaseException] = Boom):
    """``original``, until it has been called ``after`` times."""
    calls = 0

    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return original(*args, **kwargs)

    return call


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("after", range(10))
@pytest.mark.parametrize("where", ["check", "on_token", "forward", "logits"])
def test_an_exception_anywhere_leaves_no_block_in_use(
    tiny, manager_of, monkeypatch, where, after, error
) -> None:
    options = {"n": 3}
    if where in ("forward", "logits"):
        original = getattr(type(tiny.model), where).__get__(tiny.model)
        monkeypatch.setattr(tiny.model, where, exploding(original, after, error))
    else:
        options[where] = exploding(lambda *args: None, after, error)
    manager = manager_of(64, 8)
    with pytest.raises(error):
        generate(tiny.model, manager, list(range(5, 75)), **options)
    assert manager.pool.stats.used == 0


@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize(
    "name", ["allocate", "append", "commit", "block_tables", "slot_mapping", "fork", "truncate"]
)
def test_an_exception_in_the_manager_leaves_no_block_in_use(tiny, manager_of, name, after) -> None:
    """MemoryError, for example: from any call of a run with forks, beams, drafts, preemption."""
    manager = manager_of(13, 4)
    count = 0

    class Failing:
        """Stands for the manager, or for one of its sequences."""

        def __init__(self, real: object) -> None:
            self.real = real

        def __getattr__(self, what: str):
            value = getattr(self.real, what)
            if not callable(value):
                return value

            def call(*args, **kwargs):
                nonlocal count
                if what == name:
                    count += 1
                    if count > after:
                        raise MemoryError
                args = tuple(
                    [a.real for a in arg] if isinstance(arg, list) and arg
                    and isinstance(arg[0], Failing) else arg
                    for arg in args
                )  # fmt: skip
                result = value(*args, **kwargs)
                return Failing(result) if isinstance(result, kvpool.Sequence) else result

            return call

        def __len__(self) -> int:
            return len(self.real)  # type: ignore[arg-type]

    phrase = numbers(5) * 4
    engine = Engine(tiny.model, Failing(manager), max_step_tokens=64, n_drafts=3)  # type: ignore[arg-type]
    requests = [
        Request(phrase, max_tokens=12),
        Request(numbers(9, 1), beams=3, max_tokens=9),
        Request(numbers(9, 2), n=2, max_tokens=9, temperature=1.0),
    ]
    for request in requests:
        engine.add(request)
    with pytest.raises(MemoryError):
        engine.run()
    assert manager.pool.stats.used == 0
    assert not engine.is_busy
    assert all(isinstance(request.error, MemoryError) for request in requests if request.error)


def test_a_callback_that_fails_ends_its_request_and_no_other(tiny, manager_of) -> None:
    manager = manager_of(64)
    asked = [{"prompt": numbers(20, i), "n": 2, "temperature": 1.0, "seed": i} for i in range(4)]
    asked = [{**options, "max_tokens": 10} for options in asked]
    with Engine(tiny.model, manager) as engine:
        requests = [Request(**options) for options in asked]
        requests[1].on_token = exploding(lambda *args: None, 7)
        requests[2].on_token = exploding(lambda *args: None, 0)
        for request in requests:
            engine.add(request)
        engine.run()
        assert manager.pool.stats.used == 0
    assert [type(r.error) for r in requests] == [type(None), Boom, Boom, type(None)]
    assert [[s.finish for s in r.samples] for r in requests] == [
        ["length"] * 2, ["error"] * 2, ["error"] * 2, ["length"] * 2,
    ]  # fmt: skip
    alone = run_alone(tiny, asked).tokens
    for i in (0, 3):
        assert [s.tokens for s in requests[i].samples] == alone[i]
    assert [s.tokens for s in requests[1].samples] == [alone[1][0][:4], alone[1][1][:4]]
    assert requests[2].n_tokens == 1


def test_a_request_can_be_aborted_while_it_waits_and_while_it_runs(tiny, manager_of) -> None:
    manager = manager_of(20, 4)
    with Engine(tiny.model, manager, max_seqs=2, max_step_tokens=8) as engine:
        running, prefilling, waiting, last = (
            engine.add(Request(numbers(n, n), max_tokens=9)) for n in (5, 30, 6, 7)
        )
        while not running.samples[0].tokens:
            engine.step()
        assert prefilling.trunk is not None
        for request in (waiting, prefilling, running):
            engine.abort(request)
            assert request.is_done
            assert request.samples[0].finish == "abort"
        assert manager.pool.stats.used == 0
        engine.abort(running)  # again: nothing
        engine.run()
        assert last.samples[0].finish == "length"
        engine.abort(last)
        assert last.samples[0].finish == "length"
    assert len(running.samples[0].tokens) == 1


def test_a_callback_may_abort_any_request(tiny, manager_of) -> None:
    """Its own, in the middle of its samples, and one whose turn in this step is still to come."""
    with Engine(tiny.model, manager_of(64), n_drafts=2) as engine:
        requests = [Request(numbers(6) * 3, n=2, max_tokens=8) for _ in range(3)]

        def on_token(sample: int, token: int) -> None:
            if len(requests[0].samples[0].tokens) == 3:
                for request in requests[:2]:
                    engine.abort(request)

        requests[0].on_token = on_token
        for request in requests:
            engine.add(request)
        engine.run()
    assert [r.samples[1].finish for r in requests] == ["abort", "abort", "length"]


@pytest.mark.parametrize("ending", ["abort", "raise", "close"])
@pytest.mark.parametrize("nth", range(0, 40, 4))
def test_a_callback_may_end_what_the_pass_has_still_to_do(tiny, manager_of, ending, nth) -> None:
    """Samples with drafts, trunks that were just computed, beams: whatever comes behind it in the
    pass. The others do not notice, and nobody is told of tokens after the end."""
    again = numbers(6) * 3  # greedy, and a prompt that repeats itself: all samples have drafts
    asked = [
        {"prompt": again, "n": 2, "max_tokens": 16},
        {"prompt": numbers(30, 1), "n": 2, "max_tokens": 9, "temperature": 1.0},
        {"prompt": numbers(5, 2), "beams": 3, "max_tokens": 6},
        {"prompt": again[1:], "n": 3, "max_tokens": 14},
        {"prompt": numbers(12, 4), "max_tokens": 12},
    ]
    late: list[int] = []
    n_told = 0
    manager = manager_of(90, 4)
    with Engine(tiny.model, manager, max_seqs=16, max_step_tokens=20, n_drafts=4) as engine:

        def told(i: int) -> None:
            nonlocal n_told
            n_told += 1
            if requests[i].finished_s:
                late.append(i)
            if n_told == nth + 1:
                if ending == "close":
                    engine.close()
                elif ending == "raise":
                    raise Boom
                for request in requests[:4]:
                    engine.abort(request)

        requests = [
            Request(**options, on_token=lambda _, __, i=i: told(i))
            for i, options in enumerate(asked)
        ]
        for request in requests:
            engine.add(request)
        engine.run()
    assert not late
    assert all(request.is_done and request.samples for request in requests)
    whole = [all(s.finish == "length" for s in request.samples) for request in requests]
    for i, expected in enumerate(run_alone(tiny, asked).tokens):
        if whole[i]:
            assert [sample.tokens for sample in requests[i].samples] == expected
    failed = [request.error is not None for request in requests]
    if ending == "raise":
        assert failed.count(True) == 1
        assert all(w or f for w, f in zip(whole, failed, strict=True))
    else:
        assert not any(failed)
        assert whole[4] or ending == "close"


def test_a_callback_cannot_begin_another_pass(tiny, manager_of) -> None:
    asked = [{"prompt": numbers(9, i), "max_tokens": 5} for i in range(3)]
    with Engine(tiny.model, manager_of(64)) as engine:
        calls = [lambda *_: engine.step(), lambda *_: engine.run(), None]
        requests = [
            engine.add(Request(**options, on_token=call))
            for options, call in zip(asked, calls, strict=True)
        ]
        engine.run()
    for request in requests[:2]:
        assert isinstance(request.error, InvalidArgument)
        assert str(request.error) == "a pass is under way: on_token cannot begin another"
    assert [s.tokens for s in requests[2].samples] == run_alone(tiny, asked[2:]).tokens[0]


def test_only_the_requests_of_an_engine_can_be_aborted(tiny, manager_of) -> None:
    manager = manager_of(64)
    with Engine(tiny.model, manager) as engine, Engine(tiny.model, manager) as other:
        ours, new = engine.add(Request(numbers(9), max_tokens=5)), Request(numbers(9), max_tokens=5)
        engine.step()
        for foreign in (ours, new):
            with pytest.raises(InvalidArgument, match="request: expected one of this engine"):
                other.abort(foreign)
        engine.run()
        assert (ours.samples[0].finish, new.samples[0].finish) == ("length", "")
        assert other.add(new) is new
        other.abort(ours)  # it is done


def test_leaving_the_engine_ends_what_is_left(tiny, manager_of) -> None:
    manager = manager_of(64)
    with Engine(tiny.model, manager) as engine:
        requests = [engine.add(Request(numbers(20), max_tokens=9)) for _ in range(3)]
        engine.step()
        assert manager.pool.stats.used > 0
    assert manager.pool.stats.used == 0
    assert {r.samples[0].finish for r in requests} == {"abort"}
    request = Request(numbers(20), max_tokens=9)

    def fail_in_the_middle() -> None:
        with Engine(tiny.model, manager) as engine:
            engine.add(request)
            engine.step()
            raise Boom

    with pytest.raises(Boom):
        fail_in_the_middle()
    assert isinstance(request.error, Boom)
    assert request.samples[0].finish == "error"


def test_a_manager_that_is_closed_ends_everything(tiny, manager_of) -> None:
    manager = manager_of(64)
    engine = Engine(tiny.model, manager)
    request = engine.add(Request(numbers(20), max_tokens=9))
    engine.step()
    manager.close()
    with pytest.raises(InvalidArgument):
        engine.step()
    assert isinstance(request.error, InvalidArgument)
    assert not engine.is_busy


# ---- from one engine to another -----------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("n_prompt", [1, 15, 16, 33])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_computed_here_goes_on_there(tiny, manager_of, n_prompt, k, temperature) -> None:
    """Prefill and the first k tokens in one pool, an envelope, the rest in another pool: the same
    answer, draws included."""
    prompt = numbers(n_prompt, n_prompt)
    options = {"temperature": temperature, "seed": 7, "max_tokens": 12}
    expected = run_alone(tiny, [{"prompt": prompt, **options}]).tokens[0][0]
    here, there = manager_of(40), manager_of(40)
    first = generate(tiny.model, here, prompt, **{**options, "max_tokens": k}) if k else None
    tokens = first.samples[0].tokens if first else []
    sequence, logits = prefill(tiny.model, here, prompt + tokens[:-1])
    envelope = sequence.export()
    sequence.free()
    if k == 1:
        assert Sampler(temperature, 7).pick(logits) == tokens[0]
    for _ in range(2):  # the second time its blocks are found there
        moved = there.import_sequence(envelope, prompt + tokens[:-1])
        done = generate(tiny.model, there, prompt, sequence=moved, generated=tokens, **options)
        assert done.samples[0].tokens == expected
        assert moved.is_freed


def test_a_sequence_that_was_handed_over_is_always_freed(tiny, manager_of) -> None:
    manager = manager_of(40, 4)
    prompt = numbers(10)

    def handed() -> kvpool.Sequence:
        return prefill(tiny.model, manager, prompt)[0]

    with Engine(tiny.model, manager) as engine:
        refused = handed()  # a name for each: what is dropped gives its blocks back by itself
        with pytest.raises(PoolFull):
            engine.add(Request(prompt, max_tokens=200, sequence=refused))
        assert refused.is_freed
        aborted = handed()
        engine.abort(engine.add(Request(prompt, max_tokens=5, sequence=aborted)))
        assert aborted.is_freed
        left = handed()
        engine.add(Request(prompt, max_tokens=5, sequence=left))
    assert left.is_freed
    kept = handed()
    with pytest.raises(InvalidArgument, match="its 10 computed tokens are not the first of the 9"):
        Request(prompt[:9], sequence=kept)
    with pytest.raises(InvalidArgument, match="are not the first of"):
        Request([*prompt[:9], prompt[9] + 1, 5], sequence=kept)
    kept.free()  # it was not taken over


def test_a_handed_sequence_is_of_this_manager_and_of_one_request(tiny, manager_of) -> None:
    manager, elsewhere = manager_of(40, 4), manager_of(40, 4)
    prompt = numbers(10)
    asked = [{"prompt": prompt, "max_tokens": 5}]
    with Engine(tiny.model, manager) as engine:
        sequence = prefill(tiny.model, manager, prompt)[0]
        foreign = prefill(tiny.model, elsewhere, prompt)[0]
        request = engine.add(Request(prompt, max_tokens=5, sequence=sequence))
        with pytest.raises(InvalidArgument, match="sequence belongs to another manager"):
            engine.add(Request(prompt, max_tokens=5, sequence=foreign))
        assert foreign.is_freed
        for _ in range(2):  # while it waits, and while it runs
            twice = Request(prompt, max_tokens=5, sequence=sequence)
            with pytest.raises(InvalidArgument, match="sequence: another request has it"):
                engine.add(twice)
            assert not sequence.is_freed
            engine.step()
        engine.run()
    assert sequence.is_freed
    assert [s.tokens for s in request.samples] == run_alone(tiny, asked).tokens[0]
    kept = prefill(tiny.model, manager, prompt)[0]
    with pytest.raises(InvalidArgument, match="are not the first of the 1 given"):
        Request([-1], sequence=kept)
    kept.free()


def test_handed_sequences_give_way_to_what_runs(tiny, manager_of) -> None:
    """They wait with blocks that the one before them needs: those are computed again later."""
    manager = manager_of(12, 4)
    prompt, other = numbers(20, 1), numbers(16, 2)
    asked = [{"prompt": other, "max_tokens": 20}, {"prompt": prompt, "max_tokens": 8}]
    with Engine(tiny.model, manager, max_seqs=1) as engine:
        sequence = prefill(tiny.model, manager, prompt)[0]
        requests = [
            engine.add(Request(**asked[0])),
            engine.add(Request(**asked[1], sequence=sequence)),
        ]
        engine.run()
    assert sequence.is_freed
    assert [r.error for r in requests] == [None, None]
    assert [[s.tokens for s in r.samples] for r in requests] == run_alone(tiny, asked).tokens
    for max_seqs in (1, 2):  # nothing runs: the first does not fit beside the blocks of the second
        with Engine(tiny.model, manager, max_seqs=max_seqs) as engine:
            first = engine.add(Request(numbers(40, 3), max_tokens=4))
            sequence = prefill(tiny.model, manager, prompt)[0]
            second = engine.add(Request(prompt, max_tokens=8, sequence=sequence))
            engine.run()
        assert (first.samples[0].finish, second.samples[0].finish) == ("length", "length")
        assert [second.samples[0].tokens] == run_alone(tiny, asked[1:]).tokens[0]


def test_a_prefill_that_fails_frees_its_sequence(tiny, manager_of, monkeypatch) -> None:
    manager = manager_of(20)
    forward = exploding(type(tiny.model).forward.__get__(tiny.model), 1)
    monkeypatch.setattr(tiny.model, "forward", forward)
    with pytest.raises(Boom) as caught:
        prefill(tiny.model, manager, numbers(40), max_step_tokens=16)
    assert manager.pool.stats.used == 0  # while the traceback still holds the sequence
    assert caught.traceback


@pytest.mark.parametrize("prompt", [[], [5, 10_000], [-1]])
def test_prefill_refuses_what_is_no_prompt(tiny, manager_of, prompt) -> None:
    with pytest.raises(InvalidArgument, match=r"each in 0\.\.270"):
        prefill(tiny.model, manager_of(4), prompt)
    with pytest.raises(PoolFull):
        prefill(tiny.model, manager_of(4, 4), numbers(17))
