"""Every call of schedulers, transfers and pools may come from any thread: none is lost, none sees half a state."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from paddle_kv import CancelledError, LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from tests.schedule import rig as rig_module
from tests.schedule.rig import WAIT_S, Rig, assert_same, cache_memory, in_threads, pool_memory, settles

THREADS = 4


def hammer(scheduler: LayerwiseScheduler, rig: Rig, seed: int, rounds: int) -> None:
    """Calls at random on blocks that all threads share."""
    choose = random.Random(seed)
    for _ in range(rounds):
        device, host = choose.sample(range(13), 2), choose.sample(range(17), 2)
        with contextlib.suppress(CancelledError, TransferError):  # another thread has cancelled what would be read
            kind = choose.randrange(4)
            if kind == 0:
                transfer = scheduler.offload(device, host)
            elif kind == 1:
                transfer = scheduler.onload(host, device)
            elif kind == 2:
                transfer = scheduler.offload(device, host, layerwise=True)
                for layer in choose.sample(range(5), choose.randrange(6)):
                    transfer.mark_layer_written(layer)
                transfer.cancel()
            else:
                transfer = scheduler.onload(host, device)
                transfer.cancel()
            end = choose.randrange(4)
            if end == 0:
                transfer.wait(WAIT_S)
            elif end == 1:
                transfer.wait_layer(choose.randrange(5), timeout_s=WAIT_S)
            elif end == 2:
                transfer.wait_on(timeout_s=WAIT_S)
            else:
                transfer.done()
        scheduler.stats()
        rig.pool.num_free_blocks  # noqa: B018  looks at all transfers


@pytest.mark.parametrize("schedulers", [1, 2])
def test_threads_on_the_same_blocks(rig, schedulers):
    """Each block ends as one of the contents that some block had in the beginning, in all layers the same one."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(LayerwiseScheduler(rig.cache, rig.pool)) for _ in range(schedulers)]
        in_threads(*[lambda i=i: hammer(made[i % schedulers], rig, i, 60) for i in range(THREADS)])
        for scheduler in made:
            scheduler.drain(WAIT_S)
            stats = scheduler.stats()
            assert stats["in_flight"] == 0
            assert settles(lambda: scheduler.stats()["events"] == 1)  # noqa: B023
            assert stats["failed"] + stats["cancelled"] <= stats["onload_transfers"] + stats["offload_transfers"]
    assert rig_module.in_flight() == []
    originals = {name: np.concatenate([rig.device[name], rig.host[name]], axis=1) for name in rig.spec.tensor_names}
    poisoned = {
        "device": set(rig.cache.domain.poisoned(range(13))),
        "host": set(rig.pool.domain.poisoned(range(17))),
    }
    for side, seen in (("device", cache_memory(rig.cache)), ("host", pool_memory(rig.pool))):
        for block in set(range(seen["key"].shape[1])) - poisoned[side]:
            matches = [
                (originals[name] == seen[name][:, block][:, None]).all(axis=(0, 2)) for name in rig.spec.tensor_names
            ]
            assert np.logical_and.reduce(matches).any(), f"{side} block {block} is a mixture"


