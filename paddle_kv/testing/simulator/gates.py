"""Gates of the simulated device: the turn of a replay is known at its launch, so each of its waits is for one mark,
which may be recorded later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .device import Device, Mark, SimulatedStream


class SimulatedGates:
    """See :class:`~paddle_kv.backend.protocol.Gates`. Time stands still: a gate gives up when it is told to."""

    def __init__(
        self,
        device: Device,
        num_layers: int,
        compute_stream: Callable[[Any], SimulatedStream],
        create_stream: Callable[[], Any],
        destroy_stream: Callable[[Any], None],
    ) -> None:
        self._device = device
        self._num_layers = num_layers
        self._compute_stream = compute_stream
        self._destroy_stream = destroy_stream
        self._opener, self._marker, self._ender = (create_stream() for _ in range(3))
        self._load_turn = self._save_turn = 0
        self._promised: dict[tuple[str, int, int], Mark] = {}  # what, layer, turn
        self._given_up: dict[int, int] = {}

    def wait(self, layer: int, stream: Any) -> None:
        if self._load_turn:
            self._device.wait(self._compute_stream(stream), self._promise("through", layer, self._load_turn))

    def mark(self, layer: int, stream: Any) -> None:
        if self._save_turn:
            self._device.record(self._compute_stream(stream), mark=self._promise("marked", layer, self._save_turn))

    def mark_and_wait(self, layer: int, stream: Any) -> None:
        self.mark(layer, stream)
        self.wait(layer + 1, stream)

    def arm(self, stream: SimulatedStream, load_turn: int, save_turn: int) -> None:
        self._load_turn, self._save_turn = load_turn, save_turn

    def let_through(self, first_layer: int, turn: int, waits: Sequence[Sequence[Any]]) -> None:
        for layer, events in enumerate(waits, first_layer):
            for event in events:
                self._device.wait(self._opener, event.mark)
            self._device.record(self._opener, mark=self._promise("through", layer, turn))

    def record_marks(self, turn: int, events: Sequence[Sequence[Any]]) -> None:
        for layer, of_layer in enumerate(events):
            self._device.wait(self._marker, self._promise("marked", layer, turn))
            for event in of_layer:
                event.mark = self._device.record(self._marker)

    def pass_marks(self, turn: int) -> None:
        for layer in range(self._num_layers):
            for one in range(1, turn + 1):
                self._device.record(self._ender, mark=self._promise("marked", layer, one))

    def give_up(self, turn: int, layer: int) -> None:
        """The time of this gate is over."""
        self._given_up[turn] = layer
        for one in range(self._num_layers):
            self._device.record(self._ender, mark=self._promise("through", one, turn))

    def given_up(self, turn: int) -> int | None:
        return self._given_up.get(turn)

    def open_all(self) -> None:
        """Nothing waits here any more."""
        for mark in list(self._promised.values()):
            self._device.record(self._ender, mark=mark)

    def close(self) -> None:
        for stream in (self._opener, self._marker, self._ender):
            self._destroy_stream(stream)

    def _promise(self, what: str, layer: int, turn: int) -> Mark:
        key = (what, layer, turn)
        if key not in self._promised:
            self._promised[key] = self._device.new_mark()
        return self._promised[key]
