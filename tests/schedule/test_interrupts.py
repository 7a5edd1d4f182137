"""An exception of a signal handler behind each change by the main thread: nothing is lost, everything still ends."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.schedule import marking
from paddle_kv.tracking.group import change
from paddle_kv.tracking.keeper import keeper
from tests.schedule.rig import WAIT_S, Rig


class Interrupted(BaseException):
    pass


class InterruptingHost:
    """The keeper; the call with this number, counted from 1, raises when it was done."""

    defers = False

    def __init__(self, number: int) -> None:
        self.left = number

    def call(self, function: Callable[[], Any]) -> Any:
        return self._behind(keeper.call(function))

    def call_here(self, function: Callable[[], Any]) -> Any:
        return self._behind(keeper.call_here(function))

    def _behind(self, result: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            self.left -= 1
            if self.left == 0:
                raise Interrupted
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(keeper, name)


def program(rig: Rig, made: list[LayerwiseScheduler], owned: list[int]) -> None:
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    made.append(scheduler)
    owned += rig.pool.allocate(3)
    save = scheduler.offload([1, 2], owned[:2], layerwise=True)
    for layer in range(5):
        save.mark_layer_written(layer)
    load = scheduler.onload(owned[:1], [3])
    load.wait_layer(4, timeout_s=WAIT_S)
    load.wait(WAIT_S)
    with rig.pool.lease(owned[:1], write=True, timeout_s=WAIT_S):
        pass
    scheduler.offload([4], owned[2:], layerwise=True)
    scheduler.offload([5], owned[:1]).cancel()
    scheduler.record_event("onload").wait(WAIT_S)
    scheduler.drain(WAIT_S)
    scheduler.stats()
    scheduler.close(WAIT_S)


def test_an_exception_behind_each_change():
    number, fired = 0, True
    while fired:
        number += 1
        rig = Rig()
        host = rig.pool.domain.group.host = InterruptingHost(number)
        made: list[LayerwiseScheduler] = []
        owned: list[int] = []
        try:
            program(rig, made, owned)
            fired = False
        except Interrupted:
            pass
        host.left = -1
        gc.collect()
        for scheduler in made:
            closing = threading.Thread(target=scheduler.close, args=(WAIT_S,), daemon=True)
            closing.start()
            closing.join(WAIT_S)
            assert not closing.is_alive(), f"close does not end behind an exception at change {number}"
        rig.pool.free(owned)
        assert rig.pool.num_free_blocks == 17, f"change {number}"
    assert number > 15


def test_a_mark_whose_caller_was_interrupted_counts_once(rig, monkeypatch):
    """The caller does not know; that he marks again must not submit the layer twice, in place of another one."""
    change_soon = marking.change_soon

    def interrupted(*arguments: Any) -> None:
        change_soon(*arguments)
        rig.pool.num_free_blocks  # noqa: B018  a section behind it
        raise Interrupted

    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        monkeypatch.setattr(marking, "change_soon", interrupted)
        with pytest.raises(Interrupted):
            save.mark_layer_written(2)
        monkeypatch.undo()
        assert save.unmarked_layers == [0, 1, 3, 4]
        with pytest.raises(ValueError, match="layer = 2 is marked as written already"):
            save.mark_layer_written(2)
        for layer in (0, 1, 4):
            save.mark_layer_written(layer)
        assert not save.done()
        save.mark_layer_written(3)
        save.wait(WAIT_S)
        rig.expect_offload([1], [4])
        rig.check()


class _Meanwhile(list):
    """Marks of which the hand-over is done right behind the first look at them."""

    def __init__(self, marks: list[Any], hand_overs: list[Callable[[], object]]) -> None:
        super().__init__(marks)
        self._hand_overs = hand_overs

    def __getitem__(self, layer: Any) -> Any:
        found = super().__getitem__(layer)
        while self._hand_overs:
            self._hand_overs.pop()()
        return found


def test_a_mark_that_is_handed_over_while_its_caller_is_interrupted_counts(rig, monkeypatch):
    """It would stay among those that are not marked, and the save would be cancelled with its last handle."""
    hand_overs: list[Callable[[], object]] = []

    def interrupted(*arguments: Any) -> None:
        hand_overs.append(functools.partial(change, *arguments))
        raise Interrupted

    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        save._movement.marks = _Meanwhile(save._movement.marks, hand_overs)
        monkeypatch.setattr(marking, "change_soon", interrupted)
        with pytest.raises(Interrupted):
            save.mark_layer_written(2)
        monkeypatch.undo()
        assert save.unmarked_layers == [0, 1, 3, 4]
        for layer in (0, 1, 3, 4):
            save.mark_layer_written(layer)
        save.wait(WAIT_S)
        rig.expect_offload([1], [4])
        rig.check()


def test_a_mark_that_is_handed_over_twice_counts_once(rig, monkeypatch):
    """Its caller was interrupted before the keeper came to it, and has marked again."""
    hand_overs: list[Callable[[], object]] = []

    def interrupted(*arguments: Any) -> None:
        hand_overs.append(functools.partial(change, *arguments))
        raise Interrupted

    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        monkeypatch.setattr(marking, "change_soon", interrupted)
        with pytest.raises(Interrupted):
            save.mark_layer_written(2)
        monkeypatch.undo()
        assert save.unmarked_layers == [0, 1, 2, 3, 4]
        save.mark_layer_written(2)
        hand_overs.pop()()
        assert save._movement.num_unsubmitted == 4
        for layer in (0, 1, 3):
            save.mark_layer_written(layer)
        assert not save.done()
        save.mark_layer_written(4)
        save.wait(WAIT_S)
        rig.expect_offload([1], [4])
        rig.check()
