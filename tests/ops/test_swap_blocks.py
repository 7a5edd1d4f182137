"""swap_blocks against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import DTYPES, Machine, cpu_machine
from tests.ops.copy_conformance import check, check_one, check_untouched, make, shuffled_pairs

OP = "swap_blocks"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_shape", [(5, 3), (3, 5, 7), (2, 3, 5, 4)], ids=["rank3", "rank4", "rank5"])
def test_dtypes_and_ranks(machine: Machine, dtype: str, block_shape: tuple[int, ...]) -> None:
    pairs = shuffled_pairs(5, 11)
    keys, values = (make(machine, 11, block_shape, dtype, seed) for seed in (1, 2))
    check_one(OP, keys, values, pairs, pairs)


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 15, 16, 17, 33, 255, 4099, 8191, 8192, 8209, 100_003, 1_300_001])
def test_odd_block_sizes_at_odd_addresses(machine: Machine, block_bytes: int) -> None:
    pairs = shuffled_pairs(2, 5)
    check_one(OP, make(machine, 5, (1, block_bytes), "uint8", 1), None, pairs, pairs)


def test_more_pairs_than_one_launch_holds(machine: Machine) -> None:
    for count in (280, 281, 3190, 3191, 6380, 6381):
        pairs = shuffled_pairs(count, 2 * count + 3)
        check_one(OP, make(machine, 2 * count + 3, (1, 5), "uint8", count), None, pairs, np.array(pairs))


def test_many_caches_of_different_block_sizes(machine: Machine) -> None:
    pairs = shuffled_pairs(3, 7)
    sizes = np.random.default_rng(1).integers(1, 9000, (2, 70))
    keys, values = ([make(machine, 7, (1, int(n)), "uint8", i) for i, n in enumerate(row)] for row in sizes)
    check(OP, keys, values, pairs, dict(pairs))


def test_twice_is_nothing(machine: Machine) -> None:
    cache = make(machine, 8, (3, 11), "float16", 1)
    for _ in range(2):
        ops.swap_blocks(cache.tensor, None, [(0, 5), (7, 2)])
    check_untouched(cache)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ([(0, 1), (2, 1)], "name block 1 more than once"),
        ([(0, 1), (0, 2)], "name block 0 more than once"),
        ([(0, 1), (1, 2)], "block 1 is in sources of block_mapping and in targets of block_mapping"),
        ([(0, 1), (1, 0)], "is in sources"),
        ([(3, 3)], "block 3 is in sources"),
        ({0: [1, 2]}, "name block 0 more than once"),
    ],
)
def test_a_block_that_would_be_exchanged_twice(machine: Machine, mapping: Any, message: str) -> None:
    keys, values = (make(machine, 7, (2, 5), "float32", seed) for seed in (1, 2))
    with pytest.raises(ValueError, match=message):
        ops.swap_blocks(keys.tensor, values.tensor, mapping)
    check_untouched(keys, values)


@pytest.mark.parametrize("none", [[], {}, np.zeros((0, 2), "int32")], ids=["list", "dict", "array"])
def test_an_empty_mapping_moves_nothing(machine: Machine, none: Any) -> None:
    check_one(OP, make(machine, 4, (2, 5), "float32", 1), None, [], none)


@given(st.data())
def test_any_caches_and_pairs(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(2, 40), "blocks")
    ids = data.draw(st.permutations(range(blocks)), "ids")
    count = data.draw(st.integers(0, blocks // 2), "pairs")
    pairs = list(zip(ids[:count], ids[count : 2 * count], strict=True))
    sizes = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=5), "block bytes")
    keys = [make(cpu_machine(), blocks, (1, size), "uint8", i) for i, size in enumerate(sizes)]
    check(OP, keys, None, pairs, pairs)
