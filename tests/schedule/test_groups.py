"""Groups of memories: what is noted, who is woken, and what becomes of it all when two groups are united."""

from __future__ import annotations

import gc
import threading

import pytest

from paddle_kv.errors import ReentryError
from paddle_kv.tracking import group as groups
from paddle_kv.tracking.group import MemoryGroup, change, change_soon, note, unite, wait_until
from paddle_kv.tracking.keeper import Keeper, Waiter, keeper
from tests.schedule.rig import WAIT_S


class Member:
    def __init__(self) -> None:
        self.group = MemoryGroup(self)


class InPlace(Keeper):
    """Runs everything where it is called, and what is posted never."""

    defers = False

    def call_here(self, function):
        return function()

    def post(self, function):
        pass


def in_place():
    member = Member()
    member.group.host = InPlace()
    return member


def test_what_is_noted_is_done_before_and_behind_a_section_and_once(caplog):
    member, done = in_place(), []

    def broken():
        raise RuntimeError("of a finalizer")

    note(member, broken)
    note(member, lambda: done.append("before"))
    assert done == []

    def section():
        note(member, lambda: done.append("behind"))
        done.append("in it")
        return 3

    assert change(member, section) == 3
    assert done == ["before", "in it", "behind"]
    assert [str(record.exc_info[1]) for record in caplog.records] == ["of a finalizer"]
    change(member, list)
    assert len(done) == 3


def test_what_is_noted_is_done_soon():
    member, done = Member(), threading.Event()
    note(member, done.set)
    assert done.wait(WAIT_S)


def test_a_section_in_a_section_is_refused_and_the_first_one_goes_on():
    member, seen = in_place(), []

    def section():
        seen.append(member.group.inside)
        with pytest.raises(ReentryError):
            change(member, list)
        seen.append(member.group.inside)

    change(member, section)
    assert seen == [True, True]
    assert not member.group.inside
    with pytest.raises(ZeroDivisionError):
        change(member, lambda: 1 / 0)
    assert not member.group.inside
    assert change(member, lambda: 4) == 4


def test_another_thread_is_not_inside():
    member, seen = in_place(), []

    def section():
        thread = threading.Thread(target=lambda: seen.append(member.group.inside))
        thread.start()
        thread.join(WAIT_S)

    change(member, section)
    assert seen == [False]


def test_united_groups_are_one():
    one, other, third = in_place(), Member(), Member()
    unite(other, third)
    waiter, done = Waiter(), []
    one.group.transfers = {4: "d", 1: "a"}
    other.group.transfers = {3: "c", 2: "b"}
    other.group.waiters.append(waiter)
    other.group.note(lambda: done.append("noted"))
    left, host = other.group, one.group.host
    unite(one, other)
    unite(third, one)
    assert one.group is other.group is third.group
    assert list(one.group.transfers.items()) == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    assert waiter.sleep(0.0)  # whoever waited there looks here now
    assert left.transfers == {}
    assert one.group.host is host
    change(third, list)
    assert done == ["noted"]


def test_the_host_of_either_group_is_that_of_both():
    one, other = Member(), in_place()
    assert one.group.host is keeper
    host = other.group.host
    unite(one, other)
    assert one.group.host is host


def test_a_section_that_finds_its_group_united_takes_the_lock_of_both():
    one, other = in_place(), in_place()

    class UnitesFirst(InPlace):
        def pause(self):
            if other.group is not one.group:
                unite(one, other)

    other.group.host = UnitesFirst()
    inside = change(other, lambda: (other.group is one.group, one.group.inside))
    assert inside == (True, True)


def test_a_wait_ends_with_the_condition_or_the_time_and_leaves_nobody_behind():
    member, asked = in_place(), []

    def third_time():
        asked.append(1)
        member.group.notify()
        return "found" if len(asked) == 3 else None

    assert wait_until(member, third_time, WAIT_S) == "found"
    assert len(asked) == 3
    assert wait_until(member, lambda: 0, 0.0) is None
    last = iter([False, "in the end"])
    assert wait_until(member, lambda: next(last), 0.0) == "in the end"
    assert not member.group.waiters


