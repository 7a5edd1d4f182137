"""What each engine costs on this machine, for engine "auto" to choose by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..backend.calibration import SIZES_KIB, EngineCosts, WayCosts
from .engines import EngineCase, Link, Row, engine_rows, rows
from .load import LOADS, ComputeLoad

STAGED_BLOCK_KIB = 4  # on the device
REPEATS = 3
NUM_ROWS = len(SIZES_KIB) * (2 + (2 + 1) * 2 * len(LOADS))
# What a second of a transfer costs, beside what it takes from the model: a load that comes late makes a layer wait.
LATENCY_SHARE = 0.1
MIB_PER_GB = 1e9 / (1 << 20)


def measure() -> Iterator[Row]:
    """The rows that :func:`costs_from` needs; about two minutes."""
    loads: dict[str, ComputeLoad] = {name: ComputeLoad(name) for name in LOADS if name != "none"}
    yield from rows(SIZES_KIB, ["scattered"], ["copy_engine", "kernel"], loads, repeats=REPEATS)
    # Of staging the pieces are runs of small blocks that follow each other on the host.
    link: Link | None = None
    for size in SIZES_KIB:
        measured = EngineCase(STAGED_BLOCK_KIB << 10, "scattered", run_blocks=size // STAGED_BLOCK_KIB)
        link = link or Link(measured.case, REPEATS)
        common = {"piece_kib": size, "pattern": "host_runs"}
        yield from engine_rows(measured, common, ["staging"], loads, link, REPEATS)
        measured.case.close()


def costs_from(rows: Iterable[Row]) -> EngineCosts:
    """Costs of the rows of all engines, ways and sizes."""
    of: dict[tuple[str, str, str, int], Row] = {
        (row["method"], row["way"], row["load"], row["piece_kib"]): row for row in rows
    }

    def way_costs(method: str, way: str) -> WayCosts:
        def costs(loads: Sequence[str]) -> tuple[int, ...]:
            return tuple(_cost([of[method, way, load, size] for load in loads]) for size in SIZES_KIB)

        return WayCosts(costs(["none"]), costs([load for load in LOADS if load != "none"]))

    engines = ("copy_engine", "kernel", "staging")
    return EngineCosts(**{f"{engine}_{way}": way_costs(engine, way) for engine in engines for way in ("d2h", "h2d")})


def _cost(rows: Sequence[Row]) -> int:
    """Nanoseconds a MiB, the mean of the loads: those of the transfer, and beside a load those that it loses."""
    total = 0.0
    for row in rows:
        lost = max(0.0, row.get("slowed_percent", 0.0)) / 100
        share = LATENCY_SHARE if row["load"] != "none" else 1.0
        total += (share + lost) / max(row["gbps"], 1e-3)
    return round(1e9 * total / len(rows) / MIB_PER_GB)
