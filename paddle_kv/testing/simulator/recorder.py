"""A backend around any other one that writes down what the scheduler submits, for the happens-before checker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...backend.protocol import Backend, Gates, Later
from ...backend.work import Event, LayerWork, Stream
from .by_marks import MarksAtBackend
from .log import ALL_LAYERS, HOST, Location, Log, call_site


class RecordingBackend(MarksAtBackend):
    """Passes each call on to ``inner`` and logs it.

    Compute is what the backend cannot see: tell it by :meth:`touch`. Several backends may share one log; a scheduler
    with a recording backend works on a GPU as it does on the CPU.

    Example:
        >>> from paddle_kv.backend.cpu_backend import CpuBackend
        >>> from paddle_kv.testing.simulator import Log, RecordingBackend, check
        >>> log = Log()
        >>> backend = RecordingBackend(CpuBackend(), log)  # LayerwiseScheduler(..., backend=backend), then traffic
        >>> check(log.entries)
        []
    """

    def __init__(self, inner: Backend, log: Log) -> None:
        super().__init__(inner)
        self.log = log
        self.name = inner.name
        self.host = getattr(inner, "host", None)
        self._pools: dict[Any, tuple[str, str, str]] = {}  # binding -> names of device cache, host pool and itself
        self._layer_buffers: dict[Any, int] = {}  # by binding

    def touch(
        self,
        stream: Stream,
        *,
        reads: Iterable[tuple[Any, int, int]] = (),
        writes: Iterable[tuple[Any, int, int]] = (),
        label: str = "compute",
    ) -> None:
        """Compute on ``stream`` (None: the host itself) touches blocks, each a (pool, slot, layer)."""
        name = self._stream_name(stream)
        self.log.work(name, label, self.locations(reads), self.locations(writes))

    def locations(self, blocks: Iterable[tuple[Any, int, int]]) -> list[Location]:
        return [self.log.location(pool, slot, layer) for pool, slot, layer in blocks]

    # ---- the protocol ----
    def bind(self, device_cache: Any, host_pool: Any) -> Any:
        binding = self.inner.bind(device_cache, host_pool)
        names = (self.log.pool_name(device_cache), self.log.pool_name(host_pool), f"binding-{self.log.next_mark()}")
        self._pools[binding] = names
        self._layer_buffers[binding] = device_cache.layer_buffers
        return binding

    def unbind(self, binding: Any) -> None:
        names = self._pools.pop(binding, None)
        if names is not None:
            self.log.work(HOST, "unbind", writes=[Location(names[2], 0, ALL_LAYERS)])
        self.inner.unbind(binding)

    def create_stream(self, *, urgent: bool = False) -> Stream:
        stream = self.inner.create_stream(urgent=urgent)
        self.log.stream_names.setdefault(_key(stream), (f"transfer {self.log.next_mark()}", stream))
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        self.inner.destroy_stream(stream)
        mark = self.log.next_mark()  # it has waited for the stream
        self.log.record(self._stream_name(stream), mark, "end of the stream")
        self.log.observe(mark)
        self.log.stream_names.pop(_key(stream), None)

    def create_event(self) -> Event:
        event = self.inner.create_event()
        self.log.event_marks.pop(event, None)
        return event

    def destroy_event(self, event: Event) -> None:
        self.log.event_marks.pop(event, None)
        self.inner.destroy_event(event)

    def create_gates(self, num_layers: int, timeout_s: float) -> RecordingGates:
        return RecordingGates(self, self.inner.create_gates(num_layers, timeout_s))

    def close(self) -> None:
        self.inner.close()

    def compute_stream(self, stream: Any) -> Stream:
        return self.inner.compute_stream(stream)

    def record(self, event: Event, stream: Stream) -> None:
        self.inner.record(event, stream)
        self._record(event, self._stream_name(stream), "record")

    def wait_on_stream(self, stream: Stream, event: Event, timeout_s: float | None) -> None:
        self.inner.wait_on_stream(stream, event, timeout_s)
        if stream is None:
            self._observe(event)
        else:
            self._wait(event, self._stream_name(stream))

    def copy_layers(self, binding: Any, work: LayerWork, stream: Stream) -> None:
        # Logged first, as if all of it were enqueued: of a call that raises an unknown part is.
        name, names, site = self._stream_name(stream), self._pools[binding], call_site()
        layer_buffers = self._layer_buffers[binding]
        marks = []
        for group, waits in zip(range(work.first_group, work.end_group), work.waits, strict=True):
            for event in waits:
                self._wait(event, name)
            if group == work.first_group:
                self._record(work.start, name, "start")
            for layer in work.plan.layers_of(group):
                self._log_copy(work, layer, layer % layer_buffers, name, names, site)
            marks.append((work.records[group - work.first_group], self.log.next_mark()))
            self.log.record(name, marks[-1][1], f"group {group}")
        self.inner.copy_layers(binding, work, stream)
        self.log.event_marks.update(marks)

    def watch(self, events: Sequence[Event], report: Callable[[], Later | None]) -> Any:
        for event in events:
            self._check_recorded(event, HOST, "watch")
        return self.inner.watch(events, report)

    @property
    def hear(self) -> Any:
        return getattr(self.inner, "hear", None)

    def cancel(self, stream: Stream, number: int) -> int | None:
        return self.inner.cancel(stream, number)

    def is_complete(self, *events: Event) -> bool:
        return all(map(self._is_complete, events))

    def _is_complete(self, event: Event) -> bool:
        self._check_recorded(event, HOST, "query")
        try:
            passed = self.inner.is_complete(event)
        except Exception:
            self._observe(event)  # an error is reported behind the event only
            raise
        if passed:
            self._observe(event)
        return passed

    def wait(self, event: Event, timeout_s: float | None) -> bool:
        self._check_recorded(event, HOST, "host wait")
        try:
            passed = self.inner.wait(event, timeout_s)
        except Exception:
            self._observe(event)
            raise
        if passed:
            self._observe(event)
        return passed

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return self.inner.elapsed_ms(start, end)

    def user_event(self, stream: Stream) -> Any:
        return self.inner.user_event(stream)

    # ---- log ----
    def _stream_name(self, stream: Stream) -> str:
        if stream is None:
            return HOST
        given = getattr(stream, "name", None)
        default = given if isinstance(given, str) else f"compute {self.log.next_mark()}"
        return self.log.stream_names.setdefault(_key(stream), (default, stream))[0]

    def _log_copy(self, work: LayerWork, layer: int, place: int, stream: str, names: Sequence[str], site: str) -> None:
        device = [Location(names[0], slot, place) for slot in work.plan.device_ids.tolist()]
        host = [Location(names[1], slot, layer) for slot in work.plan.host_ids.tolist()]
        reads, writes = (device, host) if work.plan.direction == "offload" else (host, device)
        self.log.work(
            stream,
            f"{work.plan.direction} of device blocks {work.plan.device_ids.tolist()} and host blocks "
            f"{work.plan.host_ids.tolist()}, layer {layer},",
            [*reads, Location(names[2], 0, ALL_LAYERS)],
            writes,
            site,
        )

    def _record(self, event: Event, stream: str, label: str) -> None:
        mark = self.log.event_marks[event] = self.log.next_mark()
        self.log.record(stream, mark, label)

    def _wait(self, event: Event, stream: str) -> None:
        if self._check_recorded(event, stream, "stream wait"):
            self.log.wait(stream, self.log.event_marks[event])

    def _observe(self, event: Event) -> None:
        if event in self.log.event_marks:
            self.log.observe(self.log.event_marks[event])

    def _check_recorded(self, event: Event, stream: str, call: str) -> bool:
        if event in self.log.event_marks:
            return True
        self.log.misuse(stream, f"{call} for an event that is not recorded: it would not wait")
        return False


class RecordingGates:
    """Passes each call on, and logs waits and marks of replays: what a wait is for may be recorded later."""

    def __init__(self, backend: RecordingBackend, inner: Gates) -> None:
        self.inner = inner
        self._backend = backend
        self._log = backend.log
        self._load_turn = self._save_turn = 0
        number = self._log.next_mark()
        self._opener, self._marker = f"gates {number}", f"marks of gates {number}"
        self._promised: dict[tuple[str, int, int], int] = {}

    def wait(self, layer: int, stream: Any) -> None:
        self.inner.wait(layer, stream)
        if self._load_turn:
            name = self._backend._stream_name(self._backend.compute_stream(stream))
            self._log.wait(name, self._promise("through", layer, self._load_turn), "gate")

    def mark(self, layer: int, stream: Any) -> None:
        self.inner.mark(layer, stream)
        if self._save_turn:
            name = self._backend._stream_name(self._backend.compute_stream(stream))
            self._log.record(name, self._promise("marked", layer, self._save_turn), "mark of a gate")

    def mark_and_wait(self, layer: int, stream: Any) -> None:
        self.mark(layer, stream)
        self.wait(layer + 1, stream)

    def arm(self, stream: Stream, load_turn: int, save_turn: int) -> None:
        self.inner.arm(stream, load_turn, save_turn)
        self._load_turn, self._save_turn = load_turn, save_turn

    def let_through(self, first_layer: int, turn: int, waits: Sequence[Sequence[Event]]) -> None:
        self.inner.let_through(first_layer, turn, waits)
        for layer, events in enumerate(waits, first_layer):
            for event in events:
                self._backend._wait(event, self._opener)
            self._log.record(self._opener, self._promise("through", layer, turn), f"layer {layer} is let through")

    def record_marks(self, turn: int, events: Sequence[Sequence[Event]]) -> None:
        self.inner.record_marks(turn, events)
        for layer, of_layer in enumerate(events):
            self._log.wait(self._marker, self._promise("marked", layer, turn))
            for event in of_layer:
                self._backend._record(event, self._marker, f"mark of layer {layer}")

    def pass_marks(self, turn: int) -> None:
        self.inner.pass_marks(turn)
        for what, layer, one in list(self._promised):
            if what == "marked" and one <= turn:
                self._log.record(HOST, self._promise("marked", layer, one), "marks are passed over")

    def given_up(self, turn: int) -> int | None:
        return self.inner.given_up(turn)

    def close(self) -> None:
        self.inner.close()

    def _promise(self, what: str, layer: int, turn: int) -> int:
        key = (what, layer, turn)
        if key not in self._promised:
            self._promised[key] = self._log.next_mark()
        return self._promised[key]


def _key(stream: Stream) -> Any:
    return stream if isinstance(stream, int) else id(stream)
