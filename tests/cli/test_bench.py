"""paddle-kv bench, doctor and env from end to end, on what this machine has."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import paddle_kv
from paddle_kv.bench import engines, methods
from paddle_kv.cli.main import app
from paddle_kv.devices import has_gpu

SMALL = ["--layers", "2", "--tokens", "3", "--tokens", "5", "--blocks", "7", "--repeats", "5", "--warmups", "1"]
COLUMNS = {
    "tokens_per_block", "num_blocks", "pattern", "direction", "backend", "total_bytes", "inner_bytes", "copy_size",
    "num_copies", "median_ms", "bandwidth_gbps",
}  # fmt: skip
WIDE = {"COLUMNS": "400"}  # a path in a message stays on one line


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    found = {kind: folder / f"run.{kind}" for kind in ("csv", "json", "png")}
    sweep = [f"--{axis}={value}" for axis, values in (("direction", ("h2d", "d2h", "both")),) for value in values]
    sweep += [f"--pattern={value}" for value in ("scattered", "contiguous_host", "lw_to_fc", "fc_to_fc")]
    run("bench", *SMALL, *sweep, "--csv", str(found["csv"]), "--json", str(found["json"]), "--plot", str(found["png"]))
    return found


def test_the_csv_has_every_combination_with_bytes_that_add_up(files):
    with files["csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) >= COLUMNS
    token_bytes = 2 * 8 * 128  # one tensor of one layer: bfloat16, 8 heads of 128
    for row in rows:
        tokens, ways = int(row["tokens_per_block"]), 2 if row["direction"] == "both" else 1
        assert int(row["inner_bytes"]) == tokens * token_bytes
        assert int(row["total_bytes"]) == ways * 7 * 2 * 2 * tokens * token_bytes
        assert int(row["copy_size"]) * int(row["num_copies"]) == int(row["total_bytes"])
        assert int(row["copy_size"]) == tokens * token_bytes * (4 if row["pattern"] == "fc_to_fc" else 1)
        rate = int(row["total_bytes"]) / float(row["median_ms"]) / 1e6
        assert float(row["bandwidth_gbps"]) == pytest.approx(rate)
        assert row["bytes_checked"] == "True"
    seen = {(row["tokens_per_block"], row["pattern"], row["direction"], row["backend"]) for row in rows}
    assert len(seen) == len(rows)
    everywhere = {"contiguous", "memcpy_loop", "vectorized_copy"}
    for tokens in ("3", "5"):
        for pattern in ("scattered", "contiguous_host", "lw_to_fc", "fc_to_fc"):
            for direction in ("h2d", "d2h", "both"):
                here = {name for *case, name in seen if case == [tokens, pattern, direction]}
                layered = {"scheduler"} if pattern != "fc_to_fc" else set()
                swaps = (
                    {"swap_cache_all_layers", "swap_cache_per_layer"} if "co" in pattern or "sc" in pattern else set()
                )
                assert here >= everywhere | layered | (swaps if pattern != "fc_to_fc" else set())


OPERATIONS = {
    "copy_blocks": (1, 3 * 8 * 128 * 2),
    "universal_from_cache": (8, 3 * 128 * 2),
    "cache_from_universal": (8, 3 * 128 * 2),
    "operational_from_block": (1, 3 * 8 * 128 * 2),
    "block_from_operational": (1, 3 * 8 * 128 * 2),
    "reshape_and_cache": (1, 3 * 8 * 128 * 2),
    "gather_cache": (1, 3 * 8 * 128 * 2),
    "scatter_cache": (1, 3 * 8 * 128 * 2),
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_each_operation_is_measured_beside_copies_of_its_pieces(op, tmp_path):
    pieces_per_tensor, piece_bytes = OPERATIONS[op]
    path = tmp_path / "run.csv"
    run("bench", "--op", op, "--layers=2", "--tokens=3", "--blocks=7", "--repeats=1", "--warmups=0", "--csv", str(path))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["backend"] for row in rows} >= {"contiguous", op, "vectorized_copy", "memcpy_loop"}
    assert {(row["op"], row["direction"]) for row in rows} == {(op, "d2d")}
    for row in rows:
        assert (int(row["copy_size"]), int(row["num_copies"])) == (piece_bytes, 7 * 2 * 2 * pieces_per_tensor)
        assert int(row["total_bytes"]) == 7 * 2 * 2 * 3 * 8 * 128 * 2


@pytest.mark.parametrize("model", ["Llama-3.1-70B", "Qwen3-32B", "DeepSeek-V3"])
@pytest.mark.parametrize(
    "op", ["swap", "copy_blocks", "universal_from_cache", "block_from_operational", "gather_cache"]
)
def test_all_models(model, op, tmp_path):
    path = tmp_path / "run.json"
    sizes = ["--layers=2", "--tp=2", "--tokens=3", "--blocks=5", "--repeats=1", "--warmups=0"]
    run("bench", "--op", op, "--model", model, *sizes, "--json", str(path))
    rows = json.loads(path.read_text())["rows"]
    token_bytes = 2 * (576 if model == "DeepSeek-V3" else 2 * 4 * 128)
    assert {(row["model"], row["tp"], row["total_bytes"]) for row in rows} == {(model, 2, 5 * 2 * 3 * token_bytes)}


def test_alignments_and_pageable_memory(tmp_path):
    path = tmp_path / "run.csv"
    alignments = [f"--alignment={bytes_}" for bytes_ in (1, 2, 4, 8, 16)]
    sizes = ["--layers=2", "--tokens=3", "--blocks=5", "--repeats=1", "--warmups=0", "--pageable"]
    patterns = ["--pattern=scattered", "--pattern=lw_to_fc", "--pattern=fc_to_fc"]
    run("bench", *sizes, *alignments, *patterns, "--direction=h2d", "--direction=d2d", "--csv", str(path))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    seen = {
        (int(row["alignment"]), row["pattern"], row["direction"]) for row in rows if row["backend"] == "memcpy_loop"
    }
    patterns_seen = ("scattered", "lw_to_fc", "fc_to_fc")
    assert seen == {(a, p, d) for a in (1, 2, 4, 8, 16) for p in patterns_seen for d in ("h2d", "d2d")}
    assert {row["memory"] for row in rows} == {"pageable"}
    if not has_gpu():  # there all memory is, and every method takes it
        assert {row["backend"] for row in rows} >= {"scheduler", "swap_cache_all_layers", "vectorized_copy"}


def test_pieces_agree_modulo_the_alignment_and_no_more():
    from paddle_kv import KVCacheSpec
    from paddle_kv.bench.setup import make_case

    spec = KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float16")
    for alignment in (1, 2, 4, 8, 16):
        case = make_case(spec, "scattered", "h2d", 3, pinned=False, seed=0, alignment=alignment)
        differences = {(d ^ h) % 16 for d, h in zip(case.device.bases, case.host.bases, strict=True)}
        assert differences == {alignment % 16}
        case.close()


def test_the_json_compares_with_itself(files):
    data = json.loads(files["json"].read_text())
    assert data["machine"]["paddle"] and len(data["rows"]) > 20
    output = run("bench", "compare", str(files["json"]), str(files["json"]))
    assert "1.000" in output and "faster" not in output


def test_the_plots_show_something(files):
    from matplotlib import image

    for path in (files["png"], files["png"].with_stem("run-roofline")):
        pixels = image.imread(path)[..., :3]
        assert min(pixels.shape[:2]) > 300
        assert len(np.unique(pixels.round(1) @ [10_000, 100, 1])) > 5


def test_a_line_of_a_plot_has_one_point_for_each_size(tmp_path, monkeypatch):
    """Whatever else is swept is in a panel of its own, not a zigzag within one."""
    from matplotlib import pyplot

    figures, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: figures.append(figure) or close(figure))
    axes = ["--blocks=3", "--blocks=9", "--alignment=1", "--alignment=16", "--pattern=scattered", "--pattern=lw_to_fc"]
    backends = ["--backend=memcpy_loop", "--backend=vectorized_copy"]
    sizes = ["--layers=2", "--tokens=2", "--tokens=5", "--repeats=1", "--warmups=0"]
    run("bench", *sizes, *axes, *backends, "--plot", str(tmp_path / "run.png"))
    bandwidth, roofline = figures
    titles = [panel.get_title() for panel in bandwidth.axes]
    assert len(set(titles)) == len(titles) == 2 * 2 * 2 * 2
    assert "h2d, lw_to_fc, 9 blocks, aligned to 1" in titles
    for panel in bandwidth.axes:
        lines = {line.get_label(): line for line in panel.lines}
        assert set(lines) == {"contiguous", "memcpy_loop", "vectorized_copy"}
        for line in lines.values():
            assert len(line.get_xdata()) == 2 and line.get_xdata()[0] < line.get_xdata()[1]
            assert line.get_marker() != "None"  # a single point has to be seen too
    assert len({panel.get_title() for panel in roofline.axes}) == len(roofline.axes) == 2 * 2 * 2
    for panel in roofline.axes:
        rates = [rate for line in panel.lines[:3] for rate in line.get_ydata()]
        assert len(rates) == 3 * 2 * 2
        assert f"roof: {max(rates):.3g} GB/s" in [text.get_text() for text in panel.get_legend().get_texts()]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tokens", "0"], "'--tokens'"),
        (["--blocks", "-1"], "'--blocks'"),
        (["--calibrate", "--json", "rows.json"], "--calibrate writes a --csv and no other file"),
        (["--calibrate", "--plot", "rows.png"], "--calibrate writes a --csv and no other file"),
        (["--tp", "3"], "must divide the 8 KV heads"),
        (["--pattern", "diagonal"], "diagonal"),
        (["--model", "nobody"], "nobody"),
        (["--op", "nothing"], "nothing"),
        (["--alignment", "3"], "must be of 1, 2, 4, 8, 16"),
        (["--op", "copy_blocks", "--direction", "h2d"], "copy_blocks works inside the device"),
        (["--op", "operational_from_block", "--alignment", "8"], "with alignment = 16"),
        (["--op", "reshape_and_cache", "--model", "DeepSeek-V3"], "keeps one latent tensor"),
    ],
)
def test_bad_axes_are_refused_in_a_sentence(arguments, text):
    result = CliRunner().invoke(app, ["bench", *SMALL, *arguments])
    assert result.exit_code == 2
    assert text in plain(result.output)


def test_a_load_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("paddle_kv.cli.main.has_gpu", lambda: False)
    result = CliRunner().invoke(app, ["bench", *SMALL, "--load", "gemm"])
    assert result.exit_code == 2
    assert "a load needs a GPU" in result.output


def changed(files, tmp_path, change):
    """A copy of the JSON file that ``change`` was applied to."""
    data = json.loads(files["json"].read_text())
    change(data)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.parametrize(
    "change",
    [
        dict.clear,
        lambda data: data.update(machine=3),
        lambda data: data["rows"][0].pop("backend"),
        lambda data: data["rows"][0].update(bandwidth_gbps="fast"),
        lambda data: data["rows"][0].update(bandwidth_gbps=0),
        lambda data: data["rows"][0].update(noise_percent=-1),
        lambda data: data["rows"][0].update(model=[]),
    ],
)
def test_compare_refuses_a_foreign_file(files, tmp_path, change):
    path = changed(files, tmp_path, change)
    for both in ((path, str(files["json"])), (str(files["json"]), path)):
        result = CliRunner().invoke(app, ["bench", "compare", *both], env=WIDE)
        assert result.exit_code == 2
        assert "changed.json is not a file that paddle-kv bench --json wrote" in plain(result.output)


def test_compare_refuses_a_picture(files):
    result = CliRunner().invoke(app, ["bench", "compare", str(files["png"]), str(files["json"])], env=WIDE)
    assert result.exit_code == 2
    assert "run.png is not a file that paddle-kv bench --json wrote" in plain(result.output)


def plain(output):
    return " ".join(output.replace("│", " ").split())


def test_compare_tells_what_is_faster_what_is_left_out_and_where_it_ran(files, tmp_path):
    def change(data):
        del data["rows"][0]
        data["machine"]["driver"] = "12.8"
        for row in data["rows"]:
            row["noise_percent"] = 0.1
        for row, factor in zip(data["rows"][:3], (2.0, 0.5, 1.0001), strict=True):
            row["bandwidth_gbps"] *= factor
        data["rows"][0]["noise_percent"] = None  # beside a load it is not known

    def quiet(data):
        data["machine"]["driver"] = "12.4"
        for row in data["rows"]:
            row["noise_percent"] = 0.1

    other = changed(files, tmp_path, change)
    (tmp_path / "before").mkdir()
    before = changed(files, tmp_path / "before", quiet)
    output = plain(run("bench", "compare", before, other))
    assert "model: Llama-3.1-8B" in output and "driver: 12.4, then 12.8" in output
    assert "left out: 1 rows that are in the first file alone, 0 in the second" in output
    assert output.count("slower") == 1 and "0.500 0.2 % slower" in output
    assert "faster" not in output  # twice the rate, but nobody knows the noise
    assert "2.000" in output and "1.000 0.2 %" in output


def test_the_version():
    assert run("--version") == f"paddle-kv {paddle_kv.__version__}\n"


def test_an_outlier_that_sets_the_median_has_no_noise():
    """3.998 ms came with a noise of 0.1 % for what takes 0.26: two of three runs were slowed by the same thing."""
    from paddle_kv.bench.clock import measure

    class Clock:
        stream = None

        def __init__(self, times_ms):
            self.times_ms = iter(times_ms)

        def time_ms(self, enqueue, submission_us):
            enqueue()
            return next(self.times_ms)

    for times_ms in ([3.998], [3.99, 4.0], [3.998, 3.99, 4.0], [4.0, 0.26, 3.998, 3.99]):
        timing = measure(Clock(times_ms), lambda: None, warmups=0, repeats=len(times_ms))
        assert timing.noise_percent is None
    timing = measure(Clock([0.26, 3.998, 0.25, 0.27, 3.99]), lambda: None, warmups=0, repeats=5)
    assert timing.median_ms == 0.27 and timing.noise_percent > 100


def test_nobody_knows_the_noise_of_few_runs(tmp_path):
    from paddle_kv.bench.clock import Timing
    from paddle_kv.bench.run import Axes, _row
    from paddle_kv.bench.setup import make_case
    from paddle_kv.layout import KVCacheSpec

    rows = []
    for repeats in ("4", "5"):
        path = tmp_path / f"{repeats}.json"
        run("bench", "--layers=1", "--tokens=2", "--blocks=3", "--repeats", repeats, "--json", str(path))
        rows.append(json.loads(path.read_text())["rows"])
    assert {row["noise_percent"] for row in rows[0]} == {None}
    assert all(row["noise_percent"] >= 0 for row in rows[1])
    compared = plain(run("bench", "compare", str(tmp_path / "4.json"), str(tmp_path / "5.json")))
    assert "faster" not in compared and "slower" not in compared
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=4, block_size=3, dtype="float16")
    case = make_case(spec, "scattered", "h2d", 3, pinned=True, seed=0)
    beside = _row(Axes(load="gemm"), [case], "h2d", "scheduler", Timing(2.0, 2.0, 2.0, 1.0, 1), 1.0, 3.0)
    assert (beside.load, beside.noise_percent, beside.load_slowdown_percent) == ("gemm", None, 3.0)
    case.close()


def test_compare_shows_the_axes_that_differ(files, tmp_path):
    def aligned(data):
        data["rows"] = [dict(data["rows"][0], alignment=alignment) for alignment in (1, 16)]

    path = changed(files, tmp_path, aligned)
    table = plain(run("bench", "compare", path, path))
    assert "┃ align ┃ method ┃" in table and "tokens: 3" in table


def test_compare_refuses_files_without_a_common_row(files, tmp_path):
    def other_model(data):
        for row in data["rows"]:
            row["model"] = "Qwen3-32B"

    result = CliRunner().invoke(app, ["bench", "compare", str(files["json"]), changed(files, tmp_path, other_model)])
    assert result.exit_code == 2
    assert "no measurement in common" in plain(result.output)


def test_a_method_that_moves_wrong_bytes_is_found(monkeypatch):
    from paddle_kv.bench.run import Axes, WrongBytes, sweep

    monkeypatch.setitem(methods.METHODS, "scheduler", lambda case, way, stream: lambda: None)
    axes = Axes(num_layers=1, tokens_per_block=(2,), num_blocks=(3,), backends=("scheduler",), repeats=1, warmups=0)
    with pytest.raises(WrongBytes, match="scheduler"):
        sweep(axes, {}, lambda done, total, what: None)
    result = CliRunner().invoke(app, ["bench", *SMALL, "--backend", "scheduler"])
    assert result.exit_code == 1
    assert "FAIL scheduler moved wrong bytes" in plain(result.output)
    assert isinstance(result.exception, SystemExit)  # no traceback


def test_the_table_says_what_was_measured():
    title = plain(run("bench", *SMALL, "--tp", "2", "--backend", "memcpy_loop")).split("┏")[0]
    assert "model: Llama-3.1-8B tp: 2 op: swap memory: " in title
    assert "blocks: 7" in title and "tokens:" not in title


def test_no_figure_is_cut_off_in_a_narrow_terminal(files, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    monkeypatch.setenv("COLUMNS", "60")
    sweep = ["--alignment=1", "--alignment=16", "--pattern=scattered", "--pattern=contiguous_host"]
    for command in (["bench", *SMALL, *sweep], ["bench", "compare", str(files["json"]), str(files["json"])]):
        output = run(*command)
        assert "vectorized_copy" in output and "…" not in output


def test_doctor_finds_nothing_and_finds_a_broken_method(monkeypatch):
    report = run("doctor")
    assert "FAIL" not in report and "ok   engine auto: " in report
    assert ("ok   engine kernel: " if has_gpu() else "-    engine kernel: not on this machine") in report
    monkeypatch.setitem(methods.METHODS, "scheduler", lambda case, way, stream: lambda: None)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "moved wrong bytes" in result.output


def test_env_is_json():
    facts = json.loads(run("env", "--json"))
    assert {"python", "packages", "build", "gpus"} <= set(facts)


def test_calibrate_needs_a_gpu():
    if has_gpu():
        pytest.skip("there is one")
    result = CliRunner().invoke(app, ["bench", "--calibrate"])
    assert result.exit_code == 2
    assert "--calibrate measures the engines of a GPU" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--layers", "33"], "layers = 33 must be in [1, 32], the layers of Llama-3.1-8B"),
        (["bench", "--repeats", "0"], "--repeats"),
        (["bench", "--warmups", "-1"], "--warmups"),
        (["bench", "--blocks", str(10**9)], "bytes of host memory are needed"),
        (["bench", "--json", "nowhere/at/all.json"], "there is no folder nowhere/at for all.json"),
        (["soak", "--minutes", "-1"], "--minutes"),
        (["soak", "--json", "."], "is a folder; a file is expected"),
        (["bench", "--plot", "rates.txt"], "rates.txt must end in .png"),
        (["replay", "trace.jsonl", "--plot", "pyproject.toml"], "pyproject.toml is no folder, and none can be made"),
        (["bench", "--csv", "same", "--json", "./same"], "same is also --csv"),
        (["replay", "trace.jsonl", "--csv", "nowhere/rows.csv"], "there is no folder nowhere for rows.csv"),
    ],
)
def test_what_cannot_end_well_does_not_begin(arguments, message, monkeypatch):
    def never(*_args, **_options):
        raise AssertionError("it has begun to measure")

    monkeypatch.setattr("paddle_kv.bench.run.make_case", never)
    monkeypatch.setattr("paddle_kv.cli.soak.Soak", never)
    monkeypatch.setattr("paddle_kv.cli.main.read_trace", never)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert message in plain(result.output)


@pytest.mark.parametrize("band", [1, 4, 16])
def test_what_was_moved_in_a_time(band):
    """At a constant rate that is its share, also where the layers of a band arrive together, one behind the other."""
    size, rate, gap_ms = 10.0, 2.0, 0.01
    times, now = [], 100.0
    for _ in range(16 * 8 // band):
        for length in (band * size / rate, *[gap_ms] * (band - 1)):
            times.append((now, now + length))
            now += length
    for begin, end in ((100.0, 100.5), (101.0, 333.0), (140.0, 420.25), (99.0, 100.0), (now, now + 1)):
        expected = rate * max(0.0, end - max(100.0, begin)) if begin < now else 0.0
        assert engines._moved(times, size, begin, end) == pytest.approx(expected, abs=0.02 * (end - begin))


def test_layers_without_a_duration_that_were_moved_in_a_time():
    """The clock is not fine enough for those that arrive together."""
    times = [(0.0, 0.0), (0.0, 2.0), (2.0, 4.0), (4.0, 4.0), (4.0, 8.0), (8.0, 8.0)]
    assert engines._moved(times, 10, 1.0, 5.0) == 10 * (1 / 2 + 2 + 2 * 1 / 4)
    assert engines._moved(times, 10, 2.0, 4.0) == 10 * (1 + 1)
    assert engines._moved(times, 10, 9.0, 10.0) == 0


def test_methods_that_do_not_fit_are_named():
    report = run("bench", "--op", "copy_blocks", *SMALL, "--backend", "scheduler", "--backend", "copy_blocks")
    assert "not for this operation, pattern or machine: scheduler\n" in report


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "paddle_kv", "env", "--json"],
        env={**os.environ, "PADDLE_KV_CHECK": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(done.stdout)
    assert facts["paddle_kv"].startswith(paddle_kv.__version__)
    assert facts["variables"]["PADDLE_KV_CHECK"] == "0"
