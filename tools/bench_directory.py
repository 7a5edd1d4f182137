"""What a directory costs: python tools/bench_directory.py --blocks 10000000

Fills it with so many blocks (keys of 32 bytes), then serves requests with evictions all the time: lookup, load of what
is found, save of the rest, and the results of both. It tells what a request costs beyond its blocks and what a block
costs (processor time, from the medians and from the minima of the shortest and of the longest requests), and resident
memory for a block.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from hashlib import blake2b
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which nothing is installed

from paddle_kv.offload import Directory, Hello, Result
from paddle_kv.offload.policies import DEFAULT_POLICY

LENGTHS = (1, 8, 32, 128, 256)
PROMPT_BLOCKS = 256
DEVICE_IDS = list(range(PROMPT_BLOCKS))


def keys_of(prompt: int, blocks: int) -> list[bytes]:
    return [blake2b(b"%d/%d" % (prompt, number), digest_size=32).digest() for number in range(blocks)]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def serve(directory: Directory, keys: list[bytes]) -> int:
    """One request; blocks that were found."""
    with directory.lookup(keys) as found:
        count = len(found.keys)
        results = []
        if count:
            results.append(Result(directory.plan_load(found.keys, DEVICE_IDS[:count]).id, 0, 1))
    save = directory.plan_save(keys[count:], DEVICE_IDS[count : len(keys)]).job
    if save is not None:
        results.append(Result(save.id, 0, 1))
    directory.complete(results)
    return count


def fit(us_of: dict[int, float]) -> tuple[float, float]:
    """Fixed time and time of a block, from that of each length."""
    # Short requests say what one costs, long ones what a block costs.
    shortest, longest = min(us_of), max(us_of)
    block_us = (us_of[longest] - us_of[shortest]) / (longest - shortest)
    return us_of[shortest] - block_us * shortest, block_us


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--blocks", type=int, default=10_000_000)
    options.add_argument("--requests", type=int, default=400, help="of each length and kind")
    options.add_argument("--turnover", type=float, default=0.2, help="part of the blocks replaced before measuring")
    options.add_argument("--max-events", type=int, default=0)
    options.add_argument("--policy", default=DEFAULT_POLICY)
    given = options.parse_args()
    before = resident_bytes()
    directory = Directory(given.blocks, policy=given.policy, max_events=given.max_events)
    directory.join(Hello(0, 1, given.blocks))
    prompts = given.blocks // PROMPT_BLOCKS
    for prompt in range(prompts):
        serve(directory, keys_of(prompt, PROMPT_BLOCKS))
    gc.collect()
    print(f"{given.blocks} blocks: {(resident_bytes() - before) / given.blocks:.0f} bytes a block when full")
    for prompt in range(prompts, int(prompts * (1 + given.turnover))):
        serve(directory, keys_of(prompt, PROMPT_BLOCKS))
        directory.take_events()
    print(f"{(resident_bytes() - before) / given.blocks:.0f} bytes a block after a turnover of {given.turnover:.0%}")
    gc.collect()
    gc.freeze()  # as a server does: the collector need not look at what stays
    chooser = random.Random(1)
    fresh = 10**9
    for name in ("found", "replaced"):
        samples = []
        for _ in range(given.requests):
            for length in LENGTHS:
                if name == "found":
                    replaced = int(prompts * given.turnover)
                    keys = keys_of(chooser.randrange(replaced + 1, replaced + prompts), length)
                else:
                    fresh += 1
                    keys = keys_of(fresh, length)
                start = time.thread_time()
                count = serve(directory, keys)
                us = (time.thread_time() - start) * 1e6
                if count == (length if name == "found" else 0):
                    samples.append((length, us))
                directory.take_events()
        for what, of in (("median", statistics.median), ("minimum", min)):
            us_of = {one: float(of([us for length, us in samples if length == one])) for one in LENGTHS}
            request_us, block_us = fit(us_of)
            shown = ", ".join(f"{length}: {us:.0f}" for length, us in us_of.items())
            print(f"{name:9} {what:8} {request_us:6.1f} us a request, {block_us:5.2f} us a block (by blocks: {shown})")


if __name__ == "__main__":
    main()
