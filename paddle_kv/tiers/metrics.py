"""The figures of tiers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from .counters import KINDS, LATENCY_BOUNDS_S
from .protocol import Outcome
from .tier import Tier

_ENGINE = {
    "objects": "Objects that are there",
    "used_bytes": "Bytes of the objects that are there",
    "capacity_bytes": "Bytes that the objects may take",
    "resting_roots": "Roots that are left alone after an error",
}


@dataclass(eq=False)  # a registry keeps it by identity
class TierCollector:
    """Reads ``stats()`` of tiers whenever Prometheus asks. The names are in docs/tiers.md.

    Args:
        tiers: name, the value of the label ``tier`` -> tier.
        labels: name -> value, for all metrics, such as the rank.
    """

    tiers: Mapping[str, Tier]
    labels: Mapping[str, str] = field(default_factory=dict)

    def collect(self) -> Iterator[Any]:
        """What ``prometheus_client`` calls."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names, values = list(self.labels), [str(value) for value in self.labels.values()]
        objects = CounterMetricFamily(
            "paddle_kv_tier_objects_total", "Objects by outcome", labels=["tier", "kind", "outcome", *names]
        )
        moved = CounterMetricFamily(
            "paddle_kv_tier_bytes_total", "Bytes of what was stored and loaded", labels=["tier", "kind", *names]
        )
        took = HistogramMetricFamily(
            "paddle_kv_tier_job_seconds", "How long jobs took", labels=["tier", "kind", *names]
        )
        lost = CounterMetricFamily(
            "paddle_kv_tier_lost_total",
            "Objects that made room, and calls of the storage that failed",
            labels=["tier", "reason", *names],
        )
        gauges = {
            name: GaugeMetricFamily(f"paddle_kv_tier_{name}", text, labels=["tier", *names])
            for name, text in _ENGINE.items()
        }
        for tier, stats in ((name, tier.stats()) for name, tier in self.tiers.items()):
            for kind in KINDS:
                for outcome in Outcome:
                    objects.add_metric([tier, kind, outcome.value, *values], stats[f"{kind}_{outcome.value}"])
                moved.add_metric([tier, kind, *values], stats[f"{kind}_bytes"])
                counts = list(accumulate(stats[f"{kind}_latency"]))
                buckets = list(zip([*map(str, LATENCY_BOUNDS_S), "+Inf"], counts, strict=True))
                took.add_metric([tier, kind, *values], buckets, stats[f"{kind}_seconds"])
            for reason, name in (("evicted", "engine_evicted"), ("error", "engine_errors")):
                lost.add_metric([tier, reason, *values], stats.get(name, 0))
            for name, gauge in gauges.items():
                if f"engine_{name}" in stats:
                    gauge.add_metric([tier, *values], stats[f"engine_{name}"])
        yield from (objects, moved, took, lost, *gauges.values())
