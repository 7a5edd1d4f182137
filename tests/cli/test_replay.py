"""The command as a user calls it, on a small trace of its own."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from paddle_kv.cli.main import app

RUNNER = CliRunner()


def plain(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


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


def test_decisions_of_each_request(trace: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "decisions.csv", tmp_path / "decisions.json"]
    for path in paths:
        found = RUNNER.invoke(
            app,
            [
                *["replay", str(trace), "--policy", "lru", "--capacity", "100", "--link-gbps", "1", "--queue", "1"],
                *["--decisions", str(path)],
                *(["--plot", str(tmp_path / "plots")] if path is paths[0] else []),
            ],
        )
        assert found.exit_code == 0, found.output
    assert re.search(r"where something was found: compute \d+, load \d+, meet [1-9]", plain(found.output))
    assert (tmp_path / "plots" / "first_token.png").stat().st_size > 10_000
    rows = list(csv.DictReader(paths[0].open()))
    assert len(rows) == 24
    assert [row["choice"] for row in rows] == [row["choice"] for row in json.loads(paths[1].read_text())]
    for row in rows:
        assert float(row["decide_first_token_s"]) <= 1.1 * float(row["compute_first_token_s"])
        assert bool(row["choice"]) == bool(int(row["host_blocks"]))
    known = [row for row in rows if row["expected_meet_s"]]
    assert known and all(float(row["expected_meet_s"]) <= float(row["expected_compute_s"]) for row in known)
    assert rows[0]["expected_load_s"] == "" and json.loads(paths[1].read_text())[0]["expected_load_s"] is None


@pytest.mark.parametrize(
    ("policies", "served_with"),
    [([], "survival"), (["--policy", "arc"], "arc"), (["--policy", "s3fifo", "--policy", "survival"], "s3fifo")],
)
def test_decisions_are_made_with_the_policy_of_a_manager_unless_one_is_named(
    trace: Path, policies: list[str], served_with: str
) -> None:
    found = RUNNER.invoke(app, ["replay", str(trace), *policies, "--capacity", "10", "--queue", "1"])
    assert found.exit_code == 0, found.output
    assert f"Seconds to the first token, {served_with}, 10 blocks:" in plain(found.output)
    if not policies:
        assert all(f" {policy} " in plain(found.output) for policy in ("lru", "arc", "s3fifo", "survival"))


@pytest.mark.parametrize(
    ("options", "what"),
    [(["--decisions", "a.csv"], "--decisions needs --queue"), (["--queue", "0", "--device", "real"], "is simulated")],
)
def test_decisions_that_nobody_makes_are_refused(trace: Path, options: list[str], what: str) -> None:
    found = RUNNER.invoke(app, ["replay", str(trace), *options])
    assert found.exit_code == 2 and what in found.output


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
        "tokens_per_block": 512,
        "tier_bytes_per_s": 5e9,
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
        ["--link-gbps", "-1"],
        ["--time-scale", "nan"],
        ["--tokens-per-block", "0"],
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
    if options[1] in ("inf", "nan", "-1"):
        assert f"{options[0]}': {options[1]} must be a finite number above 0" in plain(found.output)


@pytest.mark.parametrize(
    ("option", "text"),
    [("--csv", "there is no folder"), ("--json", "there is no folder"), ("--waits", "there is no folder"),
     ("--plot", "is no folder, and none can be made"), ("--plot /proc", "nothing can be written in /proc")],
)  # fmt: skip
def test_a_target_that_cannot_be_written_is_a_message_before_the_work(
    trace: Path, option: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddle_kv.cli.replay.run_all", None)  # not reached
    option, _, target = option.partition(" ")
    found = RUNNER.invoke(app, ["replay", str(trace), option, target or str(trace / "rows")])
    assert found.exit_code == 2
    assert text in plain(found.output)


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
    assert "line 1" in plain(found.output)


def test_a_full_disk_is_a_message_before_the_work_and_behind_it(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = RUNNER.invoke(app, ["replay", str(trace), "--capacity", "9", "--csv", "/dev/full"])
    assert found.exit_code == 1 and isinstance(found.exception, SystemExit)  # no traceback
    assert "optimum" in found.output, "what was worked out is not lost"
    assert "No space left on device" in found.output
    monkeypatch.setattr("paddle_kv.cli.replay.run_all", None)  # not reached
    full = os.statvfs_result((0,) * 10)
    monkeypatch.setattr("paddle_kv.cli.files.os.statvfs", lambda path: full)
    found = RUNNER.invoke(app, ["replay", str(trace), "--csv", str(tmp_path / "rows.csv")])
    assert found.exit_code == 2
    assert f"no space is left for {tmp_path}" in plain(found.output).replace(" /", "/").replace("for/", "for /")


@pytest.mark.parametrize("other", ["--csv", "--waits", "the file that is read"])
def test_two_files_of_one_name(trace: Path, tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_kv.cli.main.read_trace", None)  # not reached
    monkeypatch.chdir(tmp_path)
    name = "trace.jsonl" if other.startswith("the") else "same"
    given = [other, name] if other.startswith("--") else []
    found = RUNNER.invoke(app, ["replay", str(trace), *given, "--json", str(tmp_path / ".." / tmp_path.name / name)])
    assert found.exit_code == 2
    assert f"is also {'--json' if other == '--waits' else other}" in plain(found.output)
    assert trace.read_text().startswith("{"), "the trace is as it was"


@pytest.mark.parametrize("capacity", ["3000000000", "999999999999999"])
def test_more_capacity_than_there_is_memory(trace: Path, capacity: str) -> None:
    """In simulated time it is as good as room for all; real bytes have to be somewhere."""
    found = RUNNER.invoke(app, ["replay", str(trace), "--capacity", capacity, "--policy", "lru"])
    assert found.exit_code == 0, found.output
    found_all = RUNNER.invoke(app, ["replay", str(trace), "--capacity", "100", "--policy", "lru"])
    hits = [plain(one.output).split("%")[0].split()[-1] for one in (found, found_all)]
    assert hits[0] == hits[1] != "0.00"
    found = RUNNER.invoke(app, ["replay", str(trace), "--capacity", capacity, "--policy", "lru", "--device", "real"])
    assert found.exit_code == 2
    assert f"{int(capacity) << 16} bytes of" in plain(found.output) and "were asked for" in plain(found.output)


def test_a_capacity_that_no_machine_has(trace: Path) -> None:
    found = RUNNER.invoke(app, ["replay", str(trace), "--capacity", "99999999999999999999"])
    assert found.exit_code == 2
    assert "'--capacity'" in plain(found.output) and f"{10**15}" in found.output


def test_blocks_of_other_sizes(trace: Path, tmp_path: Path) -> None:
    """An id of half as many tokens takes half the memory and saves half the computation."""
    rows = []
    for tokens in (512, 256):
        path = tmp_path / f"{tokens}.csv"
        command = ["replay", str(trace), "--policy", "lru", "--capacity", "100", "--csv", str(path)]
        assert RUNNER.invoke(app, [*command, "--tokens-per-block", str(tokens)]).exit_code == 0
        rows.append(next(csv.DictReader(path.open())))
    assert int(rows[0]["loaded_bytes"]) == 2 * int(rows[1]["loaded_bytes"]) > 0
    assert rows[0]["recompute_wait_mean_s"] == rows[1]["recompute_wait_mean_s"]
    assert float(rows[0]["layerwise_wait_mean_s"]) < float(rows[1]["layerwise_wait_mean_s"])


def test_the_default_capacities_are_in_the_help() -> None:
    assert "Default: 1%, 3%, 10%, 30%, 100% of the distinct blocks" in plain(
        RUNNER.invoke(app, ["replay", "--help"]).output
    )


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([[1, 2], [1, 2, 3], [], [4, 5]], None),
        ([[1, 2], [3, 2]], "in hash_ids 2 stands behind 1 and, in request 1, behind 3"),
        ([[1, 2], [2]], "in hash_ids 2 stands behind 1 and, in request 1, first"),
        ([[7, 8, 7]], "in hash_ids 7 stands first and, in request 0, behind 8"),
    ],
)
def test_ids_that_are_no_prefix_hashes_are_told(tmp_path: Path, prompts: list[list[int]], said: str | None) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": n, "input_length": 9, "hash_ids": ids} for n, ids in enumerate(prompts)]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = RUNNER.invoke(app, ["replay", str(path), "--capacity", "2"])
    assert found.exit_code == 0, found.output
    assert ("hash_ids" in found.output) == (said is not None)
    if said:
        assert f"{said}: these are no hashes of prefixes, for which alone the optimum is a bound" in plain(found.output)


def drawn(command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The figures by the names of their files."""
    from matplotlib import pyplot

    figures, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: figures.append(figure) or close(figure))
    found = RUNNER.invoke(app, [*command, "--plot", str(folder)])
    assert found.exit_code == 0, found.output
    names = [line.rpartition("/")[2] for line in found.output.splitlines() if line.endswith(".png")]
    assert sorted(names) == sorted(path.name for path in folder.iterdir())
    return dict(zip(names, figures, strict=True))


