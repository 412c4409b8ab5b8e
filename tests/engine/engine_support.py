"""What the engine's tests share. Importing it skips the module where the model extra is missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

for package in ("gguf", "tokenizers", "jinja2", "rich"):
    pytest.importorskip(package, reason=f"the engine needs {package} (kvpool[model])")

from kvpool import BlockManager, Pool  # noqa: E402
from kvpool.engine.cache import ContiguousCache, KVCache  # noqa: E402
from kvpool.engine.generate import generate  # noqa: E402
from kvpool.engine.gguf_file import ModelFile  # noqa: E402
from kvpool.engine.llama import Array, Llama  # noqa: E402
from kvpool.engine.paged import PagedCache  # noqa: E402
from kvpool.engine.tokenizer import Tokenizer  # noqa: E402


@dataclass
class Loaded:
    """A model, its tokenizer, and caches of its dimensions."""

    path: Path
    file: ModelFile
    model: Llama
    tokenizer: Tokenizer

    def pool(self, n_blocks: int, block_tokens: int = 16) -> Pool:
        cfg = self.file.config
        return Pool(
            n_blocks,
            block_tokens=block_tokens,
            n_layers=cfg.n_layers,
            n_kv_heads=cfg.n_kv_heads,
            head_dim=cfg.head_dim,
        )

    def contiguous(self, max_tokens: int = 512) -> ContiguousCache:
        cfg = self.file.config
        return ContiguousCache(
            n_layers=cfg.n_layers,
            n_kv_heads=cfg.n_kv_heads,
            head_dim=cfg.head_dim,
            max_tokens=max_tokens,
        )


def load(path: Path) -> Loaded:
    file = ModelFile(path)
    return Loaded(path, file, Llama(file), Tokenizer(file))


def paged(pool: Pool, prefix_cache: str = "hash") -> PagedCache:
    """A cache over a manager of its own. A pool has one at a time."""
    return PagedCache(BlockManager(pool, prefix_cache=prefix_cache))  # type: ignore[arg-type]


class Recorder:
    """A model that keeps all logits it computes, to be compared bit by bit."""

    def __init__(self, model: Llama) -> None:
        self.config, self.forward, self._logits = model.config, model.forward, model.logits
        self.seen: list[Array] = []

    def logits(self, hidden: Array) -> Array:
        scores = self._logits(hidden)
        self.seen.append(scores)
        return scores


def same_bits(a: list[Array], b: list[Array]) -> bool:
    return len(a) == len(b) and all(
        np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(a, b, strict=True)
    )


def run_prompts(
    loaded: Loaded, cache: KVCache, prompts: list[list[int]], **options: object
) -> tuple[list[list[list[int]]], list[Array]]:
    """Tokens of every sample of every prompt, and all logits on the way."""
    recorder = Recorder(loaded.model)
    options = {"stop_tokens": loaded.tokenizer.stop_tokens, "max_tokens": 24, **options}
    results = [generate(recorder, cache, prompt, **options) for prompt in prompts]  # type: ignore[arg-type]
    return [[sample.tokens for sample in result.samples] for result in results], recorder.seen
