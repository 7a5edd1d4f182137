"""Block layouts that are independent of the engine: universal, operational, and their way to and from caches.

- *block stack*: ``num_blocks * num_layers * num_outer`` chunks in order block, layer, outer; one chunk is
  ``[tokens, heads, head size]`` (NHD) or ``[heads, tokens, head size]`` (HND)
- *universal*: ``[blocks, heads, layers, outer, tokens, head size]``; heads come first, so it can be cut for any number
  of ranks
- *operational*: ``[blocks, layers, outer, inner]``; inner is one chunk as it is in the block stack

``outer`` counts what a layer keeps of a block: 2 for keys and values, 1 for a latent cache. The layouts and their names
are those of Dynamo's block manager. All functions copy bits: any dtype will do.

Ordering, the same for all: ordered after the work on ``stream`` (for None see :mod:`paddle_kv.streams`) and after
nothing else. All memory must stay alive, sources must not be written, and targets not be touched, until the stream has
passed the copy; whoever reads a result on another stream must make that wait. On the CPU the copy is done on return. A
result that is allocated here comes from Paddle's allocator and so belongs to Paddle's current stream: with any other
stream give ``out``. A captured CUDA graph repeats the copy with the addresses and the ids of lists that it had; call an
operator once before capturing, so that its kernel is loaded.

Where the tensors are: all on one GPU, or some of them in page-locked memory, which the GPU then reads or writes
directly; or all on the CPU.

In a traced program tensors and caches work as in dygraph, on Paddle's current stream; use the results, not the
arguments. Addresses and streams cannot be named there. With Paddle 2.6 a program that returns such a result has to be
put into ``eval()`` mode: it looks for the gradient of the operator otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import paddle

from .. import devices, streams
from .._paddle import private
from . import _arguments as arguments
from . import _check
from ._arguments import Tensor
from ._library import call, call_traceable
from ._tracing import is_variable, refuse_tracing, traceable, tracing
from .memcpy import NO_DEVICE, device_of_pointers

InnerLayout = Literal["NHD", "HND"]
_empty = private("_C_ops", "empty")
_tensor_numbers = itertools.count()


@traceable
def universal_from_block(
    chunks: Any,
    *,
    num_layers: int,
    num_outer: int = 2,
    inner_layout: InnerLayout = "NHD",
    out: Tensor | None = None,
    stream: Any = None,
) -> Tensor:
    """A block stack as one universal tensor, all blocks in one launch.

    Ordering, lifetime and places: see :mod:`paddle_kv.ops.permute`.

    Args:
        chunks: list of contiguous tensors of one shape and dtype, in order block, layer, outer. Or their addresses, as
            a list or array of integers (the cheap form for thousands of chunks); then ``out`` says all the rest, and
            each address stands for as many bytes as a chunk has.
        num_layers: layers of a block.
        num_outer: chunks of a layer.
        inner_layout: what a chunk is, ``"NHD"`` or ``"HND"``.
        out: contiguous ``[blocks, heads, layers, outer, tokens, head size]``, on the GPU or in pinned memory.
        stream: see :mod:`paddle_kv.streams`.

    Returns:
        ``out``, or a new tensor where the first chunk is.

    Raises:
        ValueError: number of chunks, shapes or dtypes do not fit; a tensor is not contiguous; memory overlaps; the GPU
            cannot reach it. Nothing has moved.
        TypeError: wrong type of an argument.
        CudaError: CUDA reported a failure.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> chunks = [paddle.to_tensor(np.full((2, 1, 3), i, "int8"), place=paddle.CPUPlace()) for i in range(4)]
        >>> ops.universal_from_block(chunks, num_layers=1).shape == [2, 1, 1, 2, 2, 3]
        True
    """
    heads_first = _heads_first(inner_layout, "inner_layout")
    stack = _Stack("universal_from_block", chunks, num_layers, num_outer)
    if out is None:
        first, second, width = stack.chunk_shape(3)
        heads, tokens = (first, second) if heads_first else (second, first)
        out = stack.allocate([stack.num_blocks, heads, stack.num_layers, stack.num_outer, tokens, width])
    return stack.to_dense(out, [heads_first], stream)


@traceable
def block_from_universal(
    universal: Tensor,
    chunks: Any,
    *,
    inner_layout: InnerLayout = "NHD",
    stream: Any = None,
) -> Any:
    """Writes a universal tensor into the chunks of a block stack: the inverse of :func:`universal_from_block`.

    Ordering, lifetime and places: see :mod:`paddle_kv.ops.permute`.

    Args:
        universal: contiguous ``[blocks, heads, layers, outer, tokens, head size]``.
        chunks: tensors or addresses as in :func:`universal_from_block`. No two may overlap.
        inner_layout: what a chunk is, ``"NHD"`` or ``"HND"``.

    Returns:
        ``chunks``.

    Raises:
        As :func:`universal_from_block`.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> universal = paddle.to_tensor(np.arange(8, dtype="int8").reshape(1, 2, 1, 1, 2, 2), place=paddle.CPUPlace())
        >>> chunk = paddle.to_tensor(np.zeros((2, 2, 2), "int8"), place=paddle.CPUPlace())
        >>> ops.block_from_universal(universal, [chunk])[0].numpy().ravel().tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    heads_first = _heads_first(inner_layout, "inner_layout")
    num_layers, num_outer = _layers_and_outer(_sizes(universal, "universal", 6), 2, "universal")
    stack = _Stack("block_from_universal", chunks, num_layers, num_outer)
    return stack.from_dense(universal, "universal", [heads_first], stream)


