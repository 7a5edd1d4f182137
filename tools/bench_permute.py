"""Measures the permute and memcpy families on a GPU, against a contiguous copy and against plain kernels.

    python tools/bench_permute.py [--out DIRECTORY] [--repeats 15] [--only universal,operational,pairs]

Each figure is the median of single calls in device time (see paddle_kv/bench/clock.py); host time is beside it.
Buffers change with each call, chunks and pieces lie in shuffled order, and what the measured call wrote is compared
with an independent computation. GB/s counts each copied byte once. "of copy" is the rate against a contiguous
cudaMemcpyAsync of as many bytes, measured in the same way in the same run.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LAYERS, OUTER, HEADS, WIDTH, ELEMENT_BYTES = 80, 2, 8, 128, 2  # Llama-3-70B, bf16
SETS = 2  # of buffers, used in turn
LEAST_BYTES = 256 << 20  # several times the L2 cache

KERNELS = r"""
// One thread an element, and divisions for each of them.
extern "C" __global__ void universal_per_element(const unsigned long long* chunks, unsigned short* universal,
                                                 long long count, int heads, int layers, int outer, int tokens,
                                                 int width, int heads_first, int to_universal) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= count) return;
  long long rest = i;
  const int d = rest % width; rest /= width;
  const int t = rest % tokens; rest /= tokens;
  const int o = rest % outer; rest /= outer;
  const int l = rest % layers; rest /= layers;
  const int h = rest % heads; rest /= heads;
  unsigned short* chunk = (unsigned short*)chunks[(rest * layers + l) * outer + o];
  const long long at = heads_first ? ((long long)h * tokens + t) * width + d : ((long long)t * heads + h) * width + d;
  if (to_universal) universal[i] = chunk[at]; else chunk[at] = universal[i];
}

