"""The calls of FastDeploy's cache manager, every byte of both sides compared."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import pytest

from paddle_kv import CancelledError, DeviceCache, LayerwiseScheduler, TransferError
from paddle_kv.integrations import CacheTransferManager
from paddle_kv.integrations.fastdeploy import LayerEvent
from paddle_kv.schedule.transfer import Transfer
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, Rig, in_threads

LAYERS = 5


@pytest.fixture
def scheduler(rig: Rig) -> Iterator[LayerwiseScheduler]:
    with LayerwiseScheduler(rig.cache, rig.pool) as made:
        yield made


def test_evicts_and_loads(rig: Rig, scheduler: LayerwiseScheduler) -> None:
    manager = CacheTransferManager(scheduler)
    assert manager.evict_to_host_async([3, 9], [11, 2])
    assert manager.load_layers_to_device_async(list(range(LAYERS)), [2, 11, 7], [0, 1, 4])
    manager.sync_input_stream()
    manager.sync_output_stream()
    rig.expect_offload([3, 9], [11, 2])
    rig.expect_onload([2, 11, 7], [0, 1, 4])
    rig.check()


def test_events_stand_for_their_layer(rig: Rig, scheduler: LayerwiseScheduler, copies: Copies) -> None:
    """As its controller uses them: an event recorded in the callback, waited for before the layer."""
    manager, events = CacheTransferManager(scheduler), {}
    copies.hold("onload", 2)

    def on_layer_complete(layer: int) -> None:
        events[layer] = manager.record_input_stream_event()

    load = manager.load_layers_to_device_async(range(LAYERS), [3], [0], on_layer_complete)
    assert list(events) == list(range(LAYERS))
    for layer in (0, 1):
        events[layer].synchronize()  # would hang if it waited for layer 2
        assert ("onload", (0,), layer) in copies.done
    assert not load.done()
    behind = manager.record_input_stream_event()
    assert not behind.done()
    copies.go_on()
    events[4].synchronize()
    assert ("onload", (0,), 4) in copies.done
    assert behind.wait(WAIT_S)
    load.wait(WAIT_S)


def test_failures_raise(scheduler: LayerwiseScheduler, copies: Copies) -> None:
    manager = CacheTransferManager(scheduler)
    with pytest.raises(ValueError, match="layer_indices names block 2 more than once"):
        manager.load_layers_to_device_async([0, 2, 2], [0], [0])
    with pytest.raises(IndexError, match=r"layer_indices\[1\] = 5 must be in"):
        manager.load_layers_to_device_async([0, 5], [0], [0])
    with pytest.raises(IndexError, match="host_block_ids"):
        manager.evict_to_host_async([0], [17])
    copies.fail("offload", 1, OSError("lost"))
    with pytest.raises(TransferError):
        manager.evict_to_host_async([0], [1])
    manager.evict_to_host_async([0], [1], order_compute=False)
    with pytest.raises(TransferError):
        manager.sync_output_stream()
    manager.sync_output_stream()  # it was told


def test_refuses_a_callback_before_anything_moves(rig: Rig, scheduler: LayerwiseScheduler) -> None:
    manager = CacheTransferManager(scheduler)
    with pytest.raises(TypeError, match="on_layer_complete is 3"):
        manager.load_layers_to_device_async(range(LAYERS), [3], [0], 3)  # type: ignore[arg-type]
    assert scheduler.stats()["onload_transfers"] == 0
    rig.check()


def test_events_behind_all_loads_can_be_synchronized(rig: Rig, scheduler: LayerwiseScheduler, copies: Copies) -> None:
    manager = CacheTransferManager(scheduler)
    copies.hold("onload", 4)
    manager.load_layers_to_device_async(range(LAYERS), [3], [0])
    event = manager.record_input_stream_event()
    waiting = threading.Thread(target=event.synchronize)
    waiting.start()
    waiting.join(SHORT_S)
    assert waiting.is_alive()
    copies.go_on()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    rig.expect_onload([3], [0])
    rig.check()


def test_orders_what_follows_a_save_whose_result_is_dropped(
    rig: Rig, scheduler: LayerwiseScheduler, copies: Copies
) -> None:
    """The device block is written by the model, and loaded into, right behind the call."""
    manager = CacheTransferManager(scheduler)
    copies.hold("offload", 3)
    threading.Timer(SHORT_S, copies.go_on).start()
    manager.evict_to_host_async([3], [11])
    rig.expect_offload([3], [11])
    rig.write_device(3)
    manager.load_layers_to_device_async(range(LAYERS), [4], [3])
    manager.sync_input_stream()
    rig.expect_onload([4], [3])
    rig.check()


def test_failed_transfers_are_not_kept(scheduler: LayerwiseScheduler, copies: Copies) -> None:
    manager = CacheTransferManager(scheduler)
    copies.fail("onload", 1, OSError("lost"))
    for _ in range(20):
        load = manager.load_layers_to_device_async(range(LAYERS), [3], [0])
        with pytest.raises(TransferError):
            load.wait(WAIT_S)
    assert len(manager._loads._transfers) == 1
    copies.heal()
    manager.load_layers_to_device_async(range(LAYERS), [3], [0])
    with pytest.raises(TransferError, match="lost"):  # the first that nobody has asked about
        manager.sync_input_stream()
    manager.sync_input_stream()


def test_the_first_failure_is_told_whatever_comes_behind_it(scheduler: LayerwiseScheduler, copies: Copies) -> None:
    manager = CacheTransferManager(scheduler)
    copies.fail("offload", 1, OSError("lost"))
    manager.evict_to_host_async([3], [11], order_compute=False).wait_over(WAIT_S)
    copies.heal()
    for block in (4, 5):
        manager.evict_to_host_async([block], [block])
    copies.fail("offload", 1, OSError("again"))
    with pytest.raises(TransferError, match="again"):
        manager.evict_to_host_async([6], [6])
    with pytest.raises(TransferError, match="lost"):
        manager.sync_output_stream()
    manager.sync_output_stream()


def test_events_belong_to_the_thread_that_loads(scheduler: LayerwiseScheduler) -> None:
    """Four threads submit at once: each event is one of the load of its own thread."""
    manager, meet = CacheTransferManager(scheduler), threading.Barrier(4)
    wrong: list[object] = []

    def serve(block: int) -> None:
        events: list[LayerEvent] = []

        def on_layer_complete(layer: int) -> None:
            meet.wait(WAIT_S)
            events.append(manager.record_input_stream_event())
            meet.wait(WAIT_S)

        load = manager.load_layers_to_device_async(range(LAYERS), [block], [block], on_layer_complete)
        for layer, event in enumerate(events):
            event.synchronize()
            if event._load is not load or event._layer != layer:
                wrong.append(event)
        manager.evict_to_host_async([block], [block + 4])
        manager.sync_input_stream()
        manager.sync_output_stream()

    in_threads(*[functools.partial(serve, block) for block in range(4)])
    assert wrong == []


def test_it_names_what_is_no_scheduler(rig: Rig) -> None:
    with pytest.raises(TypeError, match="scheduler is DeviceCache; a LayerwiseScheduler is expected"):
        CacheTransferManager(rig.cache)  # type: ignore[arg-type]


def test_it_takes_no_ring_of_layer_buffers(rig: Rig) -> None:
    ring = DeviceCache(rig.spec, 3, "cpu", layer_buffers=2)
    refused = pytest.raises(ValueError, match="has layer_buffers = 2 for 5 layers")
    with LayerwiseScheduler(ring, rig.pool) as scheduler, refused:
        CacheTransferManager(scheduler)


def test_some_layers_in_their_order(rig: Rig, scheduler: LayerwiseScheduler, copies: Copies) -> None:
    manager, called, events = CacheTransferManager(scheduler), [], {}
    copies.hold("onload", 3)

    def on_layer_complete(layer: int) -> None:
        called.append(layer)
        events[layer] = manager.record_input_stream_event()

    load = manager.load_layers_to_device_async([3, 1], [2, 11], [0, 1], on_layer_complete)
    assert called == [3, 1]
    events[1].synchronize()
    assert ("onload", (0, 1), 1) in copies.done and not load.done()
    copies.go_on()
    events[3].synchronize()
    manager.sync_input_stream()
    rig.expect_onload([2, 11], [0, 1], [1, 3])
    rig.check()
    assert len(copies.done) == 2


def test_an_eviction_that_fails_returns_when_nothing_of_it_runs(
    rig: Rig, scheduler: LayerwiseScheduler, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are another request's from then on."""
    manager, told, offload = CacheTransferManager(scheduler), [], scheduler.offload
    is_cancelled = threading.Event()

    def cancelled(*given: list[int]) -> Transfer:
        save = offload(*given)
        assert copies.arrived.acquire(timeout=WAIT_S)  # its first layer is being copied
        save.cancel()
        is_cancelled.set()
        return save

    def evict() -> None:
        try:
            manager.evict_to_host_async([3], [11])
        except CancelledError as error:
            told.append(error)

    copies.hold("offload", 0)
    monkeypatch.setattr(scheduler, "offload", cancelled)
    thread = threading.Thread(target=evict)
    thread.start()
    assert is_cancelled.wait(WAIT_S)
    thread.join(SHORT_S)
    assert thread.is_alive()
    copies.go_on()
    thread.join(WAIT_S)
    assert len(told) == 1
    manager.sync_output_stream()  # it is told once
    rig.expect_offload([3], [11], [0])
    rig.check()