@traceable
def operational_from_block(
    chunks: Any, *, num_layers: int, num_outer: int = 2, out: Tensor | None = None, stream: Any = None
) -> Tensor:
    """A block stack as one tensor ``[blocks, layers, outer, inner]``; chunks of any shape keep their order inside.

    As :func:`universal_from_block` in all else.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> chunks = [paddle.to_tensor(np.full((1, 2), i, "int8"), place=paddle.CPUPlace()) for i in range(4)]
        >>> ops.operational_from_block(chunks, num_layers=2).numpy().tolist()
        [[[[0, 0], [1, 1]], [[2, 2], [3, 3]]]]
    """
    stack = _Stack("operational_from_block", chunks, num_layers, num_outer)
    if out is None:
        inner = int(np.prod(stack.chunk_shape(None), dtype=np.int64))
        out = stack.allocate([stack.num_blocks, stack.num_layers, stack.num_outer, inner])
    return stack.to_dense(out, [], stream)


@traceable
def block_from_operational(operational: Tensor, chunks: Any, *, stream: Any = None) -> Any:
    """Writes ``[blocks, layers, outer, inner]`` into chunks: the inverse of :func:`operational_from_block`.

    As :func:`block_from_universal` in all else.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> operational = paddle.to_tensor(np.arange(4, dtype="int8").reshape(1, 1, 2, 2), place=paddle.CPUPlace())
        >>> chunks = [paddle.to_tensor(np.zeros(2, "int8"), place=paddle.CPUPlace()) for _ in range(2)]
        >>> [chunk.numpy().tolist() for chunk in ops.block_from_operational(operational, chunks)]
        [[0, 1], [2, 3]]
    """
    num_layers, num_outer = _layers_and_outer(_sizes(operational, "operational", 4), 1, "operational")
    stack = _Stack("block_from_operational", chunks, num_layers, num_outer)
    return stack.from_dense(operational, "operational", [], stream)


