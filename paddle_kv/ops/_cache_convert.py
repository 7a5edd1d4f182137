"""Tokens out of and into block caches, and caches in another number format or layout.

In programs that Paddle 2.6 makes from source (``to_static(full_graph=True)``) a function must not return the result
of one of these operators itself: Paddle asks the last operator for a gradient, which these do not have. Return what
is computed from it, or a ``reshape`` of it.
"""

from __future__ import annotations

from typing import Any, Literal

import paddle

from .. import streams
from ..layout import CacheDtype, Layout, ScaleLayout
from . import _arguments as arguments
from ._arguments import Tensor
from ._library import call_traceable
from ._tracing import traceable, tracing


@traceable
def gather_cache(
    cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    *,
    total_tokens: int | None = None,
    starts: Tensor | None = None,
    out: Tensor | None = None,
    layout: Layout = "HND",
    kv_cache_dtype: CacheDtype = "auto",
    out_dtype: Any = None,
    scale: float | Tensor | None = None,
    scale_layout: ScaleLayout = "HND",
    stream: Any = None,
) -> Tensor:
    """The tokens of many sequences, from their blocks into one contiguous tensor.

    Token ``n`` belongs to the last sequence ``s`` with ``cu_seq_lens[s] <= n``; its position ``p = starts[s] + n -
    cu_seq_lens[s]`` is slot ``p % bs`` of block ``block_table[s, p // bs]``. A token without a block becomes zeros: one
    before the first or behind the last sequence, one whose id is negative (padding), beyond the cache, or not in the
    table, and all of a sequence with a negative start.

    Ordered after the work on ``stream`` (for None see :mod:`paddle_kv.streams`) and after nothing else. All tensors
    must stay alive, and the cache must not be written, until the stream has passed the gather. A new result is memory
    of Paddle's current stream: with another ``stream``, make that one wait for Paddle's before the call, and Paddle's
    for it before the result is read or released.

    Args:
        cache: ``[nb, nh, bs, hd]`` (HND), ``[nb, bs, nh, hd]`` (NHD), or packed: keys ``[nb, nh, hd/x, bs, x]``, values
            ``[nb, nh, hd, bs]``; or the ``[nb, bs, width]`` of an MLA model, as :func:`concat_and_cache_mla` writes it.
            Eagerly also with strides, see :func:`reshape_and_cache`.
        block_table: ``[sequences, blocks_per_sequence]``, int32 or int64, on the device of the cache, contiguous.
        cu_seq_lens: ``[sequences + 1]``, int32 or int64, on the device of the cache: where each sequence starts and,
            last, where the last one ends.
        total_tokens: rows of the result; with ``out`` None, or the rows of that.
        starts: ``[sequences]``, int32 or int64, on the device of the cache: the position in its row of the table where
            the tokens of each sequence begin. None: 0.
        out: where the result is written, and what is returned: contiguous, of exactly its shape, dtype and device, and
            memory that no other argument has. None: a new tensor.
        layout: of the cache; without meaning where it has no heads.
        kv_cache_dtype: what the elements of the cache are. ``"auto"``: elements of its dtype, whatever that is,
            gathered as they are. Otherwise codes of that format (see ``docs/quantisation.md``), which are
            dequantised: in uint8 tensors, fp8 also in Paddle's fp8 dtypes, int8 in int8. ``"fp8_ds_mla"``: rows of 656
            bytes as :func:`concat_and_cache_mla` writes them, which become 576 elements of bfloat16.
        out_dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"`` (or Paddle's dtype object), rounded to nearest even.
            None: the dtype of ``out``, or the cache's for ``"auto"``, bfloat16 for ``"fp8_ds_mla"``, else float32, in
            which a dequantised value loses nothing.
        scale: a positive number, or a float32 tensor on the device of the cache: of one value, one for each head,
            ``[nb, nh, bs]`` (nh = 1 where there are no heads), as :func:`reshape_and_cache_dynamic` writes it, or
            ``[sequences, nh]``, one for each row of the table and head; the last two eagerly also with strides, no
            element twice. None: 1.
        scale_layout: ``"NHD"``: such a scale for each token is ``[nb, bs, nh]``.
        stream: see above.

    Returns:
        ``[total_tokens, nh, hd]``, or ``[total_tokens, width]``. In a traced program use it and not ``out``.

    Raises:
        ValueError: shapes, dtypes, devices or layouts that do not fit; a cache with strides that no kernel takes,
            another tensor that is not contiguous; ``scale`` or another ``out_dtype`` with ``"auto"``.
        IndexError: with ``PADDLE_KV_CHECK=1``, a block id beyond the cache, or a sequence longer than its row of the
            table.
        TypeError: wrong type of an argument.
        CudaError: CUDA reported a failure.
        NotImplementedError: ``stream`` was named while a program is traced.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> paddle.set_device("cpu")
        Place(cpu)
        >>> cache = paddle.to_tensor(np.arange(8, dtype="float32").reshape(4, 1, 2, 1))  # 4 blocks of 2 tokens
        >>> table = paddle.to_tensor(np.array([[3, 1], [0, -1]]))
        >>> lengths = paddle.to_tensor(np.array([0, 3, 4]))  # 3 tokens, then 1
        >>> ops.gather_cache(cache, table, lengths, total_tokens=4).numpy().ravel().tolist()
        [6.0, 7.0, 2.0, 0.0]
    """
    arguments.cache(cache, "cache", views=True)
    arguments.readable(block_table, "block_table")
    arguments.readable(cu_seq_lens, "cu_seq_lens")
    starts = _checked_starts(starts, block_table)
    _text(layout, "layout")
    _text(kv_cache_dtype, "kv_cache_dtype")
    _text(scale_layout, "scale_layout")
    if kv_cache_dtype in ("auto", "fp8_ds_mla") and scale is not None:
        raise ValueError(f'scale was given with kv_cache_dtype "{kv_cache_dtype}", which needs none')
    tensor, number = (None, 1.0) if scale is None else arguments.scale(scale, "scale", views=True)
    inputs = (cache, block_table, cu_seq_lens, tensor, starts)
    total_tokens = _rows_of_result(total_tokens, out)
    if out is not None:
        if (
            out_dtype is not None
            and not tracing()
            and _dtype_name(out_dtype, "out_dtype") != _dtype_name(out.dtype, "")
        ):
            raise ValueError(f"out has dtype {out.dtype}, out_dtype is {out_dtype}; both must be the same")
        if total_tokens != 0:
            into = (layout, kv_cache_dtype, number, scale_layout)
            written = _call("gather_cache_into", stream, cache, (out, *inputs), into)
            return written[0] if tracing() else out
        out_dtype = out.dtype
    dtype = _dtype_name(out_dtype, "out_dtype")
    if dtype is None and kv_cache_dtype != "auto":
        dtype = "bfloat16" if kv_cache_dtype == "fp8_ds_mla" else "float32"
    if dtype is not None and kv_cache_dtype == "auto" and dtype == _dtype_name(cache.dtype, "cache"):
        dtype = None
    # Paddle 2.6 takes no result without elements from an operator.
    empty = total_tokens == 0 and not tracing()
    options = (1 if empty else total_tokens, layout, kv_cache_dtype, dtype or "", number, scale_layout)
    try:
        rows: Tensor = _call("gather_cache", stream, cache, inputs, options)[0]
    except MemoryError as error:
        raise MemoryError(f"total_tokens = {total_tokens}: {error}") from None
    if out is not None and list(out.shape[1:]) != list(rows.shape[1:]):
        raise ValueError(f"out has shape {list(out.shape)}; {[0, *rows.shape[1:]]} is expected")
    return out if out is not None else rows[:0] if empty else rows


