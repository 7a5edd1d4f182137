"""Turns what users pass (ids, pairs, caches) into what the operators take, with errors that name the argument."""

from __future__ import annotations

import reprlib
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import countOf
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from .. import devices, streams
from ..checks import check_distinct, check_ids, range_array
from ..ranges import shown as shown
from . import _library
from ._library import facts
from ._tracing import is_variable, tracing

if TYPE_CHECKING:

    class Tensor(Any):  # type: ignore[misc]  # Paddle 2.6 ships no types
        """paddle.Tensor."""
else:
    Tensor = paddle.Tensor

_INTEGER_TENSORS = {paddle.int8, paddle.int16, paddle.int32, paddle.int64, paddle.uint8}
_LARGEST = 2**63 - 1
_UNREAL = tuple("bcmMSU")  # NumPy's kinds of scalars that are no real number: bool, complex, dates, text


def _nothing(*asked: Any) -> Any:
    """The answer where the library gives none: then Paddle is asked, by what stands below."""


# What is asked of each tensor, in one call of the library instead of five of Paddle's: whether nothing can be objected
# to a tensor that need not be of any dtype or shape; its device; and its numbers, see strided().
_is_plain: Callable[[Any], Any] = facts.get("is_plain", _nothing)
_device: Callable[[Any], Any] = facts.get("device", _nothing)
_strided: Callable[[Any], Any] = facts.get("strided", _nothing)
# The same for ids: all that is to be checked of a list of them.
plain_ids: Callable[[Any, int, bool], Any] = _library.id_functions().get("plain_ids", _nothing)


def block_ids(ids: Any, name: str, num_blocks: int | None = None) -> list[int]:
    """:func:`block_id_array` as a list of ints."""
    if isinstance(ids, (list, tuple)) and countOf(map(type, ids), int) == len(ids):
        try:
            return array("q", ids).tolist()
        except OverflowError:
            raise _too_large(ids, name) from None
    return block_id_array(ids, name, num_blocks).tolist()  # type: ignore[no-any-return]


def checked_block_ids(ids: Any, name: str, num_blocks: int, *, distinct: bool) -> list[int]:
    """:func:`block_ids` that all lie in [0, num_blocks), each once if they are to be ``distinct``."""
    has_length = isinstance(ids, (list, tuple)) or (isinstance(ids, np.ndarray) and ids.ndim == 1)
    if distinct and has_length and len(ids) > num_blocks:
        ids = ids[: num_blocks + 1]  # among so many one is wrong already
    plain = plain_id_array(ids, num_blocks, distinct=distinct)
    if plain is not None:
        return plain.tolist()  # type: ignore[no-any-return]
    found = block_ids(ids, name, num_blocks)
    check_ids(found, name, num_blocks)
    if distinct:
        check_distinct(name, found)
    return found


def block_id_array(ids: Any, name: str, num_blocks: int | None = None) -> np.ndarray:
    """A 1-D sequence, array or tensor of integers as a contiguous int64 array that nobody else has.

    Args:
        num_blocks: if that is known, of a range that does not lie in [0, num_blocks) no array is made first.

    Raises:
        TypeError: ``ids`` is None or holds something else than integers.
        ValueError: ``ids`` is not 1-D.
        IndexError: an id does not fit in 64 bits (Paddle would silently make it -1).
    """
    if isinstance(ids, range):
        return range_array(ids, name, num_blocks)
    if isinstance(ids, (list, tuple)) and countOf(map(type, ids), int) == len(ids):
        try:
            return np.asarray(array("q", ids))  # it reads a list twice as quickly as NumPy does
        except OverflowError:
            raise _too_large(ids, name) from None
    found = _integers(ids, name)
    if found.ndim != 1:
        raise ValueError(f"{name} has shape {list(found.shape)}; a 1-D list of integers is expected")
    return np.array(found, np.int64)