def test_marks_of_one_save_from_several_threads(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        for _ in range(20):
            save = scheduler.offload([1, 7], [4, 9], layerwise=True)
            in_threads(*[lambda layer=layer, save=save: save.mark_layer_written(layer) for layer in range(5)])
            save.wait(WAIT_S)
        refused = []

        def mark(save) -> None:
            try:
                save.mark_layer_written(2)
            except ValueError as error:
                refused.append(error)

        save = scheduler.offload([1], [4], layerwise=True)
        in_threads(*[lambda: mark(save)] * THREADS)
        assert len(refused) == THREADS - 1, "one mark counts, the others are told"
        save.cancel()
    rig.expect_offload([1, 7], [4, 9])
    rig.expect_offload([1], [4], layers=[2])
    rig.check()


def test_waiting_threads_are_told_of_a_cancel(rig):
    """Whatever each of them waits with."""
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        told = []

        def wait(call: Callable[[], object]) -> None:
            with pytest.raises(CancelledError, match="offload was cancelled before layer 0 was moved") as caught:
                call()
            told.append(caught.value)

        def cancel() -> None:
            time.sleep(0.05)
            save.cancel()

        in_threads(
            lambda: wait(lambda: save.wait(WAIT_S)),
            lambda: wait(lambda: save.wait_layer(4, timeout_s=WAIT_S)),
            lambda: wait(lambda: save.wait_on(timeout_s=WAIT_S)),
            cancel,
            cancel,
        )
        assert len(told) == 3
    rig.check()


@pytest.mark.parametrize("call", ["wait_layer", "wait_on"])
def test_events_are_not_given_back_while_somebody_is_about_to_wait(rig, copies, call):
    """He has the event in his hand, outside of the lock; re-used, it would make him wait for something else."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(CpuBackend):
        def wait_on_stream(self, *arguments):
            inside.set()
            go_on.wait(WAIT_S)
            super().wait_on_stream(*arguments)

    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=Slow())
    copies.hold("onload", 0)
    load = scheduler.onload([4], [1])
    waiting = threading.Thread(target=getattr(load, call), args=(0,) if call == "wait_layer" else ())
    waiting.start()
    assert inside.wait(WAIT_S)
    copies.go_on()
    load.wait(WAIT_S)
    assert scheduler.stats()["events"] > 1
    with pytest.raises(TimeoutError):
        scheduler.close(0.02)
    go_on.set()
    waiting.join(WAIT_S)
    scheduler.close(WAIT_S)
    assert scheduler.stats()["events"] == 0


def started(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.05)  # it waits by now
    assert thread.is_alive()
    return thread


def ends(thread: threading.Thread) -> bool:
    thread.join(WAIT_S)
    return not thread.is_alive()


def test_who_waits_for_a_mark_is_woken(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        waiting = started(lambda: save.wait_layer(2))
        save.mark_layer_written(2)
        assert ends(waiting)
        save.cancel()


def test_who_waits_is_woken_by_a_cancel(rig, copies):
    """Not by the end of what still runs."""

    def wait() -> None:
        with pytest.raises(CancelledError, match="cancelled"):
            save.wait_on()

    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        copies.hold("offload", 0)
        save = scheduler.offload([1], [4], layerwise=True)
        save.mark_layer_written(0)
        waiting = started(wait)
        save.cancel()
        assert ends(waiting)
        copies.go_on()


def test_a_lease_is_woken_by_the_end_of_a_transfer(rig, copies):
    def lease() -> None:
        with rig.pool.lease([4]):
            pass

    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        copies.hold("offload", 0)
        save = scheduler.offload([1], [4])
        waiting = started(lease)
        copies.go_on()
        save.wait(WAIT_S)
        assert ends(waiting)


def test_a_lease_is_woken_by_the_end_of_another(rig):
    def lease() -> None:
        with rig.pool.lease([4], write=True):
            pass

    with rig.pool.lease([4]):
        waiting = started(lease)
    assert ends(waiting)


def test_close_while_others_wait(rig, copies):
    """What is submitted arrives, what is not is told; nobody waits for ever."""
    copies.hold("onload", 4)
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    load = scheduler.onload([4], [1])
    assert copies.arrived.acquire(timeout=WAIT_S)
    save = scheduler.offload([2], [5], layerwise=True)

    def wait_for_the_save() -> None:
        with pytest.raises(CancelledError, match="cancelled"):
            save.wait(WAIT_S)

    def let_go() -> None:
        time.sleep(0.05)
        copies.go_on()

    in_threads(lambda: load.wait(WAIT_S), wait_for_the_save, lambda: scheduler.close(WAIT_S), scheduler.close, let_go)
    assert [scheduler.stats()[name] for name in ("in_flight", "events", "streams")] == [0, 0, 0]
    rig.expect_onload([4], [1])
    rig.check()


def test_a_pool_gives_no_block_to_two_threads(rig):
    owned: list[set[int]] = [set() for _ in range(THREADS)]
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:

        def work(number: int) -> None:
            choose = random.Random(number)
            for _ in range(80):
                try:
                    blocks = rig.pool.allocate(choose.randrange(1, 5))
                except MemoryError:
                    continue
                owned[number] = set(blocks)
                assert not any(owned[number] & other for i, other in enumerate(owned) if i != number)
                save = scheduler.offload(choose.sample(range(13), len(blocks)), blocks)
                with rig.pool.lease(blocks[:1], write=choose.random() < 0.5, timeout_s=WAIT_S):
                    pass
                owned[number] = set()
                rig.pool.free(blocks)
                if choose.random() < 0.5:
                    save.wait(WAIT_S)

        in_threads(*[lambda i=i: work(i) for i in range(THREADS)])
    assert rig.pool.allocate(17) == list(range(17))
    assert_same(cache_memory(rig.cache), rig.device)


def test_leases_for_writing_exclude_each_other(rig):
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(30):
            with rig.pool.lease([3, 5], write=True, timeout_s=WAIT_S):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.0005)
                inside[0] -= 1

    in_threads(*[work] * THREADS)
    assert most[0] == 1
