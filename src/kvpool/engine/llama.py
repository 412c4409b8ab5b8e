"""The Llama forward pass in NumPy, over a KV cache that lives somewhere else.

    tokens -> embedding -> [ RMSNorm -> q, k, v -> RoPE -> cache -> attention -> + ]   n_layers
                           [ RMSNorm -> silu(gate) * up -> down -> +               ]   times
           -> RMSNorm -> logits (with the embedding's matrix when the file has no other)

One pass takes rows of any sequences: a piece of a prompt, or one new token of each of several
samples. A row is one token at one position.

What makes the numbers reproducible
-----------------------------------
A prefix hit, the block size, or company in a batch change how many rows a pass has. A matrix
product over all rows at once may then round differently, and greedy tokens drift apart. Here every
row is computed by calls whose shapes depend on the row's position alone:

* ``linear`` multiplies a matrix with each row by itself (BLAS matrix-vector calls).
* Attention is one matrix-vector call for each row and head, over ``key_rows(position)`` keys: the
  end of the row's tile of TILE positions. Keys after the row's own position weigh exactly zero.
* Everything else is element by element, or a sum along one row.

So the K and V of a token, and its logits, are a function of the tokens before it: the same bits
with the prefix cache on or off, with any block size, alone or in a batch, on one machine with one
NumPy. What it costs: at 32 rows, about half of the speed of one large product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .cache import KVSequence
from .gguf_file import LlamaConfig, ModelFile
from .linear import linear

__all__ = ["TILE", "Llama", "Span", "key_rows"]

#: Positions are computed in aligned tiles of this many: a prompt goes through the model one tile at
#: a time, and attention reads keys up to the end of the tile that the query stands in.
TILE = 32

Array = NDArray[np.float32]


class Span(NamedTuple):
    """The next n tokens of a sequence that are not computed yet, all in one tile."""

    sequence: KVSequence
    n: int


@dataclass(frozen=True)
class _Layer:
    attn_norm: Array  # (embed_dim,)
    qkv: Array  # ((n_heads + 2 * n_kv_heads) * head_dim, embed_dim)
    attn_out: Array  # (embed_dim, n_heads * head_dim)
    ffn_norm: Array  # (embed_dim,)
    gate_up: Array  # (2 * ffn_dim, embed_dim)
    down: Array  # (embed_dim, ffn_dim)


def key_rows(position: int) -> int:
    """How many keys a query at ``position`` is computed over: its position, up to a full tile.

    >>> key_rows(0), key_rows(31), key_rows(32)
    (32, 32, 64)
    """
    return (position // TILE + 1) * TILE


class Llama:
    """A model in memory: float32 weights and the forward pass. Holds no state between passes.

    Attributes:
        config: the dimensions.
        embedding: (vocab_size, embed_dim) float32.
    """

    def __init__(self, file: ModelFile, progress: Callable[[int, int], None] | None = None) -> None:
        """Reads every weight of ``file``; calls ``progress(layers_done, n_layers)`` on the way.

        Raises:
            ModelFileError: a tensor is missing, unknown, of another shape or of an unknown format.
        """
        cfg = self.config = file.config
        self._known: set[str] = set()

        def get(name: str, *shape: int) -> Array:
            self._known.add(name)
            return file.weight(name, *shape)

        self.embedding = get("token_embd.weight", cfg.vocab_size, cfg.embed_dim)
        tied = "output.weight" not in file
        self._head = self.embedding if tied else get("output.weight", *self.embedding.shape)
        self._out_norm = get("output_norm.weight", cfg.embed_dim)
        self._inverse_frequencies = _inverse_frequencies(cfg)
        if "rope_freqs.weight" in file:  # Llama 3.1: one divisor for each frequency
            self._inverse_frequencies /= get("rope_freqs.weight", cfg.head_dim // 2)

        self._layers: list[_Layer] = []
        q_dim, kv_dim = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
        for i in range(cfg.n_layers):
            if progress is not None:
                progress(i, cfg.n_layers)
            block = f"blk.{i}."
            q = get(block + "attn_q.weight", q_dim, cfg.embed_dim)
            k = get(block + "attn_k.weight", kv_dim, cfg.embed_dim)
            v = get(block + "attn_v.weight", kv_dim, cfg.embed_dim)
            gate = get(block + "ffn_gate.weight", cfg.ffn_dim, cfg.embed_dim)
            up = get(block + "ffn_up.weight", cfg.ffn_dim, cfg.embed_dim)
            self._layers.append(
                _Layer(
                    attn_norm=get(block + "attn_norm.weight", cfg.embed_dim),
                    qkv=np.concatenate([q, k, v]),
                    attn_out=get(block + "attn_output.weight", cfg.embed_dim, q_dim),
                    ffn_norm=get(block + "ffn_norm.weight", cfg.embed_dim),
                    gate_up=np.concatenate([gate, up]),
                    down=get(block + "ffn_down.weight", cfg.embed_dim, cfg.ffn_dim),
                )
            )
        file.refuse_unknown_tensors(self._known)
        if progress is not None:
            progress(cfg.n_layers, cfg.n_layers)

    def forward(self, spans: Sequence[Span]) -> Array:
        """Computes the spans' tokens: writes their K and V, returns their last hidden states.

        A sequence stands in one span only. The caller commits it when this returns.

        Returns (len(spans), embed_dim) float32, one row for each span's last token, normed: what
        :meth:`logits` takes.
        """
        cfg = self.config
        starts = [span.sequence.n_computed for span in spans]
        n_keys = [key_rows(start) for start in starts]
        for span, start, keys in zip(spans, starts, n_keys, strict=True):
            assert 0 < span.n <= keys - start, "a span stays within one tile"
        places = [(s.sequence, start, start + s.n) for s, start in zip(spans, starts, strict=True)]
        tokens = np.concatenate([np.asarray(s.tokens[a:b], np.int64) for s, a, b in places])
        positions = np.concatenate([np.arange(a, b) for _, a, b in places])
        ends = np.cumsum([span.n for span in spans])  # rows of span i: ends[i] - n .. ends[i]
        rows = [slice(int(end) - span.n, int(end)) for span, end in zip(spans, ends, strict=True)]
        scratch = np.empty((2 * cfg.n_kv_heads * cfg.head_dim * max(n_keys),), dtype=np.float32)

        n_rotated = cfg.n_heads + cfg.n_kv_heads
        cos, sin = self._rotation(positions)
        attended = np.empty((len(tokens), cfg.n_heads, cfg.head_dim), dtype=np.float32)
        x = self.embedding[tokens]
        for index, layer in enumerate(self._layers):
            h = _rms_norm(x, layer.attn_norm, cfg.rms_eps)
            qkv = linear(layer.qkv, h).reshape(len(tokens), -1, cfg.head_dim)
            _rotate(qkv[:, :n_rotated], cos, sin)
            q = qkv[:, : cfg.n_heads] * np.float32(1 / math.sqrt(cfg.head_dim))
            kv = qkv[:, cfg.n_heads :].reshape(-1, 2, cfg.n_kv_heads, cfg.head_dim)
            for span, part, keys in zip(spans, rows, n_keys, strict=True):
                span.sequence.write(index, kv[part])
                size = 2 * cfg.n_kv_heads * keys * cfg.head_dim
                cached = scratch[:size].reshape(2, cfg.n_kv_heads, keys, cfg.head_dim)
                span.sequence.read(index, span.sequence.n_computed + span.n, cached)
                attended[part] = _attend(q[part], cached[0], cached[1], positions[part])
            x += linear(layer.attn_out, attended.reshape(len(tokens), -1))

            h = _rms_norm(x, layer.ffn_norm, cfg.rms_eps)
            gate, up = np.split(linear(layer.gate_up, h), 2, axis=1)
            x += linear(layer.down, _silu(gate) * up)
        return _rms_norm(x[ends - 1], self._out_norm, cfg.rms_eps)

    def logits(self, hidden: Array) -> Array:
        """The scores of every token to come next: (n, embed_dim) to (n, vocab_size) float32."""
        return linear(self._head, hidden)

    def _rotation(self, positions: NDArray[np.int64]) -> tuple[Array, Array]:
        """Cosines and sines, each (n, 1, head_dim / 2) float32; the angles are float64."""
        angles = positions[:, None, None] * self._inverse_frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _inverse_frequencies(cfg: LlamaConfig) -> NDArray[np.float64]:
    exponents = np.arange(0, cfg.head_dim, 2) / cfg.head_dim
    return cfg.rope_base**-exponents / cfg.rope_linear_factor


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(eps))
    return normed * weight


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) is infinite for x below -88: the quotient is -0
        activated: Array = x / (1 + np.exp(-x))
    return activated


def _rotate(x: Array, cos: Array, sin: Array) -> None:
    """RoPE, in place, on (n, heads, head_dim).

    GGUF files of this architecture hold the rows of Q and K in the order in which a pair to be
    rotated is (2i, 2i + 1); checkpoints elsewhere pair i with i + head_dim / 2. Attention sums over
    the whole head, so the order changes nothing but this function.
    """
    even, odd = x[..., 0::2].copy(), x[..., 1::2].copy()
    x[..., 0::2] = even * cos - odd * sin
    x[..., 1::2] = even * sin + odd * cos


def _attend(q: Array, keys: Array, values: Array, positions: NDArray[np.int64]) -> Array:
    """Causal attention of (n, n_heads, head_dim) queries over (n_kv_heads, n_keys, head_dim).

    Query head h reads KV head h // (n_heads // n_kv_heads). Scores after a row's position become
    minus infinity and weigh exactly 0, whatever finite values stand there.
    """
    n, n_heads, head_dim = q.shape
    grouped = q.reshape(n, len(keys), n_heads // len(keys), head_dim, 1)
    weights = np.matmul(keys[:, None], grouped)[..., 0]  # (n, n_kv_heads, group, n_keys)
    for row, position in enumerate(positions):
        weights[row, :, :, position + 1 :] = -np.inf
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    total = weights.sum(axis=-1)[..., None]
    mixed: Array = np.matmul(weights[..., None, :], values[:, None])[..., 0, :]
    mixed /= total
    return mixed.reshape(n, n_heads, head_dim)
