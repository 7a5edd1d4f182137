"""New tokens into their slots of block caches."""

from __future__ import annotations

from typing import Any

from .. import streams
from ..layout import CacheDtype, Layout, ScaleLayout
from . import _arguments as arguments
from . import _check
from ._arguments import Tensor
from ._library import call, call_traceable
from ._tracing import capturable, tracing


@capturable
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: Layout = "HND",
    kv_cache_dtype: CacheDtype = "auto",
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    padded: bool = False,
    dependent_launch: bool = False,
    stream: Any = None,
) -> tuple[Tensor, Tensor]:
    """Writes keys and values of new tokens into their slots of the caches, quantised if the caches are.

    Slot ``s`` is token ``s % block_size`` of block ``s // block_size``. A token with a negative slot is skipped; one
    with a slot beyond the caches is never written, and reported under ``PADDLE_KV_CHECK=1``, as is a slot named twice
    (which otherwise is the caller's error: either token may win).

    Ordered after the work on ``stream`` (for None see :mod:`paddle_kv.streams`) and after nothing else. All tensors
    must stay alive, ``key``, ``value`` and ``slot_mapping`` must not be written, and the slots must not be used by
    other streams, until the stream has passed the write. On the CPU it is done on return. ``slot_mapping`` on the GPU
    is read when the write runs, so that a CUDA graph can be replayed with other slots.

    Args:
        key: ``[tokens, heads, head_size]``, float16, bfloat16 or float32, with any strides: a slice of a fused QKV
            tensor is read where it lies.
        value: ``[tokens, heads, value_head_size]``, of the same dtype, with strides of its own.
        key_cache: ``[blocks, heads, block_size, head_size]`` (HND, as Paddle's block_multihead_attention keeps it),
            ``[blocks, block_size, heads, head_size]`` (NHD), or ``[blocks, heads, head_size / x, block_size, x]``
            (packed). Eagerly also a view with strides, such as ``kv[:, 0]`` of ``[blocks, 2, ...]`` or HND as a
            transposed view of NHD: its last dimension contiguous, block behind block, no element twice. Of a view that
            is handed to a traced program Paddle makes a copy, and what is written there stays there.
        value_cache: the same with ``value_head_size``; packed: ``[blocks, heads, value_head_size, block_size]``.
        slot_mapping: ``[tokens]``, int32 or int64, on the device of the caches.
        layout: of the caches.
        kv_cache_dtype: what the caches hold. ``"auto"``: elements of the dtype of ``key``, bit for bit. ``"fp8_e4m3"``,
            ``"fp8_e5m2"`` (caches of dtype uint8, or Paddle's float8), ``"int8"``: ``value / scale`` rounded to nearest
            even, clipped to the largest number. ``"paddle_uint8"``, which block_multihead_attention reads:
            ``value * scale * 127``, clipped to +-127, rounded with halves to even, plus 128 (as that operator does for
            decoded tokens with quant_round_type=0; ``docs/quantisation.md`` says where its codes differ by one).
        k_scale: None (1.0), a positive number, or a float32 tensor with one value or one for each head, on the device
            of the caches. Not with ``"auto"``.
        v_scale: the same for ``value``.
        padded: whether ``key`` and ``value`` may have more tokens than ``slot_mapping``; the last are then ignored.
        dependent_launch: whether the write may take its places on the GPU while the kernel before it in the stream
            drains; it still waits there for the end of that kernel before it touches memory. For a chain of small
            kernels, on GPUs of sm_90 and newer; nothing changes elsewhere, nor for rows that have to be converted or
            are not in pieces of 16 bytes. The order is in ``docs/ordering.md``.

    Returns:
        ``(key_cache, value_cache)``. In a traced program use these and not the arguments.

    Raises:
        ValueError: shapes, dtypes, devices or layout do not fit, a cache has strides that no kernel takes (in a
            program: any that is made there), the caches overlap, more tokens than slots without ``padded``, fewer
            tokens than slots; under ``PADDLE_KV_CHECK=1`` a slot named twice.
        IndexError: under ``PADDLE_KV_CHECK=1`` a slot beyond the caches.
        TypeError: wrong type of an argument.
        CudaError: CUDA reported a failure.
        NotImplementedError: ``stream`` was named while a program is traced.

    In each case nothing has been written.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> on_cpu = dict(place=paddle.CPUPlace())
        >>> keys = paddle.to_tensor(np.array([[[1.0, 2.0]], [[3.0, 4.0]]], "float32"), **on_cpu)  # 2 tokens, 1 head
        >>> key_cache = paddle.to_tensor(np.zeros((2, 1, 2, 2), "float32"), **on_cpu)  # 2 blocks of 2 tokens
        >>> value_cache = paddle.to_tensor(np.zeros((2, 1, 2, 2), "float32"), **on_cpu)
        >>> slots = paddle.to_tensor(np.array([3, -1]), **on_cpu)
        >>> key_cache, value_cache = ops.reshape_and_cache(keys, keys, key_cache, value_cache, slots)
        >>> key_cache.numpy().reshape(-1, 2).tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]
    """
    arguments.cache_in_place(key_cache, "key_cache", views=True)
    arguments.cache_in_place(value_cache, "value_cache", views=True)
    k_tensor, k_number = _scale(k_scale, "k_scale", kv_cache_dtype)
    v_tensor, v_number = _scale(v_scale, "v_scale", kv_cache_dtype)
    names = (_text(layout, "layout"), _text(kv_cache_dtype, "kv_cache_dtype"))
    options = (k_number, v_number, *names, bool(padded), bool(dependent_launch))
    caches = (key_cache, value_cache)
    op = "reshape_and_cache"
    tokens = {"key": key, "value": value}
    result: tuple[Tensor, Tensor] = _write(
        op, caches, (k_tensor, v_tensor), tokens, slot_mapping, options, layout, stream
    )
    return result


