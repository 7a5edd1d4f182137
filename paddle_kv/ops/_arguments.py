"""Turns what users pass (ids, pairs, caches) into what the operators take, with errors that name the argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from ._tracing import is_variable, tracing

Tensor = paddle.Tensor


def block_ids(ids: Any, name: str) -> list[int]:
    """A 1-D sequence, array or tensor of integers as a list of ints.

    Raises:
        TypeError: ``ids`` is None or holds something else than integers.
        ValueError: ``ids`` is not 1-D.
    """
    if isinstance(ids, range):
        return list(ids)
    if isinstance(ids, (list, tuple)):
        if set(map(type, ids)) <= {int}:
            return list(ids)
        if len(ids) == 0:
            return []
    array = _integers(ids, name)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {list(array.shape)}; a 1-D list of block ids is expected")
    return array.tolist()  # type: ignore[no-any-return]


def block_pairs(pairs: Any, name: str) -> tuple[list[int], list[int]]:
    """``[(source, target), ...]``, ``{source: target}``, ``{source: [targets]}`` or an [n, 2] array as two lists."""
    if isinstance(pairs, Mapping):
        flat = [
            (source, target)
            for source, targets in pairs.items()
            for target in (targets if isinstance(targets, (list, tuple, range, np.ndarray, Tensor)) else [targets])
        ]
        pairs = flat
    if isinstance(pairs, (list, tuple)) and len(pairs) == 0:
        return [], []
    array = _integers(pairs, name)
    if array.size == 0:
        return [], []
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"{name} has shape {list(array.shape)}; pairs (source, target), shape [n, 2], are expected")
    return array[:, 0].tolist(), array[:, 1].tolist()


def _integers(values: Any, name: str) -> np.ndarray:
    if values is None or isinstance(values, (str, bytes)):
        raise TypeError(f"{name} is {values!r}; integers are expected (list, tuple, range, array or tensor)")
    try:
        array = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is not a regular sequence of integers") from None
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; int32 or int64 is expected")
    return array


def integer(value: Any, name: str) -> int:
    """``value`` as an int that fits in 64 bits."""
    if isinstance(value, (bool, float, str)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); an integer is expected")
    number = value.__index__()
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} = {number} does not fit in 64 bits")
    return int(number)


def cache(tensor: Any, name: str) -> Tensor:
    """A contiguous dygraph tensor that an operator may write in place; while tracing any variable of the program.

    Raises:
        TypeError: not a Paddle tensor.
        ValueError: not contiguous (Paddle would silently write to a copy), or without memory.
    """
    if tracing() and is_variable(tensor):
        return tensor  # type: ignore[no-any-return]
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; a paddle.Tensor is expected")
    if not tensor._is_initialized():
        raise ValueError(f"{name} holds no memory; an allocated tensor is expected")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous (shape {list(tensor.shape)}); a cache must be contiguous")
    return tensor


def readable(tensor: Any, name: str) -> Tensor:
    """A contiguous dygraph tensor, perhaps empty, that an operator reads; while tracing any variable of the program.

    Raises:
        TypeError: not a Paddle tensor.
        ValueError: not contiguous: Paddle would read it into a copy, on its own stream.
    """
    if tracing() and is_variable(tensor):
        return tensor  # type: ignore[no-any-return]
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; a paddle.Tensor is expected")
    if 0 not in tensor.shape and not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous (shape {list(tensor.shape)}); a contiguous tensor is expected")
    return tensor


def scale(value: Any, name: str) -> tuple[Tensor | None, float]:
    """A scale as what an operator takes: the tensor or None, and the number that counts where it is None.

    Raises:
        TypeError: neither a number nor a tensor.
        ValueError: a number that is not positive and finite as a float32, or a tensor that is not contiguous.
    """
    if isinstance(value, Tensor) or (tracing() and is_variable(value)):
        return readable(value, name), 1.0
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
        raise TypeError(f"{name} is {type(value).__name__}; a number or a float32 tensor is expected")
    with np.errstate(over="ignore", under="ignore"):
        number = float(np.float32(float(value)))
    if not 0.0 < number < float("inf"):
        raise ValueError(f"{name} = {value} must be positive and finite in float32")
    return None, number


def caches(tensors: Any, name: str) -> list[Tensor]:
    """A non-empty list of caches: an empty one kills the process inside Paddle."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"{name} is {type(tensors).__name__}; a list of paddle.Tensor is expected")
    return [cache(tensor, f"{name}[{i}]") for i, tensor in enumerate(tensors)]


def known_on_device_only(ids: Any) -> bool:
    """Whether ids can be read only when the operator runs: a GPU tensor, or a variable of a program."""
    if tracing():
        return is_variable(ids)
    return isinstance(ids, Tensor) and ids.place.is_gpu_place()


def device_ids(ids: Any, name: str) -> Any:
    """A GPU tensor or variable of ids as an operator takes it; C++ checks shape and dtype."""
    if not tracing() and not ids.is_contiguous():
        raise ValueError(f"{name} is not contiguous (shape {list(ids.shape)}); Paddle would copy it behind our back")
    return ids


def refuse_tracing(op: str) -> None:
    """Operators that carry addresses or stream handles make no sense in a saved program."""
    if not paddle.in_dynamic_mode():
        raise NotImplementedError(f"{op} carries memory addresses or a stream handle and works in dygraph only")
