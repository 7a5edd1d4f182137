"""What the block index costs for each block, by policy: python tools/bench_index.py --csv rows.csv --json rows.json

lookup   a block that is there
insert   an absent block, into free room
replace  an absent block, in the place of an evicted one
evict    a block that goes for nothing in particular
trace    all of these as a trace has them (--trace, one JSON object per request), by its clock: a policy that learns
         when blocks come back learns what it would in a server

Keys are 32-byte hashes, as a server's. Times are processor time of this process, the best and the median of --repeats;
of a trace, the best is the sum of what each prompt took at best, since other work of the machine gets into any repeat.
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

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

from paddle_kv.offload import POLICIES, BlockIndex, make_policy
from paddle_kv.testing.prefixes.trace import read_trace

PROMPT_BLOCKS = 64


@dataclass(frozen=True)
class Row:
    operation: str
    policy: str
    capacity_blocks: int
    blocks: int
    best_us_per_block: float
    median_us_per_block: float


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


def measure_trace(policy: str, capacity: int, repeats: int, prompts: list[tuple[float, list[bytes]]]) -> Row:
    blocks = sum(len(prompt) for _, prompt in prompts)
    times: list[list[float]] = []
    now_s = [0.0]
    for _ in range(repeats):
        index: BlockIndex[bytes] = BlockIndex(make_policy(policy, capacity, lambda: now_s[0]), capacity)
        free_slots = list(range(capacity))
        times.append([])
        for now_s[0], prompt in prompts:
            start = time.process_time()
            index.admit(prompt[index.lookup(prompt) :], free_slots)
            times[-1].append((time.process_time() - start) * 1e6 / blocks)
    best = sum(map(min, zip(*times, strict=True)))
    return Row(
        "trace", policy, capacity, blocks, round(best, 3), round(statistics.median([sum(one) for one in times]), 3)
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
            if prompts:
                measured.append(measure_trace(policy, capacity, given.repeats, prompts))
            for row in measured:
                print(
                    f"{row.policy:8}{row.capacity_blocks:10} {row.operation:10}"
                    f"{row.best_us_per_block:14.2f}{row.median_us_per_block:9.2f}"
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