def plain_id_array(ids: Any, num_blocks: int, *, distinct: bool) -> np.ndarray | None:
    """:func:`block_id_array` of ids to which nothing can be objected: each lies in [0, num_blocks), and is there once
    if they are to be ``distinct``. None: ask for everything one by one."""
    found = plain_ids(ids, num_blocks, distinct)
    return None if found is None else np.frombuffer(found, np.int64)


def id_array(ids: Any, name: str) -> np.ndarray:
    """:func:`block_ids` as a contiguous int64 array, which is all that is cheap for thousands of them."""
    if isinstance(ids, (list, tuple)) and set(map(type, ids)) <= {int}:
        try:
            return np.frombuffer(array("q", ids), np.int64)
        except OverflowError:
            raise _too_large(ids, name) from None
    if isinstance(ids, range):
        return range_array(ids, name)
    found = _integers(ids, name)
    if found.ndim != 1:
        raise ValueError(f"{name} has shape {list(found.shape)}; a 1-D list of integers is expected")
    return np.ascontiguousarray(found)


def in_memory(ids: np.ndarray) -> list[int]:
    """What ``IdsAt`` in C++ takes for an :func:`id_array`, which must live as long as the call: address and number."""
    return [ids.ctypes.data if ids.size else 0, ids.size]


def addresses(pointers: Any, name: str) -> list[int]:
    """A 1-D list of memory addresses, in the forms that block ids may have."""
    try:
        return block_ids(pointers, name)
    except IndexError as error:
        raise ValueError(str(error)) from None


def pair_array(pairs: Any, name: str, num_targets: int | None = None) -> np.ndarray:
    """``[(source, target), ...]``, ``{source: target}``, ``{source: [targets]}`` or an [n, 2] array as an [n, 2] int64
    array, contiguous. ``num_targets``: :func:`num_blocks` of what is written. Errors as for :func:`block_ids`."""
    if isinstance(pairs, Mapping):
        pairs = [
            (source, target)
            for source, targets in pairs.items()
            for target in (block_ids(targets, f"{name}[{source!r}]", num_targets) if _is_list(targets) else [targets])
        ]
    found = _packed_pairs(pairs)
    if found is None:
        found = _integers(pairs, name)
    if found.size == 0:
        return np.empty((0, 2), np.int64)
    if found.ndim != 2 or found.shape[1] != 2:
        raise ValueError(f"{name} has shape {list(found.shape)}; pairs (source, target), shape [n, 2], are expected")
    return np.ascontiguousarray(found)


def block_pairs(pairs: Any, name: str, num_targets: int | None = None) -> tuple[list[int], list[int]]:
    """:func:`pair_array` as two lists."""
    found = pair_array(pairs, name, num_targets)
    return found[:, 0].tolist(), found[:, 1].tolist()


def _packed_pairs(pairs: Any) -> np.ndarray | None:
    """A list of pairs of ints as an array; None for all else. NumPy takes three times as long for a list of tuples."""
    if not isinstance(pairs, (list, tuple)) or not set(map(type, pairs)) <= {list, tuple}:
        return None
    if set(map(len, pairs)) != {2}:
        return None
    flat = list(chain.from_iterable(pairs))
    if set(map(type, flat)) != {int}:
        return None
    try:
        return np.frombuffer(struct.pack(f"{len(flat)}q", *flat), np.int64).reshape(-1, 2)
    except struct.error:  # beyond 64 bits
        return None


def _is_list(targets: Any) -> bool:
    return isinstance(targets, (list, tuple, range)) or (isinstance(targets, (np.ndarray, Tensor)) and targets.ndim > 0)


