"""A backend that leaves one protection out, so that tests can show that somebody notices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ...backend.protocol import Backend, Gates, Later
from ...backend.work import Event, LayerWork, Stream
from ...errors import CaptureError
from .by_marks import MarksAtBackend

REMOVALS = {
    "wait-compute-before-offload": "an offload does not wait for the compute stream (the call, or the mark of a layer)",
    "wait-compute-before-onload": "an onload does not wait for the compute stream",
    "wait-offload-before-onload": "an onload does not wait for the offloads that it conflicts with",
    "wait-onload-before-offload": "an offload does not wait for the onloads that it conflicts with",
    "wait-offload-before-offload": "an offload does not wait for conflicting offloads of other schedulers",
    "wait-onload-before-onload": "an onload does not wait for conflicting onloads of other schedulers",
    "wait-layer": "wait_layer and wait_on do not hold the compute stream",
    "record-compute": "the event behind the compute stream's work is not recorded",
    "record-layer": "the event behind a layer's copy is not recorded",
    "record-before-copy": "the event of a layer is recorded before its copy instead of behind it",
    "record-fence": "no event behind a submission that broke half way",
    "completion": "each event counts as passed: blocks, events and memory are given back too early",
    "completion-report": "no event ever counts as passed",
    "watch-report": "nobody is told that the events of a transfer were passed",
    "cancel-told": "copies that were dropped by a cancel look as if they had been made",
    "copy-error": "the error of a copy is not reported",
    "submission-error": "the error of a submission is not reported",
    "capture-check": "a stream that is being captured is used like any other",
    "gate-wait": "a replay does not wait at its gates",
    "gate-arm": "a replay is not armed: it waits for the loads of the one before",
    "gate-turn": "all replays have one turn: what was let through once stays open",
    "let-through": "nobody says that a layer is there",
    "let-through-wait": "a layer is let through before its loads have brought it",
    "gate-mark": "a replay does not mark its layers",
    "gate-mark-wait": "saves do not wait for the marks of their replay",
    "pass-marks": "saves whose replay never comes go on waiting for it",
    "given-up": "a gate that gives up does not tell",
    "give-back-events": "events are not given back",
    "give-back-streams": "streams are not given back",
    "give-back-binding": "the pointers of the pools stay registered",
}


class MutatedBackend(MarksAtBackend):
    """Passes each call on to ``inner``, except for what ``drop`` names.

    Args:
        inner: a backend.
        drop: names from :data:`REMOVALS`.
        directions: event -> direction of the transfer that it is behind; one for all backends of a device.

    Raises:
        ValueError: a name that is not in :data:`REMOVALS`.
    """

    def __init__(self, inner: Backend, drop: Collection[str], directions: dict[Event, str]) -> None:
        unknown = set(drop) - set(REMOVALS)
        if unknown:
            raise ValueError(f"drop names {sorted(unknown)}; known are {sorted(REMOVALS)}")
        super().__init__(inner)
        self.name = inner.name
        self.host = getattr(inner, "host", None)
        self._drop = frozenset(drop)
        self._directions = directions
        self._streams: dict[int, bool] = {}  # transfer stream -> whether it has carried a transfer
        self._compute_events: set[Event] = set()
        self._spare_events: list[Event] = []

    def restore(self) -> None:
        """From now on nothing is left out."""
        self._drop = frozenset()

    def bind(self, device_cache: Any, host_pool: Any) -> Any:
        return self.inner.bind(device_cache, host_pool)

    def unbind(self, binding: Any) -> None:
        if "give-back-binding" not in self._drop:
            self.inner.unbind(binding)

    def create_stream(self, *, urgent: bool = False) -> Stream:
        stream = self.inner.create_stream(urgent=urgent)
        self._streams[id(stream)] = False
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        if "give-back-streams" not in self._drop:
            self.inner.destroy_stream(stream)

    def create_event(self) -> Event:
        event = self.inner.create_event()
        self._compute_events.discard(event)
        return event

    def destroy_event(self, event: Event) -> None:
        if "give-back-events" not in self._drop:
            self.inner.destroy_event(event)

    def create_gates(self, num_layers: int, timeout_s: float) -> MutatedGates:
        return MutatedGates(self.inner.create_gates(num_layers, timeout_s), lambda: self._drop)

    def close(self) -> None:
        for event in self._spare_events:
            self.inner.destroy_event(event)
        self._spare_events.clear()
        self.inner.close()

    def compute_stream(self, stream: Any) -> Stream:
        try:
            return self.inner.compute_stream(stream)
        except CaptureError:
            if "capture-check" in self._drop and stream is not None:
                return stream
            raise

    def record(self, event: Event, stream: Stream) -> None:
        if id(stream) not in self._streams:
            self._compute_events.add(event)
            if "record-compute" in self._drop:
                return
        elif self._streams[id(stream)] and "record-fence" in self._drop:
            return
        self.inner.record(event, stream)

    def wait_on_stream(self, stream: Stream, event: Event, timeout_s: float | None) -> None:
        if "wait-layer" not in self._drop:
            self.inner.wait_on_stream(stream, event, timeout_s)

    def copy_layers(self, binding: Any, work: LayerWork, stream: Stream) -> None:
        self._streams[id(stream)] = True
        waits = [[event for event in events if not self._is_dropped(event, work)] for events in work.waits]
        work = dataclasses.replace(work, waits=waits)
        self._directions.update(dict.fromkeys(work.records, work.plan.direction))
        if "record-layer" in self._drop or "record-before-copy" in self._drop:
            spare = [self.inner.create_event() for _ in work.records]
            self._spare_events.extend(spare)
            for event in work.records if "record-before-copy" in self._drop else ():
                self.inner.record(event, stream)
            work = dataclasses.replace(work, records=spare)
        try:
            self.inner.copy_layers(binding, work, stream)
        except Exception:
            if "submission-error" not in self._drop:
                raise
            for event in work.records:
                self.inner.record(event, stream)

    def watch(self, events: Sequence[Event], report: Callable[[], Later | None]) -> Any:
        if "completion" in self._drop:
            later = report()
            if later is not None:
                later.soon()
        elif not self._drop & {"completion-report", "watch-report"}:
            return self.inner.watch(events, report)
        return None

    @property
    def hear(self) -> Any:
        return getattr(self.inner, "hear", None)

    def cancel(self, stream: Stream, number: int) -> int | None:
        first = self.inner.cancel(stream, number)
        return None if "cancel-told" in self._drop else first

    def is_complete(self, *events: Event) -> bool:
        if "completion" in self._drop or "completion-report" in self._drop:
            return "completion" in self._drop
        return all(self._without_error(lambda event=event: self.inner.is_complete(event)) for event in events)

    def wait(self, event: Event, timeout_s: float | None) -> bool:
        if "completion" in self._drop:
            return True
        return self._without_error(lambda: self.inner.wait(event, timeout_s))

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return self.inner.elapsed_ms(start, end)

    def user_event(self, stream: Stream) -> Any:
        return self.inner.user_event(stream)

    def _is_dropped(self, event: Event, work: LayerWork) -> bool:
        direction = work.plan.direction
        if event in self._compute_events:
            return f"wait-compute-before-{direction}" in self._drop
        return f"wait-{self._directions.get(event, '')}-before-{direction}" in self._drop

    def _without_error(self, ask: Any) -> bool:
        try:
            return bool(ask())
        except Exception as error:
            if "copy-error" in self._drop or ("cancel-told" in self._drop and "cancelled" in str(error)):
                return True
            raise


class MutatedGates:
    """Of :class:`MutatedBackend`."""

    def __init__(self, inner: Gates, drop: Callable[[], Collection[str]]) -> None:
        self.inner = inner
        self._drop = drop

    def wait(self, layer: int, stream: Any) -> None:
        if "gate-wait" not in self._drop():
            self.inner.wait(layer, stream)

    def mark(self, layer: int, stream: Any) -> None:
        if "gate-mark" not in self._drop():
            self.inner.mark(layer, stream)

    def mark_and_wait(self, layer: int, stream: Any) -> None:
        self.mark(layer, stream)
        self.wait(layer + 1, stream)

    def arm(self, stream: Stream, load_turn: int, save_turn: int) -> None:
        if "gate-turn" in self._drop():
            load_turn = min(load_turn, 1)
        if "gate-arm" not in self._drop():
            self.inner.arm(stream, load_turn, save_turn)

    def let_through(self, first_layer: int, turn: int, waits: Sequence[Sequence[Event]]) -> None:
        if "let-through-wait" in self._drop():
            waits = [[] for _ in waits]
        if "let-through" not in self._drop():
            self.inner.let_through(first_layer, turn, waits)

    def record_marks(self, turn: int, events: Sequence[Sequence[Event]]) -> None:
        self.inner.record_marks(turn, events)
        if "gate-mark-wait" in self._drop():
            self.inner.pass_marks(turn)

    def pass_marks(self, turn: int) -> None:
        if "pass-marks" not in self._drop():
            self.inner.pass_marks(turn)

    def given_up(self, turn: int) -> int | None:
        return None if "given-up" in self._drop() else self.inner.given_up(turn)

    def close(self) -> None:
        self.inner.close()
