"""A lender and those who read out of its pool."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_kv import ClosedError, ForkedError, HostPool, KVCacheSpec
from paddle_kv.memory.host_rows import block_rows
from paddle_kv.testing.tiers.rig import ALIGNED, ODD, POISON, SPECS, WAIT_S, Rig, keys
from paddle_kv.tiers import Job, Outcome
from paddle_kv.tiers.neighbours import Lender, NeighbourEngine
from paddle_kv.tiers.neighbours import engine as engine_module
from paddle_kv.tiers.neighbours import lender as lender_module
from paddle_kv.tiers.neighbours import neighbour as neighbour_module
from paddle_kv.tiers.neighbours.neighbour import Memory
from tests.peers.conftest import until
from tests.tiers.neighbour_kills import content

SHORT_S = 0.05
KEYS = keys(8)


class Lending:
    """A pool whose block ``i`` is lent as key ``i``."""

    def __init__(self, names: list[bytes] = KEYS, spec: KVCacheSpec = ALIGNED, num_blocks: int = 20, **given: Any):
        self.pool = HostPool(spec, num_blocks, layout="block_first", shared=True)
        self.rows = block_rows(self.pool)
        self.rows[:] = 0x5A
        for block_id, key in enumerate(names):
            self.rows[block_id] = content(self.rows, key)
        self.lender = Lender(self.pool, model=b"model", **given)
        self.lender.lend(names, range(len(names)))

    def close(self) -> None:
        self.lender.close(WAIT_S)
        self.pool.close()


class Reading:
    def __init__(self, *lendings: Lending, spec: KVCacheSpec = ALIGNED, **given: Any) -> None:
        self.engine = NeighbourEngine([one.lender.path for one in lendings], **given)
        self.engine.wait_connected(WAIT_S)
        self.rig = Rig(self.engine, spec)
        self.tier = self.rig.tier

    def close(self) -> None:
        self.rig.close()
        self.engine.close(WAIT_S)


@pytest.fixture
def lending() -> Iterator[Lending]:
    made = Lending()
    yield made
    until(lambda: not made.lender.stats()["leased_blocks"])
    made.close()


@pytest.fixture
def reading(lending: Lending) -> Iterator[Reading]:
    made = Reading(lending)
    yield made
    made.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private one, with a name that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="paddle_kv-") as made:
        yield Path(made)


class Gate:
    """Copies from the number ``first`` on wait until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int = 0) -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()
        self._left, self._copy, self._wait_s = first, Memory.copy, 15.0  # a test that fails does not hang
        self.blocks: list[int] = []  # in the order of the copies
        monkeypatch.setattr(Memory, "copy", lambda *given: self.copy(*given))

    def copy(self, *given: Any) -> None:
        self.blocks.append(given[1])
        self._left -= 1
        if self._left < 0:
            self.arrived.set()
            assert self.opened.wait(self._wait_s)
        self._copy(*given)


@pytest.mark.parametrize("spec", SPECS)
def test_blocks_come_bit_for_bit_and_nothing_else_changes(spec: KVCacheSpec) -> None:
    lending = Lending(spec=spec)
    reading = Reading(lending, spec=spec)
    before, rig = lending.rows.copy(), reading.rig
    job = rig.load(KEYS, targets := [13, 2, 39, 4, 11, 0, 7, 25])
    assert job.done
    for key, block_id in zip(KEYS, targets, strict=True):
        assert (rig.rows[block_id] == content(rig.rows, key)).all()
    assert (rig.rows[sorted(set(range(40)) - set(targets))] == POISON).all()
    assert (lending.rows == before).all()
    until(lambda: not lending.lender.stats()["leased_blocks"])
    stats = lending.lender.stats()
    assert (stats["read_blocks"], stats["expired_blocks"], stats["readers"]) == (8, 0, 1)
    reading.close()
    until(lambda: not lending.lender.stats()["readers"])
    lending.close()


