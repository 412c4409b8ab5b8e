"""The paged cache: the same bits as one array, shared blocks counted, nothing left behind."""

from __future__ import annotations

import numpy as np
import pytest
from engine_support import run_prompts, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool
from kvpool import PoolFull
from kvpool.engine import paged
from kvpool.engine.cache import ContiguousCache
from kvpool.engine.generate import Generation, generate, prefill
from kvpool.engine.llama import Span
from kvpool.engine.paged import PagedCache, blocks_needed


def shared_prompts() -> list[list[int]]:
    """Prompts that share 0, 50 and all but the last of their tokens, and one repeated."""
    random = np.random.default_rng(0)
    system = random.integers(3, 260, 50).tolist()
    tails = [random.integers(3, 260, n).tolist() for n in (20, 1, 33, 14)]
    prompts = [system + tail for tail in tails]
    return [*prompts, prompts[0], prompts[2][:-1] + [5], random.integers(3, 260, 64).tolist()]


@pytest.fixture(scope="module")
def reference(tiny):
    return run_prompts(tiny, tiny.contiguous(), shared_prompts())


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cache off", "cache on"])
@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
def test_tokens_and_logits_are_those_of_one_array(
    tiny, no_blocks_left, reference, block_tokens, prefix_cache
) -> None:
    cache = PagedCache(no_blocks_left(1000 // block_tokens + 1, block_tokens), prefix_cache)
    tokens, logits = run_prompts(tiny, cache, shared_prompts())
    assert tokens == reference[0]
    assert same_bits(logits, reference[1])
    assert (cache.hit_tokens > 0) == prefix_cache


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
def test_eviction_changes_no_bit(tiny, no_blocks_left, reference, block_tokens) -> None:
    """The smallest pool in which every prompt fits: cached blocks are evicted all the time."""
    longest = max(map(len, shared_prompts()))
    pool = no_blocks_left(blocks_needed(longest, 24, 1, block_tokens), block_tokens)
    tokens, logits = run_prompts(tiny, PagedCache(pool), shared_prompts() * 2)
    assert tokens == reference[0] * 2
    assert same_bits(logits, reference[1] * 2)
    assert pool.stats.evictions > 0


def test_blocks_that_were_generated_are_found_too(tiny, no_blocks_left) -> None:
    """A next turn contains the last answer: its blocks, computed one token at a time, serve the
    prompt that contains them, and nothing changes by it."""
    prompt = shared_prompts()[0]
    cache = PagedCache(no_blocks_left(64))
    answer = generate(tiny.model, cache, prompt, max_tokens=30).samples[0].tokens
    turn = prompt + answer + [7, 8, 9]
    second = generate(tiny.model, cache, turn, max_tokens=10)
    assert second.cached_tokens == (len(prompt) + 29) // 16 * 16 > len(prompt)
    fresh = run_prompts(tiny, tiny.contiguous(), [turn], max_tokens=10)
    again = run_prompts(tiny, cache, [turn], max_tokens=10)
    assert [[second.samples[0].tokens]] == fresh[0] == again[0]
    assert same_bits(fresh[1], again[1])


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 33])
def test_a_prompt_hits_all_its_full_blocks_but_never_its_last_token(
    tiny, no_blocks_left, n, block_tokens
) -> None:
    cache = PagedCache(no_blocks_left(80, block_tokens))
    prompt = list(range(10, 10 + n))
    assert generate(tiny.model, cache, prompt, max_tokens=1).cached_tokens == 0
    again = generate(tiny.model, cache, prompt, max_tokens=1)
    assert again.cached_tokens == (n - 1) // block_tokens * block_tokens
    assert (cache.prompt_tokens, cache.hit_tokens) == (2 * n, again.cached_tokens)


