"""Layerwise saves that tell when each layer is in host memory, while later ones are still on their way."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from ..backend.work import Stream, TransferPlan
from ..tracking.group import change
from ..tracking.keeper import Host, keeper
from .movement import Follower, Movement
from .resources import Events
from .transfer import Transfer


def start(
    scheduler: Any,
    plan: TransferPlan,
    compute: Stream,
    ended: Callable[[list[int]], object],
    over: Callable[[Movement], object],
) -> Transfer:
    """In a section. ``ended`` is called with layers that are moved, in a thread of the library and in no section: with
    all that have ended since the last time, in the order in which they did; not with those that failed. It waits for
    nothing. ``over`` is called as a done callback is.

    Of the last layers it may be called behind ``over``; that these are there says the state.
    """
    transfer: Transfer = scheduler.start_here(plan, compute, True, False)
    movement = transfer._movement
    movement.followers.append(_LayerEnds(ended))
    movement.callbacks.append(functools.partial(over, movement))
    return transfer


class _LayerEnds(Follower):
    def __init__(self, ended: Callable[[list[int]], object]) -> None:
        self._ended = ended
        self._passed: deque[tuple[Movement, tuple[Events, ...], int]] = deque()
        self._is_posted = False
        self._host: Host = keeper

    def submitted(self, movement: Movement, groups: range) -> None:
        for group in groups:
            report = functools.partial(self._report, movement, movement.held, group)
            movement.scheduler.backend.watch([movement.events[group]], report)

    def _report(self, movement: Movement, held: tuple[Events, ...], group: int) -> _LayerEnds:
        """Out of any thread: the event of a group, one of those that are ``held``, was passed."""
        self._passed.append((movement, held, group))
        self._host = movement.group.host
        return self

    def soon(self) -> None:
        """What is passed until the keeper comes to it is one job for it."""
        if not self._is_posted:
            self._is_posted = True
            self._host.post(self.now)

    def now(self) -> None:
        self._is_posted = False  # before it looks: what comes from here on has a job of its own
        passed = []
        while self._passed:
            passed.append(self._passed.popleft())
        layers = change(passed[0][0], functools.partial(_moved_layers, passed)) if passed else []
        if layers:
            self._ended(layers)


def _moved_layers(passed: list[tuple[Movement, tuple[Events, ...], int]]) -> list[int]:
    """In a section: those of the groups that have not failed."""
    layers: list[int] = []
    for movement, _, group in passed:
        try:
            if movement.scheduler.backend.is_complete(movement.events[group]):
                layers += movement.plan.layers_of(group)
        except Exception as error:  # noqa: BLE001  the transfer tells of it
            error.__traceback__ = None  # the backend keeps it, and it would keep the events with this frame
    return layers