def _rows_of_result(total_tokens: int | None, out: Tensor | None) -> int:
    if out is None:
        total = arguments.integer(total_tokens, "total_tokens")
        if total < 0:
            raise ValueError(f"total_tokens = {total} must not be negative")
        return total
    if not tracing():
        empty = isinstance(out, Tensor) and 0 in out.shape
        (arguments.readable if empty else arguments.cache_in_place)(out, "out")
    rows = int(out.shape[0]) if out.ndim else 0
    if total_tokens is not None and arguments.integer(total_tokens, "total_tokens") != rows:
        raise ValueError(f"total_tokens = {total_tokens}, out has {rows} rows; both must be the same")
    return rows


def _checked_starts(starts: Tensor | None, block_table: Tensor) -> Tensor | None:
    if starts is None:
        return None
    arguments.readable(starts, "starts")
    if tracing() or 0 not in starts.shape:
        return starts
    if list(starts.shape) != list(block_table.shape[:1]):  # Paddle takes it for an absent input
        raise ValueError(f"starts has shape {list(starts.shape)}; one entry for each row of block_table is expected")
    return None


@traceable
def scatter_cache(
    tokens: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    *,
    starts: Tensor | None = None,
    layout: Layout = "HND",
    stream: Any = None,
) -> Tensor:
    """The inverse of :func:`gather_cache`: writes tokens to their slots and returns the cache.

    Token ``n`` goes to the slot that :func:`gather_cache` would read it from; a token without a block is skipped, and a
    block beyond the cache is never written. Elements are copied as they are.

    Ordered after the work on ``stream`` (for None see :mod:`paddle_kv.streams`) and after nothing else. All tensors
    must stay alive, and the blocks must not be read or written by other streams, until the stream has passed the
    scatter.

    Args:
        tokens: ``[tokens, nh, hd]`` (or ``[tokens, width]``) of the cache's dtype and device. Any strides: a slice of a
            fused QKV tensor is read where it lies, not copied. Not in the memory of the cache, which nobody checks.
        cache: see :func:`gather_cache`; updated in place. A view with strides: see :func:`reshape_and_cache`.
        block_table: see :func:`gather_cache`. A slot that two sequences share would be written by both: the caller's
            error, reported with ``PADDLE_KV_CHECK=1``.
        cu_seq_lens: see :func:`gather_cache`.
        starts: see :func:`gather_cache`.
        layout: of the cache.
        stream: see above.

    Returns:
        ``cache``. In a traced program use the result and not the argument.

    Raises:
        ValueError: shapes, dtypes, devices or layouts that do not fit; a cache with strides that no kernel takes.
        IndexError, ValueError: with ``PADDLE_KV_CHECK=1``, see :func:`gather_cache`.
        TypeError: wrong type of an argument.
        CudaError: CUDA reported a failure.
        NotImplementedError: ``stream`` was named while a program is traced.

    In each case nothing has been written.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> paddle.set_device("cpu")
        Place(cpu)
        >>> cache = paddle.zeros([3, 1, 2, 1])  # 3 blocks of 2 tokens
        >>> tokens = paddle.to_tensor(np.array([1, 2, 3], "float32").reshape(3, 1, 1))
        >>> table, lengths = paddle.to_tensor(np.array([[2, 0]])), paddle.to_tensor(np.array([0, 3]))
        >>> ops.scatter_cache(tokens, cache, table, lengths).numpy().ravel().tolist()
        [3.0, 0.0, 0.0, 0.0, 1.0, 2.0]
    """
    arguments.cache_in_place(cache, "cache", views=True)
    arguments.readable(block_table, "block_table")
    arguments.readable(cu_seq_lens, "cu_seq_lens")
    starts = _checked_starts(starts, block_table)
    _text(layout, "layout")
    if tracing():
        return _call("scatter_cache", stream, cache, (tokens, cache, block_table, cu_seq_lens, starts), ([], layout))[0]  # type: ignore[no-any-return]
    arguments.check_dense(tokens, "tokens")
    view: list[int] = []
    given: Tensor | None = tokens
    if (
        tokens.ndim == (2 if cache.ndim == 3 else 3) and tokens.shape[0] == 0
    ):  # Paddle 2.6 takes no input without elements
        _check_like(tokens, cache)
        return cache
    if not tokens.is_contiguous():
        given, view = None, _view(tokens, cache)
    _call("scatter_cache", stream, cache, (given, cache, block_table, cu_seq_lens, starts), (view, layout))
    return cache


