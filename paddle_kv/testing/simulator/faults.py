"""A backend around any other one of which one call fails."""

from __future__ import annotations

from typing import Any

from ...backend.protocol import Backend

CALLS = (
    "bind",
    "create_stream",
    "create_event",
    "compute_stream",
    "record",
    "wait_on_stream",
    "copy_layers",
    "watch",
    "cancel",
    "is_complete",
    "wait",
    "elapsed_ms",
    "user_event",
)


class InjectedError(RuntimeError):
    """The failure that was asked for."""


class FaultyBackend:
    """Passes each call on to ``inner``, but the ``number``-th call of ``call`` raises :class:`InjectedError` instead.

    ``is_complete`` reports the failure of what is behind the events, so it fails only where all of them were passed.

    Args:
        inner: a backend.
        call: one of :data:`CALLS`.
        number: 1 is the first call.

    Attributes:
        fired: whether it has failed.
    """

    def __init__(self, inner: Backend, call: str, number: int) -> None:
        if call not in CALLS:
            raise ValueError(f"call = {call!r} must be one of {CALLS}")
        self.inner = inner
        self.name = inner.name
        self.host = getattr(inner, "host", None)
        self.fired = False
        self._call = call
        self._left = number

    def disarm(self) -> None:
        """From now on nothing fails."""
        self._left = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("copy_and_watch", "start_alone"):
            raise AttributeError(name)  # the calls that these are made of, each of which may fail
        method = getattr(self.inner, name)
        if name != self._call:
            return method

        def counted(*arguments: Any) -> Any:
            answer = method(*arguments) if name == "is_complete" else None
            if name != "is_complete" or answer:
                self._left -= 1
                if self._left == 0:
                    self.fired = True
                    raise InjectedError(f"{name} was made to fail")
            return answer if name == "is_complete" else method(*arguments)

        return counted
