"""The queues of runs by class and age, with worths that are given by hand."""

from __future__ import annotations

import random

import pytest

from paddle_kv.offload.queues import MOST_STALE, Queues
from paddle_kv.offload.returns import EDGES_S, NUM_PARTS, Returns
from paddle_kv.offload.run import Run
from tests.offload.survival_model import watched_in

CLASSES, TOLD_PART = 3, 2


class Given(Returns):
    """A run of class c and part p is worth ``table[c][p]``."""

    def __init__(self) -> None:
        super().__init__([0.1], CLASSES, 1)
        self.table = [[float(klass)] * NUM_PARTS for klass in range(CLASSES)]

    def worth(self) -> list[list[float]]:
        return self.table


class Rig:
    def __init__(self) -> None:
        self.returns = Given()
        self.passed: list[Run[str]] = []
        self.faded: list[Run[str]] = []
        self.queues: Queues[str] = Queues(self.returns, TOLD_PART, self.passed.append, self.faded.append)

    def run(self, name: str, klass: int = 0, touched_s: float = 0.0, live: int = 1) -> Run[str]:
        run = Run([name], None, name, touched_s, 1, klass)
        run.live, run.facts = live, (1.0,)
        return run

    def watched(self, name: str, klass: int = 0, touched_s: float = 0.0) -> Run[str]:
        run = self.run(name, klass, touched_s)
        self.queues.watch(run)
        return run

    def leaf(self, name: str, klass: int = 0, touched_s: float = 0.0) -> Run[str]:
        run = self.watched(name, klass, touched_s)
        self.queues.enter(run)
        return run

    def survived(self) -> list[tuple[int, int, float]]:
        rows = enumerate(self.returns.survived)
        return [(klass, part, count) for klass, row in rows for part, count in enumerate(row) if count]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_it_is_told_when_there_is_something_to_do_again(rig: Rig) -> None:
    rig.queues.advance(100.0)
    assert 100.0 < rig.queues.next_look_s < 100.0 + EDGES_S[1]  # the first part is the shortest
    rig.queues.advance(100.0 + EDGES_S[1])
    assert rig.queues.next_look_s > 100.0 + EDGES_S[1]


# ---- who may go ----
def test_the_least_worth_goes_first_and_of_a_queue_who_was_used_first(rig: Rig) -> None:
    assert rig.queues.next() is None and rig.queues.all() == []
    dear, first, second = rig.leaf("dear", 2), rig.leaf("first", 1), rig.leaf("second", 1)
    assert rig.queues.all() == [first, second, dear]
    for expected in (first, second, dear):
        assert rig.queues.next() is expected
        rig.queues.leave(expected)
        assert not expected.leaf and expected not in rig.queues.all()
        rig.queues.leave(expected)  # again: nothing
    assert rig.queues.next() is None
    rig.queues.enter(first)
    assert first.leaf and rig.queues.next() is first


def test_who_has_no_block_of_its_own_there_cannot_go(rig: Rig) -> None:
    run = rig.run("gone", live=0)
    rig.queues.enter(run)
    assert not run.leaf and rig.queues.next() is None


def test_to_enter_twice_changes_nothing(rig: Rig) -> None:
    first, second = rig.leaf("first"), rig.leaf("second")
    rig.queues.enter(first)
    assert rig.queues.all() == [first, second]
    rig.queues.leave(first)
    assert rig.queues.all() == [second]


def test_who_is_used_again_goes_behind_the_others_of_its_age(rig: Rig) -> None:
    first, second, absent = rig.leaf("first"), rig.leaf("second"), rig.watched("absent")
    rig.queues.use_again(first)
    rig.queues.use_again(absent)
    assert rig.queues.all() == [second, first]


