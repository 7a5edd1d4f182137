"""The engine "nixl" does what every engine has to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_kv.testing.tiers import EngineConformance
from paddle_kv.tiers.nixl import NixlEngine

pytest.importorskip("nixl", reason="nixl is not installed: pip install --no-deps nixl nixl-cu12")


class TestNixl(EngineConformance):
    def make_engine(self, folder: Path, capacity_bytes: int) -> NixlEngine:
        return NixlEngine(folder, capacity_bytes)
