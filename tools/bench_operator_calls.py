"""Times the host's part of eager operator calls, by both ways to an operator, beside Paddle's own addition.

    python tools/bench_operator_calls.py [--device cpu|gpu] [--repeats 7] [--output out/bench_operator_calls.csv]

Calls that move next to nothing. CPU time of the calling thread, so that other processes do not count; medians over the
repeats, in each of which the ways take turns. On a GPU a repeat has few calls, so that none waits for room in a queue.
"registered" is Paddle's call of a custom operator, as programs have it, behind the checks that Paddle is asked for one
by one.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

from paddle_kv import devices, ops
from tests.fuzz.both_ways import registered_only

CALLS_A_REPEAT = {"cpu": 1000, "gpu": 200}


def cases(device: str) -> dict[str, Callable[[], Any]]:
    place = paddle.CPUPlace() if device == "cpu" else devices.place_of(0)

    def tensor(array: np.ndarray) -> paddle.Tensor:
        return paddle.to_tensor(array, place=place)

    key_cache, value_cache = (tensor(np.zeros((8, 2, 4, 8), "float32")) for _ in range(2))
    tokens, slots = tensor(np.zeros((4, 2, 8), "float32")), tensor(np.arange(4))
    pairs, table, ends = (
        tensor(np.array([[0, 1], [2, 3]])),
        tensor(np.array([[0, 1], [2, 3]])),
        tensor(np.array([0, 2, 4])),
    )
    if device == "cpu":
        host: Any = np.zeros((8, 2, 4, 8), "float32")
        address = host.ctypes.data
    else:
        host = pinned(8 * 2 * 4 * 8 * 4)
        address = host.ptr
    return {
        "reshape_and_cache, 4 tokens": lambda: ops.reshape_and_cache(tokens, tokens, key_cache, value_cache, slots),
        "copy_blocks, 2 pairs in a tensor": lambda: ops.copy_blocks(key_cache, value_cache, pairs),
        "copy_blocks, 2 pairs in a list": lambda: ops.copy_blocks(key_cache, value_cache, [(0, 1), (2, 3)]),
        "swap_cache_per_layer_async, 2 blocks": lambda kept=host: ops.swap_cache_per_layer_async(
            key_cache, address, 8, [0, 1], [3, 2], 0, 0
        ),
        "gather_cache, 4 tokens": lambda: ops.gather_cache(key_cache, table, ends, total_tokens=4),
    }


def pinned(num_bytes: int) -> Any:
    import cupy

    return cupy.cuda.alloc_pinned_memory(num_bytes)


def cost_us(call: Callable[[], Any], device: str) -> float:
    call()
    if device == "gpu":
        synchronize()
    start = time.thread_time_ns()
    for _ in range(CALLS_A_REPEAT[device]):
        call()
    return (time.thread_time_ns() - start) / CALLS_A_REPEAT[device] / 1000


def synchronize() -> None:
    from cupy.cuda import runtime

    runtime.deviceSynchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    given = parser.parse_args()
    paddle.set_device("cpu" if given.device == "cpu" else devices.name_of(0))
    one = paddle.ones([1])
    rows = []
    for name, call in {**cases(given.device), "paddle.add": lambda: paddle.add(one, one)}.items():
        straight, registered = [], []
        for _ in range(given.repeats):
            straight.append(cost_us(call, given.device))
            with registered_only():
                registered.append(cost_us(call, given.device))
        rows.append([name, *(round(statistics.median(figures), 1) for figures in (straight, registered))])
        print("{:40} {:6} {:6}".format(*rows[-1]), flush=True)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        with open(given.output, "w", newline="") as file:
            csv.writer(file).writerows([["call", "straight_us", "registered_us"], *rows])


if __name__ == "__main__":
    main()
