"""The ways of moving the pieces of a case, compared here. Each returns a call that enqueues all of it on a stream."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from .. import ops
from ..backend.work import ENGINES
from ..devices import has_gpu
from ..schedule.scheduler import LayerwiseScheduler
from .setup import Case, Side, Way

Enqueue = Callable[[], None]
Method = Callable[[Case, Way, Any], "Enqueue | None"]  # None: the method does not apply to the case


def contiguous(case: Case, way: Way, stream: Any) -> Enqueue:
    """The ceiling: the one copy of a case that :func:`~.setup.in_one_piece` made."""
    (first,), (second,) = case.device.bases, case.host.bases
    source, target = (second, first) if way == "h2d" else (first, second)
    size = case.total_bytes
    if not has_gpu():
        return lambda: _drop(ctypes.memmove(target, source, size))
    import cupy

    def enqueue() -> None:
        cupy.cuda.runtime.memcpyAsync(target, source, size, cupy.cuda.runtime.memcpyDefault, stream.ptr)

    return _keeping(enqueue, case)


def scheduler(case: Case, way: Way, stream: Any, engine: str = "auto") -> Enqueue | None:
    """What LayerwiseScheduler moves by: all layers of the pair of pools, on the CPU by threads."""
    if case.device_cache is None or case.host_pool is None or (engine != "auto" and not has_gpu()):
        return None
    made = LayerwiseScheduler(case.device_cache, case.host_pool, compute_stream=stream, engine=engine)

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
    if not has_gpu() or not case.pinned or case.copy_bytes % 8 or case.alignment < 8:
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
    """Inside one cache, all layers and tensors in one call; the pairs are a NumPy array."""
    if case.op != "copy_blocks":
        return None
    tensors, pairs = _all_tensors(case), np.array([case.device_ids, case.host_ids]).T
    return lambda: _drop(ops.copy_blocks(tensors, None, pairs, stream=stream))


def universal_from_cache(case: Case, way: Way, stream: Any) -> Enqueue | None:
    if case.op != "universal_from_cache":
        return None
    keys, values = _keys_and_values(case)
    return lambda: _drop(ops.universal_from_cache(keys, values, case.device_ids, out=case.dense, stream=stream))


def cache_from_universal(case: Case, way: Way, stream: Any) -> Enqueue | None:
    if case.op != "cache_from_universal":
        return None
    keys, values = _keys_and_values(case)
    return lambda: _drop(ops.cache_from_universal(case.dense, keys, values, case.host_ids, stream=stream))


def operational_from_block(case: Case, way: Way, stream: Any) -> Enqueue | None:
    """Chunks are given as an array of addresses."""
    if case.op != "operational_from_block":
        return None
    chunks, layers = _chunks(case.device, case.device_ids), case.spec.num_layers
    given = {"num_layers": layers, "num_outer": len(case.spec.tensor_names), "out": case.dense, "stream": stream}
    return lambda: _drop(ops.operational_from_block(chunks, **given))


def block_from_operational(case: Case, way: Way, stream: Any) -> Enqueue | None:
    if case.op != "block_from_operational":
        return None
    chunks = _chunks(case.host, case.host_ids)
    return lambda: _drop(ops.block_from_operational(case.dense, chunks, stream=stream))


def reshape_and_cache(case: Case, way: Way, stream: Any) -> Enqueue | None:
    """A call for each layer, as a model makes them."""
    if case.op != "reshape_and_cache":
        return None
    first = np.array(case.host_ids)[:, None] * case.spec.block_size
    slots = _placed(case, (first + np.arange(case.spec.block_size)).ravel())
    tensors = _all_tensors(case)
    layers = list(zip(case.dense[0::2], case.dense[1::2], tensors[0::2], tensors[1::2], strict=True))

    def enqueue() -> None:
        for layer in layers:
            ops.reshape_and_cache(*layer, slots, layout="NHD", stream=stream)

    return enqueue


def gather_cache(case: Case, way: Way, stream: Any) -> Enqueue | None:
    """A call for each tensor. Its results are memory of its own: the case is told where."""
    if case.op != "gather_cache":
        return None
    caches, (table, lengths) = _token_caches(case), _one_sequence(case, case.device_ids)
    total = len(case.device_ids) * case.spec.block_size

    def enqueue() -> None:
        case.dense = [
            ops.gather_cache(cache, table, lengths, total_tokens=total, layout="NHD", stream=stream) for cache in caches
        ]
        case.host.bases[:] = [rows.data_ptr() for rows in case.dense]

    return enqueue


def scatter_cache(case: Case, way: Way, stream: Any) -> Enqueue | None:
    """A call for each tensor."""
    if case.op != "scatter_cache":
        return None
    caches, (table, lengths) = _token_caches(case), _one_sequence(case, case.host_ids)

    def enqueue() -> None:
        for rows, cache in zip(case.dense, caches, strict=True):
            ops.scatter_cache(rows, cache, table, lengths, layout="NHD", stream=stream)

    return enqueue


METHODS: dict[str, Method] = {
    "scheduler": scheduler,
    **{f"scheduler_{engine}": functools.partial(scheduler, engine=engine) for engine in ENGINES if engine != "auto"},
}
METHODS |= {
    function.__name__: function
    for function in (
        swap_cache_all_layers,
        swap_cache_per_layer,
        memcpy_loop,
        memcpy_batch,
        vectorized_copy,
        full_grid_warps,
        copy_blocks,
        universal_from_cache,
        cache_from_universal,
        operational_from_block,
        block_from_operational,
        reshape_and_cache,
        gather_cache,
        scatter_cache,
    )
}


def _all_tensors(case: Case) -> list[Any]:
    assert case.device_cache is not None
    layers = range(case.spec.num_layers)
    return [case.device_cache.tensor(name, layer) for layer in layers for name in case.spec.tensor_names]


def _keys_and_values(case: Case) -> tuple[list[Any], list[Any] | None]:
    tensors = _all_tensors(case)
    return (tensors, None) if case.spec.latent else (tensors[0::2], tensors[1::2])


def _token_caches(case: Case) -> list[Any]:
    """All tensors as NHD, the latent ones too."""
    spec, tensors = case.spec, _all_tensors(case)
    if not spec.latent:
        return tensors
    return [tensor.view([tensor.shape[0], spec.block_size, 1, spec.head_dim]) for tensor in tensors]


def _one_sequence(case: Case, block_ids: list[int]) -> tuple[Any, Any]:
    """Block table and cumulative lengths of one sequence in these blocks."""
    lengths = [0, len(block_ids) * case.spec.block_size]
    return _placed(case, np.array([block_ids])), _placed(case, np.array(lengths))


def _placed(case: Case, values: np.ndarray) -> Any:
    return paddle.to_tensor(values, place=_all_tensors(case)[0].place)


def _chunks(side: Side, block_ids: list[int]) -> np.ndarray:
    """Addresses in order block, layer, outer."""
    addresses: np.ndarray = np.array(side.bases) + np.array(block_ids)[:, None] * np.array(side.strides)
    return addresses.ravel()


def _swap_arguments(case: Case, way: Way) -> tuple[Any, Any, tuple[Any, ...]] | None:
    applies = case.op == "swap" and case.pattern in ("scattered", "contiguous_host") and case.pinned
    if case.device_cache is None or not applies or way == "d2d":
        return None
    mode = 1 if way == "h2d" else 0
    return _all_tensors(case), case.host.bases, (case.device_cache.num_blocks, case.device_ids, case.host_ids, 0, mode)


def _lists(case: Case, way: Way) -> tuple[list[int], list[int], list[int]]:
    device, sizes = case.device.pieces(case.device_ids)
    host, _ = case.host.pieces(case.host_ids)
    return (host, device, sizes) if way == "h2d" else (device, host, sizes)


def _pointer_lists(case: Case, way: Way, run: Callable[..., Any]) -> Enqueue:
    lists = _lists(case, way)
    return lambda: run(*lists)


def _keeping(enqueue: Enqueue, *memory: Any) -> Enqueue:
    enqueue.memory = memory  # type: ignore[attr-defined]
    return enqueue


def _drop(_: Any) -> None:
    return None
