"""Exceptions of a signal handler at random moments inside the calls of the main thread: nobody loses a block."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
from collections.abc import Callable, Iterator

import pytest

from paddle_kv import CancelledError, LayerwiseScheduler, TransferError
from tests.schedule.rig import WAIT_S, Rig, assert_same, cache_memory

INTERRUPTS = 500 * int(os.environ.get("PADDLE_KV_STRESS", "1"))


class Interrupted(BaseException):
    pass


@pytest.fixture
def alarms() -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


Calls = Callable[[LayerwiseScheduler, Rig, list[list[int]]], None]


def replays(scheduler: LayerwiseScheduler, rig: Rig, owned: list[list[int]]) -> None:
    """The same by gates; what nobody marks is let go when the time of the gates is over."""
    gates = scheduler.gates(timeout_s=0.05)
    blocks = rig.pool.allocate(2)
    owned.append(blocks)
    save = scheduler.offload([1, 2], blocks, layerwise=True)
    gates.arm(saves=[save])
    for layer in range(5):
        gates.mark(layer)
    load = scheduler.onload(blocks, [3, 4])
    gates.arm(loads=[load])
    gates.wait(0)
    for layer in range(5):
        gates.mark_and_wait(layer)
    load.wait(WAIT_S)
    gates.arm(loads=[scheduler.onload(blocks, [3, 4])], saves=[scheduler.offload([3], blocks[:1], layerwise=True)])
    scheduler.drain(WAIT_S)
    rig.pool.free(blocks)
    owned.remove(blocks)


def calls(scheduler: LayerwiseScheduler, rig: Rig, owned: list[list[int]]) -> None:
    """Device blocks 1 and 2 are saved and come back to 1 and 2; what the blocks hold does not change."""
    blocks = rig.pool.allocate(2)
    owned.append(blocks)
    save = scheduler.offload([1, 2], blocks, layerwise=True)
    for layer in range(5):
        save.mark_layer_written(layer)
    load = scheduler.onload(blocks, [3, 4])
    load.wait_layer(4, timeout_s=WAIT_S)
    load.wait(WAIT_S)
    with rig.pool.lease(blocks, write=True, timeout_s=WAIT_S):
        pass
    scheduler.offload([3], blocks[:1], layerwise=True).cancel()
    scheduler.record_event("onload").wait(WAIT_S)
    scheduler.stats()
    scheduler.in_flight()
    scheduler.drain(WAIT_S)
    rig.pool.free(blocks)
    owned.remove(blocks)  # behind it: an alarm may come in between


@pytest.mark.parametrize(("made", "share"), [(calls, 1), (replays, 10)])
def test_interrupts(alarms: None, made: Calls, share: int) -> None:
    rig, choose, number = Rig(), random.Random(0), 0
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    while number < INTERRUPTS // share:
        owned: list[list[int]] = []
        try:
            signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-5, 6e-3))
            made(scheduler, rig, owned)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            number += 1
        except (TransferError, CancelledError):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for _ in range(2):  # an alarm that came last
            with contextlib.suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, 0)
                gc.collect(0)
        gc.collect(1)
        scheduler.drain(WAIT_S)
        rig.cache.mark_rewritten([3, 4])
        for blocks in owned:
            with contextlib.suppress(ValueError):  # free was done, and interrupted
                rig.pool.free(blocks)
        if rig.pool.num_free_blocks != 17:
            gc.collect()
        assert rig.pool.num_free_blocks == 17, f"behind interrupt {number}"
        assert rig.cache.domain.busy(range(13)) == []
        if number % 50 == 0:
            scheduler.close(WAIT_S)
            scheduler = LayerwiseScheduler(rig.cache, rig.pool)
            blocks = rig.pool.allocate(2)
            scheduler.offload([1, 2], blocks).wait(WAIT_S)
            scheduler.onload(blocks, [3, 4]).wait(WAIT_S)
            for name in rig.spec.tensor_names:
                rig.device[name][:, 3:5] = rig.device[name][:, 1:3]
            rig.pool.free(blocks)
            assert_same(cache_memory(rig.cache), rig.device)
    scheduler.close(WAIT_S)
