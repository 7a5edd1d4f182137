"""Blocks between the device cache and host memory, and between two tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import devices
from . import _arguments as arguments
from . import _check
from ._arguments import Tensor
from ._library import call
from ._tracing import dygraph_only


@dygraph_only
def swap_cache_per_layer(
    cache_gpu: Tensor,
    cache_cpu_ptr: int,
    max_block_num_cpu: int,
    swap_block_ids_gpu: Any,
    swap_block_ids_cpu: Any,
    rank: int,
    mode: int,
) -> Tensor:
    """Moves blocks of one cache tensor to or from host memory and returns when they have arrived.

    Ordered after all work submitted to Paddle's current stream (or the CuPy stream of the surrounding ``with`` block).
    Nothing has to be kept alive behind the call.

    Args:
        cache_gpu: ``[num_blocks, ...]``, rank 3 to 5, any dtype, contiguous. On the CPU build a CPU tensor.
        cache_cpu_ptr: address of ``max_block_num_cpu`` blocks of the same size, one behind the other (of a ``HostPool``
            with ``layout="layer_first"``), page-locked if the cache is on a GPU.
        max_block_num_cpu: blocks that fit behind the address.
        swap_block_ids_gpu: ids of blocks in ``cache_gpu``.
        swap_block_ids_cpu: ids of blocks in host memory, as many. Neither side needs an order; a source may occur
            twice, a target may not.
        rank: accepted and ignored.
        mode: 0 device to host, 1 host to device.

    Returns:
        ``cache_gpu`` itself.

    Raises:
        IndexError: an id is out of range.
        ValueError: lengths differ, a target occurs twice, bad mode or address, host memory the GPU cannot reach or that
            overlaps the cache, a stream that is being captured into a CUDA graph.
        TypeError: wrong type of an argument.
        CudaError: CUDA reported a failure.

    In each case nothing has moved.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> cache = paddle.to_tensor(np.arange(24, dtype="float32").reshape(4, 2, 3), place=paddle.CPUPlace())
        >>> host = np.zeros((5, 2, 3), "float32")
        >>> _ = ops.swap_cache_per_layer(cache, host.ctypes.data, 5, [3, 1], [0, 4], 0, 0)
        >>> host[4].ravel().tolist()
        [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    """
    return _per_layer(
        "swap_cache_per_layer",
        (cache_gpu, cache_cpu_ptr, max_block_num_cpu, swap_block_ids_gpu, swap_block_ids_cpu, mode),
        None,
    )


@dygraph_only
def swap_cache_per_layer_async(
    cache_gpu: Tensor,
    cache_cpu_ptr: int,
    max_block_num_cpu: int,
    swap_block_ids_gpu: Any,
    swap_block_ids_cpu: Any,
    rank: int,
    mode: int,
    *,
    stream: Any = None,
) -> Tensor:
    """:func:`swap_cache_per_layer` that returns when the copies are enqueued on ``stream``.

    Ordered after the work on ``stream`` (for None see :mod:`paddle_kv.streams`) and after nothing else. The cache and
    the host memory must stay alive, and must not be written (nor, where they are the target, read), until the stream
    has passed the copies: wait with an event recorded on that stream. On the CPU build the copy is done on return.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> cache = paddle.to_tensor(np.zeros((2, 1, 3), "int8"), place=paddle.CPUPlace())
        >>> host = np.full((3, 1, 3), 7, "int8")
        >>> ops.swap_cache_per_layer_async(cache, host.ctypes.data, 3, [1], [2], 0, 1).numpy().ravel().tolist()
        [0, 0, 0, 7, 7, 7]
    """
    return _per_layer(
        "swap_cache_per_layer_async",
        (cache_gpu, cache_cpu_ptr, max_block_num_cpu, swap_block_ids_gpu, swap_block_ids_cpu, mode),
        stream,
    )


@dygraph_only
def swap_cache_all_layers(
    cache_gpu_tensors: Sequence[Tensor],
    cache_cpu_ptrs: Sequence[int],
    max_block_num_cpu: int,
    swap_block_ids_gpu: Any,
    swap_block_ids_cpu: Any,
    rank: int,
    mode: int,
) -> Sequence[Tensor]:
    """:func:`swap_cache_per_layer` for many tensors (K, V and scales of all layers) with the same block ids.

    The tensors may differ in dtype and block size; ``cache_cpu_ptrs[i]`` belongs to ``cache_gpu_tensors[i]``.
    Everything is checked before anything moves.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> caches = [paddle.to_tensor(np.full((2, 1, 2), i, "int8"), place=paddle.CPUPlace()) for i in (1, 2)]
        >>> host = [np.zeros((2, 1, 2), "int8") for _ in caches]
        >>> _ = ops.swap_cache_all_layers(caches, [h.ctypes.data for h in host], 2, [0], [1], 0, 0)
        >>> [h.ravel().tolist() for h in host]
        [[0, 0, 1, 1], [0, 0, 2, 2]]
    """
    return _all_layers(
        "swap_cache_all_layers",
        (cache_gpu_tensors, cache_cpu_ptrs, max_block_num_cpu, swap_block_ids_gpu, swap_block_ids_cpu, mode),
        None,
    )


@dygraph_only
def swap_cache_all_layers_async(
    cache_gpu_tensors: Sequence[Tensor],
    cache_cpu_ptrs: Sequence[int],
    max_block_num_cpu: int,
    swap_block_ids_gpu: Any,
    swap_block_ids_cpu: Any,
    rank: int,
    mode: int,
    *,
    stream: Any = None,
) -> Sequence[Tensor]:
    """:func:`swap_cache_all_layers` that returns when the copies are enqueued on ``stream``.

    Ordering and lifetime as for :func:`swap_cache_per_layer_async`.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> caches = [paddle.to_tensor(np.zeros((2, 1, 2), "int8"), place=paddle.CPUPlace())]
        >>> host = np.ones((2, 1, 2), "int8")
        >>> ops.swap_cache_all_layers_async(caches, [host.ctypes.data], 2, [0], [1], 0, 1)[0].numpy().ravel().tolist()
        [1, 1, 0, 0]
    """
    return _all_layers(
        "swap_cache_all_layers_async",
        (cache_gpu_tensors, cache_cpu_ptrs, max_block_num_cpu, swap_block_ids_gpu, swap_block_ids_cpu, mode),
        stream,
    )


@dygraph_only
def swap_cache_layout(
    cache_gpu_tensors: Sequence[Tensor],
    cache_cpu_ptrs: int,
    cache_shape: Sequence[int],
    gpu_block_ids: Any,
    cpu_block_ids: Any,
    rank: Any,
    mode: int | None = None,
) -> Sequence[Tensor]:
    """:func:`swap_cache_all_layers` with host memory in which the layers of a block lie together:
    ``[block, layer, *cache_shape[1:]]``, as storage wants it.

    Args:
        cache_gpu_tensors: one tensor per layer, of one dtype and block shape; the numbers of blocks may differ.
        cache_cpu_ptrs: one address, of as many blocks as ``cpu_block_ids`` reaches.
        cache_shape: ``[num_blocks, ...]``; only the size of a block is taken from it.
        gpu_block_ids: ids of blocks in each tensor.
        cpu_block_ids: positions in host memory, as many. Releases of FastDeploy that leave this argument out (six
            arguments) mean position i for the i-th block, and so does such a call here.
        rank: accepted and ignored.
        mode: 0 device to host, 1 host to device.

    Raises:
        As :func:`swap_cache_per_layer`, ValueError also where the block of a tensor has another size than
        ``cache_shape`` says, or the tensors have several dtypes.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> caches = [paddle.to_tensor(np.full((3, 1, 1, 2), i, "int8"), place=paddle.CPUPlace()) for i in (1, 2)]
        >>> host = np.zeros((2, 2, 1, 1, 2), "int8")
        >>> _ = ops.swap_cache_layout(caches, host.ctypes.data, [3, 1, 1, 2], [2], [1], 0, 0)
        >>> host[:, :, 0, 0].tolist()  # [position][layer]
        [[[0, 0], [0, 0]], [[1, 1], [2, 2]]]
    """
    caches = arguments.caches(cache_gpu_tensors, "cache_gpu_tensors")
    gpu_ids = arguments.block_ids(gpu_block_ids, "gpu_block_ids", arguments.num_blocks(caches))
    if mode is None:
        arguments.integer(cpu_block_ids, "rank")  # or a call that lacks its mode would have its positions ignored
        cpu_block_ids, mode = range(len(gpu_ids)), rank
    cpu_ids = arguments.block_ids(cpu_block_ids, "cpu_block_ids")
    pointer = arguments.integer(cache_cpu_ptrs, "cache_cpu_ptrs")
    shape, to_device = arguments.block_ids(cache_shape, "cache_shape"), arguments.integer(mode, "mode")
    if not caches:
        raise ValueError("cache_gpu_tensors is empty; one tensor per layer is expected")
    handle = arguments.handle(None, caches[0])
    for cache in caches:
        _check.block_access(cache, gpu_ids, writing=to_device == 1, stream=handle)
    call("swap_cache_layout", caches, pointer, shape, gpu_ids, cpu_ids, to_device, handle)
    return cache_gpu_tensors


@dygraph_only
def transfer_blocks(source: Tensor, target: Tensor, block_mapping: Any, *, stream: Any = None) -> Tensor:
    """Copies blocks of ``source`` to blocks of ``target`` and returns ``target``.

    Each tensor is on the GPU, in pinned memory or on the CPU (pageable memory only if no GPU takes part). Ordered after
    the work on ``stream`` (for None see :mod:`paddle_kv.streams`); both tensors must stay alive, and the blocks must
    not be changed, until the stream has passed the copy. Without a GPU tensor the copy is done on return.

    Args:
        source: ``[num_blocks, ...]``, contiguous.
        target: ``[any number of blocks, ...]``, same dtype and block shape. It may be ``source`` itself: then no block
            may be source and target.
        block_mapping: pairs (source block, target block), see :func:`copy_blocks <paddle_kv.ops>`.

    Raises:
        IndexError: an id is out of range.
        ValueError: shapes or dtypes differ, a target occurs twice, pageable memory with a GPU, overlapping memory.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> source = paddle.to_tensor(np.arange(6, dtype="int64").reshape(3, 1, 2), place=paddle.CPUPlace())
        >>> target = paddle.to_tensor(np.zeros((2, 1, 2), "int64"), place=paddle.CPUPlace())
        >>> ops.transfer_blocks(source, target, {2: 0}).numpy().ravel().tolist()
        [4, 5, 0, 0]
    """
    arguments.cache(source, "source")
    arguments.cache(target, "target")
    sources, targets = arguments.block_pairs(block_mapping, "block_mapping", arguments.num_blocks([target]))
    on_gpu = source if devices.on_gpu(source) else target
    handle = arguments.handle(stream, on_gpu)
    _check.block_access(source, sources, writing=False, stream=handle)
    _check.block_access(target, targets, writing=True, stream=handle)
    call("transfer_blocks", source, target, sources, targets, handle)
    return target


def _per_layer(op: str, given: tuple[Any, ...], stream: Any) -> Tensor:
    cache, pointer, *rest = given
    arguments.cache(cache, "cache_gpu")
    pointer = arguments.integer(pointer, "cache_cpu_ptr")
    block_count, gpu_ids, cpu_ids, mode = _host_side(arguments.num_blocks([cache]), *rest)
    handle = arguments.handle(stream, cache)
    _check.block_access(cache, gpu_ids, writing=mode == 1, stream=handle)
    call(op, cache, pointer, block_count, gpu_ids, cpu_ids, mode, handle)
    return cache  # type: ignore[no-any-return]


def _all_layers(op: str, given: tuple[Any, ...], stream: Any) -> Sequence[Tensor]:
    tensors, pointers, *rest = given
    caches = arguments.caches(tensors, "cache_gpu_tensors")
    addresses = arguments.addresses(pointers, "cache_cpu_ptrs")
    num_blocks = arguments.num_blocks(caches)
    block_count, gpu_ids, cpu_ids, mode = _host_side(num_blocks, *rest)
    if not caches and not addresses:
        return tensors  # type: ignore[no-any-return]
    if not caches:
        raise ValueError(f"cache_gpu_tensors is empty, cache_cpu_ptrs has {len(addresses)} addresses")
    handle = arguments.handle(stream, caches[0])
    for cache in caches:
        _check.block_access(cache, gpu_ids, writing=mode == 1, stream=handle)
    call(op, caches, addresses, block_count, gpu_ids, cpu_ids, mode, handle)
    return tensors  # type: ignore[no-any-return]


def _host_side(
    num_blocks: int | None, block_count: Any, gpu_ids: Any, cpu_ids: Any, mode: Any
) -> tuple[int, list[int], list[int], int]:
    block_count = arguments.integer(block_count, "max_block_num_cpu")
    return (
        block_count,
        arguments.block_ids(gpu_ids, "swap_block_ids_gpu", num_blocks),
        arguments.block_ids(cpu_ids, "swap_block_ids_cpu", block_count),
        arguments.integer(mode, "mode"),
    )
