"""What each engine costs, by which "auto" chooses: built in, or measured on this machine.

``paddle-kv bench --calibrate`` measures, and stores a file per kind of GPU in the user's cache directory; schedulers
read it when they are made. The rule itself is in ``custom_ops/include/paddle_kv/transfer/engine_choice.h``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

SIZES_KIB = (4, 8, 16, 32, 64, 128, 256)  # of a piece
MOST_NS_PER_MIB = 1 << 40
Costs = tuple[int, ...]  # of the sizes


@dataclass(frozen=True)
class WayCosts:
    """Nanoseconds that a MiB costs in pieces of ``SIZES_KIB``: of the transfer, with nothing else running; beside
    compute what the model loses, and a tenth of the transfer's."""

    alone: Costs
    beside: Costs


@dataclass(frozen=True)
class EngineCosts:
    """Of the copy engine and the kernel in pieces that are contiguous on both sides, of staging in what lies together
    on the host; the built-in ones were measured on an H200."""

    copy_engine_d2h: WayCosts = WayCosts(
        (100000, 50000, 30000, 24000, 20000, 19500, 19000), (40000, 16000, 7000, 2850, 2600, 2300, 2200)
    )
    copy_engine_h2d: WayCosts = WayCosts(
        (430000, 300000, 190000, 24000, 20000, 19500, 19000), (55000, 45000, 30000, 3300, 2600, 2300, 2200)
    )
    kernel_d2h: WayCosts = WayCosts(
        (20600, 20400, 20200, 20200, 20200, 20200, 20200), (5200, 5200, 5200, 5000, 5000, 5000, 5000)
    )
    kernel_h2d: WayCosts = WayCosts(
        (21000, 20800, 20600, 20600, 20600, 20600, 20600), (6500, 6300, 6000, 5800, 5500, 5500, 5500)
    )
    staging_d2h: WayCosts = WayCosts(
        (100000, 50000, 30000, 27500, 24500, 22000, 20100), (42000, 18000, 8000, 3500, 2900, 2750, 2650)
    )
    staging_h2d: WayCosts = WayCosts(
        (430000, 300000, 190000, 27500, 24500, 22000, 19800), (57000, 47000, 32000, 3600, 3000, 2700, 2650)
    )

    def in_order(self) -> list[int]:
        """As ``transfer_queue.set_costs`` takes them."""
        return list(itertools.chain.from_iterable(itertools.chain.from_iterable(astuple(self))))


def path_of(gpu_name: str) -> Path:
    """Where the costs on this kind of GPU are stored."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "paddle_kv" / f"engines-{re.sub(r'[^A-Za-z0-9]+', '-', gpu_name).strip('-')}.json"


def load(gpu_name: str) -> EngineCosts | None:
    """What was measured on this kind of GPU; None if nothing was, or the file is not one of ours."""
    try:
        stored = json.loads(path_of(gpu_name).read_text())
        if stored["sizes_kib"] != list(SIZES_KIB):
            return None
        ways = {name: WayCosts(tuple(way["alone"]), tuple(way["beside"])) for name, way in stored["ns_per_mib"].items()}
        costs = EngineCosts(**ways)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    of_ways = [getattr(costs, name) for name in asdict(costs)]
    if len(ways) != len(of_ways) or any(len(of) != len(SIZES_KIB) for way in of_ways for of in (way.alone, way.beside)):
        return None
    return costs if all(type(cost) is int and 0 <= cost <= MOST_NS_PER_MIB for cost in costs.in_order()) else None


def store(gpu_name: str, costs: EngineCosts) -> Path:
    """Writes the file that :func:`load` reads; schedulers made from now on use it."""
    path = path_of(gpu_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"gpu": gpu_name, "sizes_kib": SIZES_KIB, "ns_per_mib": asdict(costs)}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path
