"""Where the CUDA transfer changes its way of copying: sizes around the copy engine's threshold, runs that are merged,
more pairs and more tensors than one launch holds, offsets beyond 2 GiB."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import GuardedHost, Machine, random_bits
from tests.ops.swap_conformance import ALL_LAYERS, PER_LAYER, Layer, check_swap, shuffled_ids
from tests.reference.swap import TO_DEVICE, TO_HOST

COPY_ENGINE_BYTES = 256 << 10  # Tuning::kCopyEngineBytes
CHUNK_BYTES = 8 << 10  # Tuning::kChunkBytes
PAIRS_PER_LAUNCH = 220
TENSORS_PER_LAUNCH = 8

both_ways = pytest.mark.parametrize("mode", [TO_HOST, TO_DEVICE])


@both_ways
@pytest.mark.parametrize("misalignment", [0, 1, 8])
@pytest.mark.parametrize("limit", [16, CHUNK_BYTES, COPY_ENGINE_BYTES])
@pytest.mark.parametrize("difference", [-1, 0, 1, 13])
def test_block_sizes_around_each_limit(
    machine: Machine, mode: int, misalignment: int, limit: int, difference: int
) -> None:
    layer = Layer(machine, 5, 6, (1, limit + difference), "uint8", misalignment)
    check_swap("swap_cache_per_layer", [layer], *shuffled_ids(4, 5, 6), mode)


@both_ways
@pytest.mark.parametrize("block_bytes", [10_007, 32 << 10])
@pytest.mark.parametrize(
    ("device_first", "host_first", "length"), [(0, 0, 40), (3, 11, 27), (3, 11, 8), (3, 11, 7), (0, 1, 26)]
)
def test_runs_on_both_sides_of_the_threshold(
    machine: Machine, mode: int, block_bytes: int, device_first: int, host_first: int, length: int
) -> None:
    """A run of neighbours on both sides, with single blocks around it, in shuffled order."""
    device_ids = [*range(device_first, device_first + length), 45, 47]
    host_ids = [*range(host_first, host_first + length), 49, 44]
    order = np.random.default_rng(1).permutation(len(device_ids))
    layer = Layer(machine, 48, 50, (1, block_bytes), "uint8", misalignment=4)
    check_swap(
        "swap_cache_per_layer_async", [layer], [device_ids[i] for i in order], [host_ids[i] for i in order], mode
    )


@both_ways
def test_one_run_read_by_two(machine: Machine, mode: int) -> None:
    """Sources occur twice, so that sorted pairs do not lie beside their neighbours."""
    sources = [*range(10, 30), *range(10, 30)]
    targets = [*range(40, 60), *range(5, 25)]
    layer = Layer(machine, 64, 64, (1, 20_000), "uint8")
    check_swap(PER_LAYER[0], [layer], *((sources, targets) if mode == TO_HOST else (targets, sources)), mode)


@both_ways
@pytest.mark.parametrize("pairs", [1, PAIRS_PER_LAUNCH - 1, PAIRS_PER_LAUNCH, PAIRS_PER_LAUNCH + 1, 1000])
def test_pairs_per_launch(machine: Machine, mode: int, pairs: int) -> None:
    layer = Layer(machine, 1013, 1021, (3, 37), "bfloat16", misalignment=2)
    check_swap(PER_LAYER[1], [layer], *shuffled_ids(pairs, 1013, 1021), mode)


@both_ways
@pytest.mark.parametrize("op", ALL_LAYERS)
@pytest.mark.parametrize("tensors", [TENSORS_PER_LAUNCH - 1, TENSORS_PER_LAUNCH, TENSORS_PER_LAUNCH + 1, 33])
def test_tensors_per_launch(machine: Machine, mode: int, op: str, tensors: int) -> None:
    """With more pairs than one launch holds, and two block sizes."""
    layers = [
        Layer(machine, 301, 307, (1, 1031 if i % 3 else 1500), "uint8", misalignment=i, seed=i) for i in range(tensors)
    ]
    device_ids, host_ids = shuffled_ids(40, 301, 307)
    run = [i for i in range(301) if i not in device_ids]
    free = [i for i in range(307) if i not in host_ids]
    count = min(len(run), len(free))
    check_swap(op, layers, [*device_ids, *run[:count]], [*host_ids, *free[:count]], mode)


@both_ways
def test_large_and_small_blocks_in_one_call(machine: Machine, mode: int) -> None:
    sizes = [1, COPY_ENGINE_BYTES + 3, 17, 100_000, COPY_ENGINE_BYTES, 100_000, 3]
    layers = [Layer(machine, 9, 11, (1, size), "uint8", misalignment=i, seed=i) for i, size in enumerate(sizes)]
    check_swap(ALL_LAYERS[1], layers, [1, 2, 3, 4, 8, 0], [3, 4, 5, 6, 0, 10], mode)


def test_random_swaps(machine: Machine) -> None:
    @settings(max_examples=40)
    @given(data=st.data())
    def swaps(data: st.DataObject) -> None:
        device_blocks, host_blocks = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
        mode = data.draw(st.sampled_from([TO_HOST, TO_DEVICE]))
        source_blocks, target_blocks = (device_blocks, host_blocks) if mode == TO_HOST else (host_blocks, device_blocks)
        random = np.random.default_rng(data.draw(st.integers(0, 1000)))
        count = data.draw(st.integers(0, target_blocks))
        targets = random.permutation(target_blocks)[:count].tolist()
        sources = random.integers(0, source_blocks, count).tolist()
        size = data.draw(st.integers(1, 64) | st.integers(8000, 8400))
        layer = Layer(machine, device_blocks, host_blocks, (1, size), "uint8", data.draw(st.integers(0, 15)))
        check_swap(PER_LAYER[0], [layer], *((sources, targets) if mode == TO_HOST else (targets, sources)), mode)

    swaps()


@pytest.fixture(scope="module")
def three_gib(machine: Machine):
    """3 GiB on the GPU as CuPy's bytes and as a Paddle tensor of 4 KiB blocks."""
    import cupy

    tensor = paddle.empty([3 << 18, 1, 4096], "int8")
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), 3 << 30, tensor)
    yield tensor, cupy.ndarray((3 << 30,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))


