"""The Llama forward pass in NumPy, over K and V in the blocks of a pool.

    tokens -> embedding -> [ RMSNorm -> q, k, v -> RoPE -> pool -> attention -> + ]    n_layers
                           [ RMSNorm -> silu(gate) * up -> down -> +              ]    times
           -> RMSNorm -> logits (with the embedding's matrix when the file has no other)

One pass takes rows of any sequences: pieces of prompts, one new token of each running sample, draft
tokens. A row is one token at one position. K and V are never gathered: the attention kernel reads
them where the block table says.

What makes the numbers reproducible
-----------------------------------
A prefix hit, the block size, a chunk, or company in a batch change how many rows a pass has. A
product over all rows at once may then round differently, and greedy tokens drift apart. Here no
row's result depends on the others:

* ``linear`` multiplies fixed tiles of rows.
* The kernel's results are the same bits for any batch, block size and number of threads, and a
  prompt's rows are those of single steps (kvpool.attention).
* Everything else is element by element, or a sum along one row.

So the K and V of a token, and its logits, are a function of the tokens before it: the same bits
with the prefix cache on or off, with any block size, alone or in a batch, on one machine with one
NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.attention import ThreadPool, paged_decode, paged_prefill

from .gguf_file import LlamaConfig, ModelFile
from .linear import linear, n_cores
from .paged import Batch

__all__ = ["Array", "Llama"]

Array = NDArray[np.float32]


@dataclass(frozen=True)
class _Layer:
    attn_norm: Array  # (embed_dim,)
    qkv: Array  # ((n_heads + 2 * n_kv_heads) * head_dim, embed_dim)
    attn_out: Array  # (embed_dim, n_heads * head_dim)
    ffn_norm: Array  # (embed_dim,)
    gate_up: Array  # (2 * ffn_dim, embed_dim)
    down: Array  # (embed_dim, ffn_dim)


class Llama:
    """A model in memory: float32 weights and the forward pass. Holds no state between passes.

    Attributes:
        config: the dimensions.
        embedding: (vocab_size, embed_dim) float32.
        threads: how many threads a pass uses. The numbers do not depend on it.
    """

    def __init__(
        self,
        file: ModelFile,
        progress: Callable[[int, int], None] | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        """Reads every weight of ``file``; calls ``progress(layers_done, n_layers)`` on the way.

        ``threads``: one for each core if left out.

        Raises:
            ModelFileError: a tensor is missing, unknown, of another shape or of an unknown format.
        """
        cfg = self.config = file.config
        self.threads = threads or n_cores()
        self._attention_threads = ThreadPool(self.threads) if self.threads > 1 else None
        q_dim, kv_dim = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
        tied = "output.weight" not in file
        n_of_layer = cfg.embed_dim * (2 * q_dim + 2 * kv_dim + 3 * cfg.ffn_dim)
        n_values = (1 if tied else 2) * cfg.vocab_size * cfg.embed_dim + cfg.n_layers * n_of_layer
        # All matrices in one array: NumPy asks for huge pages, which small arrays do not get, and
        # reading them takes 7 % less time. A file that has less than it should is told below.
        arena = np.empty(min(n_values, file.n_values), dtype=np.float32)
        known: set[str] = set()
        n_used = 0

        def get(name: str, *shape: int) -> Array:
            known.add(name)
            return file.weight(name, *shape)

        def keep(*matrices: Array) -> Array:
            nonlocal n_used
            n_rows = sum(map(len, matrices))
            end = n_used + n_rows * matrices[0].shape[1]
            kept = arena[n_used:end].reshape(n_rows, -1)
            np.concatenate(matrices, out=kept)
            n_used = end
            return kept

        self.embedding = keep(get("token_embd.weight", cfg.vocab_size, cfg.embed_dim))
        self._head = self.embedding
        if not tied:
            self._head = keep(get("output.weight", *self.embedding.shape))
        self._out_norm = get("output_norm.weight", cfg.embed_dim)
        self._inverse_frequencies = _inverse_frequencies(cfg)
        if "rope_freqs.weight" in file:  # Llama 3.1: one divisor for each frequency
            self._inverse_frequencies /= get("rope_freqs.weight", cfg.head_dim // 2)

        self._layers: list[_Layer] = []
        for i in range(cfg.n_layers):
            if progress is not None:
                progress(i, cfg.n_layers)
            block = f"blk.{i}."
            self._layers.append(
                _Layer(
                    attn_norm=get(block + "attn_norm.weight", cfg.embed_dim),
                    qkv=keep(
                        get(block + "attn_q.weight", q_dim, cfg.embed_dim),
                        get(block + "attn_k.weight", kv_dim, cfg.embed_dim),
                        get(block + "attn_v.weight", kv_dim, cfg.embed_dim),
                    ),
                    attn_out=keep(get(block + "attn_output.weight", cfg.embed_dim, q_dim)),
                    ffn_norm=get(block + "ffn_norm.weight", cfg.embed_dim),
                    gate_up=keep(
                        get(block + "ffn_gate.weight", cfg.ffn_dim, cfg.embed_dim),
                        get(block + "ffn_up.weight", cfg.ffn_dim, cfg.embed_dim),
                    ),
                    down=keep(get(block + "ffn_down.weight", cfg.embed_dim, cfg.ffn_dim)),
                )
            )
        file.refuse_unknown_tensors(known)
        if progress is not None:
            progress(cfg.n_layers, cfg.n_layers)

    def forward(self, batch: Batch) -> Array:
        """Computes the rows of a batch and writes their K and V.

        The caller commits them when this returns. Gives (n_rows, embed_dim) float32, the rows'
        hidden states before the last norm; :meth:`logits` takes any of them.
        """
        cfg, n = self.config, len(batch.tokens)
        n_rotated, kv_shape = cfg.n_heads + cfg.n_kv_heads, (n, 2, cfg.n_kv_heads, cfg.head_dim)
        cos, sin = self._rotation(batch.positions)
        attended = np.empty((n, cfg.n_heads, cfg.head_dim), dtype=np.float32)
        x = self.embedding[batch.tokens]
        for index, layer in enumerate(self._layers):
            h = _rms_norm(x, layer.attn_norm, cfg.rms_eps)
            qkv = self._linear(layer.qkv, h).reshape(n, -1, cfg.head_dim)
            _rotate(qkv[:, :n_rotated], cos, sin)
            batch.store(index, qkv[:, cfg.n_heads :].reshape(kv_shape))
            self._attend(index, batch, np.ascontiguousarray(qkv[:, : cfg.n_heads]), attended)
            x += self._linear(layer.attn_out, attended.reshape(n, -1))

            h = _rms_norm(x, layer.ffn_norm, cfg.rms_eps)
            both = self._linear(layer.gate_up, h)
            gate, up = both[:, : cfg.ffn_dim], both[:, cfg.ffn_dim :]
            x += self._linear(layer.down, _silu(gate) * up)
        return x

    def logits(self, hidden: Array) -> Array:
        """The scores of every token to come next: (n, embed_dim) to (n, vocab_size) float32."""
        return self._linear(self._head, _rms_norm(hidden, self._out_norm, self.config.rms_eps))

    def _linear(self, matrix: Array, rows: Array) -> Array:
        return linear(matrix, rows, self.threads)

    def _attend(self, layer: int, batch: Batch, q: Array, out: Array) -> None:
        """Causal attention of (n_rows, n_heads, head_dim) queries over the blocks of the batch.

        Query head h reads KV head h // (n_heads // n_kv_heads).
        """
        pool, n, threads = batch.pool, batch.n_single, self._attention_threads
        if n:
            paged_decode(
                q[:n], pool, layer, batch.tables[:n], batch.lengths[:n], out=out[:n],
                threads=threads,
            )  # fmt: skip
        for (first, last), table, length in zip(
            batch.longer, batch.tables[n:], batch.lengths[n:], strict=True
        ):
            paged_prefill(
                q[first:last], pool, layer, table, int(length), out=out[first:last],
                threads=threads,
            )  # fmt: skip

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
