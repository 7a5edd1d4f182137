"""The blocks of a host pool as NumPy arrays over its memory, for those who look at many of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .host_pool import HostPool


class Rows:
    """Blocks at a stride in memory that somebody else owns, as NumPy wants to see them."""

    def __init__(self, address: int, num_blocks: int, block_bytes: int, stride_bytes: int) -> None:
        self.__array_interface__ = {
            "shape": (num_blocks, block_bytes),
            "strides": (stride_bytes, 1),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def host_rows(pool: HostPool) -> list[list[np.ndarray]]:
    """``[layer][tensor]``, each uint8 ``[num_blocks, bytes of a block]`` and writable. The pool has to stay open."""
    spec = pool.spec
    return [
        [
            np.asarray(
                Rows(pool.pointer(name, layer), pool.num_blocks, spec.tensor_block_bytes(name), pool.stride_bytes(name))
            )
            for name in spec.tensor_names
        ]
        for layer in range(spec.num_layers)
    ]


def block_rows(pool: HostPool) -> np.ndarray:
    """uint8 ``[num_blocks, bytes of all layers of a block]`` over a block-first pool, whose own memory it keeps alive.

    Raises:
        ValueError: the layers of a block are not adjacent.
    """
    spec = pool.spec
    names, size = spec.tensor_names, spec.num_layers * spec.block_bytes
    stride = size + pool.room_bytes
    start = pool.pointer(names[0], 0)
    for name in names:
        offset = spec.tensor_offset_bytes(name)
        apart = [pool.pointer(name, layer) - start - offset for layer in range(spec.num_layers)]
        if pool.stride_bytes(name) != stride or apart != [layer * spec.block_bytes for layer in range(spec.num_layers)]:
            raise ValueError("the layers of a block are not adjacent in the pool; make it with layout='block_first'")
    return rows_with_room(pool)[:, pool.room_bytes :]


def rows_with_room(pool: HostPool) -> np.ndarray:
    """The same with the room before each block: ``pool.room_bytes``."""
    spec = pool.spec
    stride = pool.room_bytes + spec.num_layers * spec.block_bytes
    start = pool.pointer(spec.tensor_names[0], 0) - pool.room_bytes
    return pool.bytes_at(start, pool.num_blocks * stride).reshape(pool.num_blocks, stride)
