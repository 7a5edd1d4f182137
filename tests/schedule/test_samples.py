"""What is measured of a transfer for whoever estimates how fast the device is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.backend.cpu_backend import CpuBackend
from tests.schedule.rig import WAIT_S, Rig


class Timed(CpuBackend):
    """Each time between two events that is asked for is ten milliseconds longer than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, Any]] = []

    def elapsed_ms(self, start: Any, end: Any) -> float:
        self.asked.append((start, end))
        return 10.0 * len(self.asked)


@pytest.fixture
def backend() -> Timed:
    return Timed()


@pytest.fixture
def scheduler(rig: Rig, backend: Timed) -> Iterator[LayerwiseScheduler]:
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend, layers_per_event=2) as made:
        yield made


def test_of_one_submission_it_is_the_whole_transfer(scheduler: LayerwiseScheduler, backend: Timed) -> None:
    load = scheduler.onload([2, 7], [3, 1])
    load.wait(WAIT_S)
    assert (load.elapsed_ms, load._movement.sample) == (10.0, (load.bytes, 10.0))
    assert len(backend.asked) == 1  # each asks the device


@pytest.mark.parametrize(("layers", "last_layers"), [((4, 2, 3, 0, 1), 2), ((0, 1, 2, 3, 4), 1)])
def test_of_several_submissions_it_is_the_last_one(
    scheduler: LayerwiseScheduler, backend: Timed, layers: tuple[int, ...], last_layers: int
) -> None:
    save = scheduler.offload([3, 1], [2, 7], layerwise=True)
    for layer in layers:
        save.mark_layer_written(layer)
    movement = save._movement
    save.wait(WAIT_S)
    assert (save.elapsed_ms, movement.sample) == (10.0, (save.bytes * last_layers // 5, 20.0))
    (first, end), (last, same_end) = backend.asked
    assert end is same_end is movement.last_event
    assert first is not last


def test_of_two_submissions_it_is_the_second(rig: Rig, backend: Timed) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend, layers_per_event=3) as scheduler:
        save = scheduler.offload([3], [2], layerwise=True)
        for layer in range(5):
            save.mark_layer_written(layer)
        save.wait(WAIT_S)
        assert (save.elapsed_ms, save._movement.sample) == (10.0, (save.bytes * 2 // 5, 20.0))


def test_what_was_measured_before_an_error_stays(rig: Rig) -> None:
    class Once(Timed):
        def elapsed_ms(self, start: Any, end: Any) -> float:
            if self.asked:
                raise RuntimeError("there are no times any more")
            return super().elapsed_ms(start, end)

    with LayerwiseScheduler(rig.cache, rig.pool, backend=Once(), record_layer_times=True) as scheduler:
        load = scheduler.onload([2, 7], [3, 1])
        load.wait(WAIT_S)
        assert (load._movement.sample, load.layer_times_ms) == ((load.bytes, 10.0), [])
