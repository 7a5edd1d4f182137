"""Gates without a GPU: a "replay" is code of the calling thread that waits and marks again and again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..tracking.group import wake
from ..tracking.keeper import Deadline, Waiter
from .work import Event, Stream


class CpuGates:
    """See :class:`~paddle_kv.backend.protocol.Gates`. ``create_stream`` makes a thread that runs tasks in order."""

    def __init__(self, num_layers: int, timeout_s: float, create_stream: Callable[[], Any]) -> None:
        self._timeout_s = timeout_s
        self._through = [0] * num_layers
        self._marked = [0] * num_layers
        self._load_turn = self._save_turn = 0
        self._given_up: dict[int, int] = {}
        self._waiters: list[Waiter] = []
        self._opener, self._marker = create_stream(), create_stream()

    def wait(self, layer: int, stream: Any) -> None:
        turn = self._load_turn

        def is_open() -> bool:
            return self._through[layer] >= turn or turn in self._given_up

        if not self._wait_for(is_open, self._timeout_s):
            self._given_up[turn] = layer
            wake(self._waiters)

    def mark(self, layer: int, stream: Any) -> None:
        self._marked[layer] = max(self._marked[layer], self._save_turn)
        wake(self._waiters)

    def mark_and_wait(self, layer: int, stream: Any) -> None:
        self.mark(layer, stream)
        self.wait(layer + 1, stream)

    def arm(self, stream: Stream, load_turn: int, save_turn: int) -> None:
        self._load_turn, self._save_turn = load_turn, save_turn

    def let_through(self, first_layer: int, turn: int, waits: Sequence[Sequence[Event]]) -> None:
        for layer, events in enumerate(waits, first_layer):
            self._opener.submit(functools.partial(self._open, layer, turn, events))

    def record_marks(self, turn: int, events: Sequence[Sequence[Event]]) -> None:
        for layer, of_layer in enumerate(events):
            self._marker.submit(functools.partial(self._set_behind, layer, turn, of_layer))

    def pass_marks(self, turn: int) -> None:
        self._marked = [max(marked, turn) for marked in self._marked]
        wake(self._waiters)

    def given_up(self, turn: int) -> int | None:
        return self._given_up.get(turn)

    def close(self) -> None:
        self._opener.close()
        self._marker.close()

    # ---- in threads of their own ----
    def _open(self, layer: int, turn: int, events: Sequence[Event]) -> None:
        for event in events:
            event.wait()
        self._through[layer] = turn
        wake(self._waiters)

    def _set_behind(self, layer: int, turn: int, events: Sequence[Event]) -> None:
        self._wait_for(lambda: self._marked[layer] >= turn, None)
        for event in events:
            event.set()

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        deadline = Deadline(timeout_s)
        while not condition():
            waiter = Waiter()
            self._waiters.append(waiter)
            try:
                if not condition() and not waiter.sleep(deadline.left_s()):
                    return condition()
            finally:
                with contextlib.suppress(ValueError):  # released meanwhile
                    self._waiters.remove(waiter)
        return True