@traceable
def convert_fp8(
    source: Tensor,
    *,
    to: str,
    fp8_format: Literal["e4m3", "e5m2"] = "e4m3",
    scale: float | Tensor = 1.0,
    stream: Any = None,
) -> Tensor:
    """A tensor of any shape as 8-bit floats, or 8-bit floats as a plain format.

    To fp8: ``source / scale`` in float32, clipped to plus or minus the largest number of the format (448 for e4m3,
    57344 for e5m2; infinities too), rounded to nearest even; NaN stays NaN. From fp8: ``code * scale`` in float32,
    rounded to nearest even to the target. The CPU and the GPU give the same bits.

    Ordering and the life of the result as for :func:`gather_cache`.

    Args:
        source: contiguous. To fp8: float16, bfloat16 or float32. From fp8: uint8, or Paddle's dtype of that format.
        to: ``"fp8"``, ``"float16"``, ``"bfloat16"`` or ``"float32"`` (or Paddle's dtype object of the last three).
        fp8_format: which 8-bit float.
        scale: a positive number, or a float32 tensor of one value on the device of ``source``.
        stream: see above.

    Returns:
        A new tensor of the same shape. 8-bit floats are ``float8_e4m3fn`` or ``float8_e5m2`` in Paddle 3, uint8 with
        the same bits in Paddle 2.6, which has no such dtypes.

    Raises:
        ValueError: a dtype, format or scale that does not fit; a source that is not contiguous.
        TypeError: wrong type of an argument.
        CudaError: CUDA reported a failure.
        NotImplementedError: ``stream`` was named while a program is traced.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> numbers = paddle.to_tensor(np.array([1.0, -0.3, 1e9], "float32"), place=paddle.CPUPlace())
        >>> codes = ops.convert_fp8(numbers, to="fp8", scale=0.5)
        >>> ops.convert_fp8(codes, to="float32", scale=0.5).numpy().tolist()
        [1.0, -0.3125, 224.0]
    """
    arguments.readable(source, "source")
    if isinstance(to, paddle.dtype):
        to = str(to).removeprefix("paddle.")
    _text(to, "to")
    _text(fp8_format, "fp8_format")
    tensor, number = arguments.scale(scale, "scale")
    options = (to, fp8_format, number)
    if not tracing() and 0 in source.shape:  # Paddle 2.6 takes no result without elements from an operator
        one = paddle.empty([1], source.dtype)._copy_to(source.place, True)
        converted: Tensor = _call("convert_fp8", stream, one, (one, tensor), options)[0][:0].reshape(source.shape)
        return converted
    return _call("convert_fp8", stream, source, (source, tensor), options)[0]  # type: ignore[no-any-return]


