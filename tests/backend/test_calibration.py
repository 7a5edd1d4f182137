"""Sizes of engine "auto": what is stored is what is loaded, and the cheapest engine is found from measured rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from paddle_kv.backend import calibration
from paddle_kv.backend.calibration import NEVER, EngineSizes, WaySizes
from paddle_kv.bench.calibrate import sizes_from

HEADER = Path(__file__).resolve().parents[2] / "custom_ops/include/paddle_kv/transfer/engine_choice.h"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_is_stored_is_loaded(cache):
    sizes = EngineSizes(WaySizes(1, 2), WaySizes(3, 4), WaySizes(5, 6), WaySizes(7, 8), 9)
    path = calibration.store("NVIDIA H200 / 141GB", sizes)
    assert path == cache / "paddle_kv" / "engines-NVIDIA-H200-141GB.json"
    assert calibration.load("NVIDIA H200 / 141GB") == sizes
    assert calibration.load("another") is None
    assert sizes.in_order() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"sizes_bytes": "none"}',
        '{"sizes_bytes": 7}',
        '{"sizes_bytes": {"staging_block": 1, "unknown": {"alone": 1}}}',
        '{"sizes_bytes": {"staging_block": "8 KiB"}}',
        '{"sizes_bytes": {"staging_block": -1}}',
        '{"sizes_bytes": {"staging_block": 8192, "staging_d2h": {"alone": 1e6, "beside": 4096}}}',
        '{"sizes_bytes": {"staging_block": 8192, "staging_d2h": {"alone": 99999999999999999999, "beside": 4096}}}',
    ],
)
def test_a_file_that_is_not_ours_is_as_none(content):
    path = calibration.path_of("gpu")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert calibration.load("gpu") is None
    calibration.store("gpu", EngineSizes())
    assert calibration.load("gpu") == EngineSizes()
    assert json.loads(path.read_text())["gpu"] == "gpu"


def test_sizes_at_both_ends_of_what_is_allowed_are_loaded():
    sizes = EngineSizes(WaySizes(0, 1), WaySizes(NEVER, NEVER), WaySizes(0, NEVER), WaySizes(1, 0), NEVER)
    calibration.store("gpu", sizes)
    assert calibration.load("gpu") == sizes
    calibration.store("gpu", EngineSizes(staging_block=NEVER + 1))
    assert calibration.load("gpu") is None
    assert NEVER == 1 << 40


@pytest.mark.parametrize("unset", [None, ""])
def test_without_a_folder_for_caches_it_is_the_one_in_the_home(tmp_path, monkeypatch, unset):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME") if unset is None else monkeypatch.setenv("XDG_CACHE_HOME", unset)
    stored = calibration.store("gpu", EngineSizes())
    assert stored == tmp_path / "home/.cache/paddle_kv/engines-gpu.json"  # none of the folders was there
    assert calibration.load("gpu") == EngineSizes()
    assert stored.read_text().startswith('{\n  "gpu": "gpu",\n  "sizes_bytes"')  # people read it


def test_what_is_built_in_is_what_the_library_has():
    found = re.search(r"struct EngineThresholds \{(.*?)\n\};", HEADER.read_text(), re.DOTALL)
    values = re.findall(r"\b\d+\b(?!\])", re.sub(r"//.*", "", found[1]))
    assert EngineSizes().in_order() == [int(value) for value in values][:9]


def rows(pattern: str, rates: dict[str, dict[int, float]], load: str, slowed: dict[str, float]):
    for method, by_size in rates.items():
        for size, gbps in by_size.items():
            for way in ("d2h", "h2d"):
                row = {"piece_kib": size, "pattern": pattern, "way": way, "load": load, "method": method, "gbps": gbps}
                yield row | ({"slowed_percent": slowed[method]} if load != "none" else {})


def test_the_cheapest_engine_from_each_size_on():
    alone = {"kernel": {4: 45, 32: 50, 128: 50}, "copy_engine": {4: 3, 32: 40, 128: 53}}
    beside = {"kernel": {4: 40, 32: 40, 128: 40}, "copy_engine": {4: 3, 32: 38, 128: 50}}
    slowed = {"kernel": 20.0, "copy_engine": 2.0}
    staged = {"kernel": {16: 45}, "copy_engine": {16: 20}, "staging": {16: 54}}
    staged_beside = {"kernel": {16: 40}, "copy_engine": {16: 20}, "staging": {16: 10}}
    measured = [
        *rows("scattered", alone, "none", slowed),
        *rows("scattered", beside, "gemm", slowed),
        *rows("scattered", beside, "gemv", slowed),
        *rows("contiguous_host", staged, "none", slowed),
        *rows("contiguous_host", staged_beside, "gemm", slowed | {"staging": 20.0}),
        *rows("contiguous_host", staged_beside, "gemv", slowed | {"staging": 20.0}),
    ]
    sizes = sizes_from(measured, EngineSizes())
    assert sizes.copy_engine_d2h == sizes.copy_engine_h2d == WaySizes(128 << 10, 32 << 10)
    assert sizes.staging_d2h == WaySizes(EngineSizes().staging_d2h.alone, NEVER)


def test_staging_that_is_level_with_the_copy_engine_pays_for_smaller_pieces():
    """Beside compute the copy engine takes pieces of 32 KiB; what decides there says nothing of those of 8."""
    alone = {"kernel": {8: 50, 32: 51, 64: 50}, "copy_engine": {8: 12, 32: 46, 64: 53}}
    beside = {"kernel": {8: 38, 32: 37, 64: 38}, "copy_engine": {8: 14, 32: 51, 64: 53}}
    slowed = {"kernel": 9.0, "copy_engine": 0.5, "staging": 1.2}
    staged = {"kernel": {8: 50, 32: 50}, "copy_engine": {8: 12, 32: 46}, "staging": {8: 53, 32: 53}}
    staged_beside = {"kernel": {8: 38, 32: 37}, "copy_engine": {8: 14, 32: 51}, "staging": {8: 52, 32: 52}}
    measured = [
        row
        for pattern, by_load in (
            ("scattered", {"none": alone, "gemm": beside, "gemv": beside}),
            ("contiguous_host", {"none": staged, "gemm": staged_beside, "gemv": staged_beside}),
        )
        for load, rates in by_load.items()
        for row in rows(pattern, rates, load, slowed)
    ]
    sizes = sizes_from(measured, EngineSizes())
    assert sizes.copy_engine_d2h == WaySizes(64 << 10, 32 << 10)
    assert sizes.staging_d2h == EngineSizes().staging_d2h
    assert sizes.staging_h2d == EngineSizes().staging_h2d


def test_an_engine_that_is_never_the_cheapest():
    rates = {"kernel": {4: 45, 128: 50}, "copy_engine": {4: 3, 128: 30}}
    sizes = sizes_from(rows("scattered", rates, "none", {}), EngineSizes())
    assert sizes.copy_engine_d2h.alone == NEVER
