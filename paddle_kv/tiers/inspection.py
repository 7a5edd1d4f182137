"""A folder of the engine "files", looked at from outside: what is there, and whether it is right."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .checksum import checksum_of
from .folder import Folder
from .object_format import header_bytes_of, parse
from .recovery import recover
from .slab import SLAB_NAME, parse_table, paths, read_table, slots_of

Progress = Callable[[int, int], object]


@dataclass
class Verified:
    """What a look at every byte has found."""

    objects: int = 0
    bytes: int = 0
    damaged: list[str] = field(default_factory=list)  # slab and slot
    sets: Counter[str] = field(default_factory=Counter)  # objects by model, spec, group and rank


def count(path: Path) -> dict[int, int]:
    """Objects by size. Reads tables alone, and needs nobody's leave."""
    sizes: Counter[int] = Counter()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for match in filter(None, map(SLAB_NAME.fullmatch, os.listdir(descriptor))):
            slot_bytes = int(match[2])
            content = read_table(descriptor, paths(int(match[1]), slot_bytes)[1])
            if slots_of(content, slot_bytes):
                sizes.update(parse_table(content, slot_bytes).sizes.tolist())
    finally:
        os.close(descriptor)
    return dict(sorted(sizes.items()))


def verify(path: Path, progress: Progress, *, delete: bool = False) -> Verified:
    """Reads every object and compares every checksum. The folder must not be in use.

    Raises:
        TierError: it is.
    """
    folder = Folder(path, 2**62)
    found = Verified()
    try:
        recover(folder, lambda: False)
        names = folder.names()
        for number, name in enumerate(names):
            progress(number, len(names))
            [spot] = folder.begin_read([name])
            assert spot is not None
            slab, slot = spot
            try:
                content = os.pread(slab.file(direct=False), slab.slot_bytes, slot * slab.slot_bytes)
            except OSError:
                content = b""  # what cannot be read is not right either
            folder.end_read([spot])
            found.objects += 1
            found.bytes += len(content)
            said = _right(name, content)
            if said is not None:
                found.sets[said] += 1
                continue
            found.damaged.append(f"{path / slab.path}, slot {slot}")
            if delete:
                folder.clear(folder.delete([name]))
        progress(len(names), len(names))
    finally:
        folder.close()
    return found


def collect_garbage(path: Path, capacity_bytes: int | None) -> int:
    """Deletes what former versions left, and the objects used longest ago beyond a capacity; their bytes go back to the
    file system. Returns how many."""
    folder = Folder(path, 2**62 if capacity_bytes is None else capacity_bytes)
    try:
        recover(folder, lambda: False)
        return folder.trim()
    finally:
        folder.close()


def _right(name: bytes, content: bytes) -> str | None:
    """Which set the object belongs to; None if it is not what it says."""
    header = parse(content[: header_bytes_of(content)])
    if header is None or header.name != name or len(content) < header.header_bytes + header.payload_bytes:
        return None
    payload = memoryview(content)[header.header_bytes :]
    if any(checksum_of(payload[at : at + size]) != expected for at, size, expected in header.pieces):
        return None
    return (
        f"model {header.model_digest.hex()[:12]}, spec {header.spec_digest.hex()[:12]}, group {header.group}, "
        f"rank {header.rank}"
    )