def test_the_example_of_the_contract_hits_what_it_says(tiny, no_blocks_left) -> None:
    """L10.4: B = 4, 8 blocks. A = 1..10; B = 1..8, 99, 98, 97; C = 1..8; D = 5..8, ..."""
    cache = PagedCache(no_blocks_left(8, 4))
    tail = [20, 21, 22]
    prompts = [
        list(range(1, 11)),
        [*range(1, 9), 99, 98, 97],
        list(range(1, 9)),
        [5, 6, 7, 8, *tail],
    ]
    hits = [generate(tiny.model, cache, p, max_tokens=1).cached_tokens for p in prompts]
    assert hits == [0, 8, 4, 0]


@pytest.mark.parametrize("n_prompt", [32, 40, 47])
def test_forks_share_the_prompt_and_own_the_rest(tiny, no_blocks_left, n_prompt) -> None:
    """n = 4: the full blocks of the prompt once, and four times what comes after them."""
    pool = no_blocks_left(64)
    cache = PagedCache(pool)
    result = generate(
        tiny.model, cache, list(range(5, 5 + n_prompt)), n=4, max_tokens=20, temperature=1.0
    )
    assert len({tuple(sample.tokens) for sample in result.samples}) == 4
    shared, end = n_prompt // 16, n_prompt + 19
    assert cache.peak_used == shared + 4 * (-(-end // 16) - shared)
    assert cache.peak_used == blocks_needed(n_prompt, 20, 4, 16)
    assert pool.stats.used == 0


def test_a_pool_of_exactly_blocks_needed_is_enough(tiny, no_blocks_left) -> None:
    for n_prompt, n in ((16, 1), (17, 3), (31, 4)):
        pool = no_blocks_left(blocks_needed(n_prompt, 9, n, 4), 4)
        prompt = list(range(3, 3 + n_prompt))
        generate(tiny.model, PagedCache(pool), prompt, n=n, max_tokens=9, temperature=2.0)
        one_less = no_blocks_left(blocks_needed(n_prompt, 9, n, 4) - 1, 4)
        with pytest.raises(PoolFull):
            generate(tiny.model, PagedCache(one_less), prompt, n=n, max_tokens=9, temperature=2.0)


def test_samples_are_what_each_would_be_alone(tiny, no_blocks_left) -> None:
    prompt = shared_prompts()[0]
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    four, _ = run_prompts(tiny, PagedCache(no_blocks_left(64)), [prompt], n=4, **options)
    apart, _ = run_prompts(tiny, tiny.contiguous(), [prompt], n=4, **options)
    two, _ = run_prompts(tiny, tiny.contiguous(), [prompt], n=2, **options)
    assert four == apart
    assert two[0] == four[0][:2]


def test_a_sample_that_ends_gives_its_blocks_back_at_once(tiny, no_blocks_left) -> None:
    prompt, options = shared_prompts()[0], {"temperature": 1.0, "n": 2, "max_tokens": 40}
    first, second = generate(tiny.model, tiny.contiguous(), prompt, **options).samples
    end = next(i for i, token in enumerate(first.tokens) if token not in second.tokens)
    pool, used = no_blocks_left(200, 1), []
    generate(
        tiny.model,
        PagedCache(pool),
        prompt,
        stop_tokens=[first.tokens[end]],
        check=lambda: used.append(pool.stats.used),
        **options,
    )
    assert used[-1] == len(prompt) + 38  # the second alone, before its last step


# ---- one sequence at a time ---------------------------------------------------------------------


def test_a_fork_copies_a_block_only_when_it_writes_into_a_shared_one(tiny, no_blocks_left) -> None:
    pool = no_blocks_left(8)
    parent = PagedCache(pool).open(list(range(20)))
    prefill(tiny.model, parent)
    child = parent.fork()
    assert parent.table.tolist() == child.table.tolist()
    assert pool.stats.used == 2
    before = pool.block(int(parent.table[1])).copy()
    child.append(99)
    tiny.model.forward([Span(child, 1)])
    child.commit(1)
    assert parent.table[0] == child.table[0]  # full: shared for ever
    assert parent.table[1] != child.table[1]  # partial: copied
    assert pool.fill(child.table[1]) == 5
    assert np.array_equal(pool.block(int(parent.table[1]))[:, :, :, :4], before[:, :, :, :4])
    old = int(parent.table[1])
    parent.append(98)  # the only holder now: writes in place
    assert int(parent.table[1]) == old
    parent.free()
    child.free()


def test_a_hash_is_findable_only_after_its_values_are_written(tiny, no_blocks_left) -> None:
    pool = no_blocks_left(8)
    tokens = list(range(40))
    first, second = (int(h) for h in kvpool.block_hashes(tokens, 16))
    sequence = PagedCache(pool).open(tokens)
    tiny.model.forward([Span(sequence, 16)])
    assert pool.lookup(first) is None
    sequence.commit(16)
    assert pool.lookup(first) == sequence.table[0]
    pool.unref(int(sequence.table[0]))
    assert pool.lookup(second) is None
    assert [pool.fill(int(block)) for block in sequence.table] == [16, 0, 0]
    sequence.free()


def test_equal_blocks_of_two_sequences_are_registered_once(tiny, no_blocks_left) -> None:
    pool = no_blocks_left(8)
    cache = PagedCache(pool)
    one, two = cache.open(list(range(16))), cache.open(list(range(16)))
    for sequence in (one, two):
        prefill(tiny.model, sequence)
        sequence.free()
    assert pool.stats[:3] == (7, 0, 1)  # the second stayed private and is free again


def test_a_full_pool_changes_nothing(tiny, no_blocks_left) -> None:
    pool = no_blocks_left(4)
    cache = PagedCache(pool)
    first = cache.open(list(range(33)))
    prefill(tiny.model, first)
    counts = (cache.prompt_tokens, cache.hit_tokens)
    before, refs = pool.stats, pool.refs(range(4)).tolist()
    with pytest.raises(PoolFull):
        cache.open([*range(33), *range(100, 120)])  # two hits, two blocks short by one
    assert (pool.stats, pool.refs(range(4)).tolist()) == (before, refs)
    assert (cache.prompt_tokens, cache.hit_tokens) == counts
    child, grandchild = first.fork(), first.fork()
    child.append(1)  # copies the partial block: the last free one
    before = pool.stats
    with pytest.raises(PoolFull):
        grandchild.append(1)
    assert pool.stats == before
    assert grandchild.tokens == list(range(33))
    for sequence in (first, child, grandchild):
        sequence.free()


def test_a_sequence_loses_its_end_first(tiny, no_blocks_left) -> None:
    """Blocks are freed last to first, so the next prompt evicts the end of the prefix."""
    pool = no_blocks_left(4)
    cache = PagedCache(pool)
    generate(tiny.model, cache, list(range(64)), max_tokens=1)
    assert pool.stats.cached == 4
    generate(tiny.model, cache, list(range(100, 117)), max_tokens=1)  # two blocks
    assert pool.stats.evictions == 2
    kept = cache.open(list(range(64)))
    assert kept.n_computed == 32
    kept.free()
    kept.free()  # again: nothing


A, B, C, D = ([*range(n, n + 16)] for n in (20, 40, 60, 80))


@pytest.mark.parametrize(
    ("collide", "prompts", "n_hits"),
    [
        # every block has the same hash: only the third prompt is what the first one was
        (lambda piece: 12345, [[*A, 1], [*B, 1], [*A, 1]], 16),
        # a block is named without what stands before it: B C is not A C, though B and C are known
        (lambda piece: int(piece[0]) + 1, [[*A, *C, 1], [*B, *D, 1], [*B, *C, 1]], 16),
    ],
    ids=["all blocks", "equal blocks behind different ones"],
)
def test_a_collision_of_the_hash_is_no_hit(
    tiny, no_blocks_left, monkeypatch, collide, prompts, n_hits
) -> None:
    """The hash of the format can be forged; a hit counts only for the same prefix."""

    def forged(tokens, block_tokens, parent=0):
        pieces = np.asarray(tokens)[: len(tokens) // block_tokens * block_tokens]
        return np.array([collide(p) for p in pieces.reshape(-1, block_tokens)], dtype=np.uint64)

    monkeypatch.setattr(paged, "block_hashes", forged)
    cache = PagedCache(no_blocks_left(32))
    tokens, logits = run_prompts(tiny, cache, prompts, max_tokens=8)
    fresh = run_prompts(tiny, tiny.contiguous(), prompts, max_tokens=8)
    assert tokens == fresh[0]
    assert same_bits(logits, fresh[1])
    assert cache.hit_tokens == n_hits


def test_an_empty_prompt_is_refused(no_blocks_left) -> None:
    with pytest.raises(kvpool.InvalidArgument, match="at least one token"):
        PagedCache(no_blocks_left(2)).open([])


# ---- whatever happens, no block stays in use ----------------------------------------------------


class Boom(Exception):
    pass


@pytest.mark.parametrize("after", range(12))
@pytest.mark.parametrize("where", ["check", "on_token", "forward", "logits"])
def test_an_exception_anywhere_leaves_no_block_in_use(
    tiny, no_blocks_left, monkeypatch, where, after
) -> None:
    calls = 0

    def explode(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > after:
            raise Boom
        return original(*args, **kwargs)

    options = {}
    if where in ("forward", "logits"):
        original = getattr(type(tiny.model), where).__get__(tiny.model)
        monkeypatch.setattr(tiny.model, where, explode)
    else:
        original = lambda *args: None  # noqa: E731
        options[where] = explode
    result = Generation()
    prompt = list(range(70))
    with pytest.raises(Boom):
        generate(
            tiny.model, PagedCache(no_blocks_left(64, 8)), prompt, n=3, result=result, **options
        )
    assert result.prompt_tokens == 70


def test_a_pool_that_runs_full_in_the_middle_leaves_no_block_in_use(tiny, no_blocks_left) -> None:
    result = Generation()
    with pytest.raises(PoolFull):
        generate(tiny.model, PagedCache(no_blocks_left(4, 4)), [3, 4, 5], n=2, result=result)
    assert result.n_tokens > 4


OPERATION = st.tuples(st.sampled_from(["open", "append", "fork", "free"]), st.integers(0, 2**16))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([1, 2, 5, 16]), st.lists(OPERATION, max_size=40), st.integers(3, 12))
def test_any_history_reads_what_one_array_reads(block_tokens, operations, n_blocks) -> None:
    """Sequences live and die side by side; each position holds a value made from its prefix."""
    pool = kvpool.Pool(n_blocks, block_tokens=block_tokens, n_layers=2, n_kv_heads=1, head_dim=2)
    cache = PagedCache(pool)
    array = ContiguousCache(n_layers=2, n_kv_heads=1, head_dim=2, max_tokens=600)
    live: list = []

    def compute(sequence) -> None:
        start, n = sequence.n_computed, len(sequence.tokens) - sequence.n_computed
        prefix = np.cumsum(np.asarray(sequence.tokens) % 97 + 1)[start:]
        for layer in range(2):
            kv = np.multiply.outer(prefix, np.arange(1, 5) + layer).reshape(n, 2, 1, 2)
            sequence.write(layer, kv.astype(np.float32))
        sequence.commit(n)

    for name, number in operations:
        try:
            if name == "open":
                tokens = [number % 3] * (number % 23 + 1) + [number]
                live.append((cache.open(tokens), array.open(tokens)))
            elif live:
                pair = live[number % len(live)]
                if name == "append":
                    pair[0].append(number)
                    pair[1].append(number)
                elif name == "fork":
                    live.append((pair[0].fork(), pair[1].fork()))
                else:
                    live.remove(pair)
                    for sequence in pair:
                        sequence.free()
        except PoolFull:
            pass
        for pair in live:
            for sequence in pair:
                if sequence.n_computed < len(sequence.tokens):
                    compute(sequence)
            for layer in range(2):
                outs = np.empty((2, 2, 1, 600, 2), dtype=np.float32)
                for sequence, out in zip(pair, outs, strict=True):
                    sequence.read(layer, sequence.n_computed, out)
                assert np.array_equal(outs[0], outs[1])
        pool.check()
    held = {int(block) for sequence, _ in live for block in sequence.table}
    assert pool.stats.used == len(held)
    for sequence, _ in live:
        sequence.free()
    assert pool.stats.used == 0