def _integers(values: Any, name: str) -> np.ndarray:
    """Any regular nesting of integers as an int64 array; nothing is converted silently (bool, float, bfloat16 bits)."""
    if values is None or isinstance(values, (str, bytes)):
        raise TypeError(
            f"{name} is {reprlib.repr(values)}; integers are expected (list, tuple, range, array or tensor)"
        )
    if isinstance(values, Tensor):
        check_dense(values, name)
        if not holds_integers(values) and values.size:
            raise TypeError(f"{name} has dtype {values.dtype}; int32 or int64 is expected")
        return values.numpy().astype(np.int64)  # type: ignore[no-any-return]
    try:
        found = np.asarray(values)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is not a regular sequence of integers") from None
    if found.dtype == object and not found.ndim:  # a generator, a set, a view of a dictionary
        raise TypeError(
            f"{name} is {type(values).__name__}; integers are expected (list, tuple, range, array or tensor)"
        )
    if found.size == 0:
        return found.astype(np.int64)  # an empty list has no dtype of its own: NumPy says float64
    if isinstance(values, (list, tuple)) and not _types(values).isdisjoint({bool, np.bool_}):
        raise TypeError(f"{name} holds bool values; integers are expected")
    if found.dtype.kind not in "iu":
        if isinstance(values, (list, tuple)) and _types(values) <= {int}:  # ints for which NumPy has no integer type
            raise _too_large(values, name)
        raise TypeError(f"{name} has dtype {found.dtype}; int32 or int64 is expected")
    if found.dtype == np.uint64 and found.ndim in (1, 2) and int(found.max()) > _LARGEST:
        raise _too_large(found.tolist(), name)
    return found.astype(np.int64, copy=False)


def holds_integers(tensor: Tensor) -> bool:
    return tensor.dtype in _INTEGER_TENSORS


def _types(values: Any) -> set[type]:
    """The types of the elements of a list of integers or of a list of pairs."""
    kinds = set(map(type, values))
    if kinds <= {list, tuple}:
        return set(map(type, chain.from_iterable(values)))
    return kinds


def _too_large(values: Any, name: str) -> IndexError:
    """The error for the first of the ints, nested or not, that does not fit in 64 bits."""
    for position, value in enumerate(values):
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if not -_LARGEST - 1 <= inner <= _LARGEST:
                return IndexError(f"{name}[{position}]: {shown(inner)} must be in [0, {_LARGEST}]")
    raise AssertionError(f"{name} holds no value beyond 64 bits")


def integer(value: Any, name: str) -> int:
    """``value`` as an int that fits in 64 bits."""
    if type(value) is int and -_LARGEST <= value <= _LARGEST:
        return value
    if isinstance(value, Tensor):
        raise TypeError(f"{name} is a tensor; an integer is expected: int(tensor) reads it, and waits for its device")
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {reprlib.repr(value)} ({type(value).__name__}); an integer is expected")
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} = {shown(number)} does not fit in 64 bits")
    return number


def num_blocks(caches: Sequence[Tensor]) -> int | None:
    """Of the first cache, as its first dimension; None: there is none, or it is known only when a program runs."""
    shape = caches[0].shape if caches else ()
    return next((size for size in shape[:1] if size >= 0), None)


def cache(tensor: Any, name: str, *, views: bool = False) -> Tensor:
    """A dygraph tensor that an operator may write in place; while tracing any variable of the program.

    Args:
        views: whether it may be a view with strides, which the operator checks. Only calls that go straight into the
            library can have one.

    Raises:
        TypeError: not a Paddle tensor.
        ValueError: not contiguous (Paddle would silently write to a copy), not dense, or without memory.
    """
    if _is_plain(tensor) or (tracing() and is_variable(tensor)):
        return tensor  # type: ignore[no-any-return]
    check_dense(tensor, name)
    if not tensor._is_initialized():
        raise ValueError(_without_memory(name))
    if not tensor.is_contiguous() and not (views and _library.operators):
        raise ValueError(f"{name} is not contiguous (shape {list(tensor.shape)}); a cache must be contiguous")
    return tensor  # type: ignore[no-any-return]


def cache_in_place(tensor: Any, name: str, *, views: bool = False) -> Tensor:
    """:func:`cache` for an operator of which Paddle knows that it writes in place. What Paddle says against that it
    says when the operator has written.

    Raises:
        ValueError: a leaf that needs a gradient.
    """
    cache(tensor, name, views=views)
    if not tensor.stop_gradient:
        check_in_place([tensor], lambda i: name)
    return tensor  # type: ignore[no-any-return]


