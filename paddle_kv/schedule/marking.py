"""Marks: a layer of a transfer may be moved behind what was submitted to a stream so far."""

from __future__ import annotations

import bisect
import functools
from typing import Any

from ..backend.work import Event, Stream
from ..tracking.group import change_soon
from . import by_marks, rings, settling
from .movement import Movement
from .resources import Events
from .uses import holding


@holding(lambda names: names["movement"].scheduler)
def mark(movement: Movement, layer: int, queue: Stream, twice: str) -> None:
    """``twice``: what is said of a ``{layer}`` that could be moved before.

    Raises:
        ValueError: such a layer.
        TransferError, CancelledError: the transfer failed or was cancelled.
    """
    movement.raise_if_failed()
    held = movement.held  # keeps the event, whatever becomes of the transfer meanwhile
    try:
        _record(movement, layer, queue, held, twice)
    finally:
        del held  # an exception would keep it with this frame
    movement.raise_if_failed()


def _record(movement: Movement, layer: int, queue: Stream, held: tuple[Events, ...], twice: str) -> None:
    event = None
    try:
        # Not ``pop``: behind a call a signal handler may raise, and the event would be lost.
        if layer in movement.unmarked:
            event = movement.unmarked[layer]
            del movement.unmarked[layer]  # of several threads one succeeds
        if event is not None and _mark_at_backend(movement, layer, event, queue):
            return
        if event is not None:
            movement.scheduler.backend.record(event, queue)
            change_soon(movement, functools.partial(_note, movement, layer, event, held))
            return
    except KeyError:
        pass
    except BaseException:  # waiting for an event that is not recorded would be no wait: it is no mark
        if event is not None and movement.marks[layer] is None:
            movement.unmarked[layer] = event
            if movement.marks[layer] is not None:  # the hand-over was done meanwhile
                movement.unmarked.pop(layer, None)
        if movement.by_marks is not None or movement.is_noted:  # the backend may have it all the same
            change_soon(movement, functools.partial(_submit_rest, movement))
        raise
    finally:
        del held
    movement.raise_if_failed()
    if movement.plan.num_groups:
        raise ValueError(twice.format(layer=layer if movement.layerwise else layer - movement.ring))


def _mark_at_backend(movement: Movement, layer: int, event: Event, queue: Stream) -> bool:
    """Whether the backend has taken the mark."""
    if movement.by_marks is None:
        return False
    backend: Any = movement.scheduler.backend
    is_marked = backend.mark_layer(movement.number, layer, queue)
    if is_marked is False:  # a section has ended that, or knows of the mark: an exception came to its caller
        return False
    movement.marks[layer] = event
    group = movement.group
    if is_marked is None:  # there is no memory
        change_soon(movement, functools.partial(_submit_rest, movement))
    elif not movement.is_noted:
        movement.is_noted = True
        group.note(functools.partial(_catch_up, movement))
    # Behind the note: whoever comes to wait for it looks at what was noted, and else is seen here. A group that was
    # united with another one meanwhile may have left the note behind.
    is_wanted = not movement.unmarked or movement.dependents or movement.followers or movement.layer_waiters
    if is_wanted or movement.group is not group:
        change_soon(movement, functools.partial(_catch_up, movement))
    return True


def _catch_up(movement: Movement) -> None:
    """In a section."""
    movement.is_noted = False  # before it looks: what comes from here on is noted again
    if movement.by_marks is None:
        by_marks.find_ready(movement)  # marked while it was ended
    settling.progress([movement])


def _submit_rest(movement: Movement) -> None:
    """In a section: the backend has it no more from here on."""
    by_marks.end(movement)
    _catch_up(movement)


def _note(movement: Movement, layer: int, event: Event, held: object) -> None:
    """In a section."""
    group = movement.plan.group_of(layer)
    is_known = movement.marks[layer] is not None or movement.events[group] is not None
    is_mark = not (movement.over or movement.failed or is_known)
    if is_mark:
        movement.marks[layer] = event
    movement.unmarked.pop(layer, None)  # there again if an exception came to the caller behind the hand-over
    if not is_mark:
        return
    if not movement.layerwise:  # a load into a ring
        rings.note_savers(movement)
    if not movement.is_held_back(group):
        bisect.insort(movement.ready, group)
        settling.progress([movement])