extern "C" __global__ void operational_per_element(const unsigned long long* chunks, unsigned short* operational,
                                                   long long count, long long inner, int to_operational) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= count) return;
  unsigned short* chunk = (unsigned short*)chunks[i / inner];
  if (to_operational) operational[i] = chunk[i % inner]; else chunk[i % inner] = operational[i];
}
"""


@dataclass
class Result:
    case: str
    method: str
    total_bytes: int
    median_ms: float
    spread_ms: float  # from the 10th to the 90th percentile
    host_us: float
    bandwidth_gbps: float
    of_copy: float | None = None
    times_per_element: float | None = None
    correct: bool | None = None


class Bench:
    def __init__(self, repeats: int) -> None:
        import cupy

        from paddle_kv.bench.clock import CudaClock

        self.cupy, self.repeats = cupy, repeats
        self.kernels = cupy.RawModule(code=KERNELS)
        self.clock = CudaClock()
        self.stream = self.clock.stream

    def measure(self, case: str, method: str, total_bytes: int, calls: list[Callable[[], Any]]) -> Result:
        """``calls`` in turn, each on ``self.stream``."""
        from paddle_kv.bench.clock import measure

        turns = itertools.cycle(calls)
        timing = measure(self.clock, lambda: next(turns)(), warmups=2 * len(calls), repeats=self.repeats)
        spread_ms, rate = timing.p90_ms - timing.p10_ms, total_bytes / timing.median_ms / 1e6
        return Result(case, method, total_bytes, timing.median_ms, spread_ms, timing.host_us, rate)

    def contiguous(self, sources: list[int], targets: list[int], total_bytes: int, case: str) -> Result:
        runtime, handle = self.cupy.cuda.runtime, self.stream.ptr

        def copy(source: int, target: int) -> Callable[[], Any]:
            return lambda: runtime.memcpyAsync(target, source, total_bytes, runtime.memcpyDefault, handle)

        calls = [copy(source, target) for source, target in zip(sources, targets, strict=True)]
        result = self.measure(case, "contiguous copy", total_bytes, calls)
        result.of_copy = 1.0
        return result


class Memory:
    """SETS ranges of device or pinned memory, written and read by plain copies."""

    def __init__(self, cupy: Any, num_bytes: int, on_device: bool = True, addresses: list[int] | None = None) -> None:
        self.runtime, self.num_bytes = cupy.cuda.runtime, num_bytes
        if addresses is not None:
            self.addresses = addresses  # memory of somebody else
            return
        if on_device:
            self.keep = cupy.cuda.alloc(SETS * num_bytes)
        else:
            self.keep = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(SETS * num_bytes), 0)
        self.addresses = [int(self.keep.ptr) + i * num_bytes for i in range(SETS)]

    def write(self, i: int, bits: np.ndarray) -> None:
        self.runtime.memcpy(self.addresses[i], bits.ctypes.data, self.num_bytes, self.runtime.memcpyDefault)

    def clear(self, i: int) -> None:
        self.write(i, np.zeros(self.num_bytes, np.uint8))

    def read(self, i: int) -> np.ndarray:
        bits = np.empty(self.num_bytes, np.uint8)
        self.runtime.memcpy(bits.ctypes.data, self.addresses[i], self.num_bytes, self.runtime.memcpyDefault)
        return bits


def noise(num_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, num_bytes // 4, np.uint32).view(np.uint8)


def permute_cases(bench: Bench, tokens: int, layout: str | None) -> Iterator[Result]:
    """Universal in a layout, or operational where there is none: both directions, and the plain kernel."""
    import paddle

    from paddle_kv import devices, ops

    cupy, stream = bench.cupy, bench.stream
    inner = tokens * HEADS * WIDTH
    blocks = max(8, -(-LEAST_BYTES // (LAYERS * OUTER * inner * ELEMENT_BYTES)))
    count = blocks * LAYERS * OUTER
    shape = [blocks, HEADS, LAYERS, OUTER, tokens, WIDTH] if layout else [blocks, LAYERS, OUTER, inner]
    total_bytes = count * inner * ELEMENT_BYTES
    case = f"{'universal ' + layout if layout else 'operational'}, {tokens} tokens, {blocks} blocks"
    tensors = [paddle._C_ops.empty(shape, paddle.bfloat16, devices.place_of(0)) for _ in range(SETS)]
    pool = Memory(cupy, total_bytes)
    dense = Memory(cupy, total_bytes, addresses=[int(tensor.data_ptr()) for tensor in tensors])
    bits = [noise(total_bytes, i) for i in range(SETS)]
    orders = [np.random.default_rng(i).permutation(count) for i in range(SETS)]
    chunks = [(pool.addresses[i] + orders[i] * inner * ELEMENT_BYTES).tolist() for i in range(SETS)]
    tables = [cupy.cuda.alloc(8 * count) for _ in range(SETS)]
    for table, addresses in zip(tables, chunks, strict=True):
        words = np.array(addresses, np.uint64)
        cupy.cuda.runtime.memcpy(table.ptr, words.ctypes.data, 8 * count, cupy.cuda.runtime.memcpyDefault)

    def expected(i: int) -> np.ndarray:
        stack = bits[i].view(np.uint16).reshape(count, inner)[orders[i]]
        if layout is None:
            return stack.ravel().view(np.uint8)
        rows = (tokens, HEADS) if layout == "NHD" else (HEADS, tokens)
        axes = (0, 4, 1, 2, 3, 5) if layout == "NHD" else (0, 3, 1, 2, 4, 5)
        universal = stack.reshape(blocks, LAYERS, OUTER, *rows, WIDTH).transpose(axes)
        return np.ascontiguousarray(universal).ravel().view(np.uint8)

    def ours(i: int, to_dense: bool) -> Callable[[], Any]:
        given = {"num_layers": LAYERS, "out": tensors[i], "stream": stream}
        if layout is None and to_dense:
            return lambda: ops.operational_from_block(chunks[i], **given)
        if layout is None:
            return lambda: ops.block_from_operational(tensors[i], chunks[i], stream=stream)
        if to_dense:
            return lambda: ops.universal_from_block(chunks[i], inner_layout=layout, **given)
        return lambda: ops.block_from_universal(tensors[i], chunks[i], inner_layout=layout, stream=stream)

    def plain(i: int, to_dense: bool) -> Callable[[], Any]:
        memory = (np.uint64(tables[i].ptr), np.uint64(dense.addresses[i]), np.int64(count * inner))
        if layout is None:
            kernel = bench.kernels.get_function("operational_per_element")
            given = (*memory, np.int64(inner), np.int32(to_dense))
        else:
            kernel = bench.kernels.get_function("universal_per_element")
            given = (*memory, *map(np.int32, (HEADS, LAYERS, OUTER, tokens, WIDTH, layout == "HND", to_dense)))
        return lambda: kernel((-(-count * inner // 256),), (256,), given, stream=stream)

    ceiling = bench.contiguous(pool.addresses, dense.addresses, total_bytes, case)
    yield ceiling
    for to_dense in (True, False):
        per_element = None
        for method, make in (("per element", plain), ("paddle_kv", ours)):
            for i in range(SETS):
                pool.write(i, bits[i]) if to_dense else pool.clear(i)
                dense.clear(i) if to_dense else dense.write(i, expected(i))
            name = f"{method}, {'to' if to_dense else 'from'} dense"
            result = bench.measure(case, name, total_bytes, [make(i, to_dense) for i in range(SETS)])
            written = dense if to_dense else pool
            right = expected if to_dense else bits.__getitem__
            result.correct = all(np.array_equal(written.read(i), right(i)) for i in range(SETS))
            result.of_copy = result.bandwidth_gbps / ceiling.bandwidth_gbps
            if per_element is not None:
                result.times_per_element = result.bandwidth_gbps / per_element
            per_element = result.bandwidth_gbps
            yield result


def pair_cases(bench: Bench, direction: str, piece_bytes: int, count: int) -> Iterator[Result]:
    """Pieces in shuffled order on both sides."""
    from paddle_kv import ops

    cupy, stream = bench.cupy, bench.stream
    total_bytes = piece_bytes * count
    case = f"{direction}, {count} x {piece_bytes >> 10} KiB"
    random = np.random.default_rng(piece_bytes + count)
    source, target = Memory(cupy, total_bytes, direction[0] == "d"), Memory(cupy, total_bytes, direction[2] == "d")
    bits = [noise(total_bytes, i) for i in range(SETS)]
    orders = [(random.permutation(count), random.permutation(count)) for _ in range(SETS)]
    lists = [
        ((source.addresses[i] + first * piece_bytes).tolist(), (target.addresses[i] + second * piece_bytes).tolist())
        for i, (first, second) in enumerate(orders)
    ]
    for i in range(SETS):
        source.write(i, bits[i])

    def run(function: Callable[..., Any], **named: Any) -> list[Callable[[], Any]]:
        return [lambda given=given: function(*given, piece_bytes, stream=stream, **named) for given in lists]

    ceiling = bench.contiguous(source.addresses, target.addresses, total_bytes, case)
    yield ceiling
    methods = [("vectorized_copy", run(ops.vectorized_copy)), ("memcpy_batch loop", run(ops.memcpy_batch, mode="loop"))]
    if ops.has_memcpy_batch_async():
        methods.append(("memcpy_batch batch", run(ops.memcpy_batch, mode="batch")))
    for method, calls in methods:
        for i in range(SETS):
            target.clear(i)
        result = bench.measure(case, method, total_bytes, calls)
        result.of_copy = result.bandwidth_gbps / ceiling.bandwidth_gbps
        result.correct = True
        for i, (first, second) in enumerate(orders):
            rows = (count, piece_bytes)
            result.correct &= np.array_equal(target.read(i).reshape(rows)[second], bits[i].reshape(rows)[first])
        yield result


def all_cases(bench: Bench, only: list[str]) -> Iterator[Result]:
    for tokens in (16, 64):
        if "universal" in only:
            for layout in ("NHD", "HND"):
                yield from permute_cases(bench, tokens, layout)
        if "operational" in only:
            yield from permute_cases(bench, tokens, None)
    if "pairs" in only:
        for direction in ("d2d", "h2d", "d2h"):
            for piece_bytes, count in ((4 << 10, 65536), (32 << 10, 20480), (128 << 10, 4096), (1 << 20, 512)):
                yield from pair_cases(bench, direction, piece_bytes, count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for bench_permute.csv and .json")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="universal,operational,pairs")
    given = parser.parse_args()
    from paddle_kv import devices

    if not devices.has_gpu():
        sys.exit("bench_permute: this Paddle sees no GPU")
    import cupy

    from paddle_kv import ops

    bench, results = Bench(given.repeats), []
    row = "{:34} {:24} {:>9} {:>8} {:>9} {:>9} {:>8} {:>11} {:>8}"
    print(row.format("case", "method", "median ms", "+-", "host us", "GB/s", "of copy", "x element", "correct"))
    for result in all_cases(bench, given.only.split(",")):
        results.append(result)
        share = "" if result.of_copy is None else f"{100 * result.of_copy:.1f} %"
        times = "" if result.times_per_element is None else f"{result.times_per_element:.2f}"
        correct = "" if result.correct is None else "yes" if result.correct else "NO"
        numbers = f"{result.median_ms:.3f}", f"{result.spread_ms:.3f}", f"{result.host_us:.0f}"
        rate = f"{result.bandwidth_gbps:.1f}"
        print(row.format(result.case, result.method, *numbers, rate, share, times, correct), flush=True)

    given.out.mkdir(parents=True, exist_ok=True)
    rows = [asdict(result) for result in results]
    with open(given.out / "bench_permute.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    about = {"gpu": properties["name"].decode(), "build": ops.build_info(), "repeats": given.repeats}
    (given.out / "bench_permute.json").write_text(json.dumps({"about": about, "results": rows}, indent=1))
    return 0 if all(result.correct is not False for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
