"""The forward pass: right (against an independent float64 model) and the same bits every time."""

from __future__ import annotations

import numpy as np
import pytest
from engine_support import compute, load
from tiny_llama import TinyLlama

from kvpool import BlockManager
from kvpool.engine import linear as linear_module
from kvpool.engine.generate import prefill
from kvpool.engine.linear import linear
from kvpool.engine.paged import narrow

VARIANTS = {
    "grouped heads": {},
    "one KV head for each head": {"n_kv_heads": 4},
    "one KV head for all": {"n_kv_heads": 1},
    "a head of its own for the logits": {"tied": False},
    "RoPE divisors": {"rope_divisors": True},
    "linear RoPE scaling": {"rope_factor": 4.0},
    "another RoPE base": {"rope_base": 500_000.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_float64_reference(variant: str, tmp_path) -> None:
    """Against a reference that rounds K and V to float16 at the same place, float32 rounding is
    left: 1e-4 of logits around 4. Where a value next to a rounding boundary of float16 falls on the
    other side, one of its steps is added, 2**-11 of the value, to that row and a little to those
    that attend to it."""
    weights = TinyLlama(**VARIANTS[variant])
    loaded = load(weights.write(tmp_path / "tiny.gguf"))
    tokens = np.random.default_rng(1).integers(3, len(weights.pieces), 70).tolist()
    expected = weights.logits(tokens, np.float16)
    with loaded.pool(16) as pool:
        manager = BlockManager(pool)
        with manager.allocate(tokens) as sequence:
            found = compute(loaded.model, manager, (sequence, len(tokens)))
    assert np.abs(expected).max() > 4
    difference = np.abs(found - expected)
    assert np.median(difference) < 1e-4
    assert difference.max() < 1e-2
    unrounded = np.abs(found - weights.logits(tokens))
    assert np.median(unrounded) > 2 * np.median(difference)  # it does round, and there


SHAPES = [(960, 576), (576, 1536), (1009, 4000), (49, 33), (1, 1)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_row_of_a_product_has_the_same_bits_in_any_company(rows: int, columns: int) -> None:
    random = np.random.default_rng(3)
    matrix = random.standard_normal((rows, columns), dtype=np.float32)
    x = random.standard_normal((33, columns), dtype=np.float32)
    alone = np.concatenate([linear(matrix, row[None].copy()) for row in x])
    for n in (*range(2, 10), 16, 33):
        for threads in (1, 2, 5):
            assert np.array_equal(linear(matrix, x[:n], threads), alone[:n])
            assert np.array_equal(linear(matrix, x[-n:], threads), alone[-n:])
    x[1] = np.nan  # not even that
    assert np.array_equal(linear(matrix, x[:4])[[0, 2, 3]], alone[[0, 2, 3]])
    np.testing.assert_allclose(alone[2:], x[2:] @ matrix.T, atol=1e-3)


def test_a_tile_that_rounds_otherwise_is_not_used(monkeypatch) -> None:
    """On a BLAS that gives other bits at 2 rows, or 8, only tiles of 4 are left."""
    matmul = np.matmul

    def other_bits(a, b, **options):
        factor = 1 if a.ndim < 3 or a.shape[-2] == linear_module.TILE else np.float32(1 + 1e-6)
        return matmul(a, b, **options) * factor

    linear_module._tile_sizes.cache_clear()
    monkeypatch.setattr(np, "matmul", other_bits)
    assert linear_module._tile_sizes(8, 0, 16) == (4,)
    monkeypatch.undo()
    linear_module._tile_sizes.cache_clear()
    assert 4 in linear_module._tile_sizes(8, 0, 16)


def test_pieces_of_any_size_compute_what_single_steps_compute(tiny) -> None:
    """Prefill in chunks and decode one by one: the same K, V and logits, bit by bit."""
    tokens = np.random.default_rng(4).integers(3, 260, 101).tolist()
    with tiny.pool(101, 1) as pool:
        manager = BlockManager(pool, prefix_cache="none")
        sequence = manager.allocate(tokens)
        logits = np.concatenate([compute(tiny.model, manager, (sequence, 1)) for _ in tokens])
        expected = pool.slab[sequence.blocks].copy()
        sequence.free()
        for step in (2, 5, 31, 32, 101):
            with manager.allocate(tokens) as sequence:
                rows = []
                while sequence.n_computed < len(tokens):
                    n = min(step, len(tokens) - sequence.n_computed)
                    rows.append(compute(tiny.model, manager, (sequence, n)))
                assert np.array_equal(pool.slab[sequence.blocks], expected)
                assert np.array_equal(np.concatenate(rows), logits)


def test_a_batch_computes_what_each_sequence_computes_alone(tiny) -> None:
    """Single rows and longer pieces of other sequences in one pass, in any order."""
    random = np.random.default_rng(5)
    prompts = [random.integers(3, 260, n).tolist() for n in (3, 40, 64, 97, 20)]
    with tiny.pool(60, 8) as pool:
        manager = BlockManager(pool, prefix_cache="none")
        alone = []
        for prompt in prompts:
            sequence, logits = prefill(tiny.model, manager, prompt)
            alone.append(logits)
            sequence.free()
        together = [manager.allocate(prompt) for prompt in prompts]
        left = [1, 7, 1, 1, 20]
        for sequence, n in zip(together, left, strict=True):
            if len(sequence) > n:
                compute(tiny.model, manager, (sequence, len(sequence) - n))
        for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
            fork = [together[i].fork() for i in order]
            for child in fork:  # a write may not go into what others share
                n = child.n_computed
                tail = child.tokens[n:].tolist()
                child.truncate(n)
                child.append(tail)
            pieces = [(child, left[i]) for child, i in zip(fork, order, strict=True)]
            logits = compute(tiny.model, manager, *pieces)
            last = np.cumsum([n for _, n in pieces]) - 1
            assert np.array_equal(logits[last], np.array([alone[i] for i in order]))
            manager.free(fork)
        manager.free(together)


def test_threads_change_no_bit(tiny) -> None:
    tokens = np.random.default_rng(6).integers(3, 260, 300).tolist()
    rows = []
    for threads in (1, 2, 5):
        loaded = load(tiny.path, threads)
        with tiny.pool(20) as pool:
            sequence, logits = prefill(loaded.model, BlockManager(pool), tokens)
            sequence.free()
        rows.append(logits)
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_what_stands_behind_the_sequence_is_never_read(tiny) -> None:
    """Leftovers of other sequences: NaN in the slab."""
    tokens, logits = list(range(3, 40)), []
    for leftover in (np.nan, 0.0):
        with tiny.pool(8) as pool:
            pool.slab[:] = leftover
            manager = BlockManager(pool)
            sequence, row = prefill(tiny.model, manager, tokens)
            sequence.append(7)
            logits += [row, compute(tiny.model, manager, (sequence, 1))[0]]
            sequence.free()
    assert np.isfinite(logits).all()
    assert np.array_equal(logits[:2], logits[2:])


def test_narrow_rounds_to_nearest_even_and_saturates() -> None:
    values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, -1e30, 2**-25], np.float32)
    assert narrow(values).tolist() == [1.0, 1 + 2**-9, 65504.0, 65504.0, -65504.0, 0.0]
