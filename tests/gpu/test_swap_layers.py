"""transfer_layers on the GPU: layer after layer on the stream that is named, with the events that are handed in."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from paddle_kv.ops._library import call
from tests.gpu.delay import busy
from tests.machine import Machine
from tests.ops.swap_conformance import Layer
from tests.reference.swap import TO_DEVICE, TO_HOST

LAYERS, LONG_MS = 4, 100.0
IDS = ([4, 0, 2], [1, 5, 3])
PLAN_NUMBERS = itertools.count(20_000)


class Plan:
    def __init__(self, machine: Machine) -> None:
        import cupy

        self.layers = [Layer(machine, 5, 6, (1, 4099), "uint8", misalignment=i, seed=i) for i in range(LAYERS)]
        self.number = next(PLAN_NUMBERS)
        block_bytes = [4099]
        call(
            "register_transfer_plan",
            self.number,
            0,
            5,
            6,
            [layer.cache.tensor.data_ptr() for layer in self.layers],
            [layer.host.address for layer in self.layers],
            block_bytes,
            block_bytes,
            block_bytes,
        )
        self.events = [cupy.cuda.Event(disable_timing=True) for _ in range(LAYERS)]

    def transfer(self, direction: int, stream: Any, **changed: Any) -> None:
        arguments = {
            "number": self.number,
            "direction": direction,
            "device_ids": IDS[0],
            "host_ids": IDS[1],
            "first_layer": 0,
            "end_layer": LAYERS,
            "layers_per_event": 1,
            "wait_events": [],
            "waits_per_group": [0] * LAYERS,
            "start_event": 0,
            "record_events": [event.ptr for event in self.events],
            "stream": stream.ptr,
        }
        call("transfer_layers", *{**arguments, **changed}.values())


@pytest.fixture
def plan(machine: Machine, paddle_stream: int):
    plan = Plan(machine)
    yield plan
    machine.synchronize()
    call("release_transfer_plan", plan.number)


@pytest.mark.parametrize("direction", [TO_HOST, TO_DEVICE])
@pytest.mark.parametrize("layers_per_event", [1, 3, 9])
def test_layers(plan: Plan, direction: int, layers_per_event: int, other_stream: Any) -> None:
    groups = -(-LAYERS // layers_per_event)
    plan.transfer(
        direction,
        other_stream,
        layers_per_event=layers_per_event,
        waits_per_group=[0] * groups,
        record_events=[event.ptr for event in plan.events[:groups]],
    )
    plan.events[groups - 1].synchronize()
    for layer in plan.layers:
        layer.check(*IDS, direction)


def test_each_group_waits_for_its_own_events_only(plan: Plan, other_stream: Any, machine: Machine) -> None:
    """Layer 2 waits for a busy stream: layers 0 and 1 arrive before it, 2 and 3 behind."""
    import cupy

    producer, gate = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
    plan.transfer(TO_HOST, other_stream)
    machine.synchronize()
    for layer in plan.layers:
        layer.host.refill()
    busy(producer, LONG_MS)
    gate.record(producer)
    plan.transfer(TO_HOST, other_stream, wait_events=[gate.ptr], waits_per_group=[0, 0, 1, 0])
    plan.events[1].synchronize()
    assert not gate.done, "the delay is too short to show anything"
    for layer in plan.layers[:2]:
        layer.check(*IDS, TO_HOST)
    for layer in plan.layers[2:]:
        layer.host.check(layer.host_bits)
    assert not plan.events[2].done
    plan.events[3].synchronize()
    assert gate.done
    for layer in plan.layers:
        layer.check(*IDS, TO_HOST)


@pytest.mark.parametrize(
    "changed",
    [
        {"waits_per_group": [0] * 3},
        {"waits_per_group": [0] * 5},
        {"waits_per_group": [1, 0, 0, 0]},
        {"waits_per_group": [-1, 1, 0, 0]},
        {"record_events": []},
    ],
)
def test_event_lists_that_do_not_fit(plan: Plan, changed: dict, other_stream: Any) -> None:
    with pytest.raises(ValueError, match="the event lists do not fit the 4 groups of layers"):
        plan.transfer(TO_HOST, other_stream, **changed)
    other_stream.synchronize()
    for layer in plan.layers:
        layer.check_untouched()
    plan.transfer(TO_HOST, other_stream)
    other_stream.synchronize()
    for layer in plan.layers:
        layer.check(*IDS, TO_HOST)


def test_no_blocks_still_records_the_events(plan: Plan, other_stream: Any) -> None:
    busy(other_stream, LONG_MS)
    plan.transfer(TO_HOST, other_stream, device_ids=[], host_ids=[])
    assert not plan.events[3].done
    other_stream.synchronize()
    assert np.all([event.done for event in plan.events])
    for layer in plan.layers:
        layer.check_untouched()
