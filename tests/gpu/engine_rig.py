"""A registered pair of pools as raw memory, and transfers between them through the library's queue."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from paddle_kv.backend import transfer_queue
from paddle_kv.backend.cupy_backend import transfer_stream
from paddle_kv.backend.work import ENGINES
from paddle_kv.ops._library import call

TO_HOST, TO_DEVICE = 0, 1
GUARD = 256
PLAN_NUMBERS = itertools.count(20_000)


class Pools:
    """[layer][tensor] caches on the GPU, each guarded, and one page-locked piece of host memory.

    Host block i of a tensor starts at ``offset + i * stride``: in layer-first order the stride is the block's bytes, in
    block-first order a row with all layers of a block (and some bytes that belong to nobody), in page-first order that
    of one of the tensors.
    """

    def __init__(
        self,
        block_bytes: Sequence[int],
        *,
        layers: int = 4,
        device_blocks: int = 13,
        host_blocks: int = 17,
        order: str = "layer_first",
        misalignment: int = 0,
        seed: int = 1,
        fill: bool = True,
    ) -> None:
        self.block_bytes, self.layers = list(block_bytes), layers
        self.device_blocks, self.host_blocks = device_blocks, host_blocks
        self.random = np.random.default_rng(seed)
        sizes = np.array(self.block_bytes)
        if order == "block_first":
            row = layers * int(sizes.sum()) + 16
            starts = np.concatenate([[0], np.cumsum(np.tile(sizes, layers))[:-1]])
            self.strides = [row] * len(sizes)
            total = row * host_blocks
        elif order == "page_first":
            of_tensors = np.concatenate([[0], np.cumsum(layers * sizes * host_blocks + GUARD)[:-1]])
            starts = (of_tensors + np.arange(layers)[:, None] * sizes).ravel()
            self.strides = (layers * sizes).tolist()
            total = int((layers * sizes * host_blocks + GUARD).sum())
        else:
            starts = np.concatenate([[0], np.cumsum(np.tile(sizes * host_blocks + GUARD, layers))[:-1]])
            self.strides = self.block_bytes
            total = layers * int((sizes * host_blocks + GUARD).sum())
        self.offsets = (starts + GUARD + misalignment).reshape(layers, len(sizes)).tolist()
        pinned = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(total + 2 * GUARD + misalignment), 0)
        self.host = np.frombuffer(pinned, np.uint8, total + 2 * GUARD + misalignment)
        self.misalignment = misalignment
        self.device = [
            [cupy.empty(size * device_blocks + 2 * GUARD, np.uint8) for size in self.block_bytes] for _ in range(layers)
        ]
        self.number = next(PLAN_NUMBERS)
        call(
            "register_transfer_plan",
            self.number,
            0,
            device_blocks,
            host_blocks,
            [tensor.data.ptr + GUARD for layer in self.device for tensor in layer],
            [self.host.ctypes.data + offset for layer in self.offsets for offset in layer],
            self.block_bytes,
            list(self.strides),
            self.block_bytes,
        )
        if fill:
            self.refill()

    def _bits(self, size: int) -> np.ndarray:
        return self.random.integers(0, 1 << 64, -(-size // 8), np.uint64).view(np.uint8)[:size]

    def refill(self) -> None:
        self.host[:] = self._bits(self.host.size)
        self.device_bits = [[self._bits(tensor.size) for tensor in layer] for layer in self.device]
        for layer, bits in zip(self.device, self.device_bits, strict=True):
            for tensor, tensor_bits in zip(layer, bits, strict=True):
                tensor.set(tensor_bits)
        self.host_bits = self.host.copy()
        runtime.deviceSynchronize()

    def fill_blocks(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Zeros but for these blocks: for pools so large that drawing their bytes takes long."""
        self.host[:] = 0
        self.device_bits = [[np.zeros(tensor.size, np.uint8) for tensor in layer] for layer in self.device]
        for layer, (t, size) in itertools.product(range(self.layers), enumerate(self.block_bytes)):
            for host_id in host_ids:
                first = self.offsets[layer][t] + host_id * self.strides[t]
                self.host[first : first + size] = self._bits(size)
            for device_id in device_ids:
                first = GUARD + device_id * size
                self.device_bits[layer][t][first : first + size] = self._bits(size)
            self.device[layer][t].set(self.device_bits[layer][t])
        self.host_bits = self.host.copy()
        runtime.deviceSynchronize()

    def close(self) -> None:
        runtime.deviceSynchronize()
        call("release_transfer_plan", self.number)

    def expected(
        self, direction: int, device_ids: Sequence[int], host_ids: Sequence[int], layers: Sequence[int]
    ) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        host, device = self.host_bits.copy(), [[bits.copy() for bits in layer] for layer in self.device_bits]
        for layer, (t, size) in itertools.product(layers, enumerate(self.block_bytes)):
            for device_id, host_id in zip(device_ids, host_ids, strict=True):
                in_host = slice(first := self.offsets[layer][t] + host_id * self.strides[t], first + size)
                in_device = slice(first := GUARD + device_id * size, first + size)
                if direction == TO_HOST:
                    host[in_host] = self.device_bits[layer][t][in_device]
                else:
                    device[layer][t][in_device] = self.host_bits[in_host]
        return host, device

    def check(
        self, direction: int, device_ids: Sequence[int], host_ids: Sequence[int], layers: Sequence[int] | None = None
    ) -> None:
        """Every byte of both sides, those around and between included."""
        host, device = self.expected(direction, device_ids, host_ids, range(self.layers) if layers is None else layers)
        same(self.host, host)
        for got, want in zip(self.device, device, strict=True):
            for tensor, bits in zip(got, want, strict=True):
                same(tensor.get(), bits)

    def ids(self, count: int) -> tuple[list[int], list[int]]:
        """Shuffled ids of both sides."""
        return (
            self.random.permutation(self.device_blocks)[:count].tolist(),
            self.random.permutation(self.host_blocks)[:count].tolist(),
        )


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Bytes compared eight at a time."""
    words = got.size // 8 * 8
    if (got[:words].view(np.uint64) != want[:words].view(np.uint64)).any() or (got[words:] != want[words:]).any():
        np.testing.assert_array_equal(got, want)


class Queue:
    """A stream of the queue."""

    def __init__(self, *, urgent: bool = False) -> None:
        self.stream = transfer_stream()
        transfer_queue.open_stream(0, self.stream.ptr, urgent=urgent)
        self.start = cupy.cuda.Event()
        self.events: list[Any] = []  # they have to live until they are recorded

    def submit(
        self,
        pools: Pools,
        direction: int,
        device_ids: Sequence[int],
        host_ids: Sequence[int],
        *,
        engine: str = "auto",
        layers: range | None = None,
        layers_per_event: int = 1,
        waits: Sequence[Sequence[Any]] = (),
    ) -> list[Any]:
        """The events of the groups."""
        layers = range(pools.layers) if layers is None else layers
        groups = -(-len(layers) // layers_per_event)
        events = [cupy.cuda.Event() for _ in range(groups)]
        self.events += events
        transfer_queue.submit(
            plan=pools.number,
            direction=direction,
            engine=ENGINES.index(engine),
            device_ids=np.array(device_ids, np.int64),
            host_ids=np.array(host_ids, np.int64),
            layers=layers,
            layers_per_event=layers_per_event,
            waits=[[event.ptr for event in group] for group in waits] or [[]] * groups,
            start_event=self.start.ptr,
            record_events=[event.ptr for event in events],
            stream=self.stream.ptr,
        )
        return events

    def finish(self) -> None:
        """Blocks until everything is done; raises what went wrong."""
        transfer_queue.flush(self.stream.ptr)
        self.stream.synchronize()
        for event in self.events:
            while not transfer_queue.query(0, event.ptr):
                pass
        self.events.clear()

    def close(self) -> None:
        transfer_queue.close_stream(self.stream.ptr)
