"""What a scheduler takes of its backend, and how it is given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule.uses import Use
from tests.schedule.rig import WAIT_S, Rig, settles


class InBatches(CpuBackend):
    """Makes and destroys events many at a time, as a backend may."""

    def __init__(self) -> None:
        self.alive: list[Any] = []
        self.batches: list[int] = []
        self.num_closed = 0

    def create_event(self) -> Any:
        raise AssertionError("one by one")

    def create_events(self, count: int) -> list[Any]:
        self.batches.append(count)
        made = [CpuBackend.create_event(self) for _ in range(count)]
        self.alive += made
        return made

    def destroy_event(self, event: Any) -> None:
        raise AssertionError("one by one")

    def destroy_events(self, events: Any) -> None:
        for event in events:
            self.alive.remove(event)

    def close(self) -> None:
        self.num_closed += 1


def test_a_backend_that_makes_events_in_batches(rig: Rig) -> None:
    backend = InBatches()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        assert backend.batches == [1]
        scheduler.onload([4, 2], [1, 3]).wait(WAIT_S)
        rig.expect_onload([4, 2], [1, 3])
        save = scheduler.offload([1, 0], [9, 5], layerwise=True)
        assert settles(lambda: scheduler.stats()["events"] == len(backend.alive) == 1 + backend.batches[-1])
        for layer in range(rig.spec.num_layers):
            save.mark_layer_written(layer)
        save.wait(WAIT_S)
        rig.expect_offload([1, 0], [9, 5])
        assert backend.num_closed == 0
    rig.check()
    assert (backend.alive, backend.num_closed) == ([], 1)


def test_batches_that_the_device_does_not_give(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = InBatches()

    def refuse(count: int) -> list[Any]:
        raise RuntimeError("no more events")

    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        monkeypatch.setattr(scheduler.resources, "_create_events", refuse)
        with pytest.raises(RuntimeError, match="no more events"):
            scheduler.onload([4], [1])
        assert scheduler.stats()["events"] == 1
    assert backend.alive == []


def test_a_use_that_nobody_ended_tells_those_who_wait_for_it() -> None:
    """An exception of a signal handler has ended the call before it came to that."""
    told: list[bool] = []
    group: Any = SimpleNamespace(notify=lambda: told.append(True))
    use = Use(group)
    assert told == []
    del use
    assert told == [True]


def test_events_go_back_with_the_end_of_their_transfer(rig: Rig) -> None:
    """Also while somebody keeps the handle: the next start finds them there."""
    backend = InBatches()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        loads = []
        for _ in range(100):  # whoever reports an end may still hold its events when that is noted
            loads.append(scheduler.onload([4, 2], [1, 3]))
            loads[-1].wait(WAIT_S)
            if len(backend.alive) == 1:
                break
        assert len(backend.alive) == 1
        assert all(load.done() for load in loads)


def test_a_transfer_ends_although_its_events_cannot_be_given_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is lost."""
    backend = InBatches()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:

        def lost(events: Any) -> None:
            raise OSError("lost")

        with monkeypatch.context() as patch:
            patch.setattr(scheduler.resources, "_destroy_events", lost)
            load = scheduler.onload([4, 2], [1, 3])
            load.wait(WAIT_S)
            assert load.state.value == "done"
        rig.expect_onload([4, 2], [1, 3])
        assert scheduler.in_flight() == []
    rig.check()
