"""What a scheduler counts, to the byte and to the microsecond."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paddle_kv.schedule.movement import State
from paddle_kv.schedule.statistics import Statistics


def movement(**changes: Any) -> Any:
    values = {"direction": "onload", "bytes": 40, "queued": False, "failure": None, "elapsed_ms": 1.0}
    return SimpleNamespace(**{**values, "state": State.DONE, **changes})


def test_only_loads_that_queue_and_are_not_over_count_as_queued() -> None:
    counted = Statistics()
    queued, other = movement(queued=True), movement()
    counted.started(queued)
    counted.started(other)
    assert counted.queued_bytes == 40
    counted.ended(other)
    assert counted.queued_bytes == 40
    counted.ended(queued)
    assert counted.queued_bytes == 0


def test_times_are_summed_by_direction_in_microseconds() -> None:
    counted = Statistics()
    for one in (movement(elapsed_ms=1200.5), movement(elapsed_ms=34.067), movement(elapsed_ms=float("nan"))):
        counted.ended(one)
    counted.ended(movement(direction="offload", failure="one", state=State.FAILED, elapsed_ms=7.0))
    counts = counted.as_dict()
    assert (counts["onload_us"], counts["offload_us"]) == (1_234_567, 0)
    assert (counts["failed"], counts["cancelled"]) == (1, 0)
