"""Times copy_blocks, reshape_and_cache and concat_and_cache_mla on a GPU, beside a plain copy and plain kernels.

    python tools/bench_cache_ops.py [--repeats 30] [--only copy_blocks] [--output out/bench_cache_ops]

Each line has, from one run: a contiguous copy inside the device of as many bytes (the ceiling), a plain kernel of the
shape that others use (one CTA for each block and layer; one CTA for each token, 16-byte words), and the operator. GB/s
counts bytes read and bytes written. Medians of CUDA events around several calls on buffers in turn, submitted while the
stream is held busy, so that the host's time does not show; that is the last column. What an operator writes is compared
with what the plain kernel writes, bit for bit, in the same run. An empty kernel, timed the same way, is the first line.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import paddle

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

from paddle_kv import devices, ops, streams

HEADS, HEAD_SIZE, BLOCK_SIZE = 8, 128, 64
WORKING_SET_BYTES = 256 << 20  # of the buffers that are used in turn: several times the L2 cache
MOST_CALLS = 20
SPIN_NS_PER_CALL = 200_000  # more than a call takes on the host

PLAIN = cupy.RawModule(code=r"""
typedef long long int64;
extern "C" __global__ void empty() {}
extern "C" __global__ void fill(unsigned short* words, int64 count, unsigned seed) {
  const int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  unsigned x = (unsigned)i * 2654435761u ^ seed * 2246822519u ^ (unsigned)(i >> 32);
  x = (x ^ x >> 15) * 2246822519u;
  x = (x ^ x >> 13) * 3266489917u;
  words[i] = x >> 16;
}
// Keeps the stream busy while the host submits what is to be timed.
extern "C" __global__ void spin(unsigned long long duration_ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < duration_ns);
}
// One CTA for each pair (x) and cache (y).
extern "C" __global__ void copy_pairs(uint4* const* caches, const int64* pairs, int64 words) {
  uint4* const cache = caches[blockIdx.y];
  const uint4* const from = cache + pairs[2 * blockIdx.x] * words;
  uint4* const to = cache + pairs[2 * blockIdx.x + 1] * words;
  for (int64 i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}
// One CTA for each token, rows of 16-byte words. HND or NHD by the strides, in words.
extern "C" __global__ void insert_rows(const uint4* key, const uint4* value, uint4* keys, uint4* values,
                                       const int64* slots, int64 token_words, int words_of_head, int heads, int64 bs,
                                       int64 block_stride, int64 position_stride, int64 head_stride) {
  const int64 slot = slots[blockIdx.x];
  if (slot < 0) return;
  const int64 target = slot / bs * block_stride + slot % bs * position_stride;
  for (int i = threadIdx.x; i < heads * words_of_head; i += blockDim.x) {
    const int64 to = target + i / words_of_head * head_stride + i % words_of_head;
    keys[to] = key[blockIdx.x * token_words + i];
    values[to] = value[blockIdx.x * token_words + i];
  }
}
// One CTA for each token, packed by 8 16-bit elements: keys in 16-byte words, values element by element.
extern "C" __global__ void insert_packed(const uint4* key, const unsigned short* value, uint4* keys,
                                         unsigned short* values, const int64* slots, int64 token_elements, int heads,
                                         int head_size, int64 bs) {
  const int64 slot = slots[blockIdx.x];
  if (slot < 0) return;
  const int64 block = slot / bs, position = slot % bs;
  const int groups = head_size / 8;
  for (int i = threadIdx.x; i < heads * groups; i += blockDim.x) {
    const int64 head = i / groups, group = i % groups;
    keys[((block * heads + head) * groups + group) * bs + position] = key[blockIdx.x * token_elements / 8 + i];
  }
  for (int i = threadIdx.x; i < heads * head_size; i += blockDim.x) {
    const int64 head = i / head_size, d = i % head_size;
    values[((block * heads + head) * head_size + d) * bs + position] = value[blockIdx.x * token_elements + i];
  }
}
""")  # fmt: skip


@dataclass
class Figure:
    operator: str
    case: str
    mib: float  # read plus written
    copy_us: float
    plain_us: float
    operator_us: float
    operator_gb_per_s: float
    percent_of_copy_rate: float
    percent_of_plain_time: float
    host_us: float


class Clock:
    """Event times on Paddle's stream, on which the operators run by default."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.stream = cupy.cuda.ExternalStream(streams.paddle_stream(0), 0)
        self.figures: list[Figure] = []

    def microseconds(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Of one of the calls: the median over repetitions of all of them."""
        times = []
        with self.stream:
            for i in range(self.repeats + 3):
                start, end = cupy.cuda.Event(), cupy.cuda.Event()
                PLAIN.get_function("spin")((1,), (1,), (np.uint64(SPIN_NS_PER_CALL * len(calls)),))
                start.record(self.stream)
                for call in calls:
                    call()
                end.record(self.stream)
                end.synchronize()
                if i >= 3:
                    times.append(cupy.cuda.get_elapsed_time(start, end) * 1e3 / len(calls))
        return statistics.median(times)

    def host_us(self, call: Callable[[], Any]) -> float:
        times = []
        for _ in range(20):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
            self.stream.synchronize()
        return statistics.median(times) * 1e6

    def copy_us(self, num_bytes: int) -> float:
        """Copies that read and write ``num_bytes`` in total."""
        half = max(16, num_bytes // 2)
        count = calls_for(num_bytes)
        buffers = [cupy.zeros((2, half), cupy.uint8) for _ in range(count)]
        copy = cupy.cuda.runtime.memcpyAsync
        return self.microseconds(
            [partial(copy, b[1].data.ptr, b[0].data.ptr, half, 3, self.stream.ptr) for b in buffers]
        )

    def figure(
        self,
        operator: str,
        case: str,
        num_bytes: int,
        plain: Sequence[Callable[[], Any]],
        run: Sequence[Callable[[], Any]],
    ) -> None:
        with self.stream:
            copy_us, plain_us, run_us = self.copy_us(num_bytes), self.microseconds(plain), self.microseconds(run)
        made = Figure(
            operator, case, num_bytes / 2**20, copy_us, plain_us, run_us, num_bytes / run_us / 1e3,
            100 * copy_us / run_us, 100 * run_us / plain_us, self.host_us(run[0]),
        )  # fmt: skip
        self.figures.append(made)
        print(
            f"{operator:20} {case:44} {made.mib:8.2f} MiB   copy {copy_us:8.2f}   plain {plain_us:8.2f}   "
            f"operator {run_us:8.2f} us  {made.operator_gb_per_s:6.0f} GB/s  "
            f"{made.percent_of_copy_rate:5.1f} % of copy rate  {made.percent_of_plain_time:5.1f} % of plain time   "
            f"host {made.host_us:5.1f} us",
            flush=True,
        )


def calls_for(num_bytes: int) -> int:
    """Buffers that are used in turn: together more than the L2 cache, unless that takes too many."""
    return int(min(MOST_CALLS, max(2, WORKING_SET_BYTES // max(1, num_bytes))))


def on_gpu(array: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(np.ascontiguousarray(array), place=devices.place_of(0))


def cupy_view(tensor: paddle.Tensor) -> Any:
    """A tensor's bytes."""
    num_bytes = int(np.prod(tensor.shape)) * tensor.element_size()
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), num_bytes, tensor)
    return cupy.ndarray(num_bytes, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))


