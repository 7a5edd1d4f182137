"""The command as a user calls it, on a small trace of its own."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from paddle_kv.cli.main import app

RUNNER = CliRunner()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three conversations in turn, each prompt two blocks longer than the one before."""
    path = tmp_path / "trace.jsonl"
    lines = []
    for turn in range(8):
        for talk in range(3):
            ids = [1000 * talk + position for position in range(2 * turn + 2)]
            line = {
                "timestamp": 1000 * (3 * turn + talk),
                "input_length": 512 * len(ids),
                "output_length": 9,
                "hash_ids": ids,
            }
            lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return path


def test_rows_and_files(trace: Path, tmp_path: Path) -> None:
    rows_path, json_path, plots = tmp_path / "rows.csv", tmp_path / "rows.json", tmp_path / "plots"
    waits_path = tmp_path / "waits.csv"
    found = RUNNER.invoke(
        app,
        [
            *["replay", str(trace), "--policy", "lru", "--policy", "arc", "--capacity", "100", "--capacity", "10"],
            *["--csv", str(rows_path), "--json", str(json_path), "--plot", str(plots)],
            *["--waits", str(waits_path)],
        ],
    )
    assert found.exit_code == 0, found.output
    rows = list(csv.DictReader(rows_path.open()))
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        (policy, capacity) for capacity in ("10", "100") for policy in ("lru", "arc", "optimum")
    ]
    # With room for all, every block but the two new ones of each prompt is found.
    blocks, found_blocks = 3 * sum(2 * turn + 2 for turn in range(8)), 3 * sum(2 * turn for turn in range(8))
    for row in rows[3:]:
        assert (int(row["blocks"]), int(row["hit_blocks"])) == (blocks, found_blocks)
        assert (
            float(row["layerwise_wait_mean_s"]) < float(row["whole_wait_mean_s"]) < float(row["recompute_wait_mean_s"])
        )
    assert all(int(row["hit_blocks"]) < found_blocks for row in rows[:3])
    assert [row["hit_rate"] for row in json.loads(json_path.read_text())["rows"]] == [
        float(row["hit_rate"]) for row in rows
    ]
    waits = list(csv.DictReader(waits_path.open()))
    assert len(waits) == 24 * len(rows)
    for number, row in enumerate(rows):
        own = waits[24 * number : 24 * number + 24]
        assert sum(int(one["hit_blocks"]) for one in own) == int(row["hit_blocks"])
        for way in ("recompute", "whole", "layerwise"):
            mean_s = sum(float(one[f"{way}_wait_s"]) for one in own) / 24
            assert mean_s == pytest.approx(float(row[f"{way}_wait_mean_s"]))
    pytest.importorskip("matplotlib")
    assert sorted(path.name for path in plots.iterdir()) == ["hit_rate.png", "timeline.png", "waiting_time.png"]
    assert "optimum" in found.output
    for name in ("hit_rate", "waiting_time", "timeline"):
        assert f"{plots / name}.png\n" in found.output  # a path is not broken into lines


def test_real_transfers_beside_the_simulation(trace: Path, tmp_path: Path) -> None:
    rows_path, plots = tmp_path / "rows.csv", tmp_path / "plots"
    found = RUNNER.invoke(
        app,
        [
            *["replay", str(trace), "--device", "real", "--policy", "lru", "--capacity", "100", "--capacity", "30"],
            *["--real-layers", "2", "--real-block-bytes", "4096", "--time-scale", "0.001"],
            *["--csv", str(rows_path), "--plot", str(plots), "--json", str(tmp_path / "rows.json")],
        ],
    )
    assert found.exit_code == 0, found.output
    costs = json.loads((tmp_path / "rows.json").read_text())["costs"]
    assert costs == {
        "block_bytes": 4096,
        "num_layers": 2,
        "link_bytes_per_s": None,  # of each row: loaded_bytes / transfer_s
        "prefill_tokens_per_s": 60_000,
        "time_scale": 0.001,
    }
    rows = list(csv.DictReader(rows_path.open()))
    assert [(row["device"], row["capacity_blocks"]) for row in rows] == [
        (device, capacity) for capacity in ("30", "100") for device in ("real", "simulated")
    ]
    for real, simulated in (rows[:2], rows[2:]):
        for column in ("hit_blocks", "loaded_bytes", "saved_bytes", "evicted_blocks"):
            assert real[column] == simulated[column]
        assert int(real["loaded_bytes"]) == 4096 * int(real["hit_blocks"])
        assert float(real["transfer_s"]) == pytest.approx(float(simulated["transfer_s"]))
        assert all(float(real[f"{way}_wait_p99_s"]) > 0 for way in ("recompute", "whole", "layerwise"))
    assert int(rows[0]["hit_blocks"]) < int(rows[2]["hit_blocks"])
    assert "simulated" in found.output
    pytest.importorskip("matplotlib")
    assert len(list(plots.iterdir())) == 3


@pytest.mark.parametrize(
    "options",
    [
        ["--capacity", "0"],
        ["--link-gbps", "0"],
        ["--link-gbps", "inf"],
        ["--prefill-tokens-per-s", "nan"],
        ["--tp", "3"],
        ["--policy", "mru"],
        ["--device", "real", "--real-block-bytes", "5"],
        ["--device", "real", "--time-scale", "0"],
    ],
)
def test_a_wrong_option_is_a_message_and_no_traceback(trace: Path, options: list[str]) -> None:
    found = RUNNER.invoke(app, ["replay", str(trace), *options])
    assert found.exit_code == 2
    assert isinstance(found.exception, SystemExit)
    if options[1] in ("inf", "nan"):
        assert f"{options[1]} must be a finite number above 0" in found.output


@pytest.mark.parametrize(
    ("option", "text"),
    [("--csv", "there is no folder"), ("--json", "there is no folder"), ("--waits", "there is no folder"),
     ("--plot", "is no folder, and none can be made")],
)  # fmt: skip
def test_a_target_that_cannot_be_written_is_a_message_before_the_work(
    trace: Path, option: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddle_kv.cli.replay.run_all", None)  # not reached
    found = RUNNER.invoke(app, ["replay", str(trace), option, str(trace / "rows")])
    assert found.exit_code == 2
    assert text in " ".join(found.output.replace("│", " ").split())


def test_pictures_need_matplotlib(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_kv.cli.files.find_spec", lambda name: None)
    for command in (["bench", "--plot", str(tmp_path / "a.png")], ["replay", str(trace), "--plot", str(tmp_path)]):
        found = RUNNER.invoke(app, command)
        assert found.exit_code == 2
        assert "pictures need matplotlib" in found.output


def test_requests_of_any_time_and_without_blocks_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, plots = tmp_path / "trace.jsonl", tmp_path / "plots"
    lines = [
        {"timestamp": 1.7e12 + 100.5 * number, "input_length": 9, "hash_ids": ids}
        for number, ids in enumerate([[], [1, 2, 1], [1, 2, 1, 1 << 70], []])
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    for options in ([], ["--device", "real", "--time-scale", "0.000000001"]):
        command = ["replay", str(path), "--capacity", "2", "--capacity", "9", "--plot", str(plots), *options]
        found = RUNNER.invoke(app, command)
        assert found.exit_code == 0, found.output
        assert "42.86%" in found.output
    assert len(list(plots.iterdir())) == 3


def test_a_file_that_is_no_trace_is_a_message(tmp_path: Path) -> None:
    path = tmp_path / "other.txt"
    path.write_text("hello")
    found = RUNNER.invoke(app, ["replay", str(path)])
    assert found.exit_code == 2
    assert "line 1" in found.output
