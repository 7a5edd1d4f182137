"""What simulated memory holds: for each block of a layer and tensor a version per piece, and the real bytes as well.

A piece is what moves at once. A copy or a computation in several pieces first poisons the whole target: between its
first and last step it holds pieces of poison, as a real copy leaves a mixture of old and new.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

POISON = "poison"
INITIAL = "initial"
POISON_BYTE = 0xDE


class Cell(NamedTuple):
    """One block of one tensor of one layer, or of one layer buffer of a ring."""

    pool: str
    name: str
    layer: int
    slot: int


class PoolMemory:
    """Addresses of one pool. It does not keep the memory alive: that is the scheduler's duty, and is checked."""

    def __init__(self, key: str, pool: Any) -> None:
        spec = pool.spec
        self.key = key
        self.spec = spec
        self.is_device = hasattr(pool, "tensor")
        self.layer_buffers = int(pool.layer_buffers) if self.is_device else int(spec.num_layers)
        self._memory = [weakref.ref(m) for m in self._owners(pool)]
        self._addresses: dict[tuple[str, int], int] = {}
        self._strides: dict[str, int] = {}
        for name in spec.tensor_names:
            for layer in range(spec.num_layers):
                address = pool.tensor(name, layer).data_ptr() if self.is_device else pool.pointer(name, layer)
                self._addresses[name, layer] = int(address)
            self._strides[name] = spec.tensor_block_bytes(name) if self.is_device else pool.stride_bytes(name)

    def _owners(self, pool: Any) -> list[Any]:
        if self.is_device:
            return [
                pool.tensor(name, layer) for name in self.spec.tensor_names for layer in range(self.spec.num_layers)
            ]
        return list(pool._memory)

    @property
    def alive(self) -> bool:
        return all(reference() is not None for reference in self._memory)

    def address(self, cell: Cell) -> int:
        return self._addresses[cell.name, cell.layer] + cell.slot * self._strides[cell.name]

    def block_bytes(self, cell: Cell) -> int:
        return int(self.spec.tensor_block_bytes(cell.name))

    def cell(self, name: str, layer: int, slot: int) -> Cell:
        """Where a layer of a block lies."""
        return Cell(self.key, name, layer % self.layer_buffers, slot)


class Memory:
    """All pools of one device."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self._pools: dict[str, PoolMemory] = {}
        self._versions: dict[Cell, list[Hashable]] = {}

    def add(self, pool: PoolMemory) -> PoolMemory:
        return self._pools.setdefault(pool.key, pool)

    def knows(self, pool: str) -> bool:
        return pool in self._pools

    def cells(self, pool: str, slot: int, layer: int) -> list[Cell]:
        return [self._pools[pool].cell(name, layer, slot) for name in self._pools[pool].spec.tensor_names]

    def versions(self, cell: Cell) -> list[Hashable]:
        return self._versions.get(cell, [INITIAL] * self.pieces)

    def poison(self, cell: Cell) -> None:
        self._versions[cell] = [POISON] * self.pieces
        pool = self._pools[cell.pool]
        if pool.alive:
            ctypes.memset(pool.address(cell), POISON_BYTE, pool.block_bytes(cell))

    def copy_piece(self, source: Cell, target: Cell, piece: int) -> bool:
        """False if one side is no longer there: nothing is touched then."""
        here, there = self._pools[source.pool], self._pools[target.pool]
        if not here.alive or not there.alive:
            return False
        if piece == 0:
            self.poison(target)
        self._set(target, piece, self.versions(source)[piece])
        first, last = self._range(here.block_bytes(source), piece)
        ctypes.memmove(there.address(target) + first, here.address(source) + first, last - first)
        return True

    def write_piece(self, target: Cell, piece: int, version: Hashable) -> None:
        """Compute writes; the bytes become the hash of the version, so that equal versions are equal bytes."""
        if piece == 0:
            self.poison(target)
        self._set(target, piece, version)
        pool = self._pools[target.pool]
        first, last = self._range(pool.block_bytes(target), piece)
        if pool.alive:
            ctypes.memset(pool.address(target) + first, byte_of(version), last - first)

    def _set(self, cell: Cell, piece: int, version: Hashable) -> None:
        versions = list(self.versions(cell))
        versions[piece] = version
        self._versions[cell] = versions

    def _range(self, size_bytes: int, piece: int) -> tuple[int, int]:
        return size_bytes * piece // self.pieces, size_bytes * (piece + 1) // self.pieces


def byte_of(version: Hashable) -> int:
    """The byte that compute fills a block with."""
    return sum(str(version).encode()) % 251


def whole(versions: Iterable[Hashable]) -> Hashable:
    """The version if all pieces have the same one, else poison: half of one and half of another is of no use."""
    distinct = set(versions)
    return distinct.pop() if len(distinct) == 1 else POISON