def test_sections_that_need_no_answer_run_too():
    member, done = in_place(), []
    change_soon(member, lambda: done.append(member.group.inside))
    assert done == [True]


def test_the_main_thread_leaves_it_to_the_keeper_and_its_next_section_comes_behind_it():
    member, done, over = Member(), [], threading.Event()
    name = threading.current_thread().name
    keeper.post(lambda: over.wait(WAIT_S))  # it is busy
    change_soon(member, lambda: done.append(threading.current_thread().name))
    assert done == []
    assert change(member, done.copy) == [name]
    over.set()
    change_soon(member, lambda: done.append(threading.current_thread().name))
    keeper.call(list)
    assert done == [name, "paddle_kv-keeper"]


def test_what_is_noted_in_a_group_that_is_united_at_once_is_done_too():
    member, other, done = Member(), Member(), threading.Event()
    group = member.group

    class Uniting(Keeper):
        def post(self, function):
            if member.group is group:
                unite(other, member)
            keeper.post(function)

    group.host = Uniting()
    group.note, noted = lambda function: None, []  # it comes behind the union
    post = group.host.post
    group.host.post = lambda function: (post(list), group._noted.append(done.set), noted.append(1), post(function))
    note(member, done.set)
    assert noted and member.group is not group
    assert done.wait(WAIT_S)


def test_the_numbers_of_groups_grow():
    numbers = [Member().group.number for _ in range(3)]
    assert numbers == sorted(set(numbers))
    assert all(isinstance(one, int) for one in numbers)
    assert groups.registry.acquire(timeout=WAIT_S)  # nobody has left it held
    groups.registry.release()


def test_a_guard_that_was_cancelled_does_nothing(caplog):
    class Owner:
        pass

    member, owner, done = Member(), Owner(), []
    guard = groups.Guard.over(owner, member, lambda: done.append(1))
    guard.cancel()
    del owner
    change(member, list)  # behind the guard
    assert not done and not caplog.records and guard not in groups._guards


def test_a_guard_and_a_call_that_nobody_could_tell_what_to_do_do_nothing():
    """Where there was no memory for it, the owner is gone before."""

    class Owner:
        pass

    owner, dropped, called = Owner(), [], []
    guard = groups.Guard(owner, dropped.append)
    call = groups._Call(owner, lambda one: called.append(one()))
    del owner
    assert dropped == [guard] and guard.leave() is None
    assert called == [None] and call() is None


def test_a_guard_whose_owner_is_gone_is_gone_too():
    class Owner:
        pass

    member, owner, done = Member(), Owner(), []
    guard = groups.Guard.over(owner, member, lambda: done.append(1))
    assert guard in groups._guards
    del owner
    change(member, list)  # behind the guard
    assert done == [1] and guard not in groups._guards


class Interrupted(Exception):
    pass


def test_a_fork_that_is_interrupted_takes_all_locks_all_the_same():
    """The copy of the process is made whatever a signal handler raises."""
    taken = []

    class Lock:
        def acquire(self):
            taken.append(len(groups._held_for_fork))
            if len(taken) == 1:
                raise Interrupted

        def __exit__(self, *raised):
            taken.append("given back")

    gc.collect()  # groups of other tests: counted by the first time, gone by the second
    first, member = Member(), Member()
    member.group.lock = Lock()
    held = [first.group.lock]
    with pytest.raises(Interrupted):
        groups._before_fork()
    try:
        assert taken == [taken[0], "given back", taken[0]]  # behind the same others
        assert taken[0] >= 3  # the registry, the first and itself
        others = []
        thread = threading.Thread(target=lambda: others.append(held[0].acquire(blocking=False)))
        thread.start()
        thread.join(WAIT_S)
        assert others == [False]
    finally:
        groups._held_for_fork.clear()
    assert taken[3:] == ["given back"]
    groups._before_fork()
    groups._held_for_fork.clear()