def test_what_exists_follows_what_is_lent(lending: Lending, reading: Reading) -> None:
    tier, lender = reading.tier, lending.lender
    assert tier.exists([*KEYS, b"other"]) == [True] * 8 + [False]
    lender.take_back([KEYS[2], b"unknown", KEYS[5]])
    until(lambda: tier.exists(KEYS) == [i not in (2, 5) for i in range(8)])
    lending.rows[2] = content(lending.rows, b"new")
    lender.lend([b"new"], [2])
    lender.lend([KEYS[5]], [5])
    until(lambda: tier.exists([b"new", KEYS[5]]) == [True, True])
    assert reading.rig.load([b"new", KEYS[5], KEYS[2]]).outcomes == [Outcome.DONE, Outcome.DONE, Outcome.MISSING]
    lending.rows[0] = content(lending.rows, b"instead")
    lender.lend([b"instead"], [0])  # of a block that was lent as another one
    until(lambda: tier.exists([b"instead", KEYS[0]]) == [True, False])
    lending.rows[9] = content(lending.rows, KEYS[1])
    lender.lend([KEYS[1]], [9])  # a key that lies elsewhere now
    lending.rows[1] = 0
    job = reading.rig.load([KEYS[1], b"instead"])
    assert job.done
    assert reading.rig.wrong(job) == []
    assert lender.stats()["lent_blocks"] == 8
    assert tier.stats()["engine_objects"] == 8


def test_many_names_come_in_many_messages() -> None:
    names = keys(1000)
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=16, block_size=1, dtype="int8")
    lending = Lending(names, spec, 1000)
    reading = Reading(lending, spec=spec)
    assert reading.tier.exists(names) == [True] * 1000
    lending.lender.take_back(names[:500])
    until(lambda: reading.tier.exists(names) == [False] * 500 + [True] * 500)
    assert reading.rig.load(names[600:640], range(40)).done
    stats = reading.engine.stats()
    assert (stats["objects"], stats["evicted"], stats["errors"], stats["resting_roots"]) == (500, 500, 0, 0)
    assert stats["capacity_bytes"] == 2 * stats["used_bytes"] == 1000 * (4096 + 32)
    reading.close()
    lending.close()


def test_what_is_forgotten_comes_back_when_it_is_lent_anew(lending: Lending, reading: Reading) -> None:
    reading.tier.delete([KEYS[3]])
    assert reading.tier.exists(KEYS[2:5]) == [True, False, True]
    assert reading.rig.load([KEYS[3]]).outcomes == [Outcome.MISSING]
    assert lending.lender.stats()["lent_blocks"] == 8  # it is the lender's
    lending.lender.lend([KEYS[3]], [3])
    until(lambda: reading.tier.exists([KEYS[3]]) == [True])
    assert reading.rig.load([KEYS[3]]).done


def test_nothing_is_stored(reading: Reading) -> None:
    assert set(reading.rig.store(keys(3, "mine")).outcomes) == {Outcome.DROPPED}
    assert reading.tier.exists(keys(3, "mine")) == [False] * 3
    with pytest.raises(NotImplementedError, match="neighbours"):
        reading.tier.clear()


def test_a_block_stays_as_it_is_while_it_is_read(
    lending: Lending, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, first=3)
    own = lending.pool.allocate(20)
    job = Job(KEYS[:4], range(4), timeout_s=WAIT_S)
    reading.tier.load([job])
    assert gate.arrived.wait(WAIT_S)
    lending.lender.take_back(KEYS)
    with pytest.raises(TimeoutError), lending.pool.lease([1], write=True, timeout_s=SHORT_S):
        pass
    with lending.pool.lease([4], write=True, timeout_s=SHORT_S):
        pass  # nobody reads it
    lending.pool.free(own)
    assert lending.pool.num_free_blocks == 16
    gate.opened.set()
    reading.tier.drain(WAIT_S)
    assert job.done
    assert reading.rig.wrong(job) == []
    until(lambda: lending.pool.num_free_blocks == 20)
    assert not any(reading.tier.exists(KEYS))


