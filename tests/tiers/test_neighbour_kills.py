"""Either side is killed or stopped at points of its work: no hang, no wrong byte that counts, no lease left."""

from __future__ import annotations

import signal

import pytest

from tests.tiers.neighbour_kills import LENDER_POINTS, READER_POINTS, stop_a_lender, stop_a_reader


@pytest.mark.parametrize("at", [*range(0, LENDER_POINTS, 2), LENDER_POINTS + 9])
def test_a_lender_is_killed(at: int) -> None:
    ended = stop_a_lender(at)
    assert ended == "nothing" if at < 6 else ended == "done" if at > LENDER_POINTS else True


@pytest.mark.parametrize("at", [5, 9, 13])
def test_a_lender_is_stopped_for_a_while(at: int) -> None:
    stop_a_lender(at, signal.SIGSTOP)


@pytest.mark.parametrize("at", [*range(0, READER_POINTS, 8), READER_POINTS + 30])
def test_a_reader_is_killed(at: int) -> None:
    assert stop_a_reader(at) == ("killed" if at < READER_POINTS else "done")


@pytest.mark.parametrize("at", [8, 41])
def test_a_reader_is_stopped_beyond_its_leases(at: int) -> None:
    stop_a_reader(at, signal.SIGSTOP)
