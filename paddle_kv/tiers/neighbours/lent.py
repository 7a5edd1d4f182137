"""What a lender lends: which object lies in which block of its pool, with its header. Changes in sections of the pool's
group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...memory import HostPool
from ...memory.host_rows import block_rows
from ...memory.shared_memory import SharedMemory
from ..object_format import ObjectFormat
from .messages import ABSENT, BUSY

LEASED_SHARE = 0.5  # of the pool at most, but for one block: the rest can be written


class Pins(Protocol):
    """Whoever gives the blocks to others when they are needed: keeps these meanwhile."""

    def pin(self, keys: Iterable[bytes]) -> None: ...

    def unpin(self, keys: Iterable[bytes]) -> None: ...


@dataclass(eq=False)
class Object:
    """In a block of the pool.

    Attributes:
        has_header: whether that is in its place; it is made when somebody reads the object for the first time.
    """

    key: bytes
    block_id: int
    has_header: bool = False


@dataclass(eq=False)
class Leased:
    """Objects that a reader is reading, each once."""

    objects: list[Object]
    pins: Pins | None


class Lent:
    """Args:
        pool: block-first and shared.
        form: of the objects.
        told: hears of each name, and whether it is lent from now on. In a section.

    Attributes:
        objects: by name. May be looked at outside of sections.
        num_leased: blocks that readers read now; one that several read counts for each of them.
        pins: who has to keep what is read; None: the pool's lease is all that is needed.
    """

    def __init__(self, pool: HostPool, form: ObjectFormat, told: Callable[[bytes, bool], object]) -> None:
        self._rows = block_rows(pool)
        self._pool, self._form, self._told = pool, form, told
        self.headers = SharedMemory(pool.num_blocks * form.header_bytes)
        self._header_rows = self.headers.array().data
        self.objects: dict[bytes, Object] = {}
        self._names: dict[int, bytes] = {}  # by block
        self.num_leased = 0
        self.pins: Pins | None = None

    def lend(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """An object for each block; what else was lent of that block or by that key is not any more."""
        for key, block_id in zip(keys, block_ids, strict=True):
            name = self._form.name_of(key)
            before = self.objects.get(name)
            if before is not None:  # nobody hears that it was not lent for a moment
                del self._names[before.block_id]
            other = self._names.get(block_id)
            if other is not None:
                self._remove(other)
            self.objects[name] = Object(key, block_id)
            self._names[block_id] = name
            self._told(name, True)

    def take_back(self, keys: Iterable[bytes]) -> None:
        """Those of them that are lent; who reads one goes on."""
        for key in keys:
            self._remove(self._form.name_of(key))

    def take_back_all(self) -> None:
        for name in list(self.objects):
            self._remove(name)

    def _remove(self, name: bytes) -> None:
        found = self.objects.pop(name, None)
        if found is not None:
            del self._names[found.block_id]
            self._told(name, False)

    # ---- readers ----
    def lease(self, names: Sequence[bytes]) -> tuple[list[int], Leased]:
        """The block of each, or why not. Those blocks stay as they are until :meth:`end`."""
        room = max(1, int(self._pool.num_blocks * LEASED_SHARE)) - self.num_leased
        answers: list[int] = []
        leased = Leased([], self.pins)
        domain = self._pool.domain
        for name in names:
            found = self.objects.get(name)
            if found is None or domain.poisoned([found.block_id]):
                answers.append(ABSENT)
            elif found in leased.objects:  # asked for twice
                answers.append(found.block_id)
            elif len(leased.objects) >= room or not domain.try_lease([found.block_id], write=False):
                answers.append(BUSY)
            else:
                leased.objects.append(found)
                answers.append(found.block_id)
        self.num_leased += len(leased.objects)
        if leased.pins is not None:
            leased.pins.pin(one.key for one in leased.objects)
        return answers, leased

    def end(self, some: Iterable[Leased]) -> None:
        """Once."""
        for leased in some:
            self._pool.domain.end_lease([one.block_id for one in leased.objects], write=False)
            self.num_leased -= len(leased.objects)
            if leased.pins is not None:
                leased.pins.unpin([one.key for one in leased.objects])
        self._pool.domain.group.notify()

    # ---- not in a section ----
    def write_headers(self, leased: Leased) -> None:
        """Those that are missing. By one thread."""
        missing = [one for one in leased.objects if not one.has_header]
        self._form.write_headers(
            [(self._header(one.block_id), one.key, self._payload(one.block_id)) for one in missing]
        )
        for one in missing:
            one.has_header = True

    def _header(self, block_id: int) -> memoryview:
        size = self._form.header_bytes
        return self._header_rows[block_id * size : (block_id + 1) * size]

    def _payload(self, block_id: int) -> memoryview:
        return memoryview(self._rows[block_id])
