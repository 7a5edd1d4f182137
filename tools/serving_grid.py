"""Time to the first token over the rates of link and tier: everything computed, everything loaded, and the library.

``python tools/serving_grid.py --csv grid.csv --plot grid.png [--trace conversation_trace.jsonl]``: a simulated server,
see docs/never_slower.md. For each tier the crossing, where computing and loading take as long as each other, is
searched too.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

from paddle_kv.testing.prefixes.conversations import conversations
from paddle_kv.testing.prefixes.replay import Costs, replay
from paddle_kv.testing.prefixes.serving import COMPUTE, DECIDE, LOAD, Machine, serve
from paddle_kv.testing.prefixes.trace import Request, read_trace

LINKS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)  # GB/s
TIERS = (0.05, 0.15, 0.5, 1.5, 5.0)
COSTS = Costs(512 * 40_960, 80, 50e9, 60_000.0, 512, 5e9)  # Llama-3.1-70B on 8 ranks
HALVINGS = 8


@dataclass(frozen=True)
class Row:
    """One point; ``place``: "grid", or "crossing". ``*_ratio``: of the library to the better of the two others."""

    place: str
    link_gbps: float
    tier_gbps: float
    compute_mean_s: float
    compute_p50_s: float
    compute_p99_s: float
    load_mean_s: float
    load_p50_s: float
    load_p99_s: float
    decide_mean_s: float
    decide_p50_s: float
    decide_p99_s: float
    mean_ratio: float
    p99_ratio: float


class Grid:
    def __init__(self, requests: Sequence[Request], host_blocks: int, tier_blocks: int, queue: int) -> None:
        run = replay(requests, "lru", host_blocks, COSTS, tier_blocks=tier_blocks)
        self._requests, self._queue = requests, queue
        self._found = [(hits - below, below) for hits, below in zip(run.hits, run.tier_hits, strict=True)]
        self._compute = self._figures(COSTS, COMPUTE)
        self.facts = f"{len(requests)} requests, {100 * run.hit_rate:.1f} % of {run.num_blocks} blocks found, " + (
            f"{100 * sum(run.tier_hits) / run.num_blocks:.1f} % in the tier"
        )

    def row(self, link_gbps: float, tier_gbps: float, place: str = "grid") -> Row:
        costs = replace(COSTS, link_bytes_per_s=link_gbps * 1e9, tier_bytes_per_s=tier_gbps * 1e9)
        load, own = self._figures(costs, LOAD), self._figures(costs, DECIDE)
        ratios = [own[i] / min(self._compute[i], load[i]) for i in (0, 2)]
        return Row(place, link_gbps, tier_gbps, *self._compute, *load, *own, *ratios)

    def crossing(self, tier_gbps: float) -> Row | None:
        """None if loading is never as quick as computing."""

        def is_loading_quicker(link_gbps: float) -> bool:
            costs = replace(COSTS, link_bytes_per_s=link_gbps * 1e9, tier_bytes_per_s=tier_gbps * 1e9)
            return self._figures(costs, LOAD)[0] < self._compute[0]

        low, high = LINKS[0], LINKS[-1]
        if not is_loading_quicker(high):
            return None
        for _ in range(HALVINGS):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if is_loading_quicker(middle) else (middle, high)
        return self.row((low * high) ** 0.5, tier_gbps, "crossing")

    def _figures(self, costs: Costs, way: str) -> tuple[float, float, float]:
        served = serve(self._requests, self._found, Machine(costs, queue=self._queue), way)
        values = np.array([one.first_token_s for one in served])
        middle, late = np.percentile(values, [50, 99])
        return float(values.mean()), float(middle), float(late)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="as Mooncake publishes them; default: made conversations")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--requests-per-s", type=float, default=1.5, help="of made conversations")
    parser.add_argument("--host-blocks", type=int, default=1200)
    parser.add_argument("--tier-blocks", type=int, default=40_000)
    parser.add_argument("--queue", type=int, default=0, help="waiting prompts that may load ahead")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.trace:
        requests = read_trace(chosen.trace, chosen.requests)
    else:
        requests = conversations(chosen.requests, chosen.requests_per_s)
    grid = Grid(requests, chosen.host_blocks, chosen.tier_blocks, chosen.queue)
    print(grid.facts)
    rows: list[Row] = []
    for tier in TIERS:
        for link in LINKS:
            rows.append(grid.row(link, tier))
            print(f"\rtier {tier} GB/s, link {link} GB/s   ", end="", file=sys.stderr, flush=True)
        crossing = grid.crossing(tier)
        rows += [crossing] if crossing is not None else []
    print(file=sys.stderr)
    with chosen.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(Row)])
        writer.writeheader()
        writer.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(r).items()} for r in rows)
    points = [row for row in rows if row.place == "grid"]
    print(f"mean: at most {max(row.mean_ratio for row in points):.3f} of the better; ", end="")
    print(f"p99: at most {max(row.p99_ratio for row in points):.3f}")
    for row in rows:
        if row.place == "crossing":
            print(f"tier {row.tier_gbps} GB/s: crossing at {row.link_gbps:.2f} GB/s, mean {row.mean_ratio:.3f} of it")
    if chosen.plot:
        plot(rows, chosen.plot)


def plot(rows: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tiers = [TIERS[0], TIERS[2], TIERS[-1]]
    figure, panels = pyplot.subplots(1, len(tiers), figsize=(13, 4.5), sharey=True)
    for panel, tier in zip(panels, tiers, strict=True):
        draw(panel, [row for row in rows if row.tier_gbps == tier])
        panel.set_title(f"tier {tier} GB/s")
    panels[0].set_ylabel("s to the first token")
    panels[0].legend(fontsize=8)
    panels[0].set_ylim(top=20 * max(row.compute_p99_s for row in rows))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw(panel: Any, rows: Sequence[Row]) -> None:
    """Mean, median and p99 of the three ways over the rate of the link."""
    points = sorted(rows, key=lambda row: row.link_gbps)
    for way, colour in ((COMPUTE, "grey"), (LOAD, "C0"), (DECIDE, "C1")):
        for figure, style in (("mean", "-"), ("p50", ":"), ("p99", "--")):
            values = [getattr(row, f"{way}_{figure}_s") for row in points]
            panel.plot([row.link_gbps for row in points], values, style, color=colour, label=f"{way}, {figure}")
    for row in points:
        if row.place == "crossing":
            panel.axvline(row.link_gbps, color="black", linewidth=0.8)
            text = f"crossing: {row.mean_ratio:.2f} of it"
            panel.annotate(text, (row.link_gbps, 0.02), xycoords=("data", "axes fraction"), fontsize=8)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("link in GB/s")
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    main()
