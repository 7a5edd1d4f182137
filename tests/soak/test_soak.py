"""A run over sound code finds nothing; whatever is broken behind its back, it tells."""

from __future__ import annotations

import dataclasses
import gc
import json
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.cli.main import app
from paddle_kv.schedule.movement import Movement
from paddle_kv.schedule.resources import release_abandoned
from paddle_kv.testing.soak import meters
from paddle_kv.testing.soak.mismatch import SoakFailure
from paddle_kv.testing.soak.run import Setup, Soak, run
from paddle_kv.testing.soak.traffic import Server, Traffic

LONGEST_MINUTES = 30  # the moves end a run; a loaded machine may take its time
SMALL = Setup(
    layers=3, block_bytes=37, device_blocks=48, host_blocks=128, checkpoint_steps=200, traffic=Traffic(max_blocks=7)
)


def with_seed(seed: int, **changes) -> Setup:
    return dataclasses.replace(SMALL, traffic=dataclasses.replace(SMALL.traffic, seed=seed), **changes)


@pytest.mark.parametrize(
    "changes", [{}, {"pool_layout": "block_first", "layers_per_event": 2}], ids=["layer_first", "block_first"]
)
def test_a_sound_run(changes):
    gc.collect()
    release_abandoned()  # threads of schedulers that other tests have dropped would end meanwhile
    report = run(with_seed(1, **changes), minutes=LONGEST_MINUTES, max_moves=40_000)
    assert report.failure == ""
    counts = report.counts
    assert counts["moves"] >= 40_000
    for what in ("transfers", "cancelled", "refused", "restarts", "device_checks", "host_checks"):
        assert counts[what] > 0, what
    first, last = report.samples[0], report.samples[-1]
    assert [last[name] for name in ("events", "streams", "threads", "pinned_bytes")] == [
        first[name] for name in ("events", "streams", "threads", "pinned_bytes")
    ]


def test_the_same_seed_makes_the_same_calls(monkeypatch):
    """Where nothing is cancelled that the device may have begun."""
    cancel = Server._cancel

    def cancel_what_is_open(server):
        flights = server.flights
        server.flights = [flight for flight in flights if flight.open]
        try:
            cancel(server)
        finally:
            server.flights = flights

    monkeypatch.setattr(Server, "_cancel", cancel_what_is_open)
    ends = []
    for seed in (5, 5, 6):
        with Soak(with_seed(seed)) as soak:
            for _ in range(400):
                soak.server.step()
            server = soak.server
            ends.append((dict(server.counts), server.device.used.copy(), server.device.contents.copy()))
            server.finish()
    for one, other in zip(ends[0], ends[1], strict=True):
        np.testing.assert_equal(one, other)
    assert ends[0][0] != ends[2][0]
    assert ends[0][0]["cancelled"] > 0


# ---- what is broken is told ----
FORGOTTEN = 13  # of the transfers of a run, from 0: its target is compared before anything else writes it


def step_until_failure(soak: Soak, steps: int) -> SoakFailure:
    with pytest.raises(SoakFailure) as caught:
        for _ in range(steps):
            soak.server.step()
        soak.server.finish()
    return caught.value


@pytest.mark.parametrize("side", ["device", "host"])
def test_one_byte_changed_behind_its_back(side):
    with Soak(with_seed(2)) as soak:
        for _ in range(100):
            soak.server.step()
        soak.server.finish()
        server = soak.server
        blocks, memory = (server.device, server.compute) if side == "device" else (server.host, server.host_memory)
        block = int(np.flatnonzero(blocks.whole)[-1])
        block = block if side == "device" else int(server.host_ids[block])
        memory.rows[2][1][block, 20] ^= 0x40
        failure = step_until_failure(soak, 0)
    mismatch = failure.mismatch
    assert (mismatch.side, mismatch.block, mismatch.layer, mismatch.tensor) == (side, block, 2, "value")
    assert mismatch.offset_bytes == 20
    assert int(mismatch.found[:2], 16) == int(mismatch.expected[:2], 16) ^ 0x40
    assert f"{side} block {block}, layer 2, value: at byte 20 {mismatch.expected} is expected" in str(failure)


class Late(CpuBackend):
    """Copies come late, so that nothing is right by luck."""

    def copy_layers(self, binding, work, stream):
        stream.submit(lambda: time.sleep(0.002))
        super().copy_layers(binding, work, stream)


class WithoutLayerWait(Late):
    def wait_on_stream(self, stream, event, timeout_s):
        pass


class WithoutDependency(Late):
    def copy_layers(self, binding, work, stream):
        super().copy_layers(binding, dataclasses.replace(work, waits=[[] for _ in work.waits]), stream)


