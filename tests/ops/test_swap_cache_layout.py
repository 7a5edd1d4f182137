"""swap_cache_layout against the reference, on the whole of all memories; and its wrong arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import DTYPES, GuardedCache, GuardedHost, Machine, cpu_machine, item_bytes, random_bits
from tests.ops.swap_conformance import shuffled_ids
from tests.reference.swap import TO_DEVICE, TO_HOST, swapped_layout

both_ways = pytest.mark.parametrize("mode", [TO_HOST, TO_DEVICE])


class Layers:
    """Caches of some layers and one host buffer [position, layer, block]."""

    def __init__(
        self,
        machine: Machine,
        blocks: list[int],
        positions: int,
        shape: tuple[int, ...],
        dtype: str = "uint8",
        misalignment: int = 0,
    ) -> None:
        block_bytes = int(np.prod(shape)) * item_bytes(dtype)
        self.shape = [blocks[0], *shape]
        self.bits = [random_bits(count, block_bytes, seed) for seed, count in enumerate(blocks)]
        self.caches = [GuardedCache(machine, bits, shape, dtype) for bits in self.bits]
        self.tensors = [cache.tensor for cache in self.caches]
        self.host_bits = random_bits(positions * len(blocks), block_bytes, 99)
        self.host = GuardedHost(machine, self.host_bits, misalignment)

    def check(self, device_ids: list[int], positions: list[int], mode: int) -> None:
        caches, host = swapped_layout(self.bits, self.host_bits, device_ids, positions, mode)
        for cache, bits in zip(self.caches, caches, strict=True):
            cache.check(bits)
        self.host.check(host)

    def check_swap(self, device_ids: list[int], positions: list[int], mode: int) -> None:
        arguments = (self.tensors, self.host.address, self.shape, device_ids, positions, 0, mode)
        assert ops.swap_cache_layout(*arguments) is self.tensors
        self.check(device_ids, positions, mode)


@both_ways
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(machine: Machine, mode: int, dtype: str) -> None:
    Layers(machine, [9] * 3, 6, (2, 5, 3), dtype).check_swap(*shuffled_ids(5, 9, 6), mode)


# Keys of FastDeploy's tests of this operator, with fewer blocks; scales; a latent cache; odd sizes at odd addresses.
@both_ways
@pytest.mark.parametrize(
    ("layers", "shape", "dtype", "misalignment"),
    [
        (10, (64, 4, 128), "float16", 0),
        (30, (4, 64, 128), "float16", 0),
        (10, (4, 64), "float32", 0),
        (5, (1, 64, 576), "bfloat16", 0),
        (3, (5, 7), "uint8", 3),
        (1, (1, 1), "uint8", 1),
    ],
)
def test_shapes(
    machine: Machine, mode: int, layers: int, shape: tuple[int, ...], dtype: str, misalignment: int
) -> None:
    made = Layers(machine, [8] * layers, 6, shape, dtype, misalignment)
    made.check_swap(*shuffled_ids(6, 8, 6), mode)


@both_ways
def test_layers_with_more_blocks(machine: Machine, mode: int) -> None:
    """Those of a draft model; the ids have to be in each."""
    made = Layers(machine, [4, 4, 9], 3, (2, 3, 5))
    made.check_swap([3, 0], [2, 1], mode)
    made = Layers(machine, [9, 4], 3, (2, 3, 5))
    with pytest.raises(IndexError, match=r"gpu_block_ids\[1\] = 4 must be in \[0, 4\)"):
        ops.swap_cache_layout(made.tensors, made.host.address, made.shape, [0, 4], [0, 1], 0, mode)
    made.check([], [], mode)


@both_ways
def test_six_arguments_fill_positions_in_order(machine: Machine, mode: int) -> None:
    made = Layers(machine, [7, 7], 4, (1, 3, 5))
    ops.swap_cache_layout(made.tensors, made.host.address, made.shape, np.array([6, 0, 2]), 0, mode)
    made.check([6, 0, 2], [0, 1, 2], mode)


def test_one_source_has_many_targets(machine: Machine) -> None:
    Layers(machine, [7, 7], 4, (1, 3, 5)).check_swap([6, 6, 2], [3, 0, 1], TO_HOST)
    Layers(machine, [7, 7], 4, (1, 3, 5)).check_swap([6, 0, 2], [3, 3, 1], TO_DEVICE)


@both_ways
def test_no_blocks_move_nothing(machine: Machine, mode: int) -> None:
    made = Layers(machine, [7, 7], 4, (1, 3, 5))
    made.check_swap([], [], mode)
    ops.swap_cache_layout(made.tensors, 0, made.shape, [], [], 0, mode)


@given(st.data())
def test_any_layers_and_ids(data: st.DataObject) -> None:
    layers, blocks, positions = (data.draw(st.integers(1, 9), name) for name in ("layers", "blocks", "positions"))
    made = Layers(cpu_machine(), [blocks] * layers, positions, (1, data.draw(st.integers(1, 70), "bytes")))
    count = data.draw(st.integers(0, min(blocks, positions)), "count")
    ids = [data.draw(st.permutations(range(most)))[:count] for most in (blocks, positions)]
    made.check_swap(*ids, data.draw(st.sampled_from([TO_HOST, TO_DEVICE])))


GOOD: dict[str, Any] = {"gpu_block_ids": [4, 0], "cpu_block_ids": [1, 2], "rank": 0, "mode": TO_HOST}
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"gpu_block_ids": [0, 5]}, IndexError, r"gpu_block_ids\[1\] = 5 must be in \[0, 5\)"),
    ({"gpu_block_ids": [-1, 0]}, IndexError, r"gpu_block_ids\[0\] = -1"),
    ({"cpu_block_ids": [-1, 0]}, IndexError, r"cpu_block_ids\[0\] = -1"),
    ({"cpu_block_ids": [2**61, 0]}, ValueError, r"cpu_block_ids x bytes of a block of all layers"),
    ({"cpu_block_ids": [2**45, 0]}, ValueError, r"the blocks up to cpu_block_ids = 35184372088832"),
    ({"cpu_block_ids": [1]}, ValueError, "gpu_block_ids has 2 ids, cpu_block_ids has 1"),
    ({"cpu_block_ids": [1, 1]}, ValueError, "cpu_block_ids names block 1 more than once"),
    ({"gpu_block_ids": [1, 1], "mode": TO_DEVICE}, ValueError, "gpu_block_ids names block 1 more than once"),
    ({"mode": 2}, ValueError, r"mode = 2 must be 0 .* or 1"),
    ({"mode": 1.0}, TypeError, r"mode is 1\.0"),
    ({"mode": None}, TypeError, r"rank is \[1, 2\] \(list\); an integer is expected"),  # rank would be the mode
    ({"cache_cpu_ptrs": 0}, ValueError, "cache_cpu_ptrs = 0 must be the address"),
    ({"cache_cpu_ptrs": None}, TypeError, "cache_cpu_ptrs is None"),
    ({"cache_shape": [5, 2, 3, 4]}, ValueError, r"cache_gpu_tensors\[0\] has shape \[5, 2, 3, 5\], cache_shape is"),
    ({"cache_shape": [5]}, ValueError, r"cache_shape = \[5\]; \[num_blocks, ...\] of a cache is expected"),
    ({"cache_shape": [5, -2, -15]}, ValueError, r"cache_shape = \[5, -2, -15\] must not be below 1"),
    ({"cache_shape": [5, 2**40, 2**40]}, ValueError, r"the product of cache_shape"),
    ({"cache_shape": None}, TypeError, "cache_shape is None"),
    ({"cache_gpu_tensors": []}, ValueError, "cache_gpu_tensors is empty"),
    ({"cache_gpu_tensors": 3}, TypeError, "cache_gpu_tensors is int"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), WRONG)
def test_wrong_arguments(machine: Machine, wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    made = Layers(machine, [5, 5], 3, (2, 3, 5))
    good = {"cache_gpu_tensors": made.tensors, "cache_cpu_ptrs": made.host.address, "cache_shape": made.shape, **GOOD}
    with pytest.raises(error, match=text) as caught:
        ops.swap_cache_layout(**{**good, **wrong})
    assert type(caught.value) is error
    made.check([], [], TO_HOST)
    ops.swap_cache_layout(**good)
    made.check([4, 0], [1, 2], TO_HOST)


def test_tensors_that_do_not_fit_each_other(machine: Machine) -> None:
    made, other = Layers(machine, [5, 5], 3, (2, 3, 4)), Layers(machine, [5], 3, (2, 3, 4), "float16")
    for tensors, text in (
        ([made.tensors[0], other.tensors[0]], r"cache_gpu_tensors\[1\] has dtype float16, .*\[0\] has uint8"),
        ([made.tensors[0], Layers(machine, [5], 3, (2, 3, 5)).tensors[0]], r"cache_gpu_tensors\[1\] has shape"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.swap_cache_layout(tensors, made.host.address, made.shape, [1], [0], 0, TO_HOST)
    with pytest.raises(ValueError, match="two of the memories to be written overlap"):
        ops.swap_cache_layout([made.tensors[0]] * 2, made.host.address, made.shape, [1], [0], 0, TO_DEVICE)
    on_device = "not all host memory that the GPU can reach"
    with pytest.raises(ValueError, match="overlaps the memory of cache_gpu_tensors" if machine.on_cpu else on_device):
        address = made.tensors[1].data_ptr()
        ops.swap_cache_layout(made.tensors, address, made.shape, [1], [0], 0, TO_HOST)
    made.check([], [], TO_HOST)
