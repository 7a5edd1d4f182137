"""A cache on the GPU and a page-locked pool with known content, "compute" made of a delay and plain memory calls, and
backends that leave out one wait each: what a wait is worth is seen by doing without it.

Compute uses memsetAsync and memcpyAsync alone: they load no kernel in the middle of a test, and Paddle 2.6's own
kernels return zeros on the newest GPUs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.backend.cupy_backend import CupyBackend
from paddle_kv.backend.work import LayerWork
from tests.gpu import delay
from tests.schedule.rig import Bits, assert_same, make_spec, moved, pool_memory, random_bits, set_pool

DELAY_MS = 80.0  # far longer than any copy here takes
WAIT_S = 20.0

ONLOAD, OFFLOAD = 0, 1  # positions in Watched.streams


class Watched(CupyBackend):
    """The backend as it is, but that each submission is one of a section; it remembers its streams, and which events
    lie on a compute stream."""

    submit_by_marks: Any = None
    start_alone: Any = None

    def __init__(self) -> None:
        super().__init__(0)
        self.streams: list[Any] = []
        self.compute_events: set[int] = set()

    def create_stream(self, *, urgent: bool = False) -> Any:
        self.streams.append(super().create_stream(urgent=urgent))
        return self.streams[-1]

    def record(self, event: int, stream: Any) -> None:
        on_compute = isinstance(stream, int)  # a compute stream is a raw handle
        (self.compute_events.add if on_compute else self.compute_events.discard)(event)
        super().record(event, stream)

    def copy_layers(self, binding: Any, work: LayerWork, stream: Any) -> None:
        self.compute_events -= {work.start, *work.records}
        super().copy_layers(binding, work, stream)


class WithoutComputeEvent(Watched):
    """Transfers do not wait for the compute stream."""

    def copy_layers(self, binding: Any, work: LayerWork, stream: Any) -> None:
        waits = [[event for event in events if event not in self.compute_events] for events in work.waits]
        super().copy_layers(binding, dataclasses.replace(work, waits=waits), stream)


class WithoutDependency(Watched):
    """Transfers do not wait for each other."""

    def copy_layers(self, binding: Any, work: LayerWork, stream: Any) -> None:
        waits = [[event for event in events if event in self.compute_events] for events in work.waits]
        super().copy_layers(binding, dataclasses.replace(work, waits=waits), stream)


class WithoutLayerWait(Watched):
    """wait_layer and wait_on do nothing."""

    def wait_on_stream(self, stream: Any, event: int, timeout_s: float | None) -> None:
        pass


class WithoutLook(Watched):
    """Every event counts as passed."""

    def is_complete(self, *events: int) -> bool:
        return True


class GpuRig:
    """``device`` and ``host`` are what both sides should hold."""

    def __init__(self, spec: KVCacheSpec | None = None, *, device_blocks: int = 9, host_blocks: int = 11, **pool: Any):
        self.spec = spec or make_spec(num_layers=3)
        self.cache = DeviceCache(self.spec, device_blocks, "gpu:0")
        self.pool = HostPool(self.spec, host_blocks, **{"layout": "layer_first", **pool})
        self.device = random_bits(self.spec, device_blocks, 1)
        self.host = random_bits(self.spec, host_blocks, 2)
        self.compute = cupy.cuda.Stream(non_blocking=True)
        self.arrays = {
            name: [_view(self.cache.tensor(name, layer), self.spec) for layer in range(self.spec.num_layers)]
            for name in self.spec.tensor_names
        }
        for name, layers in self.arrays.items():
            for layer, array in enumerate(layers):
                array.set(self.device[name][layer].reshape(array.shape))
        set_pool(self.pool, self.host)
        self.seen = {
            name: [cupy.empty(self.spec.tensor_block_bytes(name), cupy.uint8) for _ in layers]
            for name, layers in self.arrays.items()
        }
        delay.warm_up()
        with LayerwiseScheduler(self.cache, self.pool, compute_stream=self.compute) as warm:  # loads the copy kernels
            warm.offload([0], [0]).wait(WAIT_S)
            self.host = moved(self.device, self.host, [0], [0])
        runtime.deviceSynchronize()

    def scheduler(self, backend: Any = "cupy", **options: Any) -> LayerwiseScheduler:
        return LayerwiseScheduler(self.cache, self.pool, backend=backend, **{"compute_stream": self.compute, **options})

    # ---- compute ----
    def busy(self, stream: Any = None, milliseconds: float = DELAY_MS) -> None:
        delay.busy(self.compute if stream is None else stream, milliseconds)

    def write(self, block: int, value: int, layers: Any = None, stream: Any = None) -> None:
        """Compute fills a block."""
        handle = self.compute.ptr if stream is None else stream
        for name, arrays in self.arrays.items():
            size_bytes = self.spec.tensor_block_bytes(name)
            for layer in range(self.spec.num_layers) if layers is None else layers:
                runtime.memsetAsync(arrays[layer].data.ptr + block * size_bytes, value, size_bytes, handle)

    def read(self, block: int, layers: Any = None, stream: Any = None) -> None:
        """Compute copies a block aside; :meth:`what_was_read` shows what it found."""
        handle = self.compute.ptr if stream is None else stream
        for name, arrays in self.arrays.items():
            size_bytes = self.spec.tensor_block_bytes(name)
            for layer in range(self.spec.num_layers) if layers is None else layers:
                source = arrays[layer].data.ptr + block * size_bytes
                target = self.seen[name][layer].data.ptr
                runtime.memcpyAsync(target, source, size_bytes, runtime.memcpyDeviceToDevice, handle)

    def what_was_read(self) -> Bits:
        runtime.deviceSynchronize()
        return {name: np.stack([array.get() for array in arrays]) for name, arrays in self.seen.items()}

    # ---- results ----
    def device_now(self) -> Bits:
        runtime.deviceSynchronize()
        return {
            name: np.stack([array.get() for array in arrays]).reshape(self.device[name].shape)
            for name, arrays in self.arrays.items()
        }

    def host_now(self) -> Bits:
        runtime.deviceSynchronize()
        return pool_memory(self.pool)

    def check(self) -> None:
        assert_same(self.device_now(), self.device)
        assert_same(self.host_now(), self.host)


def _view(tensor: Any, spec: KVCacheSpec) -> Any:
    """The bytes of a GPU tensor as a CuPy array [blocks * bytes]."""
    size_bytes = int(np.prod(tensor.shape)) * int(tensor.element_size())
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), size_bytes, tensor, 0)
    return cupy.ndarray((size_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))


def block(bits: Bits, number: int) -> Bits:
    return {name: array[:, number] for name, array in bits.items()}


def filled(bits: Bits, value: int) -> Bits:
    """The shape of one block with one value."""
    return {name: np.full_like(array[:, 0], value) for name, array in bits.items()}


def is_equal(one: Bits, other: Bits) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)