def check_in_place(tensors: Sequence[Tensor], name_of: Callable[[int], str]) -> None:
    """ValueError for a leaf that needs a gradient, as for :func:`cache_in_place`."""
    if tracing():
        return
    for i, tensor in enumerate(tensors):
        if not tensor.stop_gradient and tensor.is_leaf:
            raise ValueError(
                f"{name_of(i)} is a leaf that needs a gradient; a tensor with stop_gradient=True is expected"
            )


def readable(tensor: Any, name: str, *, views: bool = False) -> Tensor:
    """A dygraph tensor, perhaps empty, that an operator reads; while tracing any variable of the program.

    Args:
        views: as for :func:`cache`.

    Raises:
        TypeError: not a Paddle tensor.
        ValueError: not contiguous (Paddle would read it into a copy, on its own stream), not dense, or without memory.
    """
    if _is_plain(tensor) or (tracing() and is_variable(tensor)):
        return tensor  # type: ignore[no-any-return]
    check_dense(tensor, name)
    if 0 in tensor.shape:
        place_of(tensor, name)
    elif not tensor.is_contiguous() and not (views and _library.operators):
        raise ValueError(f"{name} is not contiguous (shape {list(tensor.shape)}); a contiguous tensor is expected")
    return tensor  # type: ignore[no-any-return]


