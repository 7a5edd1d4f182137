"""Calls of gather_topk_rows beside its reference: every byte of every tensor, and the poison around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

from paddle_kv import ops
from tests.machine import POISON, GuardedCache, GuardedHost, Machine, item_bytes, random_bits
from tests.reference.topk import State, gathered

INTEGERS = ("slot_of_token", "token_of_slot", "lru_order", "fresh", "scratch")


class GuardedIntegers:
    """A tensor of int32 with a poisoned row on either side."""

    def __init__(self, machine: Machine, values: np.ndarray) -> None:
        self.values = values = np.ascontiguousarray(values, np.int32)
        self._guard = np.full((1, *values.shape[1:]), int.from_bytes(bytes([POISON] * 4), "little", signed=True))
        whole = np.concatenate([self._guard, values, self._guard]).astype(np.int32)
        self._whole = paddle.to_tensor(whole, place=machine.place)
        self.tensor = self._whole[1:-1]
        assert self.tensor.data_ptr() == self._whole.data_ptr() + values[:1].nbytes, "a slice of rows is a view"

    def check(self, expected: np.ndarray | None) -> None:
        """None: whatever it holds."""
        whole = self._whole.numpy()
        np.testing.assert_array_equal(whole[[0, -1]], np.concatenate([self._guard] * 2), "a guard row was written")
        if expected is not None:
            np.testing.assert_array_equal(whole[1:-1], expected)


@dataclass
class Rig:
    machine: Machine
    batch: int = 2
    k: int = 5
    num_slots: int = 8
    row_elements: int = 3
    dtype: str = "float32"
    block_size: int = 4
    blocks: int = 6  # of a request in its table
    host_blocks: int = 9
    max_tokens: int = 24
    gap_bytes: int = 0  # between two host blocks
    misalignment: int = 0  # bytes, of the host
    seed: int = 0
    arguments: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        machine = self.machine
        self.random = np.random.default_rng(self.seed)
        row_bytes = self.row_bytes = self.row_elements * item_bytes(self.dtype)
        self.stride = self.block_size * row_bytes + self.gap_bytes
        self.host_bits = random_bits(self.host_blocks, self.stride, self.seed)
        self.host = GuardedHost(machine, self.host_bits, self.misalignment)
        held = random_bits(self.batch, self.num_slots * row_bytes, self.seed + 1)
        self.state = State.empty(held.reshape(self.batch, self.num_slots, row_bytes), self.max_tokens)
        self.resident = GuardedCache(machine, held, (self.num_slots, self.row_elements), self.dtype)
        self.out = GuardedCache(machine, random_bits(self.batch, self.k * row_bytes, self.seed + 2),
                                (self.k, self.row_elements), self.dtype)  # fmt: skip
        scratch = self.random.integers(-(2**31), 2**31, (self.batch, self.num_slots + 5 * self.k))
        values = {name: getattr(self.state, name) for name in INTEGERS[:-1]} | {"scratch": scratch}
        self.integers = {name: GuardedIntegers(machine, value) for name, value in values.items()}
        self.table = GuardedIntegers(machine, self.random.integers(0, self.host_blocks, (self.batch, self.blocks)))
        self.ids = GuardedIntegers(machine, np.full((self.batch, self.k), -1))
        self._collect()

    def _collect(self) -> None:
        host = (self.host.address, self.host_blocks, self.stride, self.block_size)
        names = ("host_pointer", "num_host_blocks", "block_stride_bytes", "block_size")
        self.arguments = {
            "token_ids": self.ids.tensor,
            "block_table": self.table.tensor,
            **dict(zip(names, host, strict=True)),
            "resident": self.resident.tensor,
            **{name: each.tensor for name, each in self.integers.items()},
        }

    def put(self, *, ids: Any = None, table: Any = None, fresh: Any = None) -> None:
        """Tensors with other values in the place of those that were given."""
        if ids is not None:
            self.ids = GuardedIntegers(self.machine, np.array(ids, np.int64).reshape(self.batch, self.k))
        if table is not None:
            self.table = GuardedIntegers(self.machine, np.array(table))
        if fresh is not None:
            self.state.fresh[:] = fresh
            self.integers["fresh"] = GuardedIntegers(self.machine, self.state.fresh)
        self._collect()

    def call(self, **changed: Any) -> paddle.Tensor:
        given = {**self.arguments, **changed}
        options = {"out": given.pop("out", self.out.tensor), "stream": given.pop("stream", None)}
        return ops.gather_topk_rows(*given.values(), **options)

    def expect(self) -> list[int]:
        """What a call changes, in the reference alone. Returns the misses of each request."""
        blocks = self.host_bits[:, : self.block_size * self.row_bytes]
        host = blocks.reshape(self.host_blocks, self.block_size, self.row_bytes)
        rows, misses = gathered(self.state, self.ids.values, self.table.values, host)
        self.rows = rows.reshape(self.batch, -1)
        return misses

    def check(self) -> None:
        """All memory is as the reference has it."""
        self.machine.synchronize()
        self.out.check(self.rows)
        self.check_state()

    def check_state(self) -> None:
        self.machine.synchronize()
        self.resident.check(self.state.resident.reshape(self.batch, -1))
        for name, each in self.integers.items():
            each.check(None if name == "scratch" else getattr(self.state, name))
        for each in (self.ids, self.table):
            each.check(each.values)
        self.host.check(self.host_bits)

    def step(self, ids: Any = None, **put: Any) -> list[int]:
        """One call, checked. Returns the misses of each request."""
        self.put(ids=ids, **put)
        assert self.call() is self.out.tensor
        misses = self.expect()
        self.check()
        return misses

    def random_ids(self) -> np.ndarray:
        """Tokens out of a window, some of them twice, among padding and tokens that are nowhere."""
        most = max(self.max_tokens, self.blocks * self.block_size)
        first, width = self.random.integers(most), self.random.integers(1, most + 1)
        ids = (first + self.random.integers(0, width, (self.batch, self.k))) % most
        odd = self.random.choice([-1, -7, -(2**31), most, most + 3, 2**31 - 1], ids.shape)
        return np.where(self.random.random(ids.shape) < 0.1, odd, ids)

    def random_table(self) -> np.ndarray:
        return self.random.integers(-1, self.host_blocks + 1, (self.batch, self.blocks))
