"""Real collisions of the block hash, and that they get nobody anywhere."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from fnv_forger import block_hash, coefficients, forge, short_basis

import kvpool
from pool_support import COLLIDING

B = 16
VOCABULARY = 50_000


def prompt(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(n)]


@pytest.fixture
def mgr() -> kvpool.BlockManager:
    pool = kvpool.Pool(64, block_tokens=B, n_layers=1, n_kv_heads=1, head_dim=4)
    return kvpool.BlockManager(pool)


def compute(mgr: kvpool.BlockManager, tokens: list[int], value: float, namespace: int = 0) -> int:
    """A whole request whose K and V are `value`; returns the tokens it took from the cache."""
    with mgr.allocate(tokens, namespace=namespace) as seq:
        mgr.pool.slab[seq.blocks[seq.n_cached // B :]] = value
        seq.commit()
        mgr.check()
        return seq.n_cached


def cached_values(mgr: kvpool.BlockManager, tokens: list[int], namespace: int = 0) -> list[float]:
    """What a request for these tokens finds computed, one value a block."""
    with mgr.allocate(tokens, namespace=namespace) as seq:
        blocks = seq.blocks[: seq.n_cached // B]
        return [float(mgr.pool.block(b).ravel()[0]) for b in blocks]


def test_the_lattice_vectors_are_short_and_lead_nowhere() -> None:
    basis, _ = short_basis()
    assert len(basis) == 14
    for v in basis:
        assert sum(d * c for d, c in zip(v, coefficients(), strict=True)) % 2**64 == 0
        assert any(v)
        assert max(map(abs, v)) < 80  # the shortest there are have entries of about 24


def test_forged_blocks_collide_and_are_made_in_no_time() -> None:
    rng = random.Random(1)
    short_basis()
    start = time.perf_counter()
    for _ in range(20):
        parent, other = rng.randrange(2**64), rng.randrange(2**64)
        victim = prompt(rng, B)
        wanted = block_hash(parent, victim)
        attack = forge(wanted, other, rng)
        assert attack != victim
        assert max(attack) < VOCABULARY
        assert kvpool.block_hash(parent, victim) == wanted == kvpool.block_hash(other, attack)
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("attack_first", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_forged_block_is_never_hit(
    mgr: kvpool.BlockManager, depth: int, attack_first: bool
) -> None:
    """The prompts differ in block `depth` alone and have the same names in all of their blocks."""
    rng = random.Random(depth)
    victim = prompt(rng, 5 * B + 1)
    names = [0, *kvpool.block_hashes(victim).tolist()]
    cut = slice(depth * B, (depth + 1) * B)
    attack = list(victim)
    attack[cut] = forge(names[depth + 1], names[depth], rng)
    assert attack != victim
    assert kvpool.block_hashes(attack).tolist() == names[1:]

    first, second = (attack, victim) if attack_first else (victim, attack)
    assert compute(mgr, first, 1.0) == 0
    assert mgr.stats.collisions == 0
    # The blocks before the forged one are the same, honestly; nothing behind it is.
    assert mgr.can_allocate(second).n_cached == depth * B
    assert compute(mgr, second, 2.0) == depth * B
    assert mgr.stats.collisions == 5 - depth
    assert mgr.stats.duplicates == 0
    # Whoever came first keeps the names and goes on as if nothing had happened.
    assert cached_values(mgr, first) == [1.0] * 5
    assert cached_values(mgr, second) == [1.0] * depth
    assert mgr.pool.stats.cached == 5


def test_both_alive_at_once(mgr: kvpool.BlockManager) -> None:
    rng = random.Random(7)
    victim = prompt(rng, B) + [1, 2, 3]
    attack = forge(kvpool.block_hash(0, victim[:B]), 0, rng) + [1, 2, 3]
    a, v = mgr.allocate(attack), mgr.allocate(victim)
    mgr.commit([a, v])
    assert set(a.blocks).isdisjoint(v.blocks)
    assert mgr.stats.collisions == 1
    again = mgr.allocate(victim)
    assert again.n_cached == 0
    more = mgr.allocate(attack)
    assert more.n_cached == B
    assert more.blocks[0] == a.blocks[0]
    mgr.check()
    mgr.free([a, v, again, more])


def test_a_forgery_across_namespaces(mgr: kvpool.BlockManager) -> None:
    """Another tenant's root does not protect the names; the proofs do."""
    rng = random.Random(8)
    secret, mine = 0x1234567890ABCDEF, 0xFEDCBA0987654321
    victim = prompt(rng, B) + [1]
    attack = forge(kvpool.block_hash(secret, victim[:B]), mine, rng) + [1]
    assert compute(mgr, attack, 6.0, namespace=mine) == 0
    assert mgr.can_allocate(victim, namespace=secret).n_cached == 0
    assert compute(mgr, victim, 1.0, namespace=secret) == 0
    assert mgr.stats.collisions == 1
    assert cached_values(mgr, victim, namespace=secret) == []
    assert cached_values(mgr, attack, namespace=mine) == [6.0]


def test_an_imported_forgery_is_not_taken_for_the_victim(mgr: kvpool.BlockManager) -> None:
    """An envelope of the attack has the victim's names and checksum in order: adopted under its own
    tokens it is found under those alone; under the victim's it is the sender's lie, and a hit then
    means what the sender computed."""
    rng = random.Random(9)
    victim = prompt(rng, B) + [1]
    attack = forge(kvpool.block_hash(0, victim[:B]), 0, rng) + [1]
    sender = kvpool.BlockManager(
        kvpool.Pool(8, block_tokens=B, n_layers=1, n_kv_heads=1, head_dim=4)
    )
    with sender.allocate(attack) as seq:
        sender.pool.slab[:] = 6.0
        seq.commit()
        envelope = seq.export()
    mgr.import_sequence(envelope, attack).free()
    assert cached_values(mgr, victim) == []
    assert cached_values(mgr, attack) == [6.0]
    assert compute(mgr, victim, 1.0) == 0
    assert mgr.stats.collisions == 1
    assert cached_values(mgr, attack) == [6.0]


def test_the_bare_pool_is_fooled() -> None:
    """What the proofs are for: the index of names alone gives the victim the attacker's block."""
    rng = random.Random(10)
    victim = prompt(rng, B)
    attack = forge(kvpool.block_hash(0, victim), 0, rng)
    pool = kvpool.Pool(4, block_tokens=B, n_layers=1, n_kv_heads=1, head_dim=4)
    block = pool.alloc()
    pool.set_fill(block, B)
    pool.register(block, int(kvpool.block_hashes(np.array(attack))[0]))
    assert pool.lookup(int(kvpool.block_hashes(victim)[0])) == block


def test_a_forgery_that_came_first_ages_like_any_block_and_lets_the_name_go() -> None:
    # Meeting the forgery's name at every commit must not count as a use of it: it would stay in the
    # cache, and the victim out of it, for ever.
    victim, forged = COLLIDING
    assert kvpool.block_hash(0, victim) == kvpool.block_hash(0, forged)
    mgr = kvpool.BlockManager(kvpool.Pool(6, block_tokens=B, n_layers=1, n_kv_heads=1, head_dim=2))
    compute(mgr, forged, 1.0)
    hits = 0
    for i in range(50):
        hits += compute(mgr, [*victim, 7], 2.0) > 0
        compute(mgr, [100 + i] * (2 * B), 3.0)  # other traffic: two fresh blocks a round
    assert mgr.stats.collisions > 0
    assert hits > 40
    assert cached_values(mgr, [*victim, 7]) == [2.0]
