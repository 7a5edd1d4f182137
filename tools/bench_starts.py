"""Measures how long the start of a transfer holds its caller, each behind the wait for the one before, on a GPU.

    python tools/bench_starts.py [--blocks 1,256] [--layers 1,32,80] [--rounds 5] [--stream given|paddle] [--out FOLDER]

Three ways in turn in one process: "alone" is a transfer that comes while nothing else is in flight, as the scheduler
starts it; "noted" the same with all of it noted in the tracker first, as others are; "bare" nothing but the calls that
no start can do without (ids checked, whether the compute stream is captured, an event on it, the submission with events
that are there already). "wait_layer" is the median over the layers of one load, all of which are submitted and most in
flight. Microseconds on the host's clock: medians, and the mean of the quickest tenth. ``--stream
paddle``: the scheduler looks for Paddle's current stream at each call. ``--out`` gets bench_starts.csv and
bench_starts.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BLOCK_SIZE, HEAD_DIM = 16, 128  # 4 KiB a tensor and block
STEPS, COLD_STEPS = 25, 4  # of each round; the first ones of a way are left out
BARE_TOKEN = 1 << 60  # of transfers that the scheduler knows nothing of


class Times:
    """Microseconds by (blocks, layers, way, call)."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, int, str, str], list[float]] = {}

    def note(self, key: tuple[int, int, str, str], seconds: float) -> None:
        self.of.setdefault(key, []).append(seconds * 1e6)

    def rows(self) -> Iterator[dict[str, Any]]:
        for (blocks, layers, way, call), found in self.of.items():
            quickest = sorted(found)[: max(1, len(found) // 10)]
            yield {
                "blocks": blocks,
                "layers": layers,
                "way": way,
                "call": call,
                "median_us": round(statistics.median(found), 1),
                "quickest_tenth_us": round(statistics.mean(quickest), 1),
                "count": len(found),
            }


def bare(scheduler: Any, compute: int, host_ids: list[int], device_ids: list[int]) -> float:
    """The calls of a load that no start can do without; it is over on return. Seconds."""
    from paddle_kv.backend import binding, transfer_queue
    from paddle_kv.ops import _arguments

    backend, num_layers = scheduler.backend, scheduler.device_cache.spec.num_layers
    events = backend.create_events(2 + num_layers)
    waits: list[Any] = [[events[0]], *[()] * (num_layers - 1)]
    started = time.perf_counter()
    device = _arguments.plain_id_array(device_ids, scheduler.device_cache.num_blocks, distinct=True)
    host = _arguments.plain_id_array(host_ids, scheduler.host_pool.num_blocks, distinct=False)
    transfer_queue.is_capturing(0, compute)
    transfer_queue.record(0, events[0], compute)
    assert device is not None and host is not None
    transfer_queue.submit(
        plan=scheduler.resources.binding,
        direction=binding.DIRECTION_CODES["onload"],
        engine=0,
        device_ids=device,
        host_ids=host,
        layers=range(num_layers),
        layers_per_event=1,
        waits=waits,
        start_event=events[1],
        record_events=events[2:],
        stream=scheduler.resources.streams["onload"].ptr,
        token=BARE_TOKEN,
    )
    taken_s = time.perf_counter() - started
    while not transfer_queue.query(0, events[-1]):
        time.sleep(50e-6)
    backend.destroy_events(events)
    return taken_s


def one_step(scheduler: Any, way: str, compute: int, ids: tuple[list[int], list[int]]) -> Iterator[tuple[str, float]]:
    """Each call with its seconds."""
    host_ids, device_ids = ids
    if way == "bare":
        yield "onload", bare(scheduler, compute, host_ids, device_ids)
        return
    for name, given in (("onload", ids), ("offload", ids[::-1])):
        if way == "noted":
            scheduler.resources.reserve.clear()
        started = time.perf_counter()
        transfer = getattr(scheduler, name)(*given)
        begun = time.perf_counter()
        is_alone = transfer._alone is not None
        transfer.wait()
        over = time.perf_counter()
        if is_alone == (way == "alone"):  # else the keeper was quicker to tell of the end before: a start as any other
            yield name, begun - started
            yield f"{name} and wait", over - started
    if way == "noted":
        scheduler.resources.reserve.clear()
    load = scheduler.onload(*ids)
    load.wait_layer(load.num_layers - 1)  # all of it is submitted from here on
    is_alone, taken_s = load._alone is not None, []
    for layer in range(load.num_layers - 1):
        started = time.perf_counter()
        load.wait_layer(layer)
        taken_s.append(time.perf_counter() - started)
    load.wait()
    if taken_s and is_alone == (way == "alone"):
        yield "wait_layer", statistics.median(taken_s)


def measure(given: argparse.Namespace) -> Times:
    import cupy

    from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler

    times, chance = Times(), np.random.default_rng(3)
    stream = cupy.cuda.Stream(non_blocking=True)
    for num_layers in given.layers:
        spec = KVCacheSpec(
            num_layers=num_layers, num_kv_heads=1, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype="float16"
        )
        for num_blocks in given.blocks:
            print(f"{num_blocks} blocks, {num_layers} layers", file=sys.stderr, flush=True)
            cache, pool = DeviceCache(spec, num_blocks, "gpu:0"), HostPool(spec, num_blocks, layout="block_first")
            named = stream if given.stream == "given" else None
            with LayerwiseScheduler(cache, pool, compute_stream=named) as scheduler:
                compute = scheduler.compute_stream(None)
                for _ in range(given.rounds):
                    for way in ("alone", "noted", "bare"):
                        for step in range(COLD_STEPS + STEPS):
                            ids = chance.permutation(num_blocks).tolist(), chance.permutation(num_blocks).tolist()
                            for call, seconds in one_step(scheduler, way, compute, ids):
                                if step >= COLD_STEPS:
                                    times.note((num_blocks, num_layers, way, call), seconds)
            pool.close()
    return times


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=numbers, default=[1, 256])
    parser.add_argument("--layers", type=numbers, default=[1, 32, 80])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stream", choices=("given", "paddle"), default="given")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = list(measure(given).rows())
    for row in rows:
        what = f"{row['blocks']} blocks, {row['layers']} layers, {row['way']}, {row['call']}"
        print(f"{what}: {row['median_us']} us, quickest tenth {row['quickest_tenth_us']} us")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        with (given.out / "bench_starts.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        (given.out / "bench_starts.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
