"""The simulated device behind the protocol. Events that are given back are handed out again at once, as CUDA's are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...backend.protocol import Later
from ...backend.work import LayerWork
from ...errors import CaptureError
from .device import Device, Job, Mark, SimulatedStream, Watched
from .gates import SimulatedGates
from .host import SimulatedHost
from .log import Log, call_site
from .memory import Cell, PoolMemory


@dataclass(eq=False)
class SimulatedEvent:
    """``mark`` is its last recording; it keeps it when it is given back and taken again, as a CUDA event does."""

    mark: Mark | None = None


@dataclass(eq=False)
class Binding:
    """A pair of pools."""

    device: PoolMemory
    host: PoolMemory


class SimulatedUserEvent:
    """What ``record_event`` gives to the user."""

    def __init__(self, device: Device, mark: Mark) -> None:
        self._device = device
        self._mark = mark

    def done(self) -> bool:
        return self._device.look(self._mark, 0.0)

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._device.look(self._mark, timeout_s)

    def synchronize(self) -> None:
        self._device.look(self._mark, None)


class SimulatedBackend:
    """See :class:`~paddle_kv.backend.protocol.Backend`. One per scheduler; several work on one device."""

    name = "simulated"

    def __init__(self, device: Device, host: SimulatedHost, log: Log, compute: SimulatedStream) -> None:
        self.host = host
        self._device = device
        self._log = log
        self._compute = compute
        self._bindings: list[Binding] = []
        self._layers: weakref.WeakKeyDictionary[Mark, int] = weakref.WeakKeyDictionary()
        self._streams: list[SimulatedStream] = []
        self.gates: list[SimulatedGates] = []
        self._events: list[SimulatedEvent] = []  # handed out
        self._idle_events: list[SimulatedEvent] = []

    @property
    def held(self) -> dict[str, int]:
        """What was taken and not given back; all zero after a scheduler is closed."""
        return {
            "bindings": len(self._bindings),
            "streams": len(self._streams),
            "events": len(self._events),
            "idle events": len(self._idle_events),
        }

    def bind(self, device_cache: Any, host_pool: Any) -> Binding:
        if device_cache.device_id is not None:
            raise ValueError(f"the device cache is on GPU {device_cache.device_id}; the simulator needs it on the CPU")
        if host_pool.spec != device_cache.spec:
            raise ValueError(f"host_pool has {host_pool.spec}, device_cache has {device_cache.spec}; both must be one")
        device, host = (
            self._device.memory.add(PoolMemory(self._log.pool_name(pool), pool)) for pool in (device_cache, host_pool)
        )
        self._bindings.append(Binding(device, host))
        return self._bindings[-1]

    def unbind(self, binding: Binding) -> None:
        self._bindings.remove(binding)

    def create_stream(self, *, urgent: bool = False) -> SimulatedStream:
        stream = self._device.add_stream(f"transfer-{len(self._device.streams)}")
        self._streams.append(stream)
        return stream

    def destroy_stream(self, stream: SimulatedStream) -> None:
        self._streams.remove(stream)
        stream.given_back = True
        self._device.drain([stream])

    def create_event(self) -> SimulatedEvent:
        event = self._idle_events.pop() if self._idle_events else SimulatedEvent()
        self._events.append(event)
        return event

    def destroy_event(self, event: SimulatedEvent) -> None:
        if event not in self._events:
            self._log.misuse("host", "destroy_event for an event that is not held")
            return
        self._events.remove(event)
        self._idle_events.append(event)

    def create_gates(self, num_layers: int, timeout_s: float) -> SimulatedGates:
        made = SimulatedGates(self._device, num_layers, self.compute_stream, self.create_stream, self.destroy_stream)
        self.gates.append(made)
        return made

    def close(self) -> None:
        self._idle_events.clear()

    def compute_stream(self, stream: Any) -> SimulatedStream:
        stream = self._device.current_stream or self._compute if stream is None else stream
        if not isinstance(stream, SimulatedStream):
            raise TypeError(f"stream is {type(stream).__name__}; a SimulatedStream is expected")
        if stream.capturing:
            raise CaptureError(f"stream {stream.name} is being captured into a graph")
        return stream

    def record(self, event: SimulatedEvent, stream: SimulatedStream) -> None:
        self._device.switch_point()
        self._check(stream, "record")
        event.mark = self._device.record(stream)

    def wait_on_stream(self, stream: SimulatedStream, event: SimulatedEvent, timeout_s: float | None) -> None:
        self._device.switch_point()
        self._check(stream, "wait")
        if event.mark is not None:
            self._device.wait(stream, event.mark)

    @property
    def undivided(self) -> Any:
        return self._device.undivided

    @property
    def takes_marks(self) -> bool:
        return self._device.takes_marks

    def copy_layers(self, binding: Binding, work: LayerWork, stream: SimulatedStream) -> None:
        self._device.switch_point()
        device = self._device
        breaks = device.submission_breaks()
        plan = work.plan
        job = Job(
            f"{plan.direction} of {plan.source_ids.tolist()} to {plan.target_ids.tolist()}",
            call_site(),
            number=work.number,
        )
        for group in range(work.first_group, work.end_group):
            for event in work.waits[group - work.first_group]:
                if event.mark is not None:
                    device.wait(stream, event.mark)
            if group == work.first_group:
                work.start.mark = device.record(stream)
            pairs = [pair for layer in work.plan.layers_of(group) for pair in _cells(binding, work, layer)]
            steps = device.copy_steps(job, pairs)
            device.steps(stream, steps[: (len(steps) + 1) // 2] if breaks else steps)
            if breaks:
                raise RuntimeError("the simulated submission failed half way")
            mark = work.records[group - work.first_group].mark = device.record(stream, job)
            self._layers[mark] = plan.layers_of(group).start

    def watch(self, events: Sequence[SimulatedEvent], report: Callable[[], Later | None]) -> Watched:
        self._device.switch_point()
        return self._device.watch([event.mark for event in events if event.mark is not None], report)

    def hear(
        self, watched: Watched, timeout_s: float | None, told: Callable[[], object], report: Callable[[], Later | None]
    ) -> None:
        self._device.switch_point()
        self._device.hear(watched, lambda waiter: self.host.park(waiter, timeout_s), told, report)

    def cancel(self, stream: SimulatedStream, number: int) -> int | None:
        self._device.switch_point()
        mark = self._device.cancel(stream, number)
        return None if mark is None else self._layers[mark]

    def is_complete(self, *events: SimulatedEvent) -> bool:
        return all(self._look(event, 0.0) for event in events)

    def wait(self, event: SimulatedEvent, timeout_s: float | None) -> bool:
        return self._look(event, timeout_s)

    def elapsed_ms(self, start: SimulatedEvent, end: SimulatedEvent) -> float:
        if start.mark is None or end.mark is None or not (start.mark.passed and end.mark.passed):
            raise ValueError("elapsed_ms needs two events that were passed")
        return float(end.mark.time - start.mark.time)

    def user_event(self, stream: SimulatedStream) -> SimulatedUserEvent:
        self._device.switch_point()
        self._check(stream, "record")
        return SimulatedUserEvent(self._device, self._device.record(stream))

    def _look(self, event: SimulatedEvent, timeout_s: float | None) -> bool:
        self._device.switch_point()
        if event.mark is None:
            return True  # as CUDA answers for an event that was never recorded
        passed = self._device.look(event.mark, timeout_s)
        if passed and event.mark.error is not None:
            raise event.mark.error
        return passed

    def _check(self, stream: SimulatedStream, call: str) -> None:
        if stream.capturing:
            self._log.misuse(stream.name, f"{call} on a stream that is being captured breaks the capture")
        if stream.given_back:
            self._log.misuse(stream.name, f"{call} on a stream that was given back")


def _cells(binding: Binding, work: LayerWork, layer: int) -> list[tuple[Cell, Cell]]:
    plan = work.plan
    source, target = (binding.device, binding.host) if plan.direction == "offload" else (binding.host, binding.device)
    return [
        (source.cell(name, layer, source_id), target.cell(name, layer, target_id))
        for source_id, target_id in zip(plan.source_ids.tolist(), plan.target_ids.tolist(), strict=True)
        for name in source.spec.tensor_names
    ]
