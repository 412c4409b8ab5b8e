"""model.generate on a PagedCache: the tokens of a DynamicCache, whatever the way of decoding."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import kvpool

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from tiny_models import VOCAB, llama, make, prompts  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from kvpool.integrations.transformers import PagedCache, PagedStore  # noqa: E402

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": {"do_sample": True, "max_new_tokens": 12, "temperature": 1.5, "top_k": 20},
    "beams": {"num_beams": 4, "max_new_tokens": 12, "do_sample": False},
    "beams, all returned": {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 9},
    "sampled beams": {"num_beams": 3, "do_sample": True, "max_new_tokens": 9},
    "return sequences": {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 9},
    "chunked prefill": {**GREEDY, "prefill_chunk_size": 5},
}
ALONE: dict[str, dict[str, Any]] = {  # of a batch transformers cannot do these
    "prompt lookup": {**GREEDY, "prompt_lookup_num_tokens": 3, "max_new_tokens": 24},
    "assisted": {**GREEDY, "assistant": True},
    "assisted, sampled": {"do_sample": True, "max_new_tokens": 16, "assistant": True},
}
MODELS = {"float32": torch.float32, "float16": torch.float16}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return llama(MODELS[request.param])


@pytest.fixture
def store(model: Any) -> Iterator[PagedStore]:
    with PagedStore(model, n_blocks=128, block_tokens=4) as store:
        yield store
        store.manager.check()
        assert store.pool.stats.used == 0, "blocks are held by nobody's cache"


def generate(model: Any, inputs: Any, cache: Any, seed: int = 3, **how: Any) -> Any:
    how = dict(how)
    if how.pop("assistant", False):
        how["assistant_model"] = llama(model.dtype, seed=0)  # the same weights: drafts are accepted
        how["assistant_model"].generation_config.num_assistant_tokens = 4
        with torch.no_grad():  # but not all
            how["assistant_model"].lm_head.weight[::7] *= 1.2
    torch.manual_seed(seed)
    return model.generate(
        **inputs, cache=cache, return_dict_in_generate=True, output_logits=True, **how
    )


def same(a: Any, b: Any) -> None:
    """The same tokens, and logits bit for bit."""
    assert a.sequences.tolist() == b.sequences.tolist()
    assert all(torch.equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [(13,), (4, 9, 1, 16)], ids=["one", "padded batch"])
def test_tokens_are_those_of_a_dynamic_cache(
    model: Any, store: PagedStore, way: str, lengths: tuple[int, ...]
) -> None:
    inputs = prompts(*lengths)
    expected = generate(model, inputs, DynamicCache(config=model.config), **WAYS[way])
    for cache in (store.open(**inputs), store.open()):
        with cache:
            found = generate(model, inputs, cache, **WAYS[way])
            if cache.n_skipped == 0 and "num" not in str(WAYS[way]):
                same(found, expected)
            else:  # computed in other shapes than the reference: the last bits may differ
                assert found.sequences.tolist() == expected.sequences.tolist()
        assert store.pool.stats.used == 0


@pytest.mark.parametrize("way", ALONE)
def test_drafts_that_are_rejected_are_cut_off(model: Any, store: PagedStore, way: str) -> None:
    inputs = prompts(13)
    inputs["input_ids"][:, 6:12] = inputs["input_ids"][:, :6]  # something to look up
    inputs = {k: v for k, v in inputs.items() if k == "input_ids" or way != "prompt lookup"}
    expected = generate(model, inputs, DynamicCache(config=model.config), **ALONE[way])
    crops = []
    with store.open(inputs["input_ids"]) as cache:
        crop = cache.crop
        cache.crop = lambda n: (crops.append(n), crop(n))  # type: ignore[method-assign]
        found = generate(model, inputs, cache, **ALONE[way])
        assert len(cache.sequences[0]) == cache.get_seq_length()
        del cache.crop
    same(found, expected)
    assert any(crops), "no draft was rejected: this test shows nothing"


@pytest.mark.parametrize("way", ALONE)
def test_drafting_on_a_cache_that_has_the_beginning(
    model: Any, store: PagedStore, way: str
) -> None:
    """transformers begins these with the whole prompt, whatever the cache has of it: that is
    computed again, and what is in shared blocks is not written again."""
    ids = prompts(13)["input_ids"]
    expected = generate(model, {"input_ids": ids}, DynamicCache(config=model.config), **ALONE[way])
    for n_there in (0, 12):
        with store.open(ids) as cache:
            assert cache.n_skipped == n_there
            blocks = cache.sequences[0].blocks[: n_there // 4].tolist()
            before = store.pool.slab[blocks].clone()
            same(generate(model, {"input_ids": ids}, cache, **ALONE[way]), expected)
            assert cache.n_skipped == 0
            assert cache.sequences[0].blocks[: len(blocks)].tolist() == blocks
            assert torch.equal(store.pool.slab[blocks], before)
    with store.open(ids) as cache:  # a conversation that goes on
        turn = torch.cat([generate(model, {"input_ids": ids}, cache, **GREEDY).sequences, ids], 1)
        expected = generate(model, {"input_ids": turn}, DynamicCache(config=model.config), **GREEDY)
        there = cache.sequences[0].blocks[:6].tolist()
        before = store.pool.slab[there].clone()
        drafting = {**ALONE[way], **GREEDY}
        found = generate(model, {"input_ids": turn}, cache, **drafting)
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(store.pool.slab[there], before)
        other = turn.clone()
        other[0, 2] += 1
        with pytest.raises(kvpool.InvalidArgument, match=r"opened with token .* at position 2"):
            generate(model, {"input_ids": other}, cache, **drafting)
        assert cache.get_seq_length() == len(cache.sequences[0])


@pytest.mark.filterwarnings("ignore:.*past_key_values.*deprecated:FutureWarning")
@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
def test_both_keywords(model: Any, keyword: str) -> None:
    inputs = prompts(9)
    expected = model.generate(**inputs, **GREEDY)
    with PagedStore(model, n_blocks=16) as store:
        found = model.generate(**inputs, **{keyword: store.open(**inputs)}, **GREEDY)
        assert found.tolist() == expected.tolist()
        assert store.manager.stats.prompt_tokens == 9


class Counted:
    """How many positions a model computes."""

    def __init__(self, model: Any) -> None:
        self.n = 0
        self._hook = model.model.layers[0].register_forward_pre_hook(self._count)

    def _count(self, module: Any, args: Any) -> None:
        self.n += args[0].shape[1]

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._hook.remove()


def test_a_prefix_is_not_computed_again(model: Any, store: PagedStore) -> None:
    first, second = prompts(21, prefix=18), prompts(23, prefix=18, seed=8)
    expected = model.generate(**second, **GREEDY)
    with Counted(model) as all_of_it:
        model.generate(**first, cache=store.open(**first), **GREEDY)
    with Counted(model) as rest, store.open(**second) as cache:
        assert cache.n_skipped == cache.get_seq_length() == 16  # 18 in whole blocks of 4
        found = model.generate(**second, cache=cache, **GREEDY)
    assert (all_of_it.n, rest.n) == (21 + 11, 23 - 16 + 11)
    assert found.tolist() == expected.tolist()
    assert store.manager.stats.hit_tokens == 16


def test_a_batch_skips_what_all_of_its_rows_have(model: Any, store: PagedStore) -> None:
    for n in (13, 17):
        alone = prompts(n, prefix=12)
        model.generate(**alone, cache=store.open(**alone), **GREEDY)
    batch = prompts(20, 15, prefix=12, seed=5)
    expected = model.generate(**batch, **GREEDY)
    with Counted(model) as counted, store.open(**batch) as cache:
        assert [seq.n_cached for seq in cache.sequences] == [12, 12]
        assert cache.n_skipped == 12  # of the padded row 12 - 5 tokens are computed, not written
        found = model.generate(**batch, cache=cache, **GREEDY)
    assert counted.n == 20 - 12 + 11
    assert found.tolist() == expected.tolist()
    with store.open(**prompts(20, 3, prefix=12, seed=5)) as cache:
        assert cache.n_skipped == 16  # the short row is padding up to column 17
    with store.open(**prompts(20, 19, seed=77)) as cache:
        assert cache.n_skipped == 0


def test_generated_tokens_are_found_by_the_next_turn(model: Any, store: PagedStore) -> None:
    turn = prompts(10)["input_ids"]
    conversation = model.generate(turn, cache=store.open(turn), **GREEDY)
    conversation = torch.cat([conversation, torch.tensor([[5, 6, 7]])], dim=1)
    expected = model.generate(conversation, **GREEDY)
    with store.open(conversation) as cache:
        assert cache.n_skipped == 20  # 10 + 11 of the generated ones were computed, in blocks of 4
        assert model.generate(conversation, cache=cache, **GREEDY).tolist() == expected.tolist()


def test_a_conversation_continues_in_its_cache(model: Any, store: PagedStore) -> None:
    inputs = prompts(10, 6)
    reference = DynamicCache(config=model.config)
    with store.open(**inputs) as cache:
        for turn in range(3):
            expected = generate(model, inputs, reference, **GREEDY)
            with Counted(model) as counted:
                found = generate(model, inputs, cache, **GREEDY)
            same(found, expected)
            assert counted.n == (10 if turn == 0 else 4) + 11  # the last token, and three new ones
            new = torch.randint(3, VOCAB, (2, 3), generator=torch.Generator().manual_seed(turn))
            ids = torch.cat([found.sequences, new], dim=1)
            grown = torch.ones(2, ids.shape[1] - inputs["attention_mask"].shape[1])
            mask = torch.cat([inputs["attention_mask"], grown.long()], dim=1)
            inputs = {"input_ids": ids, "attention_mask": mask}
        assert [len(seq) for seq in cache.sequences] == [10 + 3 * 11 + 2 * 4, 6 + 3 * 11 + 2 * 4]


def test_several_return_sequences_share_their_prompt(model: Any, store: PagedStore) -> None:
    inputs = prompts(41)
    with store.open(**inputs) as cache:
        generate(model, inputs, cache, do_sample=True, num_return_sequences=8, max_new_tokens=4)
        assert cache.batch_size == 8
        # 41 + 3 positions are in 11 blocks: the 10 full ones of the prompt are there once
        assert store.pool.stats.used == 10 + 8
    with store.open(**inputs) as cache:
        generate(model, inputs, cache, num_beams=4, max_new_tokens=4)
        assert store.pool.stats.used <= 10 + 4
    assert store.manager.stats.copies > 0  # beams and samples write behind a shared block


def test_the_store_may_round_a_float32_model_to_float16() -> None:
    """K and V keep 11 significant bits, so each is off by at most 2**-11 of itself. Two layers of
    this size turn that into logits (of about 10) that differ by less than 0.05; the blocks can be
    exported, which those of a float32 slab cannot."""
    model = llama()
    inputs = prompts(17)
    expected = generate(model, inputs, DynamicCache(config=model.config), **GREEDY)
    with PagedStore(model, n_blocks=32, block_tokens=4, dtype=torch.float16) as store:
        with store.open(**inputs) as cache:
            found = model(**inputs, cache=cache).logits[:, -1]
            assert float((found - expected.logits[0]).abs().max()) < 0.05
            envelope = store.pool.export_sequence(cache.sequences[0])
            assert len(envelope) == store.pool.export_bytes(5)
            found = generate(model, inputs, store.open(**inputs), **GREEDY)
            n = min(
                (int((a != b).float().argmax()) for a, b in
                 zip(found.sequences, expected.sequences, strict=True) if bool((a != b).any())),
                default=0,
            )  # fmt: skip
            for step in range(max(0, n - 17) or 1):  # until a token differs, if one does
                assert float((found.logits[step] - expected.logits[step]).abs().max()) < 0.05
    with PagedStore(model, n_blocks=32) as store, store.open(**inputs) as cache:
        model(**inputs, cache=cache)
        with pytest.raises(kvpool.Unsupported, match="this slab is float32"):
            store.pool.export_sequence(cache.sequences[0])


def test_a_copy_of_a_cache_is_a_fork(model: Any, store: PagedStore) -> None:
    inputs = prompts(14)
    with store.open(**inputs) as cache:
        model(**inputs, cache=cache)
        used = store.pool.stats.used
        with copy.deepcopy(cache) as fork:
            assert store.pool.stats.used == used
            ends = [
                generate(model, {"input_ids": torch.cat([inputs["input_ids"], torch.tensor([[t]])],
                                                       dim=1)}, c, **GREEDY).sequences.tolist()
                for c, t in ((cache, 5), (fork, 6))
            ]  # fmt: skip
    for end, token in zip(ends, (5, 6), strict=True):
        whole = torch.cat([inputs["input_ids"], torch.tensor([[token]])], dim=1)
        assert end == model.generate(whole, **GREEDY).tolist()


def test_a_sliding_window_is_the_masks() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    model = make(MistralForCausalLM, MistralConfig, torch.float32, 1, sliding_window=6)
    inputs = prompts(15, 11)
    expected = generate(model, inputs, DynamicCache(config=model.config), **GREEDY)
    everything = llama(seed=1)  # the same weights without a window: other tokens
    everything.load_state_dict(model.state_dict())
    assert generate(everything, inputs, None, **GREEDY).sequences.tolist() != (
        expected.sequences.tolist()
    )
    with PagedStore(model, n_blocks=64, block_tokens=4) as store, store.open(**inputs) as cache:
        found = generate(model, inputs, cache, **GREEDY)
        assert found.sequences.tolist() == expected.sequences.tolist()


def test_the_models_of_other_makers() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    for model_class, config_class in (
        (Gemma2ForCausalLM, Gemma2Config), (Qwen3ForCausalLM, Qwen3Config),
    ):  # fmt: skip
        model = make(model_class, config_class, torch.float32, 2, sliding_window=8)
        inputs = prompts(15, 11)
        expected = generate(model, inputs, DynamicCache(config=model.config), **GREEDY)
        with PagedStore(model, n_blocks=64, block_tokens=4) as store:
            for skipped in (0, 4):
                with store.open(**inputs) as cache:
                    found = generate(model, inputs, cache, **GREEDY)
                    assert found.sequences.tolist() == expected.sequences.tolist()
                    assert cache.n_skipped >= skipped


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    model = llama(torch.float16).to("cuda")
    inputs = {k: v.to("cuda") for k, v in prompts(17, 9, prefix=8).items()}
    with PagedStore(model, n_blocks=64, block_tokens=4) as store:
        assert store.pool.device.type == "cuda"
        for way in (GREEDY, WAYS["beams"]):
            expected = model.generate(**inputs, **way)
            for _ in range(2):
                with store.open(**inputs) as cache:
                    found = model.generate(**inputs, cache=cache, **way)
                assert found.tolist() == expected.tolist()


def test_two_threads_share_a_store(model: Any, store: PagedStore) -> None:
    batches = [prompts(19, 12, prefix=11, seed=s) for s in range(4)]
    expected = [model.generate(**inputs, **GREEDY).tolist() for inputs in batches]
    errors: list[BaseException] = []

    def work(me: int) -> None:
        try:
            for i in (me, me + 2, me, me + 2):
                with store.open(**batches[i]) as cache:
                    found = model.generate(**batches[i], cache=cache, **GREEDY)
                    assert found.tolist() == expected[i]
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors[0]
    assert store.manager.stats.hit_tokens > 0


def test_repr(store: PagedStore) -> None:
    with store.open(prompts(5)["input_ids"]) as cache:
        assert isinstance(cache, PagedCache)
        assert repr(cache).startswith("PagedCache(rows=1, columns=0, pool=TorchPool(n_blocks=128")
    assert repr(store).startswith("PagedStore(TorchPool(")
