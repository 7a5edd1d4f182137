"""The cache of another process in the place of a pool, in memory of the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_kv import DeviceCache, HostPool
from paddle_kv.peers import PeerBlocks
from tests.schedule.rig import cache_memory, make_spec, random_bits, set_cache

BLOCKS = 5


def shared_cache() -> DeviceCache:
    cache = DeviceCache(make_spec(), BLOCKS, "cpu", shared=True)
    set_cache(cache, random_bits(cache.spec, BLOCKS, 1))
    return cache


def test_the_blocks_lie_where_the_cache_has_them() -> None:
    theirs = shared_cache()
    blocks = PeerBlocks(DeviceCache.attach(theirs.spec, theirs.export()))
    assert blocks.in_host_memory and not blocks.on_other_gpu
    assert (blocks.num_blocks, blocks.num_free_blocks) == (BLOCKS, 0)
    assert blocks.export() == theirs.export()
    for name, layers in cache_memory(theirs).items():
        own_bytes = theirs.spec.tensor_block_bytes(name)
        for layer, of_layer in enumerate(layers):
            for block, expected in enumerate(of_layer):
                address = blocks.pointer(name, layer) + block * blocks.stride_bytes(name)
                np.testing.assert_array_equal(blocks.bytes_at(address, own_bytes), expected)
                view = blocks.view(name, layer, block)
                np.testing.assert_array_equal(view.reshape(-1).view(np.uint8), expected)


def test_something_else_than_a_cache() -> None:
    with HostPool(make_spec(), 2) as pool, pytest.raises(TypeError, match="cache is HostPool; a DeviceCache is"):
        PeerBlocks(pool)  # type: ignore[arg-type]
