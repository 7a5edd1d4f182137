"""The lock under which state changes: one for each group of memories that can meet in a transfer.

A pool begins as a group of its own; the scheduler that moves blocks between two pools unites their groups. What changes
the state of pools, transfers or managers is a *section*: a function that :func:`change` runs under the lock of the
group, that no signal handler interrupts, and that waits for nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, Self

from ..errors import ReentryError
from .keeper import Deadline, Host, Living, Waiter, keeper, nothing


class Grouped(Protocol):
    """What belongs to a group."""

    @property
    def group(self) -> MemoryGroup:
        """Which one; asked anew each time, since groups are united."""


class Tracked(Protocol):
    """What the tracker needs of a transfer."""

    number: int

    @property
    def spoiled(self) -> bool:
        """Whether it is known that its targets are not written completely."""

    def look(self) -> None:
        """Looks at the device; releases the blocks if the transfer is over (in a section)."""

    def abandon(self) -> None:
        """The process has forked and this is the child: nothing moves here any more. Ends as failed."""

    def is_ordered_before(self, stream: int | None, layer: int) -> bool:
        """Whether work on the stream waits for this layer."""


class Alone(Protocol):
    """A transfer of which nothing stands in the books: it was started while nothing else was in flight. What is asked
    for in a section may have to do with it, so each section but the one that ends it has it written down first."""

    def __call__(self) -> None:
        """The section that ends it, if it is over."""

    def write_down(self, *, is_guarded: bool = True) -> None:
        """In a section: makes it one of ``transfers``. ``is_guarded``: it is heard of when its handle goes."""


class MemoryGroup:
    """Memories that can meet, and who waits for what of them.

    Attributes:
        lock: of the group; nobody waits for a device or for another thread while it is held.
        host: runs sections and waits.
        transfers: those that hold blocks, by number.
        alone: the one in flight that is not among them. It comes without a section, in one step of C code, if no
            section has begun since whoever starts it has looked at all of this.
        sections: how many have begun; negative: the group has been absorbed by another one.
        waiters: of threads that wait for any change.
    """

    def __init__(self, member: Grouped) -> None:
        self.number = next(_numbers)
        self.lock = threading.RLock()
        self.host: Host = keeper
        self.transfers: dict[int, Tracked] = {}
        self.alone: Alone | None = None
        self.sections = 0
        self.waiters: list[Waiter] = []
        self._members: weakref.WeakSet[Any] = weakref.WeakSet([member])
        self._inside: int | None = None  # the thread that runs a section
        self._noted: deque[Callable[[], object]] = deque()  # what is to be done soon
        _groups.add(self)

    @property
    def inside(self) -> bool:
        """Whether the calling thread runs a section of this group."""
        return self._inside == threading.get_ident()

    def is_idle(self) -> bool:
        """Whether nothing is in flight and nothing is left to be done. Asked outside of sections: it holds until
        ``sections`` has changed."""
        host = self.host
        has_work = self.transfers or self.alone or self._noted or host.dropped or host.behind
        return not has_work and self._inside is None and self.sections >= 0

    def notify(self) -> None:
        """Something has changed: all who wait look again."""
        wake(self.waiters)

    def note(self, function: Callable[[], object]) -> None:
        """To be done by whoever runs the next section, or at the end of the one that runs."""
        self._noted.append(function)

    def run(self, function: Callable[[], Any]) -> Any:
        """A section, under the lock."""
        if self._inside is not None:
            self._refuse()
        self._inside = threading.get_ident()
        self.sections += 1
        try:
            if self._noted or self.host.dropped:
                self.do_what_was_noted()
            if self.alone is not None and self.alone is not function:
                self.alone.write_down()
            return function()
        finally:
            try:
                if self._noted or self.host.dropped:
                    self.do_what_was_noted()
            finally:
                self._inside = None

    def write_down_alone(self, *, is_guarded: bool = True) -> None:
        """Under the lock, where no function of a section runs."""
        if self.alone is None:
            return
        before, self._inside = self._inside, threading.get_ident()  # a finalizer may come
        try:
            self.alone.write_down(is_guarded=is_guarded)
        finally:
            self._inside = before

    def check_outside(self) -> None:
        """Before a wait: one that a section waits in would hold the lock meanwhile.

        Raises:
            ReentryError: the calling thread runs a section of this group.
        """
        if self._inside == threading.get_ident():
            self._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise ReentryError(
            "a call of the scheduler was made out of another one by the same thread: by a finalizer, by a policy or by "
            "a backend"
        )

    def do_what_was_noted(self) -> None:
        """In a section."""
        if self.alone is not None:
            self.alone.write_down()
        while self.host.dropped:
            with contextlib.suppress(IndexError):  # another thread was quicker
                guard = self.host.dropped.popleft()
                member = guard.leave()
                if member is not None and member.group is self:  # the others run in the host's thread
                    self._noted.append(guard.run)
        while self._noted:
            with Living("an error in what was to be done soon"):
                self._noted.popleft()()

    def _absorb(self, other: MemoryGroup) -> None:
        self.sections += 1
        other.sections = -1
        for group in (self, other):
            group.write_down_alone()
        for member in list(other._members):
            member.group = self
            self._members.add(member)
        both = {**self.transfers, **other.transfers}
        self.transfers = {number: both[number] for number in sorted(both)}
        if self.host is keeper:
            self.host = other.host
        self._noted.extend(other._noted)
        other.transfers, other._noted = {}, deque()
        other.notify()


_numbers = itertools.count()
_groups: weakref.WeakSet[MemoryGroup] = weakref.WeakSet()
registry = threading.RLock()  # of groups and memories; whoever holds it may hold the locks of several groups


def change(member: Grouped, function: Callable[[], Any]) -> Any:
    """Runs a section of the member's group and returns what it returns."""
    return member.group.host.call_here(functools.partial(_change_here, member, function))


