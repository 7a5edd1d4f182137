"""Times gather_cache, scatter_cache, convert_fp8 and convert_layout on a GPU, beside a plain copy of as many bytes.

    python tools/bench_convert_ops.py [--repeats 30] [--output out/bench_convert_ops]

Every line has three figures of one run: a contiguous copy inside the device that reads and writes as many bytes in
total (the ceiling), a plain kernel of one thread for each element (the baseline), and the operator. GB/s counts bytes
read and bytes written. Medians of CUDA events; working sets are larger than the L2 cache; ids are shuffled. What each
operator returns is compared with the plain kernel's result, bit for bit, in the same run.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import paddle

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

from paddle_kv import devices, ops, streams

HEADS, HEAD_SIZE, BLOCK_SIZE, SEQUENCES = 8, 128, 64, 64
SPIN_CYCLES = 1_000_000  # about half a millisecond, longer than a call takes on the host

PLAIN = cupy.RawModule(code=r"""
typedef long long int64;
typedef unsigned short half_bits;
// Keeps the stream busy while the host submits what is to be timed.
extern "C" __global__ void spin(int64 cycles) {
  const int64 start = clock64();
  while (clock64() - start < cycles) {}
}
__device__ float widened(half_bits bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ half_bits narrowed(float value) {
  half_bits bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
// Offset of element d of a row in the cache: layout 0 HND, 1 NHD, 2 packed by x.
__device__ int64 offset_of(int64 block, int64 slot, int64 head, int64 d, int layout, int64 heads, int64 bs, int64 hd,
                            int64 x) {
  if (layout == 0) return ((block * heads + head) * bs + slot) * hd + d;
  if (layout == 1) return ((block * bs + slot) * heads + head) * hd + d;
  return ((block * heads + head) * (hd / x) + d / x) * bs * x + slot * x + d % x;
}
// One thread block a token, one thread an element.
extern "C" __global__ void move(unsigned short* cache, unsigned short* rows, const int64* table, const int64* lengths,
                                int64 width, int64 sequences, int layout, int64 heads, int64 bs, int64 hd, int64 x,
                                int to_cache) {
  const int64 token = blockIdx.x;
  int64 s = 0;
  while (s + 1 < sequences && lengths[s + 1] <= token) ++s;
  const int64 p = token - lengths[s];
  const int64 block = table[s * width + p / bs];
  for (int64 i = threadIdx.x; i < heads * hd; i += blockDim.x) {
    unsigned short* const in_cache = cache + offset_of(block, p % bs, i / hd, i % hd, layout, heads, bs, hd, x);
    if (to_cache) *in_cache = rows[token * heads * hd + i]; else rows[token * heads * hd + i] = *in_cache;
  }
}
// One thread an element; finite numbers only.
extern "C" __global__ void encode(const half_bits* from, unsigned char* to, int64 count, float scale) {
  const int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float value = fminf(fmaxf(__fdiv_rn(widened(from[i]), scale), -448.f), 448.f);
  const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const unsigned small = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.f)) - __float_as_uint(16384.f);
  const unsigned normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1)) >> 20) - (120u << 3);
  to[i] = (bits >> 24 & 0x80u) | (magnitude < 0x3c800000u ? small : normal);
}
extern "C" __global__ void decode(const unsigned char* from, half_bits* to, int64 count, float scale) {
  const int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const unsigned code = from[i];
  const unsigned low = code & 0x7fu;  // below 8 a subnormal
  const float magnitude = low < 8 ? low * 0x1p-9f : __uint_as_float((low << 20) + (120u << 23));
  to[i] = narrowed(__fmul_rn(code & 0x80u ? -magnitude : magnitude, scale));
}
""")  # fmt: skip


@dataclass
class Figure:
    operator: str
    case: str
    mib: float  # read plus written
    copy_gb_per_s: float
    plain_gb_per_s: float
    operator_gb_per_s: float
    percent_of_copy: float


class Clock:
    """Medians of event times on Paddle's stream, on which the operators run."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.stream = cupy.cuda.ExternalStream(streams.paddle_stream(0), 0)

    def milliseconds(self, work: Callable[[], Any]) -> float:
        times = []
        with self.stream:
            for i in range(self.repeats + 5):
                start, end = cupy.cuda.Event(), cupy.cuda.Event()
                PLAIN.get_function("spin")((1,), (1,), (np.int64(SPIN_CYCLES),))
                start.record(self.stream)
                work()
                end.record(self.stream)
                end.synchronize()
                if i >= 5:
                    times.append(cupy.cuda.get_elapsed_time(start, end))
        return statistics.median(times)

    def copy_ms(self, num_bytes: int) -> float:
        """A copy that reads and writes ``num_bytes`` in total."""
        source, target = (cupy.zeros(num_bytes // 2, cupy.uint8) for _ in range(2))
        return self.milliseconds(
            lambda: cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, target.nbytes, 3, self.stream.ptr)
        )


def cupy_view(tensor: paddle.Tensor) -> cupy.ndarray:
    """A tensor's bytes."""
    num_bytes = int(np.prod(tensor.shape)) * tensor.element_size()
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), num_bytes, tensor)
    return cupy.ndarray(num_bytes, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))


