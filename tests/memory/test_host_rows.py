"""The blocks of a pool as arrays."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from paddle_kv import HostPool
from paddle_kv.memory.host_rows import block_rows, host_rows
from tests.schedule.rig import make_spec, pool_memory, random_bits, set_pool

LAYOUTS = pytest.mark.parametrize("layout", ["layer_first", "block_first"])


@LAYOUTS
def test_rows_are_the_bytes_of_each_block_and_can_be_written(layout: str) -> None:
    pool = HostPool(make_spec(), 6, layout=layout)
    bits = random_bits(pool.spec, 6, 3)
    set_pool(pool, bits)
    rows = host_rows(pool)
    assert len(rows) == pool.spec.num_layers
    for layer, tensors in enumerate(rows):
        for name, array in zip(pool.spec.tensor_names, tensors, strict=True):
            np.testing.assert_array_equal(array, bits[name][layer])
    rows[3][1][4] ^= 0xFF
    bits[pool.spec.tensor_names[1]][3, 4] ^= 0xFF
    for name, array in pool_memory(pool).items():
        np.testing.assert_array_equal(array, bits[name])


@pytest.mark.parametrize("room_bytes", [0, 4096])
def test_all_layers_of_a_block_are_one_row(room_bytes: int) -> None:
    pool = HostPool(make_spec(), 6, layout="block_first", room_bytes=room_bytes)
    assert not pool.room_lent
    bits = random_bits(pool.spec, 6, 4)
    set_pool(pool, bits)
    rows = block_rows(pool)
    assert rows.shape == (6, pool.spec.num_layers * pool.spec.block_bytes)
    for block in range(6):
        layers = [bits[name][layer, block] for layer in range(5) for name in pool.spec.tensor_names]
        np.testing.assert_array_equal(rows[block], np.concatenate(layers))


@pytest.mark.parametrize("num_blocks", [1, 6])
def test_layers_that_are_apart_are_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="the layers of a block are not adjacent in the pool"):
        block_rows(HostPool(make_spec(), num_blocks, layout="layer_first"))


@pytest.mark.parametrize(("gap_bytes", "backwards"), [(0, False), (4, False), (0, True)])
def test_layers_of_an_adopted_pool_are_one_row_only_where_they_touch(gap_bytes: int, backwards: bool) -> None:
    spec = make_spec(latent=True, extra={})
    layer_bytes, stride = spec.block_bytes, spec.num_layers * spec.block_bytes + gap_bytes
    memory = np.arange(6 * stride, dtype=np.uint64).astype(np.uint8)
    order = range(spec.num_layers)[:: -1 if backwards else 1]
    pointers = {"latent": [memory.ctypes.data + layer * layer_bytes for layer in order]}
    pool = HostPool.adopt(spec, pointers, 6, strides_bytes={"latent": stride})
    if gap_bytes or backwards:
        with pytest.raises(ValueError, match="the layers of a block are not adjacent in the pool"):
            block_rows(pool)
    else:
        np.testing.assert_array_equal(block_rows(pool), memory.reshape(6, stride))
    pool.close()


def test_rows_keep_the_memory_of_a_pool_that_is_closed() -> None:
    pool = HostPool(make_spec(), 6, layout="block_first")
    memory, rows = [weakref.ref(one) for one in pool._memory], block_rows(pool)
    pool.close()
    gc.collect()
    assert [one() is None for one in memory] == [False]
    rows[:] = 1
    del rows
    gc.collect()
    assert [one() is None for one in memory] == [True]
