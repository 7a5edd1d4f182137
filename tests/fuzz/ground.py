"""Memory of one call: tensors between guards, host memory, and what all of it held before."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from tests.machine import item_bytes, tensor_of

GUARD_ROWS = 1
ELEMENTS = ["float16", "bfloat16", "float32", "uint8", "int8"]


def bytes_at(address: int, size_bytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


@dataclass
class Region:
    """Live bytes, what they were, and what keeps them."""

    memory: np.ndarray
    before: np.ndarray
    owner: Any


class Ground:
    """Everything that a call may see is made here, so that nothing else can have changed without notice."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.regions: list[Region] = []

    def tensor(self, shape: tuple[int, ...], dtype: str, *, values: np.ndarray | None = None) -> paddle.Tensor:
        """Contiguous, with random bits or the bits of ``values``, one row of guard on either side."""
        row = int(np.prod(shape[1:], dtype=np.int64)) * item_bytes(dtype)
        bits = self.random.integers(0, 256, (shape[0] + 2 * GUARD_ROWS, row), np.uint8)
        if values is not None:
            bits[GUARD_ROWS:-GUARD_ROWS] = np.ascontiguousarray(values).view(np.uint8).reshape(shape[0], row)
        whole = tensor_of(bits, tuple(shape[1:]), dtype, paddle.CPUPlace())
        self._keep(whole)
        return whole[GUARD_ROWS : GUARD_ROWS + shape[0]]

    def numbers(self, values: Any, dtype: str = "int64") -> paddle.Tensor:
        """A tensor of ids."""
        tensor = paddle.to_tensor(np.asarray(values, dtype), place=paddle.CPUPlace())
        self._keep(tensor)
        return tensor

    def host(self, size_bytes: int) -> np.ndarray:
        """Plain memory, guarded, at any alignment."""
        storage = self.random.integers(0, 256, size_bytes + 128, np.uint8)
        self.regions.append(Region(storage, storage.copy(), storage))
        first = int(self.random.integers(32, 64))
        return storage[first : first + size_bytes]

    def adopt(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """A tensor that was made from others: its memory counts too, if it is memory of its own."""
        self._keep(tensor)
        return tensor

    def _keep(self, tensor: paddle.Tensor) -> None:
        if not tensor._is_initialized() or 0 in tensor.shape:
            return
        strides, shape = tensor.get_strides(), tensor.shape
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = bytes_at(tensor.data_ptr(), extent * tensor.element_size())
        self.regions.append(Region(memory, memory.copy(), tensor))

    def snapshot(self) -> None:
        for region in self.regions:
            region.before = region.memory.copy()

    def changed(self) -> bool:
        return any(not np.array_equal(region.memory, region.before) for region in self.regions)

    def expect(self, address: int, content: np.ndarray) -> None:
        """From now on the bytes at the address should be these, in every region that they lie in."""
        size = content.size
        for region in self.regions:
            start = region.memory.ctypes.data
            first, end = max(start, address), min(start + region.memory.size, address + size)
            if first < end:
                region.before[first - start : end - start] = content[first - address : end - address]


def bits(tensor: paddle.Tensor) -> np.ndarray:
    """A contiguous tensor's bytes as they were, [rows, bytes of a row]."""
    shape = tensor.shape
    row = int(np.prod(shape[1:], dtype=np.int64)) * tensor.element_size()
    return bytes_at(tensor.data_ptr(), shape[0] * row).reshape(shape[0], row).copy()


def array_of(tensor: paddle.Tensor) -> np.ndarray:
    """Any strides; bfloat16 as uint16, fp8 as int8."""
    return tensor.numpy()
