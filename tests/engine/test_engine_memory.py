"""What sharing saves: the table of docs/engine.md, on a small model."""

from __future__ import annotations

import numpy as np
import pytest
from engine_support import run_together

from kvpool import BlockManager
from kvpool.engine.paged import blocks_needed

N, PREFIX, TAIL, MAX_TOKENS = 64, 500, 20, 24


def test_64_prompts_with_a_shared_prefix_need_less_than_half_of_contiguous_caches(minute) -> None:
    """Bytes of the blocks in use at the peak against one array for each request with room for
    prompt and answer, and for the answer's real length: every sequence ends at ``max_tokens``."""
    random = np.random.default_rng(0)
    system = random.integers(3, 260, PREFIX).tolist()
    asked = [
        {"prompt": system + random.integers(3, 260, TAIL).tolist(), "max_tokens": MAX_TOKENS}
        for _ in range(N)
    ]
    positions = PREFIX + TAIL + MAX_TOKENS - 1
    contiguous = N * positions * minute.file.config.kv_bytes_per_token
    with minute.pool(blocks_needed(positions, 1, 1, 16) * N) as pool:  # room enough for no sharing
        manager = BlockManager(pool)
        run = run_together(minute, manager, asked)
        peak = manager.stats.peak_used
        assert max(step.n_decode for step in run.steps) == N  # all 64 at the same time
        assert peak * pool.block_bytes < contiguous / 2
        # the prefix once (31 full blocks), and three or four blocks for each request
        assert peak == PREFIX // 16 + N * (-(-positions // 16) - PREFIX // 16)
        assert manager.stats.hit_tokens == (N - 1) * (PREFIX // 16 * 16)


@pytest.mark.parametrize("prefix_cache", ["hash", "none"])
def test_in_a_pool_of_half_the_size_all_are_answered(minute, prefix_cache) -> None:
    """With sharing nobody is preempted; without it they take turns."""
    random = np.random.default_rng(0)
    system = random.integers(3, 260, PREFIX).tolist()
    prompts = [system + random.integers(3, 260, TAIL).tolist() for _ in range(8)]
    positions = PREFIX + TAIL + MAX_TOKENS - 1
    with minute.pool(-(-positions // 16) * 4) as pool:
        manager = BlockManager(pool, prefix_cache=prefix_cache)
        run = run_together(
            minute, manager, [{"prompt": p, "max_tokens": MAX_TOKENS} for p in prompts]
        )
        most = max(step.n_decode for step in run.steps)
    assert most == 8 if prefix_cache == "hash" else most <= 4
    assert all(request.samples[0].finish == "length" for request in run.requests)
