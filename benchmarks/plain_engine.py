"""The engine one would write first, as a yardstick: NumPy's products, K and V gathered.

    every matrix    rows @ matrix.T, one call, with BLAS's own threads
    K and V         gathered by the block table for every layer of every sequence: one ``take`` of
                    the float16 values, widened to float32 by integer operations (seven times as
                    fast as ``astype``)
    attention       two batched products and a softmax for each sequence

Two ways to decode several sequences:

    one_by_one      each sequence in a pass of its own
    together        one pass: the matrices see all rows at once, only gather and attention go
                    sequence by sequence. The best that plain NumPy does.

It shares the model's weights and the block manager with the engine, and nothing else.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
from kvpool import BlockManager
from kvpool.engine.llama import Array, Llama, _rms_norm, _rotate, _silu

__all__ = ["PlainEngine", "set_blas_threads"]


class PlainEngine:
    """Decodes sequences of a manager with the weights of a model."""

    def __init__(self, model: Llama, manager: BlockManager) -> None:
        self.model, self.manager, pool = model, manager, manager.pool
        self.slab = pool.slab
        # The slab as a list of panels: one block's positions, for one layer, K or V, and head.
        self.panels = self.slab.view(np.int16).reshape(-1, pool.block_tokens * pool.head_dim)
        self.of_a_layer = np.arange(2 * pool.n_kv_heads).reshape(2, pool.n_kv_heads, 1)

    def one_by_one(self, sequences: Sequence[kvpool.Sequence], tokens: Sequence[int]) -> Array:
        """The next logits of each sequence, (n, vocab_size); its token is appended first."""
        pairs = zip(sequences, tokens, strict=True)
        return np.concatenate([self.together([s], [token]) for s, token in pairs])

    def together(self, sequences: Sequence[kvpool.Sequence], tokens: Sequence[int]) -> Array:
        """The same in one pass."""
        model, cfg, size = self.model, self.model.config, self.manager.pool.block_tokens
        self.manager.append(list(sequences), list(tokens))
        tables = [sequence.blocks.astype(np.int64) for sequence in sequences]
        positions = np.array([len(sequence) - 1 for sequence in sequences])
        last = np.array([table[p // size] for table, p in zip(tables, positions, strict=True)])
        panels = [t * (cfg.n_layers * self.of_a_layer.size) + self.of_a_layer for t in tables]
        n, n_rotated = len(sequences), cfg.n_heads + cfg.n_kv_heads
        cos, sin = model._rotation(positions)
        x = model.embedding[np.asarray(tokens)]
        attended = np.empty((n, cfg.n_heads * cfg.head_dim), dtype=np.float32)
        for index, layer in enumerate(model._layers):
            h = _rms_norm(x, layer.attn_norm, cfg.rms_eps)
            qkv = (h @ layer.qkv.T).reshape(n, -1, cfg.head_dim)
            _rotate(qkv[:, :n_rotated], cos, sin)
            q = qkv[:, : cfg.n_heads] * np.float32(1 / math.sqrt(cfg.head_dim))
            kv = qkv[:, cfg.n_heads :].reshape(n, 2, cfg.n_kv_heads, cfg.head_dim)
            self.slab[last, index, :, :, positions % size] = kv.astype(np.float16)
            for i in range(n):
                keys, values = self.gather(panels[i] + index * self.of_a_layer.size)
                n_keys = positions[i] + 1
                attended[i] = attend(q[i], keys[:, :n_keys], values[:, :n_keys]).reshape(-1)
            x += attended @ layer.attn_out.T
            h = _rms_norm(x, layer.ffn_norm, cfg.rms_eps)
            gate, up = np.split(h @ layer.gate_up.T, 2, axis=1)
            x += (_silu(gate) * up) @ layer.down.T
        self.manager.commit(list(sequences))
        logits: Array = _rms_norm(x, model._out_norm, cfg.rms_eps) @ model._head.T
        return logits

    def gather(self, panels: Any) -> Array:
        """(2, n_kv_heads, positions of the blocks, head_dim) float32 from the slab."""
        bits = self.panels.take(panels, axis=0).astype(np.int32).view(np.uint32)
        np.left_shift(bits, 13, out=bits)  # float16 to float32: exponent and mantissa in place,
        np.bitwise_and(bits, 0x8FFFFFFF, out=bits)  # then the difference of the biases, 112
        values = bits.view(np.float32)
        np.multiply(values, np.float32(2.0**112), out=values)
        return values.reshape(*panels.shape[:2], -1, self.manager.pool.head_dim)


def attend(q: Array, keys: Array, values: Array) -> Array:
    """(n_heads, head_dim) over (n_kv_heads, n_keys, head_dim)."""
    grouped = q.reshape(len(keys), -1, q.shape[-1])
    scores = grouped @ keys.swapaxes(1, 2)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    mixed: Array = scores @ values
    mixed /= scores.sum(axis=-1, keepdims=True)
    return mixed


def set_blas_threads(n: int) -> bool:
    """Tells the OpenBLAS inside NumPy's wheel how many threads it may use. False: it has none."""
    folder = Path(np.__file__).parent.parent / "numpy.libs"
    for path in folder.glob("*openblas*"):
        library = ctypes.CDLL(str(path))
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_"):
            if hasattr(library, name):
                getattr(library, name)(n)
                return True
    return False