def random_tensor(shape: Sequence[int], dtype: str, seed: int) -> paddle.Tensor:
    """Random bits, made on the GPU."""
    tensor = paddle.empty(list(shape), dtype=dtype)
    count = int(np.prod(list(shape))) * tensor.element_size() // 2
    PLAIN.get_function("fill")((-(-count // 256),), (256,), (tensor.data_ptr(), np.int64(count), np.uint32(seed)))
    return tensor


def same(a: paddle.Tensor, b: paddle.Tensor) -> bool:
    return bool((cupy_view(a) == cupy_view(b)).all())


def bench_copy_blocks(clock: Clock, block_bytes: int, layers: int, moved_bytes: int) -> None:
    """K and V of ``layers`` layers; ``moved_bytes`` in all of them together."""
    count = moved_bytes // (2 * layers * block_bytes)
    blocks = 2 * count
    ids = np.random.default_rng(1).permutation(blocks)
    pairs = np.stack([ids[:count], ids[count:]], axis=1)
    shape = (blocks, 1, block_bytes // 2)
    keys, values, plain_caches = [], [], []
    for layer in range(layers):
        keys.append(random_tensor(shape, "int16", 2 * layer))
        values.append(random_tensor(shape, "int16", 2 * layer + 1))
    for tensor in keys + values:
        copied = paddle.empty(list(shape), dtype="int16")
        cupy_view(copied)[:] = cupy_view(tensor)
        plain_caches.append(copied)
    on_device = on_gpu(pairs)
    pointers = cupy.asarray(np.array([tensor.data_ptr() for tensor in plain_caches], np.int64))
    plain = partial(
        PLAIN.get_function("copy_pairs"), (count, 2 * layers), (min(1024, block_bytes // 16),),
        (pointers, on_device.data_ptr(), np.int64(block_bytes // 16)),
    )  # fmt: skip
    cupy.cuda.runtime.deviceSynchronize()
    with clock.stream:
        plain()
    listed = [tuple(pair) for pair in pairs.tolist()]
    for kind, mapping in (("host ids", listed), ("host array", pairs), ("device ids", on_device)):
        run = partial(ops.copy_blocks, keys, values, mapping)
        run()
        cupy.cuda.runtime.deviceSynchronize()
        case = f"{block_bytes >> 10} KiB x {count} x {2 * layers} caches, {kind}"
        assert all(same(a, b) for a, b in zip(keys + values, plain_caches, strict=True)), case
        clock.figure("copy_blocks", case, 2 * moved_bytes, [plain, plain], [run, run])


@dataclass
class Insert:
    """One set of buffers for an insertion of bfloat16 tokens from a fused QKV tensor."""

    tokens: int
    layout: Any
    slots: np.ndarray
    blocks: int
    quantised: bool
    seed: int

    def __post_init__(self) -> None:
        # Paddle's fused projection: queries, keys and values side by side.
        self.qkv = random_tensor((self.tokens, 3 * HEADS, HEAD_SIZE), "bfloat16", self.seed)
        self.key, self.value = self.qkv[:, HEADS : 2 * HEADS], self.qkv[:, 2 * HEADS :]
        self.mapping = on_gpu(self.slots)
        dtype = "uint8" if self.quantised else "bfloat16"
        x = 16 if self.quantised else 8
        shape = {"HND": (HEADS, BLOCK_SIZE, HEAD_SIZE), "NHD": (BLOCK_SIZE, HEADS, HEAD_SIZE)}.get(
            self.layout, (HEADS, HEAD_SIZE // x, BLOCK_SIZE, x)
        )
        value_shape = (HEADS, HEAD_SIZE, BLOCK_SIZE) if self.layout == "packed" else shape
        self.caches = [random_tensor((self.blocks, *s), dtype, self.seed + 1) for s in (shape, value_shape)]
        self.plain_caches = [random_tensor((self.blocks, *s), "bfloat16", self.seed + 1) for s in (shape, value_shape)]

    def run(self) -> None:
        dtype = "fp8_e4m3" if self.quantised else "auto"
        scale = {"k_scale": 0.5, "v_scale": 0.25} if self.quantised else {}
        ops.reshape_and_cache(
            self.key, self.value, *self.caches, self.mapping, layout=self.layout, kv_cache_dtype=dtype, **scale
        )

    def plain(self) -> Callable[[], Any]:
        token_words = 3 * HEADS * HEAD_SIZE // 8
        pointers = [t.data_ptr() for t in (self.key, self.value, *self.plain_caches, self.mapping)]
        words = HEAD_SIZE // 8
        threads = min(512, HEADS * words)
        if self.layout == "packed":
            return partial(
                PLAIN.get_function("insert_packed"), (self.tokens,), (512,),
                (*pointers, np.int64(8 * token_words), np.int32(HEADS), np.int32(HEAD_SIZE), np.int64(BLOCK_SIZE)),
            )  # fmt: skip
        position, head = (words, BLOCK_SIZE * words) if self.layout == "HND" else (HEADS * words, words)
        sizes = (np.int64(token_words), np.int32(words), np.int32(HEADS), np.int64(BLOCK_SIZE))
        strides = (np.int64(HEADS * BLOCK_SIZE * words), np.int64(position), np.int64(head))
        return partial(PLAIN.get_function("insert_rows"), (self.tokens,), (threads,), (*pointers, *sizes, *strides))


def bench_reshape_and_cache(clock: Clock, tokens: int, layout: Any, order: str, quantised: bool) -> None:
    """The plain kernel writes bfloat16 also where the operator quantises."""
    bytes_read = 2 * tokens * HEADS * HEAD_SIZE * 2
    num_bytes = bytes_read + (bytes_read // 2 if quantised else bytes_read)
    blocks = max(4, -(-tokens // BLOCK_SIZE))
    every_slot = np.random.default_rng(1).permutation(blocks * BLOCK_SIZE)
    slots = np.arange(tokens) if order == "consecutive" else every_slot[:tokens]
    sets = [Insert(tokens, layout, slots, blocks, quantised, 10 * i) for i in range(calls_for(2 * num_bytes))]
    case = f"{tokens} tokens, {layout}, {order}, {'e4m3' if quantised else 'bfloat16'}"
    first = sets[0]
    cupy.cuda.runtime.deviceSynchronize()
    with clock.stream:
        first.plain()()
    first.run()
    cupy.cuda.runtime.deviceSynchronize()
    if quantised:
        check_quantised(first, case)
    else:
        assert all(same(a, b) for a, b in zip(first.caches, first.plain_caches, strict=True)), case
    clock.figure("reshape_and_cache", case, num_bytes, [s.plain() for s in sets], [s.run for s in sets])


def check_quantised(insert: Insert, case: str) -> None:
    """Converts what the caches hold back, and compares with the tokens: within the rounding of e4m3."""
    ids = on_gpu(np.arange(insert.blocks)[None]), on_gpu(np.array([0, insert.blocks * BLOCK_SIZE]))
    for cache, source, scale in zip(insert.caches, (insert.key, insert.value), (0.5, 0.25), strict=True):
        rows = ops.gather_cache(
            cache, *ids, total_tokens=insert.blocks * BLOCK_SIZE, layout=insert.layout, kv_cache_dtype="fp8_e4m3",
            scale=scale,
        )  # fmt: skip
        got = rows.numpy()[insert.slots]
        bits = source.numpy().view(np.uint16).astype(np.uint32) << 16
        want = np.clip(bits.view(np.float32), -448 * scale, 448 * scale)
        numbers = ~np.isnan(want)
        assert (np.isnan(got) == ~numbers).all(), case
        assert (np.abs(got - want)[numbers] <= np.abs(want[numbers]) / 16 + scale / 512).all(), case


def bench_concat_and_cache_mla(clock: Clock, tokens: int) -> None:
    """The plain kernel is that of a copy of as many bytes in rows: keys and values of one head of 288."""
    rank, rope = 512, 64
    num_bytes = 2 * tokens * (rank + rope) * 2
    blocks = max(4, -(-tokens // BLOCK_SIZE))
    slots = np.random.default_rng(1).permutation(blocks * BLOCK_SIZE)[:tokens]
    runs, plains = [], []
    for i in range(calls_for(2 * num_bytes)):
        fused = random_tensor((tokens, rank + rope), "bfloat16", 3 * i)
        cache = random_tensor((blocks, BLOCK_SIZE, rank + rope), "bfloat16", 3 * i + 1)
        mapping = on_gpu(slots)
        runs.append(partial(ops.concat_and_cache_mla, fused[:, :rank], fused[:, rank:], cache, mapping))
        half = [random_tensor((tokens, 288), "bfloat16", 3 * i + 2) for _ in range(2)]
        halves = [random_tensor((blocks, BLOCK_SIZE, 288), "bfloat16", 3 * i + 2) for _ in range(2)]
        pointers = [t.data_ptr() for t in (*half, *halves, mapping)]
        sizes = (np.int64(36), np.int32(36), np.int32(1), np.int64(BLOCK_SIZE))
        strides = (np.int64(BLOCK_SIZE * 36), np.int64(36), np.int64(0))
        plain = partial(PLAIN.get_function("insert_rows"), (tokens,), (64,), (*pointers, *sizes, *strides))
        plains.append(partial(lambda kernel, _keep: kernel(), plain, (half, halves, mapping)))
        if i == 0:
            cupy.cuda.runtime.deviceSynchronize()
            runs[0]()
            cupy.cuda.runtime.deviceSynchronize()
            got = cupy_view(cache).reshape(-1, 2 * (rank + rope))[cupy.asarray(slots)]
            assert (got == cupy_view(fused).reshape(tokens, -1)).all(), f"{tokens} tokens"
    clock.figure("concat_and_cache_mla", f"{tokens} tokens, {rank} + {rope}, random", num_bytes, plains, runs)


def bench_all(clock: Clock, only: str | None) -> None:
    if only in (None, "copy_blocks"):
        for block_bytes in (32 << 10, 128 << 10, 512 << 10, 2 << 20):
            for layers in (1, 32):
                bench_copy_blocks(clock, block_bytes, layers, max(256 << 20, 2 * layers * block_bytes * 4))
    if only in (None, "reshape_and_cache"):
        for layout in ("HND", "NHD", "packed"):
            for tokens in (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 65536):
                for order in ("consecutive", "random"):
                    bench_reshape_and_cache(clock, tokens, layout, order, False)
            for tokens in (1, 64, 8192, 65536):
                bench_reshape_and_cache(clock, tokens, layout, "consecutive", True)
    if only in (None, "concat_and_cache_mla"):
        for tokens in (1, 64, 8192, 65536):
            bench_concat_and_cache_mla(clock, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", choices=["copy_blocks", "reshape_and_cache", "concat_and_cache_mla"])
    parser.add_argument("--output", type=Path, default=Path("out/bench_cache_ops"), help="without suffix: .csv, .json")
    given = parser.parse_args()
    paddle.set_device(devices.name_of(0))
    clock = Clock(given.repeats)
    empty = partial(PLAIN.get_function("empty"), (1,), (32,), ())
    empty_us = clock.microseconds([empty] * MOST_CALLS)
    print(f"an empty kernel takes {empty_us:.2f} us")
    bench_all(clock, given.only)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(made) for made in clock.figures]
    with given.output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    machine = {"gpu": gpu, "paddle": paddle.__version__, "repeats": given.repeats, "empty_kernel_us": empty_us}
    given.output.with_suffix(".json").write_text(json.dumps({"machine": machine, "figures": rows}, indent=1))


if __name__ == "__main__":
    main()
