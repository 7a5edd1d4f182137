"""What a replay looks like. A picture that would show nothing is not drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..testing.prefixes.replay import OPTIMUM, Costs, Run
from ..testing.prefixes.trace import Request

TIMELINE_REQUESTS = 6
WINDOW_S = 60.0


def plot(runs: Sequence[Run], requests: Sequence[Request], costs: Costs, directory: Path) -> list[Path]:
    """PNG files: hit rate over capacity (of several), waiting times, and a timeline (where anything is found); the two
    latter at the capacity at which the policies differ most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []

    def save(figure: Any, name: str) -> None:
        figure.tight_layout()
        figure.savefig(directory / name, dpi=120)
        pyplot.close(figure)
        made.append(directory / name)

    capacities = sorted({run.capacity_blocks for run in runs})
    if len(capacities) > 1:
        figure, panel = pyplot.subplots(figsize=(8, 4.5))
        _draw_hit_rates(panel, runs, costs)
        save(figure, "hit_rate.png")
    if not any(run.hit_blocks for run in runs):
        return made  # all ways are the same
    chosen = [run for run in runs if run.capacity_blocks == _telling_capacity(runs, capacities)]
    figure, panel = pyplot.subplots(figsize=(8, 4.5))
    _draw_waits(panel, chosen, requests)
    save(figure, "waiting_time.png")
    minutes = np.unique(_minutes(requests))
    figure, panels = pyplot.subplots(2 + (len(minutes) > 1), 1, figsize=(8, 6 + 3 * (len(minutes) > 1)))
    _draw_prefills(panels[:2], max(chosen, key=lambda run: (run.policy != OPTIMUM, run.hit_blocks)))
    if len(minutes) > 1:
        _draw_minutes(panels[2], chosen, requests)
    save(figure, "timeline.png")
    return made


def _telling_capacity(runs: Sequence[Run], capacities: Sequence[int]) -> int:
    """Where the policies differ most; of those alike the largest."""

    def spread(capacity: int) -> int:
        found = [run.hit_blocks for run in runs if run.capacity_blocks == capacity and run.policy != OPTIMUM]
        return max(found) - min(found)

    return max(capacities, key=lambda capacity: (spread(capacity), capacity))


def _draw_hit_rates(panel: Any, runs: Sequence[Run], costs: Costs) -> None:
    from matplotlib.ticker import NullLocator

    for policy in dict.fromkeys(run.policy for run in runs):
        points = [(run.capacity_blocks, 100 * run.hit_rate) for run in runs if run.policy == policy]
        panel.plot(*zip(*sorted(points), strict=True), marker="o", label=policy, **_style(policy))
    panel.set_xscale("log")
    capacities = sorted({run.capacity_blocks for run in runs})
    panel.set_xticks(capacities, [f"{one:,}" for one in capacities])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel(f"capacity in blocks of {costs.tokens_per_block} tokens")
    panel.set_ylabel("blocks found in %")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend()


def _draw_waits(panel: Any, runs: Sequence[Run], requests: Sequence[Request]) -> None:
    """One line for all policies whose waits are the same."""
    share = 100 * (np.arange(len(requests)) + 1) / len(requests)
    lines: dict[tuple[str, bytes], list[str]] = {}
    for run in runs:
        for way in ("whole", "layerwise") if run.policy != OPTIMUM else ():
            lines.setdefault((way, np.sort(run.waits_s(way, requests)).tobytes()), []).append(run.policy)
    panel.plot(np.sort(runs[0].waits_s("recompute", requests)), share, color="grey", label="recompute")
    colours: dict[str, str] = {}
    for (way, waits), policies in lines.items():
        names = ", ".join(policies)
        colour = colours.setdefault(names, f"C{len(colours)}")
        panel.plot(np.frombuffer(waits), share, ":" if way == "whole" else "-", color=colour, label=f"{names}: {way}")
    panel.set_xscale("log")
    panel.set_xlabel("s from arrival to the end of the prefill")
    panel.set_ylabel("% of the requests")
    panel.set_title(f"{runs[0].capacity_blocks} blocks")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def _draw_prefills(panels: Sequence[Any], run: Run) -> None:
    """The requests that load most, in both ways, each from the start of its own prefill: no time is drawn in which
    nothing happens."""
    order = sorted(range(len(run.hits)), key=lambda number: -run.hits[number])
    some = sorted(number for number in order[:TIMELINE_REQUESTS] if run.hits[number])
    for panel, way in zip(panels, ("whole", "layerwise"), strict=True):
        for line, number in enumerate(some):
            done = run.prefills[way][number]
            taken_s = done.end_s - done.start_s
            panel.barh(line + 0.2, done.load_s, 0.4, color="C0", label="" if line else "load")
            left_s = taken_s - done.compute_s
            panel.barh(line - 0.2, done.compute_s, 0.4, left_s, color="C1", label="" if line else "compute")
        panel.set_title(f"{run.policy}, {run.capacity_blocks} blocks, {way}", fontsize=9)
        panel.set_xlabel("s from the start of the prefill")
        panel.set_ylabel("request")
        panel.set_yticks(range(len(some)), [str(number) for number in some], fontsize=7)
        panel.legend(fontsize=8)
    right = max(panel.get_xlim()[1] for panel in panels)
    for panel in panels:
        panel.set_xlim(0, right)


def _draw_minutes(panel: Any, runs: Sequence[Run], requests: Sequence[Request]) -> None:
    minutes, minute = np.unique(_minutes(requests), return_inverse=True)  # minutes without requests have no point
    blocks = np.bincount(minute, [len(request.block_ids) for request in requests])
    for run in runs:
        found = np.bincount(minute, run.hits)
        panel.plot(minutes, 100 * found / np.maximum(blocks, 1), marker=".", label=run.policy, **_style(run.policy))
    panel.set_xlabel("minutes since the first request")
    panel.set_ylabel("blocks found in %")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def _minutes(requests: Sequence[Request]) -> np.ndarray:
    first_s = requests[0].arrival_s  # it need not come at 0
    return np.array([(request.arrival_s - first_s) // WINDOW_S for request in requests])


def _style(policy: str) -> dict[str, str]:
    return {"color": "black", "linestyle": "--"} if policy == OPTIMUM else {}
