"""Random Llama models of a few thousand parameters, as GGUF files and as a float64 reference.

The reference is written against the layout that checkpoints outside GGUF use (RoPE pairs i with
i + head_dim / 2, one product over all positions, explicit causal mask), so that it shares neither
code nor conventions with the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "Ġ a", "i n", "in g", "a n", "an d", "Ġ and", "e r", "o u", "Ġ Ġ"]


def printable_bytes() -> list[str]:
    """GPT-2's character for each byte."""
    chars, extra = [], 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            chars.append(chr(byte))
        else:
            chars.append(chr(256 + extra))
            extra += 1
    return chars


@dataclass
class TinyLlama:
    """Dimensions and weights; ``write`` makes the GGUF file, ``logits`` is the reference."""

    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    embed_dim: int = 48
    ffn_dim: int = 80
    context_length: int = 512
    rope_base: float = 10_000.0
    rope_factor: float = 1.0
    rope_divisors: bool = False
    tied: bool = True
    eos: bool = True
    seed: int = 0
    pieces: list[str] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        merged = [line.replace(" ", "") for line in MERGES]
        self.pieces = [*SPECIAL, *printable_bytes(), *merged]
        random = np.random.default_rng(self.seed)

        def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
            values = random.standard_normal((rows, columns)) * scale / np.sqrt(columns)
            return values.astype(np.float32)

        def gain(n: int) -> np.ndarray:
            return (1 + 0.2 * random.standard_normal(n)).astype(np.float32)

        w, q, kv = self.weights, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        w["token_embd"] = matrix(len(self.pieces), self.embed_dim, 4.0)
        for i in range(self.n_layers):
            w[f"blk.{i}.attn_norm"] = gain(self.embed_dim)
            w[f"blk.{i}.attn_q"] = matrix(q, self.embed_dim, 2.0)
            w[f"blk.{i}.attn_k"] = matrix(kv, self.embed_dim, 2.0)
            w[f"blk.{i}.attn_v"] = matrix(kv, self.embed_dim)
            w[f"blk.{i}.attn_output"] = matrix(self.embed_dim, q)
            w[f"blk.{i}.ffn_norm"] = gain(self.embed_dim)
            w[f"blk.{i}.ffn_gate"] = matrix(self.ffn_dim, self.embed_dim)
            w[f"blk.{i}.ffn_up"] = matrix(self.ffn_dim, self.embed_dim)
            w[f"blk.{i}.ffn_down"] = matrix(self.embed_dim, self.ffn_dim)
        w["output_norm"] = gain(self.embed_dim)
        if not self.tied:
            w["output"] = matrix(len(self.pieces), self.embed_dim, 4.0)
        if self.rope_divisors:
            w["rope_freqs"] = np.linspace(1, 8, self.head_dim // 2).astype(np.float32)

    # ---- the file -------------------------------------------------------------------------------

    def write(
        self,
        path: Path,
        *,
        arch: str = "llama",
        drop: tuple[str, ...] = (),
        extra: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
    ) -> Path:
        """Writes the file without the keys and tensors in ``drop``, with ``extra`` ones."""
        writer = gguf.GGUFWriter(path, arch)
        keys: dict[str, Any] = {
            "general.name": "tiny",
            "llama.block_count": self.n_layers,
            "llama.context_length": self.context_length,
            "llama.embedding_length": self.embed_dim,
            "llama.feed_forward_length": self.ffn_dim,
            "llama.attention.head_count": self.n_heads,
            "llama.attention.head_count_kv": self.n_kv_heads,
            "llama.attention.key_length": self.head_dim,
            "llama.attention.value_length": self.head_dim,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": self.rope_base,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": self.pieces,
            "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(self.pieces) - 3),
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.chat_template": TEMPLATE,
        }
        if self.eos:
            keys["tokenizer.ggml.eos_token_id"] = 2
        if self.rope_factor != 1:
            keys["llama.rope.scaling.type"] = "linear"
            keys["llama.rope.scaling.factor"] = self.rope_factor
        for key, value in {**keys, **(extra or {})}.items():
            if key in drop:
                continue
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, values in {**self.weights, **(tensors or {})}.items():
            full = f"{name}.weight" if "." not in name or not name.endswith(".bias") else name
            if full in drop:
                continue
            if name.endswith("attn_q"):
                values = _pairs_side_by_side(values, self.n_heads)
            elif name.endswith("attn_k"):
                values = _pairs_side_by_side(values, self.n_kv_heads)
            writer.add_tensor(full, np.ascontiguousarray(values))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    # ---- the reference --------------------------------------------------------------------------

    def logits(self, tokens: list[int], kv_dtype: type = np.float64) -> np.ndarray:
        """(len(tokens), vocab) in float64; K and V are rounded to ``kv_dtype`` in between."""
        w = {name: values.astype(np.float64) for name, values in self.weights.items()}
        n, group = len(tokens), self.n_heads // self.n_kv_heads
        half = self.head_dim // 2
        angle = np.arange(n)[:, None] / self.rope_factor
        angle = angle * self.rope_base ** -(np.arange(half) / half) / w.get("rope_freqs", 1.0)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

        def rotate(x: np.ndarray) -> np.ndarray:
            first, second = x[..., :half], x[..., half:]
            return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

        def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

        x = w["token_embd"][tokens]
        for i in range(self.n_layers):
            h = norm(x, w[f"blk.{i}.attn_norm"])
            q = rotate((h @ w[f"blk.{i}.attn_q"].T).reshape(n, self.n_heads, -1))
            k = rotate((h @ w[f"blk.{i}.attn_k"].T).reshape(n, self.n_kv_heads, -1))
            v = (h @ w[f"blk.{i}.attn_v"].T).reshape(n, self.n_kv_heads, -1)
            k, v = (np.repeat(t.astype(kv_dtype).astype(np.float64), group, 1) for t in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self.head_dim)
            scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)
            x = x + mixed @ w[f"blk.{i}.attn_output"].T
            h = norm(x, w[f"blk.{i}.ffn_norm"])
            gate = h @ w[f"blk.{i}.ffn_gate"].T
            up = h @ w[f"blk.{i}.ffn_up"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{i}.ffn_down"].T
        return norm(x, w["output_norm"]) @ w.get("output", w["token_embd"]).T


def _pairs_side_by_side(matrix: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows i and i + head_dim / 2 of each head become rows 2i and 2i + 1: GGUF's order."""
    heads = matrix.reshape(n_heads, 2, -1, matrix.shape[1])
    return heads.transpose(0, 2, 1, 3).reshape(matrix.shape)