def test_another_class_takes_along_whether_it_is_watched_and_may_go(rig: Rig) -> None:
    both, only_watched, only_leaf = rig.leaf("both"), rig.watched("watched"), rig.run("leaf")
    rig.queues.enter(only_leaf)
    neither = rig.run("neither")
    for run in (both, only_watched, only_leaf, neither):
        rig.queues.reclass(run, 2)
        assert run.klass == 2
    assert [run.watched > 0 for run in (both, only_watched, only_leaf, neither)] == [True, True, False, False]
    assert [run.leaf for run in (both, only_watched, only_leaf, neither)] == [True, False, True, False]
    assert rig.queues.all() == [both, only_leaf]
    rig.queues.advance(2.0)
    assert rig.survived() == [(2, 0, 2.0)]  # of those that are watched, in the class where they are now


def test_of_what_was_used_before_the_first_of_each_queue_is_asked_for_the_least_worth(rig: Rig) -> None:
    dear, low, behind = rig.leaf("dear", 2, -4.0), rig.leaf("low", 0, -3.0), rig.leaf("behind", 0, -3.0)
    young, middle = rig.leaf("young", 1, -1.0), rig.leaf("middle", 1, -6.0)
    least = rig.queues.least_before
    assert [least(0.0, held) for held in ((), {(0, 0)}, {(0, 0), (1, 0)})] == [low, young, dear]
    assert least(-1.0, {(0, 0)}) is dear  # the one that is young hides those behind it
    rig.queues.leave(young)
    assert least(-1.0, {(0, 0)}) is middle
    rig.queues.leave(low)
    rig.returns.table = [[3.0] * NUM_PARTS, [2.0] * NUM_PARTS, [1.0] * NUM_PARTS]
    rig.queues.price()
    assert [least(-1.0, held) for held in ((), {(2, 0)}, {(2, 0), (1, 0)})] == [dear, middle, behind]
    assert least(-6.0, ()) is None


def test_who_has_gone_is_counted_while_it_is_watched(rig: Rig) -> None:
    gone = rig.run("gone", 1, -2.0, live=0)
    rig.queues.watch(gone)
    rig.queues.advance(0.0)
    assert gone.part == 1 and rig.survived() == [(1, 0, 1.0)]


def test_worths_count_as_they_were_at_the_last_pricing(rig: Rig) -> None:
    low, middle, high = rig.leaf("low", 0), rig.leaf("middle", 1), rig.leaf("high", 2)
    rig.returns.table = [[3.0] * NUM_PARTS, [2.0] * NUM_PARTS, [1.0] * NUM_PARTS]
    assert rig.queues.all() == [low, middle, high]
    rig.queues.price()
    assert rig.queues.all() == [high, middle, low] and rig.queues.next() is high
    rig.queues.leave(high)
    rig.queues.enter(high)
    assert rig.queues.all() == [high, middle, low]


# ---- who grows older ----
def test_a_run_enters_the_next_part_when_it_is_old_enough(rig: Rig) -> None:
    old, young = rig.watched("old", 1, -2.0), rig.watched("young", 1, -1.5)
    rig.queues.advance(0.0)  # the first part ends at 2 s, the second at 2.4 s
    assert (old.part, young.part) == (1, 0) and old.watched and young.watched
    assert rig.survived() == [(1, 0, 1.0)]
    rig.queues.advance(0.5)
    assert (old.part, young.part) == (2, 1) and rig.survived() == [(1, 0, 2.0), (1, 1, 1.0)]
    assert rig.passed == [old] and rig.faded == []


@pytest.mark.parametrize("others", [0, 1])
def test_those_that_grow_older_together_keep_the_order_of_their_use(rig: Rig, others: int) -> None:
    """Among those that may go too, whatever was used again since; who is not watched stays where it is."""
    first, second, third = (rig.leaf(name, 1, -2.0) for name in ("first", "second", "third"))
    rest = [rig.run("not watched", 1, -2.0) for _ in range(others)]
    for run in rest:
        rig.queues.enter(run)
    rig.queues.use_again(first)
    rig.queues.leave(second)
    assert rig.queues.all() == [third, *rest, first]
    rig.queues.advance(0.0)
    rig.queues.enter(second)
    assert rig.queues.all() == [*rest, first, third, second]
    assert [run.part for run in (first, second, third, *rest)] == [1, 1, 1, *[0] * others]


