"""The process at the other end of a fabric, and the handle of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ...layout import KVCacheSpec
from ...memory import HostPool
from ...peers.fabrics import Fabric, describe

WAIT_S = 60.0
POISON = 0xDE
SPEC = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=64, block_size=16, dtype="uint8")  # 1 KiB a tensor


def serve(pipe: Connection, make_fabric: Callable[[], Fabric], num_blocks: int) -> None:
    """Has a pool that others write to, and shows its bytes."""
    pool = HostPool(SPEC, num_blocks, shared=True)
    keys = pool.bytes_at(pool.pointer("key", 0), num_blocks * SPEC.tensor_block_bytes("key"))
    keys[:] = POISON
    fabric = make_fabric()
    pipe.send(describe(fabric, pool))
    while (order := pipe.recv()) is not None:
        if order == "bytes":
            pipe.send(keys.tobytes())
        else:
            keys[:] = POISON
            pipe.send(None)
    fabric.close(WAIT_S)
    pool.close()


class OtherProcess:
    """Of the suite.

    Args:
        start: ``start(function, *arguments)`` calls the function in a process, and returns that.
        make_fabric: what can be sent there.
        num_blocks: of its pool.
    """

    def __init__(self, start: Callable[..., Any], make_fabric: Callable[[], Fabric], num_blocks: int) -> None:
        self._pipe, there = multiprocessing.Pipe()
        self.process = start(serve, there, make_fabric, num_blocks)
        there.close()
        self.remote = self._answer()

    def bytes(self) -> np.ndarray:
        """Of its keys."""
        self._pipe.send("bytes")
        return np.frombuffer(self._answer(), np.uint8)

    def poison(self) -> None:
        self._pipe.send("poison")
        self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)

    def end(self) -> None:
        self._pipe.send(None)
        self.process.join(WAIT_S)

    def _answer(self) -> Any:
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError("the other process does not answer")
        return self._pipe.recv()
