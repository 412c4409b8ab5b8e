"""SmolLM2-135M-Instruct: the same tokens in every configuration, and the same as elsewhere.

The reference tests load the same GGUF file with transformers; they are skipped without it.
"""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from engine_support import Loaded, paged, run_prompts, same_bits
from test_engine_forward import WideSequence

from kvpool.engine.generate import prefill
from kvpool.engine.paged import blocks_needed

SYSTEM = "You are a careful assistant. Answer in one or two short sentences, in plain words."
QUESTIONS = ["What is the capital of France?", "Why do cats purr?", "Name a prime above 10."]
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def prompts(smollm: Loaded) -> list[list[int]]:
    return [smollm.tokenizer.chat(question, SYSTEM) for question in QUESTIONS]


@pytest.fixture(scope="module")
def reference(smollm: Loaded, prompts):
    return run_prompts(smollm, smollm.contiguous(128), prompts, max_tokens=MAX_TOKENS)


def test_it_answers(smollm: Loaded, reference) -> None:
    assert "Paris" in smollm.tokenizer.decode(reference[0][0][0])


@pytest.mark.parametrize(
    ("block_tokens", "prefix_cache", "small"),
    [
        (16, "none", False),
        (1, "hash", False),
        (16, "hash", False),
        (64, "hash", False),
        (16, "hash", True),
    ],
    ids=["cache off", "blocks of 1", "blocks of 16", "blocks of 64", "a pool that evicts"],
)
def test_tokens_and_logits_are_those_of_one_array(
    smollm: Loaded, prompts, reference, block_tokens, prefix_cache, small
) -> None:
    needed = max(blocks_needed(len(p), MAX_TOKENS, 1, block_tokens) for p in prompts)
    with smollm.pool(needed if small else 3 * needed, block_tokens) as pool:
        cache = paged(pool, prefix_cache)
        tokens, logits = run_prompts(smollm, cache, prompts, max_tokens=MAX_TOKENS)
        assert tokens == reference[0]
        assert same_bits(logits, reference[1])
        common = next(i for i, ids in enumerate(zip(*prompts, strict=False)) if len({*ids}) > 1)
        hits = common // block_tokens * block_tokens * (len(prompts) - 1)
        assert cache.manager.stats.hit_tokens == (hits if prefix_cache == "hash" else 0)
        assert pool.stats.used == 0
        assert (pool.stats.evictions > 0) == small
        cache.manager.check()


def test_four_samples_share_the_prompt(smollm: Loaded, prompts) -> None:
    with smollm.pool(64) as pool:
        cache = paged(pool)
        (samples,), _ = run_prompts(
            smollm, cache, prompts[1:2], n=4, max_tokens=6, temperature=1.0, seed=1
        )
        assert len({*map(tuple, samples)}) > 1
        shared, ends = len(prompts[1]) // 16, [len(prompts[1]) + len(s) - 1 for s in samples]
        assert cache.peak_used <= blocks_needed(len(prompts[1]), 6, 4, 16)
        assert cache.peak_used == shared + sum(-(-end // 16) - shared for end in ends)
        assert pool.stats.used == 0


TEXTS = [
    *("", " ", "  ", "\n", "\n\n\n", "\t x", " leading", "trailing ", "a  b   c    d"),
    *("I'm you're he'll we'd they've it's 'tis", "DON'T SHOUT", "x=1;y=2", "3.14159", "1,000,000"),
    *("naïve café", "Ελληνικά", "русский", "日本語のテキスト", "한국어", "العربية", "हिन्दी", "ไทย"),
    *("😀👩‍👩‍👧 🇫🇷", "zero\u200bwidth", "nbsp\u00a0here", "e\u0301 combining", "\ufeffBOM"),
    *("<|im_start|>user\nhi<|im_end|>", "<|im_start", "a<|endoftext|>b", "if(a<b){c+=d;}\r\n"),
    *("https://example.org/a?b=c&d=%20", "```python\ndef f(x):\n    return x\n```", "\x00\x01\x7f"),
]


@functools.cache
def many_texts() -> list[str]:
    """The list above and 300 random mixtures of words, signs, digits and spaces."""
    rng = random.Random(0)
    parts = [
        "the",
        "The",
        " of",
        "ing",
        "über",
        "ß",
        "中",
        "é",
        "'s",
        "'",
        "-",
        "...",
        "!?",
        "(",
        "_",
    ]
    parts += [" ", "  ", "\n", "\t", "0", "7", "42", "x", "Q", "🙂", "\u00a0", "\n\n", "    "]
    return TEXTS + ["".join(rng.choices(parts, k=rng.randint(1, 25))) for _ in range(300)]


def test_every_text_comes_back(smollm: Loaded) -> None:
    for text in many_texts():
        if "<|" not in text:
            assert smollm.tokenizer.decode(smollm.tokenizer.encode(text)) == text


# ---- against transformers -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch", reason="the reference needs torch")
    return pytest.importorskip("transformers", reason="the reference needs transformers")


def test_tokens_are_those_of_transformers(smollm: Loaded, transformers) -> None:
    """transformers builds its tokenizer from the same file, but takes no notice of the kind of
    pre-tokenizer the file names (digits stand alone); here it is told."""
    from tokenizers import pre_tokenizers

    path = smollm.path
    theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in many_texts():
        ids = theirs.encode(text, add_special_tokens=False)
        assert smollm.tokenizer.encode(text) == ids, repr(text)
        assert smollm.tokenizer.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hi?"}]
    for chat in (messages, messages[1:]):
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        system = SYSTEM if len(chat) == 2 else None
        assert smollm.tokenizer.chat("Hi?", system) == ids


def test_first_logits_are_those_of_transformers(smollm: Loaded, prompts, transformers) -> None:
    """Logits have a standard deviation of about 3.4. Without rounding in the cache two float32
    implementations differ by their rounding alone, over 30 layers: 2e-3. With K and V in float16,
    which transformers does not do, each carries a relative error of up to 2**-11: 5e-2."""
    import torch

    path = smollm.path
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    for prompt in prompts:
        with torch.no_grad():
            expected = theirs(torch.tensor([prompt])).logits[0, -1].numpy()
        for sequence, tolerance in (
            (WideSequence(smollm, prompt), 2e-3),
            (smollm.contiguous(128).open(prompt), 5e-2),
        ):
            found = smollm.model.logits(prefill(smollm.model, sequence))[0]
            assert np.abs(found - expected).max() < tolerance
            assert found.argmax() == expected.argmax()
