"""What the block index costs for each block, by policy: python tools/bench_index.py --csv rows.csv --json rows.json

lookup   a block that is there
insert   an absent block, into free room
replace  an absent block, in the place of an evicted one
evict    a block that goes for nothing in particular
trace    all of these as a trace has them (--trace, one JSON object per request), by its clock: a policy that learns
         when blocks come back learns what it would in a server
decide   the same with the decision to load or to compute, wherever something is found: the second half of it in a tier

Keys are 32-byte hashes, as a server's. Times are processor time of this process, the best and the median of --repeats;
of a trace, the best is the sum of what each prompt took at best, since other work of the machine gets into any repeat.
With --trace there is also the cost of a prompt and of a block, by a line through the best times of all prompts.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

from paddle_kv.offload import POLICIES, BlockIndex, make_policy
from paddle_kv.offload.decision import Prompt, decide
from paddle_kv.offload.rates import RateSnapshot
from paddle_kv.testing.prefixes.trace import TOKENS_PER_BLOCK, read_trace

PROMPT_BLOCKS = 64
RATES = RateSnapshot(1e-3, 3e-3, 1 / 60_000, 1 / 60_000 / 50_000, TOKENS_PER_BLOCK)


@dataclass(frozen=True)
class Row:
    operation: str
    policy: str
    capacity_blocks: int
    blocks: int
    best_us_per_block: float
    median_us_per_block: float
    line_us: tuple[float, float] | None = None  # a prompt, and a block more, of the best times


def hash_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def prompts_of(first: int, num_blocks: int) -> list[list[bytes]]:
    return [
        [hash_of(number) for number in range(start, start + PROMPT_BLOCKS)]
        for start in range(first, first + num_blocks, PROMPT_BLOCKS)
    ]


def steps(policy: str, capacity: int) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """Operation, blocks, and what is timed, each on what the one before has left."""
    index: BlockIndex[bytes] = BlockIndex(make_policy(policy, capacity), capacity)
    free_slots = list(range(capacity))
    prompts = [prompts_of(number * 2 * capacity, capacity // 2) for number in range(3)]
    blocks = sum(map(len, prompts[0]))
    admit, lookup = index.admit, index.lookup
    for prompt in prompts_of(10**9, capacity // 2):
        admit(prompt, free_slots)
    yield "insert", blocks, lambda: [admit(prompt, free_slots) for prompt in prompts[0]] and None
    yield "lookup", blocks, lambda: [lookup(prompt) for prompt in prompts[0]] and None
    for number in (1, 2):
        timed = lambda number=number: [admit(prompt, free_slots) for prompt in prompts[number]] and None  # noqa: E731
        yield "replace", blocks, timed
    yield "evict", blocks, lambda: [index.evict(PROMPT_BLOCKS) for _ in prompts[0]] and None


def seconds(timed: Callable[[], None]) -> float:
    start = time.process_time()
    timed()
    return time.process_time() - start


def measure(policy: str, capacity: int, repeats: int) -> list[Row]:
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for operation, blocks, timed in steps(policy, capacity):
            found.setdefault(operation, []).append(seconds(timed) * 1e6 / blocks)
    return [row_of(operation, policy, capacity, blocks, times) for operation, times in found.items()]


def measure_trace(
    policy: str, capacity: int, repeats: int, prompts: list[tuple[float, list[bytes]]], decides: bool
) -> Row:
    sizes = np.array([len(prompt) for _, prompt in prompts])
    times_us = np.empty((repeats, len(prompts)))
    now_s = [0.0]
    for repeat in range(repeats):
        index: BlockIndex[bytes] = BlockIndex(make_policy(policy, capacity, lambda: now_s[0]), capacity)
        free_slots = list(range(capacity))
        for number, (now_s[0], prompt) in enumerate(prompts):
            start = time.process_time()
            found = index.lookup(prompt)
            if decides and found:
                tokens = TOKENS_PER_BLOCK * found, TOKENS_PER_BLOCK * len(prompt)
                decide(RATES, Prompt((0, found // 2), (found // 2, found), *tokens), chunk_tokens=4096, num_layers=80)
            index.admit(prompt[found:], free_slots)
            times_us[repeat, number] = (time.process_time() - start) * 1e6
    best, blocks = times_us.min(axis=0), int(sizes.sum())
    (a_prompt, a_block), *_ = np.linalg.lstsq(np.stack([np.ones(len(sizes)), sizes], axis=1), best, rcond=None)
    return Row(
        "decide" if decides else "trace",
        policy,
        capacity,
        blocks,
        round(float(best.sum()) / blocks, 3),
        round(float(np.median(times_us.sum(axis=1))) / blocks, 3),
        (round(float(a_prompt), 1), round(float(a_block), 2)),
    )


def row_of(operation: str, policy: str, capacity: int, blocks: int, times: list[float]) -> Row:
    return Row(operation, policy, capacity, blocks, round(min(times), 3), round(statistics.median(times), 3))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--capacity", type=int, nargs="+", default=[1 << 12, 1 << 16], help="blocks")
    options.add_argument("--trace", type=Path, help="also replay this trace")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--csv", type=Path)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    requests = read_trace(given.trace) if given.trace else []
    prompts = [(one.arrival_s, [hash_of(i) for i in one.block_ids]) for one in requests]
    rows: list[Row] = []
    print(f"{'policy':8}{'capacity':>10} {'operation':10}{'best us/block':>14}{'median':>9}")
    for capacity in given.capacity:
        for policy in POLICIES:
            measured = measure(policy, capacity, given.repeats)
            for decides in (False, True) if prompts else ():
                measured.append(measure_trace(policy, capacity, given.repeats, prompts, decides))
            for row in measured:
                print(
                    f"{row.policy:8}{row.capacity_blocks:10} {row.operation:10}"
                    f"{row.best_us_per_block:14.2f}{row.median_us_per_block:9.2f}"
                    + (f"    {row.line_us[0]} us a prompt and {row.line_us[1]} us a block" if row.line_us else "")
                )
            rows += measured
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [column.name for column in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
