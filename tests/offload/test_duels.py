"""Duels of two ways to choose what goes: who has won, and when that is no chance."""

from __future__ import annotations

import random

import pytest

from paddle_kv.offload.duels import A_TURNOVER, MOST_OPEN, Duels
from paddle_kv.offload.run import Run


def watched_run(number: int) -> Run[int]:
    run = Run([number], None, number, 0.0, 1, 0)
    run.watched = True
    return run


def played(duels: Duels[int], results: list[bool]) -> None:
    """Of each whether the policy wins: the run comes back that the order of use would have let go."""
    for number, wins in enumerate(results):
        by_use, by_policy = watched_run(2 * number), watched_run(2 * number + 1)
        duels.begin(by_use, by_policy)
        duels.came_back(by_use if wins else by_policy)


def met_by(duels: Duels[int], count: int) -> Run[int]:
    """One that the order of use would have let go, and so many that the policy would."""
    oldest = watched_run(0)
    for number in range(1, 1 + count):
        duels.begin(oldest, watched_run(number))
    return oldest


@pytest.mark.parametrize("wins", [True, False])
def test_ten_in_a_row_are_no_chance_and_eight_may_be(wins: bool) -> None:
    duels: Duels[int] = Duels(1000)
    assert not duels.won and not duels.lost
    played(duels, [wins] * 8)
    assert not duels.won and not duels.lost
    played(duels, [wins] * 2)
    assert (duels.won, duels.lost) == (wins, not wins)
    duels.clear()
    assert not duels.won and not duels.lost


def test_behind_a_trial_that_failed_they_have_to_be_won_more_clearly() -> None:
    duels: Duels[int] = Duels(1000)
    played(duels, [True] * 36)
    assert duels.won and not duels.won_after(1)  # six deviations are more than the root of 36, less what is long ago
    played(duels, [True] * 4)
    assert duels.won_after(1) and not duels.won_after(2)
    played(duels, [False] * 14 + [True] * 40)
    assert duels.won_after(0) and not duels.won_after(1)  # more than one of eight was lost, of late
    played(duels, [True] * 400)
    assert duels.won_after(2) and not duels.won_after(3)


def test_a_run_that_meets_many_counts_once() -> None:
    duels: Duels[int] = Duels(1000)
    duels.came_back(met_by(duels, 99))
    assert not duels.won
    assert duels._open == {} and duels._pairs_of == {}


def test_even_duels_decide_nothing_and_what_is_long_ago_is_forgotten() -> None:
    duels: Duels[int] = Duels(1000)
    played(duels, [number % 2 == 0 for number in range(400)])
    assert not duels.won and not duels.lost
    played(duels, [True] * 200)
    assert duels.won
    played(duels, [False] * 800)
    assert duels.lost


def test_a_small_edge_is_no_victory_however_sure_it_is() -> None:
    duels: Duels[int] = Duels(1000)
    played(duels, [number % 10 < 7 for number in range(400)])
    assert duels._ahead > 4 * duels._variance**0.5
    assert not duels.won
    played(duels, [number % 10 < 9 for number in range(400)])
    assert duels.won


def test_who_meets_itself_or_is_not_watched_plays_no_duel() -> None:
    duels: Duels[int] = Duels(1000)
    one, other = watched_run(1), watched_run(2)
    duels.begin(one, one)
    other.watched = False
    duels.begin(one, other)
    duels.begin(other, one)
    assert duels._open == {}
    other.watched = True
    duels.begin(one, other)
    duels.begin(one, other)
    assert list(duels._open) == [(one, other)]
    duels.came_back(watched_run(3))
    assert list(duels._open) == [(one, other)]


def test_what_is_open_is_bounded_and_the_oldest_is_given_up() -> None:
    rng, duels = random.Random(1), Duels[int](1000)
    runs = [watched_run(number) for number in range(60)]
    for _ in range(5000):
        duels.begin(*rng.sample(runs, 2))
        assert len(duels._open) <= MOST_OPEN
    assert {run for pair in duels._open for run in pair} == duels._pairs_of.keys()
    pairs = [pair for pairs in duels._pairs_of.values() for pair in pairs]
    assert len(pairs) == 2 * len(duels._open) and set(pairs) == duels._open.keys()


def test_there_are_so_many_a_turnover() -> None:
    assert Duels[int](3).every_blocks == 1
    duels = Duels[int](10 * A_TURNOVER)
    assert duels.every_blocks == 10
    duels.asked_blocks = 17
    duels.begin(watched_run(1), watched_run(2))
    assert duels.asked_blocks == 0


def test_as_many_are_waited_for_as_it_says() -> None:
    duels: Duels[int] = Duels(1000)
    for number in range(MOST_OPEN):
        duels.begin(watched_run(2 * number), watched_run(2 * number + 1))
    assert len(duels._open) == MOST_OPEN


def test_what_ends_with_one_run_weighs_as_the_root_of_it() -> None:
    duels: Duels[int] = Duels(1000)
    duels.came_back(met_by(duels, 4))
    assert (duels._ahead, duels._all, duels._variance) == (2.0, 2.0, 4.0)
