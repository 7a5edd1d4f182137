"""Several engines as one: what is read where, what is deleted where, and the suite of all engines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_kv.testing.tiers import EngineConformance, FaultyEngine
from paddle_kv.testing.tiers.rig import WAIT_S, Rig, keys
from paddle_kv.tiers import EnginesInOrder, FilesEngine, Outcome
from paddle_kv.tiers.neighbours import NeighbourEngine
from paddle_kv.tiers.neighbours.neighbour import Memory
from tests.peers.conftest import until
from tests.tiers.test_neighbours import Lending

KEYS = keys(8)


class TestTwoFolders(EngineConformance):
    """All is in the first one; what is there already is not stored again."""

    def make_engine(self, folder: Path, capacity_bytes: int) -> EnginesInOrder:
        return _Swapped([FilesEngine({folder / "first": capacity_bytes - 1000}), FilesEngine({folder / "last": 1000})])


class _Swapped(EnginesInOrder):
    """Stores in the first one."""

    def write(self, items: Any) -> None:
        self._engines[0].write(items)


class Both:
    """Keys 0 to 5 with a neighbour, 3 to 7 in files."""

    def __init__(self, folder: Path) -> None:
        self.files = FilesEngine({folder: 1 << 26})
        below = Rig(self.files)
        assert below.store(KEYS[3:]).done
        below.close()
        self.lending = Lending(KEYS[:6])
        self.near = FaultyEngine(NeighbourEngine([self.lending.lender.path]), [])
        self.near._engine.wait_connected(WAIT_S)  # type: ignore[attr-defined]
        self.engine = EnginesInOrder([self.near, self.files])
        self.rig = Rig(self.engine)

    @property
    def num_read(self) -> int:
        return self.lending.lender.stats()["read_blocks"]

    def close(self) -> None:
        self.rig.close()
        self.engine.close(WAIT_S)
        self.lending.close()


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    with contextlib.closing(Both(tmp_path)) as made:
        yield made


def test_each_object_comes_from_the_first_that_has_it(both: Both) -> None:
    assert both.rig.tier.exists([*KEYS, b"none"]) == [True] * 8 + [False]
    job = both.rig.load([*KEYS, b"none"])
    assert job.outcomes == [Outcome.DONE] * 8 + [Outcome.MISSING]
    assert both.rig.wrong(job) == []
    assert both.num_read == 6
    assert both.engine.stats()["objects"] == 11
    assert both.rig.store(keys(2, "new")).done
    assert both.files.stats()["objects"] == 7
    assert both.rig.load(keys(2, "new")).done


def test_what_the_first_one_has_lost_comes_from_the_next(both: Both) -> None:
    both.lending.lender._lent.objects.clear()  # and has told nobody
    job = both.rig.load(KEYS)
    assert job.outcomes == [Outcome.MISSING] * 3 + [Outcome.DONE] * 5
    assert both.rig.wrong(job) == []
    assert both.files.stats()["objects"] == 5
    both.near.dead = True
    assert both.rig.load(KEYS[3:]).done


def test_a_neighbour_that_fails(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultyEngine, "exists", lambda engine, names: engine._engine.exists(names))
    both.near.dead = True  # and yet says that it has them
    job = both.rig.load(KEYS)
    assert job.outcomes == [Outcome.FAILED] * 3 + [Outcome.DONE] * 5
    assert both.rig.wrong(job) == []


def test_what_fails_in_its_middle_is_not_begun_again(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, asked = Memory.copy, []

    def fails(memory: Memory, block_id: int, offset: int, targets: Any) -> None:
        if offset:
            raise OSError("lost")
        copy(memory, block_id, offset, targets)

    monkeypatch.setattr(Memory, "copy", fails)
    monkeypatch.setattr(both.files, "read", lambda items: asked.extend(item.ended(Outcome.MISSING) for item in items))
    assert both.rig.load([KEYS[4]]).outcomes == [Outcome.FAILED]
    assert asked == []


def test_damage_in_the_first_one_costs_nothing_in_the_next(both: Both) -> None:
    assert both.rig.load(KEYS).done
    both.lending.rows[[1, 4], 5000] ^= 1
    job = both.rig.load(KEYS)
    assert [i for i in range(8) if job.outcomes[i] is Outcome.DAMAGED] == [1, 4]
    assert both.rig.tier.exists(KEYS) == [i != 1 for i in range(8)]
    assert both.files.stats()["objects"] == 5
    job = both.rig.load([key for key in KEYS if key != KEYS[1]])
    assert job.done
    assert both.rig.wrong(job) == []


def test_what_is_deleted_is_deleted_in_all(both: Both) -> None:
    both.rig.tier.delete([KEYS[1], KEYS[4], KEYS[7]])
    assert both.rig.tier.exists(KEYS) == [i not in (1, 4, 7) for i in range(8)]
    assert both.files.stats()["objects"] == 3
    with pytest.raises(NotImplementedError, match="neighbours, files"):
        both.rig.tier.clear()


def test_what_is_missing_in_the_last_one_is_deleted_there(both: Both, tmp_path: Path) -> None:
    until(lambda: both.rig.tier.exists(KEYS[:1]) == [True])
    for slab in tmp_path.glob("*.slab"):
        slab.write_bytes(bytes(slab.stat().st_size))
    assert both.rig.load(KEYS[6:]).outcomes == [Outcome.DAMAGED] * 2
    assert both.files.stats()["objects"] == 3


def test_bad_input(tmp_path: Path) -> None:
    with FilesEngine({tmp_path: 1 << 20}) as engine:
        for wrong, error in ((engine, TypeError), ([engine], ValueError), ([], ValueError), ([engine, "x"], TypeError)):
            with pytest.raises(error, match="engines"):
                EnginesInOrder(wrong)  # type: ignore[arg-type]


class Fake:
    """An engine that keeps what it is asked for."""

    name = "fake"

    def __init__(self, *names: bytes) -> None:
        self.names, self.asked, self.deleted = set(names), [], []  # type: ignore[var-annotated]
        self.closing_s: list[float | None] = []

    def register(self, memory: Any) -> None: ...

    def write(self, items: Any) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    def exists(self, names: Any) -> list[bool]:
        return [name in self.names for name in names]

    def read(self, items: Any) -> None:
        self.asked += [item.name for item in items]

    def delete(self, names: Any) -> None:
        self.deleted += names

    def close(self, timeout_s: float | None = None) -> None:
        self.closing_s.append(timeout_s)
        time.sleep(0.05)


def test_an_engine_is_asked_for_what_it_has_and_the_last_one_for_the_rest() -> None:
    class Item:
        def __init__(self, name: bytes) -> None:
            self.name = name

    first, last = Fake(b"a", b"b"), Fake(b"b", b"c")
    EnginesInOrder([first, last]).read([Item(name) for name in (b"a", b"b", b"c", b"d")])  # type: ignore[list-item]
    assert (first.asked, last.asked) == ([b"a", b"b"], [b"c", b"d"])


def test_a_thread_that_has_ended_an_object_deletes_in_all_again() -> None:
    first, last = Fake(), Fake()
    engine = EnginesInOrder([first, last])
    with engine._deleting_in(0):
        engine.delete([b"a"])
    engine.delete([b"b"])
    assert (first.deleted, last.deleted) == ([b"a", b"b"], [b"b"])


def test_engines_are_closed_within_one_time() -> None:
    first, last = Fake(), Fake()
    EnginesInOrder([first, last]).close(10.0)
    assert last.closing_s[0] is not None
    assert last.closing_s[0] <= 9.96