@capturable
def reshape_and_cache_dynamic(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: Layout = "HND",
    kv_cache_dtype: CacheDtype = "fp8_e4m3",
    scale_layout: ScaleLayout = "HND",
    stream: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`reshape_and_cache` into quantised caches, with a scale computed for each token and head.

    The scale is the largest finite magnitude of the token and head, divided by the largest number of the format: 448
    for fp8_e4m3, 57344 for fp8_e5m2, 127 for int8. It is 1 for a row of zeros, and never below the smallest normal
    float32. Infinities are clipped to the largest number; NaN stays NaN in fp8 and becomes 0 in int8.

    Args:
        k_scale_cache: ``[blocks, heads, block_size]`` float32, in every layout of the caches: where the scales of the
            keys are written. Eagerly also with strides.
        v_scale_cache: the same for the values.
        kv_cache_dtype: ``"fp8_e4m3"``, ``"fp8_e5m2"`` or ``"int8"``.
        scale_layout: ``"NHD"``: the scale caches are ``[blocks, block_size, heads]``.

    Returns:
        ``(key_cache, value_cache, k_scale_cache, v_scale_cache)``.

    All else as for :func:`reshape_and_cache`.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> on_cpu = dict(place=paddle.CPUPlace())
        >>> keys = paddle.to_tensor(np.array([[[127.0, -254.0]]], "float32"), **on_cpu)  # 1 token, 1 head
        >>> caches = [paddle.to_tensor(np.zeros((1, 1, 2, 2), "int8"), **on_cpu) for _ in "kv"]
        >>> scales = [paddle.to_tensor(np.zeros((1, 1, 2), "float32"), **on_cpu) for _ in "kv"]
        >>> slot = paddle.to_tensor(np.array([1]), **on_cpu)
        >>> _ = ops.reshape_and_cache_dynamic(keys, keys, *caches, *scales, slot, kv_cache_dtype="int8")
        >>> caches[0].numpy()[0, 0].tolist(), scales[0].numpy()[0, 0].tolist()
        ([[0, 0], [64, -127]], [0.0, 2.0])
    """
    caches = (key_cache, value_cache, k_scale_cache, v_scale_cache)
    for cache, name in zip(caches, ("key_cache", "value_cache", "k_scale_cache", "v_scale_cache"), strict=True):
        arguments.cache_in_place(cache, name, views=True)
    options = (_text(layout, "layout"), _text(kv_cache_dtype, "kv_cache_dtype"), _text(scale_layout, "scale_layout"))
    op = "reshape_and_cache_dynamic"
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _write(
        op, caches, (), {"key": key, "value": value}, slot_mapping, options, layout, stream
    )
    return result


@capturable
def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_cache_dtype: CacheDtype = "auto",
    scale: float | Tensor | None = None,
    dependent_launch: bool = False,
    stream: Any = None,
) -> Tensor:
    """Writes the latent and the rope part of new tokens side by side into their slots of the cache of an MLA model.

    Args:
        kv_c: ``[tokens, rank]``, float16, bfloat16 or float32, with any strides.
        k_pe: ``[tokens, rope]``, of the same dtype, with strides of its own.
        kv_cache: ``[blocks, block_size, rank + rope]``, or with the one head as a dimension, ``[blocks, 1, block_size,
            ...]`` or ``[blocks, block_size, 1, ...]``; eagerly also with strides, see :func:`reshape_and_cache`.
        slot_mapping: ``[tokens]``, int32 or int64, on the device of the cache.
        kv_cache_dtype: what the cache holds. Here also ``"fp8_ds_mla"``, the 656 bytes a token of DeepSeek's sparse
            attention (``docs/quantisation.md``): ``kv_c`` of rank 512 and ``k_pe`` of 64, both bfloat16, into a cache
            of uint8 with rows of 656.
        scale: None (1.0), a positive number, or a float32 tensor with one value. Not with ``"auto"``, nor with
            ``"fp8_ds_mla"``, which computes its scales.

    Returns:
        ``kv_cache``. In a traced program use it and not the argument.

    Slots, formats, ordering, ``dependent_launch``, lifetime and errors as for :func:`reshape_and_cache`.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> on_cpu = dict(place=paddle.CPUPlace())
        >>> latent, rope = (paddle.to_tensor(np.full((1, n), n, "float32"), **on_cpu) for n in (2, 1))
        >>> cache = paddle.to_tensor(np.zeros((1, 2, 3), "float32"), **on_cpu)
        >>> ops.concat_and_cache_mla(latent, rope, cache, paddle.to_tensor(np.array([1]), **on_cpu)).numpy()[0].tolist()
        [[0.0, 0.0, 0.0], [2.0, 2.0, 1.0]]
    """
    arguments.cache_in_place(kv_cache, "kv_cache", views=True)
    tensor, number = _scale(scale, "scale", kv_cache_dtype)
    options = (number, _text(kv_cache_dtype, "kv_cache_dtype"), bool(dependent_launch))
    op = "concat_and_cache_mla"
    tokens = {"kv_c": kv_c, "k_pe": k_pe}
    result: Tensor = _write(op, (kv_cache,), (tensor,), tokens, slot_mapping, options, "latent", stream)[0]
    return result


def _write(
    op: str,
    caches: tuple[Tensor, ...],
    scales: tuple[Tensor | None, ...],
    tokens: dict[str, Tensor],
    slot_mapping: Tensor,
    options: tuple[Any, ...],
    layout: str,
    stream: Any,
) -> Any:
    """Runs an operator with what it reads as numbers or, while tracing, as inputs; returns the caches."""
    if tracing():
        read = (*tokens.values(), slot_mapping, [], [], [])
        return tuple(call_traceable(op, *caches, *scales, *read, *options, streams.traced(stream, op)))
    numbers = [arguments.strided(tensor, name) for name, tensor in tokens.items()]
    slots = arguments.strided(slot_mapping, "slot_mapping")
    handle = arguments.handle(stream, caches[0])
    if _check.reads_back(slot_mapping, handle, op):
        written = _blocks_written(caches[0], slot_mapping, layout)
        for cache in caches:
            _check.block_access(cache, written, writing=True, stream=handle)
    call(op, *caches, *scales, None, None, None, *numbers, slots, *options, handle)
    return caches


def _blocks_written(cache: Tensor, slot_mapping: Tensor, layout: str) -> list[int]:
    """Nothing where the shapes or the dtype are such that the operator will refuse the call."""
    axis = {"HND": -2, "NHD": 1, "latent": 2 if cache.ndim == 4 and cache.shape[1] == 1 else 1}.get(layout, 3)
    if not axis < cache.ndim or slot_mapping.ndim != 1 or not arguments.holds_integers(slot_mapping):
        return []
    return sorted({slot // cache.shape[axis] for slot in slot_mapping.tolist() if slot >= 0})


def _scale(value: Any, name: str, kv_cache_dtype: Any) -> tuple[Tensor | None, float]:
    if value is None:
        return None, 1.0
    if kv_cache_dtype == "auto":
        raise ValueError(f'{name} is given, but kv_cache_dtype "auto" stores elements as they are, without a scale')
    if kv_cache_dtype == "fp8_ds_mla":
        raise ValueError(f'{name} is given, but kv_cache_dtype "fp8_ds_mla" computes its scales')
    return arguments.scale(value, name)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; a string is expected")
    return value
