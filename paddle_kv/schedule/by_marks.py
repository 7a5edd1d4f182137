"""Layerwise saves whose layers the backend submits itself when they are marked: where a mark would otherwise need a
section, the caller's thread makes one call. Sections find out by :func:`take` what came of the marks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..backend.work import Event, LayerWork
from .movement import Movement


@dataclass(eq=False)
class ByMarks:
    """Events of the groups of such a save: each is a submission."""

    starts: Sequence[Event]
    records: Sequence[Event]


def offer(movement: Movement) -> None:
    """In the section that starts it: leaves it to the backend, if that takes it and nothing but its marks has to come
    before its layers. Otherwise, and from :func:`end` on, sections submit what is marked."""
    scheduler, plan = movement.scheduler, movement.plan
    submit = getattr(scheduler.backend, "submit_by_marks", None)
    if submit is None or not movement.layerwise or movement.ring or not plan.num_groups:
        return
    if not all(movement.is_behind(before) for before in movement.depends_on):
        return
    events = ByMarks(movement.hold_events(plan.num_groups), movement.hold_events(plan.num_groups))
    marks = [[movement.unmarked[layer] for layer in plan.layers_of(group)] for group in plan.groups]
    work = LayerWork(
        plan, 0, plan.num_groups, marks, events.starts[0], events.records, scheduler.engine, movement.number
    )
    taken = False
    movement.by_marks = events  # before the call: an error behind it must not leave the save with the backend
    with contextlib.suppress(Exception):  # sections submit it then, and tell what is wrong with it
        taken = submit(scheduler.resources.binding, work, events.starts, movement.stream)
    if not taken:
        movement.by_marks = None


def take(movement: Movement, *, ends: bool = False) -> bool:
    """In sections: notes which groups the marks have submitted, and whether there were any."""
    events, plan = movement.by_marks, movement.plan
    if events is None:
        return False
    backend: Any = movement.scheduler.backend
    known = plan.num_groups - movement.num_unsubmitted
    groups = backend.take_enqueued(movement.number, known, plan.num_groups, ends)
    for group in groups:
        for layer in plan.layers_of(group):
            event = movement.unmarked.pop(layer, None)  # there again if an exception came to the caller of the mark
            movement.marks[layer] = movement.marks[layer] or event
        movement.note_submitted(events.starts[group], range(group, group + 1), [events.records[group]])
    if ends or not movement.num_unsubmitted:
        movement.by_marks = None
    return bool(groups)


def end(movement: Movement) -> None:
    """In sections: the backend submits nothing more of it by itself."""
    take(movement, ends=True)


def find_ready(movement: Movement) -> None:
    """Of one that the backend had: what is marked, and was not submitted."""
    movement.ready = [
        group for group in movement.plan.groups if movement.events[group] is None and not movement.is_held_back(group)
    ]
