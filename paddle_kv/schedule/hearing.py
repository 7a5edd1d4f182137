"""Waiting for the end of a transfer where the backend tells of it."""

from __future__ import annotations

import functools

from ..tracking.group import change
from ..tracking.keeper import Deadline
from . import settling
from .movement import Movement


def hear(movement: Movement, deadline: Deadline) -> None:
    """The caller ends the transfer himself: two changes of threads less than being woken by the keeper. Returns at once
    where the backend does not offer it, or there is more to come than the end."""
    watched = movement.watched
    if watched is None or movement.over:
        return
    wait = getattr(movement.scheduler.backend, "hear", None)
    if wait is not None and not movement.group.host.serves:  # it has other ends to hear of
        look = functools.partial(change, movement, functools.partial(settling.look, movement))
        wait(watched, deadline.left_s(), look, settling.reporter(movement, ()))
