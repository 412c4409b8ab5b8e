"""A conversation to disk and back: the model goes on with the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_support import Loaded, compute

import kvpool
from kvpool.engine.engine import Engine
from kvpool.engine.request import Request

PROMPT = [1, 5, 9, 2, 6, 10, 3, 7, 11, 4, 8, 12, 5, 9, 13, 6, 10, 14, 7]


def decode(tiny: Loaded, manager: kvpool.BlockManager, seq: kvpool.Sequence, n: int) -> list[int]:
    """n greedy tokens. The last one is appended and not computed, as between two steps."""
    tokens = []
    for _ in range(n):
        logits = compute(tiny.model, manager, (seq, seq.n_tokens - seq.n_computed))
        tokens.append(int(logits[-1].argmax()))
        seq.append(tokens[-1])
    return tokens


@pytest.mark.parametrize("n_before", [1, 6, 13, 14])
def test_a_loaded_session_goes_on_with_the_same_tokens(
    tiny: Loaded, tmp_path: Path, n_before: int
) -> None:
    path, root = tmp_path / "session.tlks", kvpool.namespace(model="tiny")
    here = kvpool.BlockManager(tiny.pool(8))
    with here.allocate(PROMPT, namespace=root) as seq:
        tokens = PROMPT + decode(tiny, here, seq, n_before)
        seq.save(path)
        want = decode(tiny, here, seq, 20)

    there = kvpool.BlockManager(tiny.pool(8))
    with there.load(path, tokens, namespace=root) as back:
        assert (back.n_tokens, back.n_computed) == (len(tokens), len(tokens) - 1)
        n_full = back.n_computed // 16 * 16
        assert there.can_allocate([*tokens[:n_full], 0], namespace=root).n_cached == n_full
        assert decode(tiny, there, back, 20) == want
        there.check()
    assert there.pool.stats.used == here.pool.stats.used == 0


def test_a_request_of_the_engine_goes_on_behind_a_loaded_session(
    tiny: Loaded, tmp_path: Path
) -> None:
    path = tmp_path / "session.tlks"
    here = kvpool.BlockManager(tiny.pool(16))
    with Engine(tiny.model, here) as engine:
        request = engine.add(Request(PROMPT, max_tokens=30))
        while len(request.samples[0].tokens) < 9:
            engine.step()
        generated = list(request.samples[0].tokens)
        assert request.samples[0].sequence is not None
        request.samples[0].sequence.save(path)
        engine.run()
        want = request.samples[0].tokens

    there = kvpool.BlockManager(tiny.pool(16))
    seq = there.load(path, PROMPT + generated)
    with Engine(tiny.model, there) as engine:
        request = engine.add(Request(PROMPT, max_tokens=30, generated=generated, sequence=seq))
        engine.run()
    assert request.error is None
    assert request.samples[0].tokens == want
    assert there.pool.stats.used == 0