@pytest.mark.parametrize("block_bytes", [4096, 1 << 20], ids=["kernel", "copy_engine"])
def test_offsets_beyond_two_gib(machine: Machine, three_gib, block_bytes: int) -> None:
    tensor, device = three_gib
    blocks = (3 << 30) // block_bytes
    cache = tensor.reshape([blocks, 1, block_bytes])
    assert cache.data_ptr() == tensor.data_ptr(), "a reshape is a view"
    far, near = blocks - 1, 2**31 // block_bytes  # the last block, and the first that starts at 2 GiB
    neighbours = [far - 1, near - 1, near + 1]
    bits = random_bits(4, block_bytes, 1)
    host = GuardedHost(machine, bits)

    def block(i: int) -> np.ndarray:
        return device[i * block_bytes : (i + 1) * block_bytes].get()

    device[:] = 0x55
    machine.synchronize()
    ops.swap_cache_per_layer(cache, host.address, 4, [far, near], [2, 0], 0, TO_DEVICE)
    np.testing.assert_array_equal(block(far), bits[2])
    np.testing.assert_array_equal(block(near), bits[0])
    for i in neighbours:
        assert (block(i) == 0x55).all()
    assert int((device != 0x55).sum()) == int((bits[[0, 2]] != 0x55).sum()), "nothing else has changed"

    ops.transfer_blocks(cache, cache, [(far, 0), (near, blocks - 2)])
    machine.synchronize()
    np.testing.assert_array_equal(block(0), bits[2])
    np.testing.assert_array_equal(block(blocks - 2), bits[0])

    ops.swap_cache_per_layer(cache, host.address, 4, [far, near], [1, 3], 0, TO_HOST)
    host.check(bits[[0, 2, 2, 0]])
