"""Memory for tests, on the CPU and on a GPU alike: poisoned, guarded on both sides, at any alignment, seen as bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

POISON = 0xDE
GUARD_BYTES = 256

# The NumPy type that Paddle takes for a dtype: uint16 is bfloat16 to it; float8 has none and is viewed from uint8.
_NUMPY_TYPES = {
    "bfloat16": np.uint16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "uint8": np.uint8,
    "int8": np.int8,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
}
DTYPES = [name for name in _NUMPY_TYPES if hasattr(paddle, name)]


def item_bytes(dtype: str) -> int:
    return int(np.dtype(_NUMPY_TYPES[dtype]).itemsize)


@dataclass
class Machine:
    """Where caches live, where host memory to be swapped with them comes from, and how to wait for all work."""

    place: Any
    allocate_host: Callable[[int], np.ndarray]
    synchronize: Callable[[], None]

    @property
    def on_cpu(self) -> bool:
        return isinstance(self.place, paddle.CPUPlace)


def cpu_machine() -> Machine:
    return Machine(paddle.CPUPlace(), lambda num_bytes: np.empty(num_bytes, np.uint8), lambda: None)


def random_bits(blocks: int, block_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), np.uint8)


@dataclass
class GuardedHost:
    """Host blocks between poisoned guards, ``misalignment`` bytes behind an address that is a multiple of 256."""

    machine: Machine
    bits: np.ndarray  # what it is filled with, [blocks, block bytes]
    misalignment: int = 0
    _storage: np.ndarray = field(init=False)
    _first: int = field(init=False)

    def __post_init__(self) -> None:
        self._storage = self.machine.allocate_host(self.bits.size + 3 * GUARD_BYTES)
        self._first = GUARD_BYTES + (-self._storage.ctypes.data) % GUARD_BYTES + self.misalignment
        self.refill()

    def refill(self) -> None:
        """As it was in the beginning."""
        self._storage[:] = POISON
        self._storage[self._first : self._first + self.bits.size] = self.bits.ravel()

    @property
    def address(self) -> int:
        return int(self._storage.ctypes.data) + self._first

    def check(self, expected: np.ndarray) -> None:
        """Every byte is as expected, and no guard has changed."""
        whole = np.full_like(self._storage, POISON)
        whole[self._first : self._first + expected.size] = expected.ravel()
        np.testing.assert_array_equal(self._storage, whole)


@dataclass
class GuardedCache:
    """A cache tensor whose neighbours in memory, one block before and one behind it, hold poison."""

    machine: Machine
    bits: np.ndarray  # [blocks, block bytes]
    block_shape: tuple[int, ...]
    dtype: str
    tensor: paddle.Tensor = field(init=False)
    _whole: paddle.Tensor = field(init=False)

    def __post_init__(self) -> None:
        guard = np.full((1, self.bits.shape[1]), POISON, np.uint8)
        guarded = np.concatenate([guard, self.bits, guard])
        self._whole = tensor_of(guarded, self.block_shape, self.dtype, self.machine.place)
        self.tensor = self._whole[1 : len(self.bits) + 1]
        assert self.tensor.data_ptr() == self._whole.data_ptr() + guard.size, "a slice of rows is a view"

    def check(self, expected: np.ndarray) -> None:
        whole = bits_of(self._whole)
        np.testing.assert_array_equal(whole[1:-1], expected)
        assert (whole[[0, -1]] == POISON).all(), "a guard block was written"


def tensor_of(bits: np.ndarray, block_shape: tuple[int, ...], dtype: str, place: Any) -> paddle.Tensor:
    """[blocks, bytes] as a tensor [blocks, *block_shape] with exactly these bits."""
    array = np.ascontiguousarray(bits).view(_NUMPY_TYPES[dtype]).reshape(len(bits), *block_shape)
    tensor = paddle.to_tensor(array, place=place)
    return tensor.view(dtype) if dtype.startswith("float8") else tensor


def bits_of(tensor: paddle.Tensor) -> np.ndarray:
    """A tensor's bytes, [blocks, bytes of a block]."""
    return np.ascontiguousarray(tensor.numpy()).view(np.uint8).reshape(tensor.shape[0], -1)
