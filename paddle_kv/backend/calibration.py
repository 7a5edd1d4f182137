"""From which sizes on engine "auto" takes which engine: built in, or measured on this machine.

``paddle-kv bench --calibrate`` measures, and stores a file per kind of GPU in the user's cache directory; schedulers
read it when they are made. The rule itself is in ``custom_ops/include/paddle_kv/transfer/engine_choice.h``.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

NEVER = 1 << 40  # no transfer has pieces of that size


@dataclass(frozen=True)
class WaySizes:
    """Smallest average sizes of a piece, in bytes: with nothing else running, and beside compute."""

    alone: int
    beside: int


@dataclass(frozen=True)
class EngineSizes:
    """``copy_engine_*``: of a piece that is contiguous on both sides; ``staging_*``: of one that is contiguous on the
    host, if a block has at least ``staging_block`` bytes. What is smaller goes to the kernel. A load goes to the copy
    engine with pieces of 28 KiB and more only, whatever was measured."""

    copy_engine_d2h: WaySizes = WaySizes(64 << 10, 24 << 10)
    copy_engine_h2d: WaySizes = WaySizes(64 << 10, 28 << 10)
    staging_d2h: WaySizes = WaySizes(256 << 10, 256 << 10)
    staging_h2d: WaySizes = WaySizes(256 << 10, 256 << 10)
    staging_block: int = 8 << 10

    def in_order(self) -> list[int]:
        """As ``transfer_queue.set_thresholds`` takes them."""
        ways = (self.copy_engine_d2h, self.copy_engine_h2d, self.staging_d2h, self.staging_h2d)
        return [size for way in ways for size in (way.alone, way.beside)] + [self.staging_block]


def path_of(gpu_name: str) -> Path:
    """Where the sizes of this kind of GPU are stored."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "paddle_kv" / f"engines-{re.sub(r'[^A-Za-z0-9]+', '-', gpu_name).strip('-')}.json"


def load(gpu_name: str) -> EngineSizes | None:
    """What was measured on this kind of GPU; None if nothing was, or the file is not one of ours."""
    try:
        stored = json.loads(path_of(gpu_name).read_text())["sizes_bytes"]
        block = stored.pop("staging_block")
        sizes = EngineSizes(**{name: WaySizes(**way) for name, way in stored.items()}, staging_block=block)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return sizes if all(type(size) is int and 0 <= size <= NEVER for size in sizes.in_order()) else None


def store(gpu_name: str, sizes: EngineSizes) -> Path:
    """Writes the file that :func:`load` reads; schedulers made from now on use it."""
    path = path_of(gpu_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"gpu": gpu_name, "sizes_bytes": asdict(sizes)}, indent=2) + "\n")
    return path
