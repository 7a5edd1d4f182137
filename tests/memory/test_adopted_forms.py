"""Memory of others in forms of theirs: host blocks whose layers lie together, device tensors of several lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from tests.schedule.rig import (
    POISON,
    WAIT_S,
    assert_same,
    cache_memory,
    cpu_tensor,
    make_spec,
    moved,
    pool_memory,
    random_bits,
    set_cache,
    set_pool,
)

BLOCKS = 6


class Buffers:
    """A buffer ``[block, layer, bytes]`` for each name, with ``gap_bytes`` behind each block and poison around."""

    def __init__(self, spec: KVCacheSpec, gap_bytes: int = 0) -> None:
        self.strides = {name: spec.num_layers * spec.tensor_block_bytes(name) + gap_bytes for name in spec.tensor_names}
        self.memory = {
            name: np.full(64 + BLOCKS * stride + 64, POISON, np.uint8) for name, stride in self.strides.items()
        }
        self.pointers = {
            name: [
                self.memory[name].ctypes.data + 64 + layer * spec.tensor_block_bytes(name)
                for layer in range(spec.num_layers)
            ]
            for name in spec.tensor_names
        }
        self.pool = HostPool.adopt(spec, self.pointers, BLOCKS, strides_bytes=self.strides)

    def expected(self, spec: KVCacheSpec, bits: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The whole memory when the pool holds ``bits``."""
        found = {name: np.full_like(memory, POISON) for name, memory in self.memory.items()}
        for name, memory in found.items():
            rows = memory[64:-64].reshape(BLOCKS, self.strides[name])
            width = spec.num_layers * spec.tensor_block_bytes(name)
            rows[:, :width] = bits[name].transpose(1, 0, 2).reshape(BLOCKS, width)
        return found


@pytest.mark.parametrize("gap_bytes", [0, 5])
def test_blocks_whose_layers_lie_together(gap_bytes: int) -> None:
    spec = make_spec()
    buffers, cache = Buffers(spec, gap_bytes), DeviceCache(spec, 7, "cpu")
    host, device = random_bits(spec, BLOCKS, 1), random_bits(spec, 7, 2)
    set_pool(buffers.pool, host)
    set_cache(cache, device)
    assert_same(pool_memory(buffers.pool), host)
    with LayerwiseScheduler(cache, buffers.pool) as scheduler:
        scheduler.offload([6, 0], [5, 2]).wait(WAIT_S)
        host = moved(device, host, [6, 0], [5, 2])
        scheduler.onload([5, 0], [1, 3]).wait(WAIT_S)
        device = moved(host, device, [5, 0], [1, 3])
    assert_same(cache_memory(cache), device)
    assert_same(buffers.memory, buffers.expected(spec, host))
    buffers.pool.close()


def test_dense_and_strided_names_in_one_pool() -> None:
    spec = make_spec(extra={})
    buffers = Buffers(spec)
    memory = np.zeros(spec.num_layers * BLOCKS * spec.tensor_block_bytes("value"), np.uint8)
    dense = [memory.ctypes.data + layer * memory.size // spec.num_layers for layer in range(spec.num_layers)]
    buffers.pool.close()
    pointers = {"key": buffers.pointers["key"], "value": dense}
    pool = HostPool.adopt(spec, pointers, BLOCKS, strides_bytes={"key": buffers.strides["key"]})
    bits = random_bits(spec, BLOCKS, 1)
    set_pool(pool, bits)
    np.testing.assert_array_equal(memory, bits["value"].ravel())
    np.testing.assert_array_equal(buffers.memory["key"], buffers.expected(spec, bits | {"value": bits["value"]})["key"])
    assert pool.stride_bytes("value") == spec.tensor_block_bytes("value")
    pool.close()


def test_two_pools_over_the_same_strided_memory_are_one() -> None:
    spec = make_spec()
    buffers = Buffers(spec)
    again = HostPool.adopt(spec, buffers.pointers, BLOCKS, strides_bytes=buffers.strides)
    assert again.domain is buffers.pool.domain


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"key": 1}, ValueError, r"strides_bytes\['key'\] = 1 must be at least 84, a block"),
        ({"key": 84.0}, TypeError, r"strides_bytes\['key'\] is 84\.0"),
        ({"other": 100}, ValueError, r"strides_bytes has the names \['flag', 'key', 'other'"),
        ({"key": 5 * 84 - 1}, ValueError, "overlap"),  # the last layer reaches into the next block
        ({"key": 84}, ValueError, "overlap"),
    ],
)
def test_strides_that_cannot_be(change: dict[str, Any], error: type[Exception], text: str) -> None:
    spec = make_spec()
    buffers = Buffers(spec)
    buffers.pool.close()
    with pytest.raises(error, match=text):
        HostPool.adopt(spec, buffers.pointers, BLOCKS, strides_bytes={**buffers.strides, **change})
    HostPool.adopt(spec, buffers.pointers, BLOCKS, strides_bytes=buffers.strides).close()


