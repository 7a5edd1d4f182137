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
