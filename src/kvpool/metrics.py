"""A pool and its manager for Prometheus, under the names dashboards expect.

    tl_engine_kv_blocks{state="free"|"used"|"cached"}  gauge    where the blocks are
    tl_engine_kv_evictions_total                       counter  cached blocks reclaimed
    tl_engine_prefix_cache_hit_ratio                   gauge    prompt tokens served from the cache,
                                                                over prompt tokens, since the start

and with a manager, for rates over time and for alarms:

    tl_engine_prefix_cache_prompt_tokens_total, ..._hit_tokens_total
    tl_engine_prefix_cache_findable_blocks             gauge    blocks in the index
    tl_engine_prefix_cache_collisions_total            counter  forged names met and refused
    tl_engine_kv_copies_total, tl_engine_kv_refused_total
    tl_engine_kv_sequences                             gauge

and of transfers (``TransferCollector``):

    tl_kv_transfer_bytes_total{direction="sent"|"received"}   counter  payload bytes
    tl_kv_transfer_blocks_total{outcome="sent"|"deduped"}     counter  blocks with and without one
    tl_kv_transfer_pushes_total{side, result="complete"|"failed"}
    tl_kv_transfer_handles_total{result="claimed"|"released"|"expired"}
    tl_kv_transfer_handles{state="pushing"|"pending"}, tl_kv_transfer_held_blocks     gauges

and with lower tiers, for each of them (label ``tier``):

    tl_kv_tier_hits_total, ..._misses_total            counter  blocks found, and asked for in vain
    tl_kv_tier_bytes_total{direction="read"|"written"} counter
    tl_kv_tier_stored_total, ..._not_stored_total      counter  blocks it keeps, and does not
    tl_kv_tier_dropped_total                           counter  blocks not offered: queue full, or
                                                                the tier left alone
    tl_kv_tier_refused_total{reason=...}               counter  records that were not what was asked
                                                                for: damaged, mixed up, forged
    tl_kv_tier_errors_total, ..._timeouts_total        counter  calls that raised, or were late
    tl_kv_tier_seconds{call="get"|"put"}               histogram  of a batch
    tl_kv_tier_queued_blocks, ..._healthy, ..._records gauge

Nothing runs between scrapes: a collector reads the two ``stats`` when Prometheus asks, which takes
microseconds whatever the size of the pool.

Needs the extra ``metrics``: ``pip install 'kvpool[metrics]'``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "kvpool.metrics needs prometheus-client: pip install 'kvpool[metrics]'"
    ) from error

from ._stats import Stats
from .errors import KvPoolError

__all__ = ["KVCollector", "TransferCollector"]


class _Pool(Protocol):
    @property
    def stats(self) -> Stats: ...


class _Manager(Protocol):
    @property
    def stats(self) -> Any: ...


_STATES = ("free", "used", "cached")
_COUNTERS = (
    ("prompt_tokens", "tl_engine_prefix_cache_prompt_tokens", "Tokens of allocated prompts"),
    ("hit_tokens", "tl_engine_prefix_cache_hit_tokens", "Prompt tokens served from the cache"),
    ("collisions", "tl_engine_prefix_cache_collisions", "Forged block names met and refused"),
    ("copies", "tl_engine_kv_copies", "Blocks copied because they were shared or immutable"),
    ("refused", "tl_engine_kv_refused", "Allocations and appends refused for want of blocks"),
)
_TIER_COUNTERS = (
    ("hits", "Blocks found in it"),
    ("misses", "Blocks it was asked for and did not give"),
    ("stored", "Blocks it was given and keeps"),
    ("not_stored", "Blocks it was given and does not keep"),
    ("dropped", "Blocks that were not offered to it"),
    ("errors", "Calls that raised"),
    ("timeouts", "Calls that were not waited for any longer"),
)
_GAUGES = (
    ("n_findable", "tl_engine_prefix_cache_findable_blocks", "Blocks in the prefix index"),
    ("n_seqs", "tl_engine_kv_sequences", "Live sequences"),
)


class KVCollector(Collector):
    """Reads ``pool.stats`` and ``manager.stats`` at each scrape.

    Args:
        pool: the pool.
        manager: its manager, if there is one.
        labels: put on every sample, to tell several pools in one process apart.
        registry: where to register; None leaves that to you.

    What is closed, pool or manager, is left out of a scrape; the rest of the registry is as before.

    The pool's eviction count wraps at 2**32; the counter here does not, as long as there is a
    scrape at least once in 2**32 evictions.

    >>> import kvpool, kvpool.metrics, prometheus_client
    >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=4)
    >>> registry = prometheus_client.CollectorRegistry()
    >>> collector = kvpool.metrics.KVCollector(pool, registry=registry)
    >>> ids = pool.alloc(3)
    >>> registry.get_sample_value("tl_engine_kv_blocks", {"state": "used"}) == 3
    True
    """

    def __init__(
        self,
        pool: _Pool,
        manager: _Manager | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._pool, self._manager = pool, manager
        labels = dict(labels or {})
        self._names, self._values = list(labels), list(labels.values())
        self._evictions = self._evictions_seen = 0
        self._lock = threading.Lock()  # two scrapes at a time must not count the same evictions
        if registry is not None:
            registry.register(self)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _read_pool(self) -> tuple[Stats, int]:
        """The stats, and the evictions since the start."""
        with self._lock:
            stats = self._pool.stats
            self._evictions += (stats.evictions - self._evictions_seen) % 2**32
            self._evictions_seen = stats.evictions
            return stats, self._evictions

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape; called by the registry."""
        try:
            stats, evictions = self._read_pool()
        except KvPoolError:  # closed
            return
        blocks = GaugeMetricFamily(
            "tl_engine_kv_blocks", "Blocks of the KV cache by state", labels=[*self._names, "state"]
        )
        for state in _STATES:
            blocks.add_metric([*self._values, state], getattr(stats, state))
        yield blocks
        yield self._counter(
            "tl_engine_kv_evictions", "Cached blocks reclaimed for new data", evictions
        )
        if self._manager is not None:
            try:
                manager_stats = self._manager.stats
            except KvPoolError:  # closed
                return
            yield from self._collect_manager(manager_stats)
            tiers = getattr(self._manager, "tiers", None)
            if tiers is not None:
                yield from self._collect_tiers(tiers.stats())

    def _collect_manager(self, stats: Any) -> Iterator[Metric]:
        ratio = stats.hit_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        yield self._gauge(
            "tl_engine_prefix_cache_hit_ratio",
            "Prompt tokens served from the cache over prompt tokens",
            ratio,
        )
        for field, name, text in _COUNTERS:
            yield self._counter(name, text, getattr(stats, field))
        for field, name, text in _GAUGES:
            yield self._gauge(name, text, getattr(stats, field))

    def _collect_tiers(self, tiers: Iterable[Any]) -> Iterator[Metric]:
        """One family for each counter, a sample for each tier."""
        tiers = list(tiers)
        if not tiers:
            return
        names = [*self._names, "tier"]
        counters = [
            CounterMetricFamily(f"tl_kv_tier_{field}", text, labels=names)
            for field, text in _TIER_COUNTERS
        ]
        moved = CounterMetricFamily(
            "tl_kv_tier_bytes", "Bytes of records", labels=[*names, "direction"]
        )
        refused = CounterMetricFamily(
            "tl_kv_tier_refused", "Records that were not what was asked for",
            labels=[*names, "reason"],
        )  # fmt: skip
        seconds = HistogramMetricFamily(
            "tl_kv_tier_seconds", "Time of a batch", labels=[*names, "call"]
        )
        gauges = [
            GaugeMetricFamily(f"tl_kv_tier_{name}", text, labels=names)
            for name, text in (
                ("queued_blocks", "Blocks that wait to be written"),
                ("healthy", "1, or 0 while it is left alone"),
                ("records", "Records it holds"),
            )
        ]
        for tier in tiers:
            values = [*self._values, tier.name]
            for family, (field, _) in zip(counters, _TIER_COUNTERS, strict=True):
                family.add_metric(values, getattr(tier, field))
            moved.add_metric([*values, "read"], tier.hit_bytes)
            moved.add_metric([*values, "written"], tier.stored_bytes)
            for reason, n in sorted(tier.refused.items()):
                refused.add_metric([*values, reason], n)
            for call, times in (("get", tier.get_seconds), ("put", tier.put_seconds)):
                bounds = [*(str(bound) for bound in times.bounds), "+Inf"]
                buckets = list(zip(bounds, itertools.accumulate(times.counts), strict=True))
                seconds.add_metric([*values, call], buckets, times.total_s)
            for gauge, value in zip(
                gauges, (tier.queued, int(tier.is_healthy), tier.tier.n_records), strict=True
            ):
                if value is not None:
                    gauge.add_metric(values, value)
        yield from [*counters, moved, refused, seconds, *gauges]

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry then does not scrape in order to learn the names."""
        return []


class _Counted(Protocol):
    @property
    def stats(self) -> Any: ...


class TransferCollector(Collector):
    """Reads the ``stats`` of one side of a transfer at each scrape, or of both.

    Args:
        sender: a ``KvClient`` or ``AioKvClient``: the prefill side.
        receiver: a ``KvReceiver``: the decode side.
        labels: put on every sample.
        registry: where to register; None leaves that to you.

    ``tl_kv_transfer_blocks_total`` counts the sender's blocks where there is a sender, else the
    receiver's: an engine that does both does not count a block of its own twice.

    >>> import kvpool, kvpool.metrics, prometheus_client
    >>> from kvpool.transfer import KvReceiver
    >>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=4)
    >>> registry = prometheus_client.CollectorRegistry()
    >>> receiver = KvReceiver(kvpool.BlockManager(pool))
    >>> collector = kvpool.metrics.TransferCollector(receiver=receiver, registry=registry)
    >>> registry.get_sample_value("tl_kv_transfer_bytes_total", {"direction": "received"}) == 0
    True
    """

    def __init__(
        self,
        *,
        sender: _Counted | None = None,
        receiver: _Counted | None = None,
        labels: Mapping[str, str] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._sender, self._receiver = sender, receiver
        labels = dict(labels or {})
        self._names, self._values = list(labels), list(labels.values())
        if registry is not None:
            registry.register(self)

    def _family(
        self, kind: Any, name: str, text: str, samples: Iterable[tuple[Any, ...]], *names: str
    ) -> Metric:
        family: Metric = kind(name, text, labels=[*self._names, *names])
        for *values, value in samples:
            family.add_metric([*self._values, *values], value)  # type: ignore[attr-defined]
        return family

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape; called by the registry."""
        sides = {
            name: side.stats
            for name, side in (("prefill", self._sender), ("decode", self._receiver))
            if side is not None
        }
        if not sides:
            return
        direction = {"prefill": "sent", "decode": "received"}
        yield self._family(
            CounterMetricFamily, "tl_kv_transfer_bytes", "Bytes of envelopes moved",
            [(direction[name], stats.bytes) for name, stats in sides.items()], "direction",
        )  # fmt: skip
        stats = next(iter(sides.values()))
        yield self._family(
            CounterMetricFamily, "tl_kv_transfer_blocks", "Blocks with a payload, and by name",
            [("sent", stats.blocks_sent), ("deduped", stats.blocks_deduped)], "outcome",
        )  # fmt: skip
        yield self._family(
            CounterMetricFamily, "tl_kv_transfer_pushes", "Pushes that ended",
            [(name, *pair) for name, stats in sides.items()
             for pair in (("complete", stats.pushes), ("failed", stats.failed))],
            "side", "result",
        )  # fmt: skip
        if self._receiver is None:
            return
        stats = sides["decode"]
        yield self._family(
            CounterMetricFamily, "tl_kv_transfer_handles", "Handles that ended",
            [(name, getattr(stats, name)) for name in ("claimed", "released", "expired")], "result",
        )  # fmt: skip
        yield self._family(
            GaugeMetricFamily, "tl_kv_transfer_handles", "Handles that are held",
            [("pushing", stats.n_pushing), ("pending", stats.n_pending)], "state",
        )  # fmt: skip
        yield self._family(
            GaugeMetricFamily, "tl_kv_transfer_held_blocks", "Blocks that handles hold",
            [(stats.held_blocks,)],
        )  # fmt: skip

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry then does not scrape in order to learn the names."""
        return []