def test_a_queue_that_grows_older_as_a_whole_is_one_queue_still(rig: Rig) -> None:
    first, second = rig.leaf("first", 1, -2.0), rig.leaf("second", 1, -2.0)
    rig.queues.advance(0.0)
    third = rig.leaf("third", 1, 0.0)
    assert rig.queues.all() == [third, first, second]
    assert [run.part for run in (first, second, third)] == [1, 1, 0]
    rig.queues.unwatch(first)
    rig.queues.leave(second)
    assert rig.queues.all() == [third, first] and rig.survived() == [(1, 0, 2.0)]


def test_a_part_is_looked_at_four_times_in_its_width(rig: Rig) -> None:
    run = rig.watched("run")
    rig.queues.advance(1.75)
    rig.queues.advance(2.125)  # no look
    assert run.part == 0
    rig.queues.advance(2.25)  # 0.5 s after the last
    assert run.part == 1


def test_a_run_is_told_of_in_late_parts_and_fades_at_the_end_of_the_last_one(rig: Rig) -> None:
    run = rig.watched("run", touched_s=0.0)
    for part in range(1, NUM_PARTS):
        rig.queues.advance(EDGES_S[part])
        assert run.part == part and run.watched and rig.faded == []
        assert rig.passed == [run] * (part - TOLD_PART + 1)
    rig.queues.advance(EDGES_S[NUM_PARTS])
    assert rig.faded == [run] and not run.watched and run.part == NUM_PARTS - 1
    assert rig.survived() == [(0, part, 1.0) for part in range(NUM_PARTS)]
    rig.queues.advance(10 * EDGES_S[NUM_PARTS])
    assert rig.faded == [run]


def test_who_is_in_a_late_part_already_is_told_of_in_the_next_one(rig: Rig) -> None:
    rig.queues.told_part = 7
    run = rig.watched("run", touched_s=0.0)
    rig.queues.advance(EDGES_S[5])
    assert run.part == 5 and rig.passed == []
    rig.queues.told_part = 3
    rig.queues.advance(EDGES_S[5])
    assert rig.passed == []
    rig.queues.advance(EDGES_S[6])
    assert rig.passed == [run]


def test_who_was_away_for_long_goes_through_all_parts_at_once(rig: Rig) -> None:
    run = rig.leaf("run", 1, -2 * EDGES_S[NUM_PARTS])
    rig.queues.advance(0.5)
    assert rig.faded == [run] and rig.passed == [run] * (NUM_PARTS - TOLD_PART)
    assert rig.survived() == [(1, part, 1.0) for part in range(NUM_PARTS)]
    assert rig.queues.next() is run and rig.queues.all() == [run]  # nobody watches it: it may go still


def test_who_is_watched_anew_and_anew_leaves_few_entries_behind(rig: Rig) -> None:
    others = [rig.watched(f"other {number}") for number in range(10)]
    run, most = rig.run("again"), 0
    for number in range(1000):
        rig.queues.watch(run)
        rig.queues.watch(run)  # it is
        rig.queues.unwatch(run)
        rig.queues.unwatch(rig.watched(f"once {number}"))
        most = max(most, len(rig.queues._watched[0]))
    assert MOST_STALE < most <= 2 * len(others) + MOST_STALE + 1  # few are left where they are
    rig.queues.watch(run)
    assert watched_in(rig.queues, 0) == [*others, run]
    rig.queues.advance(EDGES_S[1])
    assert watched_in(rig.queues, 1) == [*others, run] and rig.survived() == [(0, 0, 11.0)]


