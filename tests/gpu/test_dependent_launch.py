"""Inserts that are launched dependently come behind the kernel before them, and before the one behind them.

The kernel before lets the insert begin at once and then takes its time: an insert that does not wait finds old bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.gpu.delay import busy
from tests.machine import Machine

TOKENS, HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 300, 4, 64, 16, 40
assert BLOCKS * BLOCK_SIZE >= 2 * TOKENS  # the slots of a step are distinct
WIDTH = HEADS * HEAD_SIZE

SOURCE = r"""
typedef unsigned short half_bits;
__device__ half_bits pattern(int step, int token, int i) { return (half_bits)(step * 40503 + token * 977 + i * 7 + 1); }
__device__ long long slot_of(int step, int token, int slots) {
  return token % 5 == 4 ? -1 : ((long long)token * 2 + step) % slots;
}
extern "C" __global__ void advance(int* step) { *step += 1; }
// One CTA for each token.
extern "C" __global__ void produce(const int* step, half_bits* key, half_bits* value, long long* slots, int width,
                                   int slot_count) {
  asm volatile("griddepcontrol.launch_dependents;");
  const long long start = clock64();
  while (clock64() - start < 5000) {}
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    key[blockIdx.x * width + i] = pattern(*step, blockIdx.x, i);
    value[blockIdx.x * width + i] = ~pattern(*step, blockIdx.x, i);
  }
  if (threadIdx.x == 0) slots[blockIdx.x] = slot_of(*step, blockIdx.x, slot_count);
}
extern "C" __global__ void compare(const int* step, const half_bits* keys, const half_bits* values, int width,
                                   int slot_count, int* wrong) {
  const long long slot = slot_of(*step, blockIdx.x, slot_count);
  if (slot < 0) return;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const half_bits want = pattern(*step, blockIdx.x, i);
    if (keys[slot * width + i] != want || values[slot * width + i] != (half_bits)~want) atomicAdd(wrong, 1);
  }
}
"""


@functools.cache
def kernel(name: str) -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE).get_function(name)


@pytest.fixture(autouse=True)
def _needs_dependent_launches() -> None:
    import cupy

    if int(cupy.cuda.Device(0).compute_capability) < 90:
        pytest.skip("dependent launches need sm_90")


class Chain:
    """Tokens that a kernel makes, their insert, and a kernel that counts what is wrong in the caches."""

    def __init__(self, machine: Machine, stream: Any) -> None:
        import cupy

        def zeros(shape: tuple[int, ...], dtype: str = "float16") -> paddle.Tensor:
            return paddle.to_tensor(np.zeros(shape, dtype), place=machine.place)

        self.stream = stream
        self.tokens = [zeros((TOKENS, HEADS, HEAD_SIZE)) for _ in range(2)]
        self.slots = zeros((TOKENS,), "int64")
        self.caches = [zeros((BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)) for _ in range(2)]
        self.counters = cupy.zeros(2, cupy.int32)  # step, wrong
        machine.synchronize()

    def produce(self, stream: Any = None) -> None:
        pointers = [t.data_ptr() for t in (*self.tokens, self.slots)]
        with stream or self.stream:
            kernel("advance")((1,), (1,), (self.counters,))
            kernel("produce")(
                (TOKENS,), (64,), (self.counters, *pointers, np.int32(WIDTH), np.int32(BLOCKS * BLOCK_SIZE))
            )

    def insert(self) -> None:
        ops.reshape_and_cache(
            *self.tokens, *self.caches, self.slots, layout="NHD", dependent_launch=True, stream=self.stream
        )

    def compare(self, caches: list[paddle.Tensor]) -> None:
        pointers = [cache.data_ptr() for cache in caches]
        sizes = (np.int32(WIDTH), np.int32(BLOCKS * BLOCK_SIZE))
        with self.stream:
            kernel("compare")((TOKENS,), (64,), (self.counters, *pointers, *sizes, self.counters[1:]))

    def check(self, steps: int) -> None:
        self.stream.synchronize()
        assert self.counters.get().tolist() == [steps, 0]


def captured(stream: Any, work: Callable[[], Any]) -> Any:
    with stream:
        stream.begin_capture()
        work()
        return stream.end_capture()


def test_between_two_kernels(machine: Machine, other_stream: Any) -> None:
    chain = Chain(machine, other_stream)
    for _ in range(1000):
        chain.produce()
        chain.insert()
        chain.compare(chain.caches)
    chain.check(1000)


def test_in_a_graph(machine: Machine, other_stream: Any) -> None:
    chain = Chain(machine, other_stream)

    def step() -> None:
        chain.produce()
        chain.insert()
        chain.compare(chain.caches)

    step()  # loads the kernels
    chain.check(1)
    graph = captured(other_stream, lambda: [step() for _ in range(10)])
    for _ in range(100):
        graph.launch(other_stream)
    chain.check(1001)


def test_behind_an_event_of_another_stream(machine: Machine, other_stream: Any) -> None:
    """The kernel before the insert in its own stream has long ended; what it has to wait for has not."""
    import cupy

    chain = Chain(machine, other_stream)
    producing = cupy.cuda.Stream(non_blocking=True)
    for _ in range(20):
        compared = other_stream.record()
        producing.wait_event(compared)
        busy(producing, 1)
        chain.produce(producing)
        with other_stream:
            kernel("advance")((1,), (1,), (cupy.zeros(1, cupy.int32),))
        other_stream.wait_event(producing.record())
        chain.insert()
        chain.compare(chain.caches)
    chain.check(20)


def test_one_insert_behind_the_other(machine: Machine, other_stream: Any) -> None:
    """The second one's tokens are the cache that the first one writes."""
    chain = Chain(machine, other_stream)
    latent = paddle.to_tensor(np.zeros((TOKENS, HEADS, HEAD_SIZE), np.float16), place=machine.place)
    place = {"place": machine.place}
    every = paddle.to_tensor(np.arange(TOKENS * HEADS), **place)
    slots = paddle.to_tensor(np.arange(TOKENS), **place)
    random = np.random.default_rng(1)
    rows = [random.integers(0, 2**16, (TOKENS * HEADS, n), np.uint16).view(np.float16) for n in (HEAD_SIZE - 8, 8)]
    sources = [paddle.to_tensor(row, **place) for row in rows]
    zeros = [paddle.to_tensor(np.zeros_like(row), **place) for row in rows]
    machine.synchronize()
    want = np.concatenate(rows, axis=1).view(np.uint16).reshape(TOKENS, WIDTH)
    for given, expected in ((sources, want), (zeros, np.zeros_like(want))) * 100:
        chain.produce()
        ops.concat_and_cache_mla(*given, latent, every, dependent_launch=True, stream=other_stream)
        ops.reshape_and_cache(
            latent, latent, *chain.caches, slots, layout="NHD", dependent_launch=True, stream=other_stream
        )
        other_stream.synchronize()
        for cache in chain.caches:
            got = cache.numpy().view(np.uint16).reshape(-1, WIDTH)[:TOKENS]
            np.testing.assert_array_equal(got, expected)
