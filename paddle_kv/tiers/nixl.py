"""The engine "nixl": files by io_uring, through NIXL's POSIX backend."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import check_process
from ..errors import TierError
from ..layout import check_positive
from ..timeouts import check_timeout
from ..tracking.keeper import Deadline
from ..tracking.worker import Worker
from . import at_exit
from .call_order import CallOrder
from .health import Health
from .protocol import Outcome, Read, Write

POLL_S = 0.0001
_NAME_DIGITS = 32
_numbers = itertools.count()

Buffers = tuple[int, list[memoryview]]  # where they begin in the object


class _Index:
    """Which objects are in the folder, in the order of their last use. One file is one object."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self.folder, self.capacity_bytes = folder, capacity_bytes
        self.used_bytes = self.evicted = 0
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._own = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._own)
            raise TierError(f"{folder} is used by another engine") from None
        found = []
        for entry in os.scandir(folder):
            if entry.name.startswith("_"):
                os.unlink(entry.path)  # not complete
            elif len(entry.name) == _NAME_DIGITS:
                about = entry.stat()
                found.append((about.st_mtime_ns, entry.name, about.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.used_bytes += size
        self.reserve(0)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def use(self, name: str) -> bool:
        """Whether it is there."""
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
            return name in self._sizes

    def reserve(self, size: int) -> bool:
        """Room for an object, at the cost of those used longest ago."""
        with self._lock:
            while self.used_bytes + size > self.capacity_bytes and self._sizes:
                self._remove(next(iter(self._sizes)))
                self.evicted += 1
            if self.used_bytes + size > self.capacity_bytes:
                return False
            self.used_bytes += size
            return True

    def add(self, name: str, size: int, temporary: str) -> None:
        """What was reserved becomes visible."""
        with self._lock:
            os.rename(self.folder / temporary, self.folder / name)
            self.used_bytes -= self._sizes.pop(name, 0)
            self._sizes[name] = size

    def cancel(self, size: int, temporary: str) -> None:
        with self._lock:
            self.used_bytes -= size
        with contextlib.suppress(OSError):
            os.unlink(self.folder / temporary)

    def delete(self, name: str) -> None:
        with self._lock:
            if name in self._sizes:
                self._remove(name)

    def clear(self) -> None:
        with self._lock:
            for name in list(self._sizes):
                self._remove(name)

    def _remove(self, name: str) -> None:
        self.used_bytes -= self._sizes.pop(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / name)

    def close(self) -> None:
        os.close(self._own)


@dataclass
class _Open:
    """An object whose file is open."""

    item: Any
    descriptor: int
    temporary: str = ""


@dataclass
class _Work:
    items: list[Any] = field(default_factory=list)
    files: list[_Open] = field(default_factory=list)
    call: int = 0
    stage: int = 0
    reading: bool = False


class NixlEngine:
    """Objects as files in a folder, moved by NIXL (io_uring) between them and the pool, without a copy.

    Args:
        folder: is made if it is not there, and held by one engine at a time.
        capacity_bytes: of all files; those used longest ago make room.
        threads: with a NIXL agent each.
        objects_per_call: the most in one transfer.

    Raises:
        ImportError: NIXL is not installed.
        TierError: the folder is in use.
    """

    name = "nixl"

    def __init__(
        self, folder: str | os.PathLike[str], capacity_bytes: int, *, threads: int = 2, objects_per_call: int = 64
    ) -> None:
        import nixl._api  # noqa: F401  early: the threads need it

        self._objects_per_call = check_positive(objects_per_call, "objects_per_call")
        threads = check_positive(threads, "threads")
        self._index = _Index(Path(folder), check_positive(capacity_bytes, "capacity_bytes"))
        self.reads, self.writes = Health(f"reading from {folder}"), Health(f"writing to {folder}")
        self._memory: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._reads: CallOrder[_Work] = CallOrder()
        self._writes: deque[_Work] = deque()
        self._tickets: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._process_id = os.getpid()
        self._closed = self._over = False
        self._threads = [Worker(self._run, f"paddle_kv-nixl-{number}") for number in range(threads)]
        for thread in self._threads:
            thread.start()
        at_exit.engines.add(self)

    def register(self, memory: np.ndarray) -> None:
        """Each agent hears of it before its next transfer."""
        self._memory.append((memory.ctypes.data, memory.nbytes))

    def write(self, items: Sequence[Write]) -> None:
        self._queue(items, self.writes, self._writes)

    def read(self, items: Sequence[Read]) -> None:
        self._queue(items, self.reads, self._reads)

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        return [not self.reads.resting and name.hex() in self._index for name in names]

    def delete(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._index.delete(name.hex())

    def clear(self) -> None:
        """Deletes all objects that are there: waits for storage."""
        self._index.clear()

    def stats(self) -> dict[str, float]:
        """``objects``, ``used_bytes``, ``capacity_bytes``, ``evicted``, ``errors``, ``resting_roots``."""
        return {
            "objects": len(self._index),
            "used_bytes": self._index.used_bytes,
            "capacity_bytes": self._index.capacity_bytes,
            "evicted": self._index.evicted,
            "errors": self.reads.errors + self.writes.errors,
            "resting_roots": self.reads.resting or self.writes.resting,
        }

    def close(self, timeout_s: float | None = None) -> None:
        """Drops what has not begun, and waits for what has. Again: does nothing.

        Raises:
            TimeoutError: a transfer is still under way.
        """
        check_timeout(timeout_s)
        if self._over or self._process_id != os.getpid():
            return
        deadline = Deadline(timeout_s)
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._tickets.put(False)
        for thread in self._threads:
            thread.join(deadline.left_s())
        if any(thread.is_alive() for thread in self._threads):
            raise TimeoutError(f"{self._index.folder} did not answer within timeout_s = {timeout_s}")
        self._over = True
        self._index.close()

    def __enter__(self) -> NixlEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(30.0)

    def _queue(self, items: Sequence[Any], health: Health, works: CallOrder[_Work] | deque[_Work]) -> None:
        check_process(self._process_id, "engine")
        refused, step = list(items), self._objects_per_call
        with self._lock:
            if not (self._closed or health.resting):
                call = self._reads.new_call()
                for first in range(0, len(refused), step):
                    works.append(_Work(refused[first : first + step], call=call, reading=works is self._reads))
                    self._tickets.put(True)
                return
        for item in refused:
            item.ended(Outcome.DROPPED)

    # ---- in the threads ----
    def _run(self) -> None:
        agent = _Agent()
        while self._tickets.get():
            self._serve(agent)
        while self._reads or self._writes:  # dropped
            self._serve(agent)

    def _serve(self, agent: _Agent) -> None:
        for works in (self._reads, self._writes):
            try:
                work = works.popleft()
            except IndexError:
                continue
            items = [*work.items, *(one.item for one in work.files)]
            try:
                agent.register(self._memory)
                (self._read_stage if work.reading else self._write)(agent, work)
            except BaseException as error:  # noqa: BLE001  NIXL has many; the thread lives
                (self.reads if work.reading else self.writes).failed(error)
                for item in items:
                    item.ended(Outcome.FAILED)
            return

    def _write(self, agent: _Agent, work: _Work) -> None:
        moves: list[tuple[_Open, Buffers]] = []
        done = False
        try:
            for item in work.items:
                name = item.name.hex()
                buffers = None if self._closed or name in self._index else item.buffers()
                if buffers is None or not self._index.reserve(item.size_bytes):
                    item.ended(Outcome.DONE if name in self._index else Outcome.DROPPED)
                    continue
                temporary = f"_{next(_numbers)}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT * item.aligned
                try:
                    descriptor = os.open(self._index.folder / temporary, flags, 0o600)
                except OSError:
                    self._index.cancel(item.size_bytes, temporary)
                    raise
                moves.append((_Open(item, descriptor, temporary), (0, buffers)))
            agent.move("WRITE", moves)
            done = True
        finally:
            for opened, _ in moves:
                os.close(opened.descriptor)
                if not done:
                    self._index.cancel(opened.item.size_bytes, opened.temporary)
        self.writes.worked()
        for opened, _ in moves:
            self._index.add(opened.item.name.hex(), opened.item.size_bytes, opened.temporary)
            opened.item.ended(Outcome.DONE)

    def _read_stage(self, agent: _Agent, work: _Work) -> None:
        if work.stage == 0:
            for item in work.items:
                self._open(item, work.files)
            work.items = []
        left: list[_Open] = []
        moves: list[tuple[_Open, Buffers]] = []
        wanted: list[_Open] = []
        try:
            for opened in work.files:
                asked = None if self._closed else opened.item.buffers(work.stage)
                if asked is None:
                    opened.item.ended(Outcome.DROPPED)
                else:
                    moves.append((opened, asked))
            agent.move("READ", moves)
            self.reads.worked()
            for opened, _ in moves:
                if opened.item.arrived(work.stage) and work.stage + 1 < opened.item.num_stages:
                    wanted.append(opened)
            left = wanted
        finally:
            for opened in work.files:
                if opened not in left:
                    os.close(opened.descriptor)
        for opened, _ in moves:
            if opened not in left:
                opened.item.ended(Outcome.DONE)
        work.files, work.stage = left, work.stage + 1
        if left:
            self._reads.append(work)
            self._tickets.put(True)

    def _open(self, item: Read, files: list[_Open]) -> None:
        """Or ends it."""
        name = item.name.hex()
        try:
            if not self._index.use(name):
                raise FileNotFoundError
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT * item.aligned
            descriptor = os.open(self._index.folder / name, flags)
        except FileNotFoundError:
            item.ended(Outcome.MISSING)  # then the tier deletes it
            return
        if os.fstat(descriptor).st_size == item.size_bytes:
            files.append(_Open(item, descriptor))
        else:
            os.close(descriptor)
            item.ended(Outcome.DAMAGED)


class _Agent:
    """NIXL, for one thread."""

    def __init__(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(f"paddle_kv-{os.getpid()}-{next(_numbers)}", nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", {"use_uring": "true"})
        self._known: list[tuple[int, int]] = []

    def register(self, memory: Sequence[tuple[int, int]]) -> None:
        """What has come since the last time."""
        for start, size in memory[len(self._known) :]:
            self._agent.register_memory([(start, size, 0, "")], "DRAM")
            self._known.append((start, size))

    def move(self, way: str, moves: Sequence[tuple[_Open, Buffers]]) -> None:
        """All of it, when it returns."""
        if not moves:
            return
        memory: list[tuple[int, int, int]] = []
        files: list[tuple[int, int, int]] = []
        for opened, (offset, buffers) in moves:
            for buffer in buffers:
                start = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
                memory.append((start, len(buffer), 0))
                files.append((offset, len(buffer), opened.descriptor))
                offset += len(buffer)
        strange = [(start, size, 0, "") for start, size, _ in memory if not self._knows(start, size)]
        ranges = [(0, opened.item.size_bytes, opened.descriptor, "") for opened, _ in moves]
        with self._registered(ranges, "FILE"), self._registered(strange, "DRAM"):
            near, far = self._agent.get_xfer_descs(memory, "DRAM"), self._agent.get_xfer_descs(files, "FILE")
            handle = self._agent.initialize_xfer(way, near, far, self._agent.name)
            try:
                state = self._agent.transfer(handle)
                while state == "PROC":
                    time.sleep(POLL_S)
                    state = self._agent.check_xfer_state(handle)
            finally:
                self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TierError(f"a transfer of {len(moves)} objects ended as {state}")

    def _knows(self, start: int, size: int) -> bool:
        return any(first <= start and start + size <= first + room for first, room in self._known)

    @contextlib.contextmanager
    def _registered(self, ranges: list[tuple[int, int, int, str]], kind: str) -> Iterator[None]:
        if not ranges:
            yield
            return
        known = self._agent.register_memory(ranges, kind)
        try:
            yield
        finally:
            self._agent.deregister_memory(known)
