"""Caches, block tables and tokens for the tests of gather_cache, scatter_cache and convert_layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from tests.machine import GuardedCache, Machine, bits_of, item_bytes
from tests.reference import cache_convert as reference

KINDS = ["key", "value"]
# Each layout once: packed differs for keys and values, the others do not.
LAYOUTS = [("HND", "key"), ("NHD", "key"), ("packed", "key"), ("packed", "value")]


def elements(bits: np.ndarray, size: int) -> np.ndarray:
    """Bytes as integers of the size of one element: what copies move, NaNs included."""
    return bits.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size])


@dataclass
class Sequences:
    """A block table and cumulative lengths, as arrays and as tensors."""

    table: np.ndarray
    lengths: np.ndarray
    ids: str = "int64"

    @property
    def tokens(self) -> int:
        return int(self.lengths[-1])

    def tensors(self, machine: Machine) -> tuple[paddle.Tensor, paddle.Tensor]:
        return (
            paddle.to_tensor(np.ascontiguousarray(self.table).astype(self.ids), place=machine.place),
            paddle.to_tensor(self.lengths.astype(self.ids), place=machine.place),
        )


def sequences(lengths: list[int], blocks: int, block_size: int, seed: int = 0, ids: str = "int64") -> Sequences:
    """Every sequence has blocks of its own, in no order; the rest of its row is padding."""
    needed = [-(-length // block_size) for length in lengths]
    assert sum(needed) <= blocks
    free = iter(np.random.default_rng(seed).permutation(blocks).tolist())
    table = np.full((len(lengths), max([*needed, 1]) + 1), -1)
    for row, count in zip(table, needed, strict=True):
        row[:count] = [next(free) for _ in range(count)]
    return Sequences(table, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), ids)


@dataclass
class Cache:
    """A poisoned, guarded cache with random bits, and the same bits in HND for the reference."""

    machine: Machine
    blocks: int
    heads: int
    block_size: int
    head_size: int
    dtype: str
    layout: str = "HND"
    kind: str = "key"
    seed: int = 0

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        size = item_bytes(self.dtype)
        shape = (self.blocks, self.heads, self.block_size, self.head_size)
        self.hnd = elements(random.integers(0, 256, (*shape[:3], self.head_size * size), np.uint8), size)
        laid_out = reference.to_layout(self.hnd, self.layout, self.kind)
        self.guarded = GuardedCache(self.machine, self.bits(self.hnd), laid_out.shape[1:], self.dtype)

    @property
    def tensor(self) -> paddle.Tensor:
        return self.guarded.tensor

    def bits(self, hnd: np.ndarray) -> np.ndarray:
        """[blocks, bytes] of a cache given in HND."""
        laid_out = reference.to_layout(hnd, self.layout, self.kind)
        return laid_out.view(np.uint8).reshape(self.blocks, -1)

    def check(self, hnd: np.ndarray) -> None:
        self.machine.synchronize()
        self.guarded.check(self.bits(hnd))

    def check_untouched(self) -> None:
        self.check(self.hnd)


def check_rows(machine: Machine, result: Any, expected: np.ndarray, dtype: str) -> None:
    machine.synchronize()
    assert str(result.dtype) == f"paddle.{dtype}"
    assert list(result.shape) == list(expected.shape)
    np.testing.assert_array_equal(
        bits_of(result), np.ascontiguousarray(expected).view(np.uint8).reshape(len(expected), -1)
    )
