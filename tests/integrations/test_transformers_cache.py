"""A PagedCache apart from generate: what it gives, what it keeps private, what it refuses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from tiny_models import HEAD_DIM, KV_HEADS, LAYERS, llama, prompts  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from kvpool.integrations._rows import Forward  # noqa: E402
from kvpool.integrations.transformers import PagedCache, PagedStore  # noqa: E402

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture
def store(model: Any) -> Iterator[PagedStore]:
    with PagedStore(model, n_blocks=64, block_tokens=4) as store:
        yield store
        store.manager.check()
        assert store.pool.stats.used == 0


# ---- against DynamicCache ------------------------------------------------------------------------


def told(tokens: Any, pads: list[int], n_columns: int) -> Forward:
    """What the hook tells of a forward pass over these tokens."""
    n_rows, n = tokens.shape
    columns = np.arange(n_columns - n, n_columns)
    return Forward(
        tokens=tokens, n_rows=n_rows, n=n, plain=True,
        mask=(np.arange(n_columns) >= np.array(pads)[:, None]).astype(np.int64),
        positions=columns - np.array(pads)[:, None],
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_history_gives_what_a_dynamic_cache_gives(data: Any) -> None:
    draw = data.draw
    n_rows = draw(st.integers(1, 3), "rows")
    pads = draw(st.lists(st.integers(0, 5), min_size=n_rows, max_size=n_rows), "pads")
    generator = torch.Generator().manual_seed(1)
    with PagedStore(MODEL, n_blocks=200, block_tokens=4) as store:
        reference, cache = DynamicCache(), store.open()
        for _ in range(draw(st.integers(1, 12), "steps")):
            if not pads:
                break
            columns = cache.get_seq_length()
            step = draw(st.sampled_from("ffffcrsb") if columns else st.just("f"), "step")
            if step == "f":
                n = draw(st.integers(1, 7), "n") if columns else max(pads) + 2
                few = st.integers(3, 4)  # so that prefixes repeat
                tokens = np.array([[draw(few) for _ in range(n)] for _ in pads])
                cache._rows.begin(told(tokens, pads, columns + n))
                for layer in range(LAYERS):
                    shape = (len(pads), KV_HEADS, n, HEAD_DIM)
                    k, v = (torch.randn(shape, generator=generator) for _ in "kv")
                    expected, found = reference.update(k, v, layer), cache.update(k, v, layer)
                    for a, b in zip(expected, found, strict=True):
                        assert a.shape == b.shape
                        for row, pad in enumerate(pads):
                            assert torch.equal(a[row, :, pad:], b[row, :, pad:])
                            assert not b[row, :, :pad].any()
            elif step == "c":
                cut = draw(st.integers(0, min(4, columns - max(pads) - 1)), "cut")
                reference.crop(-cut)
                cache.crop(-cut)
            else:
                if step == "r":
                    rows = draw(st.lists(st.integers(0, len(pads) - 1), min_size=len(pads),
                                         max_size=len(pads)), "order")  # fmt: skip
                    reference.reorder_cache(torch.tensor(rows))
                    cache.reorder_cache(torch.tensor(rows))
                elif step == "s":
                    rows = draw(st.lists(st.integers(0, len(pads) - 1), min_size=1, max_size=3))
                    reference.batch_select_indices(torch.tensor(rows))
                    cache.batch_select_indices(torch.tensor(rows))
                else:
                    rows = [i for i in range(len(pads)) for _ in range(2)][:6]
                    if len(pads) > 3:
                        continue
                    reference.batch_repeat_interleave(2)
                    cache.batch_repeat_interleave(2)
                pads = [pads[i] for i in rows]
            assert cache.get_seq_length() == reference.get_seq_length()
            assert cache.get_mask_sizes(3, 0) == reference.get_mask_sizes(3, 0)
            assert cache.batch_size == len(pads)
            store.manager.check()
        cache.close()
        assert store.pool.stats.used == 0


# Never run, it only has the dimensions: K and V are random numbers, no function of the tokens, so
# a prefix that is found again could not be compared. Keys that depend on the length are not shared.
MODEL = llama()
MODEL.config.rope_parameters = {"rope_type": "dynamic"}


def test_rows_are_selected_by_index_or_by_mask(model: Any, store: PagedStore) -> None:
    inputs = prompts(5, 6, 7)
    with store.open(**inputs) as cache:
        lengths = [len(s) for s in cache.sequences]
        cache.batch_select_indices(torch.tensor([True, False, True]))
        assert [len(s) for s in cache.sequences] == [lengths[0], lengths[2]]
        cache.batch_select_indices(torch.tensor([1, 1, 0]))
        assert [len(s) for s in cache.sequences] == [7, 7, 5]
        for wrong in ([3], [-1]):
            with pytest.raises(kvpool.InvalidArgument, match="out of range: the cache has 3"):
                cache.batch_select_indices(torch.tensor(wrong))
        assert [len(s) for s in cache.sequences] == [7, 7, 5]
        cache.reset()
        assert store.pool.stats.used == 0
        model(**prompts(4), cache=cache)
        assert cache.get_seq_length() == 4
        cache.crop(3)  # as older releases have it: the length to keep
        assert cache.get_seq_length() == len(cache.sequences[0]) == 3
        cache.crop(0)
        cache.crop(9)
        cache.crop(-9)
        assert cache.get_seq_length() == 0


# ---- what is found, and what is not --------------------------------------------------------------


def test_padding_is_in_no_block(model: Any, store: PagedStore) -> None:
    """A prompt is found again whatever it was padded to, and nothing else is found."""
    batch = prompts(9, 17, seed=4)
    alone = batch["input_ids"][:1, 8:]
    model.generate(**batch, cache=store.open(**batch), **GREEDY)
    with store.open(alone) as cache:
        assert cache.sequences[0].tokens.tolist() == alone[0].tolist()
        assert cache.n_skipped == 8
        with PagedStore(model, n_blocks=8, block_tokens=4) as other, other.open() as fresh:
            model(alone, cache=fresh)
            for mine, theirs in zip(cache.sequences[0].blocks[:2], fresh.sequences[0].blocks,
                                    strict=False):  # fmt: skip
                found, expected = store.pool.block(int(mine)), other.pool.block(int(theirs))
                assert torch.allclose(found, expected, atol=1e-5)
        assert model.generate(alone, cache=cache, **GREEDY).tolist() == (
            model.generate(alone, **GREEDY).tolist()
        )
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), alone], dim=1)
    with store.open(padded) as cache:  # the same numbers as tokens, not as padding
        assert cache.n_skipped == 0


def positions(mask: Any) -> Any:
    return (mask.cumsum(1) - 1).clamp(min=0)


ODD: dict[str, Callable[[Any, Any, Any], dict[str, Any]]] = {
    "padding without positions": lambda m, i, mask: {"input_ids": i, "attention_mask": mask},
    "positions that are shifted": lambda m, i, mask: {
        "input_ids": i, "attention_mask": mask, "position_ids": positions(mask) + 1},
    "a mask with a hole": lambda m, i, mask: {
        "input_ids": i, "attention_mask": mask * (torch.arange(mask.shape[1]) != 6),
        "position_ids": positions(mask)},
    "padding on the right": lambda m, i, mask: {
        "input_ids": i, "attention_mask": mask.flip(1), "position_ids": positions(mask)},
    "a mask of four dimensions": lambda m, i, mask: {
        "input_ids": i, "position_ids": positions(mask), "attention_mask": torch.zeros(
            2, 1, i.shape[1], i.shape[1]).masked_fill(
                ~torch.tril(torch.ones(i.shape[1], i.shape[1])).bool(), -1e9)},
    "embeddings": lambda m, i, mask: {
        "inputs_embeds": m.get_input_embeddings()(i), "attention_mask": mask,
        "position_ids": positions(mask)},
    "another tensor": lambda m, i, mask: {
        "input_ids": i, "attention_mask": mask, "position_ids": positions(mask),
        "pixel_values": torch.zeros(1)},
}  # fmt: skip


@pytest.mark.parametrize("what", [*ODD, "training"])
def test_what_tokens_do_not_determine_is_private(model: Any, store: PagedStore, what: str) -> None:
    ids, mask = prompts(9, 12).values()
    plain = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}
    inputs = ODD[what](model, ids, mask) if what != "training" else plain
    model.train(what == "training")
    try:
        with store.open() as cache:
            found = model(**inputs, cache=cache).logits
            assert cache.is_private
            expected = model(**inputs, cache=DynamicCache()).logits
            assert torch.equal(found[mask == 1], expected[mask == 1])
        assert store.pool.stats.cached == 0
        assert store.manager.stats.n_findable == 0

        model.eval()
        with store.open() as cache:  # the same, as it should be
            model(**plain, cache=cache)
            assert not cache.is_private
        assert store.pool.stats.cached == 2 + 3
        model.train(what == "training")
        with store.open(ids, mask) as cache:
            assert cache.n_skipped > 0
            cut = {
                k: v[:, cache.n_skipped :] if k in ("input_ids", "inputs_embeds", "position_ids")
                else v for k, v in inputs.items()
            }  # fmt: skip
            with pytest.raises(kvpool.InvalidArgument, match="took a prefix over"):
                model(**cut, cache=cache)
            assert cache.get_seq_length() == cache.n_skipped
    finally:
        model.eval()


def test_what_becomes_odd_later_is_private_from_then_on(model: Any, store: PagedStore) -> None:
    ids = prompts(8)["input_ids"]
    with store.open() as cache:
        model(ids, cache=cache)
        embeds = model.get_input_embeddings()(ids)
        model(inputs_embeds=embeds, cache=cache)
        assert cache.is_private
        assert store.manager.stats.n_findable == 2
        model(ids, cache=cache)
        assert store.manager.stats.n_findable == 2
    with store.open(torch.cat([ids, torch.zeros_like(ids)], dim=1)) as cache:
        assert cache.n_skipped == 8


def test_other_inputs_open_a_private_cache(model: Any, store: PagedStore) -> None:
    inputs = prompts(9)
    model(**inputs, cache=store.open(**inputs))
    with store.open(**inputs, pixel_values=torch.zeros(1)) as cache:
        assert cache.is_private
        assert cache.n_skipped == 0
    with store.open(**inputs, token_type_ids=None) as cache:
        assert cache.n_skipped == 8


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "default"])
def test_keys_that_depend_on_the_length_are_not_shared(kind: str) -> None:
    model = llama()
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    inputs = prompts(9)
    with PagedStore(model, n_blocks=16, block_tokens=4) as store:
        model(**inputs, cache=store.open())
        with store.open(**inputs) as cache:
            assert cache.is_private == (kind != "default")
            assert cache.n_skipped == (8 if kind == "default" else 0)


def test_namespaces_share_nothing(model: Any, store: PagedStore) -> None:
    inputs = prompts(9)
    a, b = (kvpool.namespace(model="tiny", adapter=name) for name in "ab")
    model(**inputs, cache=store.open(**inputs, namespace=a))
    with store.open(**inputs, namespace=b) as cache:
        assert cache.n_skipped == 0
    with store.open(**inputs, namespace=a) as cache:
        assert cache.n_skipped == 8


# ---- out of blocks -------------------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_takes_nothing(model: Any) -> None:
    with PagedStore(model, n_blocks=6, block_tokens=4) as store:
        with store.open(**prompts(8)) as held:
            stats = store.pool.stats
            with pytest.raises(kvpool.PoolFull, match=r"2 rows of up to 10 tokens in a pool of 6"):
                store.open(**prompts(8, 10, seed=2))
            with pytest.raises(kvpool.PoolFull, match="caches that are done are still open"):
                model.generate(**prompts(20, seed=3), cache=store.open(), **GREEDY)
            assert store.pool.stats == stats
            model(**prompts(8), cache=held)
        store.manager.check()
        assert store.pool.stats == (4, 0, 2, 0)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}])
def test_a_pool_that_fills_up_while_generating_is_left_whole(
    model: Any, how: dict[str, Any]
) -> None:
    with PagedStore(model, n_blocks=8, block_tokens=2) as store:
        inputs = prompts(9)
        with store.open(**inputs) as cache:
            with pytest.raises(kvpool.PoolFull, match="blocks needed"):
                model.generate(**inputs, cache=cache, do_sample=False, max_new_tokens=40, **how)
            store.manager.check()
            columns = cache.get_seq_length()
            assert all(len(seq) == columns == seq.n_computed for seq in cache.sequences)
            cache.crop(-2)  # and it goes on
            model(torch.full((cache.batch_size, 1), 5), cache=cache)
            assert cache.get_seq_length() == columns - 1
        store.manager.check()
        assert store.pool.stats.used == 0


def test_a_forward_pass_that_fails_leaves_nothing(model: Any, store: PagedStore) -> None:
    inputs = prompts(9)
    with store.open(**inputs) as cache:
        model(**inputs, cache=cache)
        expected = model(torch.tensor([[5]]), cache=DynamicCacheOf(model, inputs)).logits

        def fail(*args: Any) -> None:
            raise RuntimeError("out of memory")

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(torch.tensor([[7, 8, 9, 10]]), cache=cache)
        hook.remove()
        assert cache.get_seq_length() == 9
        found = model(torch.tensor([[5]]), cache=cache).logits
        assert torch.equal(found, expected)
        assert cache.sequences[0].tokens.tolist()[9:] == [5]


def DynamicCacheOf(model: Any, inputs: Any) -> Any:
    cache = DynamicCache()
    model(**inputs, cache=cache)
    return cache


def test_a_cache_without_rows_begins_at_the_first_column(model: Any, store: PagedStore) -> None:
    inputs = prompts(7)
    expected = model(**inputs).logits
    with store.open(torch.zeros(0, 5, dtype=torch.long)) as cache:
        assert cache.n_skipped == cache.get_seq_length() == 0
        assert torch.equal(model(**inputs, cache=cache).logits, expected)
        cache.batch_select_indices(torch.tensor([False]))
        assert cache.get_seq_length() == store.pool.stats.used == 0
        assert torch.equal(model(**inputs, cache=cache).logits, expected)


# ---- refused -------------------------------------------------------------------------------------


def test_another_prompt_than_it_was_opened_for(model: Any, store: PagedStore) -> None:
    inputs, other = prompts(9), prompts(9, seed=8)
    with store.open(**inputs) as cache:
        with pytest.raises(
            kvpool.InvalidArgument, match=r"row 0: .* token \d+ at position 0, found"
        ):
            model.generate(**other, cache=cache, **GREEDY)
        model(**inputs, cache=cache)
        with pytest.raises(kvpool.InvalidArgument, match=r"expected 1 rows, found 2"):
            model(torch.tensor([[1], [2]]), cache=cache)
        assert cache.get_seq_length() == 9


def test_parts_of_a_model_other_models_and_gradients(model: Any, store: PagedStore) -> None:
    inputs = prompts(5)
    with store.open() as cache:
        for call in (
            lambda: model.model(**inputs, cache=cache),
            lambda: llama()(**inputs, cache=cache),
        ):
            with pytest.raises(kvpool.InvalidArgument, match="was not told what is computed"):
                call()
        with pytest.raises(kvpool.InvalidArgument, match="input_ids: expected them as the first"):
            model(cache=cache)
        trained = llama().requires_grad_(True)
        with PagedStore(trained, n_blocks=4) as other:
            with pytest.raises(kvpool.InvalidArgument, match=r"run under torch\.no_grad"):
                trained(**inputs, cache=other.open())
            with torch.no_grad():
                trained(**inputs, cache=other.open())


@pytest.mark.parametrize(("ids", "mask", "text"), [
    ([1, 2, 3], None, r"input_ids: expected \(rows, tokens\), found shape \(3,\)"),
    ([[1.0, 2.0]], None, "expected integers, found float64"),
    ([[1, 2]], [[1]], "attention_mask: expected one value for each token"),
    ([[1, 2, 3]], [[1, 1, 0]], "padding on the left"),
    ([[1, 2, 3]], [[1, 0, 1]], "padding on the left"),
    ([[1, -2, 3]], None, "-2"),
    ([[1, 2**40]], None, "1099511627776"),
    ([[1, 2], [3]], None, r"input_ids: expected \(rows, tokens\), found rows that differ"),
])  # fmt: skip
def test_prompts_are_checked(store: PagedStore, ids: Any, mask: Any, text: str) -> None:
    with pytest.raises(kvpool.InvalidArgument, match=text):
        store.open(ids, mask)
    assert store.pool.stats.used == 0


def test_models_that_have_no_such_cache() -> None:
    from transformers import Qwen3NextConfig, T5Config, T5Model

    t5 = T5Model(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(kvpool.Unsupported, match="T5Model has an encoder"):
        PagedStore(t5, n_blocks=4)
    hybrid = llama()
    hybrid.config = Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(kvpool.Unsupported, match=r"has layers of \['linear_attention'\]"):
        PagedStore(hybrid, n_blocks=4)
    with pytest.raises(kvpool.ArgumentTypeError, match="expected a model of transformers"):
        PagedStore(torch.nn.Linear(2, 2), n_blocks=4)
    with pytest.raises(kvpool.Unsupported, match=r"found torch\.float64"):
        PagedStore(llama().double(), n_blocks=4)
    for name in ("n_blocks", "block_tokens"):
        for n in (0, -1):
            with pytest.raises(kvpool.InvalidArgument, match=f"{name}: expected at least 1, found"):
                PagedStore(llama(), **{"n_blocks": 4, name: n})
        with pytest.raises(kvpool.ArgumentTypeError, match=f"{name}: expected an integer, found"):
            PagedStore(llama(), **{"n_blocks": 4, name: 1.5})
    liar = llama()
    liar.config.head_dim = 4
    with PagedStore(liar, n_blocks=4) as store, store.open() as cache:
        with pytest.raises(kvpool.ShapeMismatch, match=r"layer 0: expected K and V \(1, 2, 5, 4\)"):
            liar(**prompts(5), cache=cache)


# ---- lifetime ------------------------------------------------------------------------------------


def test_a_dropped_cache_gives_its_blocks_back(model: Any, store: PagedStore) -> None:
    gc.disable()
    try:
        cache = store.open(**prompts(9))
        gone = weakref.ref(cache)
        assert store.pool.stats.used == 3
        del cache
        assert gone() is None
        assert store.pool.stats.used == 0
        model.generate(**prompts(9), cache=store.open(**prompts(9)), **GREEDY)
        assert store.pool.stats.used == 0
    finally:
        gc.enable()


def test_closing(model: Any) -> None:
    store = PagedStore(model, n_blocks=16)
    n_hooks = len(model._forward_pre_hooks)
    cache, other = store.open(**prompts(9)), store.open()
    cache.close()
    cache.close()
    with pytest.raises(kvpool.InvalidArgument, match="the cache is closed"):
        model(**prompts(9), cache=cache)
    store.close()
    store.close()
    assert len(model._forward_pre_hooks) == n_hooks - 1
    with pytest.raises(kvpool.InvalidArgument, match="the store is closed"):
        store.open()
    with pytest.raises(kvpool.InvalidArgument, match="was not told"):
        model(**prompts(9), cache=other)
    other.close()
    del cache, other, store
    PagedStore(model, n_blocks=16)  # dropped without close
    assert len(model._forward_pre_hooks) == n_hooks - 1


def test_two_stores_on_one_model(model: Any, store: PagedStore) -> None:
    inputs = prompts(9)
    with PagedStore(model, n_blocks=16, block_tokens=2) as second:
        expected = model.generate(**inputs, **GREEDY).tolist()
        for s in (store, second, store, second):
            assert model.generate(**inputs, cache=s.open(**inputs), **GREEDY).tolist() == expected
        assert store.manager.stats.prompt_tokens == second.manager.stats.prompt_tokens == 18


def test_a_cache_keeps_its_store(model: Any) -> None:
    cache: PagedCache = PagedStore(model, n_blocks=16).open(**prompts(9))
    gc.collect()
    model(**prompts(9), cache=cache)
    assert cache.get_seq_length() == 9
