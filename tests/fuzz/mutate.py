"""Turns a sound argument into one that may not be: wrong types, ranks, strides, ids, lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from tests.fuzz.ground import Ground

STRANGE = [None, "x", b"x", 1.5, True, {}, object(), 2**63, -(2**63) - 1, 2**70, float("nan"), complex(1, 1), [None]]


def mutated(value: Any, ground: Ground, name: str) -> Any:
    random = ground.random
    if random.random() < 0.12:
        return _choose(random, STRANGE)
    if isinstance(value, paddle.Tensor):
        return _tensor(value, ground)
    if isinstance(value, bool):
        return _choose(random, [0, 1, None, "True"])
    if isinstance(value, int):
        small = [-1, 0, 1, 2, 7, -(2**31), -(2**63), np.int32(1), np.int64(value), float(value)]
        # A host range that is too long, or an address that is wrong, cannot be seen on a CPU: not asked.
        return _choose(random, [0, -1, -(2**63)] if name in UNSEEN else small)
    if isinstance(value, float):
        return _choose(
            random, [0.0, -1.0, float("inf"), 1e-60, 1e60, np.float32(0.5), np.float64(2.0), 3, np.array(1.5)]
        )
    if isinstance(value, str):
        return _choose(
            random, ["", "nonsense", value.upper(), value + "\0", "HND", "NHD", "packed", "auto", "int8", "e5m2"]
        )
    if isinstance(value, dict):
        return _choose(random, [list(value.items()), {**value, -1: 0}, {str(key): of for key, of in value.items()}])
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], paddle.Tensor):
        return _tensors(list(value), ground)
    if isinstance(value, (list, tuple, range, np.ndarray)):
        return _numbers(value, ground, name)
    return _choose(random, STRANGE)


UNSEEN = {"cache_cpu_ptr", "max_block_num_cpu", "sizes", "source_pointers", "target_pointers", "cache_cpu_ptrs"}
UNSEEN |= {"cpu_block_ids", "host_pointer", "num_host_blocks", "block_stride_bytes", "block_size"}  # how long it is


def _choose(random: np.random.Generator, choices: list[Any]) -> Any:
    return choices[int(random.integers(len(choices)))]


def _tensor(tensor: paddle.Tensor, ground: Ground) -> Any:
    random = ground.random
    kind = int(random.integers(9))
    shape = tuple(tensor.shape)
    if not shape or 0 in shape:
        kind = 8
    if kind == 0:  # another dtype, same shape
        return ground.tensor(shape, _choose(random, ["float16", "float32", "uint8", "int8", "float64"]))
    if kind == 1 and len(shape) < 6:  # another rank; Paddle 2.6 makes none above 6
        return ground.adopt(paddle.unsqueeze(tensor, int(random.integers(len(shape) + 1))))
    if kind == 2:
        return tensor[0]
    if kind == 3 and len(shape) > 1:  # strides
        order = list(random.permutation(len(shape)))
        return tensor.transpose([int(axis) for axis in order])
    if kind == 4:  # fewer rows
        return tensor[: max(1, shape[0] - 1)]
    if kind == 5:  # another size of one axis
        axis = int(random.integers(len(shape)))
        changed = tuple(size + (i == axis) for i, size in enumerate(shape))
        dtype = str(tensor.dtype).rsplit(".", 1)[-1]
        if dtype.startswith("int") and dtype != "int8":
            return ground.numbers(random.integers(-2, 9, changed), dtype)
        return ground.tensor(changed, dtype)
    if kind == 6:
        return tensor.numpy()
    if kind == 7:
        return paddle.to_tensor(np.zeros((0, *shape[1:]), "float32"), place=paddle.CPUPlace())
    return _choose(random, [paddle.Tensor(), [tensor], ground.numbers([]), tensor.tolist() if shape else None])


def _tensors(tensors: list[paddle.Tensor], ground: Ground) -> Any:
    random = ground.random
    at = int(random.integers(len(tensors)))
    other = list(tensors)
    kind = int(random.integers(7))
    if kind == 0:
        del other[at]
    elif kind == 1:
        other.append(tensors[at])  # the same memory twice
    elif kind == 2:
        other[at] = _tensor(tensors[at], ground)
    elif kind == 3:
        other = []
    elif kind == 4:
        return tuple(tensors)
    elif kind == 5:
        return tensors[0]
    else:
        other[at] = _choose(random, STRANGE)
    return other


def _numbers(values: Any, ground: Ground, name: str) -> Any:
    random = ground.random
    plain = np.asarray(values)
    listed = plain.tolist()
    if name in UNSEEN:
        forms = [[], listed[:-1], [*listed, *listed[:1]], [None], tuple(listed), np.array(listed, np.float32), "12"]
        return _choose(random, forms)
    kind = int(random.integers(16))
    if kind == 0:
        return []
    if kind == 1:
        return listed[:-1]
    if kind == 2 and listed:
        return [*listed, listed[0]]
    if kind == 3 and listed:
        at = int(random.integers(len(listed)))
        wrong = _choose(random, [-1, 10_000, 2**31, 2**63, 2**70, -(2**63), 1.0, True, None, "1", np.int32(0), [0], -2])
        return [*listed[:at], [wrong, 0] if plain.ndim == 2 and random.random() < 0.7 else wrong, *listed[at + 1 :]]
    if kind == 4:
        return tuple(listed)
    if kind == 5:
        return np.array(listed, np.int32)
    if kind == 6:
        return np.array(listed, np.uint8)
    if kind == 7:
        return np.array(listed, np.float32)
    if kind == 8:
        return ground.numbers(listed, "int32")
    if kind == 9:
        return ground.numbers(listed, "int64")
    if kind == 10:
        return np.array(listed, np.int64)[None]
    if kind == 11:
        return ground.numbers(np.asarray(listed, np.float32), "float32")
    if kind == 12:
        return np.repeat(np.array(listed, np.int64), 2, axis=0)[::2]  # strided
    if kind == 13:
        return listed[::-1]
    if kind == 14:
        return np.array(listed, np.uint64)
    return range(max(1, len(listed)))
