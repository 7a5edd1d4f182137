"""A scheduler that is made: what it waits for, and what it gives back of others."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule.resources import abandoned, release_abandoned
from tests.schedule.rig import Rig


def test_what_nobody_closed_is_given_back_when_the_next_one_is_made(rig: Rig) -> None:
    destroyed: list[Any] = []

    class Watched(CpuBackend):
        def destroy_stream(self, stream: Any) -> None:
            destroyed.append(stream)
            super().destroy_stream(stream)

    release_abandoned()
    forgotten = LayerwiseScheduler(rig.cache, rig.pool, backend=Watched())
    streams = set(forgotten.resources.streams.values())
    del forgotten
    gc.collect()
    assert (len(abandoned), destroyed) == (1, [])
    with LayerwiseScheduler(rig.cache, rig.pool):
        assert len(abandoned) == 0
        assert set(destroyed) == streams


def test_a_device_that_does_not_begin_is_told_by_the_constructor(rig: Rig) -> None:
    events: list[Any] = []

    class Broken(CpuBackend):
        streams = 0

        def create_stream(self, *, urgent: bool = False) -> Any:
            self.streams += 1
            return super().create_stream(urgent=urgent)

        def destroy_stream(self, stream: Any) -> None:
            self.streams -= 1
            super().destroy_stream(stream)

        def record(self, event: Any, stream: Any) -> None:
            events.append(event)

        def wait(self, event: Any, timeout_s: float | None) -> bool:
            assert ([event], timeout_s) == (events, None)
            raise RuntimeError("the device is lost")

    backend = Broken()
    with pytest.raises(RuntimeError, match="the device is lost"):
        LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    assert (len(events), backend.streams) == (1, 0)
