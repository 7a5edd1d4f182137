"""``paddle-kv tier`` as a user calls it, and what Prometheus reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from paddle_kv.cli import doctor
from paddle_kv.cli.main import app
from paddle_kv.testing.tiers.rig import WAIT_S, keys
from paddle_kv.tiers import Outcome
from paddle_kv.tiers.folder import Folder
from paddle_kv.tiers.space import Place
from tests.tiers.conftest import MakeRig, objects

RUNNER = CliRunner()


def called(*words: object, code: int = 0) -> str:
    ran = RUNNER.invoke(app, ["tier", *map(str, words)])
    assert ran.exit_code == code, ran.output
    return " ".join(ran.output.replace("│", " ").split())


@pytest.fixture
def root(make_rig: MakeRig, tmp_path: Path) -> Path:
    """Six objects that nobody uses, of which one is damaged."""
    rig = make_rig()
    rig.store(keys(6))
    rig.close()
    rig.tier.engine.close(WAIT_S)
    victim = objects(tmp_path)[2]
    content = bytearray(victim.read())
    content[-1] ^= 1
    victim.write(bytes(content))
    return tmp_path / "root"


def test_stat(root: Path) -> None:
    assert called("stat", root) == "6 objects of 53248 bytes 6 objects, 319488 bytes"


def test_verify_finds_what_is_damaged(root: Path) -> None:
    victim = objects(root)[2]
    told = called("verify", root, code=1)
    assert f"damaged: {victim.slab}, slot {victim.slot}" in told
    assert told.endswith("6 objects, 319488 bytes read; 1 damaged")
    assert "5 objects of model " in told
    assert called("stat", root).endswith("6 objects, 319488 bytes")


def test_what_is_not_an_object_or_not_in_its_place(root: Path) -> None:
    first, second, third = objects(root)[3:]
    third.write(first.read())  # all right, but that of another key
    second.write(bytes(4096))
    (root / "of somebody else").write_bytes(b"")
    (root / f"{9:010d}-4096.slab").write_bytes(b"")
    assert called("stat", root) == "6 objects of 53248 bytes 6 objects, 319488 bytes"
    told = called("verify", root, code=1)
    for one in (second, third):
        assert f"damaged: {one.slab}, slot {one.slot}" in told
    assert "3 damaged" in told


def test_verify_looks_for_headers_where_a_table_is_gone(root: Path) -> None:
    objects(root)[0].slab.with_suffix(".table").unlink()
    assert called("stat", root) == "0 objects, 0 bytes"
    assert called("verify", root, code=1).endswith("6 objects, 319488 bytes read; 1 damaged")
    assert called("stat", root).endswith("6 objects, 319488 bytes")


def test_gc(root: Path) -> None:
    (root / f"{9:010d}-4096").mkdir()  # of a former version
    assert called("gc", root) == "deleted: 0 beyond the capacity"
    assert not (root / f"{9:010d}-4096").exists()
    assert "1 damaged and deleted" in called("gc", root, "--damaged")
    assert called("verify", root).endswith("5 objects, 266240 bytes read; 0 damaged")
    assert called("gc", root, "--capacity-bytes", 3 * 53248).endswith("2 beyond the capacity")
    assert called("stat", root).endswith("3 objects, 159744 bytes")
    assert sum(path.stat().st_blocks * 512 for path in root.glob("*.slab")) <= 3 * 53248
    assert called("gc", root, "--capacity-bytes", 0).endswith("3 beyond the capacity")
    assert list(root.iterdir()) == [root / "lock"]


def test_gc_takes_the_oldest(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "root", 1 << 20)
    for number, size in enumerate((1, 3, 2)):
        [place] = folder.begin_write([SimpleNamespace(name=bytes([number]) * 16, size_bytes=size * 4096)])
        assert isinstance(place, Place)
        folder.end_write([place], complete=True)
    folder.close()
    assert called("gc", tmp_path / "root", "--capacity-bytes", 5 * 4096).endswith("1 beyond the capacity")
    assert [one.size_bytes for one in objects(tmp_path)] == [3 * 4096, 2 * 4096]
    assert called("gc", tmp_path / "root", "--capacity-bytes", 5 * 4096 - 1).endswith("1 beyond the capacity")
    assert [one.size_bytes for one in objects(tmp_path)] == [2 * 4096]


def test_a_folder_that_a_server_uses(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.store(keys(2))
    assert called("stat", tmp_path / "root").startswith("2 objects")
    for command in ("verify", "gc"):
        assert "is in use by" in called(command, tmp_path / "root", code=2)
    assert rig.load(keys(2)).done


def test_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paddle_kv.bench import tiers

    cases: list[tiers.Case] = []
    measure = tiers.measure

    def watched(case: tiers.Case, progress: Any) -> Any:
        cases.append(case)
        return measure(case, progress)

    monkeypatch.setattr(tiers, "measure", watched)
    monkeypatch.setattr("shutil.which", lambda name: None)
    told = called("bench", tmp_path, "--objects", 6, "--kib", 128, "--repeats", 1)
    for way in ("tier store", "tier load, layer by layer", "bare calls, store", "bare calls, load"):
        assert way in told
    assert "fio" not in told
    assert [(case.num_objects, case.object_bytes) for case in cases] == [(6, 128 << 10)]
    assert list(tmp_path.iterdir()) == []


def test_doctor_tries_a_tier() -> None:
    assert doctor._tier().startswith("stored and loaded by ")


def test_prometheus(make_rig: MakeRig) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    from paddle_kv.tiers.metrics import TierCollector

    rig = make_rig()
    rig.store(keys(3))
    rig.load([*keys(2), b"absent"])
    registry = prometheus_client.CollectorRegistry()
    registry.register(TierCollector({"disk": rig.tier}, {"rank": "3"}))

    def value(name: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(
            f"paddle_kv_tier_{name}", {"tier": "disk", "rank": "3", **labels}
        )
        return found

    assert value("objects_total", kind="store", outcome="done") == 3
    assert value("objects_total", kind="load", outcome="missing") == 1
    assert value("bytes_total", kind="load") == 2 * rig.rows.shape[1]
    assert value("job_seconds_count", kind="load") == value("job_seconds_bucket", kind="load", le="+Inf") == 1
    assert value("job_seconds_sum", kind="load") == pytest.approx(rig.tier.stats()["load_seconds"])
    assert value("objects") == 3
    assert value("used_bytes") == 3 * 53248
    assert value("lost_total", reason="evicted") == 0


def test_prometheus_has_every_figure_in_its_place() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    from paddle_kv.tiers.metrics import TierCollector

    outcomes = [outcome.value for outcome in Outcome]
    stats: dict[str, Any] = {f"store_{name}": 10 + n for n, name in enumerate(outcomes)}
    stats |= {f"load_{name}": 20 + n for n, name in enumerate(outcomes)}
    stats |= {"store_bytes": 31, "load_bytes": 32, "store_seconds": 3.5, "load_seconds": 4.5}
    stats |= {"store_latency": [1] * 15, "load_latency": [2] + [0] * 13 + [5]}
    engine = {"objects": 41, "used_bytes": 42, "capacity_bytes": 43, "resting_roots": 44}
    stats |= {f"engine_{name}": value for name, value in engine.items()} | {"engine_evicted": 51, "engine_errors": 52}

    class Fixed:
        def stats(self) -> dict[str, Any]:
            return stats

    registry = prometheus_client.CollectorRegistry()
    registry.register(TierCollector({"disk": Fixed()}))  # type: ignore[dict-item]
    found = {
        (
            sample.name.removeprefix("paddle_kv_tier_"),
            *(value for key, value in sorted(sample.labels.items()) if key != "tier"),
        ): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    bounds = ["0.001", "0.002", "0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5"]
    bounds += ["1.0", "2.0", "5.0", "10.0", "30.0", "+Inf"]
    expected: dict[tuple[str, ...], float] = {}
    for kind in ("store", "load"):
        expected |= {("objects_total", kind, name): stats[f"{kind}_{name}"] for name in outcomes}
        expected["bytes_total", kind] = stats[f"{kind}_bytes"]
        expected["job_seconds_sum", kind] = stats[f"{kind}_seconds"]
    expected |= {("job_seconds_bucket", "store", bound): n + 1 for n, bound in enumerate(bounds)}
    expected |= {("job_seconds_bucket", "load", bound): 7 if bound == "+Inf" else 2 for bound in bounds}
    expected |= {("job_seconds_count", "store"): 15, ("job_seconds_count", "load"): 7}
    expected |= {("lost_total", "evicted"): 51, ("lost_total", "error"): 52}
    expected |= {(name,): value for name, value in engine.items()}
    assert found == expected

    for name in ("engine_resting_roots", "engine_evicted"):
        del stats[name]  # an engine of somebody else counts less
    assert registry.get_sample_value("paddle_kv_tier_resting_roots", {"tier": "disk"}) is None
    assert registry.get_sample_value("paddle_kv_tier_lost_total", {"tier": "disk", "reason": "evicted"}) == 0
