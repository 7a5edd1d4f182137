"""What a call costs does not grow with what is in flight: counted in calls of functions, which nobody else disturbs.

``PADDLE_KV_STRESS=10`` has ten times as much in flight.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from paddle_kv import CancelledError, DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from tests.schedule.rig import WAIT_S

MANY = 500 * int(os.environ.get("PADDLE_KV_STRESS", "1"))
FEW = 5
SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=2, block_size=1, dtype="int32", latent=True)


def start(scheduler: LayerwiseScheduler, kind: str, count: int) -> list[Any]:
    """So many transfers that stay in flight until the first one is marked: it is a layerwise save."""
    if kind == "apart":
        return [scheduler.offload([i], [i], layerwise=True) for i in range(count)]
    first = scheduler.offload([0], [0], layerwise=True)
    if kind == "one source":  # a prefix that many requests load
        return [first, *(scheduler.onload([0], [i], urgent=False) for i in range(1, count))]
    chain = [first]  # each reads what the one before writes
    for i in range(count // 2):
        chain += [scheduler.onload([i], [i + 1], urgent=False), scheduler.offload([i + 1], [i + 1])]
    return chain


def costs(kind: str, count: int) -> dict[str, int]:
    cache, pool = DeviceCache(SPEC, count + 20, "cpu"), HostPool(SPEC, count + 20)
    scheduler = LayerwiseScheduler(cache, pool)
    found: dict[str, int] = {}

    def measure(name: str, call: Callable[[], Any]) -> Any:
        calls = [0]

        def note(frame: object, event: str, argument: object) -> None:
            calls[0] += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            result = call()
        finally:
            sys.setprofile(None)
        found[name] = calls[0]
        return result

    def lease() -> None:
        with pool.lease([free + 1], write=True):
            pass

    def run() -> None:
        last = scheduler.onload([tail], [free + 1], urgent=False)
        measure("load of a block in flight", lambda: scheduler.onload([tail], [free + 2], urgent=False))
        measure("done", last.done)
        measure("cancel", last.cancel)
        measure("save", lambda: scheduler.offload([free], [free], layerwise=True)).cancel()
        measure("allocate", lambda: pool.allocate(1))
        measure("lease", lease)
        measure("free blocks", lambda: pool.num_free_blocks)

    free = count + 10
    held = start(scheduler, kind, count)
    tail = int(held[-1].plan.host_ids[0])
    thread = threading.Thread(target=run)  # in the main thread another one would do it
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    for transfer in held:
        transfer.cancel()
    scheduler.close(WAIT_S)
    pool.close()
    return found


@pytest.mark.parametrize("kind", ["apart", "one source", "chain"])
def test_a_call_costs_the_same_beside_many_transfers(kind: str) -> None:
    costs(kind, FEW)  # what is done once
    few, many = costs(kind, FEW), costs(kind, MANY)
    assert len(few) == len(many) == 7
    assert {name: (few[name], many[name]) for name in few if many[name] > 1.5 * few[name]} == {}


@pytest.mark.parametrize("end", ["arrive", "cancel the first", "cancel all"])
def test_a_long_chain_ends_in_a_time_of_its_length(end: str) -> None:
    def seconds(count: int) -> float:
        cache, pool = DeviceCache(SPEC, count + 20, "cpu"), HostPool(SPEC, count + 20)
        with LayerwiseScheduler(cache, pool) as scheduler:
            begun_s = time.process_time()  # whichever thread the work falls to
            chain = start(scheduler, "chain", count)
            if end == "arrive":
                for layer in range(2):
                    chain[0].mark_layer_written(layer)
            else:
                for transfer in chain if end == "cancel all" else chain[:1]:
                    transfer.cancel()
            with contextlib.suppress(CancelledError, RuntimeError):
                chain[-1].wait(WAIT_S)
            scheduler.drain(WAIT_S)
            taken_s = time.process_time() - begun_s
            assert {one.state.value for one in chain[1:]} <= ({"done"} if end == "arrive" else {"cancelled", "failed"})
        pool.close()
        return taken_s

    found: list[float] = []

    def run() -> None:
        found.extend(min(seconds(count) for _ in range(2)) for count in (MANY, 4 * MANY))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(found) == 2
    assert found[1] < 4 * 2 * found[0]
