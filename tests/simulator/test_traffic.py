"""Random servers: the scheduler holds, what is left out is found, and a run repeats."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paddle_kv.testing.simulator import OrderingError
from paddle_kv.testing.simulator.__main__ import main
from paddle_kv.testing.simulator.replay import play

SEEDS_A_TEST = 12
TRIES = 40  # seeds until what was left out must have shown

FOUND_BY_TRAFFIC = [
    "wait-compute-before-offload",
    "wait-compute-before-onload",
    "wait-offload-before-onload",
    "wait-onload-before-offload",
    "wait-offload-before-offload",
    "wait-onload-before-onload",
    "wait-layer",
    "record-compute",
    "record-layer",
    "record-before-copy",
    "record-fence",
    "completion",
    "copy-error",
    "submission-error",
    "give-back-events",
]


@pytest.mark.parametrize("first", range(0, 60, SEEDS_A_TEST))
def test_random_server(first: int) -> None:
    moves = sum(play(seed).moves for seed in range(first, first + SEEDS_A_TEST))
    assert moves > 10 * SEEDS_A_TEST


@pytest.mark.parametrize("removal", FOUND_BY_TRAFFIC)
def test_random_server_finds_what_is_left_out(removal: str) -> None:
    for seed in range(TRIES):
        try:
            play(seed, drop=[removal])
        except OrderingError as error:
            assert f"--seed {seed} --steps 60 --drop {removal}" in str(error)
            return
    raise AssertionError(f"{TRIES} runs without {removal} went well")


def test_a_run_repeats() -> None:
    one, two, other = (play(seed) for seed in (5, 5, 6))
    assert one.trace == two.trace and one.simulation.device.history == two.simulation.device.history
    assert one.trace != other.trace


def test_failure_repeats_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OrderingError) as caught:
        for seed in range(TRIES):
            play(seed, drop=["wait-layer"])
    command = str(caught.value).splitlines()[-1]
    assert command.startswith("repeat: python -m paddle_kv.testing.simulator --seed")
    assert main(command.split()[4:]) == 1
    repeated = capsys.readouterr().out
    assert "without an edge between them" in repeated
    assert [line for line in repeated.splitlines() if " at " not in line] == [
        line for line in str(caught.value).splitlines() if " at " not in line
    ]


@pytest.mark.parametrize("faults", [True, False])
def test_the_command_repeats_a_run_with_all_its_options(faults: bool, capsys: pytest.CaptureFixture[str]) -> None:
    repeated = 0
    for seed in range(8):
        try:
            play(seed, num_steps=80, drop=["wait-layer"], faults=faults)
        except OrderingError as error:
            without_sites = [line for line in str(error).splitlines() if " at " not in line]
            assert main(without_sites[-1].split()[4:]) == 1
            assert [line for line in capsys.readouterr().out.splitlines() if " at " not in line] == without_sites
            repeated += 1
    assert repeated >= 3


def test_the_whole_trace_of_a_run_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seed", "2", "--drop", "wait-layer"]
    assert main(options) == 1
    short = capsys.readouterr().out.splitlines()
    assert main([*options, "--trace"]) == 1
    whole = capsys.readouterr().out.splitlines()
    assert whole[0] == "  compute writes device 0"  # how each run begins
    assert any("compute: compute, reads device-0[" in line for line in whole)
    assert any(", writes host-0[" in line or ", writes device-0[" in line for line in whole)
    assert whole[-1] == short[-1] and set(short) <= set(whole) and len(whole) > 100 > len(short)


@pytest.mark.parametrize("options", [["--runs", "0"], ["--steps", "-3"], ["--runs", "many"]])
def test_a_search_for_nothing_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert f"argument {options[0]}: " in capsys.readouterr().err


def test_command_in_another_process_says_the_same() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "paddle_kv.testing.simulator", "--seed", "7", "--trace"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    here = play(7)
    lines = result.stdout.splitlines()
    assert lines[:-1] == [*here.trace, *here.simulation.device.history]
    assert "no problem found" in lines[-1]
