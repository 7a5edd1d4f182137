"""Measures how long each call of a scheduler holds the thread that makes it.

    python tools/bench_call_cost.py [--backend auto|none|cpu|cupy] [--blocks 1,256,4096,10000] [--layers 32,80]
                                    [--thread main|other] [--cold]

Microseconds on the host's clock; what the device does meanwhile is not counted. A call is timed with the device idle:
everything before it has been waited for, without a call that would tell the scheduler so. The next call therefore also
pays for what the end of the last transfer costs. "none" is a backend whose calls do nothing: what is left is the
scheduler's own. The main thread puts signal handlers off while it changes state, others need not:
``--thread other`` makes the calls in another one. With ``--cold`` 64 MiB are read before each call that
is not one of several layers' in a row, and the code and data of the library have left the caches when it begins, as
behind a model's step. ``--out`` gets bench_call_cost.csv and bench_call_cost.json.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import platform
import statistics
import sys
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

COLD_BYTES = 64 << 20  # more than the caches of a core, and than its share of those of all
CALLS = ("onload", "wait_layer", "wait", "offload", "offload layerwise", "mark_layer_written")


@dataclass
class Result:
    backend: str
    thread: str
    call: str
    num_layers: int
    num_blocks: int
    median_us: float
    p90_us: float
    most_us: float
    count: int


class Passed:
    """An event of a device that has nothing to do."""

    def wait(self) -> None:
        pass


class NoBackend:
    """See :class:`~paddle_kv.backend.protocol.Backend`: nothing is copied, and every event was passed."""

    name = "none"

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def _nothing(self, *arguments: Any) -> None:
        pass

    unbind = destroy_stream = destroy_event = record = wait_on_stream = copy_layers = _nothing

    def _number(self, *arguments: Any) -> int:
        return next(self._numbers)

    bind = create_stream = create_event = _number

    def close(self) -> None:
        pass

    def compute_stream(self, stream: Any) -> str:
        return "compute"

    def watch(self, events: Any, report: Any) -> None:
        report()

    def cancel(self, stream: Any, number: int) -> None:
        return None

    def is_complete(self, *events: int) -> bool:
        return True

    def wait(self, event: int, timeout_s: float | None) -> bool:
        return True

    def elapsed_ms(self, start: int, end: int) -> float:
        return 0.0

    def user_event(self, stream: int) -> Passed:
        return Passed()


class Stopwatch:
    """Times of single calls, by the name of the call."""

    def __init__(self, read_before: np.ndarray) -> None:
        self.times_us: dict[str, list[float]] = {call: [] for call in CALLS}
        self._read_before = read_before
        self._last = ""

    def __call__(self, name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if name != self._last:
            self._read_before.sum()
            self._last = name
        started = time.perf_counter()
        answer = call(*arguments, **named)
        self.times_us[name].append((time.perf_counter() - started) * 1e6)
        return answer


def settle(scheduler: Any, direction: str) -> None:
    """Waits for the device behind the scheduler's back."""
    event = scheduler.record_event(direction)
    (event.synchronize if hasattr(event, "synchronize") else event.wait)()


def one_round(scheduler: Any, timed: Stopwatch, host_ids: Any, device_ids: Any) -> None:
    layers = range(scheduler.device_cache.spec.num_layers)
    load = timed("onload", scheduler.onload, host_ids, device_ids)
    settle(scheduler, "onload")  # on the CPU wait_layer blocks until the layer is there
    for layer in layers:
        timed("wait_layer", load.wait_layer, layer)
    timed("wait", load.wait)
    timed("offload", scheduler.offload, device_ids, host_ids)
    settle(scheduler, "offload")
    save = timed("offload layerwise", scheduler.offload, device_ids, host_ids, layerwise=True)
    for layer in layers:
        timed("mark_layer_written", save.mark_layer_written, layer)
    settle(scheduler, "offload")


def measure(backend: str, num_layers: int, num_blocks: int, given: argparse.Namespace) -> Iterator[Result]:
    from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler

    spec = KVCacheSpec(
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=given.block_bytes // 32,
        block_size=16,
        dtype="float16",
    )
    cache = DeviceCache(spec, num_blocks, "gpu" if backend == "cupy" else "cpu")
    pool = HostPool(spec, num_blocks, layout="block_first")
    chance = np.random.default_rng(7)
    with LayerwiseScheduler(cache, pool, backend=NoBackend() if backend == "none" else backend) as scheduler:
        read = np.ones(COLD_BYTES // 8 if given.cold else 0)
        warm, timed = Stopwatch(read), Stopwatch(read)
        for i in range(given.repeats + 2):
            ids = [chance.permutation(num_blocks) for _ in range(2)]
            one_round(
                scheduler, warm if i < 2 else timed, *(ids if given.ids == "array" else map(np.ndarray.tolist, ids))
            )
    pool.close()
    for call, times in timed.times_us.items():
        p90 = statistics.quantiles(times, n=10, method="inclusive")[-1]  # the other one goes beyond the largest
        yield Result(
            backend, given.thread, call, num_layers, num_blocks, statistics.median(times), p90, max(times), len(times)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", default="auto", choices=("auto", "none", "cpu", "cupy"))
    parser.add_argument("--blocks", default="1,256,4096,10000")
    parser.add_argument("--layers", default="32,80")
    parser.add_argument("--ids", default="list", choices=("list", "array"), help="what the ids are passed as")
    parser.add_argument("--block-bytes", type=int, default=256, help="of one tensor of one layer, a multiple of 32")
    parser.add_argument("--thread", default="main", choices=("main", "other"), help="which makes the calls")
    parser.add_argument("--cold", action="store_true", help="read 64 MiB before calls")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for the CSV and the JSON")
    given = parser.parse_args()
    from paddle_kv import ops
    from paddle_kv.devices import has_gpu

    backend = ("cupy" if has_gpu() else "cpu") if given.backend == "auto" else given.backend
    row = "{:10} {:20} {:>7} {:>7} {:>10} {:>10} {:>10}"
    print(row.format("backend", "call", "layers", "blocks", "median us", "p90 us", "most us"))
    results: list[Result] = []

    def measure_all() -> None:
        for num_layers, num_blocks in itertools.product(
            *(map(int, text.split(",")) for text in (given.layers, given.blocks))
        ):
            for result in measure(backend, num_layers, num_blocks, given):
                results.append(result)
                figures = (f"{value:.1f}" for value in (result.median_us, result.p90_us, result.most_us))
                print(row.format(backend, result.call, num_layers, num_blocks, *figures), flush=True)

    if given.thread == "main":
        measure_all()
    else:
        with ThreadPoolExecutor(1) as other:
            other.submit(measure_all).result()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = [asdict(result) for result in results]
    with open(given.out / "bench_call_cost.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    about = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "ids": given.ids,
        "block_bytes": given.block_bytes,
        "cold": given.cold,
        "repeats": given.repeats,
        "build": ops.build_info(),
    }
    (given.out / "bench_call_cost.json").write_text(json.dumps({"about": about, "results": rows}, indent=1))


if __name__ == "__main__":
    main()
