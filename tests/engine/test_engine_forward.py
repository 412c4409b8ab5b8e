"""The forward pass: right (against an independent float64 model) and the same bits every time."""

from __future__ import annotations

import numpy as np
import pytest
from engine_support import Loaded, load, paged
from tiny_llama import TinyLlama

from kvpool.engine.cache import narrow, widen
from kvpool.engine.generate import prefill
from kvpool.engine.linear import linear
from kvpool.engine.llama import TILE, Span, key_rows


class WideSequence:
    """A cache without rounding, so that only the arithmetic is compared."""

    def __init__(self, loaded: Loaded, tokens: list[int]) -> None:
        cfg = loaded.file.config
        self.tokens, self.n_computed = list(tokens), 0
        self.values = np.zeros((cfg.n_layers, 2, cfg.n_kv_heads, 512, cfg.head_dim), np.float32)

    def write(self, layer: int, kv: np.ndarray) -> None:
        end = self.n_computed + len(kv)
        self.values[layer, :, :, self.n_computed : end] = kv.transpose(1, 2, 0, 3)

    def read(self, layer: int, n: int, out: np.ndarray) -> None:
        out[:, :, :n], out[:, :, n:] = self.values[layer, :, :, :n], 0

    def commit(self, n: int) -> None:
        self.n_computed += n


VARIANTS = {
    "grouped heads": {},
    "one KV head for each head": {"n_kv_heads": 4},
    "one KV head for all": {"n_kv_heads": 1},
    "a head of its own for the logits": {"tied": False},
    "RoPE divisors": {"rope_divisors": True},
    "linear RoPE scaling": {"rope_factor": 4.0},
    "another RoPE base": {"rope_base": 500_000.0},
}


def every_logit(loaded: Loaded, sequence: object, tokens: list[int]) -> np.ndarray:
    rows = []
    for _ in tokens:
        rows.append(loaded.model.logits(loaded.model.forward([Span(sequence, 1)])))  # type: ignore[arg-type]
        sequence.commit(1)  # type: ignore[attr-defined]
    return np.concatenate(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_float64_reference(variant: str, tmp_path) -> None:
    """Without rounding in the cache only float32 rounding is left: 1e-4 of logits around 4."""
    weights = TinyLlama(**VARIANTS[variant])
    loaded = load(weights.write(tmp_path / "tiny.gguf"))
    tokens = np.random.default_rng(1).integers(3, len(weights.pieces), 70).tolist()
    expected = weights.logits(tokens)
    found = every_logit(loaded, WideSequence(loaded, tokens), tokens)
    assert np.abs(expected).max() > 4
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_float16_in_the_cache_is_the_only_other_difference(tiny, tiny_weights) -> None:
    """Against a reference that rounds K and V to float16 at the same place, the bound is looser
    only because a value next to a rounding boundary may fall on the other side: one float16 step,
    2**-11 of the value."""
    tokens = np.random.default_rng(2).integers(3, 260, 70).tolist()
    found = every_logit(tiny, tiny.contiguous().open(tokens), tokens)
    np.testing.assert_allclose(found, tiny_weights.logits(tokens, np.float16), rtol=0, atol=2e-3)
    assert np.abs(found - tiny_weights.logits(tokens)).max() > 1e-4  # it does round


@pytest.mark.parametrize(
    ("rows", "columns"), [(960, 576), (576, 1536), (1009, 4000), (49, 33), (1, 1)]
)
def test_a_row_of_a_product_has_the_same_bits_in_any_company(rows: int, columns: int) -> None:
    random = np.random.default_rng(3)
    matrix = random.standard_normal((rows, columns), dtype=np.float32)
    x = random.standard_normal((33, columns), dtype=np.float32)
    alone = np.concatenate([linear(matrix, row[None].copy()) for row in x])
    for n in (2, 3, 16, 33):
        assert np.array_equal(linear(matrix, x[:n]), alone[:n])
        assert np.array_equal(linear(matrix, x[-n:]), alone[-n:])
    np.testing.assert_allclose(alone, x @ matrix.T, atol=1e-3)


def test_a_tile_computes_what_single_steps_compute(tiny) -> None:
    """Prefill in tiles of every size and decode one by one: the same K, V and logits."""
    tokens = np.random.default_rng(4).integers(3, 260, 3 * TILE + 5).tolist()
    one_by_one = tiny.contiguous().open(tokens)
    logits = every_logit(tiny, one_by_one, tokens)[-1:]
    for step in (2, 5, TILE - 1, TILE):
        sequence = tiny.contiguous().open(tokens)
        while sequence.n_computed < len(tokens):
            start = sequence.n_computed
            n = min(step, len(tokens) - start, key_rows(start) - start)
            hidden = tiny.model.forward([Span(sequence, n)])
            sequence.commit(n)
        filled = (slice(None), slice(None), slice(None), slice(0, len(tokens)))
        assert np.array_equal(sequence._values[filled], one_by_one._values[filled])
        assert np.array_equal(tiny.model.logits(hidden), logits)


def test_a_batch_computes_what_each_sequence_computes_alone(tiny) -> None:
    random = np.random.default_rng(5)
    prompts = [random.integers(3, 260, n).tolist() for n in (3, 40, 64, 97)]
    alone = []
    for prompt in prompts:
        sequence = tiny.contiguous().open([*prompt, 77])
        alone.append(tiny.model.logits(prefill(tiny.model, sequence)))
    together = [tiny.contiguous().open(prompt) for prompt in prompts]
    for sequence in together:
        prefill(tiny.model, sequence)
        sequence.append(77)
    hidden = tiny.model.forward([Span(sequence, 1) for sequence in reversed(together)])
    assert np.array_equal(tiny.model.logits(hidden), np.concatenate(alone[::-1]))


def test_what_stands_behind_the_sequence_is_never_read(tiny) -> None:
    """Leftovers of other sequences: NaN in the slab, in the array, and where the keys are put."""
    cfg, tokens = tiny.file.config, list(range(3, 40))
    with tiny.pool(8) as pool:
        pool.slab[:] = np.nan
        array = tiny.contiguous().open(tokens)
        array._values[:] = np.nan
        logits = []
        for sequence in (paged(pool).open(tokens), array):
            logits.append(tiny.model.logits(prefill(tiny.model, sequence)))
            out = np.empty((2, cfg.n_kv_heads, 64, cfg.head_dim), dtype=np.float32)
            out.view(np.int32)[:] = -1
            sequence.read(0, len(tokens), out)
            assert np.isfinite(out[:, :, : len(tokens)]).all()
            assert not out[:, :, len(tokens) :].any()
            sequence.free()
    assert np.isfinite(logits[0]).all()
    assert np.array_equal(*logits)


def test_widen_is_exact_for_every_finite_float16() -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    patterns = patterns[np.isfinite(patterns.view(np.float16))]
    out = np.empty(len(patterns), dtype=np.float32)
    out.view(np.int32)[:] = patterns.view(np.int16)
    widen(out)
    expected = patterns.view(np.float16).astype(np.float32)
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))  # -0.0 too


def test_narrow_rounds_to_nearest_even_and_saturates() -> None:
    values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, -1e30, 2**-25], np.float32)
    assert narrow(values).tolist() == [1.0, 1 + 2**-9, 65504.0, 65504.0, -65504.0, 0.0]
