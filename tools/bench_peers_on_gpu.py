"""What a hand-over from one GPU process into the cache of another one takes: python tools/bench_peers_on_gpu.py

Two processes on one GPU, or on two (`--sender-gpu 1`), 512 MiB of scattered blocks of 16 layers, keys and values. For
each size of a block: one contiguous copy of the same bytes from the memory of the one process to that of the other one
(the ceiling); a copy per block from Python; a save of all blocks into the other cache, by each engine; the hand-over,
from the call of `grant` to the end of the load. Then saves one behind the other, alone and beside a loop of matrix
products of the receiver, in turns with contiguous copies at the same pace. Medians of all rounds, bytes counted once.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import sys
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

import cupy
import numpy as np
import paddle

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, devices
from paddle_kv.peers import Listener, PeerBlocks, Receiver, connect

WAIT_S = 30.0
LIFE_S = 300.0
LAYERS = 16
HEADS_AND_TOKENS = {4: (1, 16), 16: (4, 16), 32: (8, 16), 64: (8, 32), 128: (8, 64), 256: (8, 128)}  # by KiB of a block
ENGINES = ("auto", "kernel", "copy_engine")
ANY_KIND = 4  # cudaMemcpyDefault
PACE = 0.6


def make_spec(kib: int) -> KVCacheSpec:
    heads, tokens = HEADS_AND_TOKENS[kib]
    return KVCacheSpec(num_layers=LAYERS, num_kv_heads=heads, head_dim=128, block_size=tokens, dtype="float16")


def begin(gpu: int) -> None:
    faulthandler.dump_traceback_later(LIFE_S, exit=True)
    paddle.set_device(devices.name_of(gpu))
    cupy.cuda.Device(gpu).use()


def gpu_ms(stream: Any, work: Callable[[], object]) -> float:
    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    first.record(stream)
    work()
    last.record(stream)
    last.synchronize()
    return float(cupy.cuda.get_elapsed_time(first, last))


def prefill(pipe: Connection, gpu: int, kib: int, blocks: int, exported: Any, handle: bytes, path: str) -> None:
    begin(gpu)
    spec, runtime = make_spec(kib), cupy.cuda.runtime
    cache = DeviceCache(spec, 2 * blocks, devices.name_of(gpu))
    theirs = PeerBlocks(DeviceCache.attach(spec, exported))
    total_bytes = blocks * LAYERS * spec.block_bytes
    source, target = cupy.ones(total_bytes, cupy.uint8), runtime.ipcOpenMemHandle(handle)
    stream = cupy.cuda.Stream(non_blocking=True)
    schedulers = {engine: LayerwiseScheduler(cache, theirs, compute_stream=stream, engine=engine) for engine in ENGINES}
    sender = connect(schedulers["auto"], path)
    runtime.deviceSynchronize()

    def contiguous() -> float:
        return gpu_ms(stream, lambda: runtime.memcpyAsync(target, source.data.ptr, total_bytes, ANY_KIND, stream.ptr))

    def plain(source_ids: list[int], target_ids: list[int]) -> float:
        size_bytes = spec.tensor_block_bytes("key")
        began_s = time.perf_counter()
        for layer in range(LAYERS):
            for name in spec.tensor_names:
                here, there = cache.pointer(name, layer), theirs.pointer(name, layer)
                for one, other in zip(source_ids, target_ids, strict=True):
                    first, last = there + other * size_bytes, here + one * size_bytes
                    runtime.memcpyAsync(first, last, size_bytes, ANY_KIND, stream.ptr)
        stream.synchronize()
        return (time.perf_counter() - began_s) * 1e3

    def save(engine: str, source_ids: list[int], target_ids: list[int]) -> float:
        moved = schedulers[engine].offload(source_ids, target_ids)
        moved.wait(WAIT_S)
        return float(moved.elapsed_ms)

    def go_on(
        engine: str, source_ids: list[int], target_ids: list[int], seconds: float, every_s: float
    ) -> tuple[int, float]:
        """Saves one behind the other, two in flight, at most one in so many seconds; how many, and the time that they
        took."""
        began_s, flying, count = time.perf_counter(), [], 0
        while time.perf_counter() - began_s < seconds:
            time.sleep(max(0.0, began_s + count * every_s - time.perf_counter()))
            flying.append(schedulers[engine].offload(source_ids, target_ids))
            if len(flying) == 2:
                flying.pop(0).wait(WAIT_S)
            count += 1
        for one in flying:
            one.wait(WAIT_S)
        return count, time.perf_counter() - began_s

    def copy_on(seconds: float, every_s: float) -> tuple[int, float]:
        """The same with contiguous copies."""
        began_s, count = time.perf_counter(), 0
        while time.perf_counter() - began_s < seconds:
            time.sleep(max(0.0, began_s + count * every_s - time.perf_counter()))
            contiguous()
            count += 1
        return count, time.perf_counter() - began_s

    def idle(seconds: float) -> tuple[int, float]:
        time.sleep(seconds)
        return 0, seconds

    def send(grant: Any, source_ids: list[int]) -> list[float]:
        """When it was asked for, accepted, marked, and over here: of the clock that both processes have."""
        times = [time.monotonic()]
        moved = sender.send(grant, source_ids)
        times.append(time.monotonic())
        for layer in range(LAYERS):
            moved.mark_layer_written(layer)
        times.append(time.monotonic())
        moved.wait(WAIT_S)
        times.append(time.monotonic())
        return times

    orders = {"contiguous": contiguous, "plain": plain, "save": save, "go_on": go_on, "copy_on": copy_on}
    orders |= {"send": send, "idle": idle}
    pipe.send(None)
    while (order := pipe.recv()) is not None:
        pipe.send(orders[order[0]](*order[1:]))
    sender.close(WAIT_S)
    for one in schedulers.values():
        one.close(WAIT_S)


class Products:
    """A loop of matrix products, as a model would run."""

    def __init__(self, size: int = 4096) -> None:
        self._a = cupy.random.random((size, size), dtype=cupy.float32).astype(cupy.float16)
        self._c = cupy.empty_like(self._a)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._count = 1
        self._count = max(1, int(100.0 / min(self.run_ms() for _ in range(5))))

    def run_ms(self) -> float:
        """Of one product."""

        def work() -> None:
            with self._stream:
                for _ in range(self._count):
                    cupy.matmul(self._a, self._a, out=self._c)

        return gpu_ms(self._stream, work) / self._count


def receive(pipe: Connection) -> Any:
    assert pipe.poll(120.0), "the other process does not answer"
    return pipe.recv()


def measure(kib: int, given: argparse.Namespace, products: Products) -> list[dict[str, Any]]:
    spec = make_spec(kib)
    blocks = (given.mib << 20) // (LAYERS * spec.block_bytes)
    total_bytes = blocks * LAYERS * spec.block_bytes
    rng = np.random.default_rng(0)
    sources, targets = (rng.permutation(2 * blocks)[:blocks].tolist() for _ in range(2))
    cache, pool = DeviceCache(spec, 2 * blocks, devices.name_of(0)), HostPool(spec, 1)
    floor = cupy.cuda.runtime.malloc(total_bytes)
    scheduler = LayerwiseScheduler(cache, pool)
    receiver = Receiver(scheduler, direct=True)
    listener = Listener(receiver)
    pipe, there = multiprocessing.Pipe()
    handle = cupy.cuda.runtime.ipcGetMemHandle(floor)
    arguments = (there, given.sender_gpu, kib, blocks, cache.export(), handle, listener.path)
    process = multiprocessing.get_context("spawn").Process(target=prefill, args=arguments, daemon=True)
    process.start()
    there.close()
    rows: list[dict[str, Any]] = []
    try:
        receive(pipe)

        def ask(*order: Any) -> Any:
            pipe.send(order)
            return receive(pipe)

        phases: dict[str, list[float]] = {}

        def hand_over() -> float:
            began_s = time.monotonic()
            load, grant = receiver.grant(targets, timeout_s=WAIT_S)
            granted_s = time.monotonic()
            pipe.send(("send", grant, sources))
            load.wait(WAIT_S)
            over_s = time.monotonic()
            asked_s, accepted_s, marked_s, saved_s = receive(pipe)
            ends = {"granted": granted_s, "asked for by the sender": asked_s, "accepted": accepted_s}
            ends |= {"marked": marked_s, "saved": saved_s, "loaded": over_s}
            for name, end_s in ends.items():
                phases.setdefault(name, []).append((end_s - began_s) * 1e3)
            return (over_s - began_s) * 1e3

        ways: dict[str, Callable[[], float]] = {"contiguous copy": lambda: ask("contiguous")}
        for engine in ENGINES:
            ways[f"save, {engine}"] = lambda engine=engine: ask("save", engine, sources, targets)  # type: ignore[misc]
        ways["hand-over"] = hand_over
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(given.rounds + 2):
            for name, way in ways.items():
                took_ms = way()
                if number >= 2:
                    times[name].append(took_ms)
        times["a copy a block from Python"] = [ask("plain", sources, targets)]
        floor_ms = float(np.median(times["contiguous copy"]))
        for name, found in times.items():
            ms = float(np.median(found))
            rows.append({"KiB": kib, "what": name, "ms": ms, "GB/s": total_bytes / ms / 1e6, "of copy": floor_ms / ms})
        ends_ms = ", ".join(f"{name} {np.median(found):.2f}" for name, found in phases.items())
        print(f"hand-over of {kib} KiB, ms since the call of grant: {ends_ms}", flush=True)
        floor_s = floor_ms / 1e3

        def tell(name: str, count: int, took_s: float, **more: float) -> None:
            rate = count * total_bytes / took_s / 1e9
            share = rate / (total_bytes / floor_ms / 1e6)
            rows.append(
                {"KiB": kib, "what": name, "ms": took_s / max(1, count) * 1e3, "GB/s": rate, "of copy": share, **more}
            )

        tell("saves without a pause, auto", *ask("go_on", "auto", sources, targets, given.seconds, 0.0))

        def slowed_by(order: tuple[Any, ...]) -> tuple[float, int, float]:
            """By what products take longer beside it; how often it was done, and the time that it took."""
            alone = [products.run_ms() for _ in range(3)]
            pipe.send(order)
            time.sleep(0.05)
            beside, end_s = [], time.perf_counter() + given.seconds - 0.1
            while time.perf_counter() < end_s:
                beside.append(products.run_ms())
            count, took_s = receive(pipe)
            alone += [products.run_ms() for _ in range(3)]  # also behind: the clock of the GPU changes
            return float(np.median(beside) / np.median(alone)) - 1, count, took_s

        orders: dict[str, tuple[Any, ...]] = {
            f"saves without a pause, {engine}": ("go_on", engine, sources, targets, given.seconds, 0.0)
            for engine in ENGINES
        }
        paced_s = floor_s / PACE
        orders[f"saves at {PACE} of the copy, auto"] = ("go_on", "auto", sources, targets, given.seconds, paced_s)
        orders[f"contiguous copies at {PACE} of the copy"] = ("copy_on", given.seconds, paced_s)
        orders["nothing"] = ("idle", given.seconds)
        turns: dict[str, list[tuple[float, int, float]]] = {name: [] for name in orders}
        for _ in range(given.turns):
            for name, order in orders.items():
                turns[name].append(slowed_by(order))
        for name, of_turns in turns.items():
            slowed, counts, took = (np.array(column) for column in zip(*of_turns, strict=True))
            spread = {"products slowed": np.median(slowed), "least": slowed.min(), "most": slowed.max()}
            told = {column: float(value) for column, value in spread.items()}
            tell(f"{name}, beside products", int(counts.sum()), float(took.sum()), **told)
        pipe.send(None)
        process.join(WAIT_S)
    finally:
        process.kill()
        for one in (receiver, listener, scheduler, pool):
            one.close()
        cupy.cuda.runtime.free(floor)
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--kib", type=int, nargs="+", choices=HEADS_AND_TOKENS, default=[4, 32, 128])
    options.add_argument("--mib", type=int, default=512)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--seconds", type=float, default=1.0, help="of saves beside products, each turn")
    options.add_argument("--turns", type=int, default=5, help="of all ways beside products")
    options.add_argument("--sender-gpu", type=int, default=0, help="the receiver is on GPU 0")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    begin(0)
    products = Products()
    rows: list[dict[str, Any]] = []
    print("| KiB | what | ms | GB/s | of the contiguous copy | products slowed |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kib in given.kib:
        for row in measure(kib, given, products):
            slowed = ""
            if "products slowed" in row:
                slowed = f"{row['products slowed']:.1%} ({row['least']:.1%} to {row['most']:.1%})"
            line = f"| {kib} | {row['what']} | {row['ms']:.2f} | {row['GB/s']:.0f} | {row['of copy']:.0%} | {slowed} |"
            print(line, flush=True)
            rows.append(row)
    if given.json:
        given.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