@pytest.mark.parametrize("first", [0, 1, 5, 9])
def test_what_was_overwritten_behind_the_lease_never_counts(
    lending: Lending, reading: Reading, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    gate = Gate(monkeypatch, first)
    monkeypatch.setattr(lender_module, "LONGEST_LEASE_S", SHORT_S)
    job = Job(KEYS[:4], range(4), timeout_s=WAIT_S)
    reading.tier.load([job])
    assert gate.arrived.wait(WAIT_S)
    until(lambda: lending.lender.stats()["expired_blocks"] == 4)
    lending.lender.take_back(KEYS)
    with lending.pool.lease([0, 1, 2, 3], write=True, timeout_s=WAIT_S):
        lending.rows[:4] = lending.rows[4:8]
    lending.lender.lend(KEYS[4:], range(4))
    until(lambda: reading.tier.exists(KEYS) == [False] * 4 + [True] * 4)
    gate.opened.set()
    reading.tier.drain(WAIT_S)
    assert job.over
    before = max(0, first - 8)  # of the last stage what was copied before
    assert job.outcomes == [Outcome.DONE] * before + [Outcome.DAMAGED] * (4 - before)
    assert reading.rig.wrong(job) == []
    assert reading.rig.load(KEYS[4:], range(4)).done


def test_a_header_of_another_object_is_a_miss(
    lending: Lending, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block was lent as another one, and read as that, while a reader stood still."""
    gate = Gate(monkeypatch)
    monkeypatch.setattr(lender_module, "LONGEST_LEASE_S", SHORT_S)
    job = Job(KEYS[:1], [0], timeout_s=WAIT_S)
    reading.tier.load([job])
    assert gate.arrived.wait(WAIT_S)
    until(lambda: lending.lender.stats()["expired_blocks"] == 1)
    lending.rows[0] = content(lending.rows, b"new")
    lending.lender.lend([b"new"], [0])
    lender, found = lending.lender._lent, lending.lender._lent.objects
    [one] = [one for one in found.values() if one.key == b"new"]
    lender.write_headers(lender_module.Leased([one], None))
    gate.opened.set()
    reading.tier.drain(WAIT_S)
    assert job.outcomes == [Outcome.MISSING]


def test_a_block_that_holds_nothing_usable_is_not_lent(lending: Lending, reading: Reading) -> None:
    lending.pool.domain._poisoned[2] = True
    assert reading.rig.load(KEYS[1:4]).outcomes == [Outcome.DONE, Outcome.MISSING, Outcome.DONE]
    lending.pool.domain._poisoned[2] = False
    with lending.pool.lease([5], write=True, timeout_s=WAIT_S):
        assert reading.rig.load(KEYS[5:7]).outcomes == [Outcome.DROPPED, Outcome.DONE]
    assert reading.rig.load(KEYS[5:7]).done


def test_more_than_half_of_the_pool_is_read_in_turns(
    lending: Lending, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = keys(20)
    for block_id, key in enumerate(names):
        lending.rows[block_id] = content(lending.rows, key)
    lending.lender.lend(names, range(20))
    until(lambda: all(reading.tier.exists(names)))
    gate = Gate(monkeypatch)
    job = Job(names, range(20), timeout_s=WAIT_S)
    reading.tier.load([job])
    assert gate.arrived.wait(WAIT_S)
    until(lambda: len(reading.engine._neighbours[0].busy) == 10)
    assert lending.lender.stats()["leased_blocks"] == 10
    other = Reading(lending)
    assert set(other.rig.load(names[:3]).outcomes) == {Outcome.DROPPED}  # it reads nothing behind which it could wait
    assert all(other.tier.exists(names[:3]))
    gate.opened.set()
    reading.tier.drain(WAIT_S)
    assert job.done
    assert reading.rig.wrong(job) == []
    other.close()


def test_several_readers_of_one_lender(lending: Lending) -> None:
    readings = [Reading(lending) for _ in range(3)]
    jobs = [Job(KEYS, range(8 * i, 8 * i + 8), timeout_s=WAIT_S) for i in range(3)]
    for reading, job in zip(readings, jobs, strict=True):
        reading.tier.load([job])
    for reading, job in zip(readings, jobs, strict=True):
        reading.tier.drain(WAIT_S)
        assert reading.rig.wrong(job) == []
    done = [outcome for job in jobs for outcome in job.outcomes]
    assert done.count(Outcome.DONE) + done.count(Outcome.DROPPED) == 24
    assert done.count(Outcome.DONE) >= 10
    readings[1].close()
    until(lambda: lending.lender.stats()["readers"] == 2)
    until(lambda: not lending.lender.stats()["leased_blocks"])
    assert readings[0].rig.load(KEYS).done
    readings[0].close()
    readings[2].close()


def test_a_lease_ends_once(lending: Lending, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reader, and not again when its time would be over."""
    timed: list[Any] = []  # the end of its time comes when the test says
    monkeypatch.setattr(lending.lender._listening, "later", lambda _, job: timed.append(job))
    gate = Gate(monkeypatch)
    reading = Reading(lending)
    job = Job(KEYS, range(8), timeout_s=WAIT_S)
    reading.tier.load([job])
    assert gate.arrived.wait(WAIT_S)
    with pytest.raises(TimeoutError):
        reading.engine.close(0.0)
    until(lambda: not lending.lender.stats()["readers"])
    until(lambda: not lending.lender.stats()["leased_blocks"])
    told = threading.Event()
    for job in [*timed, told.set]:
        lending.lender._listening.post(job)
    assert told.wait(WAIT_S) and timed
    assert lending.lender.stats()["leased_blocks"] == lending.lender.stats()["expired_blocks"] == 0
    assert lending.pool.domain._num_leases == 0
    gate.opened.set()
    reading.close()


def test_a_block_that_is_asked_for_twice(lending: Lending, reading: Reading) -> None:
    job = Job([KEYS[1], KEYS[2], KEYS[1]], [4, 5, 6], timeout_s=WAIT_S)
    reading.tier.load([job])
    reading.tier.drain(WAIT_S)
    assert job.done
    assert reading.rig.wrong(job) == []
    until(lambda: not lending.lender.stats()["leased_blocks"])
    with lending.pool.lease(range(20), write=True, timeout_s=WAIT_S):
        pass


def test_first_layers_come_before_later_ones_of_others(lending: Lending, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(lending, threads=1)
    waiting = reading.engine._works
    jobs = [Job([key], [block_id], timeout_s=WAIT_S) for block_id, key in enumerate(KEYS[:3])]
    first = Gate(monkeypatch)
    reading.tier.load(jobs[:1])
    assert first.arrived.wait(WAIT_S)
    reading.tier.load(jobs[1:2])
    until(lambda: waiting.qsize() == 1)
    second = Gate(monkeypatch, first=1)
    first.opened.set()
    assert second.arrived.wait(WAIT_S)  # in the second stage of block 0; that of block 1 waits
    until(lambda: waiting.qsize() == 1)
    reading.tier.load(jobs[2:])
    until(lambda: waiting.qsize() == 2)
    second.opened.set()
    reading.tier.drain(WAIT_S)
    assert all(job.done for job in jobs)
    assert second.blocks[:4] == [1, 0, 2, 1]
    reading.close()


def test_two_lenders_behind_one_engine() -> None:
    one, two = Lending(KEYS[:5]), Lending(KEYS[3:])
    reading = Reading(one, two)
    tier, rig = reading.tier, reading.rig
    assert tier.exists([*KEYS, b"other"]) == [True] * 8 + [False]
    assert rig.load(KEYS).done
    assert (one.lender.stats()["read_blocks"], two.lender.stats()["read_blocks"]) == (5, 3)
    assert tier.stats()["engine_objects"] == 10
    one.lender._lent.objects.clear()  # what the first one does not have any more, and has not said
    job = rig.load(KEYS)
    assert job.outcomes == [Outcome.MISSING] * 3 + [Outcome.DONE] * 5
    assert rig.wrong(job) == []
    one.close()
    until(lambda: tier.exists(KEYS) == [False] * 3 + [True] * 5)
    assert rig.load(KEYS[3:]).done
    assert reading.engine.stats()["resting_roots"] == 1
    reading.close()
    two.close()


def test_a_question_without_an_answer_goes_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Lending(), Lending()
    reading = Reading(one, two)
    first = reading.engine._neighbours[0]
    ask = first.ask

    def ask_briefly(*given: Any) -> None:  # of the other one the answer may take its time
        with monkeypatch.context() as patch:
            patch.setattr(neighbour_module, "ANSWER_S", SHORT_S)
            ask(*given)

    monkeypatch.setattr(first, "ask", ask_briefly)
    stop, stopped = threading.Event(), threading.Event()
    one.lender._listening.post(lambda: (stopped.set(), stop.wait(WAIT_S)))
    assert stopped.wait(WAIT_S)
    job = reading.rig.load(KEYS)
    assert job.done
    assert two.lender.stats()["read_blocks"] == 8
    assert reading.engine.stats()["resting_roots"] == reading.engine.stats()["errors"] == 1
    stop.set()
    until(lambda: not reading.engine.stats()["resting_roots"])  # its late answer
    until(lambda: one.lender.stats()["read_blocks"] == 8 and not one.lender.stats()["leased_blocks"])
    reading.close()
    one.close()
    two.close()


def test_nobody_answers(lending: Lending, reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour_module, "ANSWER_S", SHORT_S)
    stop, stopped = threading.Event(), threading.Event()
    lending.lender._listening.post(lambda: (stopped.set(), stop.wait(WAIT_S)))
    assert stopped.wait(WAIT_S)
    assert set(reading.rig.load(KEYS).outcomes) == {Outcome.FAILED}
    assert not any(reading.tier.exists(KEYS))
    errors = reading.engine.stats()["errors"]
    assert set(reading.rig.load(KEYS).outcomes) == {Outcome.FAILED}
    assert reading.engine.stats()["errors"] == errors  # it was not asked again
    monkeypatch.undo()
    stop.set()
    until(lambda: all(reading.tier.exists(KEYS)))
    assert reading.rig.load(KEYS).done


def test_a_deadline_ends_a_question_before_its_answer(lending: Lending, reading: Reading) -> None:
    stop, stopped = threading.Event(), threading.Event()
    lending.lender._listening.post(lambda: (stopped.set(), stop.wait(WAIT_S)))
    assert stopped.wait(WAIT_S)
    job = Job(KEYS, range(8), timeout_s=SHORT_S)
    began_s = time.monotonic()
    reading.tier.load([job])
    reading.tier.drain(WAIT_S)  # over, not only settled
    assert time.monotonic() - began_s < neighbour_module.ANSWER_S
    assert set(job.outcomes) == {Outcome.LATE}
    stop.set()


def test_a_lender_that_ends_and_one_that_comes_after_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour_module, "LONGEST_RETRY_S", 0.1)
    path = folder / "lender"
    engine = NeighbourEngine([path])
    with pytest.raises(TimeoutError, match="nobody lends at"):
        engine.wait_connected(timeout_s=SHORT_S)
    rig = Rig(engine)
    assert rig.load(KEYS[:2]).outcomes == [Outcome.MISSING] * 2
    for names in (KEYS, KEYS[:3]):
        lending = Lending(names, path=path)
        engine.wait_connected(WAIT_S)
        assert rig.tier.exists(KEYS).count(True) == len(names)
        assert rig.load(names).done
        lending.close()
        until(lambda: not any(rig.tier.exists(KEYS)))
        assert rig.load(names).outcomes == [Outcome.MISSING] * len(names)
    rig.close()
    engine.close(WAIT_S)


def test_a_copy_goes_on_when_the_lender_has_ended(
    lending: Lending, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, first=2)
    job = Job(KEYS[:2], range(2), timeout_s=WAIT_S)
    reading.tier.load([job])
    assert gate.arrived.wait(WAIT_S)
    lending.lender.close(WAIT_S)
    assert lending.lender.stats()["leased_blocks"] == 0
    lending.pool.close()
    until(lambda: not any(reading.tier.exists(KEYS)))
    gate.opened.set()
    reading.tier.drain(WAIT_S)
    assert job.done  # its memory is there as long as somebody has it
    assert reading.rig.wrong(job) == []


def test_an_engine_that_is_closed_in_the_middle(
    lending: Lending, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "BATCH_BYTES", 60_000)
    gate = Gate(monkeypatch, first=3)
    job = Job(KEYS, range(8), timeout_s=WAIT_S)
    reading.tier.load([job])
    assert gate.arrived.wait(WAIT_S)
    with pytest.raises(TimeoutError, match="were not over"):
        reading.engine.close(SHORT_S)
    late = Job(KEYS[:2], range(10, 12))
    reading.tier.load([late])
    assert late.outcomes == [Outcome.DROPPED] * 2
    gate.opened.set()
    reading.engine.close(WAIT_S)
    reading.engine.close(WAIT_S)
    reading.tier.drain(WAIT_S)
    assert job.over
    assert Outcome.DROPPED in job.outcomes
    assert reading.rig.wrong(job) == []
    until(lambda: not lending.lender.stats()["leased_blocks"])


def test_an_engine_that_is_closed_while_blocks_are_busy(
    lending: Lending, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddle_kv.tiers.neighbours.lent.LEASED_SHARE", 0.1)
    gate = Gate(monkeypatch)
    job = Job(KEYS, range(8), timeout_s=WAIT_S)
    reading.tier.load([job])
    assert gate.arrived.wait(WAIT_S)
    until(lambda: len(reading.engine._neighbours[0].busy) == 6)
    with pytest.raises(TimeoutError):
        reading.engine.close(SHORT_S)
    gate.opened.set()
    reading.engine.close(WAIT_S)
    reading.tier.drain(WAIT_S)
    assert job.outcomes.count(Outcome.DROPPED) >= 6


def test_an_item_that_raises_fails_alone(lending: Lending, reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PART_BYTES", 1)
    copy = Memory.copy

    def fails(memory: Memory, block_id: int, *given: Any) -> None:
        if block_id == 3:
            raise ValueError("no such block")
        copy(memory, block_id, *given)

    monkeypatch.setattr(Memory, "copy", fails)
    outcomes = reading.rig.load(KEYS).outcomes
    assert outcomes == [Outcome.FAILED if i == 3 else Outcome.DONE for i in range(8)]


def test_a_copy_stays_within_header_and_block(lending: Lending, reading: Reading) -> None:
    memory = reading.engine._neighbours[0].memory
    assert memory is not None
    size = memory.object_bytes
    target = memoryview(bytearray(64))
    memory.copy(0, size - 64, [target])
    assert (np.frombuffer(target, np.uint8) == lending.rows[0][-64:]).all()
    for offset in (size - 63, size - 1, size, memory.header_bytes - 63, memory.header_bytes - 1):
        with pytest.raises(ValueError, match="64 bytes from"):
            memory.copy(0, offset, [target])


def test_bad_input(lending: Lending, folder: Path) -> None:
    lender, pool = lending.lender, lending.pool
    for wrong, error in (
        (([b"a"], [20]), IndexError),
        (([b"a"], [-1]), IndexError),
        (([b"a", b"b"], [1, 1]), ValueError),
        (([b"a"], [1, 2]), ValueError),
        (([b""], [1]), ValueError),
        (([b"x" * 65], [1]), ValueError),
        ((["a"], [1]), TypeError),
        ((b"a", [1]), TypeError),
    ):
        with pytest.raises(error):
            lender.lend(*wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keys"):
        lender.take_back(b"a")  # type: ignore[arg-type]
    assert lender.stats()["lent_blocks"] == 8
    with pytest.raises(TypeError, match="pool is str"):
        Lender("pool", model=b"m")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is str"):
        Lender(pool, model="m")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank = -1"):
        Lender(pool, model=b"m", rank=-1)
    with pytest.raises(ValueError, match="shared=True"):
        Lender(HostPool(ALIGNED, 2, layout="block_first"), model=b"m")
    with pytest.raises(ValueError, match="block_first"):
        Lender(HostPool(ODD, 2, layout="layer_first", shared=True), model=b"m")
    with pytest.raises(OSError, match="in use"):
        Lender(pool, model=b"m", path=lender.path)
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="755"):
        Lender(pool, model=b"m", path=folder / "lender")
    for paths, wrong_type in ((lender.path, True), (7, True), ([], False), ([lender.path] * 2, False), (["\0"], False)):
        with pytest.raises(TypeError if wrong_type else ValueError, match="path"):
            NeighbourEngine(paths)  # type: ignore[arg-type]
    for threads in (0, 65, "2"):
        with pytest.raises(ValueError, match="threads = "):
            NeighbourEngine([lender.path], threads=threads)  # type: ignore[arg-type]
    lender.close(WAIT_S)
    with pytest.raises(ClosedError, match="lender is closed"):
        lender.lend(KEYS[:1], [0])
    with pytest.raises(ClosedError, match="lender is closed"):
        lender.take_back(KEYS)
    assert not os.path.exists(lender.path)


def test_other_users_are_not_read_from(lending: Lending, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lending.lender.path
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with NeighbourEngine([path]) as engine:
        with pytest.raises(TimeoutError):
            engine.wait_connected(SHORT_S)
        assert engine.stats()["capacity_bytes"] == 0


def test_a_lender_that_takes_no_connections_is_called_again(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(str(folder / "lender"))
        full.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(folder / "lender"))
            with NeighbourEngine([folder / "lender"]) as engine:
                with pytest.raises(TimeoutError):
                    engine.wait_connected(SHORT_S)
                assert engine.exists([b"x" * 16]) == [False]
                full.accept()[0].close()
                assert select.select([full], [], [], WAIT_S)[0]  # it comes again


def test_a_forked_child_has_neither(lending: Lending, reading: Reading) -> None:
    assert reading.rig.load(KEYS).done
    child = os.fork()
    if child == 0:
        code = 0
        for call in (
            lambda: lending.lender.lend([b"c"], [9]),
            lambda: reading.engine.read([]),
            lambda: reading.engine.write([]),
        ):
            try:
                call()
                code = 1
            except ForkedError:
                pass
        reading.engine.close(1.0)
        lending.lender.close(1.0)
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert reading.rig.load(KEYS).done
    assert os.path.exists(lending.lender.path)


def test_a_process_that_closes_nothing_ends_in_peace() -> None:
    program = """
from paddle_kv import HostPool
from paddle_kv.testing.tiers.rig import ALIGNED, Rig
from paddle_kv.tiers.neighbours import Lender, NeighbourEngine
pool = HostPool(ALIGNED, 4, layout="block_first", shared=True)
lender = Lender(pool, model=b"model")
lender.lend([b"one"], [2])
engine = NeighbourEngine([lender.path])
engine.wait_connected(20)
assert Rig(engine).load([b"one"]).done
print(lender.path)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.split()[-1]).parent.exists()