@traceable
def convert_layout(
    cache: Tensor,
    *,
    kind: Literal["key", "value"],
    source_layout: Layout,
    target_layout: Layout,
    stream: Any = None,
) -> Tensor:
    """A whole cache in another layout, as a new tensor; elements are copied as they are.

    Ordering and the life of the result as for :func:`gather_cache`.

    Args:
        cache: any dtype, contiguous; its layouts are those of :func:`gather_cache`.
        kind: ``"key"`` or ``"value"``: what a packed layout is packed for.
        source_layout: of ``cache``.
        target_layout: of the result. Packed keys have ``x`` = 16 bytes of elements. If it is ``source_layout``, the
            result is a copy, with the ``x`` that the cache has.
        stream: see above.

    Raises:
        ValueError: a shape that is not of ``source_layout``, packed keys whose head size ``x`` does not divide, an
            unknown kind or layout, a cache that is not contiguous.
        TypeError: wrong type of an argument.
        CudaError: CUDA reported a failure.
        NotImplementedError: ``stream`` was named while a program is traced.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> values = paddle.to_tensor(np.arange(6, dtype="int8").reshape(1, 1, 2, 3), place=paddle.CPUPlace())  # HND
        >>> ops.convert_layout(values, kind="value", source_layout="HND", target_layout="packed").numpy().tolist()
        [[[[0, 3], [1, 4], [2, 5]]]]
    """
    arguments.cache(cache, "cache")
    for text, name in ((kind, "kind"), (source_layout, "source_layout"), (target_layout, "target_layout")):
        _text(text, name)
    return _call("convert_layout", stream, cache, (cache,), (kind, source_layout, target_layout))[0]  # type: ignore[no-any-return]


def _call(op: str, stream: Any, placed: Tensor, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> list[Any]:
    handle = streams.traced(stream, op) if tracing() else arguments.handle(stream, placed)
    return call_traceable(op, *inputs, *options, handle)


def _view(tokens: Tensor, cache: Tensor) -> list[int]:
    """Address, shape and strides of a tensor that Paddle would copy before the operator sees it."""
    _check_like(tokens, cache)
    return [tokens.data_ptr(), *tokens.shape, *tokens.get_strides()]


def _check_like(tokens: Tensor, cache: Tensor) -> None:
    if tokens.dtype != cache.dtype:
        raise ValueError(f"tokens has dtype {tokens.dtype}, cache {cache.dtype}; both must have the same")
    if str(tokens.place) != str(cache.place):
        raise ValueError(f"tokens is on {tokens.place}, cache on {cache.place}; both must be on one device")


def _text(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; a string is expected")


def _dtype_name(dtype: Any, name: str) -> str | None:
    """``"float16"`` for that string and for Paddle's dtype object."""
    if dtype is None:
        return None
    if not isinstance(dtype, (str, paddle.dtype)):
        raise TypeError(f"{name} is {dtype!r}; a dtype, or the name of one, is expected")
    return str(dtype).removeprefix("paddle.")
