"""Layerwise saves that tell when each layer is in host memory, while later ones are still on their way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..backend.work import Stream, TransferPlan
from ..tracking.group import change
from .movement import Follower, Movement
from .resources import Events
from .transfer import Transfer


def start(
    scheduler: Any,
    plan: TransferPlan,
    compute: Stream,
    ended: Callable[[range], object],
    over: Callable[[Movement], object],
) -> Transfer:
    """In a section. ``ended`` is called once for each group of layers that is moved, in a thread of the library and in
    no section; not for one that failed. It waits for nothing. ``over`` is called as a done callback is.

    Of the last layers it may be called behind ``over``; that these are there says the state.
    """
    transfer: Transfer = scheduler.start_here(plan, compute, True, False)
    movement = transfer._movement
    movement.followers.append(_LayerEnds(ended))
    movement.callbacks.append(functools.partial(over, movement))
    return transfer


class _LayerEnds(Follower):
    def __init__(self, ended: Callable[[range], object]) -> None:
        self._ended = ended

    def submitted(self, movement: Movement, groups: range) -> None:
        for group in groups:
            passed = functools.partial(_passed, self._ended, movement, movement.held, group)
            post = functools.partial(movement.group.host.post, passed)  # out of any thread
            movement.scheduler.backend.watch([movement.events[group]], post)


def _passed(ended: Callable[[range], object], movement: Movement, held: tuple[Events, ...], group: int) -> None:
    """The event of a group, one of those that are ``held``, was passed."""
    try:
        there = change(movement, lambda: movement.scheduler.backend.is_complete(movement.events[group]))
    except Exception as error:  # noqa: BLE001  the transfer tells of it
        error.__traceback__ = None  # the backend keeps it, and it would keep the events with this frame
        return
    if there:
        ended(movement.plan.layers_of(group))
