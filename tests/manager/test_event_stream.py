"""A manager's own events, encoded and followed, tell exactly what is findable."""

from __future__ import annotations

import random

import pytest

import kvpool

pytest.importorskip("msgspec")

from kvpool.events import AllBlocksCleared, BlockStored, EventEncoder, NamespaceLabel, PrefixIndex

ROOTS = [0, kvpool.namespace(adapter="x"), kvpool.namespace(salt="s")]


@pytest.mark.parametrize("seed", range(8))
def test_an_index_holds_what_the_manager_can_find(seed: int) -> None:
    rng = random.Random(seed)
    pool = kvpool.Pool(24, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=1)
    manager = kvpool.BlockManager(pool, events=True)
    encoder, index = EventEncoder(2), PrefixIndex()
    alive: list[kvpool.Sequence] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.45 or not alive:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
            try:
                alive.append(manager.allocate(tokens, namespace=rng.choice(ROOTS)))
            except kvpool.PoolFull:
                alive.pop(rng.randrange(len(alive))).free()
        elif action < 0.7:
            rng.choice(alive).commit()
        elif action < 0.95:
            alive.pop(rng.randrange(len(alive))).free()
        elif action < 0.98:
            manager.evict(rng.randrange(24))
        else:
            manager.reset(rng.choice([None, *ROOTS]))
        for event in encoder.encode(manager.drain_events()):
            index.apply(event)
        assert len(index) == manager.stats.n_findable
        for block_hash in index.parents:
            assert isinstance(block_hash, int)
            block = pool.lookup(block_hash)
            assert block is not None
            pool.unref(block)
    # and a prompt finds in the manager what the index says it will
    for root in ROOTS:
        for _ in range(20):
            tokens = [rng.randrange(2) for _ in range(13)]
            names = kvpool.block_hashes(tokens, block_tokens=2, parent=root).tolist()
            assert manager.can_allocate(tokens, namespace=root).n_cached == 2 * index.match(names)


def test_labels_and_roots_as_the_manager_tells_them() -> None:
    pool = kvpool.Pool(8, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=1)
    manager = kvpool.BlockManager(pool, events=True)
    labels = {ROOTS[1]: NamespaceLabel(lora_name="x", lora_id=7)}
    encoder = EventEncoder(2, labels=labels)
    for root in ROOTS:
        with manager.allocate([1, 2, 3, 4], namespace=root) as sequence:
            sequence.commit()
    events = [e for e in encoder.encode(manager.drain_events()) if isinstance(e, BlockStored)]
    assert [e.parent_block_hash for e in events] == [None, None, ROOTS[2]]
    assert [e.lora_name for e in events] == [None, "x", None]
    assert all(e.token_ids == [1, 2, 3, 4] for e in events)


def test_a_queue_that_ran_over_clears_the_index() -> None:
    pool = kvpool.Pool(2, block_tokens=1, n_layers=1, n_kv_heads=1, head_dim=1)
    manager = kvpool.BlockManager(pool, events=True)
    encoder, index = EventEncoder(1), PrefixIndex()
    token = 0
    while manager.stats.events_lost == 0:
        with manager.allocate([token, 0]) as sequence:
            sequence.commit()
        token += 1
    for event in encoder.encode(manager.drain_events()):
        index.apply(event)
    with manager.allocate([token, 0]) as sequence:
        sequence.commit()
    events = encoder.encode(manager.drain_events())
    assert isinstance(events[0], AllBlocksCleared)
    for event in events:
        index.apply(event)
    assert len(index) <= manager.stats.n_findable
    for block_hash in index.parents:
        assert isinstance(block_hash, int)
        block = pool.lookup(block_hash)
        assert block is not None
        pool.unref(block)
