"""An exception of a signal handler behind each hand-over of the main thread: nothing is lost, everything still ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.schedule import transfer as transfer_module
from paddle_kv.tracking.keeper import keeper
from tests.schedule.rig import WAIT_S, Rig

pytestmark = pytest.mark.usefixtures("small_heap")


class Interrupted(BaseException):
    pass


class InterruptingHost:
    """The keeper; the call with this number, counted from 1, raises when it was handed over and done."""

    def __init__(self, number: int) -> None:
        self.left = number

    def call(self, function: Callable[[], Any]) -> Any:
        result = keeper.call(function)
        if threading.current_thread() is threading.main_thread():
            self.left -= 1
            if self.left == 0:
                raise Interrupted
        return result

    def soon(self, function: Callable[[], object]) -> None:
        self.call(function)

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


def test_an_exception_behind_each_hand_over():
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
            assert not closing.is_alive(), f"close does not end behind an exception at hand-over {number}"
        rig.pool.free(owned)
        assert rig.pool.num_free_blocks == 17, f"hand-over {number}"
    assert number > 15


def test_a_mark_whose_caller_was_interrupted_counts_once(rig, monkeypatch):
    """The caller does not know; that he marks again must not submit the layer twice, in place of another one."""
    hand_over = transfer_module.change_soon

    def interrupted(*arguments: Any) -> None:
        hand_over(*arguments)
        rig.pool.num_free_blocks  # noqa: B018  the keeper has done it
        raise Interrupted

    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        monkeypatch.setattr(transfer_module, "change_soon", interrupted)
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
