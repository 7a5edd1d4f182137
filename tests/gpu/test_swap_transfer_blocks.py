"""transfer_blocks inside the GPU, and between the GPU and page-locked tensors."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.gpu.paddle_gpu import PINNED, pinned_tensors
from tests.machine import GuardedCache, Machine, bits_of, random_bits, tensor_of
from tests.ops.test_transfer_blocks import (  # noqa: F401
    test_a_view_of_a_tensor_at_an_odd_address,
    test_an_empty_mapping_moves_nothing,
    test_dtypes_and_ranks,
    test_forms_of_the_mapping,
    test_inside_one_tensor,
    test_into_a_view_of_the_first_blocks_of_the_source,
    test_odd_block_sizes,
    test_tensors_as_mapping,
    test_wrong_mappings,
    test_wrong_tensors,
)
from tests.reference.swap import transferred

SHAPE = (3, 1001)  # bytes of a block: odd
PAIRS = [(4, 0), (1, 5), (2, 2), (0, 3)]


@pinned_tensors
@pytest.mark.parametrize("block_bytes", [3003, (256 << 10) - 1, 256 << 10, (256 << 10) + 17])
@pytest.mark.parametrize(("source_pinned", "target_pinned"), [(True, False), (False, True)])
def test_pinned_tensors(machine: Machine, source_pinned: bool, target_pinned: bool, block_bytes: int) -> None:
    source_bits, target_bits = random_bits(5, block_bytes, 1), random_bits(6, block_bytes, 2)
    shape = (1, block_bytes)
    source = tensor_of(source_bits, shape, "uint8", PINNED if source_pinned else machine.place)
    target = tensor_of(target_bits, shape, "uint8", PINNED if target_pinned else machine.place)
    assert ops.transfer_blocks(source, target, PAIRS) is target
    machine.synchronize()
    np.testing.assert_array_equal(bits_of(source), source_bits)
    np.testing.assert_array_equal(bits_of(target), transferred(source_bits, target_bits, PAIRS))


def test_pageable_tensors_are_refused(machine: Machine) -> None:
    bits = random_bits(6, 3003, 1)
    cache = GuardedCache(machine, bits, SHAPE, "uint8")
    pageable = tensor_of(random_bits(6, 3003, 2), SHAPE, "uint8", paddle.CPUPlace())
    before = bits_of(pageable)
    with pytest.raises(ValueError, match="target is pageable host memory"):
        ops.transfer_blocks(cache.tensor, pageable, PAIRS)
    with pytest.raises(ValueError, match="source is pageable host memory"):
        ops.transfer_blocks(pageable, cache.tensor, PAIRS)
    machine.synchronize()
    cache.check(bits)
    np.testing.assert_array_equal(bits_of(pageable), before)
    ops.transfer_blocks(cache.tensor, cache.tensor, [(4, 0)])
    cache.check(transferred(bits, bits, [(4, 0)]))


def test_many_scattered_blocks_inside_the_gpu(machine: Machine) -> None:
    random = np.random.default_rng(7)
    source_bits, target_bits = random_bits(1100, 517, 1), random_bits(1000, 517, 2)
    pairs = list(zip(random.integers(0, 1100, 900).tolist(), random.permutation(1000)[:900].tolist(), strict=True))
    source = GuardedCache(machine, source_bits, (11, 47), "uint8")
    target = GuardedCache(machine, target_bits, (11, 47), "uint8")
    ops.transfer_blocks(source.tensor, target.tensor, pairs)
    source.check(source_bits)
    target.check(transferred(source_bits, target_bits, pairs))
