"""Some of the heads of a block are moved, and not a byte beside them: each layout, both sides, both directions."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.memory.heads import heads_of
from paddle_kv.peers import PeerBlocks
from tests.schedule.rig import (
    WAIT_S,
    Bits,
    assert_same,
    cache_memory,
    make_spec,
    pool_memory,
    random_bits,
    set_cache,
    set_pool,
)

HEADS = 5
EXTRA = {
    "HND": {"scale": ((HEADS, 7), "float32"), "flag": ((HEADS,), "uint8")},
    "NHD": {"scale": ((7, HEADS), "float32")},
    "packed": {"scale": ((HEADS, 7), "float32")},
}


def spec_of(layout: str, heads: int = HEADS) -> KVCacheSpec:
    sizes = {"head_dim": 8} if layout == "packed" else {}
    return make_spec(num_kv_heads=HEADS, layout=layout, extra=EXTRA[layout], **sizes).with_heads(heads)


def by_heads(spec: KVCacheSpec, bits: Bits, name: str) -> np.ndarray:
    """[layers, blocks, what lies outside of the heads, heads, bytes]"""
    axis = 1 if spec.layout == "NHD" else 0
    outside = int(np.prod(spec.block_shape(name)[:axis]))
    found = bits[name]
    return found.reshape(*found.shape[:2], outside, spec.num_kv_heads, -1)


def with_heads_moved(
    source_spec: KVCacheSpec,
    source: Bits,
    target_spec: KVCacheSpec,
    target: Bits,
    ids: tuple[list[int], list[int]],
    first: tuple[int, int],
    count: int,
) -> Bits:
    """The target after these heads of these blocks were moved, in NumPy."""
    result = {name: array.copy() for name, array in target.items()}
    for name in result:
        taken = by_heads(source_spec, source, name)[:, ids[0]][:, :, :, first[0] : first[0] + count]
        into = by_heads(target_spec, result, name)
        into[:, ids[1], :, first[1] : first[1] + count] = taken
        result[name] = into.reshape(target[name].shape)
    return result


@pytest.mark.parametrize("pool_layout", ["layer_first", "block_first"])
@pytest.mark.parametrize("layout", ["HND", "NHD", "packed"])
def test_heads_of_a_cache_and_of_a_pool(layout: str, pool_layout: str) -> None:
    cache_spec, pool_spec = spec_of(layout, 4), spec_of(layout)
    cache, pool = DeviceCache(cache_spec, 6, "cpu"), HostPool(pool_spec, 8, layout=pool_layout, shared=True)
    on_device, on_host = random_bits(cache_spec, 6, 1), random_bits(pool_spec, 8, 2)
    set_cache(cache, on_device)
    set_pool(pool, on_host)
    attached = HostPool.attach(pool_spec, pool.export())
    with LayerwiseScheduler(heads_of(cache, 1, 2), heads_of(attached, 3, 2)) as scheduler:
        save = scheduler.offload([5, 0, 2], [1, 7, 0])
        save.wait(WAIT_S)
        assert save.bytes == 3 * spec_of(layout, 2).block_bytes * 5
        on_host = with_heads_moved(cache_spec, on_device, pool_spec, on_host, ([5, 0, 2], [1, 7, 0]), (1, 3), 2)
        assert_same(pool_memory(pool), on_host)
        scheduler.onload([3, 7], [4, 1]).wait(WAIT_S)
        on_device = with_heads_moved(pool_spec, on_host, cache_spec, on_device, ([3, 7], [4, 1]), (3, 1), 2)
    with LayerwiseScheduler(cache, heads_of(attached, 0, 4)) as scheduler:  # all of the one side
        scheduler.offload([3], [5]).wait(WAIT_S)
        on_host = with_heads_moved(cache_spec, on_device, pool_spec, on_host, ([3], [5]), (0, 0), 4)
    assert_same(pool_memory(pool), on_host)
    assert_same(cache_memory(cache), on_device)
    pool.close()


def test_heads_of_the_cache_of_another_process() -> None:
    spec = spec_of("HND")
    theirs, own = DeviceCache(spec, 6, "cpu", shared=True), DeviceCache(spec_of("HND", 2), 4, "cpu")
    there, here = random_bits(spec, 6, 1), random_bits(own.spec, 4, 2)
    set_cache(theirs, there)
    set_cache(own, here)
    blocks = PeerBlocks(DeviceCache.attach(spec, theirs.export()))
    part = heads_of(blocks, 3, 2)
    assert (part.memory_id, part.heads, blocks.heads) == (theirs.memory_id, range(3, 5), range(5))
    with LayerwiseScheduler(own, part) as scheduler:
        scheduler.offload([3, 1], [0, 4]).wait(WAIT_S)
    there = with_heads_moved(own.spec, here, spec, there, ([3, 1], [0, 4]), (0, 3), 2)
    assert_same(cache_memory(theirs), there)


def test_the_blocks_are_those_of_the_whole() -> None:
    spec = spec_of("HND")
    pool = HostPool(spec, 3, shared=True)
    attached, cache = HostPool.attach(spec, pool.export()), DeviceCache(spec, 4, "cpu")
    part, half = heads_of(attached, 0, 2), heads_of(cache, 1, 2)
    assert part.domain is attached.domain and half.domain is cache.domain
    assert half.num_blocks == 4
    shared = DeviceCache(spec, 4, "cpu", shared=True)
    assert heads_of(shared, 1, 2).memory_id == shared.memory_id
    assert (part.num_free_blocks, part.pinned_bytes, part.num_blocks) == (0, 0, 3)
    part.close()
    assert not attached.closed
    pool.close()


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (0, 6), (5, 1), (4, 2)])
def test_heads_that_are_not_there(first: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"first = {first} and count = {count} must be at least one of 5 heads"):
        heads_of(DeviceCache(spec_of("HND"), 2, "cpu"), first, count)


def test_what_has_no_heads_to_take() -> None:
    cache = DeviceCache(spec_of("HND"), 2, "cpu")
    with pytest.raises(TypeError, match="memory is int"):
        heads_of(3, 0, 1)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="a part"):
        heads_of(heads_of(cache, 0, 2), 0, 1)
    with pytest.raises(ValueError, match="a ring"):
        heads_of(DeviceCache(spec_of("HND"), 2, "cpu", layer_buffers=2), 0, 1)
    with HostPool(spec_of("HND"), 2) as pool, pytest.raises(ValueError, match="a pool of this process"):
        heads_of(pool, 0, 1)
    latent = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32", latent=True)
    with pytest.raises(ValueError, match="a latent cache has no heads"):
        heads_of(DeviceCache(latent, 2, "cpu"), 0, 1)
    with pytest.raises(ValueError, match=r"extra\['scale'\] has block shape \(3,\); num_kv_heads = 2 is expected in"):
        heads_of(DeviceCache(make_spec(), 2, "cpu"), 0, 1)
    with pytest.raises(ValueError, match=r"extra\['flag'\] has block shape \(2,\); .* in dimension 1"):
        heads_of(DeviceCache(make_spec(layout="NHD", extra={"flag": ((2,), "uint8")}), 2, "cpu"), 0, 1)


def test_a_part_has_no_tensors_and_cannot_be_exported() -> None:
    spec = spec_of("HND")
    pool = HostPool(spec, 3, shared=True)
    part, half = heads_of(HostPool.attach(spec, pool.export()), 0, 2), heads_of(DeviceCache(spec, 4, "cpu"), 1, 2)
    for call in (lambda: half.tensor("key", 0), lambda: part.view("key", 0, 0)):
        with pytest.raises(NotImplementedError, match="take that of the whole"):
            call()
    for one in (half, part):
        with pytest.raises(ValueError, match="export the whole"):
            one.export()
    pool.close()
