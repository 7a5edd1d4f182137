"""Block stacks, caches and dense tensors in poisoned memory, to be compared with the reference byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import paddle

from tests.machine import POISON, GuardedCache, Machine, bits_of, item_bytes, random_bits, tensor_of


@dataclass
class Shape:
    """All sizes differ from each other, and none is a multiple of a word."""

    blocks: int = 3
    layers: int = 5
    outer: int = 2
    heads: int = 7
    tokens: int = 11
    width: int = 13
    dtype: str = "uint8"
    layout: str = "NHD"

    @property
    def chunk(self) -> tuple[int, int, int]:
        rows = (self.tokens, self.heads) if self.layout == "NHD" else (self.heads, self.tokens)
        return (*rows, self.width)

    @property
    def chunk_bytes(self) -> int:
        return self.heads * self.tokens * self.width * item_bytes(self.dtype)

    @property
    def chunk_count(self) -> int:
        return self.blocks * self.layers * self.outer

    @property
    def universal(self) -> tuple[int, ...]:
        return (self.blocks, self.heads, self.layers, self.outer, self.tokens, self.width)

    @property
    def operational(self) -> tuple[int, ...]:
        return (self.blocks, self.layers, self.outer, self.heads * self.tokens * self.width)

    def as_rows(self, bits: np.ndarray) -> list[np.ndarray]:
        """Chunks [count, bytes] as the reference wants them: the width in bytes."""
        return list(bits.reshape(len(bits), *self.chunk[:2], -1))


@dataclass
class Stack:
    """Chunks in shuffled order in one memory, poison between any two of them. ``filled``: with random bits."""

    machine: Machine
    shape: Shape
    filled: bool = True
    seed: int = 0
    bits: np.ndarray = field(init=False)
    chunks: list[paddle.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        count = self.shape.chunk_count
        self.bits = random_bits(count, self.shape.chunk_bytes, self.seed)
        if not self.filled:
            self.bits[:] = POISON
        self._slots = 1 + 2 * np.random.default_rng(self.seed).permutation(count)
        self._whole = tensor_of(self._in_slots(self.bits), self.shape.chunk, self.shape.dtype, self.machine.place)
        self.chunks = [self._whole[int(slot)] for slot in self._slots]
        first = self._whole.data_ptr()
        assert [chunk.data_ptr() - first for chunk in self.chunks] == [s * self.shape.chunk_bytes for s in self._slots]

    def _in_slots(self, bits: np.ndarray) -> np.ndarray:
        whole = np.full((2 * len(bits) + 1, self.shape.chunk_bytes), POISON, np.uint8)
        whole[self._slots] = bits
        return whole

    @property
    def addresses(self) -> list[int]:
        return [int(chunk.data_ptr()) for chunk in self.chunks]

    def check(self, expected: np.ndarray) -> None:
        """Every chunk is as expected, [count, bytes], and nothing beside them was written."""
        np.testing.assert_array_equal(bits_of(self._whole), self._in_slots(expected))

    def check_untouched(self) -> None:
        self.check(self.bits)


def dense(machine: Machine, shape: Sequence[int], dtype: str, bits: np.ndarray | None = None) -> GuardedCache:
    """A dense tensor with poison around it, holding ``bits`` or poison too."""
    if bits is None:
        bits = np.full((shape[0], int(np.prod(shape[1:])) * item_bytes(dtype)), POISON, np.uint8)
    return GuardedCache(machine, bits.reshape(shape[0], -1), tuple(shape[1:]), dtype)


def flat(array: np.ndarray) -> np.ndarray:
    """[first, bytes of the rest]"""
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
