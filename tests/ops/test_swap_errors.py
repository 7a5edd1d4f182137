"""Wrong arguments of the swap_cache operators: a typed exception that names argument, value and range, nothing moved,
and the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.machine import Machine
from tests.ops.swap_conformance import ALL_LAYERS, PER_LAYER, Layer, call, check_swap
from tests.reference.swap import TO_DEVICE, TO_HOST

DEVICE_BLOCKS, HOST_BLOCKS = 5, 6
GOOD: dict[str, Any] = {"device_ids": [4, 0], "host_ids": [1, 5], "mode": TO_HOST}

# (what is changed, exception, what its text must say)
WRONG_IDS_AND_NUMBERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"device_ids": [0, 5]}, IndexError, r"swap_block_ids_gpu\[1\] = 5 must be in \[0, 5\)"),
    ({"device_ids": [-1, 0]}, IndexError, r"swap_block_ids_gpu\[0\] = -1 must be in \[0, 5\)"),
    ({"host_ids": [0, 6]}, IndexError, r"swap_block_ids_cpu\[1\] = 6 must be in \[0, 6\)"),
    ({"host_ids": [0, -7]}, IndexError, r"swap_block_ids_cpu\[1\] = -7 must be in \[0, 6\)"),
    ({"host_ids": [0, 2**31]}, IndexError, r"swap_block_ids_cpu\[1\] = 2147483648 "),
    ({"host_ids": [0, 2**32 + 1]}, IndexError, r"swap_block_ids_cpu\[1\] = 4294967297 "),
    ({"host_ids": [0, 2**63]}, IndexError, r"swap_block_ids_cpu\[1\]: 9223372036854775808 "),
    ({"host_ids": [0, 2**64 + 1]}, IndexError, r"swap_block_ids_cpu\[1\]: 18446744073709551617 "),
    ({"host_ids": [-(2**63) - 1, 0]}, IndexError, r"swap_block_ids_cpu\[0\]: -9223372036854775809 "),
    ({"host_ids": np.array([0, 2**64 - 1], "uint64")}, IndexError, r"swap_block_ids_cpu\[1\]: 18446744073709551615 "),
    ({"host_ids": range(2**63, 2**63 + 2)}, IndexError, r"swap_block_ids_cpu\[0\] = 9223372036854775808 "),
    ({"host_ids": [1]}, ValueError, r"swap_block_ids_gpu has 2 ids, swap_block_ids_cpu has 1"),
    ({"device_ids": []}, ValueError, r"swap_block_ids_gpu has 0 ids, swap_block_ids_cpu has 2"),
    ({"host_ids": [3, 3]}, ValueError, r"swap_block_ids_cpu names block 3 more than once"),
    ({"device_ids": [2, 2], "mode": TO_DEVICE}, ValueError, r"swap_block_ids_gpu names block 2 more than once"),
    ({"device_ids": None}, TypeError, r"swap_block_ids_gpu is None"),
    ({"host_ids": None}, TypeError, r"swap_block_ids_cpu is None"),
    ({"host_ids": "01"}, TypeError, r"swap_block_ids_cpu is '01'"),
    ({"host_ids": 3}, ValueError, r"swap_block_ids_cpu has shape \[\]"),
    ({"host_ids": [[1, 2]]}, ValueError, r"swap_block_ids_cpu has shape \[1, 2\]"),
    ({"host_ids": [[1], [2, 3]]}, TypeError, r"swap_block_ids_cpu"),
    ({"host_ids": [1, 2.0]}, TypeError, r"swap_block_ids_cpu has dtype float64"),
    ({"host_ids": [True, False]}, TypeError, r"swap_block_ids_cpu holds bool"),
    ({"host_ids": [2, True]}, TypeError, r"swap_block_ids_cpu holds bool"),
    ({"host_ids": np.array([True, False])}, TypeError, r"swap_block_ids_cpu has dtype bool"),
    ({"host_ids": {1: 2}}, TypeError, r"swap_block_ids_cpu"),
    ({"host_ids": iter([1, 2])}, TypeError, r"swap_block_ids_cpu"),
    ({"host_ids": [1, None]}, TypeError, r"swap_block_ids_cpu"),
    ({"mode": 2}, ValueError, r"mode = 2 must be 0 .* or 1"),
    ({"mode": -1}, ValueError, r"mode = -1 must be 0 .* or 1"),
    ({"mode": 2**32}, ValueError, r"mode = 4294967296 must be"),
    ({"mode": None}, TypeError, r"mode is None"),
    ({"mode": 1.0}, TypeError, r"mode is 1\.0"),
    ({"mode": True}, TypeError, r"mode is True"),
    ({"mode": "0"}, TypeError, r"mode is '0'"),
    ({"count": -1}, ValueError, r"max_block_num_cpu = -1"),
    ({"count": 0}, IndexError, r"swap_block_ids_cpu\[0\] = 1 must be in \[0, 0\)"),
    ({"count": 2**62}, ValueError, r"max_block_num_cpu .*4611686018427387904"),
    ({"count": 2**58}, ValueError, r"max_block_num_cpu .*288230376151711744"),
    ({"count": 2**40}, ValueError, r"max_block_num_cpu = 1099511627776"),
    ({"count": 2**63}, ValueError, r"max_block_num_cpu = 9223372036854775808"),
    ({"count": 6.0}, TypeError, r"max_block_num_cpu is 6\.0"),
    ({"count": None}, TypeError, r"max_block_num_cpu is None"),
]
WRONG_ADDRESSES: list[tuple[Any, type[Exception], str]] = [
    (0, ValueError, r" = 0 must be the address"),
    (-8, ValueError, r" = -8 must be the address"),
    (8, ValueError, r" at 8 are not all"),
    (4096, ValueError, r" at 4096 are not all"),
    (2**63 - 8, ValueError, r" at 9223372036854775800 do not fit in 64 bits"),
    (2**64, ValueError, r"18446744073709551616"),
    (None, TypeError, r""),
    (1.0, TypeError, r""),
]


def tensors_of_wrong_ids() -> list[tuple[paddle.Tensor, str]]:
    return [
        (paddle.to_tensor([1.0, 2.0]), "float32"),
        (paddle.to_tensor([True, False]), "bool"),
        (paddle.to_tensor(np.array([0, 0x3F80], "uint16")), "bfloat16"),  # its bits look like ids
    ]


def refused(layers: list[Layer], error: type[Exception], text: str, wrong: Callable[[], Any]) -> None:
    with pytest.raises(error, match=text) as caught:
        wrong()
    assert type(caught.value) is error
    assert "(at " not in str(caught.value), "Paddle's decoration"
    for layer in layers:
        layer.check_untouched()


@pytest.fixture
def layers(machine: Machine) -> list[Layer]:
    """Three tensors that differ in dtype and block size."""
    shapes = [((3, 5), "float32"), ((2, 7, 3), "uint8"), ((3,) * 2, "bfloat16")]
    return [Layer(machine, DEVICE_BLOCKS, HOST_BLOCKS, shape, dtype, seed=i) for i, (shape, dtype) in enumerate(shapes)]


@pytest.mark.parametrize("op", PER_LAYER + ALL_LAYERS)
class TestEveryOperator:
    @pytest.fixture
    def layers(self, layers: list[Layer], op: str) -> list[Layer]:
        return layers if op in ALL_LAYERS else layers[:1]

    @pytest.fixture(autouse=True)
    def next_call_works(self, layers: list[Layer], op: str):
        yield
        check_swap(op, layers, **GOOD)

    @pytest.mark.parametrize(("wrong", "error", "text"), WRONG_IDS_AND_NUMBERS)
    def test_ids_and_numbers(
        self, layers: list[Layer], op: str, wrong: dict, error: type[Exception], text: str
    ) -> None:
        refused(layers, error, text, lambda: call(op, layers, **{**GOOD, **wrong}))

    def test_ids_as_tensors(self, layers: list[Layer], op: str) -> None:
        for ids, dtype in tensors_of_wrong_ids():
            text = f"swap_block_ids_cpu has dtype paddle.{dtype}"
            refused(layers, TypeError, text, lambda ids=ids: call(op, layers, **{**GOOD, "host_ids": ids}))

    @pytest.mark.parametrize(("address", "error", "text"), WRONG_ADDRESSES)
    def test_addresses(self, layers: list[Layer], op: str, address: Any, error: type[Exception], text: str) -> None:
        pointers = [layer.host.address for layer in layers[:-1]] + [address]
        refused(layers, error, f"cache_cpu_ptr.*{text}", lambda: call(op, layers, pointers=pointers, **GOOD))

    def test_host_memory_inside_the_cache(self, layers: list[Layer], op: str) -> None:
        if not layers[0].machine.on_cpu:
            pytest.skip("a GPU cache has no host address")
        for mode in (TO_HOST, TO_DEVICE):
            inside = layers[0].cache.tensor.data_ptr() + layers[0].cache_bits[0].size
            pointers = [inside] + [layer.host.address for layer in layers[1:]]
            changed = {**GOOD, "mode": mode, "host_ids": [0, 1], "count": 2}
            refused(layers, ValueError, "overlap", lambda p=pointers, c=changed: call(op, layers, pointers=p, **c))

    def test_caches(self, layers: list[Layer], op: str, machine: Machine) -> None:
        good = [layer.cache.tensor for layer in layers[:-1]]
        shape = [DEVICE_BLOCKS, 3, 5]
        on_machine = paddle.to_tensor(np.zeros(shape, "float32"), place=machine.place)
        wrong: list[tuple[Any, type[Exception], str]] = [
            (None, TypeError, "is NoneType; a paddle.Tensor is expected"),
            (np.zeros(shape), TypeError, "is ndarray; a paddle.Tensor is expected"),
            (7, TypeError, "is int; a paddle.Tensor is expected"),
            (on_machine.transpose([0, 2, 1]), ValueError, "is not contiguous"),
            (on_machine[:, :, ::2], ValueError, "is not contiguous"),
            (paddle.to_tensor(np.zeros((0, 3, 5), "float32")), ValueError, "holds no memory"),
            (paddle.to_tensor(np.zeros((5, 0, 5), "float32")), ValueError, "holds no memory"),
        ]
        for rank in (1, 2, 6):
            tensor = paddle.to_tensor(np.zeros([DEVICE_BLOCKS] + [1] * (rank - 1), "float32"), place=machine.place)
            wrong.append((tensor, ValueError, f"has rank {rank}; "))
        if machine.on_cpu:
            sparse = paddle.sparse.sparse_coo_tensor([[0, 1], [0, 1], [0, 1]], [1.0, 2.0], shape)
            wrong.append((sparse, ValueError, "is not a dense tensor"))
        name = r"cache_gpu_tensors\[2\] " if op in ALL_LAYERS else "cache_gpu "
        for cache, error, text in wrong:
            refused(layers, error, name + text, lambda c=cache: call(op, layers, caches=[*good, c], **GOOD))

    def test_in_a_static_graph(self, layers: list[Layer], op: str) -> None:
        paddle.enable_static()
        try:
            refused(layers, NotImplementedError, op, lambda: call(op, layers, **GOOD))
        finally:
            paddle.disable_static()

    def test_too_few_arguments(self, layers: list[Layer], op: str) -> None:
        refused(layers, TypeError, "argument", lambda: getattr(ops, op)(layers[0].cache.tensor))


@pytest.mark.parametrize("op", ALL_LAYERS)
class TestListsOfTensors:
    @pytest.fixture(autouse=True)
    def next_call_works(self, layers: list[Layer], op: str):
        yield
        check_swap(op, layers, **GOOD)

    def test_lists_of_different_length(self, layers: list[Layer], op: str) -> None:
        caches, pointers = [layer.cache.tensor for layer in layers], [layer.host.address for layer in layers]
        for some_caches, some_pointers, text in [
            (caches, pointers[:2], "cache_gpu_tensors has 3 tensors, cache_cpu_ptrs has 2 addresses"),
            (caches[:2], pointers, "cache_gpu_tensors has 2 tensors, cache_cpu_ptrs has 3 addresses"),
            (caches, [], "cache_gpu_tensors has 3 tensors, cache_cpu_ptrs has 0 addresses"),
            ([], pointers, "cache_gpu_tensors is empty, cache_cpu_ptrs has 3 addresses"),
        ]:
            changed = {"caches": some_caches, "pointers": some_pointers, **GOOD}
            refused(layers, ValueError, text, lambda changed=changed: call(op, layers, **changed))

    def test_no_list_at_all(self, layers: list[Layer], op: str) -> None:
        for caches in (None, layers[0].cache.tensor, 3, {}):
            refused(layers, TypeError, "cache_gpu_tensors", lambda c=caches: call(op, layers, caches=c, **GOOD))
        for pointers in (None, "abc", [None] * 3, [True] * 3):
            refused(layers, TypeError, "cache_cpu_ptrs", lambda p=pointers: call(op, layers, pointers=p, **GOOD))

    def test_the_smallest_cache_bounds_the_ids(self, machine: Machine, layers: list[Layer], op: str) -> None:
        """Everything is checked before anything moves: the last tensor is too small, the first stays as it is."""
        smaller = Layer(machine, 3, HOST_BLOCKS, (3, 5), "int8")
        text = r"swap_block_ids_gpu\[0\] = 4 must be in \[0, 3\)"
        refused([*layers, smaller], IndexError, text, lambda: call(op, [*layers, smaller], **GOOD))

    @pytest.mark.parametrize("shift", [0, 1])
    def test_a_target_named_twice(self, layers: list[Layer], op: str, shift: int) -> None:
        pointers = [layer.host.address for layer in layers]
        pointers[2] = pointers[0] + shift
        text = "cache_cpu_ptrs: two of the memories to be written overlap"
        refused(layers, ValueError, text, lambda: call(op, layers, pointers=pointers, **GOOD))
        caches = [layers[0].cache.tensor, layers[1].cache.tensor, layers[0].cache.tensor[shift:]]
        changed = {"caches": caches, **GOOD, "device_ids": [0, 1], "mode": TO_DEVICE}
        text = "cache_gpu_tensors: two of the memories to be written overlap"
        refused(layers, ValueError, text, lambda: call(op, layers, **changed))


def test_traced_as_a_whole_it_is_refused(layers: list[Layer]) -> None:
    def swap(cache: paddle.Tensor, address: int) -> paddle.Tensor:
        return ops.swap_cache_per_layer(cache, address, HOST_BLOCKS, [4, 0], [1, 5], 0, TO_HOST)

    with pytest.raises(NotImplementedError, match=r"\bswap_cache_per_layer carries memory addresses"):
        paddle.jit.to_static(swap, full_graph=True)(layers[0].cache.tensor, layers[0].host.address)
    layers[0].check_untouched()
    swap(layers[0].cache.tensor, layers[0].host.address)
    layers[0].check([4, 0], [1, 5], TO_HOST)


@pytest.mark.skipif(paddle.__version__.startswith("2."), reason="the tracer of Paddle 2.6 cannot be told to let go")
def test_where_the_tracer_can_let_go_it_runs(layers: list[Layer]) -> None:
    def swap(cache: paddle.Tensor, address: int) -> paddle.Tensor:
        return ops.swap_cache_per_layer(cache, address, HOST_BLOCKS, [4, 0], [1, 5], 0, TO_HOST)

    paddle.jit.to_static(swap, full_graph=False)(layers[0].cache.tensor, layers[0].host.address)
    layers[0].check([4, 0], [1, 5], TO_HOST)
