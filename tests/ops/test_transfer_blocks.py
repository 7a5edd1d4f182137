"""transfer_blocks against the reference, and its errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import DTYPES, GuardedCache, Machine, cpu_machine, item_bytes, random_bits, tensor_of
from tests.reference.swap import transferred


class Pair:
    """A source and a target tensor."""

    def __init__(self, machine: Machine, source_blocks: int, target_blocks: int, shape=(3, 5), dtype="float32") -> None:
        block_bytes = int(np.prod(shape)) * item_bytes(dtype)
        self.source_bits = random_bits(source_blocks, block_bytes, 1)
        self.target_bits = random_bits(target_blocks, block_bytes, 2)
        self.source = GuardedCache(machine, self.source_bits, shape, dtype)
        self.target = GuardedCache(machine, self.target_bits, shape, dtype)

    def transfer(self, mapping: Any, **changed: Any) -> Any:
        return ops.transfer_blocks(self.source.tensor, self.target.tensor, mapping, **changed)

    def check(self, pairs: list[tuple[int, int]]) -> None:
        self.source.check(self.source_bits)
        self.target.check(transferred(self.source_bits, self.target_bits, pairs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3), (3, 5, 7), (2, 3, 5, 4)], ids=["rank3", "rank4", "rank5"])
def test_dtypes_and_ranks(machine: Machine, dtype: str, shape: tuple[int, ...]) -> None:
    pair = Pair(machine, 7, 4, shape, dtype)
    assert pair.transfer([(6, 0), (0, 3), (3, 1)]) is pair.target.tensor
    pair.check([(6, 0), (0, 3), (3, 1)])


@pytest.mark.parametrize("block_bytes", [1, 3, 7, 17, 33, 4099, (1 << 20) + 1])
def test_odd_block_sizes(machine: Machine, block_bytes: int) -> None:
    pairs = [(4, 0), (1, 5), (2, 2), (0, 3)]
    pair = Pair(machine, 5, 6, (1, block_bytes), "uint8")
    pair.transfer(pairs)
    pair.check(pairs)


PAIRS = [(3, 1), (3, 4), (0, 2)]


@pytest.mark.parametrize(
    "mapping",
    [
        PAIRS,
        tuple(PAIRS),
        [list(pair) for pair in PAIRS],
        [np.array(pair) for pair in PAIRS],
        {3: [1, 4], 0: 2},
        {3: (1, 4), 0: [2]},
        {np.int64(3): np.array([1, 4]), 0: np.int32(2)},
        {3: range(1, 5, 3), 0: 2},
        np.array(PAIRS, "int32"),
        np.array(PAIRS, "int64"),
        np.asfortranarray(PAIRS),
    ],
)
def test_forms_of_the_mapping(machine: Machine, mapping: Any) -> None:
    pair = Pair(machine, 4, 5)
    pair.transfer(mapping)
    pair.check(PAIRS)


def test_tensors_as_mapping(machine: Machine) -> None:
    for mapping in (
        paddle.to_tensor(PAIRS, dtype="int32"),
        paddle.to_tensor(PAIRS, dtype="int64"),
        {3: paddle.to_tensor([1, 4]), 0: paddle.to_tensor(2)},
    ):
        pair = Pair(machine, 4, 5)
        pair.transfer(mapping)
        pair.check(PAIRS)


@pytest.mark.parametrize("mapping", [[], (), {}, {2: []}, np.zeros((0, 2), "int64"), np.zeros((0, 2)), np.array([])])
def test_an_empty_mapping_moves_nothing(machine: Machine, mapping: Any) -> None:
    pair = Pair(machine, 4, 5)
    assert pair.transfer(mapping) is pair.target.tensor
    pair.check([])


def test_inside_one_tensor(machine: Machine) -> None:
    bits = random_bits(6, 15, 3)
    cache = GuardedCache(machine, bits, (3, 5), "uint8")
    ops.transfer_blocks(cache.tensor, cache.tensor, [(0, 5), (0, 2), (3, 1)])
    cache.check(transferred(bits, bits, [(0, 5), (0, 2), (3, 1)]))


def test_into_a_view_of_the_first_blocks_of_the_source(machine: Machine) -> None:
    bits = random_bits(6, 15, 3)
    cache = GuardedCache(machine, bits, (3, 5), "uint8")
    first = cache.tensor[:2]
    ops.transfer_blocks(cache.tensor, first, [(5, 1)])
    cache.check(transferred(bits, bits, [(5, 1)]))
    with pytest.raises(ValueError, match="block 1 is in the sources and in the targets"):
        ops.transfer_blocks(cache.tensor, first, [(1, 0), (3, 1)])


WRONG_MAPPINGS: list[tuple[Any, type[Exception], str]] = [
    ([(4, 0)], IndexError, r"sources of block_mapping\[0\] = 4 must be in \[0, 4\)"),
    ([(0, 1), (-1, 0)], IndexError, r"sources of block_mapping\[1\] = -1 must be in \[0, 4\)"),
    ([(0, 5)], IndexError, r"targets of block_mapping\[0\] = 5 must be in \[0, 5\)"),
    ([(0, -2)], IndexError, r"targets of block_mapping\[0\] = -2 must be in \[0, 5\)"),
    ({0: [1, 5]}, IndexError, r"targets of block_mapping\[1\] = 5 "),
    ([(0, 2**32)], IndexError, r"= 4294967296 must"),
    ([(0, 2**63)], IndexError, r"block_mapping\[0\]: 9223372036854775808 "),
    ([(0, 1), (-1, 2**63)], IndexError, r"block_mapping\[1\]: 9223372036854775808 "),
    ({0: 2**65}, IndexError, r"block_mapping\[0\]: 36893488147419103232 "),
    (np.array([[0, 2**63]], "uint64"), IndexError, r"block_mapping\[0\]: 9223372036854775808 "),
    ([(0, 1), (2, 1)], ValueError, "block_mapping names block 1 more than once"),
    ({0: [1, 1]}, ValueError, "block_mapping names block 1 more than once"),
    ([(0,)], ValueError, r"block_mapping has shape \[1, 1\]"),
    ([(0, 1, 2)], ValueError, r"block_mapping has shape \[1, 3\]"),
    ([0, 1], ValueError, r"block_mapping has shape \[2\]"),
    (3, ValueError, r"block_mapping has shape \[\]"),
    ([(0, 1), (2,)], TypeError, "block_mapping"),
    ({0: [[1]]}, ValueError, r"block_mapping\[0\] has shape \[1, 1\]"),
    (None, TypeError, "block_mapping is None"),
    ("01", TypeError, "block_mapping is '01'"),
    ([(0, 1.0)], TypeError, "block_mapping has dtype float64"),
    ([(0, True)], TypeError, "block_mapping holds bool"),
    ({True: 0}, TypeError, "block_mapping holds bool"),
    ({0: None}, TypeError, "block_mapping"),
    ({0: {1}}, TypeError, "block_mapping"),
    (zip([0], [1], strict=True), TypeError, "block_mapping"),
]


@pytest.mark.parametrize(("mapping", "error", "text"), WRONG_MAPPINGS)
def test_wrong_mappings(machine: Machine, mapping: Any, error: type[Exception], text: str) -> None:
    pair = Pair(machine, 4, 5)
    with pytest.raises(error, match=text):
        pair.transfer(mapping)
    pair.check([])
    pair.transfer(PAIRS)
    pair.check(PAIRS)


def test_wrong_tensors(machine: Machine) -> None:
    pair = Pair(machine, 4, 5)
    source, target = pair.source.tensor, pair.target.tensor

    def zeros(*shape: int, dtype: str = "float32") -> paddle.Tensor:
        return paddle.to_tensor(np.zeros(shape, dtype), place=machine.place)

    for wrong, error, text in [
        ((None, target), TypeError, "source is NoneType; a paddle.Tensor is expected"),
        ((source, np.zeros((5, 3, 5))), TypeError, "target is ndarray; a paddle.Tensor is expected"),
        ((zeros(4, 5, 3).transpose([0, 2, 1]), target), ValueError, "source is not contiguous"),
        ((source, zeros(5, 3, 10)[:, :, ::2]), ValueError, "target is not contiguous"),
        ((source, zeros(5, 3, 5, dtype="int32")), ValueError, "source has dtype float32, target has int32"),
        ((source, zeros(5, 5, 3)), ValueError, r"source has shape \[4, 3, 5\], target has \[5, 5, 3\]"),
        ((source, zeros(5, 3, 5, 1)), ValueError, r"source has shape \[4, 3, 5\], target has \[5, 3, 5, 1\]"),
        ((zeros(4, 3), target), ValueError, "source has rank 2"),
        ((source, zeros(0, 3, 5)), ValueError, "target holds no memory"),
        ((source, source[1:]), ValueError, "share memory"),
        ((source[1:], source), ValueError, "share memory"),
    ]:
        with pytest.raises(error, match=text):
            ops.transfer_blocks(*wrong, [(0, 1)])
        pair.check([])
    for chain in ([(0, 1), (1, 2)], [(2, 2)]):
        with pytest.raises(ValueError, match="is in the sources and in the targets of block_mapping of one cache"):
            ops.transfer_blocks(source, source, chain)
        pair.check([])
    pair.transfer(PAIRS)
    pair.check(PAIRS)


def test_in_a_static_graph(machine: Machine) -> None:
    pair = Pair(machine, 4, 5)
    paddle.enable_static()
    try:
        with pytest.raises(NotImplementedError, match="transfer_blocks"):
            pair.transfer(PAIRS)
    finally:
        paddle.disable_static()
    pair.check([])


@given(data=st.data())
def test_random_transfers(data: st.DataObject) -> None:
    source_blocks, target_blocks = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    targets = data.draw(st.lists(st.integers(0, target_blocks - 1), unique=True))
    pairs = [(data.draw(st.integers(0, source_blocks - 1)), target) for target in targets]
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=4)))
    pair = Pair(cpu_machine(), source_blocks, target_blocks, shape, data.draw(st.sampled_from(DTYPES)))
    pair.transfer(pairs)
    pair.check(pairs)


def test_a_view_of_a_tensor_at_an_odd_address(machine: Machine) -> None:
    bits = random_bits(8, 3, 5)
    whole = tensor_of(bits, (1, 3), "uint8", machine.place)
    target = GuardedCache(machine, random_bits(4, 3, 6), (1, 3), "uint8")
    ops.transfer_blocks(whole[3:], target.tensor, [(4, 1)])
    target.check(transferred(bits[3:], target.bits, [(4, 1)]))
