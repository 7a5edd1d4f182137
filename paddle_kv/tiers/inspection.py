"""A folder of the engine "files", looked at from outside: what is there, and whether it is right."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .checksum import checksum
from .folder import OBJECT_NAME, SHELF_NAME, Folder
from .object_format import header_bytes_of, parse

Progress = Callable[[int, int], object]


@dataclass
class Verified:
    """What a look at every byte has found."""

    objects: int = 0
    bytes: int = 0
    damaged: list[Path] = field(default_factory=list)
    sets: Counter[str] = field(default_factory=Counter)  # objects by model, spec, group and rank


def count(path: Path) -> tuple[dict[int, int], int]:
    """Objects by size, and files that are not complete. Reads names alone, and needs nobody's leave."""
    sizes: Counter[int] = Counter()
    incomplete = 0
    for shelf in path.iterdir():
        if match := SHELF_NAME.fullmatch(shelf.name):
            try:
                names = os.listdir(shelf)
            except (FileNotFoundError, NotADirectoryError):
                continue  # its server has emptied it meanwhile
            unfinished = sum(name.startswith("_") for name in names)
            sizes[int(match[2])] += sum(OBJECT_NAME.fullmatch(name) is not None for name in names)
            incomplete += unfinished
    return {size: number for size, number in sorted(sizes.items()) if number}, incomplete


def verify(path: Path, progress: Progress, *, delete: bool = False) -> Verified:
    """Reads every object and compares every checksum. The folder must not be in use.

    Raises:
        TierError: it is.
    """
    folder = Folder(path, 2**62)
    found = Verified()
    try:
        names = folder.names()
        for number, name in enumerate(names):
            progress(number, len(names))
            file = folder.path_of(name)
            assert file is not None
            try:
                content = file.read_bytes()
            except OSError:
                content = b""  # what cannot be read is not right either
            found.objects += 1
            found.bytes += len(content)
            said = _right(name, content)
            if said is not None:
                found.sets[said] += 1
                continue
            found.damaged.append(file)
            if delete:
                folder.delete(name)
        progress(len(names), len(names))
    finally:
        folder.close()
    return found


def collect_garbage(path: Path, capacity_bytes: int | None) -> tuple[int, int]:
    """Deletes what is not complete, and the oldest objects beyond a capacity. Returns how many of each."""
    _, incomplete = count(path)
    folder = Folder(path, 2**62)  # which deletes what is not complete
    try:
        before = len(folder)
        for name in folder.names() if capacity_bytes is not None else ():
            if folder.used_bytes <= capacity_bytes:  # type: ignore[operator]
                break
            folder.delete(name)
        return incomplete, before - len(folder)
    finally:
        folder.close()


def _right(name: bytes, content: bytes) -> str | None:
    """Which set the object belongs to; None if it is not what it says."""
    header = parse(content[: header_bytes_of(content)])
    if header is None or header.name != name or len(content) != header.header_bytes + header.payload_bytes:
        return None
    payload = memoryview(content)[header.header_bytes :]
    if any(checksum(payload[at : at + size]) != expected for at, size, expected in header.layers):
        return None
    return (
        f"model {header.model_digest.hex()[:12]}, spec {header.spec_digest.hex()[:12]}, group {header.group}, "
        f"rank {header.rank}"
    )
