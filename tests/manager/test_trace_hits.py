"""Replays: the hits of a real trace, and of generated ones against a plain Python model.

The protocol is that of `benchmarks/peers/replay.py`: each hash id is one block, 64 requests in
flight first in first out, the oldest freed early when an allocation does not fit, a request's
blocks freed tail first. A hash id is a token of a pool with one token a block.

The real trace is Mooncake's conversation trace (FAST '25), looked for in the folder KVPOOL_TRACES
and in ../shared/traces beside the repository; without it the tests that need it are skipped.
"""

from __future__ import annotations

import json
import os
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import kvpool

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [os.environ.get("KVPOOL_TRACES"), str(ROOT.parent / "shared" / "traces")]

# Hits of vLLM 0.33's BlockPool and KVCacheManager, which agree: (last block of a request may match,
# never matches).
VLLM = {2_000: (15_665, 15_645), 10_000: (61_046, 60_971), 50_000: (102_290, 102_165)}
# Where ours differ, and why: when a last block that must not match is computed again while an equal
# one is findable, vLLM keeps both under the name, so the second copy takes the place of another
# cached block. Here the first keeps the name, and the copy is free again with its request.
OURS = {2_000: (15_665, 15_645), 10_000: (61_046, 60_974), 50_000: (102_290, 102_172)}

Requests = Sequence[Sequence[int]]


def conversation() -> Requests:
    for folder in filter(None, FOLDERS):
        path = Path(folder) / "conversation.jsonl"
        if path.is_file():
            with path.open() as lines:
                return [json.loads(line)["hash_ids"] for line in lines]
    pytest.skip("conversation.jsonl is neither in KVPOOL_TRACES nor in ../shared/traces")


@pytest.fixture(scope="module", name="conversation")
def conversation_fixture() -> Requests:
    return conversation()


def replay(requests: Requests, n_blocks: int, in_flight: int, match_last: bool) -> tuple[int, int]:
    """Through the Python API: (blocks hit, requests freed early)."""
    pool = kvpool.Pool(n_blocks, block_tokens=1, n_layers=1, n_kv_heads=1, head_dim=1)
    manager = kvpool.BlockManager(pool)
    running: deque[kvpool.Sequence] = deque()
    freed_early = 0
    for ids in requests:
        if len(running) == in_flight:
            running.popleft().free()
        tokens = np.array(ids, np.uint32)
        while True:
            try:
                sequence = manager.allocate(tokens, match_last=match_last)
                break
            except kvpool.PoolFull:
                running.popleft().free()
                freed_early += 1
        sequence.commit()
        running.append(sequence)
    assert manager.stats.hit_tokens == manager.stats.hit_blocks
    assert manager.stats.collisions == 0
    hits = manager.stats.hit_blocks
    while running:
        running.popleft().free()
    manager.check()
    pool.check()
    assert pool.stats.used == 0
    return hits, freed_early


def model(requests: Requests, n_blocks: int, in_flight: int, match_last: bool) -> tuple[int, int]:
    """The same in dictionaries: a block is its whole prefix."""
    free = n_blocks
    holders: dict[tuple[int, ...], int] = {}  # findable and used
    cached: OrderedDict[tuple[int, ...], None] = OrderedDict()  # findable, oldest first
    running: deque[list[tuple[int, ...] | None]] = deque()  # None: a private block
    hits = freed_early = 0

    def release(blocks: list[tuple[int, ...] | None]) -> None:
        nonlocal free
        for block in reversed(blocks):
            if block is None:
                free += 1
            else:
                holders[block] -= 1
                if holders[block] == 0:
                    del holders[block]
                    cached[block] = None

    for ids in requests:
        if len(running) == in_flight:
            release(running.popleft())
        prefixes = [tuple(ids[: i + 1]) for i in range(len(ids))]
        limit = len(ids) - (not match_last)
        while True:
            n_hits = 0
            while n_hits < limit and (prefixes[n_hits] in holders or prefixes[n_hits] in cached):
                n_hits += 1
            leaving = sum(prefix in cached for prefix in prefixes[:n_hits])
            if len(ids) - n_hits + leaving <= free + len(cached):
                break
            release(running.popleft())
            freed_early += 1
        blocks: list[tuple[int, ...] | None] = []
        for prefix in prefixes[:n_hits]:
            cached.pop(prefix, None)
            holders[prefix] = holders.get(prefix, 0) + 1
            blocks.append(prefix)
        for _ in prefixes[n_hits:]:
            if free > 0:
                free -= 1
            else:
                cached.popitem(last=False)
        for prefix in prefixes[n_hits:]:
            if prefix in holders or prefix in cached:
                blocks.append(None)  # computed twice: the first keeps the name
            else:
                holders[prefix] = 1
                blocks.append(prefix)
        running.append(blocks)
        hits += n_hits
    return hits, freed_early


@pytest.mark.parametrize("match_last", [True, False], ids=["last-matches", "last-never-matches"])
@pytest.mark.parametrize("n_blocks", VLLM)
def test_hits_in_the_conversation_trace(
    conversation: Requests, n_blocks: int, match_last: bool
) -> None:
    hits, freed_early = replay(conversation, n_blocks, 64, match_last)
    column = 0 if match_last else 1
    assert hits == OURS[n_blocks][column]
    assert freed_early == (522 if n_blocks == 2_000 else 0)
    assert abs(hits - VLLM[n_blocks][column]) <= VLLM[n_blocks][column] / 1000


def generated(seed: int, n_requests: int) -> Requests:
    """Conversations that take turns: each request is the one before it and some more blocks."""
    rng = random.Random(seed)
    talks: list[list[int]] = []
    requests = []
    fresh = 1
    for _ in range(n_requests):
        if talks and rng.random() < 0.6:
            talk = rng.choice(talks[-20:])
            if rng.random() < 0.2:  # another answer to the same question
                talk = talk[: rng.randrange(1, len(talk) + 1)]
                talks.append(talk)
        else:
            talk = [0] if rng.random() < 0.8 else []  # a system prompt
            talks.append(talk)
        more = rng.randrange(1, 6)
        talk += range(fresh, fresh + more)
        fresh += more
        requests.append(list(talk[-40:] if rng.random() < 0.05 else talk))
    return [ids[:60] for ids in requests]


@pytest.mark.parametrize("match_last", [True, False], ids=["last-matches", "last-never-matches"])
@pytest.mark.parametrize("n_blocks", [64, 100, 300, 1000, 4000])
@pytest.mark.parametrize("seed", range(4))
def test_hits_in_a_generated_trace_are_the_models(
    seed: int, n_blocks: int, match_last: bool
) -> None:
    requests = generated(seed, 600)
    in_flight = (1, 3, 8, 16)[seed]
    expected = model(requests, n_blocks, in_flight, match_last)
    assert replay(requests, n_blocks, in_flight, match_last) == expected
    assert expected[0] > 0


def test_the_model_agrees_on_the_head_of_the_real_trace(conversation: Requests) -> None:
    head = conversation[:1500]
    for match_last in (True, False):
        assert replay(head, 2_000, 64, match_last) == model(head, 2_000, 64, match_last)
