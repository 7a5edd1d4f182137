"""vectorized_copy and memcpy_batch on lists of addresses, against the reference, on the whole memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import POISON, Machine, cpu_machine, random_bits
from tests.reference import memcpy as reference

OPS: dict[str, Any] = {
    "vectorized_copy": ops.vectorized_copy,
    "memcpy_batch": ops.memcpy_batch,
    "memcpy_batch, loop": lambda *lists, **named: ops.memcpy_batch(*lists, mode="loop", **named),
}
every_op = pytest.mark.parametrize("op", OPS)


class Memory:
    """Bytes on the machine of the test, the first half to be read and the second to be written."""

    def __init__(self, machine: Machine, num_bytes: int) -> None:
        self.machine, self.half = machine, num_bytes
        self.before = np.concatenate([random_bits(1, num_bytes, 3)[0], np.full(num_bytes, POISON, np.uint8)])
        self.tensor = paddle.to_tensor(self.before, place=machine.place)

    def pointers(self, offsets: Any) -> list[int]:
        return [self.tensor.data_ptr() + int(offset) for offset in offsets]

    def check(self, op: str, sources: Any, targets: Any, sizes: Any, form: Any = list, **named: Any) -> None:
        """Offsets of targets count from the start of the second half."""
        targets = [self.half + int(target) for target in targets]
        given = [form(self.pointers(sources)), form(self.pointers(targets))]
        assert OPS[op](*given, sizes if isinstance(sizes, int) else form(sizes), **named) is None
        self.machine.synchronize()
        expected = reference.copied(self.before, sources, targets, sizes)
        np.testing.assert_array_equal(self.tensor.numpy(), expected)


def laid_out(sizes: list[int], gaps: list[int], seed: int) -> list[int]:
    """Offsets of pieces in shuffled order with gaps before them."""
    offsets = [0] * len(sizes)
    position = 0
    for i in np.random.default_rng(seed).permutation(len(sizes)).tolist():
        offsets[i] = position + gaps[i]
        position = offsets[i] + sizes[i]
    return offsets


def scattered(sizes: list[int], seed: int) -> tuple[list[int], list[int], int]:
    """Sources and targets at any alignment, and the bytes that hold them."""
    random = np.random.default_rng(seed)
    gaps = random.integers(0, 40, (2, len(sizes))).tolist()
    sources, targets = laid_out(sizes, gaps[0], seed + 1), laid_out(sizes, gaps[1], seed + 2)
    return sources, targets, sum(sizes) + 40 * len(sizes) + 1


@every_op
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 255, 4095, 4096, 4097, 9001])
def test_every_alignment_of_both_sides(machine: Machine, op: str, size: int) -> None:
    """All of them in one list."""
    places = [(a, b) for a in (0, 1, 2, 3, 4, 7, 8, 15) for b in (0, 1, 2, 4, 6, 8, 13)]
    pitch = size + 32
    memory = Memory(machine, pitch * len(places))
    sources = [pitch // 16 * 16 * i + a for i, (a, _) in enumerate(places)]
    targets = [pitch // 16 * 16 * i + b for i, (_, b) in enumerate(places)]
    memory.check(op, sources, targets, size)


@every_op
@pytest.mark.parametrize("count", [1, 2, 119, 120, 121, 1000])
def test_sizes_of_all_magnitudes_in_one_list(machine: Machine, op: str, count: int) -> None:
    sizes = (2 ** np.random.default_rng(count).uniform(0, 13, count)).astype(int).tolist()
    sources, targets, num_bytes = scattered(sizes, count)
    Memory(machine, num_bytes).check(op, sources, targets, sizes)


@every_op
def test_one_large_piece_among_small_ones(machine: Machine, op: str) -> None:
    sizes = [5, (3 << 20) + 1, 1, 0, 4097]
    sources, targets, num_bytes = scattered(sizes, 8)
    memory = Memory(machine, num_bytes)
    pointers = memory.pointers(sources), memory.pointers([memory.half + target for target in targets])
    OPS[op](*pointers, sizes)
    machine.synchronize()
    expected = memory.before.copy()
    for source, target, size in zip(sources, targets, sizes, strict=True):
        expected[memory.half + target : memory.half + target + size] = memory.before[source : source + size]
    np.testing.assert_array_equal(memory.tensor.numpy(), expected)


@every_op
def test_pieces_of_no_bytes(machine: Machine, op: str) -> None:
    """Wherever they point, and in any place of the list."""
    memory = Memory(machine, 100)
    memory.check(op, [5, 20, 5, 40], [7, 30, 7, 7], [0, 9, 0, 0])
    OPS[op]([0, 12345, memory.tensor.data_ptr()], [0, 0, memory.tensor.data_ptr()], [0, 0, 0])
    OPS[op]([0, 1], [0, 1], 0)


@every_op
def test_empty_lists(machine: Machine, op: str) -> None:
    OPS[op]([], [], [])
    OPS[op]((), np.empty(0, np.int64), 7)


@every_op
def test_a_source_may_be_read_more_than_once(machine: Machine, op: str) -> None:
    Memory(machine, 90).check(op, [10, 10, 12], [0, 20, 40], [10, 7, 10])


@every_op
@pytest.mark.parametrize(
    "form",
    [tuple, np.array, lambda values: paddle.to_tensor(values, place=paddle.CPUPlace(), dtype="int64")],
    ids=["tuple", "array", "CPU tensor"],
)
def test_forms_of_lists(machine: Machine, op: str, form: Any) -> None:
    Memory(machine, 200).check(op, [1, 70], [80, 3], [50, 60], form)


@pytest.mark.parametrize("size", [9, np.int32(9), np.int64(9)])
def test_one_size_for_all(machine: Machine, size: Any) -> None:
    memory = Memory(machine, 60)
    ops.vectorized_copy(memory.pointers([0, 20]), memory.pointers([60, 80]), size)
    machine.synchronize()
    np.testing.assert_array_equal(memory.tensor.numpy(), reference.copied(memory.before, [0, 20], [60, 80], 9))


class TestErrors:
    def refuses(self, machine: Machine, op: str, error: type[Exception], match: str, *lists: Any) -> None:
        """Offsets into one memory; a null address stays one. Nothing has been copied."""
        memory = Memory(machine, 100)
        pointers = [[o if o is None else o and memory.tensor.data_ptr() + o for o in offsets] for offsets in lists[:2]]
        with pytest.raises(error, match=match):
            OPS[op](*pointers, lists[2])
        machine.synchronize()
        np.testing.assert_array_equal(memory.tensor.numpy(), memory.before)

    @every_op
    def test_lengths(self, machine: Machine, op: str) -> None:
        why = "both must have the same number"
        self.refuses(machine, op, ValueError, f"source_pointers has 2 .*target_pointers has 1.*{why}", [1, 2], [100], 1)
        self.refuses(machine, op, ValueError, f"source_pointers has 0 .*target_pointers has 1.*{why}", [], [100], [])
        self.refuses(machine, op, ValueError, f"source_pointers has 2 .*sizes has 1.*{why}", [1, 2], [100, 110], [1])
        self.refuses(machine, op, ValueError, f"source_pointers has 1 .*sizes has 2.*{why}", [1], [100], [1, 1])

    @every_op
    def test_sizes(self, machine: Machine, op: str) -> None:
        self.refuses(machine, op, ValueError, r"sizes\[1\] = -1 must not be negative", [1, 2], [100, 110], [1, -1])
        self.refuses(machine, op, ValueError, r"sizes\[0\] = -5 must not be negative", [1, 2], [100, 110], -5)
        self.refuses(machine, op, TypeError, "sizes is 1.5", [1], [100], 1.5)
        self.refuses(machine, op, TypeError, "sizes", [1], [100], None)
        self.refuses(machine, op, TypeError, "sizes", [1], [100], [1.5])
        self.refuses(machine, op, TypeError, "sizes", [1], [100], True)

    @every_op
    def test_null_addresses(self, machine: Machine, op: str) -> None:
        self.refuses(
            machine, op, ValueError, r"source_pointers\[1\] is null, its size is 3", [1, 0], [100, 110], [1, 3]
        )
        self.refuses(machine, op, ValueError, r"target_pointers\[0\] is null, its size is 3", [1, 2], [0, 110], 3)

    @every_op
    def test_a_size_that_no_address_has_room_for(self, machine: Machine, op: str) -> None:
        last = 2**63 - 1
        what = rf"\[1\] = \d+ and its size {last} do not name memory"
        self.refuses(machine, op, ValueError, f"source_pointers{what}", [1, 2], [100, 110], [1, last])

    @every_op
    def test_overlap(self, machine: Machine, op: str) -> None:
        two = r"target_pointers\[[02]\] and target_pointers\[[02]\] overlap"
        self.refuses(machine, op, ValueError, two, [1, 20, 40], [100, 150, 100], 3)
        self.refuses(machine, op, ValueError, two, [1, 20, 40], [109, 150, 100], 10)
        one = r"source_pointers\[1\] and target_pointers\[0\] overlap"
        self.refuses(machine, op, ValueError, one, [1, 99, 40], [100, 150, 120], 2)
        self.refuses(machine, op, ValueError, one, [1, 104, 40], [100, 150, 120], 5)
        self.refuses(machine, op, ValueError, r"source_pointers\[0\] and target_pointers\[0\] overlap", [7], [7], 1)

    @every_op
    def test_types(self, machine: Machine, op: str) -> None:
        self.refuses(machine, op, TypeError, "source_pointers", [None], [100], 1)
        with pytest.raises(TypeError, match="target_pointers"):
            OPS[op]([1], [1.0], 1)
        with pytest.raises(ValueError, match="source_pointers has shape"):
            OPS[op]([[1]], [1], 1)

    def test_modes(self) -> None:
        with pytest.raises(ValueError, match="mode is 'fast'"):
            ops.memcpy_batch([], [], [], mode="fast")  # type: ignore[arg-type]


@every_op
def test_while_a_program_is_traced(op: str) -> None:
    memory = Memory(cpu_machine(), 8)
    paddle.enable_static()
    try:
        with pytest.raises(NotImplementedError, match="works in dygraph only"):
            OPS[op](memory.pointers([0]), memory.pointers([8]), 4)
    finally:
        paddle.disable_static()
    np.testing.assert_array_equal(memory.tensor.numpy(), memory.before)


@given(
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(4000, 4200)), max_size=40),
    seed=st.integers(0, 2**20),
    op=st.sampled_from(list(OPS)),
)
def test_any_list(sizes: list[int], seed: int, op: str) -> None:
    sources, targets, num_bytes = scattered(sizes, seed)
    Memory(cpu_machine(), num_bytes).check(op, sources, targets, sizes)


def test_the_build_describes_itself() -> None:
    info = ops.build_info()
    assert set(info) == {"paddle", "cuda", "architectures", "commit", "compiler", "features"}
    assert info["paddle"] == paddle.__version__
    assert (
        (info["cuda"] is None)
        == ops.is_stub_build()
        == (info["architectures"] == [])
        == ("cuda" not in info["features"])
    )
    assert ("memcpy_batch_async" in info["features"]) == ops.has_memcpy_batch_async()
    info["features"].clear()
    assert "cpu" in ops.build_info()["features"], "the caller has a copy"


def test_batch_where_it_is_missing() -> None:
    if ops.has_memcpy_batch_async():
        memory = Memory(cpu_machine(), 8)
        ops.memcpy_batch(memory.pointers([0]), memory.pointers([8]), 4, mode="batch")
        np.testing.assert_array_equal(memory.tensor.numpy(), reference.copied(memory.before, [0], [8], 4))
        return
    with pytest.raises(NotImplementedError, match="cudaMemcpyBatchAsync"):
        ops.memcpy_batch([], [], [], mode="batch")
