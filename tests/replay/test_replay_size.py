"""Bytes a token, from configurations of real models.

The numbers are those of the models' published config.json files (huggingface.co: the repository is
named beside each), cut to the fields that the KV cache depends on.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from replay_support import conversation

from kvpool.cli import main
from kvpool.replay import TraceError
from kvpool.replay.model_shape import read_shape

# (fields, layers with a window, bytes a token)
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    # meta-llama/Llama-3.1-8B
    "llama-3.1-8b": ({
        "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "hidden_size": 4096, "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16"}, 0, 131_072),
    # meta-llama/Llama-3.1-70B
    "llama-3.1-70b": ({
        "model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "hidden_size": 8192, "torch_dtype": "bfloat16"}, 0, 327_680),
    # meta-llama/Llama-2-7b-hf: no GQA
    "llama-2-7b": ({
        "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "hidden_size": 4096, "torch_dtype": "float16"}, 0, 524_288),
    # mistralai/Mistral-7B-v0.1: a window in every layer
    "mistral-7b-v0.1": ({
        "model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": 4096,
        "torch_dtype": "bfloat16"}, 32, 131_072),
    # Qwen/Qwen2.5-7B-Instruct: a window that is switched off
    "qwen2.5-7b": ({
        "model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "hidden_size": 3584, "sliding_window": 131072,
        "use_sliding_window": False, "max_window_layers": 28, "torch_dtype": "bfloat16"},
        0, 57_344),
    # Qwen/Qwen3-8B: head_dim is not hidden_size / heads
    "qwen3-8b": ({
        "model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096, "sliding_window": None,
        "use_sliding_window": False, "torch_dtype": "bfloat16"}, 0, 147_456),
    # google/gemma-2-9b: every other layer has a window
    "gemma-2-9b": ({
        "model_type": "gemma2", "num_hidden_layers": 42, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "hidden_size": 3584, "sliding_window": 4096,
        "torch_dtype": "float32"}, 21, 344_064),
    # google/gemma-3-27b-it: one layer in six keeps everything; the language model is inside
    "gemma-3-27b": ({
        "model_type": "gemma3", "text_config": {
            "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
            "head_dim": 128, "hidden_size": 5376, "sliding_window": 1024,
            "sliding_window_pattern": 6}, "torch_dtype": "bfloat16"}, 52, 507_904),
    # openai/gpt-oss-20b: the kinds of layers are listed
    "gpt-oss-20b": ({
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12}, 12, 49_152),
    # deepseek-ai/DeepSeek-V3: MLA, 61 x (512 + 64) x 2
    "deepseek-v3": ({
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "torch_dtype": "bfloat16"}, 0, 70_272),
    # Qwen/Qwen3-Next-80B-A3B-Instruct: one layer in four has a cache that grows
    "qwen3-next": ({
        "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}, 0, 24_576),
    # openai-community/gpt2
    "gpt2": ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, 0, 36_864),
    # tiiuae/falcon-7b: one KV head
    "falcon-7b": ({
        "model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71,
        "hidden_size": 4544, "multi_query": True, "new_decoder_architecture": False,
        "torch_dtype": "bfloat16"}, 0, 8_192),
}  # fmt: skip


def config(folder: Path, fields: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_per_token_of_published_models(tmp_path: Path, name: str) -> None:
    fields, window_layers, expected = MODELS[name]
    shape = read_shape(config(tmp_path, fields), "bf16")
    assert shape.bytes_per_token == expected
    assert shape.window_layers == window_layers
    assert f"{expected:,} bytes a token" in shape.formula()
    assert read_shape(str(tmp_path), "fp8").bytes_per_token == expected // 2


def test_the_dtype_follows_the_model(tmp_path: Path) -> None:
    path = config(tmp_path, MODELS["gemma-2-9b"][0])  # float32
    assert read_shape(path).bytes_per_token == 2 * read_shape(path, "bf16").bytes_per_token


def test_windows_bound_what_a_sequence_keeps(tmp_path: Path) -> None:
    shape = read_shape(config(tmp_path, MODELS["gpt-oss-20b"][0]))
    per_layer = 2 * 8 * 64 * 2
    assert shape.sequence_bytes(100_000, 16) == 100_000 * 24 * per_layer
    # 127 tokens behind the newest one reach into 8 blocks before its own.
    assert shape.sequence_bytes(100_000, 16, windows=True) == per_layer * 12 * (100_000 + 144)
    assert shape.sequence_bytes(64, 16, windows=True) == shape.sequence_bytes(64, 16)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_key_value_heads": 5}, "32 attention heads are not shared by 5"),
        ({"layer_types": ["full_attention"]}, "layers missing"),
        ({"layer_types": ["strange"] * 32}, "not known here: strange"),
        ({"layer_types": ["sliding_attention"] * 32}, "no sliding_window"),
        ({"layer_types": ["mamba"] * 32}, "no layer has a KV cache"),
        ({"attn_layer_period": 8}, "not known here"),
        ({"sliding_window": "wide"}, "sliding_window is 'wide'"),
        ({"kv_lora_rank": 512}, "no qk_rope_head_dim"),
        (
            {"num_kv_shared_layers": 4, "layer_types": ["mamba"] * 28 + ["full_attention"] * 4},
            "num_kv_shared_layers is 4, of 4 layers",
        ),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    fields = {**MODELS["llama-3.1-8b"][0], **change}
    with pytest.raises(TraceError, match=why):
        read_shape(config(tmp_path, fields))


def gguf(pairs: dict[str, Any], *, vocabulary: int = 3) -> bytes:
    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    out = b""
    for key, value in pairs.items():
        out += string(key)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + string(value)
        elif isinstance(value, list):
            out += struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)
        else:
            out += struct.pack("<II", 4, value)
    out += string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, vocabulary)
    out += b"".join(string(f"t{i}") for i in range(vocabulary))
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs) + 1) + out


LLAMA_GGUF = {
    "general.architecture": "llama", "llama.block_count": 32, "llama.embedding_length": 4096,
    "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8,
    "llama.context_length": 131072,
}  # fmt: skip


def test_gguf_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(LLAMA_GGUF))
    assert read_shape(str(path)).bytes_per_token == 131_072
    path.write_bytes(gguf({**LLAMA_GGUF, "llama.attention.key_length": 64,
                           "llama.attention.value_length": 32}))  # fmt: skip
    assert read_shape(str(path)).bytes_per_token == 32 * 8 * (64 + 32) * 2
    path.write_bytes(gguf({**LLAMA_GGUF, "llama.attention.head_count_kv": [0, 8] * 16}))
    assert read_shape(str(path)).bytes_per_token == 131_072 // 2
    mla = {
        "general.architecture": "deepseek2",
        "deepseek2.block_count": 61,
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.rope.dimension_count": 64,
    }
    path.write_bytes(gguf(mla))
    assert read_shape(str(path)).bytes_per_token == 70_272


def test_the_gguf_of_a_real_model() -> None:
    gguf_file = pytest.importorskip("kvpool.engine.gguf_file")
    try:
        path = gguf_file.default_model_path()
    except Exception as error:
        pytest.skip(str(error))
    assert read_shape(str(path)).bytes_per_token == 30 * 2 * 3 * 64 * 2


def test_damaged_gguf_files_are_refused(tmp_path: Path) -> None:
    whole = gguf(LLAMA_GGUF)
    path = tmp_path / "model.gguf"
    for n in range(4, len(whole) - 1, 7):
        path.write_bytes(whole[:n])
        with pytest.raises(TraceError):
            read_shape(str(path))
    for at in (4, 16, 24, 60):
        damaged = bytearray(whole)
        damaged[at : at + 8] = b"\xff" * 8
        path.write_bytes(damaged)
        with pytest.raises(TraceError):
            read_shape(str(path))


def test_files_without_an_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="/dev/zero: no configuration: more than 16777216 bytes"):
        read_shape("/dev/zero")
    path = tmp_path / "holes.gguf"  # a vocabulary of strings without a character, for ever
    path.write_bytes(gguf(LLAMA_GGUF, vocabulary=0)[:-8] + struct.pack("<Q", 2**32))
    os.truncate(path, 2**40)
    with pytest.raises(TraceError, match="more than 268435456 bytes of metadata"):
        read_shape(str(path))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    text = json.dumps(MODELS["llama-3.1-8b"][0])
    writer = threading.Thread(target=fifo.write_text, args=(text,), daemon=True)
    writer.start()
    assert read_shape(str(fifo)).bytes_per_token == 131_072
    writer.join()


def test_the_gguf_files_trouble_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(TraceError, match=f"^{path}: no model file: it ends in the middle"):
        read_shape(str(path))


def test_a_model_larger_than_any_memory_is_worked_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = 2**31 - 1
    fields = {"num_hidden_layers": large, "num_attention_heads": large, "head_dim": large}
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"tokens": [1, 2, 3]}\n' * 2)
    arguments = ["--config", config(tmp_path, fields), "--trace", str(trace), "--json"]
    assert main(["size", *arguments, "--memory", "1GiB", "--weights", "0"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bytes_per_token"] == large**3 * 4
    assert len(document["trace"]["rows"]) < 100  # one for each doubling


def test_the_command_shows_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, MODELS["llama-3.1-8b"][0])
    arguments = ["size", "--config", path, "--memory", "80GiB", "--weights", "16GiB"]
    assert main([*arguments, "--lengths", "1000,8192"]) == 0
    out = capsys.readouterr().out
    assert "2 (K and V) x 8 KV heads x 128 head_dim x 2 bytes = 131,072 bytes a token" in out
    assert "32,768 blocks, 524,288 tokens" in out
    assert main([*arguments, "--lengths", "1000,8192", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["concurrent"] for row in document["sequences"]] == [32768 // 63, 64]
    assert main(["size", "--config", path, "--memory", "8GiB", "--weights", "16GiB"]) == 2
    assert "leave nothing" in capsys.readouterr().err


def test_each_gib_of_the_real_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, MODELS["qwen2.5-7b"][0])
    arguments = ["size", "--config", path, "--memory", "64GiB", "--trace", conversation()]
    assert main([*arguments, "--json", "--block-tokens", "32"]) == 0
    trace = json.loads(capsys.readouterr().out)["trace"]
    assert (trace["blocks"], trace["longest_request_blocks"]) == (288_500, 247)
    rates = [row["block_hit_rate"] for row in trace["rows"]]
    assert rates == sorted(rates)
    assert rates[-1] == trace["ceiling"] == round(105_592 / 288_500, 6)
    held = {row["gib"]: row["blocks"] for row in trace["rows"]}
    assert held[64] == 64 * 2**30 // (57_344 * 512)
    assert [row["holds_longest_request"] for row in trace["rows"]] == [
        row["blocks"] >= 247 for row in trace["rows"]
    ]
