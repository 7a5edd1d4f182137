"""The engine "files" does what every engine has to do, with one folder and with several."""

from __future__ import annotations

from pathlib import Path

from paddle_kv.testing.tiers import EngineConformance
from paddle_kv.tiers import FilesEngine


class TestFiles(EngineConformance):
    def make_engine(self, folder: Path, capacity_bytes: int) -> FilesEngine:
        return FilesEngine({folder: capacity_bytes})


class TestThreeFolders(EngineConformance):
    def make_engine(self, folder: Path, capacity_bytes: int) -> FilesEngine:
        parts = [capacity_bytes // 3] * 2
        roots = {folder / str(number): part for number, part in enumerate([*parts, capacity_bytes - sum(parts)])}
        return FilesEngine(roots, threads_per_root=2)


class TestRoomBeforeBlocks(EngineConformance):
    """Headers lie before their blocks: each object is one buffer."""

    room_bytes = 8192

    def make_engine(self, folder: Path, capacity_bytes: int) -> FilesEngine:
        return FilesEngine({folder: capacity_bytes})
