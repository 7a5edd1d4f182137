"""A trace of requests through a directory and two ranks in processes of their own, with real bytes.

    python -m tests.offload.ranks_replay conversation_trace.jsonl --requests 12000

The engine is that of examples/two_ranks.py: on each rank each block that is loaded is compared. A trace that is shorter
is served again with other ids, until there are so many requests.
"""

from __future__ import annotations

import argparse
import functools
import time
from hashlib import blake2b
from pathlib import Path

from examples.two_ranks import Engine, Sizes, start_process
from paddle_kv.testing.prefixes.trace import Request, read_trace

TIMEOUT_S = 60.0  # nobody fails here: it is for a machine that has much else to do


def keys_of(request: Request, turn: int) -> list[bytes]:
    return [blake2b(b"%d/%d" % (turn, one), digest_size=32).digest() for one in request.block_ids]


def replay(
    requests: list[Request], count: int, sizes: Sizes, method: str = "spawn", *, settled: bool = False
) -> Engine:
    """The engine behind ``count`` prompts; it is closed. ``settled``: each finds what those before it have saved."""
    engine = Engine(functools.partial(start_process, sizes=sizes, method=method), sizes, timeout_s=TIMEOUT_S)
    try:
        engine.wait_until_ready()
        for number in range(count):
            turn, position = divmod(number, len(requests))
            engine.serve(keys_of(requests[position], turn))
            if settled:
                engine.settle()
        engine.settle()
    finally:
        engine.close()
    return engine


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("trace", type=Path)
    options.add_argument("--requests", type=int, default=12_000)
    options.add_argument("--host-blocks", type=int, default=5000)
    options.add_argument(
        "--block-elements", type=int, default=256, help="int32 of a tensor of a layer; 6 tensors a block"
    )
    given = options.parse_args()
    requests = list(read_trace(given.trace))
    longest = max(len(one.block_ids) for one in requests)
    sizes = Sizes(2 * longest, given.host_blocks, given.block_elements)
    start = time.monotonic()
    engine = replay(requests, given.requests, sizes)
    taken_s = time.monotonic() - start
    moved = (engine.loaded_blocks + engine.directory.stats()["saved_blocks"]) * given.block_elements * 4 * 6 * 2
    print(
        f"{given.requests} requests in {taken_s:.1f} s: {engine.loaded_blocks} blocks loaded, "
        f"{engine.directory.stats()['saved_blocks']} saved, {moved / 1e9:.2f} GB moved by two ranks, "
        f"{engine.recomputed_blocks} computed again, {engine.wrong} loads with wrong bytes"
    )


if __name__ == "__main__":
    main()
