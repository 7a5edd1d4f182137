"""Measures the permute and memcpy families on a GPU, against a contiguous copy and against plain kernels.

    python tools/bench_permute.py [--out DIRECTORY] [--repeats 15] [--only universal,operational,pairs]

Each figure is the median of single calls, timed by CUDA events behind a kernel that keeps the stream busy until the
host has submitted the call: the events see device time only, and the time on the host is shown beside it. Buffers
change with each call, chunks and pieces lie in shuffled order, and what the measured call wrote is compared with an
independent computation. GB/s counts each copied byte once. "of copy" is the rate against a contiguous cudaMemcpyAsync
of as many bytes, measured in the same way in the same run.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import sys
import time
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
extern "C" __global__ void busy(unsigned long long duration_ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < duration_ns);
}

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
    spread_ms: float  # between the quartiles
    host_us: float
    bandwidth_gbps: float
    of_copy: float | None = None
    times_per_element: float | None = None
    correct: bool | None = None


class Clock:
    def __init__(self, repeats: int) -> None:
        import cupy

        self.cupy, self.repeats = cupy, repeats
        self.kernels = cupy.RawModule(code=KERNELS)
        self.busy = self.kernels.get_function("busy")
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def measure(self, case: str, method: str, total_bytes: int, calls: list[Callable[[], Any]]) -> Result:
        """``calls`` in turn, each on ``self.stream``."""
        turns = itertools.cycle(calls)
        for _ in range(2 * len(calls)):
            next(turns)()
        self.stream.synchronize()
        started = time.perf_counter()
        next(turns)()
        delay_ns = int(2e9 * (time.perf_counter() - started)) + 500_000
        self.stream.synchronize()
        device_ms, host_us = [], []
        for _ in range(self.repeats):
            first, last = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            self.busy((1,), (1,), (np.uint64(delay_ns),), stream=self.stream)
            started = time.perf_counter()
            first.record(self.stream)
            next(turns)()
            last.record(self.stream)
            host_us.append(1e6 * (time.perf_counter() - started))
            last.synchronize()
            device_ms.append(self.cupy.cuda.get_elapsed_time(first, last))
        low, median, high = statistics.quantiles(device_ms, n=4)
        rate = total_bytes / median / 1e6
        return Result(case, method, total_bytes, median, high - low, statistics.median(host_us), rate)

    def contiguous(self, source: int, target: int, total_bytes: int, case: str) -> Result:
        """``source`` and ``target`` are the starts of SETS ranges each."""
        runtime, handle = self.cupy.cuda.runtime, self.stream.ptr

        def copy(offset: int) -> Callable[[], Any]:
            return lambda: runtime.memcpyAsync(target + offset, source + offset, total_bytes, 4, handle)

        return self.measure(case, "contiguous copy", total_bytes, [copy(i * total_bytes) for i in range(SETS)])


def device_view(cupy: Any, address: int, count: int, dtype: Any) -> Any:
    memory = cupy.cuda.UnownedMemory(address, count * np.dtype(dtype).itemsize, None)
    return cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, 0))


def shuffled_chunks(cupy: Any, count: int, chunk_elements: int, seed: int) -> tuple[Any, list[int], np.ndarray]:
    """A pool of random bits, and the addresses of its chunks in shuffled order."""
    pool = cupy.random.randint(0, 1 << 16, (count, chunk_elements), dtype=cupy.uint16)
    order = np.random.default_rng(seed).permutation(count)
    return pool, (pool.data.ptr + order * chunk_elements * ELEMENT_BYTES).tolist(), order


def permute_cases(clock: Clock, tokens: int, layout: str | None) -> Iterator[Result]:
    """Universal in a layout, or operational where there is none: both directions, and the plain kernel."""
    import paddle

    from paddle_kv import ops

    cupy, stream = clock.cupy, clock.stream
    inner = tokens * HEADS * WIDTH
    blocks = max(8, -(-LEAST_BYTES // (LAYERS * OUTER * inner * ELEMENT_BYTES)))
    count = blocks * LAYERS * OUTER
    shape = [blocks, HEADS, LAYERS, OUTER, tokens, WIDTH] if layout else [blocks, LAYERS, OUTER, inner]
    total_bytes = count * inner * ELEMENT_BYTES
    case = f"{'universal ' + layout if layout else 'operational'}, {tokens} tokens, {blocks} blocks"
    pools = [shuffled_chunks(cupy, count, inner, i) for i in range(SETS)]
    dense = [paddle._C_ops.empty(shape, paddle.bfloat16, paddle.CUDAPlace(0)) for _ in range(SETS)]
    views = [device_view(cupy, tensor.data_ptr(), count * inner, np.uint16) for tensor in dense]

    def expected(i: int) -> Any:
        pool, _, order = pools[i]
        stack = pool[cupy.asarray(order)]
        if layout is None:
            return stack.ravel()
        rows = (tokens, HEADS) if layout == "NHD" else (HEADS, tokens)
        axes = (0, 4, 1, 2, 3, 5) if layout == "NHD" else (0, 3, 1, 2, 4, 5)
        return stack.reshape(blocks, LAYERS, OUTER, *rows, WIDTH).transpose(axes).ravel()

    def forward(i: int) -> Callable[[], Any]:
        given = {"num_layers": LAYERS, "out": dense[i], "stream": stream}
        if layout is None:
            return lambda: ops.operational_from_block(pools[i][1], **given)
        return lambda: ops.universal_from_block(pools[i][1], inner_layout=layout, **given)

    def backward(i: int) -> Callable[[], Any]:
        if layout is None:
            return lambda: ops.block_from_operational(dense[i], pools[i][1], stream=stream)
        return lambda: ops.block_from_universal(dense[i], pools[i][1], inner_layout=layout, stream=stream)

    tables = [cupy.asarray(np.array(addresses, np.uint64)) for _, addresses, _ in pools]

    def plain(i: int, to_dense: int) -> Callable[[], Any]:
        grid = (-(-count * inner // 256),)
        if layout is None:
            kernel = clock.kernels.get_function("operational_per_element")
            given = (tables[i], views[i], np.int64(count * inner), np.int64(inner), np.int32(to_dense))
        else:
            kernel = clock.kernels.get_function("universal_per_element")
            sizes = (HEADS, LAYERS, OUTER, tokens, WIDTH, int(layout == "HND"), to_dense)
            given = (tables[i], views[i], np.int64(count * inner), *map(np.int32, sizes))
        return lambda: kernel(grid, (256,), given, stream=stream)

    scratch = cupy.empty((SETS, count * inner), cupy.uint16)
    flat_pools = cupy.stack([pool.ravel() for pool, _, _ in pools])
    ceiling = clock.contiguous(flat_pools.data.ptr, scratch.data.ptr, total_bytes, case)
    ceiling.of_copy = 1.0
    del scratch
    cupy.get_default_memory_pool().free_all_blocks()
    yield ceiling
    for name, ours, to_dense in (("to dense", forward, 1), ("from dense", backward, 0)):
        results = []
        for method, make in ((f"per element, {name}", lambda i, d=to_dense: plain(i, d)), (f"paddle_kv, {name}", ours)):
            for i in range(SETS):
                if to_dense:
                    views[i].fill(0)
                else:
                    views[i][:] = expected(i)
                    pools[i][0].fill(0)
            cupy.cuda.Device().synchronize()
            result = clock.measure(case, method, total_bytes, [make(i) for i in range(SETS)])
            if to_dense:
                result.correct = all(bool((views[i] == expected(i)).all()) for i in range(SETS))
            else:
                result.correct = all(bool((pools[i][0].ravel() == flat_pools[i]).all()) for i in range(SETS))
            for i in range(SETS):
                pools[i][0][:] = flat_pools[i].reshape(pools[i][0].shape)
            result.of_copy = result.bandwidth_gbps / ceiling.bandwidth_gbps
            results.append(result)
        results[1].times_per_element = results[1].bandwidth_gbps / results[0].bandwidth_gbps
        yield from results


def pair_cases(clock: Clock, direction: str, piece_bytes: int, count: int) -> Iterator[Result]:
    """Pieces in shuffled order on both sides."""
    from paddle_kv import ops

    cupy, stream = clock.cupy, clock.stream
    total_bytes = piece_bytes * count
    case = f"{direction}, {count} x {piece_bytes >> 10} KiB"
    random = np.random.default_rng(piece_bytes + count)

    def memory(on_device: bool) -> tuple[int, Any, Any]:
        """Address, what keeps it alive, and its bytes [SETS, total] as an array of NumPy or CuPy."""
        if on_device:
            array = cupy.empty((SETS, total_bytes), cupy.uint8)
            return array.data.ptr, array, array
        pinned = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(SETS * total_bytes), 0)
        return pinned.ptr, pinned, np.frombuffer(pinned, np.uint8, SETS * total_bytes).reshape(SETS, total_bytes)

    source, _keep_source, source_bits = memory(direction[0] == "d")
    target, _keep_target, target_bits = memory(direction[2] == "d")
    noise = random.integers(0, 1 << 32, (SETS, total_bytes // 4), np.uint32).view(np.uint8)
    source_bits[...] = cupy.asarray(noise) if direction[0] == "d" else noise
    orders = [(random.permutation(count), random.permutation(count)) for _ in range(SETS)]

    def lists(i: int) -> tuple[list[int], list[int]]:
        offset = i * total_bytes
        first, second = orders[i]
        return (source + offset + first * piece_bytes).tolist(), (target + offset + second * piece_bytes).tolist()

    def run(function: Callable[..., Any], **named: Any) -> list[Callable[[], Any]]:
        made = [lists(i) for i in range(SETS)]
        return [lambda given=given: function(*given, piece_bytes, stream=stream, **named) for given in made]

    ceiling = clock.contiguous(source, target, total_bytes, case)
    ceiling.of_copy = 1.0
    yield ceiling
    methods = [("vectorized_copy", run(ops.vectorized_copy)), ("memcpy_batch loop", run(ops.memcpy_batch, mode="loop"))]
    if ops.has_memcpy_batch_async():
        methods.append(("memcpy_batch batch", run(ops.memcpy_batch, mode="batch")))
    for method, calls in methods:
        target_bits[...] = 0
        cupy.cuda.Device().synchronize()
        result = clock.measure(case, method, total_bytes, calls)
        result.of_copy = result.bandwidth_gbps / ceiling.bandwidth_gbps
        result.correct = True
        for i, (first, second) in enumerate(orders):
            written = target_bits[i].get() if direction[2] == "d" else target_bits[i]
            rows = (count, piece_bytes)
            result.correct &= np.array_equal(written.reshape(rows)[second], noise[i].reshape(rows)[first])
        yield result


def all_cases(clock: Clock, only: list[str]) -> Iterator[Result]:
    for tokens in (16, 64):
        if "universal" in only:
            for layout in ("NHD", "HND"):
                yield from permute_cases(clock, tokens, layout)
        if "operational" in only:
            yield from permute_cases(clock, tokens, None)
    if "pairs" in only:
        for direction in ("d2d", "h2d", "d2h"):
            for piece_bytes, count in ((4 << 10, 65536), (32 << 10, 20480), (128 << 10, 4096), (1 << 20, 512)):
                yield from pair_cases(clock, direction, piece_bytes, count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for bench_permute.csv and .json")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="universal,operational,pairs")
    given = parser.parse_args()
    import paddle

    if not paddle.is_compiled_with_cuda() or paddle.device.cuda.device_count() == 0:
        sys.exit("bench_permute: this Paddle sees no GPU")
    import cupy

    from paddle_kv import ops

    clock, results = Clock(given.repeats), []
    row = "{:34} {:24} {:>9} {:>8} {:>9} {:>9} {:>8} {:>11} {:>8}"
    print(row.format("case", "method", "median ms", "+-", "host us", "GB/s", "of copy", "x element", "correct"))
    for result in all_cases(clock, given.only.split(",")):
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
