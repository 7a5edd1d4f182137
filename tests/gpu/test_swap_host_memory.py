"""Host memory that the GPU can reach, and such as it cannot, over the whole range that the caller names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from paddle_kv import ops
from tests.machine import GuardedCache, GuardedHost, Machine, cpu_machine, random_bits
from tests.ops.swap_conformance import ALL_LAYERS, PER_LAYER, Layer, call
from tests.reference.swap import TO_DEVICE, TO_HOST, swapped

PAGE = 4096
BLOCK_BYTES = PAGE
BLOCKS = 64


@pytest.fixture
def cache(machine: Machine) -> GuardedCache:
    return GuardedCache(machine, random_bits(BLOCKS, BLOCK_BYTES, 1), (4, 1024), "uint8")


def page_aligned_blocks() -> np.ndarray:
    """BLOCKS blocks of zeros in ordinary memory."""
    storage = np.zeros((BLOCKS + 1) * BLOCK_BYTES, np.uint8)
    first = -storage.ctypes.data % PAGE
    return storage[first : first + BLOCKS * BLOCK_BYTES].reshape(BLOCKS, BLOCK_BYTES)


@pytest.fixture
def half_pinned() -> Iterator[np.ndarray]:
    """BLOCKS blocks of ordinary memory, page aligned, of which the first half is registered with CUDA."""
    import cupy

    blocks = page_aligned_blocks()
    cupy.cuda.runtime.hostRegister(blocks.ctypes.data, BLOCKS // 2 * BLOCK_BYTES, 0)
    yield blocks
    cupy.cuda.runtime.hostUnregister(blocks.ctypes.data)


@pytest.mark.parametrize("op", PER_LAYER + ALL_LAYERS)
@pytest.mark.parametrize("mode", [TO_HOST, TO_DEVICE])
def test_pageable_memory_is_refused(machine: Machine, op: str, mode: int) -> None:
    layers = [Layer(machine, 5, 6, (3, 5), "float32", seed=i) for i in range(1 if op in PER_LAYER else 3)]
    pageable = GuardedHost(cpu_machine(), layers[-1].host_bits)
    pointers = [layer.host.address for layer in layers[:-1]] + [pageable.address]
    with pytest.raises(ValueError, match=r"cache_cpu_ptr.*not all host memory that the GPU can reach"):
        call(op, layers, [4, 0], [1, 5], mode, pointers=pointers)
    machine.synchronize()
    for layer in layers:
        layer.check_untouched()
    pageable.check(layers[-1].host_bits)
    call(op, layers, [4, 0], [1, 5], mode)
    machine.synchronize()
    for layer in layers:
        layer.check([4, 0], [1, 5], mode)


def test_registered_memory_up_to_its_last_byte(cache: GuardedCache, half_pinned: np.ndarray) -> None:
    half = BLOCKS // 2
    ops.swap_cache_per_layer(cache.tensor, half_pinned.ctypes.data, half, [5, 7], [half - 1, 0], 0, TO_HOST)
    _, expected = swapped(cache.bits, np.zeros_like(half_pinned), [5, 7], [half - 1, 0], TO_HOST)
    np.testing.assert_array_equal(half_pinned, expected)


@pytest.mark.parametrize("blocks", [BLOCKS // 2 + 1, BLOCKS])
def test_a_range_whose_last_byte_is_pageable_is_refused(
    machine: Machine, cache: GuardedCache, half_pinned: np.ndarray, blocks: int
) -> None:
    """The blocks that are named lie in the pinned half: the range is what counts."""
    for mode in (TO_HOST, TO_DEVICE):
        with pytest.raises(ValueError, match=rf"max_block_num_cpu = {blocks} .*not all host memory"):
            ops.swap_cache_per_layer(cache.tensor, half_pinned.ctypes.data, blocks, [5], [0], 0, mode)
    machine.synchronize()
    assert not half_pinned.any()
    cache.check(cache.bits)


@pytest.fixture
def pinned_at_both_ends() -> Iterator[np.ndarray]:
    """BLOCKS blocks of which the first and the last alone are registered, each for itself."""
    import cupy

    blocks = page_aligned_blocks()
    for block in (0, BLOCKS - 1):
        cupy.cuda.runtime.hostRegister(blocks[block].ctypes.data, BLOCK_BYTES, 0)
    yield blocks
    for block in (0, BLOCKS - 1):
        cupy.cuda.runtime.hostUnregister(blocks[block].ctypes.data)


def test_a_range_with_a_hole_is_refused(machine: Machine, cache: GuardedCache, pinned_at_both_ends: np.ndarray) -> None:
    """A copy from the hole would be an illegal address in the kernel, and the end of the CUDA context."""
    address = pinned_at_both_ends.ctypes.data
    for mode in (TO_HOST, TO_DEVICE):
        with pytest.raises(ValueError, match=rf"max_block_num_cpu = {BLOCKS} .*not all host memory"):
            ops.swap_cache_per_layer(cache.tensor, address, BLOCKS, [5], [BLOCKS // 2], 0, mode)
    with pytest.raises(ValueError, match=r"source_pointers\[0\].*run past the end"):
        ops.vectorized_copy([address], [cache.tensor.data_ptr()], [BLOCKS * BLOCK_BYTES])
    machine.synchronize()
    assert not pinned_at_both_ends.any()
    cache.check(cache.bits)
    ops.swap_cache_per_layer(cache.tensor, address, 1, [5], [0], 0, TO_HOST)
    machine.synchronize()
    np.testing.assert_array_equal(pinned_at_both_ends[0], cache.bits[5])


def test_neighbouring_registrations_are_one_range(machine: Machine, cache: GuardedCache) -> None:
    import cupy

    blocks = page_aligned_blocks()
    cuts = [0, 3, 4, BLOCKS]
    for begin, end in itertools.pairwise(cuts):
        cupy.cuda.runtime.hostRegister(blocks[begin].ctypes.data, (end - begin) * BLOCK_BYTES, 0)
    targets = [2, 3, 4, BLOCKS - 1]
    ops.swap_cache_per_layer(cache.tensor, blocks.ctypes.data, BLOCKS, [9, 1, 8, 0], targets, 0, TO_HOST)
    machine.synchronize()
    for begin in cuts[:-1]:
        cupy.cuda.runtime.hostUnregister(blocks[begin].ctypes.data)
    _, expected = swapped(cache.bits, np.zeros_like(blocks), [9, 1, 8, 0], targets, TO_HOST)
    np.testing.assert_array_equal(blocks, expected)


def test_a_device_address_is_no_host_memory(machine: Machine, cache: GuardedCache) -> None:
    other = GuardedCache(machine, random_bits(BLOCKS, BLOCK_BYTES, 2), (4, 1024), "uint8")
    with pytest.raises(ValueError, match="not all host memory"):
        ops.swap_cache_per_layer(cache.tensor, other.tensor.data_ptr(), BLOCKS, [5], [0], 0, TO_HOST)
    machine.synchronize()
    cache.check(cache.bits)
    other.check(other.bits)


def test_caches_on_two_devices_are_refused(machine: Machine, cache: GuardedCache) -> None:
    on_cpu = GuardedCache(cpu_machine(), cache.bits, (4, 1024), "uint8")
    hosts = [GuardedHost(machine, random_bits(4, BLOCK_BYTES, i)) for i in range(2)]
    tensors = [cache.tensor, on_cpu.tensor]
    with pytest.raises(ValueError, match=r"cache_gpu_tensors\[1\] is on another device"):
        ops.swap_cache_all_layers(tensors, [host.address for host in hosts], 4, [5], [0], 0, TO_HOST)
    for host in hosts:
        host.check(host.bits)
