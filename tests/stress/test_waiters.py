"""Whoever waits sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from paddle_kv import CancelledError, LayerwiseScheduler
from tests.schedule.rig import WAIT_S, Rig

WAITERS = 64


def wait(scheduler: LayerwiseScheduler, rig: Rig, save: object) -> None:
    save.wait(WAIT_S)


def wait_layer(scheduler: LayerwiseScheduler, rig: Rig, save: object) -> None:
    save.wait_layer(4, timeout_s=WAIT_S)


def lease(scheduler: LayerwiseScheduler, rig: Rig, save: object) -> None:
    with rig.pool.lease([4], timeout_s=WAIT_S):
        pass


def drain(scheduler: LayerwiseScheduler, rig: Rig, save: object) -> None:
    scheduler.drain(WAIT_S)


def awaiting(scheduler: LayerwiseScheduler, rig: Rig, save: object) -> None:
    async def one() -> None:
        with contextlib.suppress(CancelledError):
            await save

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(WAITERS)))

    asyncio.run(all_of_them())


@pytest.mark.parametrize("call", [wait, wait_layer, lease, drain, awaiting])
def test_waiters_take_no_time_of_a_core(rig: Rig, call: Callable[..., None]) -> None:
    def run() -> None:
        with contextlib.suppress(CancelledError):
            call(scheduler, rig, save)

    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        threads = [threading.Thread(target=run) for _ in range(1 if call is awaiting else WAITERS)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)  # they sleep by now
        used_s = []
        for _ in range(3):  # what Paddle's own threads do now and then is not ours
            begun_s = time.process_time()
            time.sleep(0.7)
            used_s.append(time.process_time() - begun_s)
        assert all(thread.is_alive() for thread in threads)
        save.cancel()
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert min(used_s) < 0.007, used_s
