"""Block stacks to universal and operational tensors and back, against the reference, on the whole of both memories."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import DTYPES, Machine, bits_of, cpu_machine, random_bits
from tests.ops.permute_conformance import Shape, Stack, dense, flat
from tests.reference import permute as reference

both_layouts = pytest.mark.parametrize("layout", ["NHD", "HND"])

# Rows of every word width, rows and heads that merge, rows that are cut, tiles of one row and of many.
SHAPES = {
    "odd": Shape(),
    "two-byte words": Shape(width=13, dtype="bfloat16"),
    "four-byte words": Shape(width=10, dtype="bfloat16"),
    "eight-byte words": Shape(width=12, dtype="bfloat16"),
    "sixteen-byte words": Shape(width=24, dtype="bfloat16"),
    "rows of a warp": Shape(width=512, heads=3, tokens=5),
    "one token": Shape(tokens=1, width=40),
    "one head": Shape(heads=1, width=24, tokens=9),
    "one byte": Shape(blocks=2, layers=1, outer=1, heads=1, tokens=1, width=1),
    "latent cache": Shape(outer=1, heads=1, width=576, dtype="bfloat16"),
    "three outer": Shape(outer=3, layers=2),
    "long rows": Shape(blocks=2, layers=1, heads=3, tokens=2, width=4099),
    "many tokens": Shape(blocks=1, layers=2, heads=2, tokens=517, width=16),
    "many blocks": Shape(blocks=61, layers=7, heads=3, tokens=2, width=5),
}
every_shape = pytest.mark.parametrize("name", SHAPES)


def shape_of(name: str, layout: str) -> Shape:
    return Shape(**{**SHAPES[name].__dict__, "layout": layout})


def expected_universal(stack: Stack) -> np.ndarray:
    shape = stack.shape
    return flat(reference.universal_from_block(shape.as_rows(stack.bits), shape.layers, shape.outer, shape.layout))


def check_universal(machine: Machine, shape: Shape, *, addresses: bool = False) -> None:
    """There and back, each into poison, with tensors or addresses for the chunks."""
    stack, out = Stack(machine, shape), dense(machine, shape.universal, shape.dtype)
    sizes = {"num_layers": shape.layers, "num_outer": shape.outer}
    given = stack.addresses if addresses else stack.chunks
    assert ops.universal_from_block(given, **sizes, inner_layout=shape.layout, out=out.tensor) is out.tensor
    machine.synchronize()
    universal = expected_universal(stack)
    out.check(universal)
    stack.check_untouched()

    back = Stack(machine, shape, filled=False, seed=1)
    given = back.addresses if addresses else back.chunks
    assert ops.block_from_universal(out.tensor, given, inner_layout=shape.layout) is given
    machine.synchronize()
    back.check(stack.bits)
    out.check(universal)


def check_operational(machine: Machine, shape: Shape, *, addresses: bool = False) -> None:
    stack, out = Stack(machine, shape), dense(machine, shape.operational, shape.dtype)
    sizes = {"num_layers": shape.layers, "num_outer": shape.outer}
    given = stack.addresses if addresses else stack.chunks
    assert ops.operational_from_block(given, **sizes, out=out.tensor) is out.tensor
    machine.synchronize()
    operational = flat(reference.operational_from_block(shape.as_rows(stack.bits), shape.layers, shape.outer))
    out.check(operational)
    stack.check_untouched()

    back = Stack(machine, shape, filled=False, seed=1)
    given = back.addresses if addresses else back.chunks
    assert ops.block_from_operational(out.tensor, given) is given
    machine.synchronize()
    back.check(stack.bits)
    out.check(operational)


@both_layouts
@every_shape
def test_universal_there_and_back(machine: Machine, name: str, layout: str) -> None:
    check_universal(machine, shape_of(name, layout))


@every_shape
def test_operational_there_and_back(machine: Machine, name: str) -> None:
    check_operational(machine, SHAPES[name])


@both_layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(machine: Machine, dtype: str, layout: str) -> None:
    check_universal(machine, Shape(dtype=dtype, layout=layout))
    check_operational(machine, Shape(dtype=dtype, layout=layout))


@both_layouts
def test_addresses_for_chunks(machine: Machine, layout: str) -> None:
    check_universal(machine, Shape(layout=layout), addresses=True)
    check_operational(machine, Shape(layout=layout), addresses=True)


@pytest.mark.parametrize("form", [tuple, np.array], ids=["tuple", "array"])
def test_forms_of_addresses(machine: Machine, form: Any) -> None:
    shape = Shape()
    stack, out = Stack(machine, shape), dense(machine, shape.universal, shape.dtype)
    ops.universal_from_block(form(stack.addresses), num_layers=shape.layers, out=out.tensor)
    machine.synchronize()
    out.check(expected_universal(stack))


@both_layouts
def test_a_result_is_allocated_where_the_chunks_are(machine: Machine, layout: str) -> None:
    shape = Shape(layout=layout, dtype="bfloat16")
    stack = Stack(machine, shape)
    universal = ops.universal_from_block(stack.chunks, num_layers=shape.layers, inner_layout=layout)
    operational = ops.operational_from_block(stack.chunks, num_layers=shape.layers)
    machine.synchronize()
    assert tuple(universal.shape) == shape.universal and tuple(operational.shape) == shape.operational
    assert universal.dtype == operational.dtype == paddle.bfloat16
    assert str(universal.place) == str(operational.place) == str(stack.chunks[0].place)
    np.testing.assert_array_equal(bits_of(universal), expected_universal(stack))
    np.testing.assert_array_equal(bits_of(operational), stack.bits.reshape(shape.blocks, -1))


@pytest.mark.parametrize("chunk_shape", [(30,), (2, 15), (2, 3, 5, 1)], ids=["rank 1", "rank 2", "rank 4"])
def test_operational_takes_chunks_of_any_rank(machine: Machine, chunk_shape: tuple[int, ...]) -> None:
    stack = Stack(machine, Shape(heads=2, tokens=3, width=5))
    chunks = [chunk.reshape(chunk_shape) for chunk in stack.chunks]
    assert [chunk.data_ptr() for chunk in chunks] == stack.addresses
    operational = ops.operational_from_block(chunks, num_layers=5)
    machine.synchronize()
    np.testing.assert_array_equal(bits_of(operational), stack.bits.reshape(3, -1))
    ops.block_from_operational(operational, chunks)
    machine.synchronize()
    stack.check_untouched()


def test_one_chunk_may_be_read_more_than_once(machine: Machine) -> None:
    shape = Shape(blocks=1, layers=1, outer=1)
    stack = Stack(machine, shape)
    universal = ops.universal_from_block([*stack.chunks, *stack.chunks], num_layers=1)
    machine.synchronize()
    one = bits_of(ops.universal_from_block(stack.chunks, num_layers=1, num_outer=1)).reshape(shape.heads, -1)
    np.testing.assert_array_equal(bits_of(universal).reshape(shape.heads, 2, -1), np.stack([one, one], axis=1))


def test_misaligned_addresses(machine: Machine) -> None:
    """Each chunk and the dense tensor at an alignment of its own, in rows that words of 16 bytes would divide."""
    shape = Shape(blocks=1, layers=8, outer=2, heads=2, tokens=3, width=64)
    pitch = shape.chunk_bytes + 32
    memory = random_bits(1, pitch * (shape.chunk_count + 2), 5)
    whole = paddle.to_tensor(memory[0], place=machine.place)
    offsets = [16 + pitch * i + i for i in range(shape.chunk_count)]
    bits = np.stack([memory[0][offset : offset + shape.chunk_bytes] for offset in offsets])
    for misalignment in (0, 1, 2, 4, 8):
        target = paddle.to_tensor(np.zeros(bits.size + 16, np.uint8), place=machine.place)
        out = target[misalignment : misalignment + bits.size].reshape(shape.universal)
        assert out.data_ptr() == target.data_ptr() + misalignment
        ops.universal_from_block([whole.data_ptr() + offset for offset in offsets], num_layers=8, out=out)
        machine.synchronize()
        expected = np.zeros(bits.size + 16, np.uint8)
        universal = reference.universal_from_block(shape.as_rows(bits), 8, 2, "NHD")
        expected[misalignment : misalignment + bits.size] = universal.ravel()
        np.testing.assert_array_equal(target.numpy(), expected)


def test_nothing_to_do(machine: Machine) -> None:
    empty = paddle.to_tensor(np.empty((0, 2, 1, 2, 3, 5), np.uint8), place=machine.place)
    assert ops.universal_from_block([], num_layers=1, out=empty) is empty
    assert ops.block_from_universal(empty, []) == []
    operational = paddle.to_tensor(np.empty((0, 1, 2, 5), np.uint8), place=machine.place)
    assert ops.operational_from_block([], num_layers=1, out=operational) is operational
    assert ops.block_from_operational(operational, []) == []


@settings(max_examples=60)
@given(
    blocks=st.integers(1, 4),
    layers=st.integers(1, 4),
    outer=st.integers(1, 3),
    heads=st.integers(1, 5),
    tokens=st.integers(1, 70),
    width=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["NHD", "HND"]),
    addresses=st.booleans(),
)
def test_any_sizes(addresses: bool, **sizes: Any) -> None:
    check_universal(cpu_machine(), Shape(**sizes), addresses=addresses)
    check_operational(cpu_machine(), Shape(**sizes), addresses=addresses)