@traceable
def universal_from_cache(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor] | None,
    block_ids: Any,
    *,
    layout: InnerLayout = "HND",
    out: Tensor | None = None,
    stream: Any = None,
) -> Tensor:
    """Blocks of paged caches as one universal tensor, all layers and blocks in one launch.

    Ordering, lifetime and places: see :mod:`paddle_kv.ops.permute`.

    Args:
        key_caches: one contiguous tensor a layer, ``[blocks, heads, tokens, head size]`` (``"HND"``),
            ``[blocks, tokens, heads, head size]`` (``"NHD"``), or ``[blocks, tokens, size]`` without heads.
        value_caches: as many tensors of the same block shape, or None where there is one latent cache.
        block_ids: which blocks. On the host (also a CPU tensor) they are checked before anything moves. In a GPU tensor
            they are read when the copy runs: for a negative id or one beyond the cache the block of ``out`` stays as it
            is; ``PADDLE_KV_CHECK=1`` reads them back and checks them.
        layout: of the caches, ``"HND"`` or ``"NHD"``. Packed ones have to be converted first: ``ops.convert_layout``.
        out: contiguous ``[ids, heads, layers, outer, tokens, head size]`` with outer 2, or 1 without values.
        stream: see :mod:`paddle_kv.streams`.

    Returns:
        ``out``, or a new tensor where the first cache is.

    Raises:
        IndexError: a block id on the host is out of range.
        ValueError: shapes or dtypes do not fit; a tensor is not contiguous; memory overlaps; the GPU cannot reach it.
        TypeError: wrong type of an argument.
        CudaError: CUDA reported a failure.

    In each case nothing has moved.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> keys, values = (paddle.to_tensor(first + np.arange(4, dtype="int8").reshape(4, 1, 1, 1),
        ...                 place=paddle.CPUPlace()) for first in (0, 10))
        >>> ops.universal_from_cache([keys], [values], [3, 1]).numpy().ravel().tolist()
        [3, 13, 1, 11]
    """
    op = "universal_from_cache"
    heads_first = _heads_first(layout, "layout")
    caches, key_count = _flat(key_caches, value_caches)
    ids = _ids(block_ids, arguments.num_blocks(caches))
    if out is None:
        shape = _sizes(caches[0], "key_caches[0]", 3, 4)
        heads, tokens = (1, shape[1]) if len(shape) == 3 else (shape[1], shape[2])
        if len(shape) == 4 and not heads_first:
            heads, tokens = tokens, heads
        blocks = len(ids[1]) if ids[0] is None else _sizes(ids[0], "block_ids", 1)[0]
        out = _allocate([blocks, heads, key_count, len(caches) // key_count, tokens, shape[-1]], caches[0])
    if _is_empty(out) and not tracing() and ids[0] is None and not ids[1]:
        return out
    arguments.cache(out, "out")
    attributes = (ids[1], key_count, heads_first)
    if tracing():
        given = (caches, ids[0], out, *attributes, streams.traced(stream, op))
        return call_traceable(f"{op}_in_place", *given)[0]  # type: ignore[no-any-return]
    handle = _handle(stream, [*caches, out])
    _report(caches, ids[1], handle, writing=False)
    call(op, caches, ids[0], out, *attributes, handle)
    return out


@traceable
def cache_from_universal(
    universal: Tensor,
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor] | None,
    block_ids: Any,
    *,
    layout: InnerLayout = "HND",
    stream: Any = None,
) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
    """Writes a universal tensor into blocks of paged caches: the inverse of :func:`universal_from_cache`.

    Ordering, lifetime and places: see :mod:`paddle_kv.ops.permute`.

    Args:
        universal: contiguous ``[ids, heads, layers, outer, tokens, head size]``.
        key_caches: as in :func:`universal_from_cache`.
        value_caches: as in :func:`universal_from_cache`.
        block_ids: target blocks, each once; a GPU tensor as there, where a block with a bad id is not written.
        layout: of the caches, ``"HND"`` or ``"NHD"``. Packed ones have to be converted first: ``ops.convert_layout``.

    Returns:
        ``(key_caches, value_caches)``.

    Raises:
        As :func:`universal_from_cache`; ValueError also if a block is named twice.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> universal = paddle.to_tensor(np.array([5, 6], "int8").reshape(2, 1, 1, 1, 1, 1), place=paddle.CPUPlace())
        >>> latent = paddle.to_tensor(np.zeros((3, 1, 1), "int8"), place=paddle.CPUPlace())
        >>> ops.cache_from_universal(universal, [latent], None, [2, 0])[0][0].numpy().ravel().tolist()
        [6, 0, 5]
    """
    op = "cache_from_universal"
    heads_first = _heads_first(layout, "layout")
    caches, key_count = _flat(key_caches, value_caches)
    ids = _ids(block_ids, arguments.num_blocks(caches))
    if not tracing() and ids[0] is None and not ids[1] and _is_empty(universal):
        return key_caches, value_caches
    arguments.cache(universal, "universal")
    attributes = (ids[1], key_count, heads_first)
    if tracing():
        given = (universal, caches, ids[0], *attributes, streams.traced(stream, op))
        updated = call_traceable(f"{op}_in_place", *given)
        return updated[:key_count], None if value_caches is None else updated[key_count:]
    handle = _handle(stream, [*caches, universal])
    _report(caches, ids[1], handle, writing=True)
    call(op, universal, caches, ids[0], *attributes, handle)
    return key_caches, value_caches


@traceable
def reshard_universal(parts: Sequence[Tensor], target_tp: int, *, stream: Any = None) -> list[Tensor]:
    """The heads of universal tensors, cut for another number of tensor-parallel ranks.

    Only plain division: rank r of the result has the r-th part of all heads. Where a model has fewer KV heads than
    ranks and these share copies of a head, give each head once and let the ranks share the parts.

    Ordering, lifetime and places: see :mod:`paddle_kv.ops.permute`; the result is allocated.

    Args:
        parts: one contiguous tensor a rank, in rank order, ``[blocks, heads of the rank, layers, outer, tokens,
            head size]``, all of one shape and dtype.
        target_tp: ranks of the result.
        stream: see :mod:`paddle_kv.streams`.

    Returns:
        ``target_tp`` new tensors in rank order.

    Raises:
        ValueError: the heads of all parts cannot be divided by ``target_tp``; shapes or dtypes differ.
        TypeError: wrong type of an argument.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> part = paddle.to_tensor(np.arange(4, dtype="int8").reshape(1, 4, 1, 1, 1, 1), place=paddle.CPUPlace())
        >>> [half.numpy().ravel().tolist() for half in ops.reshard_universal([part], 2)]
        [[0, 1], [2, 3]]
    """
    given = arguments.caches(parts, "parts")
    ranks = arguments.integer(target_tp, "target_tp")
    if not given:
        raise ValueError("parts is empty; one universal tensor for each rank is expected")
    if ranks < 1:
        raise ValueError(f"target_tp = {ranks} must be at least 1")
    shape = _sizes(given[0], "parts[0]", 6)
    heads = shape[1] * len(given)
    if heads % ranks:
        raise ValueError(f"{heads} heads ({len(given)} parts of {shape[1]}) cannot be divided by target_tp = {ranks}")
    targets = [_allocate([shape[0], heads // ranks, *shape[2:]], given[0]) for _ in range(ranks)]
    if tracing():
        return call_traceable("reshard_universal_in_place", given, targets, streams.traced(stream, "reshard_universal"))
    call("reshard_universal", given, targets, _handle(stream, given))
    return targets


class _Stack:
    """The chunks of a block stack as they were given, and the two ways to run an operator on them."""

    def __init__(self, op: str, chunks: Any, num_layers: Any, num_outer: Any) -> None:
        self.op = op
        self.given = chunks
        self.num_layers = arguments.integer(num_layers, "num_layers")
        self.num_outer = arguments.integer(num_outer, "num_outer")
        if self.num_layers < 1 or self.num_outer < 1:
            raise ValueError(f"num_layers = {num_layers} and num_outer = {num_outer} must be at least 1")
        self.tensors: list[Tensor] | None = None
        self.addresses = np.empty(0, np.int64)
        if _are_addresses(chunks):
            refuse_tracing(f"{op} with addresses")
            self.addresses = arguments.id_array(chunks, "chunks")
        else:
            self.tensors = arguments.caches(chunks, "chunks") or None
        per_block = self.num_layers * self.num_outer
        count = self.addresses.size if self.tensors is None else len(self.tensors)
        self.num_blocks, left = divmod(count, per_block)
        if left:
            raise ValueError(
                f"chunks has {count} entries; a multiple of num_layers * num_outer = {per_block} is expected"
            )

    def chunk_shape(self, rank: int | None) -> list[int]:
        if self.tensors is None:
            raise ValueError("chunks has no tensor that tells the shape of the result; give out")
        if rank is None:
            return _sizes(self.tensors[0], "chunks[0]", len(self.tensors[0].shape))
        return _sizes(self.tensors[0], "chunks[0]", rank)

    def allocate(self, shape: list[int]) -> Tensor:
        assert self.tensors is not None, "chunk_shape has looked"
        return _allocate(shape, self.tensors[0])

    def to_dense(self, out: Any, attributes: list[Any], stream: Any) -> Tensor:
        if self._nothing_to_do(out):
            return out  # type: ignore[no-any-return]
        arguments.cache(out, "out")
        if tracing():
            arranged = (self.tensors, out, *self._attributes(NO_DEVICE), *attributes, streams.traced(stream, self.op))
            return call_traceable(f"{self.op}_in_place", *arranged)[0]  # type: ignore[no-any-return]
        device, handle = self._where(out, stream)
        call(self.op, self.tensors, out, *self._attributes(device), *attributes, handle)
        return out  # type: ignore[no-any-return]

    def from_dense(self, dense: Any, name: str, attributes: list[Any], stream: Any) -> Any:
        if self._nothing_to_do(dense):
            return self.given
        arguments.cache(dense, name)
        if tracing():
            arranged = (dense, self.tensors, *self._attributes(NO_DEVICE), *attributes, streams.traced(stream, self.op))
            return call_traceable(f"{self.op}_in_place", *arranged)
        device, handle = self._where(dense, stream)
        call(self.op, dense, self.tensors, *self._attributes(device), *attributes, handle)
        return self.given

    def _nothing_to_do(self, dense: Any) -> bool:
        """No chunks and a tensor for none: Paddle gives such a tensor no memory, so no operator can take it."""
        return not tracing() and self.num_blocks == 0 and _is_empty(dense)

    def _attributes(self, device: int) -> tuple[Any, ...]:
        return arguments.in_memory(self.addresses), device, self.num_layers, self.num_outer

    def _where(self, dense: Tensor, stream: Any) -> tuple[int, int]:
        if self.tensors is not None:
            return NO_DEVICE, _handle(stream, [*self.tensors, dense])
        device = devices.device_of(dense)
        if device < 0:
            device = device_of_pointers(self.addresses)
        return device, 0 if device == NO_DEVICE else streams.resolve_on(stream, device)


def _are_addresses(chunks: Any) -> bool:
    if isinstance(chunks, np.ndarray):
        return True
    return isinstance(chunks, (list, tuple)) and len(chunks) > 0 and isinstance(chunks[0], (int, np.integer))


def _heads_first(layout: Any, name: str) -> bool:
    if layout not in ("NHD", "HND"):
        hint = "; ops.convert_layout turns a packed cache into either" if layout == "packed" else ""
        raise ValueError(f'{name} is {layout!r}; "NHD" or "HND" is expected{hint}')
    return bool(layout == "HND")


def _sizes(tensor: Any, name: str, *ranks: int) -> list[int]:
    if not is_variable(tensor):
        arguments.check_dense(tensor, name)
    shape = [int(size) for size in tensor.shape]
    if len(shape) not in ranks:
        raise ValueError(f"{name} has shape {shape}; rank {' or '.join(map(str, ranks))} is expected")
    if min(shape, default=0) < 0:
        raise ValueError(f"{name} has shape {shape}, not all of it known while the program is traced; give out")
    return shape


def _layers_and_outer(shape: list[int], first: int, name: str) -> list[int]:
    counts = shape[first : first + 2]
    if 0 in counts:
        raise ValueError(f"{name} has shape {shape}; at least one layer, and one outer of each, are expected")
    return counts


def _is_empty(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and 0 in tensor.shape


def _allocate(shape: list[int], like: Any) -> Tensor:
    """Where ``like`` is, not where Paddle would put a tensor by default."""
    if tracing():
        # Not paddle.empty: a program merges two of those that are alike, and two results would share one memory.
        text = " ".join(map(str, shape))
        return call_traceable("new_tensor", like, text, next(_tensor_numbers))[0]  # type: ignore[no-any-return]
    if devices.device_of(like) == devices.PINNED:  # Paddle allocates none by name
        return _empty(shape, like.dtype, paddle.CPUPlace()).pin_memory()  # type: ignore[no-any-return]
    return _empty(shape, like.dtype, like.place)  # type: ignore[no-any-return]


def _handle(stream: Any, tensors: list[Tensor]) -> int:
    on_gpu = next((tensor for tensor in tensors if devices.on_gpu(tensor)), None)
    return 0 if on_gpu is None else arguments.handle(stream, on_gpu)


def _flat(keys: Any, values: Any) -> tuple[list[Any], int]:
    """All caches as one list, and how many of them hold keys."""
    flat_keys = arguments.caches(keys, "key_caches")
    flat_values = [] if values is None else arguments.caches(values, "value_caches")
    if not flat_keys:
        raise ValueError("key_caches is empty; one tensor for each layer is expected")
    if values is not None and len(flat_keys) != len(flat_values):
        raise ValueError(
            f"key_caches has {len(flat_keys)} tensors, value_caches has {len(flat_values)}; "
            "both must have one for each layer"
        )
    return flat_keys + flat_values, len(flat_keys)


def _ids(block_ids: Any, num_blocks: int | None) -> tuple[Any, list[int]]:
    """As an operator takes them: a tensor that is read when it runs, or a list."""
    if arguments.known_on_device_only(block_ids):
        return arguments.device_ids(block_ids, "block_ids"), []
    return None, arguments.block_ids(block_ids, "block_ids", num_blocks)


def _report(caches: list[Tensor], ids: list[int], handle: int, *, writing: bool) -> None:
    if _check.enabled():
        for cache in caches:
            _check.block_access(cache, ids, writing=writing, stream=handle)
