"""Fixtures of the package's tests: pools of the format's worked example and of other shapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvpool
from pool_support import MakePool


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """Makes pools of the worked example's shape, and checks every one of them at the end."""
    pools: list[kvpool.Pool] = []

    def make(n_blocks: int = 4, **overrides: int) -> kvpool.Pool:
        shape = {"block_tokens": 2, "n_layers": 1, "n_kv_heads": 1, "head_dim": 2} | overrides
        pools.append(kvpool.Pool(n_blocks, **shape))
        return pools[-1]

    yield make
    for pool in pools:
        if not pool.closed:
            pool.check()
            assert sum(pool.stats[:3]) == pool.n_blocks


@pytest.fixture
def pool(make_pool: MakePool) -> kvpool.Pool:
    return make_pool()
