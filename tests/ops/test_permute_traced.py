"""The permute family inside programs: rewritten from source, and stopped at by the bytecode tracer."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.machine import Machine, bits_of
from tests.ops.permute_conformance import Shape, Stack, dense, flat
from tests.ops.test_permute_blocks import expected_universal
from tests.ops.test_permute_cache import Caches
from tests.reference import permute as reference

both_tracers = pytest.mark.parametrize("full_graph", [True, False], ids=["source", "bytecode"])
SHAPE = Shape(blocks=2, layers=2, heads=3, tokens=4, width=6, dtype="float16")


def traced(function: Any, full_graph: bool) -> Any:
    """For inference: otherwise Paddle 2.6 looks for the gradient of an operator whose result leaves the program."""
    program = paddle.jit.to_static(function, full_graph=full_graph)
    if full_graph:
        program.eval()
    return program


@both_tracers
def test_block_stacks(machine: Machine, full_graph: bool) -> None:
    """Twice, so that the second run is of the program alone."""

    def there_and_back(chunks: Any, out: Any, back: Any) -> Any:
        universal = ops.universal_from_block(chunks, num_layers=2, out=out)
        return universal, ops.block_from_universal(universal, back)

    program = traced(there_and_back, full_graph)
    for seed in (0, 1):
        stack = Stack(machine, SHAPE, seed=seed)
        out, back = dense(machine, SHAPE.universal, SHAPE.dtype), Stack(machine, SHAPE, filled=False)
        universal, chunks = program(stack.chunks, out.tensor, back.chunks)
        machine.synchronize()
        np.testing.assert_array_equal(bits_of(universal), expected_universal(stack))
        np.testing.assert_array_equal(np.stack([bits_of(chunk).ravel() for chunk in chunks]), stack.bits)
        out.check(expected_universal(stack))
        back.check(stack.bits)


@both_tracers
def test_results_that_the_program_allocates(machine: Machine, full_graph: bool) -> None:
    def function(chunks: Any) -> Any:
        universal = ops.universal_from_block(chunks, num_layers=2)
        operational = ops.operational_from_block(chunks, num_layers=2)
        other = ops.universal_from_block(chunks[::-1], num_layers=2)
        return universal, operational, other, ops.reshard_universal([universal], 3)

    stack = Stack(machine, SHAPE)
    program = traced(function, full_graph)
    for _ in range(2):
        universal, operational, other, parts = program(stack.chunks)
        machine.synchronize()
        np.testing.assert_array_equal(bits_of(universal), expected_universal(stack))
        np.testing.assert_array_equal(bits_of(operational), stack.bits.reshape(2, -1))
        reversed_chunks = SHAPE.as_rows(stack.bits)[::-1]
        np.testing.assert_array_equal(
            bits_of(other), flat(reference.universal_from_block(reversed_chunks, 2, 2, SHAPE.layout))
        )
        whole = expected_universal(stack).reshape(2, 3, 2, 2, 4, -1)
        for part, expected in zip(parts, reference.reshard_universal([whole], 3), strict=True):
            np.testing.assert_array_equal(bits_of(part), flat(expected))


@both_tracers
def test_operational(machine: Machine, full_graph: bool) -> None:
    stack = Stack(machine, SHAPE, filled=False)
    bits = Stack(machine, SHAPE).bits
    operational = dense(machine, SHAPE.operational, SHAPE.dtype, bits)

    def function(given: Any, chunks: Any) -> Any:
        return ops.block_from_operational(given, chunks)

    program = traced(function, full_graph)
    chunks = program(operational.tensor, stack.chunks)
    machine.synchronize()
    np.testing.assert_array_equal(np.stack([bits_of(chunk).ravel() for chunk in chunks]), bits)
    stack.check(bits)


@both_tracers
@pytest.mark.parametrize("latent", [False, True])
def test_caches(machine: Machine, full_graph: bool, latent: bool) -> None:
    """Ids are a tensor of the program: other ids each time."""

    def move(keys: Any, values: Any, source: Any, target: Any, out: Any) -> Any:
        universal = ops.universal_from_cache(keys, values, source, out=out)
        return universal, ops.cache_from_universal(universal, keys, values, target)

    program = traced(move, full_graph)
    caches = Caches(machine, heads=2, latent=latent)
    for sources, targets in (([7, 0], [3, 8]), ([3, 1], [0, 2])):
        out = dense(machine, caches.universal_shape(2), caches.dtype)
        expected = caches.expected(sources)
        ids = [paddle.to_tensor(np.array(given), place=machine.place) for given in (sources, targets)]
        universal, (keys, values) = program(caches.keys, caches.values, *ids, out.tensor)
        machine.synchronize()
        np.testing.assert_array_equal(bits_of(universal), expected)
        for bits in caches.bits:
            bits[targets] = bits[sources]
        for cache, bits in zip([*keys, *(values or [])], caches.bits, strict=True):
            np.testing.assert_array_equal(bits_of(cache), bits)
        caches.check_untouched()


def test_a_bad_id_in_a_program(machine: Machine) -> None:
    if not machine.on_cpu:
        return  # there the block is skipped, see the GPU tests

    def function(keys: Any, ids: Any, out: Any) -> Any:
        return ops.universal_from_cache(keys, None, ids, out=out)

    program = traced(function, full_graph=True)
    caches = Caches(machine, latent=True)
    out = dense(machine, caches.universal_shape(2), caches.dtype)
    with pytest.raises((IndexError, RuntimeError)):
        program(caches.keys, paddle.to_tensor(np.array([1, 9]), place=machine.place), out.tensor)
    out.check(out.bits)


def test_what_a_program_cannot_hold(machine: Machine) -> None:
    out = dense(machine, SHAPE.universal, SHAPE.dtype).tensor

    def with_addresses(given: Any) -> Any:
        return ops.universal_from_block([64, 128, 192, 256] * 2, num_layers=2, out=given)

    def with_a_stream(given: Any) -> Any:
        return ops.reshard_universal([given], 3, stream=5)

    program = traced(with_addresses, full_graph=True)
    with pytest.raises(NotImplementedError, match="addresses"):
        program(out)
    program = traced(with_a_stream, full_graph=True)
    with pytest.raises(NotImplementedError, match="stream cannot be named"):
        program(out)
