"""What people and programs read of a replay: table, CSV, JSON, plots."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..offload.live_replay import link_bytes_per_s, live_replay, shrunk
from ..offload.replay import OPTIMUM, WAYS, Costs, Run, replay
from ..offload.trace import Request

PARTS = (0.01, 0.03, 0.1, 0.3, 1.0)  # capacities if none is named: parts of the distinct blocks of the trace
PROGRESS_STEP = 500  # requests
LIVE_PROGRESS_STEP = 50
TIMELINE_REQUESTS = 6
WINDOW_S = 60.0


@dataclass(frozen=True)
class Row:
    """One policy at one capacity, in one line."""

    policy: str
    device: str
    capacity_blocks: int
    capacity_bytes: int
    requests: int
    blocks: int
    hit_blocks: int
    hit_rate: float
    loaded_bytes: int
    saved_bytes: int
    evicted_blocks: int
    transfer_s: float
    hidden_transfer_s: float
    recompute_wait_mean_s: float
    recompute_wait_p50_s: float
    recompute_wait_p99_s: float
    whole_wait_mean_s: float
    whole_wait_p50_s: float
    whole_wait_p99_s: float
    layerwise_wait_mean_s: float
    layerwise_wait_p50_s: float
    layerwise_wait_p99_s: float


def default_capacities(requests: Sequence[Request]) -> list[int]:
    """From a hundredth of the distinct blocks of the trace to all of them."""
    distinct = len({block for request in requests for block in request.block_ids})
    return sorted({max(1, round(distinct * part)) for part in PARTS})


def run_all(
    requests: Sequence[Request],
    policies: Sequence[str],
    capacities: Sequence[int],
    costs: Costs,
    show: Callable[[int, int, str], None],
) -> list[Run]:
    """Every policy and the optimum at every capacity. ``show`` is told steps done, steps in all, and what runs.

    Raises:
        ValueError: an unknown policy, or a capacity below 1.
    """
    plans = [(policy, capacity) for capacity in capacities for policy in (*policies, OPTIMUM)]
    runs = []
    for number, (policy, capacity) in enumerate(plans):
        before, what = number * len(requests), f"{policy}, {capacity} blocks"

        def progress(done: int, before: int = before, what: str = what) -> None:
            if done % PROGRESS_STEP == 0 or done == len(requests):
                show(before + done, len(plans) * len(requests), what)

        runs.append(replay(requests, policy, capacity, costs, progress))
    return runs


@dataclass
class LiveRun:
    """The same with real transfers and simulated, the latter over a link as fast as the former found it."""

    real: Run
    simulated: Run
    costs: Costs


def run_live(
    requests: Sequence[Request],
    policies: Sequence[str],
    capacities: Sequence[int],
    costs: Costs,
    time_scale: float,
    show: Callable[[int, int, str], None],
) -> list[LiveRun]:
    """Every policy at every capacity with real transfers; see :func:`run_all`.

    Raises:
        ValueError, MemoryError: as :func:`live_replay`.
    """
    plans = [(policy, capacity) for capacity in capacities for policy in policies]
    steps = len(WAYS) * len(requests)
    runs = []
    for number, (policy, capacity) in enumerate(plans):
        before, what = number * steps, f"{policy}, {capacity} blocks"

        def progress(done: int, before: int = before, what: str = what) -> None:
            if done % LIVE_PROGRESS_STEP == 0 or done == steps:
                show(before + done, len(plans) * steps, what)

        real = live_replay(requests, policy, capacity, costs, time_scale, progress)
        own = replace(
            costs,
            link_bytes_per_s=link_bytes_per_s(real, costs.block_bytes),
            prefill_tokens_per_s=costs.prefill_tokens_per_s / time_scale,
        )
        runs.append(LiveRun(real, replay(shrunk(requests, time_scale), policy, capacity, own), own))
    return runs


def live_rows(runs: Sequence[LiveRun], requests: Sequence[Request]) -> list[Row]:
    """Two rows for each run; ``requests`` are the :func:`shrunk` ones."""
    return [
        row_of(run, requests, both.costs, device)
        for both in runs
        for run, device in ((both.real, "real"), (both.simulated, "simulated"))
    ]


def row_of(run: Run, requests: Sequence[Request], costs: Costs, device: str = "simulated") -> Row:
    waits: dict[str, float] = {}
    for way in WAYS:
        values = run.waits_s(way, requests)
        middle, late = np.percentile(values, [50, 99])
        waits |= {f"{way}_wait_mean_s": float(np.mean(values)), f"{way}_wait_p50_s": float(middle)}
        waits[f"{way}_wait_p99_s"] = float(late)
    return Row(
        policy=run.policy,
        device=device,
        capacity_blocks=run.capacity_blocks,
        capacity_bytes=run.capacity_blocks * costs.block_bytes,
        requests=len(requests),
        blocks=run.num_blocks,
        hit_blocks=run.hit_blocks,
        hit_rate=run.hit_rate,
        loaded_bytes=run.hit_blocks * costs.block_bytes,
        saved_bytes=run.saved_blocks * costs.block_bytes,
        evicted_blocks=run.evicted_blocks,
        transfer_s=run.transfer_s,
        hidden_transfer_s=run.hidden_s,
        **waits,
    )


def table(rows: Sequence[Row]) -> Any:
    """A rich table."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    live = any(row.device == "real" for row in rows)
    # What is shrunk is shown in smaller units.
    size, size_bytes, time_unit, unit_s = ("MiB", 2**20, "ms", 1e-3) if live else ("GiB", 2**30, "s", 1.0)
    made.caption = (
        f"{size} are of one rank. hidden: part of the loading time in which the model computes. "
        f"Mean waits in {time_unit}."
    )
    made.add_column("policy", no_wrap=True)
    if live:
        made.add_column("transfers", no_wrap=True)
    for column in ("blocks", size, "hits", f"{size} in", "out", "hidden", *WAYS):
        made.add_column(column, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        if previous not in (None, row.capacity_blocks):
            made.add_row()
        previous = row.capacity_blocks
        hidden = 100 * row.hidden_transfer_s / row.transfer_s if row.transfer_s else 0.0
        made.add_row(
            row.policy,
            *[row.device] * live,
            str(row.capacity_blocks),
            f"{row.capacity_bytes / size_bytes:.1f}",
            f"{100 * row.hit_rate:.2f}%",
            f"{row.loaded_bytes / size_bytes:.0f}",
            f"{row.saved_bytes / size_bytes:.0f}",
            f"{hidden:.0f}%",
            *(f"{getattr(row, f'{way}_wait_mean_s') / unit_s:.2f}" for way in WAYS),
        )
    return made


def write_csv(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def write_waits(runs: Sequence[Run], requests: Sequence[Request], path: Path) -> None:
    """One line for each request of each run, in order of arrival."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "policy",
                "capacity_blocks",
                "request",
                "arrival_s",
                "blocks",
                "hit_blocks",
                *(f"{w}_wait_s" for w in WAYS),
            ]
        )
        for run in runs:
            waits = [run.waits_s(way, requests) for way in WAYS]
            for number, (request, found, *taken) in enumerate(zip(requests, run.hits, *waits, strict=True)):
                facts = (request.arrival_s, len(request.block_ids), found)
                writer.writerow([run.policy, run.capacity_blocks, number, *facts, *taken])


def write_json(rows: Sequence[Row], costs: Costs, path: Path, *, time_scale: float | None) -> None:
    """``time_scale``: of real transfers; their link is what each row has measured, loaded_bytes / transfer_s."""
    facts = asdict(costs)
    if time_scale is not None:
        facts |= {"link_bytes_per_s": None, "time_scale": time_scale}
    path.write_text(json.dumps({"costs": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def plot(runs: Sequence[Run], requests: Sequence[Request], directory: Path) -> list[Path]:
    """Hit rate over capacity, waiting times, and a timeline, as PNG files; the two latter at the largest capacity that
    still evicts (the largest, if none does)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = max((run.capacity_blocks for run in runs if run.evicted_blocks), default=runs[-1].capacity_blocks)
    chosen = [run for run in runs if run.capacity_blocks == shown]
    made = [directory / f"{name}.png" for name in ("hit_rate", "waiting_time", "timeline")]
    figure, panel = pyplot.subplots(figsize=(8, 4.5))
    _draw_hit_rates(panel, runs)
    _save(figure, made[0])
    figure, panel = pyplot.subplots(figsize=(8, 4.5))
    _draw_waits(panel, chosen, requests)
    _save(figure, made[1])
    figure, panels = pyplot.subplots(3, 1, figsize=(8, 9))
    _draw_timeline(panels, chosen, requests)
    _save(figure, made[2])
    return made


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_hit_rates(panel: Any, runs: Sequence[Run]) -> None:
    from matplotlib.ticker import NullLocator

    for policy in dict.fromkeys(run.policy for run in runs):
        points = [(run.capacity_blocks, 100 * run.hit_rate) for run in runs if run.policy == policy]
        style = {"color": "black", "linestyle": "--"} if policy == OPTIMUM else {}
        panel.plot(*zip(*sorted(points), strict=True), marker="o", label=policy, **style)
    panel.set_xscale("log")
    capacities = sorted({run.capacity_blocks for run in runs})
    panel.set_xticks(capacities, [f"{one:,}" for one in capacities])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("capacity in blocks of 512 tokens")
    panel.set_ylabel("blocks found in %")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend()


def _draw_waits(panel: Any, runs: Sequence[Run], requests: Sequence[Request]) -> None:
    share = 100 * (np.arange(len(requests)) + 1) / len(requests)
    panel.plot(np.sort(runs[0].waits_s("recompute", requests)), share, color="grey", label="recompute")
    for number, run in enumerate(run for run in runs if run.policy != OPTIMUM):
        for way, line in (("whole", ":"), ("layerwise", "-")):
            waits = np.sort(run.waits_s(way, requests))
            panel.plot(waits, share, line, color=f"C{number}", label=f"{run.policy}, {way}")
    panel.set_xscale("log")
    panel.set_xlabel("s from arrival to the end of the prefill")
    panel.set_ylabel("% of the requests")
    panel.set_title(f"{runs[0].capacity_blocks} blocks")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def _draw_timeline(panels: Sequence[Any], runs: Sequence[Run], requests: Sequence[Request]) -> None:
    """The requests around the one that loads most, in both ways; and the hit rate over the whole trace."""
    run = runs[0]
    first = max(0, int(np.argmax(run.hits)) - TIMELINE_REQUESTS // 2)
    some = range(first, min(first + TIMELINE_REQUESTS, len(requests)))
    for panel, way in zip(panels, ("whole", "layerwise"), strict=False):
        for line, number in enumerate(some):
            done = run.prefills[way][number]
            panel.barh(line + 0.2, done.load_s, 0.4, done.start_s, color="C0", label="" if line else "load")
            start_s = done.end_s - done.compute_s
            panel.barh(line - 0.2, done.compute_s, 0.4, start_s, color="C1", label="" if line else "compute")
        panel.set_title(f"{run.policy}, {run.capacity_blocks} blocks, {way}", fontsize=9)
        panel.set_xlabel("s")
        panel.set_ylabel("request")
        panel.set_yticks(range(len(some)), [str(number) for number in some], fontsize=7)
        panel.legend(fontsize=8)
    right = max(panel.get_xlim()[1] for panel in panels[:2])
    for panel in panels[:2]:
        panel.set_xlim(right=right)
    arrivals_s = np.array([request.arrival_s for request in requests])
    # The first request need not come at 0; minutes without any have no point.
    minutes, minute = np.unique((arrivals_s - arrivals_s[0]) // WINDOW_S, return_inverse=True)
    blocks = np.bincount(minute, [len(request.block_ids) for request in requests])
    for run in runs:
        found = np.bincount(minute, run.hits)
        style = {"color": "black", "linestyle": "--"} if run.policy == OPTIMUM else {}
        panels[2].plot(minutes, 100 * found / np.maximum(blocks, 1), marker=".", label=run.policy, **style)
    panels[2].set_xlabel("minutes since the first request")
    panels[2].set_ylabel("blocks found in %")
    panels[2].grid(alpha=0.3)
    panels[2].legend(fontsize=8)
