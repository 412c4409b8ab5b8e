"""The paged cache: the same bits as one array, shared blocks counted, nothing left behind."""

from __future__ import annotations

import numpy as np
import pytest
from engine_support import paged, run_prompts, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool
from kvpool import PoolFull
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


@pytest.mark.parametrize("prefix_cache", ["none", "hash"])
@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
def test_tokens_and_logits_are_those_of_one_array(
    tiny, no_blocks_left, reference, block_tokens, prefix_cache
) -> None:
    cache = paged(no_blocks_left(1000 // block_tokens + 1, block_tokens), prefix_cache)
    tokens, logits = run_prompts(tiny, cache, shared_prompts())
    assert tokens == reference[0]
    assert same_bits(logits, reference[1])
    assert (cache.manager.stats.hit_tokens > 0) == (prefix_cache == "hash")


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
def test_eviction_changes_no_bit(tiny, no_blocks_left, reference, block_tokens) -> None:
    """The smallest pool in which every prompt fits: cached blocks are evicted all the time."""
    longest = max(map(len, shared_prompts()))
    pool = no_blocks_left(blocks_needed(longest, 24, 1, block_tokens), block_tokens)
    tokens, logits = run_prompts(tiny, paged(pool), shared_prompts() * 2)
    assert tokens == reference[0] * 2
    assert same_bits(logits, reference[1] * 2)
    assert pool.stats.evictions > 0


def test_blocks_that_were_generated_are_found_too(tiny, no_blocks_left) -> None:
    """A next turn contains the last answer: its blocks, computed one token at a time, serve the
    prompt that contains them, and nothing changes by it."""
    prompt = shared_prompts()[0]
    cache = paged(no_blocks_left(64))
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
    cache = paged(no_blocks_left(80, block_tokens))
    prompt = list(range(10, 10 + n))
    assert generate(tiny.model, cache, prompt, max_tokens=1).cached_tokens == 0
    again = generate(tiny.model, cache, prompt, max_tokens=1)
    assert again.cached_tokens == (n - 1) // block_tokens * block_tokens
    stats = cache.manager.stats
    assert (stats.prompt_tokens, stats.hit_tokens) == (2 * n, again.cached_tokens)


def test_the_example_of_the_contract_hits_what_it_says(tiny, no_blocks_left) -> None:
    """L10.4: B = 4, 8 blocks. A = 1..10; B = 1..8, 99, 98, 97; C = 1..8; D = 5..8, ..."""
    cache = paged(no_blocks_left(8, 4))
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
    cache = paged(pool)
    result = generate(
        tiny.model, cache, list(range(5, 5 + n_prompt)), n=4, max_tokens=20, temperature=1.0
    )
    assert len({tuple(sample.tokens) for sample in result.samples}) == 4
    shared, end = n_prompt // 16, n_prompt + 19
    assert cache.peak_used == shared + 4 * (-(-end // 16) - shared)
    assert cache.peak_used == blocks_needed(n_prompt, 20, 4, 16) == cache.manager.stats.peak_used
    assert pool.stats.used == 0


def test_a_pool_of_exactly_blocks_needed_is_enough(tiny, no_blocks_left) -> None:
    for n_prompt, n in ((16, 1), (17, 3), (31, 4)):
        pool = no_blocks_left(blocks_needed(n_prompt, 9, n, 4), 4)
        prompt = list(range(3, 3 + n_prompt))
        generate(tiny.model, paged(pool), prompt, n=n, max_tokens=9, temperature=2.0)
        one_less = no_blocks_left(blocks_needed(n_prompt, 9, n, 4) - 1, 4)
        with pytest.raises(PoolFull):
            generate(tiny.model, paged(one_less), prompt, n=n, max_tokens=9, temperature=2.0)


def test_samples_are_what_each_would_be_alone(tiny, no_blocks_left) -> None:
    prompt = shared_prompts()[0]
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    four, _ = run_prompts(tiny, paged(no_blocks_left(64)), [prompt], n=4, **options)
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
        paged(pool),
        prompt,
        stop_tokens=[first.tokens[end]],
        check=lambda: used.append(pool.stats.used),
        **options,
    )
    assert used[-1] == len(prompt) + 38  # the second alone, before its last step


# ---- without a model: each position holds a value made from its prefix --------------------------

SMALL = {"n_layers": 2, "n_kv_heads": 1, "head_dim": 2, "max_tokens": 600}


def compute(sequence) -> None:
    """Writes and commits what is not computed yet."""
    start, n = sequence.n_computed, len(sequence.tokens) - sequence.n_computed
    if n == 0:
        return
    prefix = np.cumsum(np.asarray(sequence.tokens) % 97 + 1)[start:]
    for layer in range(2):
        kv = np.multiply.outer(prefix, np.arange(1, 5) + layer).reshape(n, 2, 1, 2)
        sequence.write(layer, kv.astype(np.float32))
    sequence.commit(n)


def check_that_they_read_the_same(pair) -> None:
    for sequence in pair:
        compute(sequence)
    for layer in range(2):
        outs = np.empty((2, 2, 1, 600, 2), dtype=np.float32)
        for sequence, out in zip(pair, outs, strict=True):
            sequence.read(layer, sequence.n_computed, out)
        assert np.array_equal(outs[0], outs[1])


# ---- one sequence at a time ---------------------------------------------------------------------


def test_a_fork_copies_a_block_only_when_it_writes_into_a_shared_one(tiny, no_blocks_left) -> None:
    pool = no_blocks_left(8)
    parent = paged(pool).open(list(range(20)))
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
    sequence = paged(pool).open(tokens)
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
    cache = paged(pool)
    one, two = cache.open(list(range(16))), cache.open(list(range(16)))
    for sequence in (one, two):
        prefill(tiny.model, sequence)
        sequence.free()
    assert pool.stats[:3] == (7, 0, 1)  # the second stayed private and is free again


def test_a_full_pool_changes_nothing(tiny, no_blocks_left) -> None:
    pool = no_blocks_left(4)
    cache = paged(pool)
    first = cache.open(list(range(33)))
    prefill(tiny.model, first)
    counts = cache.manager.stats[:2]  # tokens of prompts, and of hits
    before, refs = pool.stats, pool.refs(range(4)).tolist()
    with pytest.raises(PoolFull):
        cache.open([*range(33), *range(100, 120)])  # two hits, two blocks short by one
    assert (pool.stats, pool.refs(range(4)).tolist()) == (before, refs)
    assert cache.manager.stats[:2] == counts
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
    cache = paged(pool)
    generate(tiny.model, cache, list(range(64)), max_tokens=1)
    assert pool.stats.cached == 4
    generate(tiny.model, cache, list(range(100, 117)), max_tokens=1)  # two blocks
    assert pool.stats.evictions == 2
    kept = cache.open(list(range(64)))
    assert kept.n_computed == 32
    kept.free()
    kept.free()  # again: nothing


# Two blocks of 16 tokens with the same name. The format's hash can be forged by whoever chooses the
# prompt; tests/manager/fnv_forger.py says how.
HONEST = [
    *(15595, 38839, 35666, 8547, 24245, 39578, 31067, 41007),
    *(38066, 4294, 39688, 862, 30751, 16997, 36096, 15357),
]
FORGED = [
    *(15469, 19876, 6761, 47265, 25956, 31383, 10156, 5904),
    *(4359, 3590, 13320, 13832, 826, 4367, 28447, 4664),
]


@pytest.mark.parametrize("behind", [[], list(range(16))], ids=["the block", "an equal one behind"])
@pytest.mark.parametrize("first", [HONEST, FORGED], ids=["honest first", "forged first"])
def test_a_forged_name_is_no_hit(first, behind) -> None:
    """A hit counts only for the same prefix, not for one with the same name."""
    second = FORGED if first is HONEST else HONEST
    prompts = [[*block, *behind, 1] for block in (first, second, first)]
    names = [kvpool.block_hashes(prompt, 16).tolist() for prompt in prompts]
    assert names[0] == names[1]
    pool = kvpool.Pool(8, block_tokens=16, n_layers=2, n_kv_heads=1, head_dim=2)
    cache, array = paged(pool), ContiguousCache(**SMALL)
    hits = []
    for prompt in prompts:
        pair = cache.open(prompt), array.open(prompt)
        hits.append(pair[0].n_computed)
        check_that_they_read_the_same(pair)
        for sequence in pair:
            sequence.free()
    assert hits == [0, 0, 16 + len(behind)]
    assert cache.manager.stats.collisions == len(names[0])


def test_an_empty_prompt_is_refused(no_blocks_left) -> None:
    with pytest.raises(kvpool.InvalidArgument, match="at least one token"):
        paged(no_blocks_left(2)).open([])


def test_a_freed_sequence_writes_nowhere(tiny, no_blocks_left) -> None:
    """Its blocks may be somebody else's by now."""
    pool = no_blocks_left(4)
    sequence = paged(pool).open([1, 2, 3])
    prefill(tiny.model, sequence)
    sequence.free()
    before = pool.slab.tobytes()
    cfg = tiny.file.config
    with pytest.raises(IndexError):
        sequence.write(0, np.ones((1, 2, cfg.n_kv_heads, cfg.head_dim), dtype=np.float32))
    assert pool.slab.tobytes() == before
    for use in (lambda: sequence.append(4), sequence.fork, lambda: sequence.commit(1)):
        with pytest.raises(kvpool.InvalidArgument, match="freed"):
            use()
    assert (sequence.tokens, sequence.n_computed) == ([], 0)


def test_commit_takes_no_more_than_there_is(no_blocks_left) -> None:
    sequence = paged(no_blocks_left(2)).open([1, 2, 3])
    with pytest.raises(kvpool.InvalidArgument):
        sequence.commit(4)
    assert sequence.n_computed == 0
    sequence.free()


def test_caches_of_one_manager_find_each_others_blocks(tiny, no_blocks_left) -> None:
    manager = kvpool.BlockManager(no_blocks_left(8))
    first, second = PagedCache(manager), PagedCache(manager)
    generate(tiny.model, first, list(range(33)), max_tokens=20)
    assert generate(tiny.model, second, list(range(33)), max_tokens=1).cached_tokens == 32
    assert (first.peak_used, second.peak_used) == (4, 3)


def test_a_manager_that_is_closed_has_freed_everything(tiny, no_blocks_left) -> None:
    pool = no_blocks_left(4)
    cache = paged(pool)
    sequence = cache.open(list(range(20)))
    prefill(tiny.model, sequence)
    cache.manager.close()
    assert pool.stats.used == 0
    sequence.free()
    with pytest.raises(kvpool.InvalidArgument, match="closed"):
        cache.open([1])


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
        generate(tiny.model, paged(no_blocks_left(64, 8)), prompt, n=3, result=result, **options)
    assert result.prompt_tokens == 70


def test_a_pool_that_runs_full_in_the_middle_leaves_no_block_in_use(tiny, no_blocks_left) -> None:
    result = Generation()
    with pytest.raises(PoolFull):
        generate(tiny.model, paged(no_blocks_left(4, 4)), [3, 4, 5], n=2, result=result)
    assert result.n_tokens > 4


OPERATION = st.tuples(st.sampled_from(["open", "append", "fork", "free"]), st.integers(0, 2**16))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([1, 2, 5, 16]), st.lists(OPERATION, max_size=40), st.integers(3, 12))
def test_any_history_reads_what_one_array_reads(block_tokens, operations, n_blocks) -> None:
    """Sequences live and die side by side."""
    pool = kvpool.Pool(n_blocks, block_tokens=block_tokens, n_layers=2, n_kv_heads=1, head_dim=2)
    cache = paged(pool)
    array = ContiguousCache(**SMALL)
    live: list = []

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
            check_that_they_read_the_same(pair)
        cache.manager.check()
    held = {int(block) for sequence, _ in live for block in sequence.table}
    assert pool.stats.used == len(held)
    for sequence, _ in live:
        sequence.free()
    assert pool.stats.used == 0
