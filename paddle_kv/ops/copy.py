"""Blocks to other blocks of the same cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from .. import streams
from . import _arguments as arguments
from . import _check
from ._arguments import Tensor
from ._library import call, call_traceable
from ._tracing import traceable, tracing

Caches = TypeVar("Caches", Tensor, Sequence[Tensor])


@traceable
def copy_blocks(
    key_caches: Caches, value_caches: Caches | None, block_mapping: Any, *, stream: Any = None
) -> tuple[Caches, Caches | None]:
    """Copies blocks to other blocks of the same cache, in one layer or in all layers with one launch.

    Ordered after the work on ``stream`` (for None see :mod:`paddle_kv.streams`) and after nothing else. The caches, and
    a ``block_mapping`` on the GPU, must stay alive, and the blocks must not be written (nor, where they are targets,
    read) by other streams, until the stream has passed the copy. On the CPU the copy is done on return.

    Args:
        key_caches: ``[num_blocks, ...]``, rank 3 to 5, any dtype, contiguous; or a list of them. The tensors of one
            call may differ in dtype and block size, so scales and other tensors of the same blocks can be list entries.
        value_caches: as many tensors again, or None where there is one latent cache.
        block_mapping: pairs (source block, target block): ``[(source, target), ...]``, ``{source: target}``,
            ``{source: [targets]}``, or an ``[n, 2]`` int32 or int64 array or tensor. One source may have many targets;
            a target occurs once, and no block is both source and target.
            On the host (also a CPU tensor) all pairs are checked before anything moves. In a GPU tensor they are read
            when the copy runs, so that a CUDA graph can be replayed with other pairs: a pair with a negative id is
            skipped, one beyond the cache is never written, and the rest is the caller's duty; ``PADDLE_KV_CHECK=1``
            reads the pairs back and checks them (not while a graph is captured).

    Returns:
        ``(key_caches, value_caches)``. In a traced program use these and not the arguments.

    Raises:
        IndexError: a block id on the host is out of range.
        ValueError: a target occurs twice, a block is source and target, a cache is not contiguous, caches overlap or
            are on different devices, the two lists differ in length.
        TypeError: wrong type of an argument.
        CudaError: CUDA reported a failure.
        NotImplementedError: ``stream`` was named while a program is traced.

    In each case nothing has moved.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> keys, values = (paddle.to_tensor(np.arange(4, dtype="float32").reshape(4, 1, 1), place=paddle.CPUPlace())
        ...                 for _ in range(2))
        >>> keys, values = ops.copy_blocks(keys, values, {1: [0, 3]})
        >>> keys.numpy().ravel().tolist()
        [1.0, 1.0, 2.0, 1.0]
    """
    return _on_pairs("copy_blocks", key_caches, value_caches, block_mapping, stream)


@traceable
def copy_single_block(
    key_cache: Caches, value_cache: Caches | None, source_block_id: int, target_block_id: int, *, stream: Any = None
) -> tuple[Caches, Caches | None]:
    """:func:`copy_blocks` with a single pair of ids.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> latent = paddle.to_tensor(np.arange(3, dtype="float32").reshape(3, 1, 1), place=paddle.CPUPlace())
        >>> ops.copy_single_block(latent, None, 2, 0)[0].numpy().ravel().tolist()
        [2.0, 1.0, 2.0]
    """
    caches, key_count = _flat(key_cache, value_cache, in_place=True)
    source = arguments.integer(source_block_id, "source_block_id")
    target = arguments.integer(target_block_id, "target_block_id")
    pair = np.array([[source, target]])
    return _run("copy_single_block", key_cache, value_cache, caches, (source, target), pair, key_count, stream)


@traceable
def swap_blocks(
    key_cache: Caches, value_cache: Caches | None, block_mapping: Any, *, stream: Any = None
) -> tuple[Caches, Caches | None]:
    """Exchanges the two blocks of each pair, in one layer or in all layers.

    As :func:`copy_blocks` in all else, but that each block may occur only once.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> latent = paddle.to_tensor(np.arange(4, dtype="float32").reshape(4, 1, 1), place=paddle.CPUPlace())
        >>> ops.swap_blocks(latent, None, [(0, 3)])[0].numpy().ravel().tolist()
        [3.0, 1.0, 2.0, 0.0]
    """
    return _on_pairs("swap_blocks", key_cache, value_cache, block_mapping, stream)


def _on_pairs(op: str, keys: Any, values: Any, block_mapping: Any, stream: Any) -> tuple[Any, Any]:
    by_address = op == "copy_blocks" and not tracing()
    caches, key_count = _flat(keys, values, in_place=not by_address)
    in_memory = arguments.pairs_in_memory(block_mapping) if by_address else None
    ids: tuple[Any, ...]
    if in_memory is not None:
        pairs, ids = block_mapping, (None, *in_memory)
    elif arguments.known_on_device_only(block_mapping):
        pairs = arguments.device_ids(block_mapping, "block_mapping")
        ids = (pairs, 0, 0) if by_address else (pairs, [], [])
    else:
        num_blocks = arguments.num_blocks(caches)
        pairs = arguments.pair_array(block_mapping, "block_mapping", num_blocks)  # lives until the operator has read it
        lists = (pairs.ctypes.data, len(pairs)) if by_address else (pairs[:, 0].tolist(), pairs[:, 1].tolist())
        ids = (None, *lists)
    return _run(op, keys, values, caches, ids, pairs, key_count, stream)


def _flat(keys: Any, values: Any, *, in_place: bool) -> tuple[list[Any], int]:
    """All caches as one list, and how many of them hold keys. ``in_place``: Paddle knows that they are written."""
    if isinstance(keys, (list, tuple)):
        flat_keys = arguments.caches(keys, "key_caches")
        flat_values = [] if values is None else arguments.caches(values, "value_caches")
    else:
        flat_keys = [arguments.cache(keys, "key_caches")]
        flat_values = [] if values is None else [arguments.cache(values, "value_caches")]
    if values is not None and len(flat_keys) != len(flat_values):
        raise ValueError(
            f"key_caches has {len(flat_keys)} tensors, value_caches has {len(flat_values)}; "
            "both must have the same number"
        )
    if in_place:
        position = "[{}]" if isinstance(keys, (list, tuple)) else ""
        for name, caches in (("key_caches", flat_keys), ("value_caches", flat_values)):
            arguments.check_in_place(caches, (name + position).format)
    return flat_keys + flat_values, len(flat_keys)


def _run(
    op: str, keys: Any, values: Any, caches: list[Any], ids: tuple[Any, ...], pairs: Any, key_count: int, stream: Any
) -> tuple[Any, Any]:
    """``ids`` is what the operator takes, ``pairs`` the same as an [n, 2] array or tensor."""
    if not caches:
        return keys, values
    if not tracing():
        handle = arguments.handle(stream, caches[0])
        _report_accesses(op, caches, pairs, handle)
        call(op, caches, *ids, key_count, handle)
        return keys, values
    registered = "copy_blocks_in_place" if op == "copy_blocks" else op
    updated = call_traceable(registered, caches, *ids, key_count, streams.traced(stream, op))
    if not isinstance(keys, (list, tuple)):
        return updated[0], None if values is None else updated[1]
    return updated[:key_count], None if values is None else updated[key_count:]


def _report_accesses(op: str, caches: list[Tensor], pairs: Any, handle: int) -> None:
    if not _check.reads_back(pairs, handle, op):
        return
    on_host = pairs if isinstance(pairs, np.ndarray) else pairs.numpy()
    if on_host.ndim != 2 or on_host.shape[1] != 2:
        return  # the operator will refuse it
    sources, targets = ([i for i in column.tolist() if i >= 0] for column in on_host.T)
    for cache in caches:
        _check.block_access(cache, sources, writing=op == "swap_blocks", stream=handle)
        _check.block_access(cache, targets, writing=True, stream=handle)
