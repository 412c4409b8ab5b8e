"""SmolLM2-135M-Instruct: the same tokens in every configuration, and the same as elsewhere.

The reference tests load the same GGUF file with transformers; they are skipped without it.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
from engine_support import Loaded, Run, compute, run_alone, run_together

from kvpool import BlockManager
from kvpool.engine.generate import generate, prefill
from kvpool.engine.linear import n_cores
from kvpool.engine.paged import blocks_needed

SYSTEM = "You are a careful assistant. Answer in one or two short sentences, in plain words."
QUESTIONS = ["What is the capital of France?", "Why do cats purr?", "Name a prime above 10."]
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def asked(smollm: Loaded) -> list[dict[str, Any]]:
    prompts = [smollm.tokenizer.chat(question, SYSTEM) for question in QUESTIONS]
    stop = smollm.tokenizer.stop_tokens
    options = [{"prompt": p, "max_tokens": MAX_TOKENS, "stop_tokens": stop} for p in prompts]
    options[1] |= {"temperature": 0.7, "seed": 1, "n": 2}
    return options


@pytest.fixture(scope="module")
def alone(smollm: Loaded, asked) -> Run:
    return run_alone(smollm, asked)


def test_it_answers(smollm: Loaded, alone) -> None:
    assert "Paris" in smollm.tokenizer.decode(alone.tokens[0][0])


@pytest.mark.parametrize(
    ("block_tokens", "prefix_cache", "small", "engine"),
    [
        (16, "none", False, {}),
        (1, "hash", False, {"max_step_tokens": 24, "max_seqs": 3}),
        (64, "hash", False, {"n_drafts": 3}),
        (4, "hash", True, {}),
    ],
    ids=[
        "cache off",
        "blocks of 1, small chunks",
        "blocks of 64, drafts",
        "a pool that preempts and evicts",
    ],
)
def test_tokens_and_logits_are_those_of_each_request_alone(
    smollm: Loaded, asked, alone, block_tokens, prefix_cache, small, engine
) -> None:
    needs = [
        blocks_needed(len(a["prompt"]), MAX_TOKENS, a.get("n", 1), block_tokens) for a in asked
    ]
    with smollm.pool(max(needs) if small else sum(needs), block_tokens) as pool:
        manager = BlockManager(pool, prefix_cache=prefix_cache)  # type: ignore[arg-type]
        run = run_together(smollm, manager, asked, **engine)
        assert run.tokens == alone.tokens
        assert run.logits == alone.logits
        prompts = [a["prompt"] for a in asked]
        common = next(i for i, ids in enumerate(zip(*prompts, strict=False)) if len({*ids}) > 1)
        hits = common // block_tokens * block_tokens * (len(prompts) - 1)
        assert manager.stats.hit_tokens == (hits if prefix_cache == "hash" else 0)
        assert (run.count("preempted") > 0) == small
        assert (pool.stats.evictions > 0) == small


def test_one_thread_gives_the_bits_of_all(smollm: Loaded, asked, alone, monkeypatch) -> None:
    assert smollm.model.threads == n_cores()
    monkeypatch.setattr(smollm.model, "threads", 1)  # loading it once more takes seconds
    monkeypatch.setattr(smollm.model, "_attention_threads", None)
    with smollm.pool(20) as pool:
        run = run_together(smollm, BlockManager(pool), asked[:1])
    assert run.logits == alone.logits[:1]


def test_four_samples_share_the_prompt(smollm: Loaded, asked) -> None:
    prompt = asked[1]["prompt"]
    with smollm.pool(64) as pool:
        manager = BlockManager(pool)
        request = generate(
            smollm.model, manager, prompt, n=4, max_tokens=6, temperature=1.0, seed=1
        )
        assert len({tuple(sample.tokens) for sample in request.samples}) > 1
        assert manager.stats.peak_used == blocks_needed(len(prompt), 6, 4, 16)
        assert pool.stats.used == 0


def test_a_beam_is_likelier_than_the_greedy_answer(smollm: Loaded, asked) -> None:
    """Scores are sums of log-probabilities: of the greedy text they can be counted, and the best of
    three beams is no worse."""
    prompt, n = asked[0]["prompt"], 5
    with smollm.pool(64) as pool:
        manager = BlockManager(pool)
        greedy = generate(smollm.model, manager, prompt, max_tokens=n).samples[0].tokens
        best = generate(smollm.model, manager, prompt, max_tokens=n, beams=3).samples[0]
        with manager.allocate(prompt + greedy[:-1]) as sequence:
            rows = compute(smollm.model, manager, (sequence, len(sequence) - sequence.n_cached))
    rows = rows[-n:].astype(np.float64)
    scores = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True))
    scores -= rows.max(1, keepdims=True)
    assert best.score >= scores[np.arange(n), greedy].sum() - 1e-9


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


def test_first_logits_are_those_of_transformers(smollm: Loaded, asked, transformers) -> None:
    """Logits have a standard deviation of about 3.4. Two float32 implementations differ by their
    rounding over 30 layers: 2e-3. With K and V in float16, which transformers does not do, each
    carries a relative error of up to 2**-11: 5e-2."""
    import torch

    path = smollm.path
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    for options in asked:
        prompt = options["prompt"]
        with torch.no_grad():
            expected = theirs(torch.tensor([prompt])).logits[0, -1].numpy()
        with smollm.pool(16) as pool:
            sequence, found = prefill(smollm.model, BlockManager(pool), prompt)
            sequence.free()
        assert np.abs(found - expected).max() < 5e-2
        assert found.argmax() == expected.argmax()
