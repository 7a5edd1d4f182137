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
    pieces = [1] * len(spec.tensor_names)  # in which a block lies on both sides
    if device_cache.is_part or host_pool.is_part:
        pieces = [spec.head_pieces(name) for name in spec.tensor_names]
    moved = [
        (name, piece, count) for name, count in zip(spec.tensor_names, pieces, strict=True) for piece in range(count)
    ]

    def pointers(memory: Any) -> list[int]:
        steps = [(name, piece and piece * memory.piece_stride_bytes(name)) for name, piece, _ in moved]
        return [memory.pointer(name, layer) + step for layer in range(spec.num_layers) for name, step in steps]

    plan = (
        number,
        device,
        device_cache.num_blocks,
        host_pool.num_blocks,
        pointers(device_cache),
        pointers(host_pool),
        [device_cache.stride_bytes(name) for name, _, _ in moved],
        [host_pool.stride_bytes(name) for name, _, _ in moved],
        [host_pool.moved_block_bytes(name) // count for name, _, count in moved],
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