def change_soon(member: Grouped, function: Callable[[], object]) -> None:
    """As :func:`change`, but the main thread does not do it itself, nor wait until it has been done. Its next section
    comes behind it."""
    (note if member.group.host.defers else change)(member, function)


def note(member: Grouped, function: Callable[[], object]) -> None:
    """For finalizers and for calls that one may make out of a section: it is done in a section, soon."""
    group = member.group
    group.note(function)
    # This group's, also if it is united with another one meanwhile.
    group.host.post(functools.partial(_change_here, member, group.do_what_was_noted))


class Guard(weakref.ref):  # type: ignore[type-arg]
    """Runs a section when the last reference to its owner goes: in the host's thread, or with the next section of the
    group. By C code alone up to there: a handler may raise already before the first instruction of a ``__del__``."""

    # As they are where there was no memory to set them: then the owner goes before anybody knows of it.
    _member: Grouped | None = None
    _call: _Call | None = None
    _functions: list[Callable[[], object]]
    run: Callable[[], object]  # in a section; no reference to this

    @classmethod
    def over(cls, owner: object, member: Grouped, function: Callable[[], object]) -> Self:
        host = member.group.host
        guard = cls(owner, host.dropped.append)
        guard._member = member
        guard._functions = functions = [function]
        guard.run = run = functools.partial(_run_once, functions)
        guard._call = call = _Call(owner, host.put)
        call.function = functools.partial(change, member, run)
        _guards.add(guard)
        return guard

    def leave(self) -> Grouped | None:
        """Keeps nothing any more. Returns whose section it runs."""
        _guards.discard(self)
        member, self._member, self._call = self._member, None, None
        return member

    def cancel(self) -> None:
        """There is nothing left to do."""
        self.leave()
        self._functions.clear()

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def _run_once(functions: list[Callable[[], object]]) -> None:
    if functions:
        functions.pop()()


class _Call(weakref.ref):  # type: ignore[type-arg]
    """Has the host call a function when the last reference to the owner goes."""

    function: Callable[[], object] = staticmethod(nothing)  # as above

    def __call__(self) -> None:
        self.function()


_guards: set[Guard] = set()  # or garbage collection could take one together with its owner


class OnItsWay:
    """What a section gives to its caller. It is taken back if an exception of a signal handler keeps it from him."""

    def __init__(self, value: Any, member: Grouped, take_back: Callable[[Any], object]) -> None:
        self._value = value
        self._guard: Guard | None = Guard.over(self, member, functools.partial(take_back, value))

    def take(self) -> Any:
        value = self._value
        _guards.discard(self._guard)
        self._guard = None  # from here on it is the caller's
        return value


def wait_until(member: Grouped, condition: Callable[[], Any], timeout_s: float | None) -> Any:
    """Blocks until the condition, asked in a section, holds; what it returned, or None if the time was over."""
    deadline = Deadline(timeout_s)
    while True:
        group = member.group
        waiter = Waiter()
        group.waiters.append(waiter)
        try:
            found = change(member, condition)
            if found:
                return found
            if not group.host.park(waiter, deadline.left_s()):
                return change(member, condition) or None
        finally:
            with contextlib.suppress(ValueError):  # released meanwhile
                group.waiters.remove(waiter)


def wake(waiters: list[Waiter]) -> None:
    """Releases all of them. Whoever is added meanwhile looks after that at what has changed."""
    while waiters:
        with contextlib.suppress(IndexError):  # another one was quicker
            waiters.pop(0).release()


def unite(first: Grouped, second: Grouped) -> None:
    """From now on one lock guards both. Not out of a section."""
    first.group.host.call_here(functools.partial(_unite, first, second))


def _unite(first: Grouped, second: Grouped) -> None:
    with registry:
        one, other = first.group, second.group
        if one is other:
            return
        with one.lock, other.lock:
            one._absorb(other)


def _change_here(member: Grouped, function: Callable[[], Any]) -> Any:
    while True:
        group = member.group
        group.host.pause()
        with group.lock:
            if member.group is group:  # else it was united with another one meanwhile
                return group.run(function)


# ---- fork: no thread is in a section while the process is copied ----
class _Hold:
    """Whoever lets go of it releases the lock, if it is his: C code does it."""

    def __init__(self, lock: Any) -> None:
        self.end = weakref.ref(self, lock.__exit__)


_held_for_fork: list[_Hold] = []


def _before_fork() -> None:
    raised = None
    while not _held_for_fork:
        try:
            for group in list(_groups):
                group.host.pause()
            for lock in (registry, *(group.lock for group in sorted(_groups, key=lambda group: group.number))):
                _held_for_fork.append(_Hold(lock))
                lock.acquire()
        except BaseException as error:  # noqa: BLE001  of a signal handler; the process is copied all the same
            _held_for_fork.clear()
            raised = error
    if raised is not None:
        raise raised


def _after_fork_in_child() -> None:
    _held_for_fork.clear()
    for guard in list(_guards):  # they tell the parent's keeper, and would keep what is the parent's
        guard.cancel()
    for group in _groups:
        group.sections += group.sections >= 0  # a start out of whose middle a handler has forked goes on in the child
        group.write_down_alone(is_guarded=False)
    transfers = {number: transfer for group in _groups for number, transfer in group.transfers.items()}
    for number in sorted(transfers, reverse=True):  # none must be seen as ready by an earlier one that ends
        transfers[number].abandon()


os.register_at_fork(before=_before_fork)  # if a handler raises before the first instruction of the other one
os.register_at_fork(before=_before_fork, after_in_parent=_held_for_fork.clear, after_in_child=_after_fork_in_child)
