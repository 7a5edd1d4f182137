"""Gates where calls come late, fail half way, or meet others: what the graph is told, and what it is not."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paddle_kv import ClosedError, ForkedError, Gates, LayerwiseScheduler, TransferError
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, Rig, assert_same, pool_memory
from tests.schedule.test_gates import READ, WRITTEN, host_block, replay


class Told:
    """Stands in front of gates of the CPU: which calls came, and one that is made to fail."""

    def __init__(self, inner: Any, failing: str = "") -> None:
        self.inner = inner
        self.failing = failing
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            if name == self.failing:
                raise RuntimeError("the driver is out of events")
            return getattr(self.inner, name)(*arguments)

        return call

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


def told_gates(monkeypatch: pytest.MonkeyPatch, scheduler: LayerwiseScheduler, failing: str = "") -> tuple[Gates, Told]:
    create, made = scheduler.backend.create_gates, []

    def creating(*arguments: Any) -> Told:
        made.append(Told(create(*arguments), failing))
        return made[0]

    monkeypatch.setattr(scheduler.backend, "create_gates", creating)
    return scheduler.gates(timeout_s=WAIT_S), made[0]


def passed_by(gates: Gates, layers: range) -> tuple[threading.Thread, list[int], threading.Semaphore]:
    """A thread that goes through the gates of these layers."""
    passed: list[int] = []
    told = threading.Semaphore(0)

    def run() -> None:
        for layer in layers:
            gates.wait(layer)
            passed.append(layer)
            told.release()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, passed, told


def test_gates_of_a_closed_scheduler_are_not_made(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    scheduler.close(WAIT_S)
    monkeypatch.setattr(scheduler.backend, "create_gates", lambda *_: pytest.fail("made"))
    with pytest.raises(ClosedError):
        scheduler.gates(timeout_s=WAIT_S)


def test_gates_that_a_close_overtakes_are_closed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    create, made = scheduler.backend.create_gates, []

    def closing(*arguments: Any) -> Told:
        made.append(Told(create(*arguments)))
        monkeypatch.setattr(scheduler, "check_open", functools.partial(refuse, ClosedError("closed meanwhile")))
        return made[0]

    monkeypatch.setattr(scheduler.backend, "create_gates", closing)
    with pytest.raises(ClosedError, match="closed meanwhile"):
        scheduler.gates(timeout_s=WAIT_S)
    assert made[0].names() == ["close"]
    monkeypatch.undo()
    scheduler.close(WAIT_S)
    assert made[0].names() == ["close"]  # once


def refuse(error: Exception) -> None:
    raise error


def test_marks_that_cannot_be_recorded_fail_the_saves(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates, told = told_gates(monkeypatch, scheduler, failing="record_marks")
        saves = [scheduler.offload([WRITTEN], [host], layerwise=True) for host in (7, 9)]
        with pytest.raises(TransferError, match="the gates of an offload could not be armed: the driver") as caught:
            gates.arm(saves=saves)
        assert caught.value.layer == 0 and isinstance(caught.value.__cause__, Exception)
        assert "out of events" in str(caught.value.__cause__)
        assert ("pass_marks", 1) in told.calls
        for save in saves:
            with pytest.raises(TransferError, match="could not be armed"):
                save.wait(WAIT_S)
        told.failing = ""
        save = scheduler.offload([WRITTEN], [8], layerwise=True)
        gates.arm(saves=[save])
        replay(rig, gates, value=3)
        save.wait(WAIT_S)
        rig.expect_offload([WRITTEN], [8])
    rig.check()


def test_the_stream_that_a_graph_is_captured_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates, told = told_gates(monkeypatch, scheduler)
        monkeypatch.setattr(scheduler, "default_stream", "its own")
        last = rig.spec.num_layers - 1
        for given, meant in ((None, "its own"), (0, 0), ("another", "another")):
            told.calls.clear()
            gates.wait(1, stream=given)
            gates.mark(2, stream=given)
            gates.mark_and_wait(3, stream=given)
            gates.mark_and_wait(last, stream=given)
            assert told.calls == [
                ("wait", 1, meant),
                ("mark", 2, meant),
                ("mark_and_wait", 3, meant),
                ("mark", last, meant),
            ]


def test_loads_that_are_there_need_no_turn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates, told = told_gates(monkeypatch, scheduler)
        load = scheduler.onload([5], [READ])
        load.wait(WAIT_S)
        gates.arm(loads=[load])
        assert told.calls == []
        assert_same(replay(rig, gates), host_block(rig, 5))


def test_a_load_that_was_over_before_another_one_came(
    rig: Rig, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events are destroyed by then: no stream may be told to wait for them."""
    copies.hold("onload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates, told = told_gates(monkeypatch, scheduler)
        save = scheduler.offload([4], [10], layerwise=True)
        late, early = scheduler.onload([10], [READ]), scheduler.onload([5], [1])
        gates.arm(loads=[late, early])
        events_of_early = set(early._movement.events)
        copies.go_on()
        early.wait(WAIT_S)
        told.calls.clear()
        for layer in range(rig.spec.num_layers):
            save.mark_layer_written(layer)
        thread, passed, _ = passed_by(gates, range(rig.spec.num_layers))
        thread.join(WAIT_S / 2)
        assert passed == list(range(rig.spec.num_layers))
        late.wait(WAIT_S)
        waits = [event for name, *rest in told.calls if name == "let_through" for of in rest[2] for event in of]
        assert waits and not events_of_early & set(waits)


def test_layers_between_those_that_a_load_brings(rig: Rig) -> None:
    """Gate 2 has nothing to wait for, but what is known of it is not what is known of gate 1."""
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=WAIT_S)
        save = scheduler.offload([4], [10], layerwise=True)
        load = scheduler.onload([10], [READ], layers=[1, 3])
        gates.arm(loads=[load])
        thread, passed, told = passed_by(gates, range(rig.spec.num_layers))
        assert told.acquire(timeout=WAIT_S)
        assert not told.acquire(timeout=SHORT_S) and passed == [0]
        for layer in range(rig.spec.num_layers):
            save.mark_layer_written(layer)
        thread.join(WAIT_S / 2)
        assert passed == list(range(rig.spec.num_layers))
        load.wait(WAIT_S)


