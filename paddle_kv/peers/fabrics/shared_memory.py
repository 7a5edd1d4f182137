"""The fabric "shared_memory": memory that both processes map, on one host. It copies, and is what the others are
compared with."""

from __future__ import annotations

import json
from dataclasses import astuple
from operator import index

import numpy as np

from ...errors import AttachError, PeerError
from ...memory.shared_memory import SharedHandle, SharedMemory, map_shared, mapped_at
from ...ops.memcpy import vectorized_copy
from .protocol import Write
from .queued import QueuedSink


class SharedMemoryFabric:
    """See :class:`~paddle_kv.peers.fabrics.Fabric`. Only memory of pools that were made with ``shared=True`` can be
    written by others."""

    name = "shared_memory"

    def __init__(self) -> None:
        self._memory: dict[int, SharedMemory] = {}  # by its address
        self._sinks: list[_Sink] = []

    def register(self, memory: np.ndarray) -> None:
        one = mapped_at(memory.ctypes.data)
        if one is not None:  # other memory can be read from
            self._memory[one.address] = one

    def address(self) -> bytes:
        return json.dumps([[start, astuple(one.handle())] for start, one in self._memory.items()]).encode()

    def connect(self, address: bytes) -> _Sink:
        try:
            memory = [(index(start), map_shared(SharedHandle(*handle))) for start, handle in json.loads(address)]
        except (AttachError, ValueError, TypeError, RecursionError) as error:
            raise PeerError(f"the memory cannot be reached: {error}") from None
        sink = _Sink(memory)
        self._sinks.append(sink)
        return sink

    def close(self, timeout_s: float | None = None) -> None:
        for sink in self._sinks:
            sink.close(timeout_s)
        self._memory = {}


class _Sink(QueuedSink):
    def __init__(self, memory: list[tuple[int, SharedMemory]]) -> None:
        self._memory = memory
        super().__init__("paddle_kv-shared-memory-sink")

    def move(self, write: Write, first: int, end: int) -> None:
        targets, sizes = write.targets[first:end], write.sizes[first:end]
        here = np.zeros_like(targets)
        for start, one in self._memory:
            inside = (targets >= start) & (targets + sizes <= start + one.size_bytes)
            here[inside] = targets[inside] - start + one.address
        if not here.all():
            raise PeerError("a target does not lie in the memory of the other process")
        vectorized_copy(write.sources[first:end], here, sizes)

    def disconnect(self) -> None:
        self._memory = []
