"""Random points of the simulated server: times to the first token beside the better of computing and loading all.

``python -m tests.offload.random_points --seeds 11 --csv points.csv``: streams of prompts of 3, 8, 30 or 100 blocks on
average, none to all of them in host memory and the others, behind them, in the tier, that come alone or ten at once, to
servers that would be busy for a tenth to 1.2 of the time if they computed all; each stream at six pairs of rates and
queues. Prints the worst points.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from paddle_kv.testing.prefixes.serving import COMPUTE, DECIDE, LOAD, serve
from paddle_kv.testing.prefixes.trace import Request
from tests.offload.test_serving import machine_of

REQUESTS, SKIPPED = 400, 50
COMPUTED_BLOCKS_PER_S = 117
LINKS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50)  # GB/s
TIERS = (0.05, 0.15, 0.5, 1.5, 3, 5)
SHOWN = 10


@dataclass(frozen=True)
class Point:
    kind: str
    blocks: int
    in_host: float
    busy: float
    link_gbps: float
    tier_gbps: float
    queue: int
    mean_ratio: float
    p99_ratio: float

    @property
    def worst(self) -> float:
        return max(self.mean_ratio, self.p99_ratio)


def stream(
    kind: str, blocks: int, in_host: float, per_s: float, rng: random.Random
) -> tuple[list[Request], list[tuple[int, int]]]:
    now_s, requests, found = 0.0, [], []
    for number in range(REQUESTS):
        if kind == "poisson":
            now_s += rng.expovariate(per_s)
        elif number % 10 == 0:
            now_s += 10 / per_s
        if kind == "poisson":
            size = max(1, int(rng.lognormvariate(math.log(blocks), 0.8)))
        else:
            size = rng.randint(1, 2 * blocks)
        total = size + (rng.randint(0, max(1, size // 3)) if rng.random() < 0.7 else size)
        requests.append(Request(now_s, 512 * total + rng.randint(1, 512), list(range(total))))
        of_host = int(in_host * size) if in_host in (0, 1) else sum(rng.random() < in_host for _ in range(size))
        found.append((of_host, size - of_host))
    return requests, found


def points(seed: int, num_streams: int) -> list[Point]:
    seeds, found = random.Random(seed), []
    for _ in range(num_streams):
        rng = random.Random(seeds.random())
        kind, blocks = rng.choice(["poisson", "burst"]), rng.choice([3, 8, 30, 100])
        in_host, busy = rng.choice([0, 0.2, 0.5, 0.8, 1]), rng.choice([0.1, 0.5, 0.9, 1.2])
        requests, places = stream(kind, blocks, in_host, busy / (blocks * 1.4 / COMPUTED_BLOCKS_PER_S), rng)
        for _ in range(6):
            link, tier, queue = rng.choice(LINKS), rng.choice(TIERS), rng.choice((0, 1, 4, 8))
            machine = machine_of(link, tier, queue=queue)
            times = [
                np.array([one.first_token_s for one in serve(requests, places, machine, way)])
                for way in (COMPUTE, LOAD, DECIDE)
            ]
            means = [one[SKIPPED:].mean() for one in times]
            lates = [np.percentile(one[SKIPPED:], 99) for one in times]
            ratios = [round(float(own / min(others)), 4) for *others, own in (means, lates)]
            found.append(Point(kind, blocks, in_host, busy, link, tier, queue, *ratios))
            print(f"\r{len(found)} points   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11])
    parser.add_argument("--streams", type=int, default=30, help="of each seed")
    parser.add_argument("--csv", type=Path)
    chosen = parser.parse_args()
    found = [point for seed in chosen.seeds for point in points(seed, chosen.streams)]
    found.sort(key=lambda point: point.worst, reverse=True)
    print(f"{len(found)} points, {sum(point.worst > 1.02 for point in found)} above 1.02; the worst:")
    for point in found[:SHOWN]:
        print(" ".join(f"{name} {value}" for name, value in asdict(point).items()))
    if chosen.csv:
        with chosen.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [column.name for column in fields(Point)])
            writer.writeheader()
            writer.writerows(map(asdict, found))


if __name__ == "__main__":
    main()
