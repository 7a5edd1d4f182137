"""Which object is in which slot: random stores, reads, deletions and lost slabs beside a plain list of objects."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest

from paddle_kv.tiers.object_format import ALIGN_BYTES
from paddle_kv.tiers.protocol import Outcome
from paddle_kv.tiers.slab import Table
from paddle_kv.tiers.space import Evicted, NoSlab, Place, Space, slot_bytes_of

SLOTS = 4  # of a slab


class FakeSlab:
    """Slots in memory alone."""

    def __init__(self, number: int, slot_bytes: int, num_slots: int = SLOTS) -> None:
        self.number, self.slot_bytes, self.num_slots = number, slot_bytes, num_slots
        self.names = bytearray(16 * num_slots)
        self.used = np.zeros(num_slots, np.int64)
        self.free, self.holes = array("I"), array("I", range(num_slots))
        self.reading: dict[int, int] = {}
        self.leaving: set[int] = set()
        self.num_charged = 0
        self.gone = False

    def name_at(self, slot: int) -> bytes:
        return bytes(self.names[16 * slot : 16 * slot + 16])

    def set_name(self, slot: int, name: bytes) -> None:
        self.names[16 * slot : 16 * slot + 16] = name

    def descriptors(self) -> list[int]:
        return [100 + self.number]


class Item:
    def __init__(self, name: int, size_bytes: int) -> None:
        self.name, self.size_bytes = b"%016d" % name, size_bytes


class Model:
    """Objects as a list, with the space beside it."""

    def __init__(self, capacity_bytes: int, *, reading: bool = False) -> None:
        self.space, self.reading = Space(capacity_bytes), reading
        self.there: dict[bytes, int] = {}  # name -> when it was used
        self.places: list[Place] = []
        self.reads: list[tuple[Any, int]] = []
        self.slabs: list[FakeSlab] = []

    def store(self, item: Any) -> Any:
        evicted = Evicted()
        while True:
            try:
                found = self.space.begin(item, evicted)
                break
            except NoSlab:
                slab = FakeSlab(len(self.slabs), slot_bytes_of(item.size_bytes))
                self.slabs.append(slab)
                assert self.space.add(slab) == []  # type: ignore[arg-type]
        for slab, slot in evicted.records:
            name = slab.name_at(slot)
            if not self.reading:  # else what was read is passed over, and looked at later
                assert self.there[name] == min(self.there.values())
            del self.there[name]
        for slab, slot in evicted.punched:
            self.space.give(slab, slot, hole=True)
        if isinstance(found, Place):
            self.places.append(found)
        return found

    def check(self) -> None:
        space = self.space
        assert space.index.keys() == self.there.keys()
        assert space.arriving.keys() >= {
            place.name for place in self.places if not place.slab.gone and self.is_mine(place)
        }
        owners: dict[tuple[int, int], str] = {}

        def own(slab: Any, slot: int, who: str) -> None:
            assert owners.setdefault((slab.number, slot), who) == who
            owners[slab.number, slot] = who

        for name, place in space.index.items():
            slab, slot = space.at(place)
            assert slab.name_at(slot) == name and slab.used[slot] == self.there[name]
            own(slab, slot, "object")
        for arriving in self.places:
            if not arriving.slab.gone:
                own(arriving.slab, arriving.slot, "arriving")
        live = [slab for slab in self.slabs if not slab.gone]
        assert space.slabs == {slab.number: slab for slab in live}
        for slab in live:
            for who, slots in (("free", slab.free), ("hole", slab.holes), ("leaving", slab.leaving)):
                assert len(set(slots)) == len(slots)
                for slot in slots:
                    own(slab, slot, who)
            assert slab.num_charged == slab.num_slots - len(slab.holes)
            in_room = [one for one in space.with_room[slab.slot_bytes] if one is slab]
            assert len(in_room) == bool(slab.free or slab.holes)
            assert len([key for key in owners if key[0] == slab.number]) == slab.num_slots
        assert space.charged_bytes == sum(slab.num_charged * slab.slot_bytes for slab in live)
        arriving_bytes = sum(place.slab.slot_bytes for place in self.places if not place.slab.gone)
        assert space.used_bytes == arriving_bytes + sum(space.at(place)[0].slot_bytes for place in space.index.values())
        assert space.charged_bytes <= space.capacity_bytes

    def is_mine(self, place: Place) -> bool:
        return self.space.arriving.get(place.name) is place


@pytest.mark.parametrize("reading", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_space_beside_a_list(seed: int, reading: bool) -> None:
    rng = random.Random(seed)
    model = Model(10 * ALIGN_BYTES, reading=reading)
    space = model.space
    dropped = waited = 0
    for _ in range(400):
        what = rng.random()
        if what < 0.4:
            item: Any = Item(rng.randrange(30), rng.choice([1, ALIGN_BYTES, ALIGN_BYTES + 1, 3 * ALIGN_BYTES]))
            before, arriving = item.name in model.there, space.arriving.get(item.name)
            found = model.store(item)
            if before:
                assert found is Outcome.DONE
            elif arriving is not None:
                assert found is None and arriving.waiting[-1] is item
                waited += 1
            elif found is Outcome.DROPPED:
                dropped += 1
            else:
                assert space.arriving[item.name] is found and (found.size_bytes, found.kept) == (item.size_bytes, False)
                assert found.slab.slot_bytes == slot_bytes_of(item.size_bytes)
        elif what < 0.7 and model.places:
            place = model.places.pop(rng.randrange(len(model.places)))
            used, kept, last = next(space.clock), rng.random() < 0.8, rng.random() < 0.5
            space.end(place, used, kept=kept, last=last)
            assert place.kept == (kept and not place.slab.gone)
            if place.kept:
                model.there[place.name] = used
            elif not place.slab.gone:
                assert place.slab.free[0 if last else -1] == place.slot
        elif what < 0.8 and model.there:
            name = rng.choice(list(model.there))
            del model.there[name]
            spot = space.delete(name)
            assert spot is not None and space.delete(name) is None
            space.release(*spot)
        elif what < 0.9 and reading and model.there:
            name = rng.choice(list(model.there))
            slab, slot = space.at(space.index[name])
            slab.used[slot] = model.there[name] = next(space.clock)
            slab.reading[slot] = slab.reading.get(slot, 0) + 1
            model.reads.append((slab, slot))
        elif what < 0.95 and model.reads:
            slab, slot = model.reads.pop(rng.randrange(len(model.reads)))
            slab.reading[slot] -= 1
            if not slab.reading[slot]:
                del slab.reading[slot]
                if slot in slab.leaving:
                    slab.leaving.remove(slot)
                    space.release(slab, slot)
        elif what < 0.97:
            taken = space.take_free()
            assert all(not slab.free for slab in space.slabs.values())
            for slab, slot in taken:
                space.give(slab, slot, hole=True)
        elif what < 0.98 and space.slabs:
            lost: Any = rng.choice(list(space.slabs.values()))
            for name in [name for name, place in space.index.items() if space.at(place)[0] is lost]:
                del model.there[name]
            assert space.forget(lost) == [100 + lost.number]
            assert lost.gone
        model.check()
    assert space.evicted > 5 and waited > 5 and dropped > 0


def test_what_has_no_room_is_dropped() -> None:
    model = Model(2 * ALIGN_BYTES)
    for item in (Item(1, 2 * ALIGN_BYTES + 1), Item(2, 1 << 32)):
        assert model.store(item) is Outcome.DROPPED
    huge = Space(1 << 40)
    assert huge.begin(Item(1, 1 << 32), Evicted()) is Outcome.DROPPED  # type: ignore[arg-type]
    with pytest.raises(NoSlab):
        huge.begin(Item(1, (1 << 32) - 1), Evicted())  # type: ignore[arg-type]
    places = [model.store(Item(number, ALIGN_BYTES)) for number in (3, 4)]
    assert all(isinstance(place, Place) for place in places)
    assert model.store(Item(5, 1)) is Outcome.DROPPED  # both are being written
    model.check()


def test_the_oldest_go_first_also_of_many() -> None:
    """Of one age, so to say: a sixteenth of them."""
    space = Space(1 << 40)
    slab: Any = FakeSlab(0, ALIGN_BYTES, 2000)
    space.add(slab)
    order = random.Random(3).sample(range(2000), 2000)
    for used, number in enumerate(order, 1):
        place = space.expect(b"%016d" % number, 1, (slab, number))
        space.end(place, used, kept=True, last=False)
    gone = [space.victim() for _ in range(1024)]
    slots = [spot[1] for spot in gone if spot is not None]
    assert sorted(slots) == sorted(order[:1024])
    part = 2000 // 16
    for start in range(0, 1024, part):
        assert slots[start : start + part] == sorted(order[start : min(1024, start + part)])
    slab.reading[order[1024]] = 1
    slab.used[order[1025]] = 5000  # used again
    found = space.victim()
    assert found is not None and found[1] not in (order[1024], order[1025])
    assert space.evicted == 1025 and len(space.index) == 975
    while space.victim() is not None:
        pass
    assert list(space.index) == [b"%016d" % order[1024]]
    assert Space(100).victim() is None


def test_tables_that_tell_of_the_same_names() -> None:
    """The one stored later counts, in whichever slab it is."""
    space = Space(1 << 30)
    first, second, third = (FakeSlab(number, ALIGN_BYTES) for number in range(3))
    names = [b"%016d" % number for number in range(6)]
    for slab, slots, told, stored in (
        (first, [0, 1, 3], names[:3], [5, 6, 7]),
        (second, [1, 2], [names[1], names[3]], [9, 2]),
        (third, [3, 0], [names[3], names[0]], [8, 4]),
    ):
        slab.holes, slab.free = array("I"), array("I", sorted(set(range(SLOTS)) - set(slots)))
        table = Table(slots, told, np.array(stored), np.ones(len(slots)), [], [])
        older = space.add(slab, table)  # type: ignore[arg-type]
        assert [(one.number, slot) for one, slot in older] == {0: [], 1: [(0, 1)], 2: [(1, 2), (2, 0)]}[slab.number]
        for spot in older:
            space.release(*spot)
    where = {name: (space.at(place)[0].number, space.at(place)[1]) for name, place in space.index.items()}
    assert where == {names[0]: (0, 0), names[1]: (1, 1), names[2]: (0, 3), names[3]: (2, 3)}
    assert (space.used_bytes, space.charged_bytes) == (4 * ALIGN_BYTES, 12 * ALIGN_BYTES)
    assert sorted(second.free) == [0, 2, 3] and list(third.used) == [0, 0, 0, 8]
    twice = FakeSlab(3, ALIGN_BYTES)
    twice.holes = array("I")
    table = Table([0, 1], [names[5], names[5]], np.array([1, 2]), np.ones(2), [], [])
    assert space.add(twice, table) == [(twice, 0)]  # type: ignore[arg-type]
    assert space.at(space.index[names[5]]) == (twice, 1)


def test_bytes_of_a_slot() -> None:
    assert [slot_bytes_of(size) for size in (1, ALIGN_BYTES, ALIGN_BYTES + 1)] == [
        ALIGN_BYTES,
        ALIGN_BYTES,
        2 * ALIGN_BYTES,
    ]
