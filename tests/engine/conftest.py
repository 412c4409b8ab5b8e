"""Models for the engine's tests: tiny random ones, made here, and SmolLM2 if it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

import kvpool

if TYPE_CHECKING:  # the fixtures import these: without the model extra the tests are skipped
    from engine_support import Loaded
    from tiny_llama import TinyLlama


@pytest.fixture(scope="session")
def tiny_weights() -> TinyLlama:
    from tiny_llama import TinyLlama

    return TinyLlama(eos=False)


@pytest.fixture(scope="session")
def tiny(tiny_weights: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A tiny model that never ends an answer by itself."""
    from engine_support import load

    return load(tiny_weights.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="session")
def minute(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The smallest model that has everything: for thousands of runs."""
    from engine_support import load
    from tiny_llama import TinyLlama

    small = {"n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "embed_dim": 16}
    weights = TinyLlama(**small, ffn_dim=24, context_length=2048, eos=False)
    return load(weights.write(tmp_path_factory.mktemp("minute") / "minute.gguf"), threads=1)


@pytest.fixture(scope="session")
def smollm() -> Loaded:
    """SmolLM2-135M-Instruct."""
    from engine_support import load

    from kvpool.engine.gguf_file import default_model_path

    try:
        path = default_model_path()
    except ValueError as error:
        pytest.skip(str(error))
    return load(path)


@pytest.fixture
def manager_of(tiny: Loaded) -> Iterator[Callable[..., kvpool.BlockManager]]:
    """Makes managers of pools for the tiny model; at the end none may have a block in use."""
    managers: list[kvpool.BlockManager] = []

    def make(
        n_blocks: int, block_tokens: int = 16, prefix_cache: str = "hash", watermark: int = 0
    ) -> kvpool.BlockManager:
        pool = tiny.pool(n_blocks, block_tokens)
        managers.append(
            kvpool.BlockManager(pool, prefix_cache=prefix_cache, watermark=watermark)  # type: ignore[arg-type]
        )
        return managers[-1]

    yield make
    for manager in managers:
        if not manager.closed:
            manager.check()
        manager.pool.check()
        assert manager.pool.stats.used == 0
