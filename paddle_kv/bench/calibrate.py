"""Finds from which sizes on engine "auto" should take which engine on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple

from ..backend.calibration import NEVER, EngineSizes, WaySizes
from . import engines
from .engines import Row
from .load import LOADS, ComputeLoad

SIZES_KIB = (4, 8, 16, 32, 64, 128)
STAGED_KIB = (8, 16, 32, 64)
REPEATS = 3
NUM_ROWS = len(SIZES_KIB) * (2 + 2 * 2 * 3) + len(STAGED_KIB) * (2 + 3 * 2 * 3)
# What a second of a transfer costs, beside what it takes from the model: a load that comes late makes a layer wait.
LATENCY_SHARE = 0.1
ALL = WaySizes(NEVER, NEVER)  # below these lie all pieces


def measure() -> Iterator[Row]:
    """The rows that :func:`sizes_from` needs; about two minutes."""
    loads: dict[str, ComputeLoad] = {name: ComputeLoad(name) for name in LOADS if name != "none"}
    engines_of_runs = ["copy_engine", "kernel", "staging"]
    yield from engines.rows(SIZES_KIB, ["scattered"], ["copy_engine", "kernel"], loads, repeats=REPEATS)
    yield from engines.rows(STAGED_KIB, ["contiguous_host"], engines_of_runs, loads, repeats=REPEATS)


def sizes_from(rows: Iterable[Row], default: EngineSizes) -> EngineSizes:
    """The smallest sizes from which on an engine was the cheapest."""
    rows = list(rows)

    def sizes(pattern: str, way: str, method: str, below: WaySizes = ALL) -> WaySizes:
        some = [row for row in rows if row["way"] == way and row["pattern"] == pattern]
        return WaySizes(
            _first_best(some, method, ["none"], below.alone), _first_best(some, method, ["gemm", "gemv"], below.beside)
        )

    def staging(way: str, built_in: WaySizes) -> WaySizes:
        # A staged run is as long as the host's; what is compared by the size of a block is whether it pays at all, for
        # pieces that are too small for the copy engine. From there on the two may be level.
        pays = sizes("contiguous_host", way, "staging", below=sizes("scattered", way, "copy_engine"))
        return WaySizes(
            *(size if from_ < NEVER else NEVER for size, from_ in zip(astuple(built_in), astuple(pays), strict=True))
        )

    return EngineSizes(
        sizes("scattered", "d2h", "copy_engine"),
        sizes("scattered", "h2d", "copy_engine"),
        staging("d2h", default.staging_d2h),
        staging("h2d", default.staging_h2d),
        default.staging_block,
    )


def _cost(rows: Sequence[Row], method: str, piece_kib: int, loads: Sequence[str]) -> float:
    """Seconds for a gigabyte, weighted: those of the transfer, and those that the model loses meanwhile."""
    total = 0.0
    for row in rows:
        if row["method"] == method and row["piece_kib"] == piece_kib and row["load"] in loads:
            lost = max(0.0, row.get("slowed_percent", 0.0)) / 100 / len(loads)
            share = LATENCY_SHARE if row["load"] != "none" else 1.0
            total += (share / len(loads) + lost) / max(row["gbps"], 1e-3)
    return total


def _first_best(rows: Sequence[Row], method: str, loads: Sequence[str], below: int) -> int:
    """Bytes of the smallest piece below ``below`` from which on the method is the cheapest; NEVER if none is."""
    measured = [row for row in rows if row["load"] in loads and row["method"] != "contiguous"]
    measured = [row for row in measured if row["piece_kib"] << 10 < below]
    methods = {row["method"] for row in measured}
    first = NEVER
    for piece_kib in sorted({row["piece_kib"] for row in measured}, reverse=True):
        costs = {name: _cost(measured, name, piece_kib, loads) for name in methods}
        if method not in costs or min(costs, key=costs.__getitem__) != method:
            break
        first = piece_kib << 10
    return first
