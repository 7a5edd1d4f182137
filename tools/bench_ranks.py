"""One process per GPU, each with its own cache, pool and scheduler: alone, and all at the same time.

    python tools/bench_ranks.py --gpus 2 --json ranks.json

The host pool of each process is made near its GPU (paddle_kv.memory.numa). Every byte is compared after each direction.
The ranks also look one prompt up together, of which they have saved different lengths. Exit code 1 if anything is
wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

TIMEOUT_S = 120.0


class Together:
    """What the processes share: a barrier, and the smallest of their numbers."""

    def __init__(self, context: Any, size: int) -> None:
        self._barrier = context.Barrier(size)
        self._numbers = context.Array("q", size)
        self._size = size

    def wait(self) -> None:
        self._barrier.wait(TIMEOUT_S)

    def all_reduce_min(self, rank: int, number: int) -> int:
        self._numbers[rank] = number
        self.wait()
        smallest = min(self._numbers)
        self.wait()  # nobody writes the next number before all have read
        return smallest


def run_rank(rank: int, options: argparse.Namespace, together: Together, results: Any) -> None:
    try:
        if options.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
        results.put((rank, measure(rank, options, together)))
    except BaseException:
        results.put((rank, {"error": traceback.format_exc()}))
        raise


def measure(rank: int, options: argparse.Namespace, together: Together) -> dict[str, Any]:
    import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first

    import numpy as np
    import paddle

    from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, devices
    from paddle_kv.memory.numa import near_gpu, node_of_gpu, pages_by_node
    from paddle_kv.offload import KVOffloadManager, cache_salt, lookup_common

    spec = KVCacheSpec(
        num_layers=options.layers, num_kv_heads=8, head_dim=128, block_size=options.tokens, dtype="float16"
    )
    place = devices.place_of(0) if options.gpus else paddle.CPUPlace()
    rng = np.random.default_rng(rank)
    shape = (options.blocks, *spec.block_shape("key"))
    content = rng.integers(-1000, 1000, shape).astype(np.float16)
    tensors = {
        name: [paddle.to_tensor(content + np.float16(layer), place=place) for layer in range(spec.num_layers)]
        for name in spec.tensor_names
    }
    expected = {name: [tensor.numpy() for tensor in own] for name, own in tensors.items()}
    with near_gpu(0) as bound:
        pool = HostPool(spec, options.blocks)
    cache = DeviceCache.adopt(spec, tensors)
    device_ids, host_ids = rng.permutation(options.blocks).tolist(), rng.permutation(options.blocks).tolist()
    found: dict[str, Any] = {
        "node_of_gpu": node_of_gpu(0) if options.gpus else None,
        "bound": bound,
        "pages_by_node": pages_by_node(pool.pointer("key", 0), 4096 * 64),
        "errors": [],
    }
    with LayerwiseScheduler(cache, pool) as scheduler:

        def rate(direction: str) -> float:
            times = []
            for _ in range(options.repeats):
                started = time.perf_counter()
                if direction == "offload":
                    transfer = scheduler.offload(device_ids, host_ids)
                else:
                    transfer = scheduler.onload(host_ids, device_ids)
                transfer.wait(TIMEOUT_S)
                times.append(time.perf_counter() - started)
            return transfer.bytes / statistics.median(times) / 1e9

        for direction in ("offload", "onload"):
            rate(direction)  # warms up
            for turn in range(together._size):  # alone: one after the other
                together.wait()
                if turn == rank:
                    found[f"{direction}_alone_gb_per_s"] = rate(direction)
            together.wait()
            found[f"{direction}_together_gb_per_s"] = rate(direction)
        for name, own in tensors.items():
            for layer, tensor in enumerate(own):
                if tensor.numpy().tobytes() != expected[name][layer].tobytes():
                    found["errors"].append(f"{name} of layer {layer} differs on the device")
                host = np.stack([pool.view(name, layer, block_id) for block_id in host_ids])
                if host.tobytes() != expected[name][layer][device_ids].tobytes():
                    found["errors"].append(f"{name} of layer {layer} differs on the host")

        manager = KVOffloadManager(scheduler, salt=cache_salt("bench", tp_rank=rank, tp_size=together._size))
        hashes = manager.block_hashes(range(8 * options.tokens))
        manager.save(hashes[: 8 - rank], list(range(8 - rank))).wait(TIMEOUT_S)
        with lookup_common(manager, hashes, lambda number: together.all_reduce_min(rank, number)) as lease:
            found["common_prefix_blocks"] = lease.num_blocks
            if lease.num_blocks != 8 - (together._size - 1):
                found["errors"].append(f"{lease.num_blocks} blocks in common")
        manager.close()
    pool.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="processes, each with a GPU; 0: two on the CPU backend")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16, help="per block")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = options.gpus or 2
    context = multiprocessing.get_context("spawn")
    together, results = Together(context, size), context.Queue()
    processes = [
        context.Process(target=run_rank, args=(rank, options, together, results), daemon=True) for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = dict(sorted(results.get(timeout=3 * TIMEOUT_S) for _ in processes))
    for process in processes:
        process.join(TIMEOUT_S)
    failed = False
    for rank, result in found.items():
        failed = failed or bool(result.get("error") or result["errors"])
        print(f"rank {rank}:", json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
