"""Hands the layers of transfers to the backend, as soon as all that they wait for was handed over. In sections only."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Iterable, Sequence

from ..backend.work import Event, LayerWork
from . import by_marks, rings
from .movement import Failure, Movement, State

Waits = Sequence[Event]  # of one group


class InOrder:
    """Transfers in order of their numbers, each once: what a transfer depends on has a smaller number."""

    def __init__(self, movements: Iterable[Movement]) -> None:
        self._numbers: list[int] = []
        self._movements: dict[int, Movement] = {}
        self.extend(movements)

    def extend(self, movements: Iterable[Movement]) -> None:
        for movement in movements:
            if movement.number not in self._movements:
                self._movements[movement.number] = movement
                heapq.heappush(self._numbers, movement.number)

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def pop(self) -> Movement:
        return self._movements.pop(heapq.heappop(self._numbers))


def advance(movements: Iterable[Movement]) -> list[Movement]:
    """Submits what is ready, here and in the transfers that wait for it. Returns those that have come to an end of
    their submission."""
    ended: list[Movement] = []
    queue = InOrder(movements)
    while queue:
        queue.extend(submit_ready(queue.pop(), ended))
    return ended


def submit_ready(movement: Movement, ended: list[Movement]) -> Iterable[Movement]:
    """Submits what is ready of it. Returns what has to be advanced by that; it is added to ``ended`` if it has come to
    the end of its submission."""
    submitted, failed = _submit_ready(movement)
    state = movement.state
    if state is State.PENDING or state is State.SUBMITTED:
        if movement.failure is not None or not movement.num_unsubmitted:
            movement.enter(State.ARRIVING)
            ended.append(movement)
        elif submitted:
            if state is State.PENDING:
                movement.enter(State.SUBMITTED)
            else:
                movement.notify()
    return [*failed, *movement.dependents] if submitted else failed


def fail(movement: Movement, failure: Failure) -> list[Movement]:
    """Nothing more of it is submitted; its targets are poisoned; what reads the result fails too. Returns what has to
    be advanced by that: all that fail, in order, and those that are now behind what these were behind."""
    if movement.failed:
        return []
    movement.failure = failure
    failed = [movement]
    for one in failed:  # grows meanwhile
        by_marks.end(one)
        assert one.failure is not None
        reason = one.failure.reason or one.failure.message
        one.target.poison(one.plan.target_ids, one, reason)
        if one.reading is not None:
            one.source.poison(one.plan.source_ids, one, reason)
            one.reading.cancel()
        for dependent in one.dependents:
            if one in dependent.reads_from and not dependent.failed:
                message = f"it reads blocks of a transfer that failed ({reason})"
                dependent.failure = Failure(State.FAILED, message, None, one.failure.cause, reason)
                failed.append(dependent)
    failed.sort(key=_number)
    dependents = (dependent for one in failed for dependent in one.dependents)
    behind = dict.fromkeys(one for one in dependents if one.num_unsubmitted and not one.failed)
    for one in failed:
        _pass_over(one)
    for one in behind:
        inherit(one)
    for one in failed:
        for follower in one.followers:
            with contextlib.suppress(Exception):
                follower.failed(one)
    return [*failed, *behind]


def inherit(movement: Movement) -> None:
    """Those that were dropped among what it depends on leave their place to what they depended on themselves."""
    dropped = {before for before in movement.depends_on if before.dropped}
    left = list(dropped)
    for one in left:  # grows meanwhile
        found = {before for before in one.depends_on if before.dropped} - dropped
        dropped |= found
        left += found
    for one in sorted(dropped, key=_number):
        _pass_over(one)
        _depend(movement, one.depends_on)
    _pass_over(movement)


def _pass_over(movement: Movement) -> None:
    """Leaves out those of which nothing was submitted, or nothing runs any more. Or each that comes to stand behind a
    long chain of them would go through all of it."""
    ended = (one for one in movement.depends_on if one.dropped and (one.failed or one.over))
    for before in [one for one in ended if one.last_event is None or one.over]:
        movement.depends_on.discard(before)
        before.dependents.pop(movement, None)
        _depend(movement, before.depends_on)


def _depend(movement: Movement, others: Iterable[Movement]) -> None:
    movement.depends_on.update(others)
    for other in others:
        other.dependents[movement] = None


def _number(movement: Movement) -> int:
    return movement.number


def cancel(movement: Movement, *, also_submitted: bool = True) -> list[Movement]:
    """Drops what is not submitted, and what is but has not begun, and what somebody does with its blocks behind that.
    Returns what has to be advanced."""
    if movement.failed or movement.over:
        return []
    by_marks.end(movement)
    plan = movement.plan
    missing = (group for group in plan.groups if movement.num_unsubmitted and movement.events[group] is None)
    first = next((plan.layers_of(group).start for group in missing), None)
    if also_submitted and movement.num_unsubmitted < plan.num_groups:
        try:
            begun = movement.scheduler.backend.cancel(movement.stream, movement.number)
        except Exception as error:  # noqa: BLE001  whatever it has dropped must not look as if it had arrived
            return fail(movement, Failure.of(f"the {plan.direction} could not be cancelled: {error}", None, error))
        first = min((layer for layer in (first, begun) if layer is not None), default=None)
    if first is None and not any(follower.holds(movement) for follower in movement.followers):
        return [movement]  # all of it is submitted, perhaps by a mark that no section has noted yet
    before = "it was over" if first is None else f"layer {first} was moved"
    message = f"{plan.direction} was cancelled before {before}"
    return fail(movement, Failure(State.CANCELLED, message, first))


def fence(movement: Movement) -> None:
    """Part of a failed submission may run: an event behind all of it says when it has stopped touching memory."""
    try:
        [event] = movement.hold_events(1)
        movement.scheduler.backend.record(event, movement.stream)
    except Exception:  # noqa: BLE001  the device is lost: nothing runs there any more
        return
    movement.last_event = movement.fence_event = event


def _submit_ready(movement: Movement) -> tuple[bool, list[Movement]]:
    """Submits its groups that are ready, consecutive ones by one call. Whether there were any, also some that marks
    have submitted, and what failed."""
    submitted = movement.by_marks is not None and by_marks.take(movement)
    for first, waits in _ready_runs(movement) if movement.failure is None else []:
        failed = _submit(movement, first, waits)
        if failed:
            return submitted, failed
        submitted = True
    return submitted, []


def _ready_runs(movement: Movement) -> list[tuple[int, list[Waits]]]:
    """Runs of groups that can be submitted: the first one, and what each has to wait for on the device."""
    others = _others(movement) if movement.depends_on else []
    simple = not (movement.to_mark or others or movement.plan.left_out or movement.unread)
    if movement.ready and simple and movement.last_event is None:
        return [(0, [tuple(movement.after), *itertools.repeat((), len(movement.ready) - 1)])]  # the rule: all at once
    runs: list[tuple[int, list[Waits]]] = []
    taken: list[int] = []
    for group in movement.ready:
        waits = _waits_of(movement, group, others) if others or movement.to_mark else []
        if waits is None or not rings.is_behind_own(movement, group, taken):
            continue
        if not taken or group != taken[-1] + 1:
            runs.append((group, []))
        runs[-1][1].append(waits)
        taken.append(group)
    if runs and movement.last_event is None:  # the stream keeps the order behind the first
        runs[0][1][0] = [*runs[0][1][0], *movement.after]
    return runs


def _others(movement: Movement) -> list[Movement]:
    """Those whose layers have to be submitted before the same layers of this one, and be waited for."""
    return [before for before in movement.depends_on if not movement.is_behind(before)]


def _waits_of(movement: Movement, group: int, others: list[Movement]) -> list[Event] | None:
    """What the group has to wait for on the device; None while something of it is not recorded yet."""
    layers = movement.plan.layers_of(group)
    waits: list[Event] = [event for event in movement.marks[layers.start : layers.stop] if event is not None]
    if movement.savers:
        saved = rings.saved_before(movement, layers.start)
        if saved is None:
            return None
        waits += saved
    for before in others:
        if rings.shares_buffers(movement, before):
            events = rings.events_in_buffer(movement, before, layers.start)
        else:
            per_event = before.plan.layers_per_event
            groups = range(layers.start // per_event, (layers.stop - 1) // per_event + 1)
            events = [before.events[one] for one in groups if one not in before.plan.left_out]
        if None in events:
            if not before.failed or before.reading is not None:
                return None
            events = [event for event in (*events, before.fence_event) if event is not None]
        if not before.over and before.stream is not movement.stream:
            waits.extend(events)
    return waits


def _submit(movement: Movement, first: int, waits: list[Waits]) -> list[Movement]:
    """One call of the backend. Returns what failed by it."""
    scheduler, plan = movement.scheduler, movement.plan
    groups = range(first, first + len(waits))
    try:
        events = movement.hold_events(1 + len(groups))
        start, records = events[0], events[1:]
        work = LayerWork(plan, groups.start, groups.stop, waits, start, records, scheduler.engine, movement.number)
        backend, binding = scheduler.backend, scheduler.resources.binding
        copy_and_watch = getattr(backend, "copy_and_watch", None)
        if copy_and_watch is None or movement.report is None or len(groups) < plan.num_groups:
            backend.copy_layers(binding, work, movement.stream)
        else:
            movement.watched = copy_and_watch(binding, work, movement.stream, movement.report)
        movement.note_submitted(start, groups, records)
        at = movement.ready.index(first)
        del movement.ready[at : at + len(groups)]
    except BaseException as error:  # noqa: BLE001  whatever it is, the transfer carries it
        fence(movement)
        layer = plan.layers_of(first).start
        return fail(movement, Failure.of(f"{plan.direction} failed at layer {layer}: {error}", layer, error))
    return []
