"""Finds out which transfers are over, gives back what they held, and tells whoever waits. In sections only."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable

from ..backend.work import Event
from ..tracking.group import change
from ..tracking.keeper import log
from .movement import Failure, Movement, State, movements
from .resources import Events
from .submission import InOrder, advance, fail, submit_ready


def progress(given: Iterable[Movement]) -> None:
    """Something has changed that these transfers waited for: submits what is ready now, watches what is on its way,
    ends what has nothing left to run."""
    _look_at_all(_progress(given))


def begin(movement: Movement) -> None:
    """:func:`progress` of one that nothing waits for yet."""
    ended: list[Movement] = []
    others = submit_ready(movement, ended)
    if others or (ended and movement.watched is None):
        _look_at_all([*(one for given in ended for one in _watch(given)), *_progress(others)])


def _progress(given: Iterable[Movement]) -> list[Movement]:
    """Returns those that have nothing left to run."""
    return [one for movement in advance(given) for one in _watch(movement)]


def _watch(movement: Movement) -> list[Movement]:
    """All that will be is submitted: its end is heard of from now on. Returns those that have nothing left to run."""
    if movement.last_event is None:
        return [movement]
    backend = movement.scheduler.backend
    try:
        if movement.watched is None:
            movement.watched = backend.watch(_asked(movement), reporter(movement, movement.held))
    except Exception as error:  # noqa: BLE001  nobody would hear of the end
        ended = _progress(fail(movement, Failure.of(f"{movement.direction} failed: {error}", None, error)))
        with contextlib.suppress(Exception):
            backend.wait(movement.last_event, None)
        return [*ended, movement]
    return []


def progress_again(movement: Movement) -> None:
    """:func:`progress` of one that may have been left at any point of it, by an error."""
    progress([movement])
    if movement.state is State.ARRIVING:
        _look_at_all([*_watch(movement), movement])


def reporter(movement: Movement, held: tuple[Events, ...]) -> Callable[[], None]:
    """What the backend calls, out of any of its threads, when all events of a transfer were passed. ``held``: events
    that have to live until then."""
    return functools.partial(_report, movement.number, held)


def _report(number: int, held: tuple[Events, ...]) -> None:
    movement = movements.get(number)
    if movement is not None:
        movement.group.host.post(functools.partial(change, movement.target, functools.partial(look, movement)))


def look(movement: Movement) -> None:
    """Asks the device, behind the transfers whose result it reads, and moves on to "over" and "retired"."""
    if movement.by_marks is not None:
        progress([movement])
    if movement.state is not State.ARRIVING or not movement.over_after:  # nearly all
        others = _look(movement)
        if others:
            _look_at_all(others)
        return
    seen = {movement}
    left = [movement]
    at_an_end: list[Movement] = []
    while left:
        one = left.pop()
        ends_behind = one.over_after if one.state is State.ARRIVING else ()
        # These decide only where its own copies are through: a chain is asked from its beginning.
        found = _ask_device(one) if ends_behind else []
        if found is not None:
            at_an_end += [one, *found]
            new = [source for source in ends_behind if not one.failed and not source.over and source not in seen]
            seen.update(new)
            left += new
    _look_at_all(at_an_end)


def _ask_device(movement: Movement) -> list[Movement] | None:
    """None while something of it runs, or somebody else uses its blocks; behind that the device is asked no more. Else
    what has nothing left to run by a failure that it told."""
    if movement.through:
        return []
    if movement.reading is not None:
        return None
    if movement.followers and any(follower.holds(movement) for follower in movement.followers):
        return None
    failed = []
    try:
        if movement.last_event is not None and not movement.scheduler.backend.is_complete(*_asked(movement)):
            return None
    except Exception as error:  # noqa: BLE001
        failed = _fail_by_device(movement, error)
    movement.through = True
    return _progress(failed) if failed else []


def look_for_failure(movement: Movement) -> None:
    """Asks every event, also of a transfer of which layers are still to be submitted."""
    for event in movement.events if not movement.over else ():
        try:
            if event is not None:
                movement.scheduler.backend.is_complete(event)
        except Exception as error:  # noqa: BLE001
            progress(_fail_by_device(movement, error))
    look(movement)


def _look_at_all(given: Iterable[Movement]) -> None:
    queue = InOrder(given)
    while queue:
        queue.extend(_look(queue.pop()))


def _look(movement: Movement) -> list[Movement]:
    """Returns those that may be over, or retire, by that."""
    if movement.retired:
        return []
    found = _look_at_device(movement) if movement.state is State.ARRIVING else []
    lacks_layers = movement.failed or movement.plan.left_out  # later ones wait through it for those before
    if not movement.over or (lacks_layers and not all(before.retired for before in movement.depends_on)):
        return found
    dependents = list(movement.dependents)
    _retire(movement)
    return [*found, *_progress(dependents), *dependents] if dependents else found


def _look_at_device(movement: Movement) -> list[Movement]:
    scheduler = movement.scheduler
    found = _ask_device(movement)
    if found is None:
        return []
    if movement.failure is None and movement.over_after and not all(source.over for source in movement.over_after):
        return found  # a failure of theirs would be one of this transfer
    if scheduler.observer is not None:
        mismatch = scheduler.observer.over(movement, movement.failure or movement.loss)
        if mismatch is not None:
            found += _progress(fail(movement, mismatch))
    if movement.followers and movement.failure is None:
        for loss in filter(None, [follower.loss_of(movement) for follower in movement.followers]):
            found += _progress(fail(movement, loss))
    if movement.failure is None:
        with contextlib.suppress(Exception):  # times are not worth a failure; what is not known yet stays unknown
            _measure(movement)
    _end(movement)
    return found


def _asked(movement: Movement) -> list[Event]:
    """The events that say whether it is over."""
    # A failure is reported by all events behind it of its submission. Those of earlier layers may lie on another stream
    # than the last one and pass a moment later; until then a GPU tells no times.
    last, starts = movement.last_event, movement.starts
    if len(starts) == 1 and movement.fence_event is None and not movement.scheduler.record_layer_times:
        return [last]
    ends = [movement.events[groups[-1]] for _, groups in starts]
    asked = movement.events if movement.scheduler.record_layer_times else ends
    return [last, *(event for event in asked if event is not None and event is not last)]


def _end(movement: Movement) -> None:
    """It is over: its events go back as soon as nobody looks at them."""
    movement.held, movement.after, movement.starts = (), (), []
    movement.report, movement.spare = None, []
    movement.unmarked = dict.fromkeys(movement.unmarked)
    movement.marks = [None] * len(movement.marks)
    movement.savers, movement.sharing = {}, {}
    movement.stream = movement.watched = None
    movement.failure = movement.failure or movement.loss
    movement.enter(State.DONE if movement.failure is None else movement.failure.state)
    for follower in movement.followers:
        follower.ended(movement)
    movement.followers = []
    host = movement.group.host
    for callback in movement.callbacks:
        host.tell(callback)
    movement.callbacks = []
    if movement.handle() is None:
        log_untold(movement)
    elif movement.guard is not None and movement.state is not State.FAILED:
        movement.guard.cancel()
        movement.guard = None  # or it would tell of the handle's end all the same


def log_untold(movement: Movement) -> None:
    """A failure that nobody has asked for and nobody can ask for any more."""
    if movement.state is State.FAILED and not movement.told and movement.failure is not None:
        movement.told = True
        log.error("%s; nobody has waited for this transfer", movement.failure.message)


def _retire(movement: Movement) -> None:
    """Gives back its blocks: nothing is left to wait for."""
    movements.pop(movement.number, None)
    written, plan, lost = movement.failure is movement.loss, movement.plan, movement.lost
    lost_ids = ((), ()) if lost is None else (plan.source_ids[lost], plan.target_ids[lost])
    movement.source.release(movement, written=written, lost=lost_ids[0])  # written if they were being read
    movement.target.release(movement, written=written, lost=lost_ids[1])
    movement.group.transfers.pop(movement.number, None)
    for before in movement.depends_on:
        before.dependents.pop(movement, None)
    movement.dependents = {}
    movement.depends_on, movement.reads_from = set(), set()
    movement.notify()


def abandon(movement: Movement) -> None:
    """In a forked child: nothing moves here any more."""
    movement.by_marks = None  # the parent's: another thread may have been in the backend
    message = f"the process forked while the {movement.direction} was in flight"
    for failed in fail(movement, Failure(State.FAILED, message)):
        if failed.failed and failed.state is not State.ARRIVING and not failed.over:
            failed.enter(State.ARRIVING)
    movement.watched = None
    if not movement.over:
        movement.told = True  # the parent's to tell
        movement.enter(State.FAILED)
    _retire(movement)


def _fail_by_device(movement: Movement, error: Exception) -> list[Movement]:
    """Found out by asking the device: the copies failed. Returns all that fail by that, to be advanced."""
    layer = first_failed_layer(movement)
    at = "" if layer is None else f" at layer {layer}"
    return fail(movement, Failure.of(f"{movement.direction} failed{at}: {error}", layer, error))


def first_failed_layer(movement: Movement) -> int | None:
    """Where the device reports the failure; else the first layer of which it says nothing."""
    unknown = None
    for group in movement.plan.groups:
        event, layer = movement.events[group], movement.plan.layers_of(group).start
        try:
            if event is None or not movement.scheduler.backend.is_complete(event):
                unknown = layer if unknown is None else unknown
        except Exception as error:  # noqa: BLE001
            error.__traceback__ = None  # the backend keeps it, and it the frames of our callers
            return layer
    return unknown


def _measure(movement: Movement) -> None:
    if not movement.starts:
        movement.elapsed_ms = 0.0
        return
    scheduler = movement.scheduler
    elapsed = scheduler.backend.elapsed_ms
    movement.elapsed_ms = elapsed(movement.starts[0][0], movement.last_event)
    if len(movement.starts) == 1:
        movement.sample = (movement.bytes, movement.elapsed_ms)
    else:
        start, last = movement.starts[-1]
        layers = movement.plan.layers_of(last[-1]).stop - movement.plan.layers_of(last[0]).start
        last_ms = elapsed(start, movement.last_event)
        movement.sample = (movement.bytes * layers // movement.plan.num_moved_layers, last_ms)
    if not scheduler.record_layer_times:
        return
    origin = scheduler.resources.origin_event
    times: dict[int, tuple[float, float]] = {}
    for start, groups in movement.starts:
        begin = elapsed(origin, start)
        for group in groups:
            end = elapsed(origin, movement.events[group])
            for layer in movement.plan.layers_of(group):
                times[layer] = (begin, end)
            begin = end
    movement.layer_times_ms = [times[layer] for layer in sorted(times)]