def on_gpu(array: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(np.ascontiguousarray(array), place=devices.place_of(0))


def figure(
    clock: Clock, operator: str, case: str, num_bytes: int, plain: Callable[[], Any], run: Callable[[], Any]
) -> Figure:
    rates = [
        num_bytes / ms / 1e6 for ms in (clock.copy_ms(num_bytes), clock.milliseconds(plain), clock.milliseconds(run))
    ]
    made = Figure(operator, case, num_bytes / 2**20, *rates, 100 * rates[2] / rates[0])
    print(f"{operator:15} {case:34} {made.mib:8.1f} MiB   copy {rates[0]:7.0f}   plain {rates[1]:7.0f}   "
          f"operator {rates[2]:7.0f} GB/s   {made.percent_of_copy:5.1f} % of the copy", flush=True)  # fmt: skip
    return made


def cache_shape(blocks: int, layout: str, kind: str, x: int) -> tuple[int, ...]:
    if layout == "HND":
        return (blocks, HEADS, BLOCK_SIZE, HEAD_SIZE)
    if layout == "NHD":
        return (blocks, BLOCK_SIZE, HEADS, HEAD_SIZE)
    if kind == "key":
        return (blocks, HEADS, HEAD_SIZE // x, BLOCK_SIZE, x)
    return (blocks, HEADS, HEAD_SIZE, BLOCK_SIZE)


def block_table(tokens: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Sequences of different lengths in shuffled blocks: (blocks, table, cumulative lengths)."""
    random = np.random.default_rng(0)
    weights = random.uniform(0.5, 1.5, SEQUENCES)
    lengths = np.concatenate([[0], np.round(np.cumsum(weights) / weights.sum() * tokens)]).astype(np.int64)
    counts = -(-np.diff(lengths) // BLOCK_SIZE)
    blocks = int(counts.sum())
    table = np.full((SEQUENCES, int(counts.max())), -1, np.int64)
    free = iter(random.permutation(blocks).tolist())
    for row, count in zip(table, counts, strict=True):
        row[:count] = [next(free) for _ in range(count)]
    return blocks, table, lengths


def plain_kernel(name: str, grid: int, threads: int, *arguments: Any) -> Callable[[], Any]:
    return partial(PLAIN.get_function(name), (grid,), (threads,), arguments)


@dataclass
class Paged:
    """Tokens of sequences of different lengths in shuffled blocks."""

    tokens: int

    def __post_init__(self) -> None:
        self.blocks, table, lengths = block_table(self.tokens)
        self.ids = on_gpu(table), on_gpu(lengths)
        self._sizes = [np.int64(v) for v in table.shape[::-1]]

    def plain(
        self, layout: str, x: int, cache: paddle.Tensor, rows: paddle.Tensor, to_cache: bool
    ) -> Callable[[], Any]:
        number = np.int32(("HND", "NHD", "packed").index(layout))
        geometry = [number, *(np.int64(v) for v in (HEADS, BLOCK_SIZE, HEAD_SIZE, x)), np.int32(to_cache)]
        pointers = [tensor.data_ptr() for tensor in (cache, rows, *self.ids)]
        return plain_kernel("move", self.tokens, 512, *pointers, *self._sizes, *geometry)


LAYOUTS: list[tuple[Any, Any]] = [("HND", "key"), ("NHD", "key"), ("packed", "key"), ("packed", "value")]


def named(layout: str, kind: str) -> str:
    return f"packed {kind}" if layout == "packed" else layout


def random_halves(shape: tuple[int, ...], seed: int) -> paddle.Tensor:
    return on_gpu(np.random.default_rng(seed).integers(0, 2**16, shape, np.uint16).view(np.float16))


def bench_move(clock: Clock, tokens: int, layout: Any, kind: Any) -> list[Figure]:
    paged = Paged(tokens)
    x = 8 if kind == "key" else 1
    shape = cache_shape(paged.blocks, layout, kind, x)
    cache, other = random_halves(shape, 1), random_halves(shape, 2)
    rows, by_plain = (random_halves((tokens, HEADS, HEAD_SIZE), seed) for seed in (3, 4))
    num_bytes = 2 * tokens * HEADS * HEAD_SIZE * 2
    case = f"{tokens} tokens, {named(layout, kind)}, 16 bit"

    gather = partial(ops.gather_cache, cache, *paged.ids, total_tokens=tokens, layout=layout)
    plain_gather = paged.plain(layout, x, cache, by_plain, False)
    with clock.stream:
        plain_gather()
    assert (cupy_view(gather()) == cupy_view(by_plain)).all(), f"gather_cache, {case}"

    scatter = partial(ops.scatter_cache, rows, cache, *paged.ids, layout=layout)
    plain_scatter = paged.plain(layout, x, other, rows, True)
    cupy_view(other)[:] = cupy_view(cache)
    cupy.cuda.runtime.deviceSynchronize()
    with clock.stream:
        plain_scatter()
    scatter()
    assert (cupy_view(cache) == cupy_view(other)).all(), f"scatter_cache, {case}"
    return [
        figure(clock, "gather_cache", case, num_bytes, plain_gather, gather),
        figure(clock, "scatter_cache", case, num_bytes, plain_scatter, scatter),
    ]


def bench_dequantizing(clock: Clock, tokens: int, layout: Any, kind: Any) -> Figure:
    """The plain kernel for this one decodes as many contiguous codes."""
    paged = Paged(tokens)
    count = tokens * HEADS * HEAD_SIZE
    cache = on_gpu(np.random.default_rng(2).integers(0, 127, cache_shape(paged.blocks, layout, kind, 16), np.uint8))
    scales = np.linspace(0.1, 2, HEADS).astype(np.float32)
    target = on_gpu(np.zeros(count, np.float16))
    codes = ops.gather_cache(cache, *paged.ids, total_tokens=tokens, layout=layout)
    run = partial(
        ops.gather_cache, cache, *paged.ids, total_tokens=tokens, layout=layout, kv_cache_dtype="fp8_e4m3",
        out_dtype="float16", scale=on_gpu(scales),
    )  # fmt: skip
    by_head = [ops.convert_fp8(codes, to="float16", scale=float(s)).numpy()[:, h] for h, s in enumerate(scales)]
    expected = np.stack(by_head, axis=1)
    case = f"{tokens} tokens, {named(layout, kind)}, e4m3 to float16"
    assert (run().numpy().view(np.uint16) == expected.view(np.uint16)).all(), f"gather_cache, {case}"
    plain = plain_kernel(
        "decode", -(-count // 256), 256, codes.data_ptr(), target.data_ptr(), np.int64(count), np.float32(0.3)
    )
    return figure(clock, "gather_cache", case, 3 * count, plain, run)


def bench_convert_fp8(clock: Clock, count: int, dtype: str, scale: float) -> list[Figure]:
    """The plain kernels convert float16, whatever the dtype."""
    halves = np.random.default_rng(3).normal(0, 200, count).astype(np.float16)
    source = on_gpu(halves)
    by_plain, back = on_gpu(np.zeros(count, np.uint8)), on_gpu(np.zeros(count, np.float16))
    shape = (-(-count // 256), 256)
    sizes = (np.int64(count), np.float32(scale))
    plain_encode = plain_kernel("encode", *shape, source.data_ptr(), by_plain.data_ptr(), *sizes)
    plain_decode = plain_kernel("decode", *shape, by_plain.data_ptr(), back.data_ptr(), *sizes)
    with clock.stream:
        plain_encode()
        plain_decode()
    typed = source
    if dtype == "float32":
        typed = on_gpu(halves.astype(np.float32))
    elif dtype == "bfloat16":
        typed = on_gpu((halves.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    encode = partial(ops.convert_fp8, typed, to="fp8", scale=scale)
    codes = encode()
    decode = partial(ops.convert_fp8, codes, to=dtype, scale=scale)
    if dtype != "bfloat16":
        assert (cupy_view(codes) == cupy_view(by_plain)).all(), f"convert_fp8, {dtype} to e4m3"
    if dtype == "float16":
        assert (cupy_view(decode()) == cupy_view(back)).all(), "convert_fp8, e4m3 to float16"
    num_bytes = count * (1 + typed.element_size())
    return [
        figure(
            clock, "convert_fp8", f"{count >> 20} Mi {dtype} to e4m3, scale {scale}", num_bytes, plain_encode, encode
        ),
        figure(
            clock, "convert_fp8", f"{count >> 20} Mi e4m3 to {dtype}, scale {scale}", num_bytes, plain_decode, decode
        ),
    ]


def bench_convert_layout(clock: Clock, tokens: int, kind: Any, source: Any, target: Any) -> Figure:
    """The plain kernel is that of a gather of as many tokens."""
    blocks = tokens // BLOCK_SIZE
    ids = on_gpu(np.arange(blocks)[None]), on_gpu(np.array([0, tokens]))
    cache = random_halves(cache_shape(blocks, source, kind, 8), 4)
    run = partial(ops.convert_layout, cache, kind=kind, source_layout=source, target_layout=target)
    gathered = [
        cupy_view(ops.gather_cache(tensor, *ids, total_tokens=tokens, layout=layout))
        for tensor, layout in ((cache, source), (run(), target))
    ]
    case = f"{tokens} tokens, {kind}, {source} to {target}"
    assert (gathered[0] == gathered[1]).all(), f"convert_layout, {case}"
    paged = Paged(tokens)
    rows = random_halves((tokens, HEADS, HEAD_SIZE), 5)
    plain = paged.plain("HND", 1, random_halves(cache_shape(paged.blocks, "HND", kind, 1), 6), rows, False)
    return figure(clock, "convert_layout", case, 2 * tokens * HEADS * HEAD_SIZE * 2, plain, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--output", type=Path, default=Path("out/bench_convert_ops"), help="without suffix: .csv and .json"
    )
    given = parser.parse_args()
    paddle.set_device(devices.name_of(0))
    clock = Clock(given.repeats)
    figures: list[Figure] = []
    for tokens in (32768, 131072, 262144):
        for layout, kind in LAYOUTS:
            figures += bench_move(clock, tokens, layout, kind)
    figures += [bench_dequantizing(clock, 65536, layout, kind) for layout, kind in LAYOUTS]
    for dtype, scale in (("float16", 1.0), ("float16", 0.3), ("bfloat16", 0.3), ("float32", 0.3)):
        figures += bench_convert_fp8(clock, 128 << 20, dtype, scale)
    for kind, source, target in (
        ("key", "HND", "NHD"), ("key", "NHD", "HND"), ("key", "HND", "packed"), ("key", "packed", "HND"),
        ("value", "HND", "packed"), ("value", "packed", "HND"),
    ):  # fmt: skip
        figures.append(bench_convert_layout(clock, 131072, kind, source, target))

    given.output.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(made) for made in figures]
    with given.output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    machine = {"gpu": properties["name"].decode(), "paddle": paddle.__version__, "repeats": given.repeats}
    given.output.with_suffix(".json").write_text(json.dumps({"machine": machine, "figures": rows}, indent=1))


if __name__ == "__main__":
    main()
