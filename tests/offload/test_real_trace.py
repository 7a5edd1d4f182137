"""The program that serves a trace with real bytes does what it says; its figures are of a machine that has time."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from paddle_kv.testing.prefixes.conversations import conversations
from paddle_kv.testing.prefixes.trace import Request
from tests.offload.real_trace import FAULTS, LEARNT, WAYS, Server, Setup, is_hopeless, main, measure

SETUP = Setup(block_s=1e-3, host_blocks=24, tier_blocks=400, chunk_blocks=4, layers=2, head_dim=512, queue=2)
WARM_UP = 20
QUICK = 50.0, 5.0


def requests_of(count: int) -> list[Request]:
    return conversations(WARM_UP + count, 4.0, most_first_blocks=6, mean_pause_s=2.0)


@pytest.mark.parametrize("way", WAYS)
def test_each_request_has_a_time(way: str) -> None:
    taken_s = measure(requests_of(12), WARM_UP, SETUP, QUICK, way)
    assert len(taken_s) == 12 and np.all(taken_s > 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_of_the_reads_behind_what_is_learnt(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.offload.real_trace.STALLED_S", 0.05)
    assert len(measure(requests_of(LEARNT + 8), WARM_UP, SETUP, QUICK, "sooner", fault)) == 6


def test_a_wrong_byte_is_found(tmp_path: Path) -> None:
    prompt = Request(0.0, 5 * 512, [3, 4, 5, 6, 7])
    server = Server(tmp_path, SETUP, 32)
    expected = server.contents(prompt)
    assert len(np.unique(expected.reshape(6, -1), axis=0)) == 6
    server.run([prompt], "sooner")
    server.rig.check_books()  # all is saved
    server.contents = lambda prompt: expected[::-1]  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        server.run([prompt], "load")
    server.close()


def test_who_is_not_waited_for() -> None:
    requests = requests_of(12)
    assert not is_hopeless(requests, WARM_UP, SETUP, QUICK)
    assert is_hopeless(requests, WARM_UP, SETUP, (1.2, 5.0)) and is_hopeless(requests, WARM_UP, SETUP, (50.0, 0.05))


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"timestamp": 100 * number, "input_length": 512 * 4, "output_length": 1, "hash_ids": [0, 1, number % 3 + 2, 5]}
        for number in range(10)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sizes = ["--requests", "4", "--warm-up", "6", "--block-ms", "0.5", "--host-blocks", "3"]
    rates = ["--link-gbps", "50", "--tier-gbps", "0.05", "5"]
    main([str(tmp_path / "trace.jsonl"), *sizes, *rates, "--csv", str(tmp_path / "rows.csv")])
    assert len(capsys.readouterr().out.splitlines()) == 3
    with (tmp_path / "rows.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert [row["tier_gbps"] for row in rows] == [0.05, 5.0]
    for row in rows:
        best = np.nanmin([row["compute_mean_s"], row["load_mean_s"]])
        assert row["without_mean_s"] > 0 and np.isnan(row["load_mean_s"]) == (row["tier_gbps"] == 0.05)
        assert row["mean_ratio"] == pytest.approx(row["sooner_mean_s"] / best)
