"""Marks: a layer of a transfer may be moved behind what was submitted to a stream so far."""

from __future__ import annotations

import bisect
import functools

from ..backend.work import Event, Stream
from ..tracking.group import change_soon
from . import rings, settling
from .movement import Movement
from .resources import Events
from .uses import holding


@holding(lambda names: names["movement"].scheduler)
def mark(movement: Movement, layer: int, queue: Stream, twice: str) -> None:
    """``twice``: what is said of a layer that could be moved before.

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
        raise
    finally:
        del held
    movement.raise_if_failed()
    if movement.plan.num_groups:
        raise ValueError(twice)


def _note(movement: Movement, layer: int, event: Event, held: object) -> None:
    """In a section."""
    is_mark = not (movement.over or movement.failed or movement.marks[layer] is not None)
    if is_mark:
        movement.marks[layer] = event
    movement.unmarked.pop(layer, None)  # there again if an exception came to the caller behind the hand-over
    if not is_mark:
        return
    if not movement.layerwise:  # a load into a ring
        rings.note_savers(movement)
    group = movement.plan.group_of(layer)
    if not movement.is_held_back(group):
        bisect.insort(movement.ready, group)
        settling.progress([movement])