@pytest.mark.parametrize("strides", [[84], "key", 84])
def test_strides_that_are_no_mapping(strides: Any) -> None:
    spec = make_spec()
    buffers = Buffers(spec)
    buffers.pool.close()
    with pytest.raises(TypeError, match=r"strides_bytes is .*; a mapping name -> bytes, or None, is expected"):
        HostPool.adopt(spec, buffers.pointers, BLOCKS, strides_bytes=strides)


def test_layers_at_one_stride_that_overlap() -> None:
    spec = make_spec()
    buffers = Buffers(spec)
    buffers.pool.close()
    buffers.pointers["key"][3] -= 1
    with pytest.raises(ValueError, match="overlap"):
        HostPool.adopt(spec, buffers.pointers, BLOCKS, strides_bytes=buffers.strides)


def test_tensors_of_which_some_have_more_blocks() -> None:
    spec = make_spec(num_layers=2, extra={})
    tensors = {
        name: [cpu_tensor(np.zeros((blocks, *spec.block_shape(name)), "float16")) for blocks in (4, 9)]
        for name in spec.tensor_names
    }
    cache = DeviceCache.adopt(spec, tensors, num_blocks=4)
    assert cache.num_blocks == 4
    rest = {name: [tensors[name][1]._slice(4, 9)] for name in spec.tensor_names}  # which is nobody's
    assert DeviceCache.adopt(make_spec(num_layers=1, extra={}), rest).num_blocks == 5
    with LayerwiseScheduler(cache, HostPool(spec, 3)) as scheduler:
        for view in (scheduler.host_pool.view(name, layer, 2) for name in spec.tensor_names for layer in range(2)):
            view[...] = 1
        scheduler.onload([2], [3]).wait(WAIT_S)
        with pytest.raises(IndexError, match=r"device_block_ids\[0\] = 4 must be in \[0, 4\)"):
            scheduler.onload([2], [4])
    for name in spec.tensor_names:
        for tensor in tensors[name]:
            assert tensor.numpy().any(axis=(1, 2, 3)).tolist() == [block == 3 for block in range(tensor.shape[0])]
    with pytest.raises(ValueError, match=r"tensors\['key'\]\[0\] has 4 blocks; num_blocks = 5 are expected at least"):
        DeviceCache.adopt(spec, tensors, num_blocks=5)
    with pytest.raises(ValueError, match="num_blocks = 0 must be an integer of at least 1"):
        DeviceCache.adopt(spec, tensors, num_blocks=0)
    with pytest.raises(ValueError, match=r"tensors\['key'\]\[1\] has 9 blocks, the first tensor 4"):
        DeviceCache.adopt(spec, tensors)


def test_blocks_between_each_other_have_one_stride() -> None:
    """Those of two strides may meet, if not here then with more blocks."""
    spec = make_spec(num_layers=1, extra={})
    memory = np.zeros(6100, np.uint8)
    pointers = {"key": [memory.ctypes.data], "value": [memory.ctypes.data + 300]}
    with pytest.raises(ValueError, match="overlap"):
        HostPool.adopt(spec, pointers, BLOCKS, strides_bytes={"key": 1000, "value": 1001})
    HostPool.adopt(spec, pointers, BLOCKS, strides_bytes={"key": 1000, "value": 1000}).close()