def check_dense(tensor: Any, name: str) -> None:
    """TypeError unless it is a tensor; ValueError for one that has elements but no memory in which they are in order.

    Asked before anything else: a sparse tensor has neither an address nor strides, and Paddle dies of being asked.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; a paddle.Tensor is expected")
    if not tensor._is_initialized() and 0 not in tensor.shape:  # its memory was released
        raise ValueError(_without_memory(name))
    if not tensor.is_dense():
        raise ValueError(f"{name} is not a dense tensor; a dense one is expected")


def _without_memory(name: str) -> str:
    return f"{name} holds no memory; an allocated tensor is expected"


def place_of(tensor: Tensor, name: str) -> Any:
    """Where the tensor is.

    Raises:
        ValueError: nowhere, as ``paddle.Tensor()`` of Paddle 2.6, which would raise RuntimeError.
    """
    try:
        return tensor.place
    except RuntimeError:
        raise ValueError(_without_memory(name)) from None


# Numbers of Paddle's dtypes in C++, the same in all versions. 2.6 has no fp8.
_DTYPE_NUMBERS = {
    getattr(paddle, name): number
    for name, number in (
        ("bool", 1),
        ("uint8", 2),
        ("int8", 3),
        ("int16", 5),
        ("int32", 7),
        ("int64", 9),
        ("float32", 10),
        ("float64", 11),
        ("float16", 15),
        ("bfloat16", 16),
        ("float8_e4m3fn", 17),
        ("float8_e5m2", 18),
    )
    if hasattr(paddle, name)
}
_NUMBERS = frozenset(_DTYPE_NUMBERS.values())


def strided(tensor: Any, name: str) -> list[int]:
    """A tensor with any strides that an operator reads, as numbers: Paddle would copy the tensor itself.

    Address, dtype, device, shape, strides: what ``StridedFromNumbers`` in C++ takes. The tensor must stay alive as long
    as the operator reads it.

    Raises:
        TypeError: not a Paddle tensor, or of a dtype that no operator takes.
        ValueError: a tensor without memory, or not dense.
    """
    numbers = _strided(tensor)
    if numbers is not None and numbers[1] in _NUMBERS:
        return numbers  # type: ignore[no-any-return]
    check_dense(tensor, name)
    number = _DTYPE_NUMBERS.get(tensor.dtype)
    if number is None:
        raise TypeError(f"{name} has dtype {tensor.dtype}, which no operator takes")
    place_of(tensor, name)
    shape = tensor.shape
    address = tensor.data_ptr() if 0 not in shape else 0
    return [address, number, devices.device_of(tensor), *shape, *tensor.get_strides()]


def scale(value: Any, name: str, *, views: bool = False) -> tuple[Tensor | None, float]:
    """A scale as what an operator takes: the tensor or None, and the number that counts where it is None.

    Args:
        views: as for :func:`cache`.

    Raises:
        TypeError: neither a number nor a tensor.
        ValueError: a number that is not positive and finite as a float32, a tensor that is not contiguous, or a view of
            which two elements lie in one place.
    """
    if tracing() and is_variable(value):
        return value, 1.0
    if isinstance(value, Tensor):
        if 0 in value.shape:  # Paddle takes it for an absent input
            raise ValueError(f"{name} has shape {list(value.shape)}; one value or one for each head is expected")
        readable(value, name, views=views)
        if not value.is_contiguous():
            _check_apart(value, name)
        return value, 1.0
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    unreal = isinstance(value, (bool, str)) or kind in _UNREAL
    if unreal or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
        raise TypeError(f"{name} is {type(value).__name__}; a number or a float32 tensor is expected")
    try:
        with np.errstate(over="ignore", under="ignore"):
            number = float(np.float32(float(value)))
    except (OverflowError, ValueError):  # an integer beyond float64, a decimal that is a signalling NaN
        number = float("nan")
    if not 0.0 < number < float("inf"):
        raise ValueError(f"{name} = {shown(value)} must be positive and finite in float32")
    return None, number


def _check_apart(tensor: Tensor, name: str) -> None:
    """ValueError unless all elements of a view lie in places of their own. Where the stride of a token is 0 the kernels
    would take the scales of the first block for all, and what overlaps such memory would not be seen."""
    strides = tensor.get_strides()
    extent = 1
    for stride, size in sorted(zip(strides, tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and strides {list(strides)}; no two of its elements may lie in "
                "one place, and no stride may be negative"
            )
        extent += (size - 1) * stride


def caches(tensors: Any, name: str) -> list[Tensor]:
    """A non-empty list of caches: an empty one kills the process inside Paddle."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"{name} is {type(tensors).__name__}; a list of paddle.Tensor is expected")
    if all(map(_is_plain, tensors)):
        return list(tensors)  # names are made only where one is needed: there may be thousands of tensors
    return [cache(tensor, f"{name}[{i}]") for i, tensor in enumerate(tensors)]


def known_on_device_only(ids: Any) -> bool:
    """Whether ids can be read only when the operator runs: a GPU tensor, or a variable of a program."""
    if tracing():
        return is_variable(ids)
    return isinstance(ids, Tensor) and ids.is_dense() and ids._is_initialized() and device_of(ids) >= 0


def pairs_in_memory(pairs: Any) -> tuple[int, int] | None:
    """Address and number of pairs that an operator can read where they lie: in a tensor on the CPU."""
    numbers = _strided(pairs)
    if numbers is None or numbers[1:3] != [_DTYPE_NUMBERS[paddle.int64], devices.CPU] or numbers[4:] != [2, 2, 1]:
        return None
    return numbers[0], numbers[3]


def device_ids(ids: Any, name: str) -> Any:
    """A GPU tensor or variable of ids as an operator takes it; C++ checks shape and dtype."""
    if not tracing() and not ids.is_contiguous():
        raise ValueError(f"{name} is not contiguous (shape {list(ids.shape)}); Paddle would copy it behind our back")
    return ids


def device_of(tensor: Tensor) -> int:
    """:func:`paddle_kv.devices.device_of`."""
    device = _device(tensor)
    return devices.device_of(tensor) if device is None else device


def handle(stream: Any, tensor: Tensor) -> int:
    """:func:`paddle_kv.streams.resolve`."""
    device = device_of(tensor)
    return streams.resolve_on(stream, device) if device >= 0 else 0
