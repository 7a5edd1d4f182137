"""The pointers of a pair of pools, registered once with the compiled library and named by a number from then on."""

from __future__ import annotations

import itertools
from typing import Any

from ..layout import differences
from ..ops._library import call
from . import transfer_queue
from .work import Direction, TransferPlan

DIRECTION_CODES: dict[Direction, int] = {"offload": 0, "onload": 1}

_numbers = itertools.count(1)


def register(device_cache: Any, host_pool: Any, device: int) -> int:
    """``device`` is the CUDA ordinal, -1 where the device cache lies in RAM.

    Raises:
        ValueError: the pools have different specs, or the GPU cannot reach the host memory.
    """
    spec = device_cache.spec
    if host_pool.spec != spec:
        of_pool, of_cache = differences(host_pool.spec, spec)
        raise ValueError(f"host_pool has {of_pool}, device_cache has {of_cache}; both must have the same spec")
    number = next(_numbers)
    names, layers = spec.tensor_names, range(spec.num_layers)
    plan = (
        number,
        device,
        device_cache.num_blocks,
        host_pool.num_blocks,
        [device_cache.pointer(name, layer) for layer in layers for name in names],
        [host_pool.pointer(name, layer) for layer in layers for name in names],
        [spec.tensor_block_bytes(name) for name in names],
        [host_pool.stride_bytes(name) for name in names],
        [host_pool.moved_block_bytes(name) for name in names],
    )
    if device < 0 or host_pool.in_host_memory or not any(plan[-1]):
        call("register_transfer_plan", *plan)
    else:
        transfer_queue.register_device_plan(*plan, on_other_gpu=host_pool.on_other_gpu)
    return number


def release(number: int) -> None:
    call("release_transfer_plan", number)


def copy(number: int, plan: TransferPlan, layers: range) -> None:
    """Copies the layers in the calling thread, without a stream (device in RAM only)."""
    direction = DIRECTION_CODES[plan.direction]
    call("transfer_layers", number, direction, *plan.id_lists, layers.start, layers.stop)
