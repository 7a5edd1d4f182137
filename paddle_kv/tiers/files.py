"""The engine "files": folders, and nothing to start."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from ..checks import check_process
from ..layout import check_positive
from ..timeouts import check_timeout
from ..tracking.keeper import Deadline
from . import at_exit
from .folder import Folder
from .protocol import Outcome, Read, Write
from .root import Root


class FilesEngine:
    """Objects in files: direct I/O by a few threads for each root, without a copy on the host.

    Args:
        roots: folder -> capacity in bytes. Each is made if it is not there, is held by one engine at a time, and gets
            its part of the objects by the rate that was measured of it.
        threads_per_root: calls of the system at once. More keep a storage with a long way busier; beside a model on one
            interpreter 16 of them slow the launches of its kernels (docs/performance.md).

    Raises:
        TierError: a folder is in use, or cannot be used.
        ValueError: no folder, a capacity below 1, or threads that no machine has.

    What evicts, what survives a crash and what an error does is in docs/tiers.md.
    """

    name = "files"

    def __init__(self, roots: Mapping[str | os.PathLike[str], int], *, threads_per_root: int = 8) -> None:
        if not isinstance(roots, Mapping):
            raise TypeError(f"roots is {type(roots).__name__}; a mapping folder -> capacity in bytes is expected")
        if not roots:
            raise ValueError("roots is empty; at least one folder is needed")
        capacities = {path: check_positive(capacity, f"roots[{path!r}]") for path, capacity in roots.items()}
        threads_per_root = check_positive(threads_per_root, "threads_per_root")
        if threads_per_root > MOST_THREADS:
            raise ValueError(f"threads_per_root = {threads_per_root} must be in [1, {MOST_THREADS}]")
        folders: list[Folder] = []
        self.roots: list[Root] = []
        try:
            for path, capacity in capacities.items():
                folders.append(Folder(path, capacity))
            for folder in folders:
                self.roots.append(Root(folder, threads_per_root))
        except BaseException:
            for root in self.roots:
                root.close(Deadline(None))
            for folder in folders:
                folder.close()
            raise
        self._process_id = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        _engines.add(self)
        at_exit.engines.add(self)

    def register(self, memory: np.ndarray) -> None:
        """Files need no registration."""

    def write(self, items: Sequence[Write]) -> None:
        self._check_process()
        if len(self.roots) == 1:
            self.roots[0].write(items)
            return
        chosen: dict[Root, list[Write]] = {}
        added = dict.fromkeys(self.roots, 0)
        for item in items:
            there = [root for root in self.roots if item.name in root.folder]
            able = there or [root for root in self.roots if not root.writes.resting]
            if able:
                size = item.size_bytes
                best = min(able, key=lambda root: (root.queued_bytes + added[root] + size) / root.rate)
                added[best] += size
                chosen.setdefault(best, []).append(item)
            else:
                item.ended(Outcome.DROPPED)
        for root, group in chosen.items():
            root.write(group)

    def read(self, items: Sequence[Read]) -> None:
        self._check_process()
        chosen: dict[Root, list[Read]] = {}
        for item in items:
            root = next((root for root in self.roots if root.folder.present(item.name)), None)
            if root is None:
                item.ended(Outcome.MISSING)
            else:
                chosen.setdefault(root, []).append(item)
        for root, group in chosen.items():
            root.read(group)

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        # No Python for each name: a lookup asks for a thousand.
        indexes = [root.folder.space.index for root in self.roots if not root.reads.resting]
        found = [map(index.__contains__, names) for index in indexes]
        return list(map(any, zip(*found, strict=True))) if found else [False] * len(names)

    def delete(self, names: Sequence[bytes]) -> None:
        for root in self.roots:
            root.delete(names)

    def clear(self) -> None:
        """Deletes all objects that are there, also for a process that comes after a crash: waits for storage."""
        for root in self.roots:
            root.folder.empty()

    def stats(self) -> dict[str, float]:
        """``objects``, ``used_bytes``, ``capacity_bytes``, ``evicted``, ``errors``, ``resting_roots``."""
        spaces = [root.folder.space for root in self.roots]
        return {
            "objects": sum(len(space.index) for space in spaces),
            "used_bytes": sum(space.used_bytes for space in spaces),
            "capacity_bytes": sum(space.capacity_bytes for space in spaces),
            "evicted": sum(space.evicted for space in spaces),
            "errors": sum(root.reads.errors + root.writes.errors for root in self.roots),
            "resting_roots": sum(root.reads.resting or root.writes.resting for root in self.roots),
        }

    def close(self, timeout_s: float | None = None) -> None:
        """Drops what has not begun, and waits for what has. Again: does nothing.

        Raises:
            TimeoutError: a call of the system has not returned.
        """
        check_timeout(timeout_s)
        if self._closed or self._process_id != os.getpid():
            return
        deadline = Deadline(timeout_s)
        stuck = [root for root in self.roots if not root.close(deadline)]
        with self._closing:  # threads that close it at once must not close a descriptor twice
            for root in self.roots:
                if root not in stuck:
                    root.folder.close()
        if stuck:
            raise TimeoutError(f"{stuck[0].folder.path} did not answer within timeout_s = {timeout_s}")
        self._closed = True

    def __enter__(self) -> FilesEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(30.0)

    def _check_process(self) -> None:
        check_process(self._process_id, "engine")


_engines: weakref.WeakSet[FilesEngine] = weakref.WeakSet()
MOST_THREADS = 1024  # of one folder


def _after_fork_in_child() -> None:
    """The locks of the folders are the parent's alone: a child that lives on must not keep them."""
    for engine in list(_engines):
        for root in engine.roots:
            root.folder.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
