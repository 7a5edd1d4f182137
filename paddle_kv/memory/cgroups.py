"""How much memory the control groups of this process leave it.

A container has less than its machine, and a process that takes more is ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
# Names of the limit, of what is used, and before those of the pages of files, which the kernel gives up when asked.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_VERSION_2 = ("memory.max", "memory.current", "")


def headroom_bytes() -> int | None:
    """The least that is left in any group from that of this process up to the root; None without a limit."""
    left = [number for folder, names in _groups() if (number := _left_bytes(folder, *names)) is not None]
    return max(0, min(left)) if left else None


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of all groups that limit the memory of this process, with the names of their files."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names = _ROOT / "memory", _VERSION_1
        elif not controllers:
            root, names = _ROOT, _VERSION_2
        else:
            continue
        # A container may see its group as the root and be told the path outside, where nothing is found then.
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(root) and ".." not in group.parts:
                yield group, names


def _left_bytes(folder: Path, limit_name: str, used_name: str, prefix: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        used = int((folder / used_name).read_text())
        if limit == "max":
            return None
        return int(limit) - used + _pages_of_files(folder, prefix)
    except (OSError, ValueError):  # the root of version 2 has no such files
        return None


def _pages_of_files(folder: Path, prefix: str) -> int:
    names = {f"{prefix}inactive_file", f"{prefix}active_file"}
    pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(value) for name, value in pairs if name in names)
