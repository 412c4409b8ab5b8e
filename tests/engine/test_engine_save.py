"""A conversation to disk and back: the model goes on with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from engine_support import Loaded

import kvpool
from kvpool.engine.generate import prefill
from kvpool.engine.llama import Span
from kvpool.engine.paged import PagedCache, PagedSequence

MakePool = Callable[..., kvpool.Pool]
PROMPT = [1, 5, 9, 2, 6, 10, 3, 7, 11, 4, 8, 12, 5, 9, 13, 6, 10, 14, 7]


def decode(tiny: Loaded, seq: PagedSequence, n: int) -> list[int]:
    """n greedy tokens. The last one is appended and not computed, as between two steps."""
    tokens = []
    for _ in range(n):
        hidden = (
            prefill(tiny.model, seq)
            if seq.n_computed < len(seq.tokens) - 1
            else tiny.model.forward([Span(seq, 1)])
        )
        if seq.n_computed < len(seq.tokens):
            seq.commit(1)
        tokens.append(int(tiny.model.logits(hidden)[0].argmax()))
        seq.append(tokens[-1])
    return tokens


@pytest.mark.parametrize("n_before", [1, 6, 13, 14])
def test_a_loaded_session_goes_on_with_the_same_tokens(
    tiny: Loaded, no_blocks_left: MakePool, tmp_path: Path, n_before: int
) -> None:
    path, root = tmp_path / "session.tlks", kvpool.namespace(model="tiny")
    here = kvpool.BlockManager(no_blocks_left(8, 16))
    held = here.allocate(PROMPT, namespace=root)
    seq = PagedSequence(PagedCache(here), held, list(PROMPT), 0)
    first = decode(tiny, seq, n_before)
    held.save(path)
    tokens = list(seq.tokens)
    assert tokens == PROMPT + first
    want = decode(tiny, seq, 20)
    seq.free()

    there = kvpool.BlockManager(no_blocks_left(8, 16))
    back = there.load(path, tokens, namespace=root)
    assert (back.n_tokens, back.n_computed) == (len(tokens), len(tokens) - 1)
    n_full = back.n_computed // 16 * 16
    assert there.can_allocate([*tokens[:n_full], 0], namespace=root).n_cached == n_full
    seq = PagedSequence(PagedCache(there), back, tokens, back.n_computed)
    assert decode(tiny, seq, 20) == want
    there.check()
    seq.free()
