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
def no_blocks_left(tiny: Loaded) -> Iterator[Callable[..., kvpool.Pool]]:
    """Makes pools for the tiny model; at the end none may have a block in use."""
    pools: list[kvpool.Pool] = []

    def make(n_blocks: int, block_tokens: int = 16) -> kvpool.Pool:
        pools.append(tiny.pool(n_blocks, block_tokens))
        return pools[-1]

    yield make
    for pool in pools:
        pool.check()
        assert pool.stats.used == 0
