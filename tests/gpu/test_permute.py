"""What only a GPU shows of the permute family: pinned memory, ids in device memory, streams, graphs, large offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_kv import ops
from tests.gpu.delay import busy
from tests.gpu.paddle_gpu import PINNED, pinned_tensors
from tests.machine import POISON, Machine, bits_of, item_bytes, random_bits, tensor_of
from tests.ops.permute_conformance import Shape, Stack, dense, flat
from tests.ops.test_permute_blocks import check_operational, check_universal, expected_universal
from tests.ops.test_permute_cache import Caches, parts_of, universal_bits
from tests.reference import permute as reference

both_layouts = pytest.mark.parametrize("layout", ["NHD", "HND"])


def pinned(shape: tuple[int, ...], dtype: str, bits: np.ndarray | None = None) -> paddle.Tensor:
    """A tensor in page-locked memory, with these bits or poison."""
    if bits is None:
        bits = np.full((shape[0], int(np.prod(shape[1:])) * item_bytes(dtype)), POISON, np.uint8)
    return tensor_of(bits.reshape(shape[0], -1), shape[1:], dtype, PINNED)


@pinned_tensors
@both_layouts
@pytest.mark.parametrize("width", [13, 128])
def test_out_in_pinned_memory(machine: Machine, layout: str, width: int) -> None:
    shape = Shape(layout=layout, width=width, dtype="bfloat16")
    stack, out = Stack(machine, shape), pinned(shape.universal, shape.dtype)
    address = out.data_ptr()
    assert ops.universal_from_block(stack.chunks, num_layers=shape.layers, inner_layout=layout, out=out) is out
    machine.synchronize()
    assert out.data_ptr() == address and "pinned" in str(out.place)
    np.testing.assert_array_equal(bits_of(out), expected_universal(stack))
    back = Stack(machine, shape, filled=False, seed=1)
    ops.block_from_universal(out, back.chunks, inner_layout=layout)
    machine.synchronize()
    back.check(stack.bits)


@pinned_tensors
def test_operational_in_pinned_memory(machine: Machine) -> None:
    shape = Shape(width=40)
    stack, out = Stack(machine, shape), pinned(shape.operational, shape.dtype)
    ops.operational_from_block(stack.chunks, num_layers=shape.layers, out=out)
    machine.synchronize()
    np.testing.assert_array_equal(bits_of(out), stack.bits.reshape(shape.blocks, -1))
    back = Stack(machine, shape, filled=False, seed=1)
    ops.block_from_operational(out, back.chunks)
    machine.synchronize()
    back.check(stack.bits)


@pinned_tensors
def test_addresses_with_a_pinned_tensor(machine: Machine) -> None:
    """The GPU is known from the addresses alone."""
    shape = Shape()
    stack, out = Stack(machine, shape), pinned(shape.universal, shape.dtype)
    ops.universal_from_block(stack.addresses, num_layers=shape.layers, out=out)
    machine.synchronize()
    np.testing.assert_array_equal(bits_of(out), expected_universal(stack))


@pinned_tensors
@both_layouts
def test_caches_and_pinned_memory(machine: Machine, layout: str) -> None:
    caches = Caches(machine, layout, width=24)
    out = pinned(caches.universal_shape(4), caches.dtype)
    ops.universal_from_cache(caches.keys, caches.values, [7, 0, 3, 8], layout=layout, out=out)
    machine.synchronize()
    np.testing.assert_array_equal(bits_of(out), caches.expected([7, 0, 3, 8]))
    ops.cache_from_universal(out, caches.keys, caches.values, [1, 2, 4, 5], layout=layout)
    machine.synchronize()
    for cache, bits in zip(caches.caches, caches.bits, strict=True):
        expected = bits.copy()
        expected[[1, 2, 4, 5]] = bits[[7, 0, 3, 8]]
        cache.check(expected)


def test_pageable_memory_is_refused(machine: Machine) -> None:
    shape = Shape()
    stack = Stack(machine, shape)
    bits = np.full((shape.blocks, shape.chunk_bytes * 10), POISON, np.uint8)
    out = tensor_of(bits, shape.universal[1:], shape.dtype, paddle.CPUPlace())
    for chunks in (stack.chunks, stack.addresses):
        with pytest.raises(ValueError, match=r"out.*(pageable|can reach)"):
            ops.universal_from_block(chunks, num_layers=shape.layers, out=out)
    chunk = tensor_of(bits[:1, : shape.chunk_bytes], shape.chunk, shape.dtype, paddle.CPUPlace())[0]
    device_out = dense(machine, shape.universal, shape.dtype)
    with pytest.raises(ValueError, match=r"chunks\[3\].*pageable"):
        chunks = [*stack.chunks[:3], chunk, *stack.chunks[4:]]
        ops.universal_from_block(chunks, num_layers=shape.layers, out=device_out.tensor)
    with pytest.raises(ValueError, match=r"chunks\[3\].*can reach"):
        addresses = [*stack.addresses[:3], chunk.data_ptr(), *stack.addresses[4:]]
        ops.universal_from_block(addresses, num_layers=shape.layers, out=device_out.tensor)
    machine.synchronize()
    device_out.check(device_out.bits)
    np.testing.assert_array_equal(bits_of(out), bits)


class TestIdsOnTheDevice:
    @pytest.mark.parametrize("dtype", [np.int32, np.int64])
    def test_there_and_back(self, machine: Machine, dtype: Any) -> None:
        caches = Caches(machine)
        ids = [7, 0, 3, 8]
        given = paddle.to_tensor(np.array(ids, dtype), place=machine.place)
        out = dense(machine, caches.universal_shape(4), caches.dtype)
        ops.universal_from_cache(caches.keys, caches.values, given, out=out.tensor)
        machine.synchronize()
        out.check(caches.expected(ids))
        targets = paddle.to_tensor(np.array([1, 2, 4, 5], dtype), place=machine.place)
        ops.cache_from_universal(out.tensor, caches.keys, caches.values, targets)
        machine.synchronize()
        for cache, bits in zip(caches.caches, caches.bits, strict=True):
            expected = bits.copy()
            expected[[1, 2, 4, 5]] = bits[ids]
            cache.check(expected)

    @pytest.mark.parametrize("bad", [-1, -(2**31), 9, 2**31 - 1])
    def test_bad_ids_are_skipped(self, machine: Machine, bad: int) -> None:
        caches = Caches(machine)
        ids = paddle.to_tensor(np.array([7, bad, 3], np.int32), place=machine.place)
        out = dense(machine, caches.universal_shape(3), caches.dtype)
        ops.universal_from_cache(caches.keys, caches.values, ids, out=out.tensor)
        machine.synchronize()
        expected = caches.expected([7, 0, 3])
        expected[1] = POISON
        out.check(expected)
        ops.cache_from_universal(out.tensor, caches.keys, caches.values, ids)
        machine.synchronize()
        caches.check_untouched()

    def test_under_the_debug_mode_they_are_reported(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PADDLE_KV_CHECK", "1")
        caches = Caches(machine)
        out = dense(machine, caches.universal_shape(3), caches.dtype)
        ids = paddle.to_tensor(np.array([7, 9, 3], np.int32), place=machine.place)
        with pytest.raises(IndexError, match=r"block_ids\[1\] = 9"):
            ops.universal_from_cache(caches.keys, caches.values, ids, out=out.tensor)
        twice = paddle.to_tensor(np.array([7, -1, 7]), place=machine.place)
        with pytest.raises(ValueError, match="block 7 more than once"):
            ops.cache_from_universal(out.tensor, caches.keys, caches.values, twice)
        machine.synchronize()
        out.check(out.bits)
        caches.check_untouched()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("tokens", [16, 64])
def test_the_shapes_of_a_model(machine: Machine, layout: str, tokens: int) -> None:
    """80 layers, 8 heads, 128 wide: a table of addresses that does not fit into kernel parameters."""
    shape = Shape(blocks=4, layers=80, heads=8, tokens=tokens, width=128, dtype="bfloat16", layout=layout)
    stack = Stack(machine, shape)
    universal = ops.universal_from_block(stack.chunks, num_layers=80, inner_layout=layout)
    machine.synchronize()
    rows = stack.bits.reshape(4, 80, 2, *shape.chunk[:2], 256)
    expected = rows.transpose(0, 4, 1, 2, 3, 5) if layout == "NHD" else rows.transpose(0, 3, 1, 2, 4, 5)
    np.testing.assert_array_equal(bits_of(universal), flat(expected))
    back = Stack(machine, shape, filled=False, seed=1)
    ops.block_from_universal(universal, back.chunks, inner_layout=layout)
    machine.synchronize()
    back.check(stack.bits)


def test_offsets_beyond_two_gibibytes(machine: Machine) -> None:
    """Blocks of a cache and of the universal tensor that lie further than 32 bits can count."""
    block_bytes = 1 << 20
    blocks = (5 << 30) // block_bytes
    cache = paddle.to_tensor(np.zeros((blocks, 1, 256, 4096), np.uint8), place=machine.place)
    ids = [blocks - 1, 0, blocks // 2]
    marks = random_bits(3, block_bytes, 7)
    universal = tensor_of(marks, (1, 1, 1, 256, 4096), "uint8", machine.place)
    ops.cache_from_universal(universal, [cache], None, ids)
    machine.synchronize()
    for block, mark in zip(ids, marks, strict=True):
        np.testing.assert_array_equal(cache[block : block + 1].numpy().ravel(), mark)
    everything = ops.universal_from_cache([cache], None, list(range(blocks))[::-1])
    machine.synchronize()
    for block, mark in zip(ids, marks, strict=True):
        at = blocks - 1 - block
        np.testing.assert_array_equal(everything[at : at + 1].numpy().ravel(), mark)
    assert not everything[1:2].numpy().any()


class TestStreams:
    def test_a_named_stream(self, machine: Machine, other_stream: Any) -> None:
        """The operator waits for what is on it, and the call does not."""
        shape = Shape(blocks=40)  # a table of addresses in device memory
        stack, out = Stack(machine, shape), dense(machine, shape.universal, shape.dtype)
        machine.synchronize()  # they were filled on Paddle's stream
        ops.universal_from_block(stack.chunks, num_layers=shape.layers, out=out.tensor, stream=other_stream)
        machine.synchronize()
        out.check(expected_universal(stack))

        again = dense(machine, shape.universal, shape.dtype)
        machine.synchronize()
        busy(other_stream, 100)
        ops.universal_from_block(stack.chunks, num_layers=shape.layers, out=again.tensor, stream=other_stream)
        assert not other_stream.done, "the call has waited for the stream"
        other_stream.synchronize()
        again.check(expected_universal(stack))

    def test_the_lists_may_be_freed_at_once(self, machine: Machine, other_stream: Any) -> None:
        """Many tables in flight, whose host memory has long been used for something else."""
        stacks = [Stack(machine, Shape(blocks=40), seed=seed) for seed in range(8)]
        outs = [dense(machine, stack.shape.universal, "uint8") for stack in stacks]
        machine.synchronize()
        busy(other_stream, 50)
        for stack, out in zip(stacks, outs, strict=True):
            ops.universal_from_block(stack.addresses, num_layers=5, out=out.tensor, stream=other_stream)
        other_stream.synchronize()
        for stack, out in zip(stacks, outs, strict=True):
            out.check(expected_universal(stack))

    def test_inside_a_captured_graph(self, machine: Machine, other_stream: Any) -> None:
        """A replay copies what the chunks hold then, also with the table in device memory."""
        shape = Shape(blocks=40)
        stack, out = Stack(machine, shape), dense(machine, shape.universal, shape.dtype)
        given = {"num_layers": shape.layers, "out": out.tensor, "stream": other_stream}
        ops.universal_from_block(stack.chunks, **given)
        machine.synchronize()
        other_stream.begin_capture()
        ops.universal_from_block(stack.chunks, **given)
        graph = other_stream.end_capture()
        import cupy

        changed = random_bits(*stack.bits.shape, seed=99)
        for i, chunk in enumerate(stack.chunks):
            cupy.cuda.runtime.memcpy(chunk.data_ptr(), changed[i].ctypes.data, shape.chunk_bytes, 1)
        for _ in range(2):
            graph.launch(other_stream)
        other_stream.synchronize()
        stack.bits = changed
        out.check(expected_universal(stack))


@pinned_tensors
def test_resharding_in_pinned_memory(machine: Machine) -> None:
    """Parts that were saved to the host; the result is where they are, and the CPU cuts it."""
    whole = universal_bits(3, 8)
    parts = [tensor.pin_memory() for tensor in parts_of(machine, whole, 2, "bfloat16")]
    result = ops.reshard_universal(parts, 4)
    assert all("pinned" in str(part.place) for part in result)
    arrays = [whole[:, :4], whole[:, 4:]]
    for part, expected in zip(result, reference.reshard_universal(arrays, 4), strict=True):
        np.testing.assert_array_equal(bits_of(part), flat(expected))


@settings(max_examples=80)
@given(
    blocks=st.integers(1, 6),
    layers=st.integers(1, 6),
    outer=st.integers(1, 3),
    heads=st.integers(1, 9),
    tokens=st.integers(1, 90),
    width=st.integers(1, 300),
    dtype=st.sampled_from(["uint8", "bfloat16", "float32", "float64"]),
    layout=st.sampled_from(["NHD", "HND"]),
    addresses=st.booleans(),
)
def test_any_sizes(machine: Machine, addresses: bool, **sizes: Any) -> None:
    check_universal(machine, Shape(**sizes), addresses=addresses)
    check_operational(machine, Shape(**sizes), addresses=addresses)
