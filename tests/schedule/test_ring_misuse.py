"""Rings of layer buffers: calls out of their order, transfers that meet in unusual ways, and nonsense. Nothing hangs,
and no layer takes the place of one that is still needed."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paddle_kv import (
    BackendError,
    CancelledError,
    ClosedError,
    DeviceCache,
    LayerwiseScheduler,
    Transfer,
    TransferError,
)
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.integrations import ForwardPass
from paddle_kv.schedule import arriving
from paddle_kv.tracking.group import change
from paddle_kv.tracking.memories import check_access
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, cache_memory, in_threads, make_spec
from tests.schedule.ring_rig import DEVICE_BLOCKS, SPEC, RingRig


@pytest.fixture
def ring(copies: Copies) -> Iterator[RingRig]:
    """Of 7 layers in 2 buffers."""
    made = RingRig(2)
    yield made
    copies.go_on()
    copies.heal()
    made.close()


def lies_there(rig: RingRig, layer: int, device_id: int, host_id: int) -> bool:
    return all((rig.rows(name, layer)[device_id] == rig.host[name][layer, host_id]).all() for name in SPEC.tensor_names)


def finish(load: Transfer, first: int = 0) -> None:
    for layer in range(first, load.num_layers):
        load.wait_layer(layer, timeout_s=WAIT_S)
        load.mark_layer_read(layer)
    load.wait(WAIT_S)


# ---- marks in other orders than that of the layers ----
def test_a_layer_that_is_marked_as_read_before_it_is_there_does_not_come_over_the_next_one(ring: RingRig) -> None:
    hold = ring.scheduler.offload([1], [9], layerwise=True)  # unmarked: the load has to wait
    load = ring.scheduler.onload([4], [1])
    for layer in (4, 2, 0, 1):
        load.mark_layer_read(layer)
    assert load.unmarked_layers == [3]
    hold.cancel()
    load.wait_layer(6, timeout_s=WAIT_S)
    assert lies_there(ring, 6, 1, 4)
    load.wait_layer(3, timeout_s=WAIT_S)
    assert lies_there(ring, 3, 1, 4)
    load.mark_layer_read(3)
    load.wait(WAIT_S)
    assert lies_there(ring, 5, 1, 4) and lies_there(ring, 6, 1, 4)


def test_layers_come_in_their_order_though_marked_in_another(ring: RingRig, copies: Copies) -> None:
    load = ring.scheduler.onload([4], [1])
    load.mark_layer_read(4)
    load.mark_layer_read(2)
    load.wait_layer(1, timeout_s=WAIT_S)
    assert [layer for _, _, layer in copies.done] == [0, 1]
    load.mark_layer_read(0)
    load.wait_layer(6, timeout_s=WAIT_S)
    assert [layer for _, _, layer in copies.done] == [0, 1, 2, 4, 6]
    load.cancel()


def test_a_load_waits_for_every_layer_that_a_save_has_in_the_buffer(ring: RingRig, copies: Copies) -> None:
    """The save is marked from the last layer on."""
    save = ring.scheduler.offload([1], [9], layerwise=True)
    copies.hold("offload", 0)
    load = ring.scheduler.onload([4], [1])
    for layer in (6, 5, 4, 3, 2, 1):
        save.mark_layer_written(layer)
    with pytest.raises(TimeoutError, match="it waits for a layerwise offload of the same blocks"):
        load.wait_layer(0, timeout_s=SHORT_S)
    save.mark_layer_written(0)
    with pytest.raises(TimeoutError, match="a layer was not there after"):
        load.wait_layer(0, timeout_s=SHORT_S)
    copies.go_on()
    save.wait(WAIT_S)
    finish(load)
    assert lies_there(ring, 6, 1, 4)
    for name in SPEC.tensor_names:
        ring.host[name][:, 9] = 0xDE
    ring.touched.add(1)
    ring.check()


def test_a_load_that_is_not_there_does_not_wait_for_the_save_of_its_pass(ring: RingRig) -> None:
    """The save waits for the load."""
    hold = ring.scheduler.offload([1], [9], layerwise=True)  # unmarked: the load has to wait
    load = ring.scheduler.onload([4], [1])
    save = ring.scheduler.offload([1], [10], layerwise=True)
    load.mark_layer_read(0)
    hold.cancel()
    load.wait_layer(1, timeout_s=WAIT_S)
    save.mark_layer_written(0)
    load.wait_layer(2, timeout_s=WAIT_S)
    save.cancel()
    load.cancel()


def test_a_layer_waits_for_the_save_of_no_other_one(ring: RingRig, copies: Copies) -> None:
    load = ring.scheduler.onload([4], [1])
    save = ring.scheduler.offload([1], [10], layerwise=True)
    copies.hold("offload", 1)
    for layer in range(2):
        load.wait_layer(layer, timeout_s=WAIT_S)
        save.mark_layer_written(layer)
        load.mark_layer_read(layer)
        load.wait_layer(2, timeout_s=WAIT_S)
    with pytest.raises(TimeoutError):
        load.wait_layer(3, timeout_s=SHORT_S)
    copies.go_on()
    load.wait_layer(3, timeout_s=WAIT_S)
    save.cancel()
    load.cancel()


def test_a_save_does_not_wait_for_a_later_one_into_its_host_block(ring: RingRig) -> None:
    first = ring.scheduler.offload([1], [9], layerwise=True)
    second = ring.scheduler.offload([2], [9], layerwise=True)
    for save in (first, second):
        for layer in range(7):
            save.mark_layer_written(layer)
        save.wait(WAIT_S)


# ---- transfers that meet in host blocks alone: layer by layer, in one pass ----
def test_two_saves_of_a_pass_into_one_host_block(ring: RingRig) -> None:
    saves = [ring.scheduler.offload([device_id], [9], layerwise=True) for device_id in (1, 2)]
    with ForwardPass([], saves, timeout_s=WAIT_S) as layers:
        for layer in range(7):
            with layers.layer(layer):
                ring.compute(layer, {}, {1: 9})
                ring.compute(layer, {}, {2: 9})
    ring.touched |= {1, 2}
    ring.check()


class Source:
    """Stands for a job of a tier."""

    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = block_ids

    def cancel(self) -> None:
        pass


def arriving_load(ring: RingRig, host_ids: tuple[int, ...] = (4,), device_ids: tuple[int, ...] = (1,)) -> Transfer:
    """Of host blocks that a tier is about to write."""
    scheduler = ring.scheduler
    plan, source = scheduler.plan("onload", list(device_ids), list(host_ids)), Source(list(host_ids))
    started = functools.partial(arriving.start, scheduler, plan, scheduler.compute_stream(None), False, source)
    return change(scheduler, started)


def test_a_layer_that_is_not_in_host_memory_does_not_come_because_of_a_mark(ring: RingRig, copies: Copies) -> None:
    load = arriving_load(ring)
    there = functools.partial(arriving.mark, load._movement)
    change(ring.scheduler, functools.partial(there, [0, 1]))
    load.mark_layer_read(0)
    load.mark_layer_read(1)
    with pytest.raises(TimeoutError, match="it is still being read into host memory"):
        load.wait_layer(2, timeout_s=SHORT_S)
    change(ring.scheduler, functools.partial(there, [3, 4]))
    load.wait_layer(3, timeout_s=WAIT_S)
    with pytest.raises(TimeoutError, match="mark_layer_read was not called for layer 2"):
        load.wait_layer(4, timeout_s=SHORT_S)
    assert [layer for _, _, layer in copies.done] == [0, 1, 3]
    change(ring.scheduler, functools.partial(there, range(7)))
    for layer in (2, 3, 4):
        load.wait_layer(layer, timeout_s=WAIT_S)
        load.mark_layer_read(layer)
    assert not load.done()
    change(ring.scheduler, functools.partial(arriving.end, load._movement))
    load.wait(WAIT_S)
    assert lies_there(ring, 5, 1, 4) and lies_there(ring, 6, 1, 4)


def test_two_loads_of_a_pass_out_of_a_block_that_is_being_read_from_storage(ring: RingRig) -> None:
    scheduler, first = ring.scheduler, arriving_load(ring)
    second = scheduler.onload([4], [2])
    with ForwardPass([first, second], timeout_s=WAIT_S) as layers:
        for layer in range(7):
            change(scheduler, functools.partial(arriving.mark, first._movement, [layer]))
            with layers.layer(layer):
                ring.compute(layer, {1: 4, 2: 4}, {})
    change(scheduler, functools.partial(arriving.end, first._movement))
    first.wait(WAIT_S)
    second.wait(WAIT_S)
    ring.touched |= {1, 2}
    ring.check()


def test_loads_that_lose_a_block_fail_as_a_whole(ring: RingRig) -> None:
    """They end, though nobody can mark their layers any more; and no block of them is called usable."""
    load = arriving_load(ring, (4, 5), (1, 2))
    reader = ring.scheduler.onload([5, 6], [3, 7])
    change(ring.scheduler, functools.partial(arriving.mark, load._movement, [0]))
    load.wait_layer(0, timeout_s=WAIT_S)
    change(ring.scheduler, functools.partial(arriving.lose, load._movement, [5], "5 was not there"))
    change(ring.scheduler, functools.partial(arriving.end, load._movement))
    for one, device_ids in ((load, [1, 2]), (reader, [3, 7])):
        with pytest.raises(TransferError, match="5 was not there") as caught:
            one.wait(WAIT_S)
        assert caught.value.block_ids == device_ids


@pytest.mark.parametrize("layers_per_event", [1, 2, 3])
def test_a_cache_with_all_layers_loads_what_a_ring_saves(ring: RingRig, copies: Copies, layers_per_event: int) -> None:
    """Layer by layer, also where the save is marked in another order, and the other way round."""
    cache = DeviceCache(SPEC, DEVICE_BLOCKS, "cpu")
    with LayerwiseScheduler(cache, ring.pool, layers_per_event=layers_per_event) as scheduler:
        save = ring.scheduler.offload([1], [9], layerwise=True)
        load = scheduler.onload([9], [1])
        copies.hold("offload", 1)
        for layer in (6, 0, 5, 4, 3, 2, 1):
            ring.compute(layer, {}, {1: 9})
            save.mark_layer_written(layer)
            if layer != 1:
                save.wait_layer(layer, timeout_s=WAIT_S)
            if layer == 0 and layers_per_event == 1:
                load.wait_layer(0, timeout_s=WAIT_S)  # while most of the save is not marked
        with pytest.raises(TimeoutError):
            load.wait_layer(1, timeout_s=SHORT_S)
        copies.go_on()
        load.wait(WAIT_S)
        found = cache_memory(cache)
        for name in SPEC.tensor_names:
            np.testing.assert_array_equal(found[name][:, 1], ring.host[name][:, 9])
    ring.touched.add(1)
    ring.check()


def test_rings_of_two_sizes_on_one_pool(ring: RingRig) -> None:
    """Block 1 of one cache is not block 1 of the other one."""
    other = DeviceCache(SPEC, DEVICE_BLOCKS, "cpu", layer_buffers=3)
    with LayerwiseScheduler(other, ring.pool) as scheduler:
        save = ring.scheduler.offload([1], [9], layerwise=True)
        load = scheduler.onload([9], [1])
        for layer in range(7):
            if layer >= 2:
                save.wait_layer(layer - 2, timeout_s=WAIT_S)
            ring.compute(layer, {}, {1: 9})
            save.mark_layer_written(layer)
            load.wait_layer(layer, timeout_s=WAIT_S)
            for name in SPEC.tensor_names:
                size_bytes = SPEC.tensor_block_bytes(name)
                found = other.tensor(name, layer)[1].numpy().reshape(-1).view(np.uint8)
                assert found.size == size_bytes and (found == ring.host[name][layer, 9]).all()
            load.mark_layer_read(layer)
        load.wait(WAIT_S)
    ring.touched.add(1)
    ring.check()


# ---- loads into one block ----
def test_two_loads_of_a_pass_into_one_block_are_refused(ring: RingRig) -> None:
    first, second = ring.scheduler.onload([4], [1]), ring.scheduler.onload([5], [1])
    save = ring.scheduler.offload([2], [9], layerwise=True)
    with pytest.raises(ValueError, match=r"loads\[1\] waits for all layers of loads\[0\]"):
        ForwardPass([first, second], [save])
    assert save.failed
    with pytest.raises(ValueError, match=r"loads\[0\] waits for all layers of loads\[1\]"):
        ForwardPass([second, first])
    with pytest.raises(TimeoutError, match="it waits for a load into the same layer buffers of the same blocks"):
        second.wait_layer(0, timeout_s=SHORT_S)
    finish(first)
    with ForwardPass([second, second], timeout_s=WAIT_S):  # itself is not another one
        pass
    third = ring.scheduler.onload([5], [1])
    finish(third)
    assert lies_there(ring, 6, 1, 5)


def test_two_loads_into_one_block_with_one_between_them(ring: RingRig, copies: Copies) -> None:
    first, between, third = (ring.scheduler.onload([host_id], [1]) for host_id in (4, 5, 6))
    other = ring.scheduler.onload([7], [2])
    with pytest.raises(ValueError, match=r"loads\[2\] waits for all layers of loads\[0\]"):
        ForwardPass([first, other, third])
    copies.hold("onload", 6)
    for load in (first, between):
        for layer in range(5):
            load.mark_layer_read(layer)
    ForwardPass([first, other, third])  # nothing of the first two is to be marked any more
    copies.go_on()
    finish(third)
    assert lies_there(ring, 6, 1, 6)
    finish(other)


# ---- passes ----
def test_a_pass_waits_for_the_save_of_the_layer_that_lay_in_the_buffer_alone(ring: RingRig, copies: Copies) -> None:
    save = ring.scheduler.offload([1], [9], layerwise=True)
    copies.hold("offload", 1)
    late = pytest.raises(TimeoutError, match="a layer was not there after")
    with late, ForwardPass([], [save], timeout_s=SHORT_S) as layers:
        for layer in range(3):
            with layers.layer(layer):
                pass
            if layer == 0:
                save.wait_layer(0, timeout_s=WAIT_S)  # no pass waits for it longer than it may
        layers.before(3)
    assert copies.done == [("offload", (1,), 0)]
    copies.go_on()
    save.wait_over(WAIT_S)
    assert save.unmarked_layers == [3, 4, 5, 6]
    ring.pool.mark_rewritten([9])


def test_a_pass_that_reads_what_a_marked_save_reads(ring: RingRig) -> None:
    """Among the loads: the pass waits for its layers, and has nothing to mark."""
    before = ring.scheduler.offload([1], [9], layerwise=True)
    for layer in range(7):
        before.mark_layer_written(layer)
    load = ring.scheduler.onload([4], [2])
    with ForwardPass([before, load], timeout_s=WAIT_S) as layers:
        for layer in range(7):
            with layers.layer(layer):
                ring.compute(layer, {2: 4}, {})
    load.wait(WAIT_S)
    before.wait(WAIT_S)
    assert not ring.wrong


def test_a_transfer_of_nothing_behind_a_load_whose_layers_gave_their_places_away(ring: RingRig) -> None:
    scheduler = ring.scheduler
    load = scheduler.onload([4], [1])
    plan, stream = scheduler.plan("onload", [], []), scheduler.compute_stream(None)
    behind = functools.partial(scheduler.start_here, plan, stream, False, None, [load._movement])
    nothing = change(scheduler, behind)
    for layer in range(7):
        load.wait_layer(layer, timeout_s=WAIT_S)
        load.mark_layer_read(layer)
        nothing.wait_layer(layer, timeout_s=WAIT_S)
    load.wait(WAIT_S)
    nothing.wait(WAIT_S)


class HalfSubmitted(CpuBackend):
    """A submission of this layer fails when its copy was enqueued."""

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def copy_layers(self, binding: int, work: Any, stream: Any) -> None:
        super().copy_layers(binding, work, stream)
        if work.first_group == self._layer:
            self._layer = -1
            raise BackendError("half of it")


def test_what_still_runs_of_a_failed_load_is_waited_for(copies: Copies) -> None:
    """On another stream than the next one."""
    rig = RingRig(2)
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=HalfSubmitted(2))
    copies.hold("onload", 2)
    lost = scheduler.onload([4], [1], urgent=True)
    lost.wait_layer(0, timeout_s=WAIT_S)
    lost.mark_layer_read(0)
    copies.arrived.acquire(timeout=WAIT_S)
    load = scheduler.onload([5], [1], urgent=False)
    with pytest.raises(TimeoutError):
        load.wait_layer(0, timeout_s=SHORT_S)
    copies.go_on()
    load.wait_layer(0, timeout_s=WAIT_S)
    assert lies_there(rig, 0, 1, 5)
    with pytest.raises(TransferError):
        lost.wait(WAIT_S)
    finish(load)
    scheduler.close(WAIT_S)
    rig.close()


# ---- nonsense ----
def test_a_layer_that_gave_its_place_away_is_not_waited_for(ring: RingRig) -> None:
    load = ring.scheduler.onload([4], [1])
    nothing = ring.scheduler.onload([], [])
    for layer in range(7):
        load.wait_layer(layer, timeout_s=WAIT_S)
        load.wait_layer(layer, timeout_s=WAIT_S)
        load.mark_layer_read(layer)
        nothing.wait_layer(layer, timeout_s=WAIT_S)
        nothing.mark_layer_read(layer)
        nothing.wait_layer(layer, timeout_s=WAIT_S)
        if layer < 5:
            with pytest.raises(ValueError, match=f"layer = {layer} was marked as read: layer {layer + 2} takes"):
                load.wait_layer(layer)
    load.wait(WAIT_S)
    for layer in range(5):
        with pytest.raises(ValueError, match=f"layer = {layer} was marked as read"):
            load.wait_layer(layer)
    for layer in (5, 6):
        load.wait_layer(layer)
        load.mark_layer_read(layer)  # as often as one likes: nothing comes behind it


@pytest.mark.parametrize("layer", [True, 2.0, "2", None, [1]])
def test_a_layer_that_is_no_number(ring: RingRig, layer: Any) -> None:
    load = ring.scheduler.onload([4], [1])
    with pytest.raises(TypeError, match=r"layer is .*; an integer is expected"):
        load.mark_layer_read(layer)
    for number in (-1, 7, 10**30):
        with pytest.raises(IndexError, match=rf"layer = {number} must be in \[0, 7\)"):
            load.mark_layer_read(number)
    assert load.unmarked_layers == [0, 1, 2, 3, 4]
    load.cancel()


def test_marks_of_what_has_come_to_nothing(ring: RingRig, copies: Copies) -> None:
    copies.fail("onload", 1, OSError("lost"))
    failed = ring.scheduler.onload([4], [1])
    with pytest.raises(TransferError, match="lost"):
        failed.wait_layer(1, timeout_s=WAIT_S)
    copies.heal()
    for layer in range(7):
        with pytest.raises(TransferError, match="lost"):
            failed.mark_layer_read(layer)
    failed.wait_over(WAIT_S)
    cancelled = ring.scheduler.onload([4], [2])
    cancelled.mark_layer_read(0)
    cancelled.cancel()
    for layer in range(7):
        with pytest.raises(CancelledError):
            cancelled.mark_layer_read(layer)
    for layer in range(7):
        with pytest.raises(CancelledError):
            cancelled.wait_layer(layer)


def test_marks_behind_close(ring: RingRig) -> None:
    with LayerwiseScheduler(ring.cache, ring.pool) as scheduler:
        over, left = scheduler.onload([4], [1]), scheduler.onload([4], [2])
        finish(over)
        left.mark_layer_read(1)
    for layer in range(7):
        with pytest.raises(CancelledError):
            left.mark_layer_read(layer)
    with pytest.raises(ValueError, match="layer = 0 is marked as read already"):
        over.mark_layer_read(0)
    over.mark_layer_read(6)
    with pytest.raises(ClosedError):
        scheduler.onload([4], [1])


def test_a_layer_is_marked_by_one_thread_of_several(ring: RingRig) -> None:
    load = ring.scheduler.onload([4], [1])
    refused: list[int] = []

    def mark() -> None:
        for layer in range(7):
            try:
                load.mark_layer_read(layer)
            except ValueError:
                refused.append(layer)

    in_threads(mark, mark, mark)
    assert sorted(refused) == sorted([0, 1, 2, 3, 4] * 2)
    load.wait(WAIT_S)
    assert lies_there(ring, 5, 1, 4) and lies_there(ring, 6, 1, 4)


class Alarm(BaseException):
    pass


def test_an_exception_of_a_handler_in_a_pass(ring: RingRig) -> None:
    """The pass ends, what it has not marked is cancelled, and the next pass finds the blocks free."""

    def rings(*_: Any) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, rings)
    try:
        ends = set()
        for number in range(40):
            load = ring.scheduler.onload([4, 5], [1, 2])
            save = ring.scheduler.offload([2, 3], [9, 10], layerwise=True)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.0001 * (number % 20))
                with ForwardPass([load], [save], timeout_s=WAIT_S) as layers:
                    for layer in range(7):
                        with layers.layer(layer):
                            pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            load.cancel()  # an exception in the end of the pass leaves it to its caller
            save.cancel()
            load.wait_over(WAIT_S)
            save.wait_over(WAIT_S)
            ends |= {load.state.value, save.state.value}
            ring.cache.mark_rewritten([1, 2])
            ring.pool.mark_rewritten([9, 10])
        assert "cancelled" in ends
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    ring.scheduler.drain(WAIT_S)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_marks_nothing(ring: RingRig) -> None:
    load = ring.scheduler.onload([4], [1])
    load.wait_layer(0, timeout_s=WAIT_S)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            signal.alarm(30)
            for call in (lambda: load.mark_layer_read(0), lambda: load.wait_layer(3, timeout_s=WAIT_S)):
                with pytest.raises(TransferError, match="the process forked"):
                    call()
            with LayerwiseScheduler(ring.cache, ring.pool) as scheduler:
                finish(scheduler.onload([4], [2]))
            assert lies_there(ring, 6, 2, 4)
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    finish(load)
    assert lies_there(ring, 6, 1, 4) and not lies_there(ring, 6, 2, 4)


def test_the_fewest_buffers_of_one_layer() -> None:
    spec = make_spec(num_layers=1)
    assert not DeviceCache(spec, 3, "cpu", layer_buffers=1).is_ring
    with pytest.raises(ValueError, match=r"layer_buffers = 0 must be in \[1, 1\]"):
        DeviceCache(spec, 3, "cpu", layer_buffers=0)
    for wrong in (0, 1, -1, 8):
        with pytest.raises(ValueError, match=rf"layer_buffers = {wrong} must be in \[2, 7\]"):
            DeviceCache(SPEC, 3, "cpu", layer_buffers=wrong)
    for kind in (True, 2.5, "2", [2]):
        with pytest.raises(TypeError, match="layer_buffers"):
            DeviceCache(SPEC, 3, "cpu", layer_buffers=kind)  # type: ignore[arg-type]


def test_the_debug_mode_knows_which_layer_lies_in_a_buffer(ring: RingRig, copies: Copies) -> None:
    copies.hold("onload", 6)
    load = ring.scheduler.onload([4], [1])
    save = ring.scheduler.offload([1], [9], layerwise=True)

    def access(layer: int) -> None:
        check_access(ring.cache.pointer("key", layer), [1], True, None)

    for layer in range(7):
        message = f"block 1 of layer buffer {layer % 2} is used while a transfer is "
        with pytest.raises(RuntimeError, match=message + "writing it"):
            access(layer)
        copies.go_on("onload", layer)
        load.wait_layer(layer, timeout_s=WAIT_S)
        if layer >= 2:
            with pytest.raises(RuntimeError, match=message + "reading it"):
                access(layer)
            save.wait_layer(layer - 2, timeout_s=WAIT_S)
        access(layer)
        save.mark_layer_written(layer)
        load.mark_layer_read(layer)
    save.wait(WAIT_S)
    for layer in range(7):
        access(layer)
