"""What the library would have decided for each request of a trace, and what each alternative would have cost: in a
simulated server, see :mod:`paddle_kv.testing.prefixes.serving`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..testing.prefixes.replay import Run
from ..testing.prefixes.serving import COMPUTE, DECIDE, LOAD, Machine, Served, serve
from ..testing.prefixes.trace import Request

ALTERNATIVES = (COMPUTE, LOAD, DECIDE)
LINKS_GBPS = (0.1, 0.3, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)  # of the picture
HALVINGS = 6  # of the search for the crossing


@dataclass(frozen=True)
class Decided:
    """One request.

    Attributes:
        choice: compute, load or meet; empty where nothing was found.
        expected_*_s: of each alternative, when its turn came: from then to the first token. None: not known then.
        *_first_token_s: from its arrival, in a server that always does that; of ``decide`` the library.
    """

    request: int
    arrival_s: float
    tokens: int
    host_blocks: int
    tier_blocks: int
    choice: str
    loaded_blocks: int
    given_up: int
    expected_compute_s: float | None
    expected_load_s: float | None
    expected_meet_s: float | None
    compute_first_token_s: float
    load_first_token_s: float
    decide_first_token_s: float


def found_blocks(run: Run) -> list[tuple[int, int]]:
    """In host memory, and in the tier, of each request."""
    below = run.tier_hits or [0] * len(run.hits)
    return [(hits - tier, tier) for hits, tier in zip(run.hits, below, strict=True)]


def decide_all(requests: Sequence[Request], run: Run, machine: Machine) -> list[Decided]:
    """All three servers over the same requests."""
    found = found_blocks(run)
    served = {way: serve(requests, found, machine, way) for way in ALTERNATIVES}
    return [
        _decided(number, request, found[number], {way: served[way][number] for way in ALTERNATIVES})
        for number, request in enumerate(requests)
    ]


def _decided(number: int, request: Request, found: tuple[int, int], served: dict[str, Served]) -> Decided:
    own = served[DECIDE]
    decision = own.decision if own.found_blocks else None

    def known(value: float) -> float | None:
        return value if np.isfinite(value) else None

    return Decided(
        number,
        request.arrival_s,
        request.input_tokens,
        *found,
        "" if decision is None else decision.choice,
        own.loaded_blocks,
        own.faults,
        *((None,) * 3 if decision is None else map(known, (decision.compute_s, decision.load_s, decision.meet_s))),
        *(served[way].first_token_s for way in ALTERNATIVES),
    )


def choices(rows: Sequence[Decided]) -> str:
    """How often what was decided."""
    found = [row.choice for row in rows if row.choice]
    counts = ", ".join(f"{choice} {found.count(choice)}" for choice in (COMPUTE, LOAD, "meet"))
    return f"decided where something was found: {counts}"


def table(rows: Sequence[Decided]) -> Any:
    """A rich table: seconds to the first token in the three servers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for column in ("server", "mean", "p50", "p99"):
        made.add_column(column, justify="left" if column == "server" else "right", no_wrap=True)
    for way in ALTERNATIVES:
        made.add_row(way, *(f"{one:.3f}" for one in _figures([getattr(row, f"{way}_first_token_s") for row in rows])))
    return made


def write(rows: Sequence[Decided], path: Path) -> None:
    """CSV, or JSON where the name ends so; what is not known is empty, or null."""
    lines = [asdict(row) for row in rows]
    if path.suffix == ".json":
        path.write_text(json.dumps(lines, indent=1) + "\n")
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(Decided)])
        writer.writeheader()
        writer.writerows(lines)


def plot(
    requests: Sequence[Request], run: Run, machine: Machine, path: Path, show: Callable[[int, int, str], None]
) -> None:
    """Time to the first token over the rate of the link, and the crossing of the two others."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = found_blocks(run)

    def figures(link_gbps: float, way: str) -> tuple[float, float, float]:
        costs = replace(machine.costs, link_bytes_per_s=link_gbps * 1e9)
        return _figures([one.first_token_s for one in serve(requests, found, replace(machine, costs=costs), way)])

    computed = figures(1.0, COMPUTE)
    lines: dict[str, list[tuple[float, float, float]]] = {COMPUTE: [computed] * len(LINKS_GBPS), LOAD: [], DECIDE: []}
    for number, link_gbps in enumerate(LINKS_GBPS):
        show(number, len(LINKS_GBPS), f"link {link_gbps} GB/s")
        for way in (LOAD, DECIDE):
            lines[way].append(figures(link_gbps, way))
    figure, panel = pyplot.subplots(figsize=(8, 4.5))
    for way, colour in ((COMPUTE, "grey"), (LOAD, "C0"), (DECIDE, "C1")):
        for name, style, values in zip(
            ("mean", "p50", "p99"), ("-", ":", "--"), zip(*lines[way], strict=True), strict=True
        ):
            panel.plot(LINKS_GBPS, values, style, color=colour, label=f"{way}, {name}")
    means = [line[0] for line in lines[LOAD]]
    crossing = _crossing(means, computed[0], lambda link_gbps: figures(link_gbps, LOAD)[0])
    if crossing is not None:
        panel.axvline(crossing, color="black", linewidth=0.8, label=f"crossing: {crossing:.2f} GB/s")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_ylim(top=20 * computed[2])  # loading all over a slow link takes for ever
    panel.set_xlabel("link in GB/s")
    panel.set_ylabel("s to the first token")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _crossing(loaded_s: Sequence[float], computed_s: float, load_s: Callable[[float], float]) -> float | None:
    """The link over which loading takes as long as computing; None if there is none."""
    quicker = [value < computed_s for value in loaded_s]
    if not any(quicker) or quicker[0]:
        return None
    at = quicker.index(True)
    low, high = LINKS_GBPS[at - 1], LINKS_GBPS[at]
    for _ in range(HALVINGS):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if load_s(middle) < computed_s else (middle, high)
    return float(np.sqrt(low * high))


def _figures(values: Sequence[float]) -> tuple[float, float, float]:
    middle, late = np.percentile(values, [50, 99])
    return float(np.mean(values)), float(middle), float(late)
