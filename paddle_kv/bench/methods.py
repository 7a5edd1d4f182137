"""The ways of moving the pieces of a case, compared here. Each returns a call that enqueues all of it on a stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from .. import ops
from ..memory.host_memory import has_gpu
from ..schedule.scheduler import LayerwiseScheduler
from .setup import Case, Way, address_of, buffer

Enqueue = Callable[[], None]
Method = Callable[[Case, Way, Any], "Enqueue | None"]  # None: the method does not apply to the case


def contiguous(case: Case, way: Way, stream: Any) -> Enqueue:
    """The ceiling: one copy of the same number of bytes."""
    size = case.total_bytes
    first = buffer(size, on_device=True, pinned=True)
    second = buffer(size, on_device=way == "d2d", pinned=True)
    source, target = (second, first) if way == "h2d" else (first, second)
    if not has_gpu():
        arrays = target.array(), source.array()
        return lambda: _numpy_copy(*arrays)
    import cupy

    def enqueue() -> None:
        cupy.cuda.runtime.memcpyAsync(address_of(target), address_of(source), size, 4, stream.ptr)

    return _keeping(enqueue, first, second)


def scheduler(case: Case, way: Way, stream: Any) -> Enqueue | None:
    """What LayerwiseScheduler moves by: all layers of the pair of pools, on the CPU by threads."""
    if case.device_cache is None or case.host_pool is None or way == "d2d":
        return None
    made = LayerwiseScheduler(case.device_cache, case.host_pool, compute_stream=stream)

    def enqueue() -> None:
        if way == "h2d":
            transfer = made.onload(case.host_ids, case.device_ids)
        else:
            transfer = made.offload(case.device_ids, case.host_ids)
        transfer.wait_on(stream)  # blocks until all of it is submitted: that is counted as host time, too

    return _keeping(enqueue, made)


def swap_cache_all_layers(case: Case, way: Way, stream: Any) -> Enqueue | None:
    arguments = _swap_arguments(case, way)
    if arguments is None:
        return None
    tensors, pointers, rest = arguments
    return lambda: _drop(ops.swap_cache_all_layers_async(tensors, pointers, *rest, stream=stream))


def swap_cache_per_layer(case: Case, way: Way, stream: Any) -> Enqueue | None:
    arguments = _swap_arguments(case, way)
    if arguments is None:
        return None
    tensors, pointers, rest = arguments

    def enqueue() -> None:
        for tensor, pointer in zip(tensors, pointers, strict=True):
            ops.swap_cache_per_layer_async(tensor, pointer, *rest, stream=stream)

    return enqueue


def memcpy_loop(case: Case, way: Way, stream: Any) -> Enqueue:
    """One cudaMemcpyAsync for each piece."""
    return _pointer_lists(case, way, lambda *lists: ops.memcpy_batch(*lists, mode="loop", stream=stream))


def memcpy_batch(case: Case, way: Way, stream: Any) -> Enqueue | None:
    """cudaMemcpyBatchAsync."""
    if not ops.has_memcpy_batch_async():
        return None
    return _pointer_lists(case, way, lambda *lists: ops.memcpy_batch(*lists, mode="batch", stream=stream))


def vectorized_copy(case: Case, way: Way, stream: Any) -> Enqueue | None:
    if not case.pinned:
        return None
    return _pointer_lists(case, way, lambda *lists: ops.vectorized_copy(*lists, stream=stream))


_FULL_GRID = r"""
extern "C" __global__ void full_grid(const long long* pieces, long long count) {
  const long long piece = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32;
  if (piece >= count) return;
  const unsigned long long* from = (const unsigned long long*)pieces[piece];
  unsigned long long* to = (unsigned long long*)pieces[count + piece];
  const long long words = pieces[2 * count + piece] / 8;
  for (long long i = threadIdx.x % 32; i < words; i += 32) to[i] = from[i];
}
"""


def full_grid_warps(case: Case, way: Way, stream: Any) -> Enqueue | None:
    """The plain kernel: one warp a piece, 8-byte words, as many CTAs as there are pieces for."""
    if not has_gpu() or not case.pinned or case.copy_bytes % 8:
        return None
    import cupy

    sources, targets, sizes = _lists(case, way)
    pieces = cupy.asarray(list(itertools.chain(sources, targets, sizes)), dtype="int64")
    kernel, count, threads = cupy.RawKernel(_FULL_GRID, "full_grid"), len(sources), 256
    grid = -(-count * 32 // threads)

    def enqueue() -> None:
        kernel((grid,), (threads,), (pieces, cupy.int64(count)), stream=stream)

    return enqueue


def copy_blocks(case: Case, way: Way, stream: Any) -> Enqueue | None:
    """Inside one cache, all layers and tensors in one call."""
    if way != "d2d" or case.device_cache is None:
        return None
    spec, cache = case.spec, case.device_cache
    tensors = [cache.tensor(name, layer) for name in spec.tensor_names for layer in range(spec.num_layers)]
    unused = sorted(set(range(cache.num_blocks)) - set(case.device_ids))
    pairs = list(zip(case.device_ids, unused, strict=False))
    return lambda: _drop(ops.copy_blocks(tensors, None, pairs, stream=stream))


METHODS: dict[str, Method] = {
    function.__name__: function
    for function in (
        scheduler,
        swap_cache_all_layers,
        swap_cache_per_layer,
        memcpy_loop,
        memcpy_batch,
        vectorized_copy,
        full_grid_warps,
        copy_blocks,
    )
}
SELF_CHECKING = {"copy_blocks"}  # its targets are not those of the case


def _swap_arguments(case: Case, way: Way) -> tuple[Any, Any, tuple[Any, ...]] | None:
    if (
        case.device_cache is None
        or case.pattern not in ("scattered", "contiguous_host")
        or way == "d2d"
        or not case.pinned
    ):
        return None
    spec, cache = case.spec, case.device_cache
    tensors = [cache.tensor(name, layer) for layer in range(spec.num_layers) for name in spec.tensor_names]
    mode = 1 if way == "h2d" else 0
    return tensors, case.host.bases, (cache.num_blocks, case.device_ids, case.host_ids, 0, mode)


def _lists(case: Case, way: Way) -> tuple[list[int], list[int], list[int]]:
    device, sizes = case.device.pieces(case.device_ids)
    host, _ = case.host.pieces(case.host_ids)
    return (host, device, sizes) if way == "h2d" else (device, host, sizes)


def _pointer_lists(case: Case, way: Way, run: Callable[..., Any]) -> Enqueue:
    lists = _lists(case, way)
    return lambda: run(*lists)


def _numpy_copy(target: Any, source: Any) -> None:
    target[...] = source


def _keeping(enqueue: Enqueue, *memory: Any) -> Enqueue:
    enqueue.memory = memory  # type: ignore[attr-defined]
    return enqueue


def _drop(_: Any) -> None:
    return None
