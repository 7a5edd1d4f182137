"""Who is in a call for which a scheduler has to stay as it is, told by references: an exception ends a use too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from ..tracking.domain import BlockDomain
from ..tracking.group import MemoryGroup


def notify(domain: BlockDomain) -> None:
    domain.group.notify()


_Function = TypeVar("_Function", bound=Callable[..., Any])
_holding: dict[CodeType, Callable[[dict[str, Any]], Any]] = {}


def holding(scheduler_of: Callable[[dict[str, Any]], Any]) -> Callable[[_Function], _Function]:
    """Of a function that a close of a scheduler has to wait for while its local variable ``held`` is set.
    ``scheduler_of``: which one, by the function's local variables."""

    def note(function: _Function) -> _Function:
        _holding[function.__code__] = scheduler_of
        return function

    return note


def is_held_here(scheduler: Any) -> bool:
    """Whether the calling thread itself is in the middle of such a function, out of which a handler of a signal, or a
    finalizer, has called: it cannot wait for that. Told by the frames: so a wait costs nothing, and an exception can
    leave nothing wrong behind."""
    frame = sys._getframe(1)
    while frame is not None:
        scheduler_of = _holding.get(frame.f_code)
        if scheduler_of is not None:
            names: Any = frame.f_locals
            found = bool(names.get("held")) and scheduler_of(names) is scheduler
            if isinstance(names, dict):  # up to Python 3.12: a copy that would live as long as the frame
                names.clear()
            if found:
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Use:
    """One thread in a call that needs the scheduler open, or that closes it; ends with the call, however that ends."""

    _group: MemoryGroup | None = None  # a signal may come before there is one

    def __init__(self, group: MemoryGroup) -> None:
        self._group = group

    def __del__(self) -> None:
        if self._group is not None:
            self._group.notify()
