"""register_transfer_plan, transfer_layers, release_transfer_plan: what the scheduler calls, without the scheduler."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from paddle_kv.ops._library import call
from tests.machine import POISON

LAYERS, DEVICE_BLOCKS, HOST_BLOCKS = 4, 5, 6
BLOCK_BYTES = [17, 24]  # two tensors a layer, which differ
TO_HOST, TO_DEVICE = 0, 1
PLAN_NUMBERS = itertools.count(10_000)


class Plan:
    """Device memory: each tensor by itself. Host memory: block first, so that strides are not block sizes."""

    def __init__(self) -> None:
        random = np.random.default_rng(3)
        self.device = [
            [random.integers(0, 256, (DEVICE_BLOCKS, size), np.uint8) for size in BLOCK_BYTES] for _ in range(LAYERS)
        ]
        row = LAYERS * sum(BLOCK_BYTES) + 3  # 3 bytes that belong to nobody
        self.host = random.integers(0, 256, (HOST_BLOCKS, row), np.uint8)
        self.host[:, -3:] = POISON
        self.offsets = [
            [layer * sum(BLOCK_BYTES) + sum(BLOCK_BYTES[:t]) for t in range(len(BLOCK_BYTES))]
            for layer in range(LAYERS)
        ]
        self.number = next(PLAN_NUMBERS)
        self.register()

    def register(self, **changed: Any) -> None:
        arguments = {
            "number": self.number,
            "device": -1,
            "device_blocks": DEVICE_BLOCKS,
            "host_blocks": HOST_BLOCKS,
            "device_pointers": [tensor.ctypes.data for layer in self.device for tensor in layer],
            "host_pointers": [self.host.ctypes.data + offset for layer in self.offsets for offset in layer],
            "device_strides": BLOCK_BYTES,
            "host_strides": [self.host.shape[1]] * 2,
            "block_bytes": BLOCK_BYTES,
        }
        call("register_transfer_plan", *{**arguments, **changed}.values())

    def transfer(self, direction: int, device_ids: list[int], host_ids: list[int], **changed: Any) -> None:
        arguments = {
            "number": self.number,
            "direction": direction,
            "device_ids": device_ids,
            "host_ids": host_ids,
            "first_layer": 0,
            "end_layer": LAYERS,
        }
        call("transfer_layers", *{**arguments, **changed}.values())

    def snapshot(self) -> tuple[list[list[np.ndarray]], np.ndarray]:
        return [[tensor.copy() for tensor in layer] for layer in self.device], self.host.copy()

    def expect(self, before: Any, direction: int, device_ids: list[int], host_ids: list[int], layers: Any) -> None:
        device, host = before
        for layer, t in itertools.product(layers, range(len(BLOCK_BYTES))):
            part = slice(self.offsets[layer][t], self.offsets[layer][t] + BLOCK_BYTES[t])
            for device_id, host_id in zip(device_ids, host_ids, strict=True):
                if direction == TO_HOST:
                    host[host_id, part] = device[layer][t][device_id]
                else:
                    device[layer][t][device_id] = host[host_id, part]
        np.testing.assert_array_equal(self.host, host)
        for got, expected in zip(self.device, device, strict=True):
            for tensor, expected_tensor in zip(got, expected, strict=True):
                np.testing.assert_array_equal(tensor, expected_tensor)


@pytest.fixture
def plan():
    plan = Plan()
    yield plan
    call("release_transfer_plan", plan.number)


@pytest.mark.parametrize("direction", [TO_HOST, TO_DEVICE])
@pytest.mark.parametrize("layers", [(0, 4), (1, 3), (3, 4), (2, 2)])
@pytest.mark.parametrize("ids", [([4, 0, 2], [1, 5, 0]), ([], []), ([0, 1, 2], [3, 4, 5])])
def test_layers(plan: Plan, direction: int, layers: tuple[int, int], ids: tuple[list[int], list[int]]) -> None:
    before = plan.snapshot()
    plan.transfer(direction, *ids, first_layer=layers[0], end_layer=layers[1])
    plan.expect(before, direction, *ids, range(*layers))


@pytest.mark.parametrize(
    ("direction", "device_ids", "host_ids", "changed", "error", "text"),
    [
        (TO_HOST, [5], [0], {}, IndexError, r"device_block_ids\[0\] = 5 must be in \[0, 5\)"),
        (TO_HOST, [0, -1], [0, 1], {}, IndexError, r"device_block_ids\[1\] = -1 must be in \[0, 5\)"),
        (TO_DEVICE, [0], [6], {}, IndexError, r"host_block_ids\[0\] = 6 must be in \[0, 6\)"),
        (TO_HOST, [0, 1], [0], {}, ValueError, r"device_block_ids has 2 ids, host_block_ids has 1"),
        (TO_HOST, [0, 1], [3, 3], {}, ValueError, r"host_block_ids names block 3 more than once"),
        (TO_DEVICE, [2, 2], [0, 1], {}, ValueError, r"device_block_ids names block 2 more than once"),
        (2, [0], [0], {}, ValueError, r"direction = 2 must be 0"),
        (-1, [0], [0], {}, ValueError, r"direction = -1 must be 0"),
        (TO_HOST, [0], [0], {"first_layer": -1}, ValueError, r"layers \[-1, 4\) must lie in \[0, 4\)"),
        (TO_HOST, [0], [0], {"end_layer": 5}, ValueError, r"layers \[0, 5\) must lie in \[0, 4\)"),
        (TO_HOST, [0], [0], {"first_layer": 3, "end_layer": 2}, ValueError, r"layers \[3, 2\)"),
        (TO_HOST, [0], [0], {"number": -7}, ValueError, r"plan = -7 is not registered"),
    ],
)
def test_wrong_arguments(
    plan: Plan, direction: int, device_ids: list, host_ids: list, changed: dict, error: type[Exception], text: str
) -> None:
    before = plan.snapshot()
    with pytest.raises(error, match=text):
        plan.transfer(direction, device_ids, host_ids, **changed)
    plan.expect(before, TO_HOST, [], [], range(LAYERS))
    plan.transfer(TO_HOST, [1], [2])
    plan.expect(before, TO_HOST, [1], [2], range(LAYERS))


@pytest.mark.parametrize("direction", [TO_HOST, TO_DEVICE])
def test_one_source_many_targets(plan: Plan, direction: int) -> None:
    sources, targets = [3, 3, 1], [0, 4, 2]
    ids = (sources, targets) if direction == TO_HOST else (targets, sources)
    before = plan.snapshot()
    plan.transfer(direction, *ids)
    plan.expect(before, direction, *ids, range(LAYERS))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"device_pointers": [0] * 8}, "names address 0"),
        ({"host_pointers": [-8] * 8}, "names address -8"),
        ({"host_pointers": [8] * 7}, "do not fit together"),
        ({"device_strides": [17]}, "do not fit together"),
        ({"block_bytes": []}, "do not fit together"),
        ({"block_bytes": [17, -24]}, "tensor 1 of a transfer plan has blocks of -24 bytes"),
        ({"host_strides": [16, 24]}, "tensor 0 of a transfer plan has blocks of 17 bytes"),
        ({"number": None}, "already registered"),
    ],
)
def test_plans_that_cannot_be(plan: Plan, changed: dict, text: str) -> None:
    number = plan.number if "number" in changed else next(PLAN_NUMBERS)
    with pytest.raises(ValueError, match=text):
        plan.register(**{**changed, "number": number})
    if number != plan.number:
        with pytest.raises(ValueError, match="is not registered"):
            plan.transfer(TO_HOST, [0], [0], number=number)
    before = plan.snapshot()
    plan.transfer(TO_HOST, [1], [2])
    plan.expect(before, TO_HOST, [1], [2], range(LAYERS))


def test_a_released_plan_is_gone_and_may_be_released_again(plan: Plan) -> None:
    call("release_transfer_plan", plan.number)
    before = plan.snapshot()
    with pytest.raises(ValueError, match=f"plan = {plan.number} is not registered"):
        plan.transfer(TO_HOST, [0], [0])
    plan.expect(before, TO_HOST, [], [], [])
    call("release_transfer_plan", plan.number)
    plan.register()
    plan.transfer(TO_HOST, [1], [2])
    plan.expect(before, TO_HOST, [1], [2], range(LAYERS))
