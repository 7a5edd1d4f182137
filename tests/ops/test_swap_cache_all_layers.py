"""swap_cache_all_layers and swap_cache_all_layers_async against the reference, on the whole of all memories."""

from __future__ import annotations

import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import DTYPES, Machine, cpu_machine
from tests.ops.swap_conformance import ALL_LAYERS, Layer, call, check_swap, shuffled_ids
from tests.reference.swap import TO_DEVICE, TO_HOST

every_op = pytest.mark.parametrize("op", ALL_LAYERS)
both_ways = pytest.mark.parametrize("mode", [TO_HOST, TO_DEVICE])


@every_op
@both_ways
@pytest.mark.parametrize("layer_count", [1, 2, 9, 40])
def test_layer_counts(machine: Machine, op: str, mode: int, layer_count: int) -> None:
    layers = [Layer(machine, 7, 9, (3, 5), "float16", seed=i) for i in range(layer_count)]
    check_swap(op, layers, *shuffled_ids(5, 7, 9), mode)


@every_op
@both_ways
def test_every_dtype_block_size_and_cache_size_in_one_call(machine: Machine, op: str, mode: int) -> None:
    shapes = [(5, 3), (2, 3, 5), (1, 1), (2, 3, 5, 4), (1, 17), (33, 1), (7, 7)]
    layers = [
        Layer(machine, 6 + i, 9, shape, dtype, misalignment=3 * i, seed=i)
        for i, (shape, dtype) in enumerate(zip(shapes, (2 * DTYPES)[: len(shapes)], strict=True))
    ]
    check_swap(op, layers, *shuffled_ids(5, 6, 9), mode)


@every_op
@both_ways
def test_empty_lists(machine: Machine, op: str, mode: int) -> None:
    layers = [Layer(machine, 3, 4, (2, 5), "float32", seed=i) for i in range(2)]
    check_swap(op, layers, [], [], mode)
    caches = [layer.cache.tensor for layer in layers]
    for addresses in ([0, 0], [4096, caches[0].data_ptr()], [layers[0].host.address] * 2):
        assert getattr(ops, op)(caches, addresses, 4, [], [], 0, mode) is caches
        with pytest.raises(ValueError, match="cache_gpu_tensors has 2 tensors, cache_cpu_ptrs has 1 addresses"):
            getattr(ops, op)(caches, addresses[:1], 4, [], [], 0, mode)
    for layer in layers:
        layer.check_untouched()
    nothing: list[paddle.Tensor] = []
    assert getattr(ops, op)(nothing, [], 0, [], [], 0, mode) is nothing


@both_ways
def test_one_source_many_targets(machine: Machine, mode: int) -> None:
    layers = [Layer(machine, 6, 6, (2, 5), "int8", seed=i) for i in range(3)]
    sources, targets = [3, 3, 1], [0, 5, 2]
    check_swap(ALL_LAYERS[0], layers, *((sources, targets) if mode == TO_HOST else (targets, sources)), mode)


def test_one_cache_may_be_saved_to_two_places(machine: Machine) -> None:
    layers = [Layer(machine, 4, 5, (2, 5), "float32") for _ in range(2)]
    call(ALL_LAYERS[0], layers, [3, 1], [0, 4], TO_HOST, caches=[layers[0].cache.tensor] * 2)
    layers[0].check([3, 1], [0, 4], TO_HOST)
    layers[1].check([3, 1], [0, 4], TO_HOST)


def test_one_host_pool_may_be_loaded_into_two_caches(machine: Machine) -> None:
    layers = [Layer(machine, 4, 5, (2, 5), "float32") for _ in range(2)]
    call(ALL_LAYERS[0], layers, [3, 1], [0, 4], TO_DEVICE, pointers=[layers[0].host.address] * 2)
    layers[0].check([3, 1], [0, 4], TO_DEVICE)
    layers[1].check([3, 1], [0, 4], TO_DEVICE)


def test_a_tuple_of_caches_and_addresses_is_returned_as_it_is(machine: Machine) -> None:
    layer = Layer(machine, 4, 5, (2, 5), "float32")
    caches = (layer.cache.tensor,)
    assert ops.swap_cache_all_layers(caches, (layer.host.address,), 5, [3], [4], 0, TO_HOST) is caches
    layer.check([3], [4], TO_HOST)


@given(data=st.data())
def test_random_swaps(data: st.DataObject) -> None:
    host_blocks, mode = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([TO_HOST, TO_DEVICE]))
    shapes = st.lists(st.integers(1, 7), min_size=2, max_size=4).map(tuple)
    kinds = data.draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.integers(1, 9)), min_size=1, max_size=10))
    smallest = min(device_blocks for _, _, device_blocks in kinds)
    source_blocks, target_blocks = (smallest, host_blocks) if mode == TO_HOST else (host_blocks, smallest)
    targets = data.draw(st.lists(st.integers(0, target_blocks - 1), unique=True))
    source = st.integers(0, source_blocks - 1)
    sources = data.draw(st.lists(source, min_size=len(targets), max_size=len(targets)))
    layers = [
        Layer(cpu_machine(), device_blocks, host_blocks, shape, dtype, misalignment=i, seed=i)
        for i, (shape, dtype, device_blocks) in enumerate(kinds)
    ]
    op = data.draw(st.sampled_from(ALL_LAYERS))
    check_swap(op, layers, *((sources, targets) if mode == TO_HOST else (targets, sources)), mode)
