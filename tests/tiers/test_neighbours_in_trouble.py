"""What a lender and its readers run out of, and calls that are interrupted."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv.errors import AttachError
from paddle_kv.testing.tiers.rig import WAIT_S
from paddle_kv.tiers import Job, Outcome
from paddle_kv.tiers.neighbours import NeighbourEngine
from tests.peers.conftest import until
from tests.test_worker import SHORT_S, raising_soon
from tests.tiers.test_neighbours import KEYS, Gate, Lending, Reading


@pytest.fixture
def lending() -> Iterator[Lending]:
    with contextlib.closing(Lending()) as made:
        yield made


@pytest.fixture
def reading(lending: Lending) -> Iterator[Reading]:
    with contextlib.closing(Reading(lending)) as made:
        yield made


def test_more_reads_than_a_lender_keeps_come_in_turns(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_kv.tiers.neighbours.lender.MOST_READS", 2)
    gate = Gate(monkeypatch)
    jobs = [Job([key], [block_id], timeout_s=WAIT_S) for block_id, key in enumerate(KEYS)]
    for job in jobs:
        reading.tier.load([job])
    until(lambda: len(reading.engine._neighbours[0].busy) == len(KEYS) - 2)
    gate.opened.set()
    reading.tier.drain(WAIT_S)
    assert all(job.done for job in jobs)
    assert reading.engine.stats()["errors"] == 0


def test_objects_of_another_size_are_not_asked_for(lending: Lending, reading: Reading) -> None:
    memory = reading.engine._neighbours[0].memory
    assert memory is not None
    memory.object_bytes += 4096
    assert not reading.rig.load(KEYS[:1]).done
    assert lending.lender.stats()["read_blocks"] == 0


def test_no_descriptor_for_a_call(lending: Lending, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> None:
        monkeypatch.undo()
        raise OSError(errno.EMFILE, "Too many open files")

    # For the reader alone: the lender's thread uses the module too.
    sockets = SimpleNamespace(AF_UNIX=socket.AF_UNIX, socket=none_left)
    monkeypatch.setattr("paddle_kv.tiers.neighbours.neighbour.socket", sockets)
    with NeighbourEngine([lending.lender.path]) as engine:
        engine.wait_connected(WAIT_S)  # it is called again


def test_no_descriptor_for_the_memory_of_a_lender(lending: Lending, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> None:
        monkeypatch.undo()
        raise AttachError("the memory cannot be opened: Too many open files")

    monkeypatch.setattr("paddle_kv.tiers.neighbours.neighbour.map_shared", none_left)
    with NeighbourEngine([lending.lender.path]) as engine:
        engine.wait_connected(WAIT_S)  # it is called again
        until(lambda: lending.lender.stats()["readers"] == 1)  # as one who hung up, and comes again


def test_a_load_that_cannot_wait_costs_others_nothing(lending: Lending, reading: Reading) -> None:
    go_on = threading.Event()
    lending.lender._listening.post(lambda: go_on.wait(WAIT_S))
    short, long = Job(KEYS[:1], [0], timeout_s=SHORT_S), Job(KEYS[1:2], [1], timeout_s=WAIT_S)
    reading.tier.load([short, long])
    until(lambda: short.outcomes[0] is not None)
    alone = Job(KEYS[2:3], [2], timeout_s=SHORT_S)
    reading.tier.load([alone])
    until(lambda: alone.over)
    later = Job(KEYS[3:4], [3], timeout_s=WAIT_S)
    reading.tier.load([later])
    go_on.set()
    reading.tier.drain(WAIT_S)
    assert (short.outcomes, alone.outcomes) == ([Outcome.LATE], [Outcome.LATE])
    assert long.done
    assert later.done


def test_who_never_answers_is_left_alone_by_those_that_cannot_wait_too(
    lending: Lending, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    lending.lender._listening.post(lambda: go_on.wait(WAIT_S))
    monkeypatch.setattr("paddle_kv.tiers.neighbours.neighbour.ANSWER_S", WAIT_S)
    reading.rig.load(KEYS[:1], timeout_s=SHORT_S)
    assert reading.engine.stats()["resting_roots"] == 0  # it may still answer in time

    def has_asked_in_vain() -> bool:  # again: on a busy machine the time of a load is over before it is asked for
        reading.rig.load(KEYS[:1], timeout_s=SHORT_S)
        return reading.engine.stats()["resting_roots"] == 1

    monkeypatch.setattr("paddle_kv.tiers.neighbours.neighbour.ANSWER_S", 4 * SHORT_S)
    until(has_asked_in_vain)
    go_on.set()
    until(lambda: reading.engine.stats()["resting_roots"] == 0)


def test_a_lender_whose_close_is_interrupted(
    lending: Lending, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a handler that raises and by a time-out, in the middle of an answer."""
    here, go_on = threading.Event(), threading.Event()
    write_headers = lending.lender._lent.write_headers

    def wait(leased: Any) -> None:
        here.set()
        assert go_on.wait(WAIT_S)
        write_headers(leased)

    monkeypatch.setattr(lending.lender._lent, "write_headers", wait)
    reading.tier.load([Job(KEYS[:2], range(2), timeout_s=WAIT_S)])
    assert here.wait(WAIT_S)
    with pytest.raises(InterruptedError), raising_soon(InterruptedError()):
        lending.lender.close()
    lending.lender.close(SHORT_S)
    threading.Timer(SHORT_S, go_on.set).start()
    lending.lender.close()
    stats = lending.lender.stats()
    assert (stats["lent_blocks"], stats["leased_blocks"], stats["readers"]) == (0, 0, 0)
    reading.tier.drain(WAIT_S)


def test_an_engine_whose_close_is_interrupted(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    job = Job(KEYS[:2], range(2), timeout_s=WAIT_S)
    reading.tier.load([job])
    assert gate.arrived.wait(WAIT_S)
    with pytest.raises(InterruptedError), raising_soon(InterruptedError()):
        reading.engine.close()
    with pytest.raises(TimeoutError):
        reading.engine.close(SHORT_S)
    threading.Timer(SHORT_S, gate.opened.set).start()
    reading.engine.close()
    assert job.over
