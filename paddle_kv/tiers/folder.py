"""Which objects a folder holds, and where: slabs of slots, and an index of them in memory.

``<root>/<number>-<bytes of a slot>.slab`` and ``.table``: see :mod:`.slab`. No method waits for the system under the
lock, so that nobody who asks for a name waits for storage.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import TierError
from ..tracking.keeper import log
from . import slab as slabs
from .object_file import names_in, takes_direct_io
from .protocol import Outcome, Write
from .slab import SLAB_NAME, Slab
from .space import Evicted, NoSlab, Place, Space, Spot, slot_bytes_of

LEAST_SLAB_BYTES = 64 << 20
MOST_SLABS = 128  # about so many of one size, each of them an open file


class Folder:
    """One root, held by this process alone. All paths are relative to ``descriptor``.

    Attributes:
        space: what is where.
        unknown: slots whose table could not be believed; nobody uses them until their headers were read.
        looking: held while the header of one of them is read.

    Raises:
        TierError: another process has it, or it cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str], capacity_bytes: int) -> None:
        self.path = Path(path).absolute()
        self.space = Space(capacity_bytes)
        self.unknown: list[Spot] = []
        self.looking = threading.Lock()
        self.direct = False
        self.descriptor = -1
        self._lock_descriptor = -1
        self._old_descriptors: list[int] = []
        self._lock = threading.Lock()
        self._changing = threading.Lock()  # of the slabs: held while the system makes one
        try:
            self._open()
        except OSError as error:
            raise TierError(f"the folder {self.path} cannot be used: {error}") from None

    # ---- opening ----
    def _open(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._hold()
            self.direct = takes_direct_io(self.descriptor)
            self._scan()
        except BaseException:
            for slab in self.space.slabs.values():
                _close(slab.descriptors())
            _close([self._lock_descriptor, self.descriptor])
            self._lock_descriptor = self.descriptor = -1
            self._begin_anew()
            raise

    def _begin_anew(self) -> None:
        self.space, evicted = Space(self.space.capacity_bytes), self.space.evicted
        self.space.evicted = evicted
        self.unknown = []

    def _hold(self) -> None:
        """Locks the folder itself, whose lock nobody can delete, and a file for systems that lock no folders."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock_descriptor = os.open("lock", flags, 0o600, dir_fd=self.descriptor)
        for descriptor in (self._lock_descriptor, self.descriptor):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TierError(
                    f"the folder {self.path} is in use by another engine; give each process a folder of its own"
                ) from None
            except OSError:
                if descriptor != self.descriptor:
                    raise

    def _scan(self) -> None:
        names, space = names_in(self.descriptor), self.space
        tables = {path for path in names if path.endswith(".table")}
        older: list[Spot] = []
        for match in sorted(filter(None, map(SLAB_NAME.fullmatch, names)), key=lambda match: int(match[1])):
            number, slot_bytes = int(match[1]), int(match[2])
            space.next_number = number + 1
            tables.discard(slabs.paths(number, slot_bytes)[1])
            try:
                if number in space.slabs:
                    raise ValueError(f"{match[0]}: another slab has its number")
                slab, table = slabs.open_slab(self.descriptor, number, slot_bytes, direct=self.direct)
            except (OSError, ValueError) as error:
                log.warning("%s: a slab cannot be used and is left as it is: %s", self.path, error)
                continue
            older += space.add(slab, table)
            self.unknown += [(slab, slot) for slot in table.unknown]
        space.clock = itertools.count(1 + max((int(slab.used.max()) for slab in space.slabs.values()), default=0))
        for path in tables:  # of slabs that are gone
            with contextlib.suppress(OSError):
                os.unlink(path, dir_fd=self.descriptor)
        self.clear(older)
        if space.charged_bytes > space.capacity_bytes:
            self._punch(space.take_free())

    def close(self) -> None:
        for slab in self.space.slabs.values():
            self._old_descriptors += slab.descriptors()
        self.space.slabs = {}
        _close([*self._old_descriptors, self._lock_descriptor, self.descriptor])
        self._old_descriptors = []
        self._lock_descriptor = self.descriptor = -1

    def check(self) -> None:
        """Somebody may have removed the folder, or what is in it: what is gone is forgotten.

        Raises:
            OSError: somebody else has it now.
        """
        with self._changing:
            with contextlib.suppress(OSError):
                ours, there = os.fstat(self.descriptor), os.stat(self.path)
                if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
                    for slab in [slab for slab in self.space.slabs.values() if not slab.there()]:
                        with self._lock:
                            self._old_descriptors += self.space.forget(slab)
                        slab.unlink()
                    return
            with self._lock:
                # Other threads may be about to use them: the numbers must not become those of other files.
                for slab in self.space.slabs.values():
                    slab.gone = True
                    self._old_descriptors += slab.descriptors()
                self._old_descriptors += [one for one in (self.descriptor, self._lock_descriptor) if one >= 0]
                self.descriptor = self._lock_descriptor = -1
                self._begin_anew()
            try:
                self._open()
            except TierError as error:
                raise OSError(errno.EBUSY, str(error)) from None

    # ---- asked ----
    def __contains__(self, name: bytes) -> bool:
        space = self.space
        return name in space.index or name in space.arriving

    def __len__(self) -> int:
        return len(self.space.index)

    def present(self, name: bytes) -> bool:
        return name in self.space.index

    def names(self) -> list[bytes]:
        """Of all objects, those used longest ago first."""
        with self._lock:
            index = self.space.index if self.descriptor >= 0 else {}
            places = {name: self.space.at(place) for name, place in index.items()}
            ages = {name: int(slab.used[slot]) for name, (slab, slot) in places.items()}
        return sorted(ages, key=ages.__getitem__)

    # ---- reading ----
    def begin_read(self, names: Iterable[bytes]) -> list[Spot | None]:
        """Where each object is, which nobody overwrites until ``end_read``; None if it is not there."""
        with self._lock:
            space = self.space
            found = [None if (place := space.index.get(name)) is None else space.at(place) for name in names]
            for slab, slot in filter(None, found):
                slab.used[slot] = next(space.clock)
                slab.reading[slot] = slab.reading.get(slot, 0) + 1
        return found

    def end_read(self, spots: Iterable[Spot]) -> None:
        with self._lock:
            for slab, slot in spots:
                left = slab.reading.pop(slot) - 1
                if left:
                    slab.reading[slot] = left
                elif slot in slab.leaving:
                    slab.leaving.discard(slot)
                    self.space.release(slab, slot)

    # ---- writing ----
    def begin_write(self, items: Sequence[Write]) -> list[Place | Outcome | OSError | None]:
        """For each what :meth:`.Space.begin` says, or why there is no slab for it. Makes room."""
        evicted = Evicted()
        found: list[Place | Outcome | OSError | None] = []
        try:
            while len(found) < len(items):
                try:
                    with self._lock:
                        if self.descriptor < 0:
                            raise FileNotFoundError(errno.ENOENT, "the folder is gone", str(self.path))
                        for item in items[len(found) :]:
                            found.append(self.space.begin(item, evicted))
                except NoSlab:
                    self._add_slab(slot_bytes_of(items[len(found)].size_bytes))
        except OSError as error:
            found += [error] * (len(items) - len(found))
        self._clear(evicted.records)
        self._punch(evicted.punched)
        return found

    def _add_slab(self, slot_bytes: int) -> None:
        with self._changing:
            with self._lock:
                space = self.space
                if any(slab.holes for slab in space.with_room[slot_bytes]):
                    return  # another thread made one
                size = min(max(LEAST_SLAB_BYTES, space.capacity_bytes // MOST_SLABS), space.capacity_bytes)
                num_slots = max(1, size // slot_bytes)
                number, space.next_number = space.next_number, space.next_number + 1
                allocate = space.charged_bytes + num_slots * slot_bytes <= space.capacity_bytes
            slab = slabs.create(self.descriptor, number, slot_bytes, num_slots, direct=self.direct, allocate=allocate)
            with self._lock:
                space.add(slab)

    def _clear(self, spots: Sequence[Spot]) -> OSError | None:
        """Their records; why one could not be cleared. It may stay where the slot is written anew: a miss."""
        failure = None
        for slab, slots in _by_slab(spots):
            try:
                slab.clear_records(slots)
            except OSError as error:
                failure = error
        return failure

    def _punch(self, spots: Sequence[Spot]) -> None:
        """Their bytes, which are not charged any more, go back to the file system; the slots are there again."""
        for slab, slots in _by_slab(spots):
            hole = True
            try:
                slab.punch(slots)
            except OSError:
                hole = False  # a file system that cannot: these bytes stay
            with self._lock:
                if slab.gone:
                    continue
                for slot in slots:
                    self.space.give(slab, slot, hole=hole)
                if not hole:
                    self.space.charge(slab, len(slots))
                if len(slab.holes) < slab.num_slots:
                    continue
                descriptors = self.space.forget(slab)  # which nobody uses
            slab.unlink()
            _close(descriptors)

    def end_write(self, places: Sequence[Place], *, complete: bool, bad: bool = False) -> None:
        """Makes the objects visible, or gives up what was made of them. All are in one slab, by slot. ``bad``: the
        slots are used again as late as possible.

        Raises:
            OSError: they could not be made visible, and are given up.
        """
        slab, slots = places[0].slab, [place.slot for place in places]
        stored = [next(self.space.clock) for _ in places]
        recorded = False
        try:
            if complete:
                records = [(place.name, when, place.size_bytes) for place, when in zip(places, stored, strict=True)]
                slab.write_records(slots, records)
                recorded = True
        finally:
            if complete and not recorded:
                self._clear([(slab, slot) for slot in slots])
            with self._lock:
                for place, when in zip(places, stored, strict=True):
                    self.space.end(place, when, kept=recorded, last=bad)

    def adopt(self, slab: Slab, slot: int, name: bytes | None, size_bytes: int) -> None:
        """What the header of an unknown slot says; no name: nothing."""
        with self._lock:
            if slab.gone:
                return
            place = None if name is None or name in self else self.space.expect(name, size_bytes, (slab, slot))
        if place is not None:
            self.end_write([place], complete=True)
        else:
            self.clear([(slab, slot)])

    # ---- deleting ----
    def delete(self, names: Iterable[bytes]) -> list[Spot]:
        """They are not there any more; what is returned is to be given to ``clear``."""
        there = [name for name in names if name in self.space.index]
        if not there:
            return []
        with self._lock:
            if self.descriptor < 0:
                return []  # closed
            found = [self.space.delete(name) for name in there]
        return [spot for spot in found if spot is not None]

    def clear(self, spots: Sequence[Spot]) -> OSError | None:
        """Ends a deletion: waits for the system. An error: a restart may find some of it."""
        failure = self._clear(spots)
        with self._lock:
            for slab, slot in spots:
                self.space.release(slab, slot)
        return failure

    def empty(self) -> None:
        """Deletes all, also what nobody has looked at yet: waits for the system.

        Raises:
            OSError: a restart would find some of it.
        """
        with self.looking:
            unknown, self.unknown = self.unknown, []
            spots, stuck = [*self.delete(self.names()), *unknown], []
            for slab, slots in _by_slab(spots):
                try:
                    slab.clear_records(slots)
                except OSError:
                    stuck.append(slab)  # goes as a whole
            with self._lock:
                for slab in stuck:
                    self._old_descriptors += [] if slab.gone else self.space.forget(slab)
                for slab, slot in spots:
                    self.space.release(slab, slot)
            for slab in stuck:
                slab.unlink()
            if any(slab.there() for slab in stuck):
                raise OSError(errno.EIO, "what was deleted is there again after a restart", str(self.path))

    def trim(self) -> int:
        """Evicts until all is within the capacity, and gives those bytes to the file system. Returns how many."""
        evicted = []
        with self._lock:
            space = self.space
            free = space.take_free()
            while space.charged_bytes > space.capacity_bytes and (victim := space.victim()) is not None:
                space.charge(victim[0], -1)
                evicted.append(victim)
        self._clear(evicted)
        self._punch([*free, *evicted])
        return len(evicted)


def _by_slab(spots: Iterable[Spot]) -> list[tuple[Slab, list[int]]]:
    found: dict[int, tuple[Slab, list[int]]] = {}
    for slab, slot in spots:
        found.setdefault(id(slab), (slab, []))[1].append(slot)
    return list(found.values())


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