@pytest.mark.parametrize("marked", [2, 4])
def test_a_save_that_is_marked_in_part_fails_and_moves_nothing_more(rig: Rig, marked: int) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=SHORT_S)
        save = scheduler.offload([WRITTEN], [7], layerwise=True)
        gates.arm(saves=[save])
        for layer in range(marked):
            gates.mark(layer)
        with pytest.raises(TransferError, match="no graph marked its layers"):
            save.wait(WAIT_S)
    for name, array in pool_memory(rig.pool).items():
        # what was not marked was dropped, not let go
        np.testing.assert_array_equal(array[marked:, 7], rig.host[name][marked:, 7])


def deadlines(monkeypatch: pytest.MonkeyPatch, gates: Gates) -> list[Callable[[], object]]:
    """What happens when the time of the saves is over: called by the test, in place of a clock."""
    found: list[Callable[[], object]] = []
    monkeypatch.setattr(gates._alarms, "add", lambda at_s, function: found.append(function))
    return found


def test_a_save_that_is_copied_slowly_is_not_late(rig: Rig, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    copies.hold("offload", rig.spec.num_layers - 1)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=WAIT_S)
        late = deadlines(monkeypatch, gates)
        save = scheduler.offload([WRITTEN], [7], layerwise=True)
        gates.arm(saves=[save])
        replay(rig, gates, value=8)
        assert copies.arrived.acquire(timeout=WAIT_S)
        late[0]()
        copies.go_on()
        save.wait(WAIT_S)
        rig.expect_offload([WRITTEN], [7])
        late[0]()  # nor is one that is over
    rig.check()


def test_a_device_that_does_not_answer_at_the_deadline(
    rig: Rig, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits on a device that is lost; who looks at the save finds out what became of it."""
    copies.hold("offload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=WAIT_S)
        late = deadlines(monkeypatch, gates)
        save = scheduler.offload([WRITTEN], [7], layerwise=True)
        gates.arm(saves=[save])
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.backend, "is_complete", lambda event: refuse(RuntimeError("the device is lost")))
            late[0]()
        replay(rig, gates, value=8)
        copies.go_on()
        save.wait(WAIT_S)
        rig.expect_offload([WRITTEN], [7])
    rig.check()


def test_a_deadline_is_of_the_saves_of_its_replay(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=WAIT_S)
        late = deadlines(monkeypatch, gates)
        first = scheduler.offload([WRITTEN], [7], layerwise=True)
        gates.arm(saves=[first])
        second = scheduler.offload([2], [8], layerwise=True)
        gates.arm(saves=[second])
        late[0]()
        with pytest.raises(TransferError, match="no graph marked"):
            first.wait(WAIT_S)
        replay(rig, gates, value=8)
        second.wait(WAIT_S)
        rig.expect_offload([2], [8])
    assert_same({name: array[:, 8] for name, array in pool_memory(rig.pool).items()}, host_block(rig, 8))


def test_closing_lets_go_of_the_saves_of_several_replays(rig: Rig) -> None:
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    gates = scheduler.gates(timeout_s=1000.0)
    for host in (7, 8, 9):
        gates.arm(saves=[scheduler.offload([WRITTEN], [host], layerwise=True)])
    started = time.monotonic()
    scheduler.close(WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2
    rig.check()


def test_what_a_gate_that_gives_up_says(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=SHORT_S)
        save = scheduler.offload([4], [10], layerwise=True)
        load = scheduler.onload([10], [READ])
        gates.arm(loads=[load])
        gates.wait(2)
        for layer in range(rig.spec.num_layers):
            save.mark_layer_written(layer)
        with pytest.raises(TransferError, match="the gate of layer 2 in a graph") as caught:
            load.wait(WAIT_S)
        assert caught.value.layer == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_gates_in_a_forked_child(rig: Rig, copies: Copies) -> None:
    copies.hold("onload", 0)
    reading, writing = os.pipe()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=WAIT_S)
        load, save = scheduler.onload([5], [READ]), scheduler.offload([WRITTEN], [7], layerwise=True)
        gates.arm(loads=[load], saves=[save])
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # a child that hangs tells nothing
            copies.go_on()
            for call in (lambda: gates.wait(0), lambda: gates.mark(0), lambda: gates.mark_and_wait(0), gates.arm):
                with pytest.raises(ForkedError):
                    call()
            scheduler.close(WAIT_S)
            with LayerwiseScheduler(rig.cache, rig.pool) as own:
                own_gates = own.gates(timeout_s=WAIT_S)
                again = own.onload([6], [READ])
                own_gates.arm(loads=[again])
                own_gates.wait(rig.spec.num_layers - 1)
                again.wait(WAIT_S)
            os.write(writing, f"{load.state.value} {save.state.value}".encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as told:
            found = told.read()
        os.waitpid(child, 0)
        copies.go_on()
        assert_same(replay(rig, gates, value=4), host_block(rig, 5))
        load.wait(WAIT_S)
        save.wait(WAIT_S)
        rig.expect_onload([5], [READ])
        rig.expect_offload([WRITTEN], [7])
    assert found == "failed failed"
    rig.check()
