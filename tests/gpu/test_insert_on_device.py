"""reshape_and_cache and its relatives in graphs, in programs, on streams, and beyond 2 GiB."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from paddle_kv.ops import _check
from tests.gpu.delay import busy
from tests.machine import Machine
from tests.ops.insert_conformance import Case, slot_tensor, tensor
from tests.ops.test_reshape_and_cache import LAYOUTS, plain_step, quantised_step
from tests.reference.cache_convert import from_layout

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("check", [False, True])
def test_a_graph_reads_tokens_and_slots_when_it_is_replayed(
    machine: Machine, layout: str, kv_cache_dtype: str, check: bool, other_stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    case = Case(machine, layout=layout, kv_cache_dtype=kv_cache_dtype)
    tensors = case.token_tensors()
    mapping = slot_tensor(np.full(case.tokens, -1), machine)
    case.insert(None, tensors=tensors, slot_mapping=mapping, stream=other_stream)  # loads the kernel
    machine.synchronize()
    monkeypatch.setenv("PADDLE_KV_CHECK", str(int(check)))
    monkeypatch.setattr(_check, "access_checks", [lambda address, ids, writing, queue: None])
    slots_on_device = cupy.ndarray((case.tokens,), cupy.int64, cupy.cuda.MemoryPointer(
        cupy.cuda.UnownedMemory(mapping.data_ptr(), 8 * case.tokens, mapping), 0))  # fmt: skip
    with other_stream:
        other_stream.begin_capture()
        with pytest.warns(RuntimeWarning, match="captured into a CUDA graph") if check else nullcontext():
            case.insert(None, tensors=tensors, slot_mapping=mapping, stream=other_stream)
        graph = other_stream.end_capture()
    case.check_untouched()
    for seed in (1, 2):
        slots = np.random.default_rng(seed).permutation(20)[: case.tokens]
        slots_on_device.set(slots)
        machine.synchronize()
        graph.launch(other_stream)
        other_stream.synchronize()
        case.hnd = case.expected(slots)
        case.check_untouched()


def test_a_graph_of_the_dynamic_and_the_latent_operator(machine: Machine, other_stream: Any) -> None:
    case, plain = (Case(machine, kv_cache_dtype="int8") for _ in range(2))
    scales, plain_scales = ([tensor(np.zeros((5, 3, 4), np.float32), machine) for _ in "kv"] for _ in range(2))
    latent, plain_latent = (tensor(np.zeros((5, 4, 48), np.float16), machine) for _ in range(2))
    parts = [tensor(case.rows[0].reshape(11, -1)[:, :n], machine) for n in (32, 16)]
    slots = slot_tensor(case.random_slots(), machine)
    key, value = case.token_tensors()

    def run(caches: list[Any], scale_caches: list[Any], latent_cache: Any) -> None:
        ops.reshape_and_cache_dynamic(
            key, value, *caches, *scale_caches, slots, kv_cache_dtype="int8", stream=other_stream
        )
        ops.concat_and_cache_mla(*parts, latent_cache, slots, stream=other_stream)

    run(plain.cache_tensors, plain_scales, plain_latent)
    machine.synchronize()
    with other_stream:
        other_stream.begin_capture()
        run(case.cache_tensors, scales, latent)
        graph = other_stream.end_capture()
    case.check_untouched()
    graph.launch(other_stream)
    other_stream.synchronize()
    for got, want in zip(
        [*case.cache_tensors, *scales, latent], [*plain.cache_tensors, *plain_scales, plain_latent], strict=True
    ):
        assert np.array_equal(got.numpy().view(np.uint8), want.numpy().view(np.uint8))


@pytest.mark.parametrize("full_graph", [True, False], ids=["source", "bytecode"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_in_a_program(machine: Machine, full_graph: bool, kv_cache_dtype: str) -> None:
    quantised = kv_cache_dtype != "auto"
    scales = (0.5, np.array([0.1, 3.0, 0.7], np.float32)) if quantised else (1.0, 1.0)
    traced = paddle.jit.to_static(quantised_step if quantised else plain_step, full_graph=full_graph)
    case = Case(machine, kv_cache_dtype=kv_cache_dtype)
    v_scale = tensor(np.asarray(scales[1], np.float32), machine)
    for first in (0, 9, 3):
        slots = np.arange(first, first + 11)
        traced(*case.token_tensors(), *case.cache_tensors, slot_tensor(slots, machine), v_scale)
        case.hnd = case.expected(slots, scales)
        case.check_untouched()


def test_the_stream_that_is_named(machine: Machine, other_stream: Any) -> None:
    import cupy

    case = Case(machine)
    tensors, slots = case.token_tensors(), case.random_slots()
    mapping = slot_tensor(slots, machine)
    Case(machine).insert(None, tensors=tensors, slot_mapping=mapping, stream=other_stream)
    machine.synchronize()
    busy(other_stream, 150)
    case.insert(None, tensors=tensors, slot_mapping=mapping, stream=other_stream)
    now = np.empty(case.caches[0].bits.nbytes, np.uint8)
    third = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.memcpyAsync(now.ctypes.data, case.cache_tensors[0].data_ptr(), now.nbytes, 2, third.ptr)
    third.synchronize()
    np.testing.assert_array_equal(now, case.caches[0].bits.ravel())
    other_stream.synchronize()
    case.check_bits(case.expected(slots))


@pytest.mark.parametrize("name", ["key", "value", "slot_mapping", "k_scale"])
def test_tensors_on_the_cpu_beside_caches_on_the_gpu(machine: Machine, name: str) -> None:
    case = Case(machine, kv_cache_dtype="int8")
    key, value = case.token_tensors()
    given = {"key": key, "value": value, "slot_mapping": slot_tensor(case.random_slots(), machine)}
    given["k_scale"] = tensor(np.ones(3, np.float32), machine)
    given[name] = paddle.to_tensor(given[name].numpy(), place=paddle.CPUPlace())
    with pytest.raises(ValueError, match=f"{name} "):
        ops.reshape_and_cache(
            key_cache=case.cache_tensors[0], value_cache=case.cache_tensors[1], kv_cache_dtype="int8", **given
        )
    case.check_untouched()


@every_layout
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_beyond_four_gib(machine: Machine, layout: str, kv_cache_dtype: str) -> None:
    """The last slots of caches of more than 2^32 elements, and more than 2^31 slots x bytes before them."""
    import cupy

    heads, block_size, head_size, blocks = 8, 64, 128, 66_000
    item = 2 if kv_cache_dtype == "auto" else 1
    dtype = "float16" if kv_cache_dtype == "auto" else "uint8"
    key_shape = {"HND": (heads, block_size, head_size), "NHD": (block_size, heads, head_size)}.get(
        layout, (heads, head_size * item // 16, block_size, 16 // item)
    )
    value_shape = (heads, head_size, block_size) if layout == "packed" else key_shape
    caches = [paddle.empty([blocks, *shape], dtype=dtype) for shape in (key_shape, value_shape)]
    case = Case(machine, tokens=3, heads=heads, head_size=head_size, blocks=3, block_size=block_size, layout=layout,
                kv_cache_dtype=kv_cache_dtype)  # fmt: skip
    big = [0, 33_000, blocks - 1]
    block_bytes = heads * block_size * head_size * item
    views = []
    for cache, small in zip(caches, case.caches, strict=True):
        memory = cupy.cuda.UnownedMemory(cache.data_ptr(), blocks * block_bytes, cache)
        view = cupy.ndarray((blocks, block_bytes), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        for i, block in enumerate(big):
            view[block] = cupy.asarray(small.bits[i])
        views.append(view)
    positions = [5, 63, 62]
    slots = np.array([block * block_size + position for block, position in zip(big, positions, strict=True)])
    machine.synchronize()
    ops.reshape_and_cache(
        *case.token_tensors(), *caches, slot_tensor(slots, machine), layout=layout, kv_cache_dtype=kv_cache_dtype
    )
    machine.synchronize()
    small_slots = np.array([i * block_size + position for i, position in enumerate(positions)])
    for view, want, shape in zip(views, case.expected(small_slots), (key_shape, value_shape), strict=True):
        bits = np.stack([view[block].get() for block in big])
        got = from_layout(bits.view(f"u{item}").reshape(3, *shape), layout)
        np.testing.assert_array_equal(got, want.view(f"u{item}"))


@every_layout
def test_a_scale_for_each_token_beyond_four_gib(machine: Machine, layout: str) -> None:
    """What reshape_and_cache_dynamic writes there is what it writes into caches of three blocks."""
    import cupy

    big, block_size, positions = [0, 33_000, 65_999], 64, [5, 63, 62]
    case = Case(machine, tokens=3, heads=8, head_size=128, blocks=3, block_size=block_size, layout=layout,
                kv_cache_dtype="int8")  # fmt: skip
    small = [*case.cache_tensors, *(tensor(np.zeros((3, 8, block_size), np.float32), machine) for _ in "kv")]
    large, views = [], []
    for few in small:
        many = paddle.empty([big[-1] + 1, *few.shape[1:]], dtype=few.dtype)
        block_bytes = int(np.prod(few.shape[1:])) * few.element_size()
        memory = cupy.cuda.UnownedMemory(many.data_ptr(), many.shape[0] * block_bytes, many)
        view = cupy.ndarray((many.shape[0], block_bytes), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        for block, bits in zip(big, few.numpy().view(np.uint8).reshape(3, -1), strict=True):
            view[block] = cupy.asarray(bits)
        large.append(many)
        views.append(view)
    machine.synchronize()
    for caches, blocks in ((small, [0, 1, 2]), (large, big)):
        slots = np.array([b * block_size + p for b, p in zip(blocks, positions, strict=True)])
        ops.reshape_and_cache_dynamic(
            *case.token_tensors(), *caches, slot_tensor(slots, machine), layout=layout, kv_cache_dtype="int8"
        )
    machine.synchronize()
    for few, view in zip(small, views, strict=True):
        want = few.numpy().view(np.uint8).reshape(3, -1)
        np.testing.assert_array_equal(np.stack([view[block].get() for block in big]), want)
