"""The figures of a scheduler and a manager for Prometheus: ``pip install 'paddle_kv[metrics]'``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .memory import HostPool
from .offload.manager import KVOffloadManager
from .schedule.scheduler import LayerwiseScheduler, check_scheduler


@dataclass(frozen=True)
class Metric:
    """One name that Prometheus sees, and where its values come from.

    Attributes:
        source: whose ``stats()``.
        values: the label's value -> the name in ``stats()``; the empty value where the metric has no label of its own.
        scale: from the unit of ``stats()`` to that of the metric.
    """

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    text: str
    source: Literal["scheduler", "pool", "manager", "rates"]
    values: Mapping[str, str]
    label: str = ""
    scale: float = 1.0


def _one(name: str) -> dict[str, str]:
    return {"": name}


_DIRECTIONS = ("onload", "offload")
_SOURCES = ("onload", "offload", "tier")
_LABEL = re.compile("(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

METRICS = (
    Metric("paddle_kv_transfers_total", "counter", "transfers", "Transfers that were started", "scheduler",
           {d: f"{d}_transfers" for d in _DIRECTIONS}, "direction"),
    Metric("paddle_kv_transfer_bytes_total", "counter", "bytes", "Bytes of the transfers that were started",
           "scheduler", {d: f"{d}_bytes" for d in _DIRECTIONS}, "direction"),
    Metric("paddle_kv_transfer_seconds_total", "counter", "seconds",
           "Time from the first to the last copy of the transfers that have arrived", "scheduler",
           {d: f"{d}_us" for d in _DIRECTIONS}, "direction", 1e-6),
    Metric("paddle_kv_transfers_unfinished_total", "counter", "transfers", "Transfers that did not move everything",
           "scheduler", {"failed": "failed", "cancelled": "cancelled"}, "reason"),
    Metric("paddle_kv_transfers_in_flight", "gauge", "transfers", "Transfers that are not over", "scheduler",
           _one("in_flight")),
    Metric("paddle_kv_events", "gauge", "events", "Events that the scheduler holds", "scheduler", _one("events")),
    Metric("paddle_kv_host_pool_bytes", "gauge", "bytes", "Memory of the host pool", "scheduler",
           _one("pinned_bytes")),
    Metric("paddle_kv_host_pool_blocks", "gauge", "blocks", "Blocks of the host pool", "pool",
           {"free": "free_blocks", "all": "blocks"}, "state"),
    Metric("paddle_kv_lookups_total", "counter", "calls", "Calls of lookup", "manager", _one("lookups")),
    Metric("paddle_kv_looked_up_blocks_total", "counter", "blocks", "Blocks that were asked for", "manager",
           _one("looked_up_blocks")),
    Metric("paddle_kv_hit_blocks_total", "counter", "blocks", "Blocks that were found", "manager",
           _one("hit_blocks")),
    Metric("paddle_kv_loaded_blocks_total", "counter", "blocks", "Blocks handed over to be loaded", "manager",
           _one("loaded_blocks")),
    Metric("paddle_kv_saved_blocks_total", "counter", "blocks", "Blocks handed over to be saved", "manager",
           _one("saved_blocks")),
    Metric("paddle_kv_unsaved_blocks_total", "counter", "blocks",
           "Blocks that were not moved: there already, not admitted, or saves were behind", "manager",
           {"deduplicated": "deduplicated_blocks", "left_out": "left_out_blocks", "behind": "dropped_save_blocks"},
           "reason"),
    Metric("paddle_kv_recomputed_blocks_total", "counter", "blocks", "Blocks that were found and computed all the same",
           "manager", _one("recomputed_blocks")),
    Metric("paddle_kv_evicted_blocks_total", "counter", "blocks", "Blocks that made room", "manager",
           _one("evicted_blocks")),
    Metric("paddle_kv_damaged_blocks_total", "counter", "blocks", "Blocks that were dropped because of a checksum",
           "manager", _one("damaged_blocks")),
    Metric("paddle_kv_unfinished_moves_total", "counter", "transfers", "Loads and saves of the manager that did not "
           "move everything", "manager", {"load": "failed_loads", "save": "failed_saves"}, "kind"),
    Metric("paddle_kv_below_blocks_total", "counter", "blocks", "Blocks of the tier below: found, lost, not stored, "
           "brought up ahead of time", "manager",
           {"hit": "tier_hit_blocks", "lost": "tier_lost_blocks", "dropped": "tier_dropped_blocks",
            "prefetched": "prefetched_blocks"}, "what"),
    Metric("paddle_kv_cached_blocks", "gauge", "blocks", "Blocks in the index: present, arriving; and those held",
           "manager", {"present": "blocks", "saving": "saving_blocks", "pinned": "pinned_blocks"}, "state"),
    Metric("paddle_kv_cached_bytes", "gauge", "bytes", "Host memory of the blocks in the index", "manager",
           _one("used_bytes")),
    Metric("paddle_kv_capacity_bytes", "gauge", "bytes", "Host memory that the index may use now", "manager",
           _one("capacity_bytes")),
    Metric("paddle_kv_rate_bytes_per_second", "gauge", "bytes_per_s",
           "Measured: of loads, of saves, and out of the tier; 0: not yet", "rates",
           {name: f"{name}_bytes_per_s" for name in _SOURCES}, "source"),
    Metric("paddle_kv_rate_spread_ratio", "gauge", "ratio", "Mean distance of a measurement from the rate, as a "
           "part of it; 0: not yet", "rates", {name: f"{name}_spread" for name in _SOURCES}, "source"),
    Metric("paddle_kv_rate_trusted", "gauge", "sources", "1: the model may wait for what comes from there", "rates",
           {name: f"{name}_trusted" for name in _SOURCES}, "source"),
    Metric("paddle_kv_late_loads_total", "counter", "loads", "Loads that were given up because they took too long",
           "rates", {name: f"{name}_late_loads" for name in _SOURCES}, "source"),
    Metric("paddle_kv_prefill_tokens_per_second", "gauge", "tokens_per_s", "Measured, at the beginning of a prompt; "
           "0: not yet", "rates", _one("prefill_tokens_per_s")),
    Metric("paddle_kv_prefill_position_seconds", "gauge", "seconds", "How much longer a token takes for each one "
           "before it", "rates", _one("prefill_s_per_token_and_position")),
    Metric("paddle_kv_prefill_spread_ratio", "gauge", "ratio", "Mean distance of a measurement from what was "
           "expected, as a part of it; 0: not yet", "rates", _one("prefill_spread")),
)  # fmt: skip


@dataclass(eq=False)  # a registry keeps it by identity
class Collector:
    """Reads ``stats()`` of a scheduler, its host pool and a manager whenever Prometheus asks.

    Args:
        scheduler: None leaves its metrics out, and those of its pool.
        manager: None leaves its metrics out. If it has a tier, those of :class:`~paddle_kv.tiers.metrics.TierCollector`
            come with it, with the name of the engine as ``tier``.
        labels: name -> value, for all of them, such as the rank.

    The metrics are those of :data:`METRICS`. One collector per registry: a process serves one rank. A manager or
    scheduler that is closed is still read.

    Raises:
        TypeError: not a scheduler, not a manager, or labels that are no mapping.
        ValueError: a label that the metrics have themselves, such as ``direction``, or one that Prometheus cannot read.

    Example:
        >>> from prometheus_client import CollectorRegistry, generate_latest
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.metrics import Collector
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> with LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)) as scheduler:
        ...     registry = CollectorRegistry()
        ...     registry.register(Collector(scheduler, labels={"rank": "0"}))
        ...     scheduler.offload([2], [0]).wait()
        ...     lines = generate_latest(registry).decode().splitlines()
        >>> [line for line in lines if line.startswith("paddle_kv_transfers_total")][1]
        'paddle_kv_transfers_total{direction="offload",rank="0"} 1.0'
    """

    scheduler: LayerwiseScheduler | None = None
    manager: KVOffloadManager | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scheduler is not None:
            check_scheduler(self.scheduler)
        if self.manager is not None and not isinstance(self.manager, KVOffloadManager):
            raise TypeError(f"manager is {type(self.manager).__name__}; a KVOffloadManager is expected")
        if not isinstance(self.labels, Mapping):
            raise TypeError(f"labels is {type(self.labels).__name__}; a mapping name -> value is expected")
        for name in self.labels:  # one that Prometheus cannot read costs it all metrics of the process
            if not isinstance(name, str) or not _LABEL.fullmatch(name):
                raise ValueError(
                    f"labels names {name!r}; letters, digits and _ are expected, no digit and no __ at the beginning"
                )
        own = {metric.label for metric in METRICS} - {""} | {"tier", "outcome"}
        if taken := sorted(own & set(self.labels)):
            raise ValueError(
                f"labels names {', '.join(taken)}, which the metrics have themselves ({', '.join(sorted(own))})"
            )

    def collect(self) -> Iterator[Any]:
        """What ``prometheus_client`` calls."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = self._stats()
        for metric in METRICS:
            if metric.source not in found:
                continue
            names = [metric.label] * bool(metric.label) + list(self.labels)
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            made = family(metric.name, metric.text, labels=names)
            for value, source in metric.values.items():
                own = [value] if metric.label else []
                made.add_metric([*own, *map(str, self.labels.values())], found[metric.source][source] * metric.scale)
            yield made
        tier = None if self.manager is None else self.manager.tier
        if tier is not None:
            from .tiers.metrics import TierCollector

            yield from TierCollector({tier.engine.name: tier}, self.labels).collect()

    def _stats(self) -> dict[str, Mapping[str, float]]:
        found: dict[str, Mapping[str, float]] = {}
        if self.scheduler is not None:
            found["scheduler"] = self.scheduler.stats()
            found["pool"] = _pool_stats(self.scheduler.host_pool)
        if self.manager is not None:
            found["manager"] = self.manager.stats()
            found["rates"] = self.manager.rates.stats()
        return found


def _pool_stats(pool: HostPool) -> dict[str, float]:
    return {"free_blocks": 0 if pool.closed else pool.num_free_blocks, "blocks": 0 if pool.closed else pool.num_blocks}
