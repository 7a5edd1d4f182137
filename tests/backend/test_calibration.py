"""Costs for engine "auto": what is stored is what is loaded, and they are found from measured rows."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from paddle_kv.backend import calibration
from paddle_kv.backend.calibration import MOST_NS_PER_MIB, SIZES_KIB, EngineCosts, WayCosts
from paddle_kv.backend.transfer_queue import NUM_COSTS
from paddle_kv.bench.calibrate import costs_from

HEADER = Path(__file__).resolve().parents[2] / "custom_ops/include/paddle_kv/transfer/engine_choice.h"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def counted() -> EngineCosts:
    """All costs differ, in order."""
    ways = [
        WayCosts(*(tuple(range(first, first + len(SIZES_KIB))) for first in (start, start + len(SIZES_KIB))))
        for start in range(0, NUM_COSTS, 2 * len(SIZES_KIB))
    ]
    return EngineCosts(*ways)


def test_what_is_stored_is_loaded(cache):
    path = calibration.store("NVIDIA H200 / 141GB", counted())
    assert path == cache / "paddle_kv" / "engines-NVIDIA-H200-141GB.json"
    assert calibration.load("NVIDIA H200 / 141GB") == counted()
    assert calibration.load("another") is None
    assert counted().in_order() == list(range(NUM_COSTS))


STORED = {"gpu": "gpu", "sizes_kib": list(SIZES_KIB), "ns_per_mib": dataclasses.asdict(EngineCosts())}
OF_ONE = STORED["ns_per_mib"]["kernel_d2h"]


def with_kernel(**changed) -> str:
    return json.dumps(STORED | {"ns_per_mib": STORED["ns_per_mib"] | {"kernel_d2h": OF_ONE | changed}})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps(STORED | {"sizes_kib": [1, *SIZES_KIB[1:]]}),
        json.dumps(STORED | {"ns_per_mib": 7}),
        json.dumps(STORED | {"ns_per_mib": {"kernel_d2h": OF_ONE}}),
        json.dumps(STORED | {"ns_per_mib": STORED["ns_per_mib"] | {"unknown": OF_ONE}}),
        with_kernel(alone=[1] * 6),
        with_kernel(beside=[1] * 8),
        with_kernel(alone=[1.5] * 7),
        with_kernel(alone=["1"] * 7),
        with_kernel(alone=[-1] * 7),
        with_kernel(alone=[MOST_NS_PER_MIB + 1] * 7),
        with_kernel(alone=7),
    ],
)
def test_a_file_that_is_not_ours_is_as_none(content):
    path = calibration.path_of("gpu")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert calibration.load("gpu") is None
    calibration.store("gpu", EngineCosts())
    assert calibration.load("gpu") == EngineCosts()
    assert json.loads(path.read_text())["gpu"] == "gpu"


def test_costs_at_both_ends_of_what_is_allowed_are_loaded():
    costs = dataclasses.replace(EngineCosts(), staging_h2d=WayCosts((0,) * 7, (MOST_NS_PER_MIB,) * 7))
    calibration.store("gpu", costs)
    assert calibration.load("gpu") == costs
    assert MOST_NS_PER_MIB == 1 << 40


@pytest.mark.parametrize("unset", [None, ""])
def test_without_a_folder_for_caches_it_is_the_one_in_the_home(tmp_path, monkeypatch, unset):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME") if unset is None else monkeypatch.setenv("XDG_CACHE_HOME", unset)
    stored = calibration.store("gpu", EngineCosts())
    assert stored == tmp_path / "home/.cache/paddle_kv/engines-gpu.json"  # none of the folders was there
    assert calibration.load("gpu") == EngineCosts()
    assert stored.read_text().startswith('{\n  "gpu": "gpu",\n  "sizes_kib"')  # people read it


def test_what_is_built_in_is_what_the_library_has():
    found = re.search(r"  Ways copy_engine\[2\](.*?)\n\};", HEADER.read_text(), re.DOTALL)
    values = re.findall(r"\b\d+\b(?!\])", re.sub(r"//.*", "", found[1]))
    assert EngineCosts().in_order() == [int(value) for value in values]
    sizes = re.search(r"kSizes = (\d+);.*?kSmallestBytes = (\d+) << 10;", HEADER.read_text(), re.DOTALL)
    assert [int(sizes[2]) << i for i in range(int(sizes[1]))] == list(SIZES_KIB)


def measured(gbps: dict[tuple[str, str, str, int], float], slowed: dict[tuple[str, str], float]):
    """Rows of all engines, ways, loads and sizes; 20 GB/s and not slowed but for what is given."""
    for method in ("contiguous", "copy_engine", "kernel", "staging"):
        for way in ("h2d", "d2h"):
            for load in ("none", "gemm", "gemv"):
                for size in SIZES_KIB:
                    row = {"method": method, "way": way, "load": load, "piece_kib": size, "pattern": "scattered"}
                    row["gbps"] = gbps.get((method, way, load, size), 20.0)
                    yield row if load == "none" else row | {"slowed_percent": slowed.get((method, load), -0.5)}


def test_costs_are_time_and_what_the_model_loses():
    costs = costs_from(
        measured(
            {("kernel", "h2d", "none", 8): 50.0, ("kernel", "h2d", "gemm", 8): 40.0, ("kernel", "h2d", "gemv", 8): 0},
            {("kernel", "gemm"): 20.0},
        )
    )
    at_20 = round((1 << 20) / 20)
    assert costs.copy_engine_d2h == costs.staging_h2d == WayCosts((at_20,) * 7, (round((1 << 20) / 200),) * 7)
    assert costs.kernel_h2d.alone == (at_20, round((1 << 20) / 50), *(at_20,) * 5)
    # A tenth of the time and a fifth that is lost beside one load, a tenth beside the other, where nothing moved.
    assert costs.kernel_h2d.beside[2] == round((1 << 20) / 20 * (0.3 + 0.1) / 2)
    assert costs.kernel_h2d.beside[1] == round((1 << 20) * (0.3 / 40 + 0.1 / 1e-3) / 2)
