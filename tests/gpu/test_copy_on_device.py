"""copy_blocks and swap_blocks with pairs in GPU memory, in graphs, in programs, on streams, and beyond 2 GiB."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.gpu.delay import busy
from tests.machine import Machine
from tests.ops.copy_conformance import OPS, check, check_one, check_untouched, expected, make, shuffled_pairs
from tests.ops.test_copy_blocks import step_on_lists, step_on_tensors

every_op = pytest.mark.parametrize("op", OPS)


def on_device(pairs: Any, machine: Machine, dtype: str = "int64") -> paddle.Tensor:
    return paddle.to_tensor(np.asarray(pairs, dtype).reshape(-1, 2), place=machine.place)


@every_op
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("block_bytes", [1, 33, 4099, 8192, 100_003])
def test_pairs_on_the_device(machine: Machine, op: str, dtype: str, block_bytes: int) -> None:
    pairs = shuffled_pairs(4, 9)
    keys, values = (make(machine, 9, (1, block_bytes), "uint8", seed) for seed in (1, 2))
    check_one(op, keys, values, pairs, on_device(pairs, machine, dtype))


@every_op
@pytest.mark.parametrize("count", [1, 64, 65, 150])
def test_many_caches(machine: Machine, op: str, count: int) -> None:
    pairs = shuffled_pairs(3, 7)
    sizes = np.random.default_rng(count).integers(1, 9000, (2, count))
    keys, values = ([make(machine, 7, (1, int(n)), "uint8", i) for i, n in enumerate(row)] for row in sizes)
    check(op, keys, values, pairs, on_device(pairs, machine))


@every_op
def test_thousands_of_pairs(machine: Machine, op: str) -> None:
    pairs = shuffled_pairs(5000, 10_001)
    check_one(op, make(machine, 10_001, (1, 100), "uint8", 1), None, pairs, on_device(pairs, machine))


@every_op
def test_negative_pairs_are_skipped_and_large_ones_never_written(machine: Machine, op: str) -> None:
    pairs = [(0, 3), (-1, 2), (2, -1), (-7, -7), (1, 7), (7, 1), (5, 4), (2**40, 2), (2, 2**40), (6, -(2**62))]
    legal = [(0, 3), (5, 4)]
    check_one(op, make(machine, 7, (3, 1001), "uint8", 1), None, legal, on_device(pairs, machine))
    narrow = [(0, 3), (-1, 2), (2**31 - 1, 2), (2, -(2**31)), (5, 4)]
    check_one(op, make(machine, 7, (3, 1001), "uint8", 1), None, legal, on_device(narrow, machine, "int32"))


def test_the_limit_is_that_of_each_cache(machine: Machine) -> None:
    caches = [make(machine, blocks, (1, 100), "uint8", blocks) for blocks in (4, 9)]
    ops.copy_blocks([cache.tensor for cache in caches], None, on_device([(0, 6), (1, 2)], machine))
    machine.synchronize()
    caches[0].check(expected("copy_blocks", caches[0], [(1, 2)]))
    caches[1].check(expected("copy_blocks", caches[1], [(0, 6), (1, 2)]))


@every_op
def test_no_pairs_on_the_device(machine: Machine, op: str) -> None:
    check_one(op, make(machine, 4, (2, 5), "float32", 1), None, [], on_device([], machine))


@every_op
def test_tensors_that_are_no_pairs(machine: Machine, op: str) -> None:
    cache = make(machine, 4, (2, 5), "float32", 1)
    for wrong in (
        np.zeros((2, 3), "int64"),
        np.zeros(4, "int64"),
        np.zeros((2, 2), "float32"),
        np.zeros((2, 2), "int16"),
    ):
        with pytest.raises(ValueError, match="block_mapping"):
            getattr(ops, op)(cache.tensor, None, paddle.to_tensor(wrong, place=machine.place))
    rows = paddle.to_tensor(np.zeros((2, 2), "int64"), place=machine.place).t()
    with pytest.raises(ValueError, match="block_mapping is not contiguous"):
        getattr(ops, op)(cache.tensor, None, rows)
    check_untouched(cache)


def test_pairs_on_the_device_with_a_cache_on_the_cpu(machine: Machine) -> None:
    cache = paddle.to_tensor(np.zeros((4, 2, 5), "float32"), place=paddle.CPUPlace())
    with pytest.raises(ValueError, match="block_mapping is on another device"):
        ops.copy_blocks(cache, None, on_device([(0, 1)], machine))


class TestCheckMode:
    @pytest.fixture(autouse=True)
    def check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PADDLE_KV_CHECK", "1")

    @every_op
    @pytest.mark.parametrize("dtype", ["int32", "int64"])
    def test_pairs_are_read_back(self, machine: Machine, op: str, dtype: str) -> None:
        cache = make(machine, 7, (2, 5), "float32", 1)
        with pytest.raises(IndexError, match=r"targets of block_mapping\[1\] = 7 must be in \[0, 7\)"):
            getattr(ops, op)(cache.tensor, None, on_device([(0, 1), (2, 7)], machine, dtype))
        with pytest.raises(ValueError, match="name block 1 more than once"):
            getattr(ops, op)(cache.tensor, None, on_device([(0, 1), (2, 1)], machine, dtype))
        with pytest.raises(ValueError, match="block 1 is in sources"):
            getattr(ops, op)(cache.tensor, None, on_device([(0, 1), (1, 2)], machine, dtype))
        check_untouched(cache)
        check_one(op, cache, None, [(0, 1)], on_device([(0, 1), (-1, 1), (1, -1)], machine, dtype))

    @every_op
    def test_a_capture_is_not_disturbed(self, machine: Machine, op: str, other_stream: Any) -> None:
        capture_and_replay(machine, op, other_stream)


@every_op
def test_a_graph_reads_the_pairs_when_it_is_replayed(machine: Machine, op: str, other_stream: Any) -> None:
    capture_and_replay(machine, op, other_stream)


def capture_and_replay(machine: Machine, op: str, stream: Any) -> None:
    import cupy

    keys, values = (make(machine, 9, (3, 1001), "uint8", seed) for seed in (1, 2))
    mapping = on_device([(-1, -1)] * 4, machine)
    getattr(ops, op)(keys.tensor, values.tensor, mapping, stream=stream)  # loads the kernel: not while capturing
    machine.synchronize()
    ids = cupy.ndarray((4, 2), cupy.int64, cupy.cuda.MemoryPointer(
        cupy.cuda.UnownedMemory(mapping.data_ptr(), 64, mapping), 0))  # fmt: skip
    with stream:
        stream.begin_capture()
        getattr(ops, op)(keys.tensor, values.tensor, mapping, stream=stream)
        graph = stream.end_capture()
    machine.synchronize()
    check_untouched(keys, values)
    for pairs in ([(0, 3), (1, 5)], [(3, 2), (8, 0), (5, 4), (7, 6)]):
        ids.set(np.array(pairs + [(-1, -1)] * (4 - len(pairs))))
        machine.synchronize()
        graph.launch(stream)
        stream.synchronize()
        for cache in (keys, values):
            cache.bits = expected(op, cache, pairs)
            cache.check(cache.bits)


def test_a_graph_keeps_pairs_that_the_host_knew(machine: Machine, other_stream: Any) -> None:
    cache = make(machine, 900, (1, 100), "uint8", 1)
    pairs = shuffled_pairs(400, 900)
    ops.copy_blocks(cache.tensor, None, [(pairs[0])], stream=other_stream)
    machine.synchronize()
    with other_stream:
        other_stream.begin_capture()
        ops.copy_blocks(cache.tensor, None, pairs, stream=other_stream)
        graph = other_stream.end_capture()
    graph.launch(other_stream)
    other_stream.synchronize()
    cache.check(expected("copy_blocks", cache, pairs))


@pytest.mark.parametrize("full_graph", [True, False], ids=["source", "bytecode"])
@pytest.mark.parametrize("step", [step_on_tensors, step_on_lists])
def test_in_a_program(machine: Machine, full_graph: bool, step: Any) -> None:
    """On Paddle's current stream, whose handle the program asks for when it runs. What Paddle's own kernels make of the
    caches is not looked at: this Paddle has none for this GPU."""
    traced = paddle.jit.to_static(step, full_graph=full_graph)
    keys, values = (make(machine, 5, (2, 3), "float32", seed) for seed in (1, 2))
    for pair in ((0, 3), (1, 4), (2, 0)):
        traced(keys.tensor, values.tensor, on_device([pair], machine, "int32"))
        machine.synchronize()
        for cache in (keys, values):
            cache.bits = expected("copy_blocks", cache, [pair])
            cache.check(cache.bits)


@every_op
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_stream_that_is_named(machine: Machine, op: str, as_tensor: bool, other_stream: Any) -> None:
    import cupy

    cache = make(machine, 5, (2, 3), "float32", 1)
    pairs = [(0, 3)]
    mapping = on_device(pairs, machine) if as_tensor else pairs
    getattr(ops, op)(make(machine, 5, (2, 3), "float32", 1).tensor, None, mapping, stream=other_stream)
    machine.synchronize()
    busy(other_stream, 150)
    getattr(ops, op)(cache.tensor, None, mapping, stream=other_stream)
    now = np.empty(cache.bits.nbytes, np.uint8)
    third = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.memcpyAsync(now.ctypes.data, cache.tensor.data_ptr(), now.nbytes, 2, third.ptr)
    third.synchronize()
    np.testing.assert_array_equal(now, cache.bits.ravel(), "the op did not wait for the stream that was named")
    other_stream.synchronize()
    cache.check(expected(op, cache, pairs))


@every_op
@pytest.mark.parametrize("as_tensor", [False, True])
def test_beyond_four_gib(machine: Machine, op: str, as_tensor: bool) -> None:
    """Offsets need more than 32 bits, in bytes and (of 2-byte elements) in elements."""
    import cupy

    block_bytes, blocks = 1 << 20, 8200
    tensor = paddle.empty([blocks, 2, block_bytes // 4], dtype="int16")
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), blocks * block_bytes, tensor)
    view = cupy.ndarray((blocks, block_bytes), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    ids = [0, 1, 2047, 2048, 4095, 4096, 8190, 8199]
    content = {i: np.random.default_rng(i).integers(0, 256, block_bytes, np.uint8) for i in ids}
    for i in ids:
        view[i] = cupy.asarray(content[i])
    pairs = [(8199, 0), (1, 8190), (4096, 2047), (2048, 4095)]
    machine.synchronize()
    getattr(ops, op)(tensor, None, on_device(pairs, machine) if as_tensor else pairs)
    machine.synchronize()
    for source, target in pairs:
        assert np.array_equal(view[target].get(), content[source])
        assert np.array_equal(view[source].get(), content[target if op == "swap_blocks" else source])
