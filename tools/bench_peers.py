"""What a hand-over between two processes of this machine takes: python tools/bench_peers.py [--direct] [--blocks 64]

A prefill and a decode process, on the CPU. In each round: a memcpy of the same bytes in one thread; one in each
of the processes at once, which is what a hand-over has to move; a save of all blocks into the pool by the one process
alone; a load of all by the other one alone; and the hand-over, in which each layer goes through both while the next one
follows. Tells the shortest time of all rounds. Then the time of a grant of
one block, from the call of `grant` to the end of the load.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

import numpy as np

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.peers import Listener, PeerBlocks, Receiver, connect

WAIT_S = 60.0


def prefill(pipe: Connection, spec: KVCacheSpec, blocks: int, exported: Any, path: str) -> None:
    direct = exported.kind == "device_cache"
    cache = DeviceCache(spec, blocks, "cpu")
    pool = PeerBlocks(DeviceCache.attach(spec, exported)) if direct else HostPool.attach(spec, exported)
    for name in spec.tensor_names:
        for layer in range(spec.num_layers):
            cache.tensor(name, layer).fill_(1.0)
    total_bytes = blocks * spec.num_layers * spec.block_bytes
    source, target = np.ones(total_bytes, np.uint8), np.zeros(total_bytes, np.uint8)
    with LayerwiseScheduler(cache, pool) as scheduler, connect(scheduler, path) as sender:
        pipe.send("ready")
        while (order := pipe.recv()) is not None:
            if order == "alone":
                began_s = time.perf_counter()
                scheduler.offload(range(blocks), range(blocks)).wait(WAIT_S)
                pipe.send(time.perf_counter() - began_s)
                continue
            if order == "memcpy":
                np.copyto(target, source)
                pipe.send("done")
                continue
            save = sender.send(order, range(len(order.host_block_ids)))
            for layer in range(spec.num_layers):
                save.mark_layer_written(layer)
            save.wait(WAIT_S)


def timed(function: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--blocks", type=int, default=64)
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--direct", action="store_true", help="straight into the other cache")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    blocks = given.blocks
    spec = KVCacheSpec(num_layers=given.layers, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    total_bytes = blocks * spec.num_layers * spec.block_bytes
    cache, pool = DeviceCache(spec, blocks, "cpu", shared=given.direct), HostPool(spec, blocks, shared=True)
    source, target = np.ones(total_bytes, np.uint8), np.zeros(total_bytes, np.uint8)
    scheduler = LayerwiseScheduler(cache, pool)
    receiver = Receiver(scheduler, direct=given.direct)
    listener = Listener(receiver)
    pipe, there = multiprocessing.Pipe()
    arguments = (there, spec, blocks, (cache if given.direct else pool).export(), listener.path)
    process = multiprocessing.get_context("spawn").Process(target=prefill, args=arguments)
    process.start()
    pipe.recv()

    def hand_over(count: int) -> None:
        load, grant = receiver.grant(range(count), timeout_s=WAIT_S)
        pipe.send(grant)
        load.wait(WAIT_S)

    def two_memcpys() -> None:
        pipe.send("memcpy")
        np.copyto(target, source)
        pipe.recv()

    def save_alone() -> float:
        pipe.send("alone")
        return float(pipe.recv())

    def load_alone() -> None:
        scheduler.onload(range(blocks), range(blocks)).wait(WAIT_S)

    names = ("memcpy", "memcpy in both processes", "save alone", "load alone", "hand-over", "one block")
    times: dict[str, list[float]] = {name: [] for name in names}
    load_before = os.getloadavg()[0]
    for number in range(given.rounds + 1):
        print(f"\rround {number} of {given.rounds}", end="", file=sys.stderr, flush=True)
        found = {
            "memcpy": timed(lambda: np.copyto(target, source)),
            "memcpy in both processes": timed(two_memcpys),
            "save alone": save_alone(),
            "load alone": timed(load_alone),
            "hand-over": timed(lambda: hand_over(blocks)),
            "one block": timed(lambda: hand_over(1)),
        }
        for name, seconds in found.items() if number else ():  # the first one touches the pages
            times[name].append(seconds)
    print(file=sys.stderr)
    pipe.send(None)
    process.join(WAIT_S)
    for one in (receiver, listener, scheduler, pool):
        one.close()
    memcpy_s = min(times["memcpy"])
    print(f"{total_bytes >> 20} MiB in {blocks} blocks of {spec.num_layers} layers, {os.cpu_count()} cores, ", end="")
    print(f"load {load_before:.1f} before and {os.getloadavg()[0]:.1f} after")
    print("| what | shortest, ms | median, ms | GB/s | of memcpy |\n| --- | --- | --- | --- | --- |")
    for name, seconds in times.items():
        moved_bytes = spec.num_layers * spec.block_bytes if name == "one block" else total_bytes
        rate = moved_bytes / min(seconds)
        share = "" if name == "one block" else f"{rate / (total_bytes / memcpy_s):.0%}"
        row = f"| {name} | {min(seconds) * 1e3:.2f} | {np.median(seconds) * 1e3:.2f} | {rate / 1e9:.2f} | {share} |"
        print(row)
    if given.json:
        given.json.write_text(json.dumps({"bytes": total_bytes, "seconds": times}))


if __name__ == "__main__":
    main()