def test_close_waits_for_its_own(rig: Rig, scheduler: LayerwiseScheduler, copies: Copies) -> None:
    save = scheduler.offload([5], [2], layerwise=True)  # of somebody else, who has not computed yet
    manager = CacheTransferManager(scheduler)
    copies.hold("onload", 3)
    copies.hold("offload", 4)
    manager.load_layers_to_device_async(range(LAYERS), [3], [0])
    evicted = manager.evict_to_host_async([7], [9], order_compute=False)
    for direction, delay_s in (("onload", SHORT_S), ("offload", 4 * SHORT_S)):
        threading.Timer(delay_s, copies.go_on, [direction]).start()
    manager.close()
    assert ("onload", (0,), 4) in copies.done and evicted.done() and not save.done()
    save.cancel()


def test_close_waits_for_an_eviction_whose_caller_was_interrupted(
    rig: Rig, scheduler: LayerwiseScheduler, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory may be freed behind it."""

    def interrupted(transfer: Transfer) -> None:
        raise KeyboardInterrupt

    manager = CacheTransferManager(scheduler)
    copies.hold("offload", 4)
    monkeypatch.setattr(Transfer, "wait_on", interrupted)
    with pytest.raises(KeyboardInterrupt):
        manager.evict_to_host_async([7], [9])
    threading.Timer(SHORT_S, copies.go_on).start()
    manager.close()
    assert ("offload", (7,), 4) in copies.done
    rig.expect_offload([7], [9])
    rig.check()


@pytest.mark.parametrize("blocks", [[3], []])
@pytest.mark.parametrize("layers", [[LAYERS], [0, -1], [1, -4], [-1, -2], [2**62, 0]])
def test_layers_that_are_not_there(
    rig: Rig, scheduler: LayerwiseScheduler, layers: list[int], blocks: list[int]
) -> None:
    called: list[int] = []
    with pytest.raises(IndexError, match=rf"layer_indices\[\d\] = -?\d+ must be in \[0, {LAYERS}\)"):
        CacheTransferManager(scheduler).load_layers_to_device_async(layers, blocks, blocks, called.append)
    assert not called and not scheduler.in_flight()
    rig.check()