class WithoutLook(Late):
    """Every transfer counts as over at once."""

    def is_complete(self, *events):
        return True

    def wait(self, event, timeout_s):
        return True


def test_late_copies_are_no_failure():
    assert run_with(Late) == ""


@pytest.mark.parametrize("backend_type", [WithoutLayerWait, WithoutDependency, WithoutLook])
def test_a_wait_that_is_left_out(backend_type):
    assert "is expected" in run_with(backend_type)


def run_with(backend_type) -> str:
    with Soak(with_seed(3), backend_type) as soak:
        return soak.run(minutes=LONGEST_MINUTES, max_moves=30_000).failure


def test_a_transfer_that_is_not_copied(monkeypatch):
    """The mismatch names the transfer that should have written the block. Which one is left out is counted in calls of
    the server: those are the same in each run, the order of the copies is not."""
    from paddle_kv.backend import binding

    copy, init, plans = binding.copy, Movement.__init__, []

    def counted(movement, scheduler, plan, *arguments, **named):
        plans.append(plan)
        init(movement, scheduler, plan, *arguments, **named)

    def forgetful(number, plan, layers):
        if plans[FORGOTTEN : FORGOTTEN + 1] != [plan] or layers.start != 1:
            copy(number, plan, layers)

    monkeypatch.setattr(Movement, "__init__", counted)
    monkeypatch.setattr(binding, "copy", forgetful)
    with Soak(with_seed(4)) as soak:
        report = soak.run(minutes=LONGEST_MINUTES, max_moves=30_000)
    assert report.mismatches == 1
    assert report.mismatch["layer"] == 1
    assert report.mismatch["last_written_by"].startswith(f"t{FORGOTTEN + 1},")


def test_what_grows_is_told(monkeypatch):
    sizes = iter(range(1000, 2000))
    monkeypatch.setattr(meters, "process", lambda: {"open_files": next(sizes)})
    assert "open_files grew from" in run(with_seed(1), minutes=LONGEST_MINUTES, max_moves=30_000).failure


def test_what_grows():
    flat = [{"rss_bytes": 1 << 30, "threads": 5}] * 9
    assert meters.growth(flat) == []
    grown = [*flat[:6], *[{"rss_bytes": 1 << 30, "threads": 6}] * 3]
    assert meters.growth(grown) == ["threads grew from 5 to 6"]
    grown = [*flat[:6], *[{"rss_bytes": (1 << 30) + (64 << 20), "threads": 5}] * 3]
    assert meters.growth(grown) == [f"rss_bytes grew from {1 << 30} to {(1 << 30) + (64 << 20)}"]


# ---- the command ----
OPTIONS = ["soak", "--device", "cpu", "--moves", "5000", "--layers", "2", "--blocks", "5", "--seed", "7"]
OPTIONS += ["--minutes", str(LONGEST_MINUTES)]


def test_the_command(tmp_path):
    result = CliRunner().invoke(app, [*OPTIONS, "--json", str(tmp_path / "report.json")])
    assert result.exit_code == 0, result.output
    assert "mismatches" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["counts"]["moves"] >= 5000
    assert (report["mismatches"], report["failure"], report["mismatch"]) == (0, "", None)
    assert report["setup"]["traffic"]["seed"] == 7


def test_the_command_fails_with_the_first_mismatch(tmp_path, monkeypatch):
    step = Server.step

    def corrupt(server: Server) -> None:
        step(server)
        if server.counts["steps"] == 40:
            for layer in server.compute.rows:
                for memory in layer:
                    memory[:] = 0

    monkeypatch.setattr(Server, "step", corrupt)
    result = CliRunner().invoke(app, [*OPTIONS, "--json", str(tmp_path / "report.json")])
    assert result.exit_code == 1
    assert "FAIL device block" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["mismatches"] == 1
    assert report["mismatch"]["found"] == "0" * 16
    assert report["failure"].startswith(f"device block {report['mismatch']['block']}, layer")


def test_an_interrupted_run_has_a_report(tmp_path, monkeypatch):
    real = Server.step

    def interrupted(self):
        if self.counts["steps"] == 1234:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(Server, "step", interrupted)
    path = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["soak", "--device", "cpu", "--json", str(path)])
    assert result.exit_code == 1
    message = "interrupted at step 1234; up to step 1000 all was compared"
    assert f"FAIL {message}" in " ".join(result.output.split())
    report = json.loads(path.read_text())
    assert (report["failure"], report["mismatches"]) == (message, 0)
    assert report["counts"]["steps"] == 1234 and report["counts"]["moves"] > 0


def test_too_few_host_blocks():
    result = CliRunner().invoke(app, ["soak", "--device", "cpu", "--host-blocks", "100"])
    assert result.exit_code == 2
    assert "too few" in result.output
