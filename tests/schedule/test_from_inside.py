"""Calls out of the middle of others by the same thread: of a backend in a section, of a signal handler in a wait."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paddle_kv import LayerwiseScheduler, ReentryError, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend, CpuEvent, CpuStream
from paddle_kv.schedule.transfer import Transfer
from paddle_kv.tracking.group import change
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, Rig, settles

WAITS: dict[str, Callable[[Transfer], object]] = {
    "wait": lambda load: load.wait(WAIT_S),
    "wait_over": lambda load: load.wait_over(WAIT_S),
    "wait_on": lambda load: load.wait_on(timeout_s=WAIT_S),
    "wait_layer": lambda load: load.wait_layer(0, timeout_s=WAIT_S),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_in_a_section_is_refused(rig: Rig, copies: Copies, name: str) -> None:
    """It would hold the lock of all while it waits. To cancel is allowed."""
    refused: list[ReentryError] = []

    class Calling(CpuBackend):
        other: Transfer | None = None

        def copy_layers(self, binding: int, work: Any, stream: CpuStream) -> None:
            if self.other is not None:
                with pytest.raises(ReentryError) as caught:
                    WAITS[name](self.other)
                refused.append(caught.value)
                self.other.cancel()
            super().copy_layers(binding, work, stream)

    backend = Calling()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        copies.hold("onload")
        load = backend.other = scheduler.onload([1], [1])
        scheduler.onload([2], [2])
        copies.go_on()
        assert len(refused) == 1
        scheduler.drain(WAIT_S)
        assert load.state.is_end
        backend.other = None


class Handled(Exception):
    """Of a handler: leaves the call that was interrupted."""


@contextmanager
def closing_handler(scheduler: LayerwiseScheduler, told: list[BaseException | None]) -> Iterator[None]:
    def handle(*_: object) -> None:
        try:
            scheduler.close()
            told.append(None)
        except ReentryError as error:
            told.append(error)
        raise Handled

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def call(scheduler: LayerwiseScheduler, save: Transfer, name: str) -> None:
    if name == "record_event":
        scheduler.record_event("offload")
    elif name == "mark":
        save.mark_layer_written(0)
    else:
        WAITS[name](save)


@pytest.mark.parametrize("name", ["wait_on", "wait_layer", "record_event", "mark"])
def test_a_handler_that_closes_in_the_middle_of_a_wait_is_told(rig: Rig, copies: Copies, name: str) -> None:
    """The wait still uses what close would give back, and goes on only behind the handler."""

    class Interrupted(CpuBackend):
        wanted = False

        def interrupt(self) -> None:
            if self.wanted:
                self.wanted = False
                signal.raise_signal(signal.SIGUSR1)

        def wait_on_stream(self, stream: CpuStream | None, event: CpuEvent, timeout_s: float | None) -> None:
            self.interrupt()
            super().wait_on_stream(stream, event, timeout_s)

        def user_event(self, stream: CpuStream) -> CpuEvent:
            self.interrupt()
            return super().user_event(stream)

        def record(self, event: CpuEvent, stream: CpuStream | None) -> None:
            self.interrupt()
            super().record(event, stream)

    backend, told = Interrupted(), []
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    copies.hold("offload", 0)  # or there may be nothing left to wait for
    save = scheduler.offload([1], [1], layerwise=True)
    if name != "mark":
        for layer in range(save.num_layers):
            save.mark_layer_written(layer)
    with closing_handler(scheduler, told):
        backend.wanted = True
        with pytest.raises(Handled):
            call(scheduler, save, name)
    copies.go_on()
    [error] = told
    assert isinstance(error, ReentryError) and "leave that call first" in str(error)
    scheduler.offload([2], [2]).wait(WAIT_S)  # nothing was closed
    if name == "mark":
        save.cancel()
    del error
    told.clear()
    scheduler.close(WAIT_S)


def test_a_handler_may_close_where_the_call_that_it_interrupts_uses_nothing(rig: Rig) -> None:
    scheduler, told = LayerwiseScheduler(rig.cache, rig.pool), []
    save = scheduler.offload([1], [1], layerwise=True)
    sender = threading.Timer(SHORT_S, signal.pthread_kill, [threading.main_thread().ident, signal.SIGUSR1])
    with closing_handler(scheduler, told):
        sender.start()
        with pytest.raises(Handled):
            save.wait_layer(0, timeout_s=WAIT_S)  # holds the host until the layer is marked
    assert told == [None]
    assert save.state.is_end


def test_a_handler_may_close_another_scheduler(rig: Rig) -> None:
    other, told = Rig(), []

    class Interrupted(CpuBackend):
        def wait_on_stream(self, stream: CpuStream | None, event: CpuEvent, timeout_s: float | None) -> None:
            signal.raise_signal(signal.SIGUSR1)

    closed = LayerwiseScheduler(other.cache, other.pool)
    with LayerwiseScheduler(rig.cache, rig.pool, backend=Interrupted()) as scheduler:
        save = scheduler.offload([1], [1])
        with closing_handler(closed, told), pytest.raises(Handled):
            save.wait_on(timeout_s=WAIT_S)
        assert told == [None]


def test_a_question_of_close_keeps_nothing_of_the_calls_that_it_looks_at(rig: Rig) -> None:
    """An exception keeps the frames of its calls: events that they hold would never be given back."""
    told: list[BaseException | None] = []
    kept: list[BaseException] = []

    class Interrupted(CpuBackend):
        def wait_on_stream(self, stream: CpuStream | None, event: CpuEvent, timeout_s: float | None) -> None:
            with pytest.raises(ReentryError):
                scheduler.close()

            raise TransferError("of the device")

    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=Interrupted())
    save = scheduler.offload([1], [1])
    try:
        save.wait_on(timeout_s=WAIT_S)
    except TransferError as error:
        kept.append(error)
    assert len(kept) == 1 and told == []
    save.wait(WAIT_S)
    del save
    gc.collect()
    scheduler.drain(WAIT_S)
    assert settles(lambda: change(scheduler, lambda: scheduler.resources.num_events) == 1)
    scheduler.close(WAIT_S)
