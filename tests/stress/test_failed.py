"""Failed and cancelled transfers whose exceptions somebody keeps: memory stays flat, nothing of theirs stays alive."""

from __future__ import annotations

import gc
import os
import tracemalloc
import weakref
from collections import deque

from paddle_kv import CancelledError, LayerwiseScheduler, TransferError
from tests.schedule.rig import WAIT_S, Copies, Rig, are_collected, traced_bytes

MANY = 500 * int(os.environ.get("PADDLE_KV_STRESS", "1"))
MOST_GROWN_BYTES = 30_000 + 10 * MANY


def test_memory_is_flat(copies: Copies) -> None:
    rig = Rig()
    kept: deque[BaseException] = deque(maxlen=10)

    def go(rounds: int, scheduler: LayerwiseScheduler) -> int:
        for i in range(rounds):
            try:
                if i % 2:
                    transfer = scheduler.offload([i % 13], [i % 17], layerwise=True)
                    transfer.cancel()
                else:
                    transfer = scheduler.onload([i % 17], [i % 13])
                transfer.wait(WAIT_S)
            except (TransferError, CancelledError) as error:
                kept.append(error)
            scheduler.host_pool.mark_rewritten(range(17))
            scheduler.device_cache.mark_rewritten(range(13))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    copies.fail("onload", 2, OSError("broken"))
    tracemalloc.start()
    try:
        with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
            go(200, scheduler)
            copies.done.clear()
            before = go(50, scheduler)
            copies.done.clear()
            go(MANY, scheduler)
            copies.done.clear()
            after = traced_bytes(scheduler, before + MOST_GROWN_BYTES)
            assert scheduler.stats()["failed"] >= MANY // 2
    finally:
        tracemalloc.stop()
    assert after - before < MOST_GROWN_BYTES, (before, after)
    alive = [weakref.ref(rig.cache), weakref.ref(scheduler)]
    texts = [str(error) for error in kept]
    for error in kept:
        error.__traceback__ = None  # those are the frames of this test
    del rig, scheduler
    assert len(texts) == 10
    assert are_collected(*alive)
