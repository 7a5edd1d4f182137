"""What Prometheus reads: the values, the table of the documentation, and the sample board."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client import CollectorRegistry

from paddle_kv import LayerwiseScheduler
from paddle_kv.metrics import METRICS, Collector
from paddle_kv.offload import KVOffloadManager
from paddle_kv.tiers import FilesEngine
from tests.offload.tiered_rig import KEYS, WAIT_S, TieredRig
from tests.schedule.rig import Rig

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_values_are_those_of_stats() -> None:
    rig = Rig()
    registry = CollectorRegistry()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        manager = KVOffloadManager(scheduler)
        registry.register(Collector(scheduler, manager, {"rank": "3"}))
        manager.save([b"a", b"b", b"c"], [0, 4, 2]).wait()
        manager.save([b"a", b"d"], [0, 1]).wait()
        with manager.lookup([b"a", b"b", b"nothing"]) as lease:
            manager.onload(lease.hashes, [5, 6]).wait()
            rank = {"rank": "3"}
            block_bytes = manager.capacity_bytes // manager.capacity_blocks

            def value(name: str, **labels: str) -> Any:
                return registry.get_sample_value(name, {**rank, **labels})

            assert value("paddle_kv_transfers_total", direction="onload") == 1
            assert value("paddle_kv_transfers_total", direction="offload") == 2
            assert value("paddle_kv_transfer_bytes_total", direction="offload") == 4 * block_bytes
            assert value("paddle_kv_transfer_seconds_total", direction="onload") == pytest.approx(
                scheduler.stats()["onload_us"] / 1e6
            )
            assert value("paddle_kv_transfer_seconds_total", direction="onload") > 0
            assert value("paddle_kv_looked_up_blocks_total") == 3
            assert value("paddle_kv_hit_blocks_total") == 2
            assert value("paddle_kv_unsaved_blocks_total", reason="deduplicated") == 1
            assert value("paddle_kv_cached_blocks", state="present") == 4
            assert value("paddle_kv_cached_blocks", state="pinned") == 2
            assert value("paddle_kv_cached_bytes") == 4 * block_bytes
            assert value("paddle_kv_host_pool_blocks", state="free") == rig.pool.num_blocks - 4
            assert value("paddle_kv_host_pool_blocks", state="all") == rig.pool.num_blocks
        manager.close()


def test_every_metric_is_there_and_no_other() -> None:
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        manager = KVOffloadManager(scheduler)
        found = {
            (sample.name, frozenset(sample.labels))
            for family in Collector(scheduler, manager).collect()
            for sample in family.samples
        }
        assert found == {(metric.name, frozenset({metric.label} - {""})) for metric in METRICS}
        assert [family.name for family in Collector().collect()] == []
        manager.close()


def test_a_manager_brings_the_metrics_of_its_tier(tmp_path: Path) -> None:
    rig = TieredRig(FilesEngine({tmp_path: 1 << 30}))
    registry = CollectorRegistry()
    registry.register(Collector(rig.scheduler, rig.manager, {"rank": "3"}))
    rig.save(KEYS[:3])
    rig.forget()
    rig.load(KEYS[:2], [0, 1]).wait(WAIT_S)
    rig.settle()
    objects = "paddle_kv_tier_objects_total"
    labels = {"tier": "files", "rank": "3", "outcome": "done"}
    assert registry.get_sample_value(objects, {**labels, "kind": "store"}) == 3
    assert registry.get_sample_value(objects, {**labels, "kind": "load"}) == 2
    assert registry.get_sample_value("paddle_kv_below_blocks_total", {"rank": "3", "what": "hit"}) == 2
    with pytest.raises(ValueError, match="labels names tier"):
        Collector(labels={"tier": "x"})
    rig.close()


def test_what_is_closed_is_still_read() -> None:
    rig = Rig()
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    manager = KVOffloadManager(scheduler)
    manager.save([b"a"], [0]).wait()
    manager.close()
    scheduler.close()
    rig.pool.close()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in Collector(scheduler, manager).collect()
        for sample in family.samples
    }
    assert samples["paddle_kv_saved_blocks_total",] == 1
    assert samples["paddle_kv_host_pool_blocks", "all"] == samples["paddle_kv_host_pool_bytes",] == 0


def test_the_table_of_the_documentation_is_complete() -> None:
    rows = re.findall(r"^\| `(paddle_kv_\w+)` \| (\w+) \| (\w+) \| (.*?) \|", (DOCS / "metrics.md").read_text(), re.M)
    expected = [
        (metric.name, metric.kind, metric.unit, f"`{metric.label}`: {', '.join(metric.values)}" if metric.label else "")
        for metric in METRICS
    ]
    assert rows == expected


def test_the_board_asks_for_metrics_that_exist() -> None:
    board = json.loads((DOCS / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"paddle_kv_\w+", query)}
    labels_of = {metric.name: {metric.label} for metric in METRICS}
    assert asked <= set(labels_of)
    for query in queries:
        for name, selected in re.findall(r"(paddle_kv_\w+)\{(.*?)\}", query):
            used = set(re.findall(r"(\w+)\s*=", selected))
            assert used <= labels_of[name] | {"job", "instance"}, query
    identifiers = [panel["id"] for panel in board["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and panel["title"] and panel["targets"]


def test_wrong_arguments_are_named() -> None:
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        manager = KVOffloadManager(scheduler)
        with pytest.raises(TypeError, match="scheduler is KVOffloadManager"):
            Collector(manager, scheduler)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="manager is LayerwiseScheduler"):
            Collector(scheduler, scheduler)  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=r"labels names direction, which the metrics have themselves \(direction, "
        ):
            Collector(scheduler, labels={"rank": "0", "direction": "up"})
        for name in ("", "tp-rank", "1st", "__name", "rank ", 3):
            with pytest.raises(ValueError, match=f"labels names {name!r}; letters, digits and _"):
                Collector(scheduler, labels={"rank": "0", name: "0"})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="labels is str; a mapping"):
            Collector(scheduler, labels="rank")  # type: ignore[arg-type]
        registry = CollectorRegistry()
        registry.register(Collector(scheduler, labels={"rank": 3}))  # type: ignore[dict-item]
        assert registry.get_sample_value("paddle_kv_transfers_in_flight", {"rank": "3"}) == 0
        manager.close()
