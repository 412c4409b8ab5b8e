"""What Prometheus sees of the tiers."""

from __future__ import annotations

import pytest
from tier_support import Engine, Faulty

from kvpool.tiers import MemoryTier

prometheus_client = pytest.importorskip("prometheus_client")
metrics = pytest.importorskip("kvpool.metrics")

PROMPT = list(range(1, 19))


def test_every_tier_has_its_counters_and_times() -> None:
    bad = Faulty()
    with Engine([MemoryTier(1 << 20), bad]) as engine:
        registry = prometheus_client.CollectorRegistry()
        metrics.KVCollector(engine.pool, engine.manager, labels={"rank": "0"}, registry=registry)

        def value(name: str, tier: str = "memory", **labels: str) -> float | None:
            labels = {"rank": "0", "tier": tier, **labels}
            found: float | None = registry.get_sample_value(f"tl_kv_tier_{name}", labels)
            return found

        engine.answer(PROMPT)
        engine.flush()
        engine.forget()
        engine.answer(PROMPT)
        assert value("hits_total") == 4
        assert value("misses_total") == 4
        assert value("stored_total") == 4
        size = engine.tiers.layout.record_bytes
        assert value("bytes_total", direction="read") == 4 * size
        assert value("bytes_total", direction="written") == 4 * size
        assert value("records") == 4
        assert value("healthy") == 1
        assert value("queued_blocks") == 0
        assert value("seconds_count", call="get") == 2
        assert value("seconds_bucket", call="get", le="+Inf") == 2
        assert value("seconds_sum", call="put") > 0

        engine.tiers._tiers[0].delete(engine.tiers.layout.keys(PROMPT))
        bad.on_get = lambda keys, records: [bytes(len(r)) for r in records]
        engine.forget()
        engine.answer(PROMPT)
        assert value("refused_total", "faulty", reason="head") == 1
        bad.on_get = lambda keys, records: 1 / 0  # type: ignore[assignment,return-value]
        engine.forget()
        engine.answer([5, *PROMPT])
        assert value("errors_total", "faulty") == 1
        assert value("healthy", "faulty") == 0
        assert b"tl_kv_tier_dropped_total" in prometheus_client.generate_latest(registry)


def test_without_tiers_there_are_no_families() -> None:
    with Engine([]) as engine:
        registry = prometheus_client.CollectorRegistry()
        metrics.KVCollector(engine.pool, engine.manager, registry=registry)
        assert b"tl_kv_tier" not in prometheus_client.generate_latest(registry)
