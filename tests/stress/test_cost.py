"""What a call costs does not grow with what is in flight: counted in calls of functions, which nobody else disturbs.

``PADDLE_KV_STRESS=10`` has ten times as much in flight.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paddle_kv import CancelledError, DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from tests.schedule.rig import WAIT_S, in_threads

MANY = 500 * int(os.environ.get("PADDLE_KV_STRESS", "1"))
FEW = 5
ROUNDS = 6
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


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """What the collector looks through, and the finalizers that it calls, are those of all tests before."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def calls_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """How many functions are called by it in this thread, and what it returns."""
    calls = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with nothing_collected():
        sys.setprofile(note)
        try:
            result = call()
        finally:
            sys.setprofile(None)
    return calls, result


def costs(kind: str, count: int) -> dict[str, int]:
    cache, pool = DeviceCache(SPEC, count + 20, "cpu"), HostPool(SPEC, count + 20)
    scheduler = LayerwiseScheduler(cache, pool)
    found: dict[str, int] = {}

    def measure(name: str, call: Callable[[], Any]) -> Any:
        found[name], result = calls_of(call)
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
    beside_the_main_thread(run)
    for transfer in held:
        transfer.cancel()
    scheduler.close(WAIT_S)
    pool.close()
    return found


def beside_the_main_thread(run: Callable[[], object]) -> None:
    """For that one another thread would do it."""
    in_threads(run)


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

    found = {2 * MANY: math.inf, 4 * MANY: math.inf}

    def run() -> None:
        for _ in range(ROUNDS):  # what else the machine does makes a run longer, never shorter
            for count, least_s in found.items():
                found[count] = min(least_s, seconds(count))
            if in_proportion():
                return

    def in_proportion() -> bool:
        return found[4 * MANY] < 1.5 * 2 * found[2 * MANY]

    gc.collect()
    with nothing_collected():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert in_proportion(), found


def test_a_chain_that_is_cancelled_from_its_end_costs_its_length_and_a_save_behind_it_nothing() -> None:
    def run() -> None:
        for count in (FEW, MANY, 4 * MANY):
            cache, pool = DeviceCache(SPEC, count + 20, "cpu"), HostPool(SPEC, count + 20)
            with LayerwiseScheduler(cache, pool) as scheduler:
                chain = start(scheduler, "chain", count)
                found[count] = [sum(calls_of(transfer.cancel)[0] for transfer in reversed(chain[1:]))]
                tail = int(chain[-1].plan.host_ids[0])
                saves = [calls_of(lambda: scheduler.offload([count + 1], [tail])) for _ in range(3)]  # noqa: B023
                found[count].append(min(calls for calls, _ in saves))
                assert not any(save.done() for _, save in saves), "the first save was not marked"
                chain[0].cancel()
                saves[-1][1].wait(WAIT_S)
            pool.close()

    found: dict[int, list[int]] = {}
    beside_the_main_thread(run)
    assert found[4 * MANY][0] < 4.5 * found[MANY][0]
    assert found[MANY][1] <= 1.5 * found[FEW][1]


def test_a_save_behind_a_chain_that_has_failed_costs_the_same_whatever_its_length() -> None:
    def run() -> None:
        for count in (FEW, FEW, MANY):
            cache, pool = DeviceCache(SPEC, count + 20, "cpu"), HostPool(SPEC, count + 20)
            with LayerwiseScheduler(cache, pool) as scheduler:
                chain = start(scheduler, "chain", count)
                chain[1].cancel()
                # Its own, and of the first transfer the marks, starts and ends of two layers.
                assert scheduler.stats()["events"] == 1 + 3 * 2, "those of the cancelled ones are given back"
                tail = int(chain[-1].plan.host_ids[0])
                found[count], save = calls_of(lambda: scheduler.offload([count + 1], [tail]))  # noqa: B023
                chain[0].cancel()
                save.wait(WAIT_S)
            pool.close()

    found: dict[int, int] = {}
    beside_the_main_thread(run)
    assert found[MANY] <= 1.5 * found[FEW]


def test_to_free_a_block_costs_the_same_whoever_reads_it() -> None:
    def run() -> None:
        for count in (FEW, FEW, MANY):
            cache, pool = DeviceCache(SPEC, count + 20, "cpu"), HostPool(SPEC, count + 20)
            with LayerwiseScheduler(cache, pool) as scheduler:
                block = pool.allocate(1)
                first, *_ = start(scheduler, "one source", count)
                asked = {"free": lambda: pool.free(block), "free blocks": lambda: pool.num_free_blocks}  # noqa: B023
                found[count] = {name: calls_of(call)[0] for name, call in asked.items()}
                first.cancel()
                scheduler.drain(WAIT_S)
                assert pool.num_free_blocks == count + 20
            pool.close()

    found: dict[int, dict[str, int]] = {}
    beside_the_main_thread(run)
    assert {name: found[MANY][name] for name in found[FEW] if found[MANY][name] > 1.5 * found[FEW][name]} == {}