@pytest.mark.parametrize("seed", range(4))
def test_it_knows_how_many_are_watched_at_each_age(rig: Rig, seed: int) -> None:
    rng, now_s, watched = random.Random(seed), 0.0, dict[str, Run[str]]()
    for number in range(400):
        now_s += rng.choice((0.0, 0.1, 3.0, 200.0))
        rig.queues.advance(now_s)
        watched = {name: run for name, run in watched.items() if run.watched}
        name = str(number)
        if watched and rng.random() < 0.4:
            name = rng.choice(list(watched))
            rig.queues.unwatch(watched.pop(name))
        if rng.random() < 0.8:
            watched[name] = rig.watched(name, touched_s=now_s)
        found = [watched_in(rig.queues, part) for part in range(NUM_PARTS)]
        assert [len(runs) for runs in found] == rig.queues._num_watched
        assert {run.keys[0] for runs in found for run in runs} == set(watched)
        assert all(run.part == part for part, runs in enumerate(found) for run in runs)
    assert rig.faded


def test_who_is_not_watched_does_not_grow_older(rig: Rig) -> None:
    run = rig.watched("run")
    rig.queues.unwatch(run)
    assert not run.watched
    rig.queues.unwatch(run)  # again: nothing
    rig.queues.advance(100.0)
    assert run.part == 0 and rig.survived() == []


def test_who_may_go_does_so_at_the_worth_of_its_age(rig: Rig) -> None:
    rig.returns.table[0] = [5.0, *[0.5] * (NUM_PARTS - 1)]
    rig.queues.price()
    old, young, other = rig.leaf("old", 0, -2.0), rig.leaf("young", 0, -1.0), rig.leaf("other", 1, -1.0)
    assert rig.queues.next() is other
    rig.queues.advance(0.0)
    assert rig.queues.next() is old and rig.queues.all() == [old, other, young]
    third, fourth = rig.leaf("third", 0, -1.0), rig.leaf("fourth", 1, -1.0)
    rig.queues.advance(1.0)  # now old is a part farther, which is worth as much
    assert rig.queues.all() == [young, third, old, other, fourth]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_the_next_one_is_the_first_of_all(rig: Rig, seed: int) -> None:
    """Against lists: the queue of each class and part in its order, and the queues by their worth."""
    rng = random.Random(seed)
    held: list[list[list[Run[str]]]] = [[[] for _ in range(NUM_PARTS)] for _ in range(CLASSES)]
    rig.returns.table = [[rng.choice([1.0, 2.0, rng.random()]) for _ in range(NUM_PARTS)] for _ in range(CLASSES)]
    rig.queues.price()
    runs = [rig.watched(str(number), rng.randrange(CLASSES), number / 8) for number in range(12)]
    rig.queues.advance(3.0)
    assert {run.part for run in runs} == {0, 1, 2, 3}
    for _ in range(150):
        run, what = rng.choice(runs), rng.randrange(5)
        if what == 0 and not run.leaf:
            rig.queues.enter(run)
            held[run.klass][run.part].append(run)
        elif what == 1 and run.leaf:
            rig.queues.leave(run)
            held[run.klass][run.part].remove(run)
        elif what == 2 and run.leaf:
            rig.queues.use_again(run)
            held[run.klass][run.part].remove(run)
            held[run.klass][run.part].append(run)
        elif what == 3:
            klass = rng.randrange(CLASSES)
            if run.leaf:
                held[run.klass][run.part].remove(run)
                held[klass][run.part].append(run)
            rig.queues.reclass(run, klass)
        elif what == 4:
            rig.returns.table = [[rng.random() for _ in range(NUM_PARTS)] for _ in range(CLASSES)]
            for klass, part in ((rng.randrange(CLASSES), rng.randrange(NUM_PARTS)) for _ in range(20)):
                rig.returns.table[klass][part] = 0.5
            rig.queues.price()
        table = rig.queues.worth
        order = sorted((table[k][p], k, p) for k in range(CLASSES) for p in range(NUM_PARTS) if held[k][p])
        expected = [one for _, k, p in order for one in held[k][p]]
        assert rig.queues.all() == expected
        assert rig.queues.next() is (expected[0] if expected else None)
