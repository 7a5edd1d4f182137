"""Small legal programs, one for each protection of the ordering contract. Each ends with a check of everything.

The device runs as late as it may unless a chooser says otherwise, so a protection that is left out shows.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterator
from typing import Any

from paddle_kv import CancelledError, DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, Transfer, TransferError
from paddle_kv.offload import KVOffloadManager
from paddle_kv.testing.simulator import LateChooser, OrderingError, Simulation
from paddle_kv.testing.simulator.chooser import Chooser
from tests.schedule import rig as rig_module

LAYERS = 2
SPEC = KVCacheSpec(num_layers=LAYERS, num_kv_heads=1, head_dim=3, block_size=1, dtype="float32", latent=True)
DEVICE_BLOCKS, HOST_BLOCKS = 4, 5


class Setting:
    """A device, its pools, and the schedulers on them."""

    def __init__(self, chooser: Chooser | None = None, drop: Collection[str] = ()) -> None:
        self.simulation = Simulation(chooser, drop=drop)
        self.cache = DeviceCache(SPEC, DEVICE_BLOCKS, "cpu")
        self.pool = HostPool(SPEC, HOST_BLOCKS)
        self.schedulers: list[LayerwiseScheduler] = []
        self._backends: list[Any] = []

    def scheduler(self, **options: Any) -> LayerwiseScheduler:
        self._backends.append(self.simulation.backend())
        made = LayerwiseScheduler(self.cache, self.pool, backend=self._backends[-1], **options)
        self.schedulers.append(made)
        return made

    def device(self, block: int) -> list[tuple[DeviceCache, int, int]]:
        return [(self.cache, block, layer) for layer in range(LAYERS)]

    def host(self, block: int) -> list[tuple[HostPool, int, int]]:
        return [(self.pool, block, layer) for layer in range(LAYERS)]

    def fill_host(self, block: int, version: str) -> None:
        self.simulation.touch_on_host(writes=self.host(block), version=version, label="fill")

    def compute(self, *, reads: int | None = None, writes: int | None = None, version: str | None = None) -> Any:
        return self.simulation.compute(
            reads=[] if reads is None else self.device(reads),
            writes=[] if writes is None else self.device(writes),
            version=version,
        )

    def assert_host(self, block: int, version: str) -> None:
        seen = self.simulation.touch_on_host(reads=self.host(block), label="read back")
        for where in self.host(block):
            location = self.simulation.location(*where)
            assert seen.saw(location) == version, f"{location} holds {seen.seen[location]}; {version} is expected"

    def assert_saw(self, computation: Any, block: int, version: str) -> None:
        self.simulation.run()
        for where in self.device(block):
            location = self.simulation.location(*where)
            assert computation.saw(location) == version, f"{location}: saw {computation.seen[location]}, not {version}"

    def finish(self) -> None:
        for scheduler in self.schedulers:
            scheduler.close(timeout_s=1.0)
        self.simulation.verify(closed=bool(self.schedulers))

    def clean(self) -> None:
        """Whatever happened: no transfer stays behind."""
        self.simulation.restore()
        self.simulation.device.chooser = LateChooser()
        for stream in self.simulation.device.streams:
            stream.held = stream.capturing = False
        self.simulation.run()
        for scheduler in self.schedulers:
            with contextlib.suppress(Exception):
                scheduler.close(timeout_s=1.0)


def refused(
    call: Callable[..., object], *arguments: object, error: type[Exception] = RuntimeError, **named: Any
) -> None:
    try:
        call(*arguments, **named)
    except error:
        return
    raise AssertionError(f"{call} was not refused with {error.__name__}")


def read_layer_by_layer(setting: Setting, load: Transfer, block: int, version: str) -> None:
    seen = []
    for layer in range(LAYERS):
        load.wait_layer(layer)
        seen.append(setting.simulation.compute(reads=[(setting.cache, block, layer)], label=f"attention {layer}"))
    setting.simulation.run()
    for layer in range(LAYERS):
        location = setting.simulation.location(setting.cache, block, layer)
        assert seen[layer].saw(location) == version, f"{location}: saw {seen[layer].seen[location]}, not {version}"


# ---- 1: an offload sees what was computed before ----
def offload_after_compute(s: Setting) -> None:
    scheduler = s.scheduler()
    s.compute(writes=0, version="prompt")
    scheduler.offload([0], [2]).wait()
    s.assert_host(2, "prompt")


def layerwise_offload_after_marks(s: Setting) -> None:
    save = s.scheduler().offload([0], [2], layerwise=True)
    for layer in (1, 0):
        s.simulation.compute(writes=[(s.cache, 0, layer)], version="prompt")
        save.mark_layer_written(layer)
    save.wait()
    s.assert_host(2, "prompt")


def layerwise_offload_with_layers_sharing_an_event(s: Setting) -> None:
    side = s.simulation.stream("side")
    save = s.scheduler(layers_per_event=2).offload([0], [2], layerwise=True)
    s.simulation.compute(writes=[(s.cache, 0, 0)], version="prompt")
    save.mark_layer_written(0)
    s.simulation.compute(writes=[(s.cache, 0, 1)], version="prompt", stream=side)
    save.mark_layer_written(1, stream=side)
    save.wait()
    s.assert_host(2, "prompt")


# ---- 2: an onload leaves a block alone while earlier computation uses it ----
def onload_after_readers(s: Setting) -> None:
    s.fill_host(3, "prefix")
    s.compute(writes=1, version="old")
    seen = s.compute(reads=1)
    load = s.scheduler().onload([3], [1])
    read_layer_by_layer(s, load, 1, "prefix")
    s.assert_saw(seen, 1, "old")


# ---- 3: computation behind wait_layer sees the layer ----
def wait_layer_before_attention(s: Setting) -> None:
    s.fill_host(3, "prefix")
    read_layer_by_layer(s, s.scheduler().onload([3], [1]), 1, "prefix")


def wait_layer_on_another_stream(s: Setting) -> None:
    s.fill_host(3, "prefix")
    side = s.simulation.stream("side")
    load = s.scheduler(layers_per_event=2).onload([3], [1])
    load.wait_layer(1, stream=side)
    seen = s.simulation.compute(reads=s.device(1), stream=side)
    s.assert_saw(seen, 1, "prefix")


# ---- 4: transfers that conflict run in order ----
def onload_of_a_block_being_saved(s: Setting) -> None:
    scheduler = s.scheduler()
    s.compute(writes=0, version="prompt")
    scheduler.offload([0], [2])
    read_layer_by_layer(s, scheduler.onload([2], [1]), 1, "prompt")


def onload_over_a_block_being_saved(s: Setting) -> None:
    scheduler = s.scheduler()
    s.fill_host(3, "prefix")
    s.compute(writes=0, version="prompt")
    save = scheduler.offload([0], [2])
    read_layer_by_layer(s, scheduler.onload([3], [0]), 0, "prefix")
    save.wait()
    s.assert_host(2, "prompt")


def offload_of_a_block_being_loaded(s: Setting) -> None:
    scheduler = s.scheduler()
    s.fill_host(3, "prefix")
    scheduler.onload([3], [1])
    scheduler.offload([1], [2]).wait()
    s.assert_host(2, "prefix")


def offload_over_a_block_being_loaded(s: Setting) -> None:
    scheduler = s.scheduler()
    s.fill_host(3, "prefix")
    s.compute(writes=0, version="prompt")
    load = scheduler.onload([3], [1])
    save = scheduler.offload([0], [3])
    read_layer_by_layer(s, load, 1, "prefix")
    save.wait()
    s.assert_host(3, "prompt")


def onload_of_a_block_whose_save_is_not_marked(s: Setting) -> None:
    scheduler = s.scheduler()
    save = scheduler.offload([0], [2], layerwise=True)
    load = scheduler.onload([2], [1])
    refused(load.wait_layer, 0, timeout_s=0.0, error=TimeoutError)
    for layer in range(LAYERS):
        s.simulation.compute(writes=[(s.cache, 0, layer)], version="prompt")
        save.mark_layer_written(layer)
    read_layer_by_layer(s, load, 1, "prompt")


def two_schedulers_save_to_one_block(s: Setting) -> None:
    first, second = s.scheduler(), s.scheduler()
    s.compute(writes=0, version="first")
    s.compute(writes=1, version="second")
    first.offload([0], [2])
    second.offload([1], [2]).wait()
    s.assert_host(2, "second")


def two_schedulers_load_to_one_block(s: Setting) -> None:
    first, second = s.scheduler(), s.scheduler(layers_per_event=2)
    s.fill_host(3, "first")
    s.fill_host(4, "second")
    first.onload([3], [1])
    read_layer_by_layer(s, second.onload([4], [1]), 1, "second")


def order_behind_the_writer_before_a_cancelled_one(s: Setting) -> None:
    first, second = s.scheduler(), s.scheduler()
    s.compute(writes=0, version="first")
    s.compute(writes=1, version="second")
    first.offload([0], [2])
    cancelled = first.offload([3], [2], layerwise=True)
    last = second.offload([1], [2], layerwise=True)
    cancelled.cancel()
    for layer in range(LAYERS):
        last.mark_layer_written(layer)
    last.wait()
    s.assert_host(2, "second")
    refused(cancelled.wait, error=CancelledError)


def order_behind_the_reader_before_a_cancelled_one(s: Setting) -> None:
    scheduler = s.scheduler()
    s.fill_host(3, "prefix")
    s.compute(writes=0, version="prompt")
    load = scheduler.onload([3], [1])
    scheduler.offload([2], [3], layerwise=True).cancel()
    save = scheduler.offload([0], [3])
    read_layer_by_layer(s, load, 1, "prefix")
    save.wait()
    s.assert_host(3, "prompt")


# ---- 5: computation touches a block in flight behind wait_layer, wait_on or wait ----
def compute_overwrites_a_saved_block_behind_wait_on(s: Setting) -> None:
    s.compute(writes=0, version="prompt")
    save = s.scheduler().offload([0], [2])
    save.wait_on()
    s.compute(writes=0, version="next")
    save.wait()
    s.assert_host(2, "prompt")


def compute_overwrites_a_block_that_another_save_brings(s: Setting) -> None:
    manager = KVOffloadManager(s.scheduler())
    s.compute(writes=0, version="prompt")
    s.compute(writes=1, version="prompt")
    manager.save([b"a", b"b"], [0, 1])
    for block, key in enumerate((b"a", b"b")):
        again = manager.blocks_evicted([key], [block])  # moves nothing
        if block:
            again.wait_on()
        for layer in range(LAYERS):
            again.wait_layer(layer)
            s.simulation.compute(writes=[(s.cache, block, layer)], version="next")
        again.wait()
        s.assert_host(manager._books.index.slots[key], "prompt")
    manager.close()


def compute_overwrites_a_saved_block_behind_wait_layer(s: Setting) -> None:
    s.compute(writes=0, version="prompt")
    save = s.scheduler().offload([0], [2])
    for layer in range(LAYERS):
        save.wait_layer(layer)
        s.simulation.compute(writes=[(s.cache, 0, layer)], version="next")
    save.wait()
    s.assert_host(2, "prompt")


def compute_overwrites_a_saved_block_behind_wait(s: Setting) -> None:
    s.compute(writes=0, version="prompt")
    save = s.scheduler().offload([0], [2])
    save.wait()
    s.compute(writes=0, version="next")
    s.assert_host(2, "prompt")


def compute_overwrites_a_saved_block_behind_done(s: Setting) -> None:
    s.compute(writes=0, version="prompt")
    save = s.scheduler().offload([0], [2])
    while not save.done():
        continue
    s.compute(writes=0, version="next")
    s.assert_host(2, "prompt")


# ---- 6: memory and blocks live until the transfers on them are over ----
def freed_host_block_stays_in_quarantine(s: Setting) -> None:
    [block] = s.pool.allocate(1)
    s.fill_host(block, "prefix")
    load = s.scheduler().onload([block], [1])
    s.pool.free([block])
    for other in s.pool.allocate(s.pool.num_free_blocks):
        s.fill_host(other, "other")
    read_layer_by_layer(s, load, 1, "prefix")


def freed_block_of_a_cancelled_save_stays_in_quarantine(s: Setting) -> None:
    [block] = s.pool.allocate(1)
    s.compute(writes=0, version="prompt")
    save = s.scheduler().offload([0], [block], layerwise=True)
    save.mark_layer_written(0)
    save.cancel()
    s.pool.free([block])
    for other in s.pool.allocate(s.pool.num_free_blocks):
        s.fill_host(other, "other")


def pools_outlive_their_transfers(s: Setting) -> None:
    s.fill_host(3, "prefix")
    s.scheduler().onload([3], [1])
    s.schedulers.clear()
    del s.cache, s.pool
    rig_module.collect()
    gc.collect()
    s.simulation.run()
    rig_module.collect()


def host_reads_under_a_lease(s: Setting) -> None:
    s.compute(writes=0, version="prompt")
    s.scheduler().offload([0], [2])
    with s.pool.lease([2]):
        s.assert_host(2, "prompt")


def host_writes_under_a_lease(s: Setting) -> None:
    s.fill_host(3, "prefix")
    load = s.scheduler().onload([3], [1])
    with s.pool.lease([3], write=True):
        s.fill_host(3, "other")
    read_layer_by_layer(s, load, 1, "prefix")


def transfers_keep_off_a_leased_block(s: Setting) -> None:
    scheduler = s.scheduler()
    s.fill_host(2, "prefix")
    with s.pool.lease([2], write=True):
        refused(scheduler.offload, [0], [2])
        refused(scheduler.onload, [2], [1])
        s.fill_host(2, "other")
    with s.pool.lease([2]):
        refused(scheduler.offload, [0], [2])
        load = scheduler.onload([2], [1])
        s.assert_host(2, "other")
    read_layer_by_layer(s, load, 1, "other")


# ---- 7: no failure looks like success ----
def copy_that_breaks(s: Setting) -> None:
    scheduler = s.scheduler()
    s.simulation.device.break_copy(3)
    s.compute(writes=0, version="prompt")
    saves = []
    try:
        saves.append(scheduler.offload([0], [2]))  # raises at once if the device was that quick
        saves[0].wait()
    except TransferError as error:
        assert error.layer == 1 and error.block_ids == [2]
        refused(scheduler.onload, [2], [1], error=TransferError)
        for save in saves:
            refused(save.wait_layer, 0, error=TransferError)
        scheduler.offload([0], [2]).wait()
    s.assert_host(2, "prompt")


def reader_of_a_copy_that_breaks(s: Setting) -> None:
    scheduler = s.scheduler()
    s.simulation.device.break_copy(3)
    s.compute(writes=0, version="prompt")
    try:
        scheduler.offload([0], [2])
        scheduler.onload([2], [1]).wait()
    except TransferError:
        return
    seen = s.compute(reads=1)
    s.assert_saw(seen, 1, "prompt")


def submission_that_breaks(s: Setting) -> None:
    scheduler = s.scheduler()
    s.simulation.device.break_submission(1)
    s.compute(writes=0, version="prompt")
    try:
        scheduler.offload([0], [2])
    except TransferError:
        scheduler.offload([0], [2])
    scheduler.drain()
    s.assert_host(2, "prompt")


def block_of_a_broken_submission_is_overwritten(s: Setting) -> None:
    scheduler = s.scheduler()
    s.fill_host(3, "prefix")
    s.compute(writes=0, version="prompt")
    s.simulation.device.break_submission(1)
    refused(scheduler.offload, [0], [2], error=TransferError)
    read_layer_by_layer(s, scheduler.onload([3], [0]), 0, "prefix")


def another_scheduler_behind_a_broken_submission(s: Setting) -> None:
    first, second = s.scheduler(), s.scheduler(compute_stream=s.simulation.stream("side"))
    s.fill_host(3, "prefix")
    s.compute(writes=0, version="prompt")
    s.simulation.run()
    s.simulation.order(s.simulation.compute_stream, s.simulation.device.streams[-1])
    s.simulation.device.break_submission(1)
    refused(first.offload, [0], [2], error=TransferError)
    load = second.onload([3], [0])
    load.wait()
    read_layer_by_layer(s, load, 0, "prefix")


def compute_behind_a_broken_submission(s: Setting) -> None:
    scheduler = s.scheduler()
    s.fill_host(3, "prefix")
    s.simulation.device.break_submission(1)
    refused(scheduler.onload, [3], [1], error=TransferError)
    s.compute(writes=1, version="prompt")
    s.cache.mark_rewritten([1])
    scheduler.offload([1], [2]).wait()
    s.assert_host(2, "prompt")


def freed_block_of_a_broken_submission_stays_in_quarantine(s: Setting) -> None:
    scheduler = s.scheduler()
    [block] = s.pool.allocate(1)
    s.compute(writes=0, version="prompt")
    s.simulation.device.break_submission(1)
    refused(scheduler.offload, [0], [block], error=TransferError)
    s.pool.free([block])
    for other in s.pool.allocate(s.pool.num_free_blocks):
        s.fill_host(other, "other")


def cancelled_save_leaves_poison(s: Setting) -> None:
    scheduler = s.scheduler()
    s.compute(writes=0, version="prompt")
    save = scheduler.offload([0], [2], layerwise=True)
    save.mark_layer_written(0)
    save.cancel()
    refused(scheduler.onload, [2], [1], error=TransferError)
    refused(save.wait_layer, 1, error=CancelledError)
    refused(save.wait, error=CancelledError)
    scheduler.offload([0], [2])
    read_layer_by_layer(s, scheduler.onload([2], [1]), 1, "prompt")


# ---- 8: each transfer ends, each wait of the host takes a time-out ----
def each_transfer_ends(s: Setting) -> None:
    scheduler = s.scheduler()
    s.compute(writes=0, version="prompt")
    transfers = [scheduler.offload([0], [2]), scheduler.offload([0], [3], layerwise=True)]
    refused(lambda: transfers[1].wait(timeout_s=0.0), error=TimeoutError)
    refused(lambda: transfers[1].wait_layer(0, timeout_s=0.0), error=TimeoutError)
    refused(lambda: transfers[1].wait_on(timeout_s=0.0), error=TimeoutError)
    transfers[1].cancel()
    try:
        scheduler.drain(timeout_s=0.1)
    except TimeoutError as error:
        raise AssertionError("a transfer does not end") from error
    assert all(transfer.done() for transfer in transfers)


# ---- 9: streams that are being captured ----
def calls_on_a_captured_stream_are_refused(s: Setting) -> None:
    captured = s.simulation.stream("captured")
    s.fill_host(3, "prefix")
    ordinary, on_captured = s.scheduler(), s.scheduler(compute_stream=captured)
    load = ordinary.onload([3], [1])
    save = ordinary.offload([0], [2], layerwise=True)
    captured.capturing = True
    refused(load.wait_layer, 0, stream=captured)
    refused(load.wait_on, captured)
    refused(save.mark_layer_written, 0, stream=captured)
    refused(on_captured.onload, [3], [3])
    captured.capturing = False
    load.wait_on(captured)
    replay = s.simulation.compute(reads=s.device(1), stream=captured, label="graph replay")
    s.assert_saw(replay, 1, "prefix")


# ---- 10: nothing is left after close ----
def nothing_is_left_after_close(s: Setting) -> None:
    first, second = s.scheduler(), s.scheduler(record_layer_times=True)
    s.compute(writes=0, version="prompt")
    first.offload([0], [2])
    second.onload([2], [1])
    first.offload([0], [3], layerwise=True)
    second.close()
    first.close()
    assert first.stats()["events"] == second.stats()["events"] == first.stats()["streams"] == 0
    s.pool.close()
    assert s.pool.pinned_bytes == 0


# ---- several protections at once ----
def cancel_between_the_marks_of_a_group(s: Setting) -> None:
    scheduler = s.scheduler(layers_per_event=2)
    s.compute(writes=0, version="prompt")
    save = scheduler.offload([0], [2], layerwise=True)
    load = scheduler.onload([2], [1])
    save.mark_layer_written(0)
    refused(save.wait_layer, 0, timeout_s=0.0, error=TimeoutError)
    save.cancel()
    refused(save.mark_layer_written, 1, error=CancelledError)
    refused(load.wait_layer, 0, error=TransferError)
    scheduler.offload([0], [2])
    read_layer_by_layer(s, scheduler.onload([2], [1]), 1, "prompt")


def cancel_between_mark_and_wait_layer(s: Setting) -> None:
    fine, coarse = s.scheduler(), s.scheduler(layers_per_event=2)
    s.fill_host(3, "prefix")
    s.compute(writes=0, version="prompt")
    save = fine.offload([0], [2], layerwise=True)
    load = coarse.onload([2], [1])
    save.mark_layer_written(0)
    save.wait_layer(0)
    s.simulation.compute(writes=[(s.cache, 0, 0)], version="next")
    save.cancel()
    refused(load.wait, error=TransferError)
    read_layer_by_layer(s, coarse.onload([3], [1]), 1, "prefix")
    s.simulation.compute(writes=[(s.cache, 0, 1)], version="next")
    coarse.offload([0], [2]).wait()
    s.assert_host(2, "next")


def urgent_load_over_a_load_in_flight(s: Setting) -> None:
    first, second = s.scheduler(), s.scheduler()
    s.fill_host(3, "bulk")
    s.fill_host(4, "urgent")
    first.onload([3, 3], [0, 1])
    read_layer_by_layer(s, second.onload([4], [1], urgent=True), 1, "urgent")
    first.onload([3], [1])
    first.offload([1], [2]).wait()
    s.assert_host(2, "bulk")


def urgent_load_of_a_block_that_is_freed(s: Setting) -> None:
    scheduler = s.scheduler()
    [block] = s.pool.allocate(1)
    s.compute(writes=0, version="prompt")
    save = scheduler.offload([0], [block], layerwise=True)
    load = scheduler.onload([block], [1], urgent=True)
    s.pool.free([block])
    save.mark_layer_written(0)
    for other in s.pool.allocate(s.pool.num_free_blocks):
        s.fill_host(other, "other")
    save.mark_layer_written(1)
    read_layer_by_layer(s, load, 1, "prompt")
    save.wait()
    for other in s.pool.allocate(s.pool.num_free_blocks):
        s.fill_host(other, "other")


def event_of_a_direction_covers_urgent_loads(s: Setting) -> None:
    scheduler = s.scheduler()
    s.fill_host(3, "bulk")
    s.fill_host(4, "urgent")
    scheduler.onload([3], [0])
    scheduler.onload([4], [1], urgent=True)
    assert scheduler.record_event("onload").wait()
    for block, version in ((0, "bulk"), (1, "urgent")):
        for layer in range(LAYERS):
            assert s.simulation.contents(s.cache, block, layer) == version
    scheduler.drain(1.0)


def wait_on_third_streams(s: Setting) -> None:
    one, two = s.simulation.stream("one"), s.simulation.stream("two")
    scheduler = s.scheduler(layers_per_event=2)
    s.fill_host(3, "prefix")
    load = scheduler.onload([3], [1])
    load.wait_on(one)
    first = s.simulation.compute(reads=s.device(1), stream=one)
    save = s.scheduler(compute_stream=two).offload([1], [2])
    save.wait_on(one)
    s.simulation.compute(writes=s.device(1), version="next", stream=one)
    save.wait()
    s.assert_saw(first, 1, "prefix")
    s.assert_host(2, "prefix")


def marks_and_waits_on_different_streams(s: Setting) -> None:
    side = s.simulation.stream("side")
    scheduler = s.scheduler()
    save = scheduler.offload([0], [2], layerwise=True)
    s.simulation.compute(writes=[(s.cache, 0, 1)], version="prompt", stream=side)
    save.mark_layer_written(1, stream=side)
    save.wait_layer(1)
    s.simulation.compute(writes=[(s.cache, 0, 1)], version="next")
    s.simulation.compute(writes=[(s.cache, 0, 0)], version="prompt")
    save.mark_layer_written(0)
    save.wait_layer(0, stream=side)
    s.simulation.compute(writes=[(s.cache, 0, 0)], version="next", stream=side)
    save.wait()
    s.assert_host(2, "prompt")


def lease_on_the_target_of_a_cancelled_save(s: Setting) -> None:
    scheduler = s.scheduler()
    s.compute(writes=0, version="prompt")
    save = scheduler.offload([0], [2], layerwise=True)
    save.mark_layer_written(0)
    save.cancel()
    with s.pool.lease([2], write=True):
        s.fill_host(2, "prefix")
        s.pool.mark_rewritten([2])
    read_layer_by_layer(s, scheduler.onload([2], [1]), 1, "prefix")


def order_behind_a_cancelled_one_that_is_over(s: Setting) -> None:
    """Its events are given back when it is over, while those before it still run."""
    first, second = s.scheduler(), s.scheduler()
    s.fill_host(3, "prefix")
    s.compute(writes=0, version="prompt")
    load = first.onload([3], [1])
    half = first.offload([2], [3], layerwise=True)
    half.mark_layer_written(0)
    half.cancel()
    half.done()
    save = second.offload([0], [3])
    read_layer_by_layer(s, load, 1, "prefix")
    save.wait()
    s.assert_host(3, "prompt")


def order_behind_two_cancelled_ones_in_a_row(s: Setting) -> None:
    """The second has read what the first wrote; who waits behind it has waited for the marks of the first."""
    scheduler = s.scheduler()
    s.fill_host(3, "prefix")
    s.compute(writes=0, version="prompt")
    first = scheduler.offload([0], [2], layerwise=True)
    second = scheduler.onload([2], [1])
    load = scheduler.onload([3], [1])
    first.mark_layer_written(0)
    second.cancel()
    first.cancel()
    load.wait_layer(1, timeout_s=5.0)  # nobody marks anything any more
    read_layer_by_layer(s, load, 1, "prefix")


def close_of_a_scheduler_that_others_wait_for(s: Setting) -> None:
    first, second = s.scheduler(), s.scheduler()
    s.compute(writes=0, version="prompt")
    s.compute(writes=1, version="other")
    first.offload([0], [2])
    dropped = first.offload([1], [2], layerwise=True)
    load = second.onload([2], [3])
    save = second.offload([1], [2])
    first.close()
    refused(dropped.wait, error=CancelledError)
    refused(load.wait, error=TransferError)
    save.wait()
    s.assert_host(2, "other")


def cancelled_save_that_ends_in_the_call_of_another(s: Setting) -> None:
    """Its layers tell of different errors; nothing that looks at them may keep what the other call holds."""
    scheduler = s.scheduler()
    s.compute(writes=0, version="prompt")
    dropped = scheduler.offload([0], [2], layerwise=True)
    save = scheduler.offload([0], [3], layerwise=True)
    for layer in range(LAYERS):
        dropped.mark_layer_written(layer)
    dropped.cancel()
    s.simulation.run()
    for layer in range(LAYERS):
        save.mark_layer_written(layer)
    save.wait()
    s.assert_host(3, "prompt")


def cancel_of_what_is_submitted(s: Setting) -> None:
    """Either all of it has arrived, or nobody may read what it has not written."""
    scheduler = s.scheduler()
    s.compute(writes=0, version="prompt")
    save = scheduler.offload([0], [2])
    load = scheduler.onload([2], [1])
    save.done()  # the device may begin
    save.cancel()
    try:
        save.wait()
    except CancelledError:
        refused(load.wait, error=TransferError)
        refused(scheduler.onload, [2], [3], error=TransferError)
        scheduler.offload([0], [2]).wait()
    s.assert_host(2, "prompt")
    read_layer_by_layer(s, scheduler.onload([2], [1]), 1, "prompt")


def mark_whose_submission_breaks(s: Setting) -> None:
    scheduler = s.scheduler()
    s.fill_host(3, "prefix")
    s.compute(writes=0, version="prompt")
    s.simulation.device.takes_marks = False  # or it would be submitted once more
    save = scheduler.offload([0], [2], layerwise=True)
    save.mark_layer_written(1)
    s.simulation.device.break_submission(1)
    refused(save.mark_layer_written, 0, error=TransferError)
    refused(scheduler.onload, [2], [1], error=TransferError)
    read_layer_by_layer(s, scheduler.onload([3], [0]), 0, "prefix")
    scheduler.offload([0], [2]).wait()
    s.assert_host(2, "prefix")


def saved_prefix_that_was_computed_from_a_load(s: Setting) -> None:
    scheduler = s.scheduler()
    manager = KVOffloadManager(scheduler)
    s.compute(writes=0, version="prefix")
    manager.save([b"prefix"], [0]).wait()
    s.simulation.device.break_copy(3)
    try:
        load = manager.onload([b"prefix"], [1])
    except TransferError:
        return manager.close()
    with contextlib.suppress(TransferError):
        load.wait_on()
    s.simulation.compute(reads=s.device(1), writes=s.device(2), version="answer")
    manager.save([b"answer"], [2], computed_from=[load])
    scheduler.drain(1.0)
    with manager.lookup([b"answer"]) as lease:
        assert lease.num_blocks == (load.error is None), "a block is found that was computed from what was not there"
    manager.close()
    return None


def eviction_beside_a_load_in_flight(s: Setting) -> None:
    manager = KVOffloadManager(s.scheduler(), capacity_bytes=LAYERS * SPEC.block_bytes)
    s.compute(writes=0, version="a")
    s.compute(writes=1, version="b")
    manager.save([b"a"], [0]).wait()
    load = manager.onload([b"a"], [2])
    manager.evict(1)
    manager.save([b"b"], [1])
    for other in s.pool.allocate(s.pool.num_free_blocks):
        s.fill_host(other, "other")
    read_layer_by_layer(s, load, 2, "a")
    manager.close()


SCENARIOS: dict[str, Callable[[Setting], None]] = {
    function.__name__: function
    for function in list(globals().values())
    if callable(function) and getattr(function, "__annotations__", {}) == {"s": "Setting", "return": "None"}
}


@contextlib.contextmanager
def fresh(chooser: Chooser | None = None, drop: Collection[str] = ()) -> Iterator[Setting]:
    setting = Setting(chooser, drop)
    try:
        yield setting
    finally:
        setting.clean()


def play(name: str, chooser: Chooser | None = None, drop: Collection[str] = ()) -> None:
    """Plays one scenario and checks everything."""
    with fresh(chooser, drop) as setting:
        try:
            SCENARIOS[name](setting)
            setting.finish()
        except OrderingError:
            raise
        except AssertionError as error:  # wrong bytes; the missing edge behind them says more
            findings = map(str, setting.simulation.findings())
            raise OrderingError("\n".join([str(error), *findings])) from error
