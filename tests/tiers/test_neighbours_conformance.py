"""The engine over neighbours does what every engine has to do; its stores go through the lender."""

from __future__ import annotations

from pathlib import Path

from paddle_kv.testing.tiers import EngineConformance
from paddle_kv.testing.tiers.rig import ALIGNED
from paddle_kv.tiers.object_format import ObjectFormat
from tests.tiers.neighbour_rig import Written


class TestNeighbours(EngineConformance):
    persistent = False
    capacity_step_bytes = ObjectFormat(ALIGNED, b"").object_bytes

    def make_engine(self, folder: Path, capacity_bytes: int) -> Written:
        return Written(capacity_bytes)