def test_pictures_show_something(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    many = ["--capacity", "10", "--capacity", "14", "--capacity", "100", "--tokens-per-block", "64"]
    figures = drawn(["replay", str(trace), *many], tmp_path / "many", monkeypatch)
    assert list(figures) == ["hit_rate.png", "waiting_time.png", "timeline.png"]
    assert figures["hit_rate.png"].axes[0].get_xlabel() == "capacity in blocks of 64 tokens"
    load, layerwise = figures["timeline.png"].axes  # all requests come in one minute
    for panel in (load, layerwise):
        taken = [bar.get_x() + bar.get_width() for bar in panel.patches]
        assert len(taken) == 2 * 6 and min(taken) > 0
        assert max(taken) > 0.8 * panel.get_xlim()[1], "no white on the right"
    title = figures["waiting_time.png"].axes[0].get_title()
    assert title != "100 blocks", "there all policies find all"

    one = drawn(["replay", str(trace), "--capacity", "100"], tmp_path / "one", monkeypatch)
    assert list(one) == ["waiting_time.png", "timeline.png"], "one capacity makes no line"
    labels = [line.get_label() for line in one["waiting_time.png"].axes[0].lines]
    assert labels == ["recompute", "lru, arc, s3fifo, survival: whole", "lru, arc, s3fifo, survival: layerwise"]

    path = tmp_path / "new.jsonl"
    path.write_text("\n".join(json.dumps({"timestamp": n, "input_length": 9, "hash_ids": [n]}) for n in range(9)))
    assert drawn(["replay", str(path), "--capacity", "5"], tmp_path / "new", monkeypatch) == {}, "nothing is found"
    assert list(drawn(["replay", str(path)], tmp_path / "sweep", monkeypatch)) == ["hit_rate.png"]


@pytest.mark.parametrize("device", ["simulated", "real"])
def test_a_tier_below(trace: Path, tmp_path: Path, device: str) -> None:
    rows_path, folder = tmp_path / "rows.csv", tmp_path / "folder"
    options = ["--policy", "lru", "--capacity", "20", "--csv", str(rows_path), "--device", device]
    options += ["--time-scale", "0.0001", "--real-block-bytes", "4096"] if device == "real" else []
    found = RUNNER.invoke(app, ["replay", str(trace), *options, "--tier", f"file:{folder}:{10**12}"])
    assert found.exit_code == 0, found.output
    assert "of tier" in found.output
    for row in csv.DictReader(rows_path.open()):
        if row["policy"] == "lru":
            assert int(row["hit_blocks"]) == 3 * sum(2 * turn for turn in range(8))  # all that was there before
            assert 0 < int(row["tier_hit_blocks"]) <= int(row["hit_blocks"])
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize("text", ["disk:/tmp", "file:", "file:/tmp:0"])
def test_a_tier_that_is_none(trace: Path, text: str) -> None:
    found = RUNNER.invoke(app, ["replay", str(trace), "--tier", text])
    assert found.exit_code == 2
    assert "file:DIR or file:DIR:BYTES is expected" in plain(found.output)


def test_hints_and_what_is_not_counted(trace: Path, tmp_path: Path) -> None:
    """Three conversations of eight turns; room for one."""
    found = {}
    for name, options in {
        "none": [],
        "ends": ["--ends"],
        "wrong": ["--wrong-ends", "1"],
        "expected": ["--expect", "3"],
        "later": ["--warm-up", "21"],
    }.items():
        rows_path = tmp_path / f"{name}.csv"
        common = ["replay", str(trace), "--policy", "lru", "--capacity", "20", "--csv", str(rows_path)]
        run = RUNNER.invoke(app, [*common, *options])
        assert run.exit_code == 0, run.output
        found[name] = next(iter(csv.DictReader(rows_path.open())))
    hits = {name: int(row["hit_blocks"]) for name, row in found.items()}
    assert hits["expected"] > hits["none"]
    assert hits["wrong"] != hits["ends"]
    assert (found["later"]["requests"], found["later"]["blocks"]) == ("3", "48")
    for options in (["--warm-up", "24"], ["--wrong-ends", "2"], ["--device", "real", "--ends"]):
        assert RUNNER.invoke(app, ["replay", str(trace), "--capacity", "20", *options]).exit_code == 2
