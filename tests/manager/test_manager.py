"""BlockManager and Sequence, one behaviour a test: the chapter's example, hits, copies, cuts,
tables, reset, evict, pin, import and adopt."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

import kvpool

B = 4
MakeManager = Callable[..., kvpool.BlockManager]


def make(n_blocks: int = 8, block_tokens: int = B, **options: object) -> kvpool.BlockManager:
    pool = kvpool.Pool(n_blocks, block_tokens=block_tokens, n_layers=2, n_kv_heads=2, head_dim=3)
    return kvpool.BlockManager(pool, **options)  # type: ignore[arg-type]


@pytest.fixture
def mgr() -> kvpool.BlockManager:
    return make()


def run(mgr: kvpool.BlockManager, tokens: object, **request: object) -> int:
    """A whole request; the tokens it found computed."""
    with mgr.allocate(tokens, **request) as seq:  # type: ignore[arg-type]
        n = seq.n_cached
        seq.commit()
    mgr.check()
    return n


# ---- the chapter's example -----------------------------------------------------------------------


def test_the_example_of_the_chapter(mgr: kvpool.BlockManager) -> None:
    """L10.4: B = 4 and 8 blocks."""
    a = mgr.allocate(range(1, 11))
    assert (a.n_blocks, a.n_cached) == (3, 0)
    a.commit()
    a.free()
    assert mgr.pool.stats == (6, 0, 2, 0)
    b = mgr.allocate([1, 2, 3, 4, 5, 6, 7, 8, 99, 98, 97])
    assert b.n_cached == 8
    assert mgr.stats.hit_rate == pytest.approx(8 / 21)
    b.free()
    assert run(mgr, range(1, 9)) == 4  # C: the last token is always computed
    assert run(mgr, [5, 6, 7, 8, 1, 2, 3, 4]) == 0  # D: the same tokens at another place


def test_the_last_block_is_hit_only_when_it_may_be(mgr: kvpool.BlockManager) -> None:
    run(mgr, range(8))
    assert mgr.can_allocate(range(8)).n_cached == 4
    assert mgr.can_allocate(range(8), match_last=True).n_cached == 8
    with mgr.allocate(range(8), match_last=True) as seq:
        assert seq.n_cached == 8 == seq.n_computed


@pytest.mark.parametrize(("limit", "hit"), [(None, 12), (12, 12), (11, 8), (4, 4), (3, 0), (0, 0)])
def test_max_cached_tokens(mgr: kvpool.BlockManager, limit: int | None, hit: int) -> None:
    run(mgr, range(13))
    assert mgr.can_allocate(range(13), max_cached_tokens=limit).n_cached == hit
    assert run(mgr, range(13), max_cached_tokens=limit) == hit


def test_nothing_is_findable_before_its_commit(mgr: kvpool.BlockManager) -> None:
    first = mgr.allocate(range(9))
    assert mgr.can_allocate(range(9)).n_cached == 0
    first.commit(7)
    assert mgr.can_allocate(range(9)).n_cached == 4
    first.commit(3)  # fewer than before: nothing changes
    assert first.n_computed == 7
    first.free()
    assert run(mgr, range(9)) == 4  # the second block died with its sequence


def test_an_aborted_sequence_leaves_nothing(mgr: kvpool.BlockManager) -> None:
    mgr.allocate(range(20)).free()
    assert mgr.pool.stats == (8, 0, 0, 0)


def test_a_chain_loses_its_end_first(mgr: kvpool.BlockManager) -> None:
    run(mgr, range(17))  # 4 cached, 4 free
    with mgr.allocate([100 + i for i in range(24)]) as seq:  # 6 blocks: evicts 2
        assert seq.n_cached == 0
        assert mgr.can_allocate(range(17)).n_cached == 8
    assert mgr.pool.stats.evictions == 2


def test_private_blocks_are_reused_before_a_cached_one_is_evicted(
    mgr: kvpool.BlockManager,
) -> None:
    run(mgr, range(5))
    for _ in range(10):
        mgr.allocate([50 + i for i in range(28)]).free()  # all 7 others
    assert mgr.can_allocate(range(5)).n_cached == 4
    assert mgr.pool.stats.evictions == 0


def test_a_hit_at_the_eviction_end_of_a_full_pool_survives(mgr: kvpool.BlockManager) -> None:
    with mgr.allocate(range(4)) as seq:
        mgr.pool.block(seq.blocks[0])[:] = 3.0
        seq.commit()
    run(mgr, [50 + i for i in range(28)])  # all 8 cached, that block the next to go
    with mgr.allocate([*range(4), 9, 9, 9, 9, 9]) as seq:
        assert seq.n_cached == 4
        assert (mgr.pool.block(seq.blocks[0]) == 3.0).all()
        assert mgr.pool.stats == (0, 3, 5, 2)


def test_hits_that_are_cached_count_as_taken(mgr: kvpool.BlockManager) -> None:
    run(mgr, range(16))
    other = mgr.allocate([50 + i for i in range(12)])  # 1 free, 4 cached
    before = mgr.pool.stats
    assert mgr.can_allocate([*range(16), 1, 1, 1, 1]) == (True, 16, 1)
    assert mgr.can_allocate([*range(16), *[1] * 5]) == (False, 16, 2)
    with pytest.raises(kvpool.PoolFull, match=r"6 blocks needed \(2 new, 4 cached.*5 are"):
        mgr.allocate([*range(16), *[1] * 5])
    assert mgr.pool.stats == before
    assert mgr.stats.refused == 1
    other.free()


def test_a_refused_allocate_leaves_the_eviction_order(mgr: kvpool.BlockManager) -> None:
    run(mgr, range(4))
    run(mgr, range(10, 14))
    live = mgr.allocate([50 + i for i in range(20)])  # 1 free, 2 cached
    with pytest.raises(kvpool.PoolFull):
        mgr.allocate([*range(4), *[1] * 12])  # would have hit the older of the two
    with mgr.allocate([60] * 8):  # evicts the older one
        assert mgr.can_allocate([*range(4), 1]).n_cached == 0
        assert mgr.can_allocate([*range(10, 14), 1]).n_cached == 4
    live.free()


def test_the_watermark_is_left_for_running_sequences() -> None:
    mgr = make(watermark=3)
    assert mgr.watermark == 3
    assert mgr.can_allocate(range(21)) == (False, 0, 6)
    seq = mgr.allocate(range(20))
    assert seq.append([0] * 12) == []
    assert mgr.pool.stats.free == 0
    seq.free()


def test_without_a_prefix_cache_every_block_is_private() -> None:
    mgr = make(prefix_cache="none")
    assert mgr.prefix_cache == "none"
    run(mgr, range(9))
    assert run(mgr, range(9)) == 0
    assert mgr.pool.stats == (8, 0, 0, 0)
    assert mgr.stats.stored == 0


def test_equal_blocks_computed_twice(mgr: kvpool.BlockManager) -> None:
    a, b = mgr.allocate(range(8)), mgr.allocate(range(8))
    mgr.commit([a, b])
    assert set(a.blocks).isdisjoint(b.blocks)
    assert (mgr.stats.stored, mgr.stats.duplicates, mgr.stats.collisions) == (2, 2, 0)
    b.free()
    assert mgr.pool.stats == (6, 2, 0, 0)  # b's were private
    a.free()
    assert mgr.pool.stats == (6, 0, 2, 0)


# ---- preempt and resume --------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_preempt_and_resume(mgr: kvpool.BlockManager, k: int, extra: int) -> None:
    """At k * B - 1, k * B, k * B + 1 tokens: what was computed comes back, but the last token."""
    n = k * B + extra
    tokens = list(range(n))
    seq = mgr.allocate(tokens)
    seq.commit()
    seq.free()
    before = mgr.stats
    again = mgr.allocate(tokens, resumed=True)
    assert again.n_cached == (n - 1) // B * B
    assert (mgr.stats.prompt_tokens, mgr.stats.hit_tokens) == (
        before.prompt_tokens,
        before.hit_tokens,
    )
    again.commit()
    again.append(7)
    assert again.tokens.tolist() == [*tokens, 7]
    assert again.n_blocks == -(-(n + 1) // B)
    mgr.check()
    again.free()


# ---- append, fork, truncate ----------------------------------------------------------------------


def test_a_fork_copies_only_the_block_it_writes(mgr: kvpool.BlockManager) -> None:
    parent = mgr.allocate(range(10))
    for i, block in enumerate(parent.blocks):
        mgr.pool.block(block)[:] = i
    parent.commit()
    child = parent.fork()
    assert child.blocks.tolist() == parent.blocks.tolist()
    ((source, destination),) = child.append(10)
    assert source == parent.blocks[2]
    assert destination == child.blocks[2]
    assert (mgr.pool.block(destination) == 2.0).all()
    assert mgr.pool.fill(destination) == 2
    assert child.blocks[:2].tolist() == parent.blocks[:2].tolist()
    assert parent.append(11) == []  # alone with its block now
    assert mgr.stats.copies == 1
    mgr.free([parent, child])


def test_of_several_forks_in_a_step_one_keeps_the_block(mgr: kvpool.BlockManager) -> None:
    first = mgr.allocate(range(6))
    seqs = [first, first.fork(), first.fork()]
    copies = mgr.append(seqs, [1, 2, 3])
    assert len(copies) == 2
    assert {source for source, _ in copies} == {1}
    assert len({s.blocks[1] for s in seqs}) == 3
    mgr.free(seqs)


def test_a_step_that_does_not_fit_changes_nothing(mgr: kvpool.BlockManager) -> None:
    seqs = [mgr.allocate([i] * 4) for i in range(6)]
    before = mgr.pool.stats
    with pytest.raises(kvpool.PoolFull, match="6 blocks needed, 2 are free or cached"):
        mgr.append(seqs, [0] * 6)
    assert [len(s) for s in seqs] == [4] * 6
    assert mgr.pool.stats == before
    mgr.check()
    mgr.free(seqs)


def test_append_many_tokens_at_once(mgr: kvpool.BlockManager) -> None:
    seq = mgr.allocate([])
    assert (len(seq), seq.n_blocks, seq.blocks.tolist()) == (0, 0, [])
    assert bool(seq)
    assert seq.append(np.arange(9, dtype=np.uint32)) == []
    assert seq.append([]) == []
    assert seq.append(9) == []
    assert (seq.tokens.tolist(), seq.n_blocks) == (list(range(10)), 3)
    assert seq.tokens.dtype == seq.blocks.dtype == np.uint32
    seq.free()


def test_truncate_gives_blocks_back_and_never_writes_a_findable_one(
    mgr: kvpool.BlockManager,
) -> None:
    seq = mgr.allocate(range(12))
    seq.commit()
    old = seq.blocks.tolist()
    seq.truncate(6)
    assert (len(seq), seq.n_computed, seq.blocks.tolist()) == (6, 6, old[:2])
    assert mgr.pool.stats == (5, 2, 1, 0)  # the third is cached
    copies = seq.append([50, 51])
    assert copies == [(old[1], seq.blocks[1])]
    seq.commit()
    seq.free()
    assert run(mgr, range(13)) == 12  # all three of the first are still found
    assert run(mgr, [*range(6), 50, 51, 0]) == 8


def test_speculation_leaves_no_trace_of_what_was_rejected(mgr: kvpool.BlockManager) -> None:
    seq = mgr.allocate(range(6))
    seq.commit()
    seq.append([70, 71, 72])
    seq.truncate(6)
    seq.append([6, 7, 8])
    seq.commit()
    seq.free()
    assert mgr.can_allocate([*range(6), 70, 71, 0]).n_cached == 4
    assert mgr.can_allocate(range(9)).n_cached == 8


# ---- for kernels ---------------------------------------------------------------------------------


def test_block_tables(mgr: kvpool.BlockManager) -> None:
    seqs = [mgr.allocate(range(9)), mgr.allocate([]), mgr.allocate([1])]
    table = mgr.block_tables(seqs)
    assert table.dtype == np.int32
    assert table.tolist() == [[0, 1, 2], [-1, -1, -1], [3, -1, -1]]
    assert mgr.block_tables([]).shape == (0, 0)
    assert mgr.block_tables(seqs, scale=4)[0].tolist() == [0, 4, 8]
    buffer = np.full((5, 6), 77, np.int32)
    result = mgr.block_tables(seqs, out=buffer[1:4], scale=2)
    assert result.base is buffer
    assert buffer[1].tolist() == [0, 2, 4, -1, -1, -1]
    assert (buffer[[0, 4]] == 77).all()
    mgr.free(seqs)


def test_slot_mapping(mgr: kvpool.BlockManager) -> None:
    a, b = mgr.allocate(range(6)), mgr.allocate(range(10, 15))
    a.truncate(3)
    a.append([1, 1, 1])  # blocks 0, and whichever came next
    slots = [int(a.blocks[i // B]) * B + i % B for i in range(6)]
    assert a.slot_mapping().tolist() == slots
    assert a.slot_mapping(4).tolist() == slots[4:]
    assert a.slot_mapping(5, 3, pad=-7).tolist() == [slots[5], -7, -7]
    assert a.slot_mapping(100, 2).tolist() == [-1, -1]
    assert a.slot_mapping(100).tolist() == []
    both = mgr.slot_mapping([a, b], [4, 0], [2, 1])
    assert both.dtype == np.int64
    assert both.tolist() == [*slots[4:], int(b.blocks[0]) * B]
    assert mgr.slot_mapping([a, b], mgr.seq_lens([a, b]) - 1, 1).tolist() == [
        slots[5],
        int(b.blocks[1]) * B,
    ]
    assert mgr.slot_mapping([a, b], 5, 2, pad=0).tolist() == [slots[5], 0, 0, 0]
    mgr.free([a, b])


def test_slots_of_a_large_pool_exceed_32_bits() -> None:
    """16 GiB of address space, of which no page is touched."""
    try:
        pool = kvpool.Pool(2**12 + 1, block_tokens=2**20, n_layers=1, n_kv_heads=1, head_dim=1)
    except MemoryError:
        pytest.skip("the system does not give out so much address space")
    pool.alloc(2**12)
    mgr = kvpool.BlockManager(pool)
    with mgr.allocate([1, 2]) as seq:
        assert seq.blocks.tolist() == [2**12]
        assert seq.slot_mapping().tolist() == [2**32, 2**32 + 1]
        assert mgr.slot_mapping([seq], 1, 1).tolist() == [2**32 + 1]


# ---- reset, evict, namespaces, pin ---------------------------------------------------------------


def test_reset_ends_hits_and_running_sequences_go_on(mgr: kvpool.BlockManager) -> None:
    running = mgr.allocate(range(9))
    running.commit(4)
    run(mgr, range(20, 25))
    mgr.reset()
    assert mgr.stats.n_findable == 0
    assert mgr.pool.stats == (5, 3, 0, 0)
    running.append(9)
    running.commit()
    assert mgr.can_allocate(range(9)).n_cached == 0
    running.free()
    assert mgr.pool.stats == (8, 0, 0, 0)
    assert run(mgr, range(9)) == 0
    assert run(mgr, range(9)) == 8


def test_reset_of_one_namespace_leaves_the_others(mgr: kvpool.BlockManager) -> None:
    mine, other = 2**64 - 1, kvpool.namespace(model="m")
    for namespace in (0, mine, other):
        assert run(mgr, range(5), namespace=namespace) == 0
    for namespace in (0, mine, other):
        assert mgr.can_allocate(range(5), namespace=namespace).n_cached == 4
    mgr.reset(namespace=mine)
    mgr.reset(namespace=12345)  # nothing was ever computed under it
    assert [mgr.can_allocate(range(5), namespace=n).n_cached for n in (0, mine, other)] == [4, 0, 4]
    with mgr.allocate([1], namespace=mine) as seq:
        assert seq.namespace == mine
        assert seq.fork().namespace == mine  # and it is dropped, with a warning elsewhere tested


def test_evict(mgr: kvpool.BlockManager) -> None:
    held = mgr.allocate(range(9))
    held.commit()
    mgr.evict(held.blocks)  # the third is not findable: left alone
    assert mgr.stats.n_findable == 0
    assert mgr.pool.stats.used == 3
    held.free()
    assert mgr.pool.stats == (8, 0, 0, 0)
    mgr.evict(range(8))
    mgr.evict([])
    assert mgr.stats.removed == 2


def test_pin_keeps_a_prefix_from_eviction(mgr: kvpool.BlockManager) -> None:
    with mgr.allocate(range(10)) as seq:
        seq.commit()
        seq.pin(0.2)
    assert (mgr.stats.n_pins, mgr.stats.n_seqs, mgr.pool.stats.used) == (1, 0, 2)
    assert not mgr.can_allocate([99] * 28).fits
    mgr.allocate([99] * 24).free()
    assert mgr.can_allocate(range(10)).n_cached == 8
    time.sleep(0.25)
    assert mgr.can_allocate([99] * 28).fits  # the first call after the time lets go
    assert (mgr.stats.n_pins, mgr.pool.stats.used) == (0, 0)
    assert mgr.can_allocate(range(10)).n_cached == 8
    mgr.check()


def test_pins_end_with_a_reset_and_nothing_is_pinned_without_a_commit(
    mgr: kvpool.BlockManager,
) -> None:
    seq = mgr.allocate(range(10))
    seq.pin(1000)
    assert mgr.stats.n_pins == 0
    seq.commit(7)
    seq.pin(1000)
    seq.pin(2000)
    assert mgr.stats.n_pins == 2
    assert mgr.pool.refs(seq.blocks).tolist() == [3, 1, 1]
    assert seq.append(10) == []  # its tail is its own
    other = mgr.allocate(range(5), namespace=3)
    other.commit()
    other.pin(1000)
    mgr.reset(namespace=3)
    assert mgr.stats.n_pins == 2
    mgr.reset()
    assert mgr.stats.n_pins == 0
    mgr.free([seq, other])
    assert mgr.pool.stats == (8, 0, 0, 0)


# ---- import, export, adopt -----------------------------------------------------------------------


def computed(mgr: kvpool.BlockManager, tokens: list[int], value: float) -> kvpool.Sequence:
    seq = mgr.allocate(tokens)
    for i, block in enumerate(seq.blocks):
        mgr.pool.block(block)[:] = value + i
    seq.commit()
    return seq


def test_a_sequence_moves_to_another_manager(mgr: kvpool.BlockManager) -> None:
    tokens = list(range(10))
    seq = computed(mgr, tokens, 5.0)
    envelope = seq.export()
    other = make(16)
    for arrived in (
        other.adopt(other.import_(envelope), tokens),
        other.import_sequence(bytearray(envelope), np.array(tokens)),
    ):
        assert arrived.tokens.tolist() == tokens
        assert (arrived.n_computed, arrived.n_cached) == (10, 0)
        assert arrived.export() == envelope if arrived.blocks[0] == 0 else True
        assert (other.pool.block(arrived.blocks[1]) == 6.0).all()
        tail = other.pool.block(arrived.blocks[2])
        assert (tail[:, :, :, :2] == 7.0).all()
        assert not tail[:, :, :, 2:].any()
        other.check()
        arrived.append(10)
        arrived.free()
        assert run(other, [*range(8), 99]) == 8
    assert other.stats.duplicates == 2
    assert other.pool.stats.used == 0
    seq.free()


def test_what_is_not_computed_is_not_exported(mgr: kvpool.BlockManager) -> None:
    seq = mgr.allocate(range(10))
    assert len(seq.export()) == 32
    seq.commit(5)
    envelope = seq.export()
    assert len(envelope) == mgr.pool.export_bytes(2)
    other = make()
    assert len(other.import_sequence(envelope, range(5))) == 5
    seq.free()


@pytest.mark.parametrize("how", ["shared", "registered"])
@pytest.mark.parametrize("kept", [5, 6, 7])
def test_a_cut_sequence_exports_only_its_own_positions(
    mgr: kvpool.BlockManager, how: str, kept: int
) -> None:
    tokens = list(range(10)) if how == "registered" else list(range(7))
    parent = computed(mgr, tokens, 1.0)
    child = parent.fork()
    child.truncate(kept)
    plain = make()
    same = computed(plain, tokens[:kept], 1.0)
    assert child.export() == same.export()
    other = make()
    other.import_sequence(child.export(), tokens[:kept]).free()
    mgr.free([parent, child])
    same.free()


WRONG: dict[str, list[int]] = {
    "another token in the first block": [9, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    "another token in the second block": [0, 1, 2, 3, 4, 5, 6, 9, 8, 9],
    "too few": list(range(9)),
    "too many": list(range(11)),
    "a block less": list(range(8)),
    "none": [],
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_tokens_are_refused_before_a_block_is_taken(
    mgr: kvpool.BlockManager, what: str
) -> None:
    envelope = computed(mgr, list(range(10)), 1.0).export()
    other = make()
    run(other, range(50, 70))
    before, stats = other.pool.stats, other.stats
    with pytest.raises(kvpool.CorruptEnvelope, match="import_sequence"):
        other.import_sequence(envelope, WRONG[what])
    assert (other.pool.stats, other.stats) == (before, stats)
    with pytest.raises(kvpool.CorruptEnvelope):
        other.import_sequence(envelope, range(10), namespace=1)
    assert (other.pool.stats, other.stats) == (before, stats)
    other.check()


def test_adopt_with_wrong_tokens_leaves_the_references_with_the_caller(
    mgr: kvpool.BlockManager,
) -> None:
    seq = computed(mgr, list(range(10)), 1.0)
    other = make()
    ids = other.import_(seq.export())
    assert other.can_allocate(range(10)).n_cached == 0  # a name is no proof
    before = other.pool.stats
    for wrong in ([9, *range(1, 10)], [*range(7), 9, 8, 9], [*range(8), 8, 9, 9]):
        with pytest.raises(kvpool.CorruptEnvelope):
            other.adopt(ids, wrong)
    with pytest.raises(kvpool.CorruptEnvelope):
        other.adopt(ids, range(10), namespace=1)
    assert other.pool.stats == before
    assert other.pool.refs(ids).tolist() == [1, 1, 1]
    other.check()
    other.adopt(ids, range(10)).free()
    assert run(other, range(10)) == 8


def test_bad_envelopes_are_refused(mgr: kvpool.BlockManager) -> None:
    envelope = bytearray(computed(mgr, list(range(10)), 1.0).export())
    other = make()
    flipped = bytearray(envelope)
    flipped[100] ^= 1
    for bad in (flipped, envelope[:-1], b"", b"TLKV" * 10, bytes(32)):
        for call in (other.import_, lambda e: other.import_sequence(e, range(10))):
            with pytest.raises(kvpool.CorruptEnvelope):
                call(bad)
    shape = make(block_tokens=2)
    for call in (shape.import_, lambda e: shape.import_sequence(e, range(10))):
        with pytest.raises(kvpool.ShapeMismatch):
            call(envelope)
    small = make(n_blocks=2)
    for call in (small.import_, lambda e: small.import_sequence(e, range(10))):
        with pytest.raises(kvpool.PoolFull):
            call(envelope)
    assert small.pool.stats == (2, 0, 0, 0)


def test_blocks_that_were_looked_up_can_be_adopted(mgr: kvpool.BlockManager) -> None:
    run(mgr, range(8))
    ids = mgr.pool.lookup(kvpool.block_hashes(range(8), B))
    with mgr.adopt(ids, range(8)) as seq:
        assert (seq.n_computed, seq.blocks.tolist()) == (8, ids.tolist())
    assert mgr.pool.stats.cached == 2


# ---- events --------------------------------------------------------------------------------------


def test_events() -> None:
    mgr = make(events=True)
    run(mgr, range(9))
    mgr.evict(mgr.pool.lookup(kvpool.block_hashes(range(8), B))[1:])
    mgr.reset()
    first, second = (int(h) for h in kvpool.block_hashes(range(8), B))
    events = mgr.drain_events()
    assert [(e.number, e.type.name, e.hash, e.parent, e.tokens) for e in events] == [
        (0, "STORED", first, 0, (0, 1, 2, 3)),
        (1, "STORED", second, first, (4, 5, 6, 7)),
        (2, "REMOVED", second, 0, ()),
        (3, "CLEARED", 0, 0, ()),
    ]
    assert [e.block for e in events] == [0, 1, 1, None]
    assert mgr.drain_events() == []


def test_events_are_drained_in_parts() -> None:
    mgr = make(4000, block_tokens=1, events=True)
    run(mgr, range(3000))
    assert [e.number for e in mgr.drain_events(3)] == [0, 1, 2]
    assert mgr.drain_events(0) == []
    assert [e.number for e in mgr.drain_events(1500)] == list(range(3, 1503))
    assert [e.number for e in mgr.drain_events()] == list(range(1503, 3000))


def test_lost_events_are_a_gap() -> None:
    mgr = make(2, block_tokens=1, events=True)
    for i in range(33_000):  # two events each once the pool is full
        with mgr.allocate([i]) as seq:
            seq.commit()
    lost = mgr.stats.events_lost
    assert lost > 0
    numbers = [e.number for e in mgr.drain_events()]
    assert numbers == list(range(65_536))
    mgr.reset()
    (last,) = mgr.drain_events()
    assert last.number == 65_536 + lost


def test_without_events_there_are_none(mgr: kvpool.BlockManager) -> None:
    with pytest.raises(kvpool.Unsupported):
        mgr.drain_events()


# ---- counters ------------------------------------------------------------------------------------


def test_high_water_marks_and_sizes(mgr: kvpool.BlockManager) -> None:
    seqs = [mgr.allocate([i] * 5) for i in range(3)]
    mgr.free(seqs)
    mgr.allocate([]).free()
    assert (mgr.stats.peak_seqs, mgr.stats.peak_used, mgr.stats.n_seqs) == (3, 6, 0)
    assert mgr.stats.evictions == mgr.pool.stats.evictions == 0
    big = kvpool.Pool(10_000, n_layers=1, n_kv_heads=1, head_dim=1)
    per_block = (kvpool.BlockManager(big).meta_bytes + big.meta_bytes) / 10_000
    assert per_block <= 112


def test_repr(mgr: kvpool.BlockManager) -> None:
    seq = mgr.allocate(range(5))
    assert repr(mgr) == (
        "BlockManager(prefix_cache='hash', watermark=0, events=False; sequences=1, findable=0)"
    )
    assert repr(seq) == "Sequence(n_tokens=5, n_cached=0, n_computed=0, n_blocks=2)"
    seq.free()
    assert repr(seq) == "Sequence(freed)"
    mgr.close()
    assert repr(mgr).endswith("; closed)")

    class Mine(kvpool.BlockManager):
        pass

    assert repr(Mine(mgr.pool)).startswith("Mine(")
