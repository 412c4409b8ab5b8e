"""Blocks are written behind and found again, and whatever a tier does, no answer changes."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from tier_support import B, Engine, Faulty, content, threads, until

import kvpool
from kvpool.tiers import Layout, MemoryTier, TierStack

PROMPT = list(range(1, 19))  # 4 full blocks and 2 tokens


# ---- the straight way ----------------------------------------------------------------------------


def test_what_the_pool_evicts_is_found_again() -> None:
    with Engine([MemoryTier(1 << 20)]) as engine:
        assert engine.answer(PROMPT) == 0
        engine.flush()
        assert engine.stats.stored == 4
        engine.forget()
        assert engine.manager.can_allocate(PROMPT).n_cached == 0
        assert engine.answer(PROMPT) == 16
        assert engine.stats.hits == 4
        assert engine.stats.hit_bytes == 4 * engine.tiers.layout.record_bytes
        assert engine.manager.stats.hit_tokens == 16
        assert engine.answer(PROMPT) == 16  # out of the pool now
        assert engine.stats.hits == 4
        engine.close()


def test_a_prefix_goes_on_where_the_pool_s_ends() -> None:
    with Engine([MemoryTier(1 << 20)]) as engine:
        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        engine.answer(PROMPT[:9])
        assert engine.stats.hits == 2
        assert engine.answer(PROMPT) == 16
        assert engine.stats.hits == 4
        assert engine.answer([*PROMPT[:8], 99, *PROMPT[8:]]) == 8
        assert engine.stats.misses >= 2


def test_the_limits_of_allocate_hold_below_too() -> None:
    with Engine([MemoryTier(1 << 20)]) as engine:
        engine.answer(PROMPT[:16])
        engine.flush()
        engine.forget()
        assert engine.answer(PROMPT[:16]) == 12  # the last token is always computed
        engine.forget()
        assert engine.answer(PROMPT[:16], match_last=True) == 16
        engine.forget()
        assert engine.answer(PROMPT[:16], max_cached_tokens=11) == 8
        engine.forget()
        before = engine.manager.stats
        assert engine.answer(PROMPT[:16], resumed=True) == 12
        assert engine.manager.stats.hit_tokens == before.hit_tokens
        assert engine.manager.stats.prompt_tokens == before.prompt_tokens
        engine.forget()
        assert engine.answer(PROMPT[:16], namespace=7) == 0
        assert engine.answer([]) == 0


def test_what_decode_steps_fill_is_written_too_and_forks_and_cuts_do_not_confuse_it() -> None:
    with Engine([MemoryTier(1 << 20)], n_blocks=32) as engine:
        manager, pool = engine.manager, engine.pool

        def compute(seq: kvpool.Sequence) -> None:
            tokens = seq.tokens.tolist()
            for i in range(seq.n_computed // B, len(tokens) // B):
                pool.block(seq.blocks[i])[:] = content(0, tokens[: (i + 1) * B])

        seq = manager.allocate([1, 2, 3])
        compute(seq)
        seq.commit()
        for token in range(4, 14):
            manager.append([seq], [token])
            compute(seq)
            manager.commit([seq])
        fork = seq.fork()
        for s, first in ((seq, 20), (fork, 40)):
            s.append(range(first, first + 8))
            compute(s)
            s.commit()
        fork.truncate(9)  # into a block that it has committed
        fork.append(range(60, 70))
        compute(fork)
        fork.commit()
        prompts = [s.tokens.tolist() for s in (seq, fork)]
        manager.free([seq, fork])
        engine.flush()
        engine.forget()
        for tokens in prompts:
            assert engine.answer(tokens, match_last=True) == len(tokens) // B * B
        engine.close()


def test_a_hit_in_a_slow_tier_is_written_up_into_the_faster_one() -> None:
    fast, slow = MemoryTier(1 << 20), MemoryTier(1 << 20)
    with Engine([fast, slow]) as engine:
        engine.answer(PROMPT)
        engine.flush()
        fast.delete(
            engine.tiers.layout.keys(PROMPT)[1:3]
        )  # a hole: the slow tier goes on from there
        engine.forget()
        assert engine.answer(PROMPT) == 16
        assert [stats.hits for stats in engine.tiers.stats()] == [1, 3]
        assert [stats.name for stats in engine.tiers.stats()] == ["memory", "memory#2"]
        engine.flush()
        assert fast.stats().n_records == 4
        engine.forget()
        assert engine.answer(PROMPT) == 16
        assert [stats.hits for stats in engine.tiers.stats()] == [5, 3]


def test_a_prompt_that_does_not_fit_asks_no_tier_and_changes_nothing() -> None:
    tier = Faulty()
    with Engine([tier], n_blocks=5) as engine:
        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        held = engine.manager.allocate([9, 9])
        tier.calls.clear()
        before = engine.pool.stats
        with pytest.raises(kvpool.PoolFull, match="5 blocks needed"):
            engine.manager.allocate(PROMPT)
        assert engine.pool.stats == before
        assert tier.calls == []
        held.free()


def test_arguments_are_refused_as_without_tiers() -> None:
    plain = kvpool.BlockManager(kvpool.Pool(8, B, n_layers=2, n_kv_heads=1, head_dim=2))
    with Engine([MemoryTier(1 << 20)]) as engine:
        for arguments, options in (
            ((5,), {}),
            (([-1],), {}),
            (("text",), {}),
            (([1],), {"namespace": -1}),
            (([1] * 9,), {"max_cached_tokens": 0.5}),
            (([1] * 9,), {"match_last": 3}),
            (([1] * 9,), {"resumed": "yes"}),
        ):
            with pytest.raises(kvpool.KvPoolError) as expected:
                plain.allocate(*arguments, **options)
            with pytest.raises(type(expected.value)) as found:
                engine.manager.allocate(*arguments, **options)
            assert str(found.value) == str(expected.value)
            assert engine.pool.stats.used == 0


def test_what_is_no_stack_is_refused_when_the_manager_is_made() -> None:
    pool = kvpool.Pool(8, B, n_layers=2, n_kv_heads=1, head_dim=2)
    for tiers, text in (
        ([3], "tiers: expected Tiers and URLs, found int"),
        (["tape:/x"], "expected a URL of"),
        ("memory:?size=lots", "size: expected a size"),
        (["memory:?colour=red"], "unknown option colour"),
    ):
        with pytest.raises(kvpool.InvalidArgument, match=text):
            kvpool.BlockManager(pool, tiers=tiers)
    with pytest.raises(kvpool.InvalidArgument, match="prefix_cache='none'"):
        kvpool.BlockManager(pool, prefix_cache="none", tiers=["memory:"])
    for options in ({"timeout_s": -1}, {"queue_bytes": -1}, {"secret": b"short"}):
        with pytest.raises(kvpool.InvalidArgument):
            TierStack([], **options)
    stack = TierStack(["memory:?size=1MiB"])
    manager = kvpool.BlockManager(pool, tiers=stack)  # the failures above have left the pool free
    assert manager.tiers is stack
    manager.close()
    with pytest.raises(kvpool.Busy, match="have a block manager already"):
        kvpool.BlockManager(pool, tiers=stack)
    kvpool.BlockManager(pool).close()
    assert not threads()


def test_a_reset_ends_hits_below_too_until_the_new_weights_are_named() -> None:
    with Engine([MemoryTier(1 << 20)]) as engine:
        engine.answer(PROMPT)
        engine.answer(PROMPT, namespace=5)
        engine.flush()
        engine.manager.reset(5)
        assert engine.answer(PROMPT, namespace=5) == 0
        engine.forget()
        assert engine.answer(PROMPT) == 16
        engine.manager.reset()
        assert engine.answer(PROMPT) == 0
        with pytest.raises(kvpool.InvalidArgument, match="expected another model or revision"):
            engine.tiers.renew(model="test")
        engine.forget()
        engine.tiers.renew(revision="2")
        assert engine.answer(PROMPT) == 0  # what is there is of the old weights
        engine.flush()
        engine.forget()
        assert engine.answer(PROMPT) == 16


def test_a_request_that_waits_while_the_weights_change_is_given_nothing_of_the_old_ones() -> None:
    """It computed its keys before; what it finds under them must not be found after the reset."""
    tier = Faulty()
    asked, let_go = threading.Event(), threading.Event()
    with Engine([tier], n_blocks=64) as engine:
        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        engine.answer(PROMPT[:8])  # the pool has a part, and has it no more after the reset

        def slow(keys, records):
            asked.set()
            let_go.wait(30)
            return records

        tier.on_get = slow
        cached: list[int] = []

        def ask() -> None:
            with engine.manager.allocate(PROMPT) as seq:
                cached.append(seq.n_cached)

        first, second = (threading.Thread(target=ask) for _ in range(2))
        first.start()
        assert asked.wait(10)
        [flight] = engine.tiers._flights.values()
        second.start()
        until(lambda: bool(flight._cond._waiters))  # it waits for the first one's answer
        engine.manager.reset()
        engine.tiers.renew(revision="2")
        let_go.set()
        first.join()
        second.join()
        assert sorted(cached) == [0, 8]  # 8 out of the pool, before the reset
        assert engine.manager.can_allocate(PROMPT).n_cached == 0
        engine.close()


@pytest.mark.parametrize("renewed", [False, True])
def test_what_is_told_of_old_weights_is_not_written_under_the_new_name(renewed: bool) -> None:
    with Engine([MemoryTier(1 << 20)]) as engine:
        written, times = engine.tiers.written, []

        def late(*args):  # between commit and written another thread changes the weights
            times.append(1)
            if len(times) == 1:
                engine.manager.reset()
                if renewed:
                    engine.tiers.renew(revision="2")
            written(*args)

        engine.tiers.written = late
        engine.answer(PROMPT)
        engine.flush()
        assert engine.stats.stored == 0
        engine.forget()
        assert engine.answer(PROMPT) == 0
        engine.flush()
        assert engine.stats.stored == 4 * renewed
        engine.close()


# ---- tiers that misbehave ------------------------------------------------------------------------


def flipped(record: bytes) -> bytes:
    at = random.randrange(len(record))
    return record[:at] + bytes([record[at] ^ 1 << random.randrange(8)]) + record[at + 1 :]


LIES = {
    "a flipped bit": lambda keys, records: [r and flipped(r) for r in records],
    "cut short": lambda keys, records: [r and r[: random.randrange(len(r))] for r in records],
    "too long": lambda keys, records: [r and r + b"\0" for r in records],
    "each other's": lambda keys, records: records[::-1] if len(records) > 1 else [b"x"],
    "all the same": lambda keys, records: [records[-1]] * len(records),
    "nothing": lambda keys, records: [b""] * len(records),
    "zeros": lambda keys, records: [bytes(len(r or b"")) for r in records],
    "no bytes": lambda keys, records: [3.5] * len(records),
    "an array of two dimensions": lambda keys, records: [np.zeros((9, 9))[:, ::2]] * len(records),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_tier_that_lies_is_a_miss_and_is_told(lie: str) -> None:
    random.seed(lie)
    tier = Faulty()
    with Engine([tier]) as engine:
        engine.answer(PROMPT)
        engine.flush()
        tier.on_get = LIES[lie]
        for _ in range(5):
            engine.forget()
            # answer() holds every block that came back against what it must be
            n_cached = engine.answer(PROMPT)
            assert n_cached == 0 or lie in ("each other's", "all the same")
            engine.flush()  # what was refused is deleted and written again
        assert sum(engine.stats.refused.values()) >= 5
        assert "delete" in {call for call, _ in tier.calls}
        engine.flush()
        tier.on_get = lambda keys, records: records
        engine.forget()
        engine.answer(PROMPT)  # deleted as unreadable, and written again
        engine.flush()
        engine.forget()
        assert engine.answer(PROMPT) == 16
        engine.close()


def test_records_of_another_model_or_fleet_are_not_found() -> None:
    shared = MemoryTier(1 << 20)
    shared.close = lambda: None  # type: ignore[method-assign]
    for options in (
        {"model": "a"},
        {"model": "b"},
        {"model": "a", "revision": "2"},
        {"model": "a", "secret": b"0123456789abcdef"},
        {"model": "a", "secret": b"another secret of it"},
    ):
        with Engine(TierStack([shared], timeout_s=20, **options)) as engine:
            assert engine.answer(PROMPT) == 0
            engine.flush()
            engine.forget()
            assert engine.answer(PROMPT) == 16


def test_a_forged_record_of_who_knows_the_prompt_but_not_the_secret_is_refused() -> None:
    tier, secret = Faulty(), b"the fleet's own secret"
    with Engine(TierStack([tier], secret=secret, timeout_s=20)) as engine:
        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        forger = Layout.of(engine.pool, secret=b"somebody else's one")
        object.__setattr__(forger, "id", engine.tiers.layout.id)

        def forge(keys, records):
            forged = []
            for record in records:
                copy = bytearray(record)
                payload = memoryview(copy)[184:-4]
                payload[:] = bytes(len(payload))
                copy[-4:] = kvpool.crc32c(memoryview(copy)[144:-4]).to_bytes(4, "little")
                forger.seal(memoryview(copy), keys[len(forged)], len(forged))
                forged.append(copy)
            return forged

        tier.on_get = forge
        assert engine.answer(PROMPT) == 0
        assert engine.stats.refused == {"tag": 1}


def boom(*args: object) -> None:
    raise RuntimeError("boom")


def test_a_tier_that_raises_costs_nothing_but_itself_and_is_left_alone_for_a_while() -> None:
    tier = Faulty()
    with Engine([tier]) as engine:
        tier.on_put = tier.on_get = tier.on_delete = tier.on_close = boom  # type: ignore[assignment]
        assert engine.answer(PROMPT) == 0
        engine.flush()
        stats = engine.stats
        assert stats.errors >= 1
        assert stats.dropped == 4
        assert "boom" in stats.last_error
        assert not stats.is_healthy
        n = len(tier.calls)
        engine.forget()
        assert engine.answer(PROMPT) == 0  # it is not even asked
        assert len(tier.calls) == n
        tier.on_put, tier.on_get = lambda items: None, lambda keys, records: records
        [level] = engine.tiers._levels
        assert 0 < level._blocked_until - time.monotonic() <= 1.0
        level._blocked_until = 0.0  # the while is over
        engine.forget()
        assert engine.answer(PROMPT) == 0
        engine.flush()
        engine.forget()
        assert engine.answer(PROMPT) == 16
        assert engine.stats.is_healthy
        engine.close()
    assert ("close", 0) in tier.calls
    assert not threads()


def test_backing_off_doubles_up_to_a_minute() -> None:
    tier = Faulty()
    tier.on_get = boom  # type: ignore[assignment]
    with Engine([tier]) as engine:
        [level] = engine.tiers._levels
        waits = []
        for _ in range(8):
            level._blocked_until = 0.0
            engine.forget()
            engine.answer(PROMPT)
            waits.append(round(level._blocked_until - time.monotonic()))
        assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_tier_that_hangs_costs_one_deadline() -> None:
    tier, let_go = Faulty(), threading.Event()
    with Engine([tier], timeout_s=20, close_timeout_s=0.1) as engine:
        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        engine.tiers.timeout_s = 0.05

        def hang(keys, records):
            let_go.wait(30)
            return records

        tier.on_get = hang
        began = time.monotonic()
        assert engine.answer(PROMPT) == 0
        assert time.monotonic() - began >= 0.05
        assert engine.stats.timeouts == 1
        [level] = engine.tiers._levels
        level._blocked_until = 0.0
        n = len(tier.calls)
        for _ in range(3):
            level._blocked_until = 0.0
            engine.forget()
            assert engine.answer(PROMPT) == 0
        assert engine.stats.timeouts == 1
        assert ("get", 4) not in tier.calls[n:]  # it still hangs, and is not asked again
        assert not engine.stats.is_healthy
        let_go.set()
        until(lambda: engine.stats.is_healthy)
        engine.tiers.timeout_s = 20
        engine.flush()
        engine.forget()
        assert engine.answer(PROMPT) == 16
        engine.close()


def test_behind_a_call_that_hangs_and_nobody_waits_for_no_jobs_pile_up() -> None:
    tier, let_go = Faulty(), threading.Event()
    with Engine([tier], close_timeout_s=0.1) as engine:
        engine.tiers._chunk = 2
        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        n_gets: list[int] = []

        def fault(keys, records):
            n_gets.append(1)
            if len(n_gets) == 1:  # a miss: the second half is not waited for
                return [None] * len(keys)
            let_go.wait(30)
            return records

        tier.on_get = fault
        assert engine.answer(PROMPT) == 0
        assert engine.stats.timeouts == 0
        until(lambda: len(n_gets) == 2)
        engine.tiers.timeout_s = 0.05
        [level] = engine.tiers._levels
        for _ in range(4):
            level._blocked_until = 0.0  # as after a while
            engine.forget()
            assert engine.answer(PROMPT) == 0
        assert engine.stats.timeouts == 1
        assert level._gets.qsize() <= 2
        let_go.set()
        until(lambda: engine.stats.is_healthy)
        engine.close()


def test_a_put_that_hangs_never_blocks_the_engine_and_what_does_not_fit_is_dropped() -> None:
    tier, let_go = Faulty(), threading.Event()
    record = Layout(B, n_layers=2, n_kv_heads=1, head_dim=2).record_bytes
    with Engine([tier], queue_bytes=3 * record, close_timeout_s=0.1, n_blocks=64) as engine:
        tier.on_put = lambda items: let_go.wait(30) and None  # type: ignore[func-returns-value]
        for first in range(0, 1000, 100):
            engine.answer(range(first, first + 18))
        stats = engine.stats
        assert stats.queued <= 3
        assert stats.dropped >= 40 - 3 - 3
        assert not engine.tiers.flush(0.05)
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 5
    let_go.set()
    until(lambda: not threads())


def test_a_slow_tier_gives_what_it_has_given_by_the_deadline() -> None:
    tier = Faulty()
    with Engine([tier], timeout_s=20) as engine:
        engine.tiers._chunk = 1  # so that a get is one block
        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        engine.tiers.timeout_s = 0.5
        n = 0

        def slower(keys, records):
            nonlocal n
            n += 1
            time.sleep(0 if n < 3 else 1)
            return records

        tier.on_get = slower
        assert engine.answer(PROMPT) == 8
        assert engine.stats.hits == 2
        assert engine.stats.timeouts == 1


def test_an_interrupt_while_waiting_gives_the_blocks_back() -> None:
    tier, asked = Faulty(), threading.Event()
    with Engine([tier], timeout_s=20) as engine:
        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        let_go = threading.Event()

        def hang(keys, records):
            asked.set()
            let_go.wait(20)
            return records

        tier.on_get = hang
        main = threading.main_thread().ident

        def interrupt() -> None:
            asked.wait()
            time.sleep(0.05)
            signal.pthread_kill(main, signal.SIGINT)

        interrupter = threading.Thread(target=interrupt)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
        try:
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                engine.answer(PROMPT)
            interrupter.join()
        finally:
            signal.signal(signal.SIGINT, before)
        assert engine.pool.stats.used == 0
        assert engine.tiers._flights == {}
        let_go.set()
        until(lambda: engine.stats.is_healthy)
        assert engine.answer(PROMPT) == 16
        engine.close()


def test_a_close_while_a_request_waits_lets_it_go_on() -> None:
    tier, asked, let_go = Faulty(), threading.Event(), threading.Event()
    engine = Engine([tier], timeout_s=30, close_timeout_s=0.1)
    engine.answer(PROMPT)
    engine.flush()
    engine.forget()
    tier.on_get = lambda keys, records: (asked.set(), let_go.wait(30), records)[2]
    results: list[object] = []

    def request() -> None:
        try:
            results.append(engine.answer(PROMPT))
        except kvpool.InvalidArgument as error:
            results.append(str(error))

    thread = threading.Thread(target=request)
    thread.start()
    asked.wait(10)
    began = time.monotonic()
    engine.tiers.close()
    thread.join(10)
    assert time.monotonic() - began < 5
    assert results == [0]
    let_go.set()
    engine.close()


def test_wrong_answers_of_put_and_has_are_only_counted() -> None:
    tier = Faulty()
    tier.inner.put = lambda items: [False] * len(items)  # type: ignore[method-assign]
    with Engine([tier]) as engine:
        engine.answer(PROMPT)
        engine.flush()
        assert engine.stats.not_stored == 4
        assert engine.stats.stored == 0
        tier.on_get = lambda keys, records: records[:-1]
        engine.forget()
        assert engine.answer(PROMPT) == 0
        assert "3 records for 4 keys" in engine.stats.last_error


# ---- many threads, many managers -----------------------------------------------------------------


def test_the_same_prompt_at_the_same_time_is_fetched_once() -> None:
    tier = Faulty()
    with Engine([tier], n_blocks=64, timeout_s=20) as engine:
        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        tier.calls.clear()
        tier.on_get = lambda keys, records: (time.sleep(0.1), records)[1]
        results = []
        workers = [
            threading.Thread(target=lambda: results.append(engine.answer(PROMPT))) for _ in range(8)
        ]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()
        assert results == [16] * 8
        assert [call for call in tier.calls if call[0] == "get"] == [("get", 4)]
        assert engine.stats.hits == 4
        assert engine.pool.stats.cached == 4  # no copies
        engine.close()


def test_nothing_is_findable_before_it_is_verified() -> None:
    """While the second record of a prefix is on its way, the first cannot be hit yet."""
    tier = Faulty()
    with Engine([tier], timeout_s=20) as engine:
        engine.tiers._chunk = 1
        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        seen: list[int] = []

        def look(keys, records):
            seen.append(engine.manager.can_allocate(PROMPT).n_cached)
            return [flipped(record) for record in records] if len(seen) == 4 else records

        tier.on_get = look
        assert engine.answer(PROMPT) == 12
        assert seen == [0, 0, 0, 0]


def test_any_traffic_over_faulty_tiers_only_ever_gives_right_blocks() -> None:
    """Threads with overlapping prompts over a small pool; two tiers that fail in every way."""
    rng = random.Random(5)
    tiers = [Faulty(40_000), Faulty(200_000)]

    def get(keys, records):
        kind = rng.randrange(12)
        if kind == 0:
            raise OSError("the disk is gone")
        if kind == 1:
            return LIES[rng.choice(list(LIES))](keys, records)
        if kind == 2:
            time.sleep(0.02)
        return records

    def put(items):
        if rng.randrange(12) == 0:
            raise OSError("no space")

    for tier in tiers:
        tier.on_get, tier.on_put = get, put
    with Engine(TierStack(tiers, timeout_s=0.01), n_blocks=24) as engine:
        for level in engine.tiers._levels:
            level._failed = lambda text: None  # type: ignore[method-assign]  # no resting
        stems = [[rng.randrange(50) for _ in range(16)] for _ in range(4)]
        failures: list[BaseException] = []

        def is_enough() -> bool:
            stats = engine.tiers.stats()
            refused = sum(sum(s.refused.values()) for s in stats)
            errors = sum(s.errors for s in stats)
            return sum(s.hits for s in stats) > 20 and refused > 5 and errors > 5

        def work(seed: int) -> None:
            r = random.Random(seed)
            try:
                for i in range(5000):  # a busy machine has more of them time out
                    if i >= 120 and is_enough():
                        break
                    stem = r.choice(stems)
                    tail = [r.randrange(3) for _ in range(r.randrange(9))]
                    tokens = stem[: r.randrange(1, 17)] + tail
                    engine.answer(tokens, namespace=r.randrange(2))
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()
        assert failures == []
        assert is_enough()
        engine.close()


# ---- the end -------------------------------------------------------------------------------------


def test_close_writes_what_is_queued() -> None:
    tier = Faulty()
    tier.on_put = lambda items: time.sleep(0.05)
    engine = Engine([tier])
    engine.answer(PROMPT)
    engine.close()
    assert tier.inner.stats().n_records == 4
    assert tier.calls[-1] == ("close", 0)
    assert not threads()
    engine.tiers.close()


def test_a_manager_that_is_dropped_ends_its_tiers() -> None:
    tier = Faulty()
    engine = Engine([tier])
    engine.answer(PROMPT)
    del engine
    gc.collect()
    until(lambda: not threads())
    assert tier.inner.stats().n_records == 4


def test_the_collector_may_drop_a_manager_in_a_thread_of_its_tiers() -> None:
    tier, before = Faulty(), threads()
    engine = Engine([tier])
    finalize = engine.tiers._finalize
    tier.on_put = lambda items: finalize() and None
    engine.answer(PROMPT)
    until(lambda: ("close", 0) in tier.calls, 5)  # it does not wait for itself until the deadline
    until(lambda: threads() <= before)
    assert tier.inner.stats().n_records == 4  # what was queued is written all the same
    engine.manager.close()
    engine.pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_fork_leaves_its_parent_s_tiers_alone() -> None:
    tier = Faulty()
    with Engine([tier]) as engine:
        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                try:
                    engine.manager.allocate(PROMPT)
                except kvpool.Unsupported:
                    engine.tiers.close()
                    code = 0 if ("close", 0) not in tier.calls else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert engine.answer(PROMPT) == 16
        engine.close()


def test_without_tiers_there_are_none() -> None:
    pool = kvpool.Pool(8, B, n_layers=2, n_kv_heads=1, head_dim=2)
    with kvpool.BlockManager(pool) as manager:
        assert manager.tiers is None
    with Engine([]) as engine:
        assert engine.answer(PROMPT) == 0
        assert engine.tiers.stats() == []
        assert not threads()
