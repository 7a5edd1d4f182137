from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paddle_kv.layout import KVCacheSpec
from paddle_kv.testing.tiers.rig import ALIGNED, WAIT_S, Rig
from paddle_kv.tiers import FilesEngine

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Makes a rig over files in ``tmp_path``; again: over what the last one left there."""
    made: list[Rig] = []

    def make(spec: KVCacheSpec = ALIGNED, capacity_bytes: int = 64 << 20, num_blocks: int = 40) -> Rig:
        close(made)
        made.append(Rig(FilesEngine({tmp_path / "root": capacity_bytes}), spec, num_blocks=num_blocks))
        return made[-1]

    yield make
    close(made)


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder for many files, which a disk takes long to make and to delete."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def close(made: list[Rig]) -> None:
    while made:
        rig = made.pop()
        rig.close()
        rig.tier.engine.close(WAIT_S)


@dataclass(frozen=True)
class Stored:
    """An object in its slot, as somebody sees it who has the folder open."""

    slab: Path
    slot: int
    slot_bytes: int
    size_bytes: int
    name: bytes
    stored: int  # when, by the clock of the folder

    def read(self) -> bytes:
        with self.slab.open("rb") as file:
            file.seek(self.slot * self.slot_bytes)
            return file.read(self.size_bytes)

    def write(self, content: bytes) -> None:
        assert len(content) <= self.slot_bytes
        with self.slab.open("r+b") as file:
            file.seek(self.slot * self.slot_bytes)
            file.write(content)


def objects(folder: Path) -> list[Stored]:
    """Those that the tables below a folder tell of, by the order of the document; those stored first come first."""
    found = []
    for table in folder.rglob("*.table"):
        content, slot_bytes = table.read_bytes(), int(table.stem.split("-")[1])
        for slot, at in enumerate(range(32, len(content), 32)):
            name, stored, size_bytes, _ = struct.unpack_from("<16sQII", content, at)
            if size_bytes:
                found.append(Stored(table.with_suffix(".slab"), slot, slot_bytes, size_bytes, name, stored))
    return sorted(found, key=lambda one: one.stored)


def wait_for_recovery(engine: FilesEngine) -> None:
    for root in engine.roots:
        root.recovery.join(WAIT_S)
        assert not root.recovery.is_alive()
