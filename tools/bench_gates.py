"""What waits and marks inside a captured CUDA graph cost, and what they hold: python tools/bench_gates.py [SECTION ...]

- ``cost``: 80 layers of four small kernels as a graph; how much longer a replay takes with a gate in front of each
  layer, with a mark behind it, with both; the plain alternative is an external event of CUDA. Armed, the load was there
  before the launch; what the host pays for ``arm`` is measured with the load and the save in flight.
- ``pipeline``: examples/gpu_pipeline.py with a kernel that multiplies and adds for ``--layer-ms`` instead of products,
  eager and as a graph, loads and saves layer by layer beside it.
  The floor is the larger of computing and loading, plus the load of one layer. All bytes are compared.
- ``open``: from ``cancel`` of a load until the replay that waited for it has ended.
- ``replays``: many replays with random loads and cancels; a kernel behind each gate compares every byte of the block.

Each figure is a median; the CSV has the least and the most.
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
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import cupy
import numpy as np
import paddle
from cupy.cuda import runtime
from gpu_pipeline import TIMEOUT_S, Model, Pipeline, Run
from gpu_pipeline import parse as parse_pipeline

from paddle_kv import CancelledError, DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, devices

SECTIONS = ("cost", "pipeline", "open", "replays")
LAYERS = 80
KERNELS = 4  # a layer
WAIT_S = 30.0


@dataclass(frozen=True)
class Row:
    section: str
    what: str
    median: float
    least: float
    most: float
    unit: str


class Bench:
    """A cache and a pool of small blocks, and a compute stream."""

    def __init__(self, num_layers: int, num_blocks: int = 64) -> None:
        self.spec = KVCacheSpec(num_layers=num_layers, num_kv_heads=1, head_dim=64, block_size=16, dtype="float16")
        self.cache = DeviceCache(self.spec, num_blocks, "gpu:0")
        self.pool = HostPool(self.spec, num_blocks, layout="block_first")
        self.compute = cupy.cuda.Stream(non_blocking=True)
        self.scheduler = LayerwiseScheduler(self.cache, self.pool, compute_stream=self.compute)
        self.gates = self.scheduler.gates(timeout_s=20.0)

    def close(self) -> None:
        self.scheduler.close(WAIT_S)
        self.pool.close()


def captured(stream: Any, layers: int, layer: Callable[[int], None]) -> Any:
    """The layers as a graph, once eagerly before: nothing is loaded or allocated while it is captured."""
    with stream:
        for one in range(layers):
            layer(one)
        stream.synchronize()
        stream.begin_capture(mode=runtime.streamCaptureModeThreadLocal)
        for one in range(layers):
            layer(one)
        graph = stream.end_capture()
    graph.upload(stream)
    stream.synchronize()
    return graph


def replay_us(stream: Any, graph: Any, before: Callable[[], None] = lambda: None, count: int = 60) -> list[float]:
    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for turn in range(count + 10):
        before()
        first.record(stream)
        graph.launch(stream)
        last.record(stream)
        last.synchronize()
        if turn >= 10:
            times.append(cupy.cuda.get_elapsed_time(first, last) * 1e3)
    return times


def cost() -> list[Row]:
    bench = Bench(LAYERS)
    small = cupy.ElementwiseKernel("", "float32 x", "x += 1", "small")
    values = cupy.zeros(4096, cupy.float32)
    events = [runtime.eventCreateWithFlags(runtime.eventDisableTiming) for _ in range(LAYERS)]
    for event in events:
        runtime.eventRecord(event, bench.compute.ptr)

    def layer(
        wait: Callable[[int], None] | None, mark: Callable[[int], None] | None, only_first: bool = False
    ) -> Callable[[int], None]:
        def run(number: int) -> None:
            if wait and not (number and only_first):
                wait(number)
            for _ in range(KERNELS):
                small(values)
            if mark:
                mark(number)

        return run

    def external(number: int) -> None:
        if bench.compute.is_capturing():
            runtime.streamWaitEvent(bench.compute.ptr, events[number], 1)

    wait, mark = bench.gates.wait, bench.gates.mark
    variants: dict[str, tuple[Any, ...]] = {
        "gates": (wait, None),
        "marks": (None, mark),
        "gates and marks": (wait, mark),
        "gates and marks in one kernel": (wait, bench.gates.mark_and_wait, True),
        "external events of CUDA": (external, None),
    }
    plain = captured(bench.compute, LAYERS, layer(None, None))
    rows = []

    def add(what: str, graph: Any, before: Callable[[], None] = lambda: None, unarmed: Any = None) -> None:
        unarmed = unarmed or before  # the device has idled as long before a replay without gates
        alone = [*replay_us(bench.compute, plain, unarmed), *replay_us(bench.compute, plain, unarmed)]
        base = statistics.median(alone)
        times = [(one - base) / LAYERS for one in replay_us(bench.compute, graph, before)]
        rows.append(Row("cost", what, statistics.median(times), min(times), max(times), "us a layer"))
        total = [one * LAYERS for one in times]
        rows.append(Row("cost", f"{what}, 80 layers", statistics.median(total), min(total), max(total), "us a replay"))

    graphs = {name: captured(bench.compute, LAYERS, layer(*both)) for name, both in variants.items()}
    for name, graph in graphs.items():
        add(f"{name}, not armed", graph)
    arm_us: dict[str, list[float]] = {}

    def armed(*, load: bool, save: bool, arm: bool = True) -> Callable[[], None]:
        def before() -> None:
            loads = [bench.scheduler.onload(range(8), range(8))] if load else []
            saves = [bench.scheduler.offload(range(8, 16), range(8, 16), layerwise=True)] if save else []
            started = time.perf_counter()
            if arm:
                bench.gates.arm(loads=loads, saves=saves)
                name = " and ".join(["a load"] * load + ["a save"] * save)
                arm_us.setdefault(name, []).append((time.perf_counter() - started) * 1e6)
            elif saves:
                saves[0].cancel()
            for one in loads:
                one.wait(WAIT_S)
            time.sleep(0.002)  # the last layer is let through

        return before

    add(
        "gates, armed and satisfied",
        graphs["gates"],
        armed(load=True, save=False),
        armed(load=True, save=False, arm=False),
    )
    add("marks, armed", graphs["marks"], armed(load=False, save=True), armed(load=False, save=True, arm=False))
    for name in ("gates and marks", "gates and marks in one kernel"):
        both, without = armed(load=True, save=True), armed(load=True, save=True, arm=False)
        add(f"{name}, armed and satisfied", graphs[name], both, without)
    for name, times in arm_us.items():
        rows.append(Row("cost", f"arm with {name}, host", statistics.median(times), min(times), max(times), "us"))
    bench.close()
    for event in events:
        runtime.eventDestroy(event)
    return rows


class Burning(Model):
    """Multiplies and adds as long as its products would take: CuPy captures no cuBLAS."""

    def __init__(self, model: Model, layer_ms: float) -> None:
        self.__dict__.update(model.__dict__)
        self._burn = cupy.RawKernel(BURN, "burn")
        self._sink = cupy.zeros(1, cupy.float32)
        self._ctas = 8 * cupy.cuda.Device().attributes["MultiProcessorCount"]
        self._rounds = 20_000
        stream = cupy.cuda.Stream(non_blocking=True)
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        for _ in range(3):
            first.record(stream)
            self._products_on(stream)
            last.record(stream)
            last.synchronize()
            took_ms = cupy.cuda.get_elapsed_time(first, last)
        self._rounds = int(self._rounds * layer_ms / took_ms)

    def layer(self, layer: int, stream: cupy.cuda.Stream) -> None:
        super().layer(layer, stream)
        self._products_on(stream)

    def _products_on(self, stream: cupy.cuda.Stream) -> None:
        with stream:
            self._burn((self._ctas,), (256,), (np.int32(self._rounds), self._sink))


class Replayed(Pipeline):
    """The pipeline with its layers captured, without and with gates."""

    def __init__(self, options: argparse.Namespace, layer_ms: float) -> None:
        super().__init__(options)
        self.model = Burning(self.model, layer_ms)
        self.gates = self.scheduler.gates(timeout_s=20.0)
        self.plain = captured(self.compute, self.num_layers, lambda layer: self.model.layer(layer, self.compute))
        self.gated = captured(self.compute, self.num_layers, self._gated_layer)

    def _gated_layer(self, layer: int) -> None:
        if layer == 0:
            self.gates.wait(layer)
        self.model.layer(layer, self.compute)
        self.gates.mark_and_wait(layer)

    def graph_alone(self) -> Run:
        return self._replay(self.plain, moving=False)

    def gated_alone(self) -> Run:
        return self._replay(self.gated, moving=False)

    def gated_layer_by_layer(self) -> Run:
        return self._replay(self.gated, moving=True)

    def _replay(self, graph: Any, *, moving: bool) -> Run:
        self._poison()
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        first.record(self.compute)
        load = self.scheduler.onload(self.prefix_host, self.prefix_device) if moving else None
        save = self.scheduler.offload(self.fresh_device, self.fresh_host, layerwise=True) if moving else None
        if load and save:
            self.gates.arm(loads=[load], saves=[save])
        graph.launch(self.compute)
        for transfer in (load, save):
            if transfer:
                transfer.wait_on(self.compute)
        last.record(self.compute)
        last.synchronize()
        for transfer in (load, save):
            if transfer:
                transfer.wait(TIMEOUT_S)
        return Run(cupy.cuda.get_elapsed_time(first, last), load, save, [])


def pipeline(layers_ms: Sequence[float], repetitions: int) -> list[Row]:
    rows = []
    for layer_ms in layers_ms:
        model = Replayed(parse_pipeline(["--products", "0"]), layer_ms)
        ways = {
            "computing alone, eager": model.computing_alone,
            "computing alone, graph": model.graph_alone,
            "computing alone, graph with gates": model.gated_alone,
            "loading alone": model.onload_alone,
            "layer by layer, eager": model.layer_by_layer,
            "layer by layer, graph with gates": model.gated_layer_by_layer,
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(repetitions + 1):
            for way, run in ways.items():
                result = run()
                if turn:
                    times[way].append(result.total_ms)
                if turn == repetitions and result.onload and result.offload:
                    for difference in model.differences():
                        raise SystemExit(f"{way}: {difference}")
        for way, of_way in times.items():
            what = f"{layer_ms} ms a layer, {way}"
            rows.append(Row("pipeline", what, statistics.median(of_way), min(of_way), max(of_way), "ms"))
        middle = {way: statistics.median(of_way) for way, of_way in times.items()}
        floor = max(middle["computing alone, graph"], middle["loading alone"])
        floor += middle["loading alone"] / model.num_layers
        graph, eager = middle["layer by layer, graph with gates"], middle["layer by layer, eager"]
        for what, ratio in (("of the floor", graph / floor), ("of the eager pipeline", graph / eager)):
            rows.append(Row("pipeline", f"{layer_ms} ms a layer, graph with gates {what}", ratio, ratio, ratio, "x"))
        model.close()
    return rows


def opening(count: int) -> list[Row]:
    bench = Bench(4)
    graph = captured(bench.compute, 4, bench.gates.wait)
    times = []
    for _ in range(count):
        save = bench.scheduler.offload([0], [0], layerwise=True)
        load = bench.scheduler.onload([0], [1])  # comes only behind the marks of the save
        bench.gates.arm(loads=[load])
        graph.launch(bench.compute)
        time.sleep(0.002)
        if bench.compute.done:
            raise SystemExit("a gate was open although its load had not come")
        started = time.perf_counter()
        load.cancel()
        bench.compute.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
        save.cancel()
        bench.scheduler.drain(WAIT_S)
        bench.cache.mark_rewritten([1])
    bench.close()
    return [Row("open", "from cancel to the end of the replay", statistics.median(times), min(times), max(times), "ms")]


BURN = r"""
extern "C" __global__ void burn(int rounds, float* sink) {
  float a = threadIdx.x, b = a + 1, c = a + 2, d = a + 3;
  for (int i = 0; i < rounds; ++i) {
    a = a * 0.999f + 1;
    b = b * 0.999f + 1;
    c = c * 0.999f + 1;
    d = d * 0.999f + 1;
  }
  if (a + b + c + d == -1) *sink = a;
}
"""

CHECK = r"""
extern "C" __global__ void check(const unsigned char* block, long long size, const unsigned* expected,
                                 unsigned long long* wrong) {
  const unsigned wanted = *expected;
  if (wanted > 255) return;
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
    if (block[i] != wanted) atomicAdd(wrong, 1ULL);
  }
}
"""


def replays(count: int, per_load: int, seed: int) -> list[Row]:
    """Host block n is full of n; each replay of a load must find that in every layer."""
    layers, device_block = 8, 3
    bench = Bench(layers, num_blocks=48)
    for block in range(48):
        for name in bench.spec.tensor_names:
            for layer in range(layers):
                bench.pool.view(name, layer, block).view(np.uint8)[...] = block
    check = cupy.RawKernel(CHECK, "check")
    expected = cupy.full(1, 256, cupy.uint32)
    wrong = cupy.zeros(1, cupy.uint64)
    sizes = {name: bench.spec.tensor_block_bytes(name) for name in bench.spec.tensor_names}
    source = cupy.arange(257, dtype=cupy.uint32)
    cupy.cuda.Device().synchronize()

    def layer(number: int) -> None:
        bench.gates.wait(number)
        for name, size in sizes.items():
            address = bench.cache.tensor(name, number).data_ptr() + device_block * size
            check((1,), (256,), (np.uint64(address), np.int64(size), expected, wrong))

    graph = captured(bench.compute, layers, layer)
    rng = np.random.default_rng(seed)
    done = loads = cancelled = 0
    started = time.perf_counter()
    told = started
    while done < count:
        block = int(rng.integers(0, 40))
        dropped = rng.random() < 0.05
        saves = [bench.scheduler.offload([0], [block], layerwise=True)] if dropped else []
        load = bench.scheduler.onload([block], [device_block])  # of one that is dropped nothing comes before the save
        bench.gates.arm(loads=[load])
        value = 256 if dropped else block  # nobody looks at what a cancelled load has left
        address = source.data.ptr + 4 * value
        runtime.memcpyAsync(expected.data.ptr, address, 4, runtime.memcpyDeviceToDevice, bench.compute.ptr)
        for _ in range(1 if dropped else per_load):
            graph.launch(bench.compute)
            done += 1
        loads += 1
        if dropped:
            load.cancel()
            try:
                load.wait(WAIT_S)
            except CancelledError:
                cancelled += 1
            saves[0].cancel()
            bench.pool.mark_rewritten([block])
            bench.cache.mark_rewritten([device_block])
        if time.perf_counter() - told > 5:
            told = time.perf_counter()
            print(f"  {done:,} of {count:,} replays, {loads:,} loads, {int(wrong.get()[0])} wrong bytes", flush=True)
    bench.compute.synchronize()
    bench.scheduler.drain(WAIT_S)
    found = int(wrong.get()[0])
    seconds = time.perf_counter() - started
    bench.close()
    figures = {"replays": done, "loads": loads, "cancelled": cancelled, "wrong bytes": found}
    rows = [Row("replays", what, value, value, value, "") for what, value in figures.items()]
    return [*rows, Row("replays", "time", seconds, seconds, seconds, "s")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--layer-ms", type=float, nargs="+", default=[1.1, 2.0, 0.6], help="what a layer computes")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--replays", type=int, default=1_000_000)
    parser.add_argument("--replays-per-load", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args(arguments)
    paddle.set_device(devices.name_of(0))
    run: dict[str, Callable[[], list[Row]]] = {
        "cost": cost,
        "pipeline": lambda: pipeline(options.layer_ms, options.repetitions),
        "open": lambda: opening(50),
        "replays": lambda: replays(options.replays, options.replays_per_load, options.seed),
    }
    rows: list[Row] = []
    for section in options.sections:
        print(f"{section} ...", flush=True)
        rows += run[section]()
        for row in rows:
            if row.section == section:
                print(
                    f"  {row.what:58} {row.median:12.2f} {row.unit:12} ({row.least:.2f} to {row.most:.2f})", flush=True
                )
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "gates.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    (options.out / "gates.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(any(row.what == "wrong bytes" and row.median for row in rows))


if __name__ == "__main__":
    sys.exit(main())
