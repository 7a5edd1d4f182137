"""What was submitted to a device, in order: the input of the happens-before checker."""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple

HOST = "host"  # the name of the thread that submits, among the streams
ALL_LAYERS = -1

_OWN_DIRECTORY = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE_DIRECTORY = os.path.dirname(os.path.dirname(os.path.dirname(_OWN_DIRECTORY))) + os.sep
_DRIVERS = ("traffic.py", "replay.py", "client.py", "clients.py")  # users of the scheduler although they lie here
_SECTIONS = os.path.join("tracking", "group.py")  # every call goes through it
_USER_FRAMES = 2
_RUNNERS = ("/_pytest/", "/pluggy/", "/hypothesis/", "/runpy.py", "<frozen")


class Location(NamedTuple):
    """What may not be touched by two parties at once. ``layer``: of a ring of layer buffers, the buffer."""

    pool: str
    slot: int
    layer: int

    def __str__(self) -> str:
        where = "" if self.layer == ALL_LAYERS else f" layer {self.layer}"
        return f"{self.pool} block {self.slot}{where}"


@dataclass(frozen=True)
class Entry:
    """One submission, or one thing that the host has seen.

    ``work`` touches memory in stream order. ``record`` puts ``mark`` behind all that the stream has, ``wait`` holds the
    stream until ``mark``, ``observe`` says that the host knows ``mark`` to be passed. ``misuse`` is a call that the
    protocol forbids.
    """

    kind: Literal["work", "record", "wait", "observe", "misuse"]
    stream: str
    label: str
    site: str
    reads: tuple[Location, ...] = ()
    writes: tuple[Location, ...] = ()
    mark: int = -1


class Log:
    """Entries, and the names of the pools in them."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._marks = itertools.count()
        self._names: dict[int, str] = {}  # address of the first tensor -> name
        self._numbers = itertools.count()
        self.stream_names: dict[Any, tuple[str, Any]] = {}  # stream -> name, and the stream, which keeps the key unique
        self.event_marks: dict[Any, int] = {}  # event -> its last recording

    def next_mark(self) -> int:
        """The number of a new recording of an event."""
        return next(self._marks)

    def work(
        self, stream: str, label: str, reads: Iterable[Location] = (), writes: Iterable[Location] = (), site: str = ""
    ) -> Entry:
        entry = Entry("work", stream, label, site or call_site(), tuple(reads), tuple(writes))
        self.entries.append(entry)
        return entry

    def record(self, stream: str, mark: int, label: str = "record") -> None:
        self.entries.append(Entry("record", stream, label, call_site(), mark=mark))

    def wait(self, stream: str, mark: int, label: str = "wait") -> None:
        self.entries.append(Entry("wait", stream, label, call_site(), mark=mark))

    def observe(self, mark: int) -> None:
        self.entries.append(Entry("observe", HOST, "observe", call_site(), mark=mark))

    def misuse(self, stream: str, label: str) -> None:
        self.entries.append(Entry("misuse", stream, label, call_site()))

    # ---- pools ----
    def location(self, pool: Any, slot: int, layer: int) -> Location:
        """Where a layer of a block lies."""
        return Location(self.pool_name(pool), slot, place_of(pool, layer))

    def pool_name(self, pool: Any) -> str:
        """The name of the memory that a DeviceCache or HostPool lies in; two pools over one memory have one name.

        The first time, it starts to watch the memory: giving it back counts as a write of all blocks by the host.
        """
        spec = pool.spec
        is_device = hasattr(pool, "tensor")
        first = spec.tensor_names[0]
        address = int(pool.tensor(first, 0).data_ptr()) if is_device else int(pool.pointer(first, 0))
        name = self._names.get(address)
        if name is None:
            name = f"{'device' if is_device else 'host'}-{next(self._numbers)}"
            self._names[address] = name
            locations = tuple(
                Location(name, slot, layer) for slot in range(pool.num_blocks) for layer in range(spec.num_layers)
            )
            for memory in [pool.tensor(first, 0)] if is_device else pool._memory[:1]:
                weakref.finalize(memory, self._freed, address, name, locations).atexit = False
        return name

    def _freed(self, address: int, name: str, locations: tuple[Location, ...]) -> None:
        if self._names.get(address) == name:
            del self._names[address]
        self.work(HOST, f"memory of {name} given back", writes=locations)


def place_of(pool: Any, layer: int) -> int:
    """The layer, or of a ring of layer buffers the buffer in which it lies."""
    return layer % int(pool.layer_buffers) if hasattr(pool, "layer_buffers") else layer


def call_site() -> str:
    """Who called, innermost first: the line inside of paddle_kv that did it, the public calls that led there, and two
    lines of the user."""
    frames: list[str] = []
    users = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and users < _USER_FRAMES:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        is_user = not path.startswith(_PACKAGE_DIRECTORY) or path.endswith(_DRIVERS)
        if is_user and any(runner in path for runner in _RUNNERS):
            if users:
                break
        elif is_user or not (
            path.startswith(_OWN_DIRECTORY) or path.endswith(_SECTIONS) or (frames and name[0] == "_")
        ):
            frames.append(f"{os.path.basename(path)}:{frame.f_lineno} {name}")
            users += is_user
        frame = frame.f_back
    return " < ".join(frames)
