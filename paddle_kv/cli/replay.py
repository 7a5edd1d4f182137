"""What people and programs read of a replay: table, CSV, JSON, plots."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..testing.prefixes.hints import Hints
from ..testing.prefixes.live_replay import link_bytes_per_s, live_replay, shrunk
from ..testing.prefixes.replay import NO_HINTS, OPTIMUM, WAYS, Costs, Run, replay
from ..testing.prefixes.trace import Request

PARTS = (0.01, 0.03, 0.1, 0.3, 1.0)  # capacities if none is named: parts of the distinct blocks of the trace
PARTS_TEXT = ", ".join(f"{part:.0%}" for part in PARTS)
PROGRESS_STEP = 500  # requests
TIER_BYTES = 100 << 30  # of a tier that names no capacity
LIVE_PROGRESS_STEP = 50


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
    tier_blocks: int
    tier_hit_blocks: int
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
    tier: TierOption | None = None,
    hints: Hints = NO_HINTS,
    warm_up: int = 0,
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

        runs.append(
            replay(
                requests,
                policy,
                capacity,
                costs,
                progress,
                tier_blocks=_blocks(tier, costs),
                hints=hints,
                warm_up=warm_up,
            )
        )
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
    tier: TierOption | None = None,
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

        blocks, folder = _blocks(tier, costs), tier.folder if tier is not None else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        real = live_replay(
            requests, policy, capacity, costs, time_scale, progress, tier_blocks=blocks, tier_folder=folder
        )
        own = replace(
            costs,
            link_bytes_per_s=link_bytes_per_s(real, costs.block_bytes),
            prefill_tokens_per_s=costs.prefill_tokens_per_s / time_scale,
        )
        simulated = replay(shrunk(requests, time_scale), policy, capacity, own, tier_blocks=blocks)
        runs.append(LiveRun(real, simulated, own))
    return runs


@dataclass(frozen=True)
class TierOption:
    """What ``--tier file:DIR[:BYTES]`` says."""

    folder: Path
    capacity_bytes: int


def tier_option(text: str | None) -> TierOption | None:
    """
    Raises:
        ValueError: it is none.
    """
    if text is None:
        return None
    kind, _, place = text.partition(":")
    path, _, size = place.rpartition(":")
    if not (path and size.isdecimal()):
        path, size = place, str(TIER_BYTES)
    if kind != "file" or not path or not int(size):
        raise ValueError(f"--tier is {text!r}; file:DIR or file:DIR:BYTES is expected")
    return TierOption(Path(path), int(size))


def _blocks(tier: TierOption | None, costs: Costs) -> int:
    return tier.capacity_bytes // costs.block_bytes if tier is not None else 0


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
        tier_blocks=run.tier_blocks,
        tier_hit_blocks=sum(run.tier_hits),
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
    tiered = any(row.tier_blocks for row in rows)
    # What is shrunk is shown in smaller units.
    size, size_bytes, time_unit, unit_s = ("MiB", 2**20, "ms", 1e-3) if live else ("GiB", 2**30, "s", 1.0)
    made.caption = (
        f"{size} are of one rank. hidden: part of the loading time in which the model computes. "
        f"Mean waits in {time_unit}."
    )
    made.add_column("policy", no_wrap=True)
    if live:
        made.add_column("transfers", no_wrap=True)
    for column in ("blocks", size, "hits", *["of tier"] * tiered, f"{size} in", "out", "hidden", *WAYS):
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
            *[f"{100 * row.tier_hit_blocks / max(1, row.blocks):.2f}%"] * tiered,
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
