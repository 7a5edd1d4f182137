"""Which object is in which slot, and which slots are nobody's: in memory, under the lock of a folder."""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict, deque

import numpy as np

from .object_format import ALIGN_BYTES
from .protocol import Outcome, Write
from .slab import Slab, Table

Spot = tuple[Slab, int]  # a slot
TRIMMED_PER_STORE = 32  # objects beyond a capacity that has become smaller
AGES = 16  # the folder's objects in so many parts: those of one part count as of one age
_SLOT_BITS = 28


class Place:
    """Where an object is about to be written."""

    __slots__ = ("kept", "name", "size_bytes", "slab", "slot", "waiting")

    def __init__(self, name: bytes, size_bytes: int, slab: Slab, slot: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.slab = slab
        self.slot = slot
        self.kept = False  # whether the object became visible
        self.waiting: tuple[Write, ...] = ()  # other writes of the same name


class NoSlab(Exception):
    """There is room for a slot, and no slab that has one."""


class Evicted:
    """What made room: records that have to go, and slots whose bytes go back to the file system."""

    def __init__(self) -> None:
        self.records: list[Spot] = []
        self.punched: list[Spot] = []


class Space:
    """Makes no call of the system.

    Attributes:
        used_bytes: of slots with objects, and with those on their way.
        charged_bytes: of slots that may have bytes on the disk: at most the capacity.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = self.charged_bytes = 0
        self.evicted = 0
        self.index: dict[bytes, int] = {}  # number of the slab and slot in one
        self.arriving: dict[bytes, Place] = {}
        self.slabs: dict[int, Slab] = {}
        self.with_room: defaultdict[int, list[Slab]] = defaultdict(list)  # by bytes of a slot
        self.clock = itertools.count(1)  # of uses and stores
        self.next_number = 0
        self._oldest: deque[tuple[Slab, int, int]] = deque()

    # ---- slabs ----
    def add(self, slab: Slab, table: Table | None = None) -> list[Spot]:
        """With the objects that its table tells of. Returns objects whose name is there again, stored later: they are
        to be released."""
        self.slabs[slab.number] = slab
        older = [] if table is None else self._add_known(slab, table)
        self.charge(slab, slab.num_slots - len(slab.holes))
        if slab.free or slab.holes:
            self.with_room[slab.slot_bytes].append(slab)
        return older

    def forget(self, slab: Slab) -> list[int]:
        """A slab whose files are gone. Those who use it still may: its descriptors are returned."""
        slab.gone = True
        del self.slabs[slab.number]
        if slab in self.with_room[slab.slot_bytes]:
            self.with_room[slab.slot_bytes].remove(slab)
        self.charge(slab, -slab.num_charged)
        for name in [name for name, place in self.index.items() if place >> _SLOT_BITS == slab.number]:
            del self.index[name]
            self.used_bytes -= slab.slot_bytes
        for place in self.arriving.values():
            if place.slab is slab:
                self.used_bytes -= slab.slot_bytes
        return slab.descriptors()

    def _add_known(self, slab: Slab, table: Table) -> list[Spot]:
        base = slab.number << _SLOT_BITS
        fresh = dict(zip(table.names, [base | slot for slot in table.slots], strict=True))
        slab.used[table.slots] = table.stored
        np.frombuffer(slab.names, "V16")[table.slots] = np.frombuffer(b"".join(table.names), "V16")
        self.used_bytes += len(table.slots) * slab.slot_bytes
        if len(fresh) == len(table.names) and self.index.keys().isdisjoint(fresh):
            self.index |= fresh
            return []
        older = []
        for name, slot in zip(table.names, table.slots, strict=True):
            other = self.index.get(name)
            if other is not None:
                mine, there = (slab, slot), self.at(other)
                older.append(min(mine, there, key=lambda one: int(one[0].used[one[1]])))
            if other is None or older[-1] == there:
                self.index[name] = base | slot
        for one in older:
            self.vacate(*one)
        return older

    def charge(self, slab: Slab, num_slots: int) -> None:
        slab.num_charged += num_slots
        self.charged_bytes += num_slots * slab.slot_bytes

    # ---- asked ----
    def at(self, place: int) -> Spot:
        return self.slabs[place >> _SLOT_BITS], place & ((1 << _SLOT_BITS) - 1)

    # ---- objects ----
    def begin(self, item: Write, evicted: Evicted) -> Place | Outcome | None:
        """A place, ``DONE``: it is there, ``DROPPED``: it has no room, or None: it waits for another write of its name.

        Raises:
            NoSlab: make one, then ask again.
        """
        size = slot_bytes_of(item.size_bytes)
        if item.name in self.index:
            return Outcome.DONE
        if item.name in self.arriving:
            self.arriving[item.name].waiting += (item,)
            return None
        if size > self.capacity_bytes or item.size_bytes >= 1 << 32:
            return Outcome.DROPPED
        spot = self._free_slot(size)
        needed, given, trimmed = 0 if spot else size, 0, 0
        while self.charged_bytes + needed > self.capacity_bytes and (given < needed or trimmed < TRIMMED_PER_STORE):
            victim = spare = self._spare_slot(size)
            if spare is None and (victim := self.victim()) is not None:
                evicted.records.append(victim)
            if victim is None:
                break
            if spot is None and victim[0].slot_bytes == size:
                spot, needed = victim, 0
                continue
            self.charge(victim[0], -1)
            evicted.punched.append(victim)
            given += victim[0].slot_bytes
            trimmed += 1
        if spot is None:
            if self.charged_bytes + size > self.capacity_bytes:
                return Outcome.DROPPED
            spot = self._hole(size)
            self.charge(spot[0], 1)
        return self.expect(item.name, item.size_bytes, spot)

    def expect(self, name: bytes, size_bytes: int, spot: Spot) -> Place:
        """The object is on its way into a slot that is nobody's."""
        self.used_bytes += spot[0].slot_bytes
        place = self.arriving[name] = Place(name, size_bytes, *spot)
        return place

    def end(self, place: Place, used: int, *, kept: bool, last: bool) -> None:
        """The object is there, or its slot is nobody's again."""
        slab, slot = place.slab, place.slot
        mine = self.arriving.get(place.name) is place
        if mine:
            del self.arriving[place.name]
        if slab.gone:
            return
        if kept and mine:
            place.kept = True
            slab.set_name(slot, place.name)
            slab.used[slot] = used
            self.index[place.name] = slab.number << _SLOT_BITS | slot
        else:
            self.used_bytes -= slab.slot_bytes
            self.give(slab, slot, last=last)

    def delete(self, name: bytes) -> Spot | None:
        """Where it was. The slot is to be released when nothing tells of the object any more."""
        place = self.index.pop(name, None)
        if place is None:
            return None
        spot = self.at(place)
        self.vacate(*spot)
        return spot

    # ---- slots ----
    def _free_slot(self, size: int) -> Spot | None:
        for slab in reversed(self.with_room[size]):
            if slab.free:
                return slab, self._taken(slab, slab.free)
        return None

    def _hole(self, size: int) -> Spot:
        for slab in self.with_room[size]:
            if slab.holes:
                return slab, self._taken(slab, slab.holes)
        raise NoSlab

    def _spare_slot(self, size: int) -> Spot | None:
        """One that takes bytes of the disk for nothing, of another size."""
        for other, found in self.with_room.items():
            if other != size:
                for slab in found:
                    if slab.free:
                        return slab, self._taken(slab, slab.free)
        return None

    def _taken(self, slab: Slab, slots: array[int]) -> int:
        slot = slots.pop()
        if not (slab.free or slab.holes):
            self.with_room[slab.slot_bytes].remove(slab)
        return slot

    def take_free(self) -> list[Spot]:
        """All slots that take bytes of the disk for nothing. They are not charged any more."""
        taken: list[Spot] = []
        for slab in self.slabs.values():
            slots = slab.free.tolist()
            if slots:
                del slab.free[:]
                if not slab.holes:
                    self.with_room[slab.slot_bytes].remove(slab)
                self.charge(slab, -len(slots))
                taken += [(slab, slot) for slot in slots]
        return taken

    def give(self, slab: Slab, slot: int, *, hole: bool = False, last: bool = False) -> None:
        if not (slab.free or slab.holes):
            self.with_room[slab.slot_bytes].append(slab)
        slots = slab.holes if hole else slab.free
        slots.insert(0 if last else len(slots), slot)

    def victim(self) -> Spot | None:
        """The object used longest ago that nobody reads; it is not in the index any more."""
        for attempt in range(2):
            while self._oldest:
                slab, slot, used = self._oldest.popleft()
                if slab.used[slot] == used and slot not in slab.reading and not slab.gone:
                    del self.index[slab.name_at(slot)]
                    self.vacate(slab, slot)
                    self.evicted += 1
                    return slab, slot
            if not attempt:
                self._find_oldest()
        return None

    def vacate(self, slab: Slab, slot: int) -> None:
        """Its object is none any more."""
        slab.used[slot] = 0
        self.used_bytes -= slab.slot_bytes

    def _find_oldest(self) -> None:
        """A part of all objects at a time: what is used or stored meanwhile is younger than all of these. Neighbours of
        about one age leave together, so that what comes in their place is written by one call of the system."""
        found = list(self.slabs.values())
        used = np.concatenate([slab.used for slab in found]) if found else np.zeros(0, np.int64)
        there = np.flatnonzero(used)
        total = len(there)
        count = min(total, max(1024, total // 64))
        if count < len(there):
            there = there[np.argpartition(used[there], count)[:count]]
        there = there[np.argsort(used[there])]
        there = there[np.lexsort((there, np.arange(count) // max(1, total // AGES)))]
        ends = np.cumsum([slab.num_slots for slab in found])
        which = np.searchsorted(ends, there, side="right")
        for place, number, age in zip(there.tolist(), which.tolist(), used[there].tolist(), strict=True):
            slab = found[number]
            self._oldest.append((slab, place - int(ends[number]) + slab.num_slots, age))

    def release(self, slab: Slab, slot: int) -> None:
        if slot in slab.reading:
            slab.leaving.add(slot)
        elif not slab.gone:
            self.give(slab, slot)


def slot_bytes_of(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
