"""How far the learning policy is from the order of use, on made prompts and on a trace.

    python -m tests.offload.policy_floor --csv rows.csv [--trace conversation_trace.jsonl] [--seeds 101 102]

Capacities are parts of the distinct blocks. The table has the lowest difference of each stream, and all of them in the
CSV, with those of the policies that ``--also`` names.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from paddle_kv.testing.prefixes.optimum import optimal_hits
from paddle_kv.testing.prefixes.trace import Request, read_trace
from tests.offload.mixed_streams import MIXED_STREAMS
from tests.offload.served import hit_rate
from tests.offload.streams import Prompts

SHARES = (0.003, 0.01, 0.03, 0.06, 0.1, 0.17, 0.25, 0.35, 0.45, 0.6)
POLICIES = ("lru", "survival")
Row = dict[str, Any]


def rate(policy: str, capacity_blocks: int, prompts: Prompts) -> float:
    """Of hits, in percent."""
    if policy != "optimum":
        return hit_rate(policy, capacity_blocks, prompts)
    found = optimal_hits([Request(arrival_s, 0, prompt) for arrival_s, prompt in prompts], capacity_blocks)[0]
    return 100 * sum(found) / sum(len(prompt) for _, prompt in prompts)


def measure(name: str, seed: int, make: Callable[[int], Prompts], policies: tuple[str, ...]) -> list[Row]:
    prompts = make(seed)
    distinct = len({key for _, prompt in prompts for key in prompt})
    rows = []
    for share in SHARES:
        capacity = max(1, int(share * distinct))
        rates = {policy: round(rate(policy, capacity, prompts), 3) for policy in policies}
        rows.append({"stream": name, "seed": seed, "share": share, "capacity_blocks": capacity, **rates})
    return rows


def traced(path: Path, seed: int) -> Prompts:
    """It is what it is."""
    return [(request.arrival_s, request.block_ids) for request in read_trace(path)]


def made(name: str, seed: int) -> Prompts:
    return MIXED_STREAMS[name](seed)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--csv", type=Path)
    options.add_argument("--trace", type=Path)
    options.add_argument("--seeds", type=int, nargs="+", default=[101])
    options.add_argument("--streams", nargs="*", default=list(MIXED_STREAMS), choices=list(MIXED_STREAMS))
    options.add_argument("--also", nargs="*", default=[], choices=["arc", "s3fifo", "optimum"])
    options.add_argument("--processes", type=int, default=2)
    given = options.parse_args()
    policies = (*POLICIES, *given.also)
    jobs = [(name, seed, partial(made, name)) for name in given.streams for seed in given.seeds]
    if given.trace is not None:
        jobs.insert(0, (given.trace.stem, 0, partial(traced, given.trace)))
    rows: list[Row] = []
    with ProcessPoolExecutor(given.processes) as pool:
        print(f"{'survival - lru, points':30} lowest " + "".join(f"{share:8.1%}" for share in SHARES))
        for found in pool.map(partial(_measure, policies=policies), jobs):
            rows += found
            ahead = [row["survival"] - row["lru"] for row in found]
            print(f"{found[0]['stream']:30} {min(ahead):6.2f} " + "".join(f"{one:8.2f}" for one in ahead), flush=True)
    if given.csv is not None:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def _measure(job: tuple[str, int, Callable[[int], Prompts]], policies: tuple[str, ...]) -> list[Row]:
    return measure(*job, policies)


if __name__ == "__main__":
    main()
