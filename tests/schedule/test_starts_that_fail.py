"""An error at each line of a start, as for want of memory: afterwards nothing is held, and the order is kept."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from paddle_kv import CancelledError, LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule.movement import movements
from paddle_kv.schedule.transfer import Transfer
from paddle_kv.testing.simulator import Log, RecordingBackend
from tests.schedule.rig import WAIT_S, Rig, collect, settles

FILES = ("schedule/starting.py", "schedule/by_marks.py", "schedule/movement.py", "tracking/domain.py")


class Broken(BaseException):
    """Of a line: no exception that anybody expects."""


class AtLine:
    """Raises in the thread that it traces before the line of this number, counted over all of these files."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, given: object) -> Any:
        collecting = frame.f_code.co_name == "collect_events"  # gives back what others have left
        return None if collecting or not frame.f_code.co_filename.endswith(FILES) else self._line

    def _line(self, frame: FrameType, event: str, given: object) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise Broken
        return self._line


def start(scheduler: LayerwiseScheduler, kind: str) -> Transfer:
    if kind == "load":
        return scheduler.onload([1, 2], [1, 2])
    if kind == "behind":  # a save of one block, and over what is saved of another one
        return scheduler.onload([5, 2], [1, 2])
    return scheduler.offload([1, 2], [1, 2], layerwise=kind in ("layerwise", "by marks"))


def started_with_an_error(scheduler: LayerwiseScheduler, kind: str, number: int) -> bool:
    """Whether there was such a line. In a thread of its own: the main one would leave the start to another."""
    at_line = AtLine(number)

    def run() -> None:
        sys.settrace(at_line)
        try:
            with contextlib.suppress(Broken, TransferError):
                start(scheduler, kind)
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    return at_line.left <= 0


def has_given_back_its_events(scheduler: LayerwiseScheduler) -> bool:
    """All but the one that layer times are counted from."""

    def look() -> bool:
        gc.collect()
        return scheduler.stats()["events"] <= 1

    return settles(look)


@pytest.mark.parametrize("kind", ["save", "layerwise", "by marks", "load", "behind"])
def test_an_error_at_each_line_of_a_start_leaves_nothing_held(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    backend = RecordingBackend(CpuBackend(), Log()) if kind == "by marks" else CpuBackend()
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    number, was_there = 0, True
    while was_there:
        number += 1
        save = scheduler.offload([5], [5], layerwise=True) if kind == "behind" else None
        was_there = started_with_an_error(scheduler, kind, number)
        if save is not None:
            assert save.state.value == "pending"
            after = scheduler.onload([5], [3])  # behind the save still, whatever became of the start
            for layer in range(save.num_layers):
                assert after.state.value != "done"
                save.mark_layer_written(layer)
            save.wait(WAIT_S)
            after.wait(WAIT_S)
            save = after = None
        collect()
        scheduler.drain(WAIT_S)
        for domain in (rig.cache.domain, rig.pool.domain):
            assert domain.busy(range(6)) == [] and not domain._transfers, number
        assert not movements and not scheduler.group.transfers, number
        assert has_given_back_its_events(scheduler), number
        assert not getattr(backend, "_saves", {}), number
        for pool in (rig.cache, rig.pool):
            pool.mark_rewritten(range(6))
        scheduler._statistics.queued_bytes = 0
    assert number > 50
    scheduler.close(WAIT_S)
    assert not caplog.records  # the caller has heard of each


def test_what_is_moved_behind_a_start_that_failed_keeps_the_order(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start has taken the place of a save as the last one that uses the block."""
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    save = scheduler.offload([1], [1], layerwise=True)
    with monkeypatch.context() as patch:
        patch.setattr("paddle_kv.schedule.submission.inherit", lambda movement: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            scheduler.onload([1], [1])
    load = scheduler.onload([2], [1])
    assert load.state.value == "pending" and load.stands_behind(save)
    for layer in range(save.num_layers):
        save.mark_layer_written(layer)
    save.wait(WAIT_S)
    load.wait(WAIT_S)
    scheduler.onload([1], [2]).wait(WAIT_S)
    with pytest.raises((TransferError, CancelledError)):
        aborted = scheduler.offload([3], [3], layerwise=True)
        aborted.cancel()
        aborted.wait(WAIT_S)
    scheduler.close(WAIT_S)
