from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
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


def objects(folder: Path) -> list[Path]:
    """The complete ones, oldest folder first."""
    return sorted(path for path in folder.rglob("*") if len(path.name) == 32 and path.is_file())
