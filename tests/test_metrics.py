"""What Prometheus reads, and under which names."""

from __future__ import annotations

import doctest
from types import SimpleNamespace
from typing import Any

import pytest

import kvpool

pytest.importorskip("prometheus_client")

import prometheus_client

import kvpool.metrics
from kvpool.metrics import KVCollector

MANAGER_STATS = {
    "prompt_tokens": 21,
    "hit_tokens": 8,
    "collisions": 2,
    "copies": 3,
    "refused": 4,
    "n_findable": 5,
    "n_seqs": 6,
}


def manager(**stats: int) -> Any:
    return SimpleNamespace(stats=SimpleNamespace(**(MANAGER_STATS | stats)))


def test_the_names_of_the_contract(make_pool: Any) -> None:
    pool = make_pool(4)
    registry = prometheus_client.CollectorRegistry()
    KVCollector(pool, manager(), registry=registry)
    ids = pool.alloc(3)
    pool.set_fill(ids[:1], 2)
    pool.register(ids[:1], [7])
    pool.unref(ids)
    pool.alloc(3)
    get = registry.get_sample_value
    assert [get("tl_engine_kv_blocks", {"state": s}) for s in ("free", "used", "cached")] == [
        0,
        3,
        1,
    ]
    assert get("tl_engine_kv_evictions_total") == 0
    pool.alloc(1)
    assert get("tl_engine_kv_evictions_total") == 1
    assert get("tl_engine_prefix_cache_hit_ratio") == 8 / 21
    assert get("tl_engine_prefix_cache_hit_tokens_total") == 8
    assert get("tl_engine_prefix_cache_collisions_total") == 2
    assert get("tl_engine_prefix_cache_findable_blocks") == 5


def test_the_ratio_is_0_before_the_first_prompt(make_pool: Any) -> None:
    registry = prometheus_client.CollectorRegistry()
    KVCollector(make_pool(), manager(prompt_tokens=0, hit_tokens=0), registry=registry)
    assert registry.get_sample_value("tl_engine_prefix_cache_hit_ratio") == 0


def test_labels_tell_two_pools_apart(make_pool: Any) -> None:
    text = ""
    for name in ("a", "b"):
        registry = prometheus_client.CollectorRegistry()
        KVCollector(make_pool(), manager(), labels={"engine": name}, registry=registry)
        text += prometheus_client.generate_latest(registry).decode()
    for name in ("a", "b"):
        assert f'tl_engine_kv_blocks{{engine="{name}",state="free"}} 4.0' in text
        assert f'tl_engine_kv_evictions_total{{engine="{name}"}} 0.0' in text


def test_the_eviction_counter_does_not_wrap() -> None:
    pool = SimpleNamespace(stats=kvpool.Stats(1, 0, 0, 2**32 - 2))
    registry = prometheus_client.CollectorRegistry()
    KVCollector(pool, registry=registry)
    assert registry.get_sample_value("tl_engine_kv_evictions_total") == 2**32 - 2
    pool.stats = kvpool.Stats(1, 0, 0, 3)
    assert registry.get_sample_value("tl_engine_kv_evictions_total") == 2**32 + 3
    assert registry.get_sample_value("tl_engine_kv_evictions_total") == 2**32 + 3


def test_a_real_manager_has_every_counter(make_pool: Any) -> None:
    pool = make_pool(8)
    manager = kvpool.BlockManager(pool)
    registry = prometheus_client.CollectorRegistry()
    KVCollector(pool, manager, registry=registry)
    for _ in range(2):
        with manager.allocate([1, 2, 3]) as sequence:
            sequence.commit()
    get = registry.get_sample_value
    assert get("tl_engine_prefix_cache_prompt_tokens_total") == 6
    assert get("tl_engine_prefix_cache_hit_ratio") == 2 / 6
    assert get("tl_engine_kv_sequences") == 0
    assert "tl_engine_kv_refused_total" in prometheus_client.generate_latest(registry).decode()


def test_a_closed_pool_is_left_out_and_the_others_stay(make_pool: Any) -> None:
    closed, managed, alive = make_pool(8), make_pool(8), make_pool(8)
    registry = prometheus_client.CollectorRegistry()
    KVCollector(closed, labels={"pool": "closed"}, registry=registry)
    manager = kvpool.BlockManager(managed)
    KVCollector(managed, manager, labels={"pool": "managed"}, registry=registry)
    KVCollector(alive, labels={"pool": "alive"}, registry=registry)
    closed.close()
    manager.close()
    text = prometheus_client.generate_latest(registry).decode()
    assert 'tl_engine_kv_blocks{pool="managed",state="free"} 8.0' in text
    assert "tl_engine_kv_sequences" not in text
    managed.close()
    text = prometheus_client.generate_latest(registry).decode()
    assert 'tl_engine_kv_blocks{pool="alive",state="free"} 8.0' in text
    assert 'pool="closed"' not in text
    assert 'pool="managed"' not in text


def test_registering_scrapes_nothing() -> None:
    class Pool:
        @property
        def stats(self) -> kvpool.Stats:
            raise AssertionError("read before a scrape")

    KVCollector(Pool(), registry=prometheus_client.CollectorRegistry())


def test_the_examples_run() -> None:
    found = doctest.testmod(kvpool.metrics)
    assert found.attempted > 0
    assert found.failed == 0
