"""Text to tokens and back: byte-level BPE, pieces with scores, templates, streaming."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from engine_support import ModelFile, Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import TinyLlama

from kvpool.engine.errors import ModelFileError
from kvpool.engine.tokenizer import TokenStream


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_every_text_comes_back(tiny, text) -> None:
    if not any(special in text for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
        assert tiny.tokenizer.decode(tiny.tokenizer.encode(text)) == text


def test_merges_are_applied_in_their_order_and_digits_stand_alone(tiny) -> None:
    pieces = tiny.file.get("tokenizer.ggml.tokens", list)

    def split(text: str) -> list[str]:
        return [pieces[token] for token in tiny.tokenizer.encode(text)]

    assert split("the band") == ["the", "Ġ", "b", "and"]
    assert split("and and") == ["and", "Ġa", "n", "d"]  # the merge to "Ġa" comes first in the list
    assert split("a  12") == ["a", "ĠĠ", "1", "2"]  # the spaces do not go with the digit


def test_special_tokens_in_a_text_are_one_token_and_no_text(tiny) -> None:
    tokens = tiny.tokenizer.encode("a<|im_end|>b")
    assert tokens[1] == 2
    assert len(tokens) == 3
    assert tiny.tokenizer.decode(tokens) == "ab"


def test_a_conversation_is_written_by_the_template_in_the_file(tiny) -> None:
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    expected += "<|im_start|>assistant\n"
    assert tiny.tokenizer.chat("Hi", "Be brief.") == tiny.tokenizer.encode(expected)
    assert tiny.tokenizer.chat("Hi") == tiny.tokenizer.encode(
        expected[expected.index("\n<|im") + 1 :]
    )


def with_keys(tmp_path, drop: tuple[str, ...] = (), **extra: object) -> Tokenizer:
    keys = {f"tokenizer.{name.replace('__', '.')}": value for name, value in extra.items()}
    path = TinyLlama(n_layers=1).write(tmp_path / "model.gguf", extra=keys, drop=drop)
    return Tokenizer(ModelFile(path))


def test_without_a_template_the_prompts_stand_one_after_the_other(tmp_path) -> None:
    tokenizer = with_keys(tmp_path, drop=("tokenizer.chat_template",))
    assert not tokenizer.has_chat_template
    assert tokenizer.chat("Hi", "Be brief.") == tokenizer.encode("Be brief.\n\nHi")


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ raise_exception('no system role') }}",
        "{{ messages[7].content }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # out of the sandbox
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_or_misbehaves_is_refused(tmp_path, template) -> None:
    tokenizer = with_keys(tmp_path, chat_template=template)
    with pytest.raises(ModelFileError, match="its chat template cannot be rendered"):
        tokenizer.chat("Hi")


def test_the_first_token_is_put_first_once(tmp_path) -> None:
    tokenizer = with_keys(tmp_path, ggml__add_bos_token=True, ggml__bos_token_id=1)
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("<|im_start|>a") == tokenizer.encode("a")
    assert with_keys(tmp_path, ggml__bos_token_id=1).encode("a")[0] != 1


def test_every_way_to_end_is_a_stop_token(tmp_path) -> None:
    assert with_keys(tmp_path, ggml__eot_token_id=1).stop_tokens == {1, 2}


def test_llama3_numbers_are_split_in_threes(tmp_path) -> None:
    tokenizer = with_keys(tmp_path, ggml__pre="llama-bpe")
    assert tokenizer.decode(tokenizer.encode("12345 don't\n\n x")) == "12345 don't\n\n x"


def test_a_character_of_several_tokens_is_streamed_whole(tiny) -> None:
    stream = TokenStream(tiny.tokenizer)
    tokens = tiny.tokenizer.encode("é€😀")
    pieces = [stream.feed(token) for token in tokens]
    assert len(tokens) == 9
    assert [piece for piece in pieces if piece] == ["é", "€", "😀"]
    cut = TokenStream(tiny.tokenizer)
    assert [cut.feed(token) for token in tokens[:3]] == ["", "é", ""]
    assert cut.end() == "\ufffd"


# ---- pieces with scores -------------------------------------------------------------------------

WORDS = ["a", "b", "c", "ab", "bc", "abc", "\u2581", "\u2581a", "\u2581ab", "cc", "\u2581\u2581"]


def spm(tmp_path, **extra: object) -> tuple[Tokenizer, list[str], list[float]]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    scores = [0.0] * 259 + [-float(i) for i in np.random.default_rng(3).permutation(len(WORDS))]
    weights = TinyLlama(n_layers=1)
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(WORDS)],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        **extra,
    }
    return Tokenizer(ModelFile(weights.write(tmp_path / "spm.gguf", extra=keys))), pieces, scores


def best_pair_first(text: str, pieces: list[str], scores: list[float]) -> list[str]:
    """SentencePiece's rule, word for word: join the neighbours whose piece has the best score."""
    parts = list(text)
    while True:
        joins = [
            (scores[pieces.index(a + b)], -i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in pieces
        ]
        if not joins:
            return parts
        i = -max(joins)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_scores_are_followed_as_sentencepiece_does(tmp_path) -> None:
    tokenizer, pieces, scores = spm(tmp_path)
    random = np.random.default_rng(4)
    for _ in range(300):
        text = "".join(random.choice(list("abc "), random.integers(1, 14)))
        expected = best_pair_first("\u2581" + text.replace(" ", "\u2581"), pieces, scores)
        assert [pieces[token] for token in tokenizer.encode(text)[1:]] == expected, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_unknown_characters_become_bytes_and_come_back(tmp_path) -> None:
    tokenizer, pieces, _ = spm(tmp_path)
    assert [pieces[token] for token in tokenizer.encode("é")] == [
        "<s>",
        "\u2581",
        "<0xC3>",
        "<0xA9>",
    ]
    assert tokenizer.decode(tokenizer.encode("a é 😀")) == "a é 😀"
    bare, _, _ = spm(tmp_path, **{"tokenizer.ggml.add_space_prefix": False})
    assert bare.decode(bare.encode(" ab")) == " ab"
