"""Random passes over rings of layer buffers. ``PADDLE_KV_STRESS=10`` has ten times as many."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest

from paddle_kv.backend import binding
from paddle_kv.schedule.movement import State
from tests.schedule.rig import in_threads
from tests.schedule.ring_traffic import RingTraffic, SlowCopies

STRESS = int(os.environ.get("PADDLE_KV_STRESS", "1"))
FIRST_SEED = int(os.environ.get("PADDLE_KV_SEED", "0"))
PASSES = 8


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RingTraffic]]:
    copy = binding.copy
    made: list[RingTraffic] = []

    def make(seed: int, *, num_workers: int = 1, failing: float = 0.0) -> RingTraffic:
        while made:
            made.pop().close()
        made.append(RingTraffic(seed, num_workers=num_workers, failing=failing))
        monkeypatch.setattr(binding, "copy", SlowCopies(copy, made[0].chance, 0.05, failing))
        return made[0]

    yield make
    made.pop().close()


@pytest.mark.parametrize("failing", [0.0, 0.01])
def test_every_byte_of_random_passes(made: Callable[..., RingTraffic], failing: float) -> None:
    ends = dict.fromkeys(State, 0)
    for seed in range(FIRST_SEED, FIRST_SEED + 20 * STRESS):
        traffic = made(seed, failing=failing)
        [worker] = traffic.workers
        for _ in range(PASSES):
            worker.run()
        traffic.check()
        ends = {state: ends[state] + count for state, count in worker.ends.items()}
        gc.collect()
    assert ends[State.DONE] > 100 * STRESS
    assert (
        (ends[State.FAILED] > 10 and ends[State.CANCELLED] > 10) if failing else ends[State.DONE] == sum(ends.values())
    )


@pytest.mark.parametrize("failing", [0.0, 0.01])
def test_every_byte_of_passes_in_several_threads(made: Callable[..., RingTraffic], failing: float) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + 5 * STRESS):
        traffic = made(seed, num_workers=3, failing=failing)
        in_threads(*([lambda worker=worker: [worker.run() for _ in range(PASSES)] for worker in traffic.workers]))
        traffic.check()
