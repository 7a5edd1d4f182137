"""FastDeploy's controller on ours: with each part of the patch left out what goes wrong, with all of it nothing."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_kv import LayerwiseScheduler, TransferError
from paddle_kv.backend import binding
from paddle_kv.integrations import CacheTransferManager
from tests.integrations.fastdeploy_server import PATCH, Controller, LayerCounter, LayerSwapTimeoutError, Swap
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, Rig, cache_memory

LAYERS, HIDDEN = 5, 4  # the last layer is one of a draft model

Make = Callable[..., Controller]


@pytest.fixture
def make(rig: Rig) -> Iterator[Make]:
    """``make("part", ...)``: a controller without these parts of the patch."""
    made: list[Controller] = []
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:

        def controller(*without: str, **given: Any) -> Controller:
            assert PATCH.issuperset(without)
            made.append(Controller(CacheTransferManager(scheduler), HIDDEN, PATCH.difference(without), **given))
            return made[-1]

        yield controller
        for one in made:
            one.close()


def load(controller: Controller, host: list[int], device: list[int]) -> tuple[LayerCounter, Swap]:
    swap = Swap(host, device)
    counter = controller.submit_swap_tasks(None, swap)
    assert counter is not None
    controller.executor.submit(lambda: None).result(WAIT_S) if "in order" in controller._patched else time.sleep(
        SHORT_S
    )
    return counter, swap


def layer_is_stale(rig: Rig, layer: int, block: int) -> bool:
    memory = cache_memory(rig.cache)
    return any((memory[name][layer, block] != rig.device[name][layer, block]).any() for name in memory)


def test_all_is_loaded_and_saved(rig: Rig, make: Make) -> None:
    controller = make()
    controller.submit_swap_tasks(Swap([3, 9], [11, 2]), None)
    counter, swap = load(controller, [2, 7], [0, 1])
    for layer in range(LAYERS):
        assert counter.wait_for_layer(layer)
    rig.expect_offload([3, 9], [11, 2])
    rig.expect_onload([2, 7], [0, 1])
    controller.manager.sync_input_stream()
    rig.check()
    assert swap.success is True  # a Transfer could not be sent to the scheduler's process


@pytest.mark.parametrize("patched", [False, True])
def test_a_counter_that_is_cleaned_up_early(rig: Rig, make: Make, copies: Copies, patched: bool) -> None:
    """Behind the submission the original forgets the events, and a flag answers for them."""
    controller = make() if patched else make("events live")
    copies.hold("onload", 2)
    counter, _ = load(controller, [3], [0])
    rig.expect_onload([3], [0])
    threading.Timer(SHORT_S, copies.go_on).start() if patched else None
    assert counter.wait_for_layer(2)
    assert layer_is_stale(rig, 2, 0) is not patched
    copies.go_on()
    controller.manager.sync_input_stream()
    rig.check()


@pytest.mark.parametrize("patched", [False, True])
def test_a_failure_that_is_swallowed(rig: Rig, make: Make, copies: Copies, patched: bool) -> None:
    controller = make() if patched else make("errors raise")
    copies.fail("onload", 2, OSError("lost"))
    counter, _ = load(controller, [3], [0])
    with pytest.raises(TransferError):
        controller.manager.sync_input_stream()
    if patched:
        with pytest.raises(TransferError, match="lost"):
            counter.wait_for_layer(2)
    else:
        rig.expect_onload([3], [0], [2])
        assert counter.wait_for_layer(2) and layer_is_stale(rig, 2, 0)


@pytest.mark.parametrize("patched", [False, True])
def test_a_load_that_cannot_be_submitted(make: Make, patched: bool) -> None:
    controller = make() if patched else make("errors raise")
    counter, swap = load(controller, [99], [0])
    assert swap.success is False
    with pytest.raises(IndexError if patched else LayerSwapTimeoutError):
        counter.wait_for_layer(0, SHORT_S)


@pytest.mark.parametrize("patched", [False, True])
def test_a_save_that_the_pool_of_threads_begins_late(rig: Rig, make: Make, patched: bool) -> None:
    """The model writes the evicted block behind the call, as its new owner; the threads have other work."""
    controller, gate = make() if patched else make("in order"), threading.Event()
    for _ in range(4):
        controller.executor.submit(gate.wait, WAIT_S)
    controller.submit_swap_tasks(Swap([3], [11]), None)
    if patched:
        rig.expect_offload([3], [11])
    rig.write_device(3)
    if not patched:
        rig.expect_offload([3], [11])  # what nobody wanted
    gate.set()
    controller._wait_for_evictions()
    controller.manager.sync_output_stream()
    rig.check()


@pytest.mark.parametrize("patched", [False, True])
def test_a_load_that_overtakes_the_save_of_its_block(rig: Rig, make: Make, patched: bool) -> None:
    """One step gives a device block away and loads another request into it."""
    controller, slow = make() if patched else make("in order"), threading.Event()
    evict = controller.manager.evict_to_host_async

    def late(device_ids: Any, host_ids: Any) -> Any:
        if not patched:
            assert slow.wait(WAIT_S)  # its thread lost the processor
        return evict(device_ids, host_ids)

    controller.manager.evict_to_host_async = late  # type: ignore[method-assign]
    counter = controller.submit_swap_tasks(Swap([3], [11]), Swap([4], [3]))
    assert counter is not None
    for layer in range(LAYERS):
        assert counter.wait_for_layer(layer, WAIT_S)
    slow.set()
    if patched:
        rig.expect_offload([3], [11])
        rig.expect_onload([4], [3])
    else:
        rig.expect_onload([4], [3])
        rig.expect_offload([3], [11])  # the other request's
    controller._wait_for_evictions()
    controller.manager.sync_output_stream()
    rig.check()


@pytest.mark.parametrize("patched", [False, True])
def test_a_save_that_nobody_waits_for(make: Make, copies: Copies, patched: bool) -> None:
    """The counter of an eviction says when its bytes are there only where it keeps the transfer."""
    controller = make() if patched else make("saves are waited for")
    evict = controller.manager.evict_to_host_async
    controller.manager.evict_to_host_async = lambda *ids: evict(*ids, order_compute=False)  # type: ignore
    copies.hold("offload", 3)
    controller.submit_swap_tasks(Swap([3], [11]), None)
    [counter] = controller.pending_evictions
    if patched:
        with pytest.raises(TimeoutError):
            counter.wait_all(SHORT_S)
    else:
        assert counter.wait_all(SHORT_S)
    copies.go_on()
    assert counter.wait_all(WAIT_S)


@pytest.mark.parametrize("patched", [False, True])
def test_a_save_that_fails(make: Make, copies: Copies, patched: bool) -> None:
    """In the original the next step waits for it, for five minutes."""
    controller = make() if patched else make("errors raise")
    copies.fail("offload", 1, OSError("lost"))
    controller.submit_swap_tasks(Swap([3], [11]), None)
    [counter] = controller.pending_evictions
    with pytest.raises(TransferError if patched else LayerSwapTimeoutError):
        counter.wait_all(SHORT_S)
    controller.pending_evictions.clear()


@pytest.mark.parametrize("patched", [False, True])
def test_nothing_to_do(make: Make, patched: bool) -> None:
    counter, swap = load(make() if patched else make("nothing to do"), [], [])
    assert swap.success is False
    if patched:
        assert counter.wait_for_layer(0, SHORT_S)
    else:
        with pytest.raises(LayerSwapTimeoutError):
            counter.wait_for_layer(0, SHORT_S)


@pytest.mark.parametrize("patched", [False, True])
def test_layers_of_a_draft_model(rig: Rig, make: Make, patched: bool) -> None:
    controller = make() if patched else make("all layers")
    load(controller, [3], [0])
    controller.manager.sync_input_stream()
    rig.expect_onload([3], [0])
    assert layer_is_stale(rig, LAYERS - 1, 0) is not patched
    assert not layer_is_stale(rig, HIDDEN - 1, 0)


def test_memory_is_freed_behind_what_moves(rig: Rig, make: Make, copies: Copies) -> None:
    controller = make()
    copies.hold("onload", 3)
    load(controller, [3], [0])
    closing = threading.Thread(target=controller.manager.close)
    closing.start()
    closing.join(SHORT_S)
    assert closing.is_alive()
    copies.go_on()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    rig.expect_onload([3], [0])
    rig.check()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_steps_at_random(rig: Rig, make: Make, monkeypatch: pytest.MonkeyPatch, write_policy: str) -> None:
    """Each step evicts and loads; the model compares what it loaded, and writes over what was given away."""
    choose, copy = random.Random(5), binding.copy

    def late(*given: Any) -> None:
        time.sleep(choose.choice([0.0, 0.0, 0.0003]))
        copy(*given)

    monkeypatch.setattr(binding, "copy", late)
    controller = make(write_policy=write_policy)
    for step in range(120):
        device, host = choose.sample(range(13), 4), choose.sample(range(17), 5)
        counter = controller.submit_swap_tasks(Swap(device[:2], host[:2]), Swap(host[1:4], device[1:]))
        rig.expect_offload(device[:2], host[:2])
        rig.expect_onload(host[1:4], device[1:])
        rig.write_device(device[0], value=step)
        assert counter is not None
        for layer in range(LAYERS):
            counter.wait_for_layer(layer)
            for name in rig.spec.tensor_names:
                found = rig.cache.tensor(name, layer).numpy()[device[1:]]
                expected = rig.device[name][layer, device[1:]]
                np.testing.assert_array_equal(found.view(np.uint8).reshape(expected.shape), expected)
    controller.manager.sync_output_stream()
    rig.check()


@pytest.mark.parametrize("patched", [False, True])
def test_a_save_that_failed_is_told_once(rig: Rig, make: Make, copies: Copies, patched: bool) -> None:
    controller = make() if patched else make("told once")
    copies.fail("offload", 1, OSError("lost"))
    controller.submit_swap_tasks(Swap([3], [11]), None)
    copies.heal()
    for step in range(3):
        if step == 0 or not patched:
            with pytest.raises(TransferError, match="lost"):
                controller.submit_swap_tasks(None, None)
        else:
            controller.submit_swap_tasks(None, None)
    counter = controller.submit_swap_tasks(None, Swap([11], [0])) if patched else None
    if counter is not None:
        with pytest.raises(TransferError, match="block 11 of the host pool holds no usable data"):
            counter.wait_for_layer(0)
    controller.pending_evictions.clear()


def test_the_guide_has_the_patch_with_a_reason_for_each_part() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs/guides/fastdeploy.md").read_text()
    patches = re.findall(r"^```diff\n(.*?)^```$", guide, re.S | re.M)
    changed = [line for patch in patches for line in patch.splitlines() if re.match(r"[+-](?!--)", line)]
    assert len(patches) == 2  # the second one for a storage
    assert 0 < len(changed) <= 60
    assert PATCH.issubset(re.findall(r"^\| ([a-z ]+) \| .+ \| .+ \|$", guide, re.M))
