"""What a hand-over by a fabric takes beside its engine alone: python tools/bench_fabrics.py nixl [--blocks 64]

Two processes in a network that has loopback only. In each round: the engine alone, in calls of at most 1024 pieces;
the fabric's sink with the same pieces, layer by layer; and the hand-over, which also copies from the one cache to host
memory and from there to the other one. Tells the shortest time of all rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

import numpy as np

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.ops import vectorized_copy
from paddle_kv.peers import Receiver, RemoteSender
from paddle_kv.peers.fabrics import Fabric, Write, describe, register
from paddle_kv.peers.fabrics.mooncake import MooncakeFabric
from paddle_kv.peers.fabrics.nixl import NixlFabric
from paddle_kv.peers.fabrics.queued import calls
from paddle_kv.peers.fabrics.remote_pool import pieces
from paddle_kv.peers.fabrics.shared_memory import SharedMemoryFabric
from paddle_kv.tracking.keeper import Deadline

WAIT_S = 60.0
FABRICS: dict[str, Callable[[], Fabric]] = {
    "nixl": NixlFabric,
    "mooncake": lambda: MooncakeFabric("127.0.0.1"),
    "shared_memory": SharedMemoryFabric,
}


def prefill(pipe: Connection, channel: Connection, spec: KVCacheSpec, blocks: int, name: str) -> None:
    cache, pool = DeviceCache(spec, blocks, "cpu"), HostPool(spec, blocks, layout="block_first", shared=True)
    fabric = FABRICS[name]()
    register(fabric, pool)
    remote, ids = pipe.recv(), np.arange(blocks)
    ended = threading.Semaphore(0)
    with LayerwiseScheduler(cache, pool) as scheduler:
        sender = RemoteSender(scheduler, remote, fabric, channel.send_bytes)
        threading.Thread(target=_hear, args=(channel, sender.received), daemon=True).start()
        layers = [pieces(pool, ids, remote, ids, [layer], 0) for layer in range(spec.num_layers)]
        alone = engine_alone(fabric, sender._sink, [np.concatenate(lists) for lists in zip(*layers, strict=True)])
        pipe.send("ready")
        while (order := pipe.recv()) is not None:
            began_s = time.perf_counter()
            if order == "engine":
                alone()
            elif order == "sink":
                for lists in layers:
                    sender._sink.write(Write(*lists, Deadline(WAIT_S), lambda why: ended.release()))
                for _ in layers:
                    ended.acquire()
            else:
                save = sender.send(order, ids)
                for layer in range(spec.num_layers):
                    save.mark_layer_written(layer)
                save.wait(WAIT_S)
            pipe.send(time.perf_counter() - began_s)
        sender.close(WAIT_S)
    fabric.close(WAIT_S)


def engine_alone(fabric: Any, sink: Any, lists: Any) -> Callable[[], None]:
    """All of it by the calls of the engine, one after the other."""
    parts = [[one[first:end] for one in lists] for first, end in calls(lists[2])]

    def nixl() -> None:
        for sources, targets, sizes in parts:
            zeros = np.zeros_like(sizes)
            near, far = (
                fabric.agent.get_xfer_descs(np.stack([addresses, sizes, zeros], axis=1), "DRAM")
                for addresses in (sources, targets)
            )
            handle = fabric.agent.initialize_xfer("WRITE", near, far, sink._remote)
            state = fabric.agent.transfer(handle)
            while state == "PROC":
                time.sleep(0.0001)
                state = fabric.agent.check_xfer_state(handle)
            fabric.agent.release_xfer_handle(handle)

    def mooncake() -> None:
        for sources, targets, sizes in parts:
            fabric.engine.batch_transfer_sync_write(sink._remote, sources.tolist(), targets.tolist(), sizes.tolist())

    def memory() -> None:
        [(start, shared)] = sink._memory
        for sources, targets, sizes in parts:
            vectorized_copy(sources, targets - start + shared.address, sizes)

    return {"nixl": nixl, "mooncake": mooncake}.get(fabric.name, memory)


def _hear(channel: Connection, received: Callable[[bytes], object]) -> None:
    try:
        while True:
            received(channel.recv_bytes())
    except (EOFError, OSError):
        return


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("fabric", choices=FABRICS)
    options.add_argument("--blocks", type=int, default=64)
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    spec = KVCacheSpec(num_layers=given.layers, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    total_bytes = given.blocks * spec.num_layers * spec.block_bytes
    cache = DeviceCache(spec, given.blocks, "cpu")
    pool = HostPool(spec, given.blocks, layout="block_first", shared=True)
    fabric = FABRICS[given.fabric]()
    remote = describe(fabric, pool)
    scheduler = LayerwiseScheduler(cache, pool)
    receiver = Receiver(scheduler, remote=remote)
    (pipe, there), (channel, channel_there) = multiprocessing.Pipe(), multiprocessing.Pipe()
    arguments = (there, channel_there, spec, given.blocks, given.fabric)
    process = multiprocessing.get_context("spawn").Process(target=prefill, args=arguments, daemon=True)
    process.start()
    pipe.send(remote)
    pipe.recv()

    class Peer:
        send = staticmethod(channel.send_bytes)

    peer = Peer()
    hear = threading.Thread(target=_hear, args=(channel, lambda data: receiver.received(peer, data)), daemon=True)
    hear.start()

    def asked(order: Any) -> float:
        pipe.send(order)
        return float(pipe.recv())

    def hand_over() -> float:
        began_s = time.perf_counter()
        load, grant = receiver.grant(range(given.blocks), timeout_s=WAIT_S)
        pipe.send(grant)
        load.wait(WAIT_S)
        seconds = time.perf_counter() - began_s
        pipe.recv()
        return seconds

    times: dict[str, list[float]] = {"engine": [], "sink": [], "hand-over": []}
    load_before = os.getloadavg()[0]
    for number in range(given.rounds + 1):
        print(f"\rround {number} of {given.rounds}", end="", file=sys.stderr, flush=True)
        found = {"engine": asked("engine"), "sink": asked("sink"), "hand-over": hand_over()}
        for name, seconds in found.items() if number else ():  # the first one touches the pages
            times[name].append(seconds)
    print(file=sys.stderr)
    pipe.send(None)
    process.join(WAIT_S)
    for one in (receiver, scheduler, fabric):
        one.close()
    pool.close()
    print(f"{given.fabric}: {total_bytes >> 20} MiB in {given.blocks} blocks of {spec.num_layers} layers, ", end="")
    print(f"{os.cpu_count()} cores, load {load_before:.1f} before and {os.getloadavg()[0]:.1f} after")
    print("| what | shortest, ms | median, ms | GB/s | of the engine |\n| --- | --- | --- | --- | --- |")
    for name, seconds in times.items():
        share = min(times["engine"]) / min(seconds)
        rate = total_bytes / min(seconds) / 1e9
        print(f"| {name} | {min(seconds) * 1e3:.1f} | {np.median(seconds) * 1e3:.1f} | {rate:.2f} | {share:.0%} |")
    if given.json:
        given.json.write_text(json.dumps({"bytes": total_bytes, "seconds": times}))


if __name__ == "__main__":
    main()
