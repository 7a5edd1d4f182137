"""Several threads of the host: each order of small cases, random orders of large ones; what is left out is found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paddle_kv import CancelledError, ClosedError, LeasedError, TransferError
from paddle_kv.offload import KVOffloadManager
from paddle_kv.schedule import movement as movement_module
from paddle_kv.schedule import settling
from paddle_kv.schedule.resources import Events
from paddle_kv.schedule.scheduler import LayerwiseScheduler
from paddle_kv.schedule.transfer import Transfer
from paddle_kv.testing.simulator import Exploration, RandomChooser, explore
from paddle_kv.testing.simulator.chooser import Chooser, Transition
from paddle_kv.testing.simulator.device import Deadlock
from paddle_kv.tracking import group as group_module
from paddle_kv.tracking.keeper import Waiter

from .scenarios import LAYERS, Setting, fresh

ENDS = (CancelledError, ClosedError, TransferError)
SEEDS = 40

Threads = list[Callable[[], object]]


class OnlyThreads:
    """Only threads are chosen between; the device runs when no thread can go on, or as soon as somebody looks at it."""

    needs_footprints = False

    def __init__(self, chooser: Chooser, *, late: bool) -> None:
        self._chooser = chooser
        self._late = late

    def choose(self, options: Sequence[Transition]) -> Transition:
        threads = [option for option in options if option.key[0] == "thread"]
        if len(threads) < len(options) and not self._late:
            return options[0]
        if len(threads) < 2:
            return threads[0] if threads else options[-1]
        return self._chooser.choose(threads)


def quietly(call: Callable[..., Any], *arguments: Any, errors: tuple[type[Exception], ...] = ENDS) -> Callable[[], Any]:
    def function() -> Any:
        with contextlib.suppress(*errors):
            return call(*arguments)

    return function


# ---- programs: what is prepared, the threads, and what must hold then ----
def save_beside_close(s: Setting) -> Iterator[Threads]:
    scheduler = s.scheduler()
    s.compute(writes=0, version="prompt")
    arrived: list[bool] = []

    def save() -> None:
        scheduler.offload([0], [2]).wait()
        arrived.append(True)

    yield [quietly(save), scheduler.close]
    if arrived:
        s.assert_host(2, "prompt")


def record_event_beside_close(s: Setting) -> Iterator[Threads]:
    scheduler = s.scheduler()
    s.fill_host(3, "prefix")
    scheduler.onload([3], [1], urgent=True).wait()
    events: list[Any] = []
    yield [quietly(lambda: events.append(scheduler.record_event("onload"))), scheduler.close]
    assert all(event.wait(1.0) for event in events), "an event of the user is never passed"


def cancel_beside_wait(s: Setting) -> Iterator[Threads]:
    scheduler = s.scheduler()
    s.compute(writes=0, version="prompt")
    s.simulation.run()
    save = scheduler.offload([0], [2])
    yield [quietly(save.wait), save.cancel]
    assert save.done() and (save.error is None or s.pool.domain.poisoned([2]) == [2])
    if save.error is None:
        s.assert_host(2, "prompt")


def cancel_beside_wait_for_marks(s: Setting) -> Iterator[Threads]:
    save = s.scheduler().offload([0], [2], layerwise=True)
    yield [quietly(save.wait), save.cancel]
    assert save.done() and s.pool.domain.poisoned([2]) == [2]


def marks_beside_load_and_cancel(s: Setting) -> Iterator[Threads]:
    scheduler = s.scheduler()
    save = scheduler.offload([0], [2], layerwise=True)

    def mark() -> None:
        for layer in range(LAYERS):
            s.simulation.compute(writes=[(s.cache, 0, layer)], version="prompt")
            save.mark_layer_written(layer)
        save.wait()

    def load() -> None:
        one = scheduler.onload([2], [1])
        for layer in range(LAYERS):
            one.wait_layer(layer)
            s.simulation.compute(reads=[(s.cache, 1, layer)])
        one.wait()

    yield [quietly(mark), quietly(load), save.cancel]
    scheduler.drain(1.0)
    if save.error is None:
        s.assert_host(2, "prompt")


def lease_beside_transfers(s: Setting) -> Iterator[Threads]:
    scheduler = s.scheduler()
    s.compute(writes=0, version="prompt")

    def read() -> None:
        with s.pool.lease([2]):
            s.simulation.touch_on_host(reads=s.host(2), label="read")

    def write() -> None:
        with s.pool.lease([2], write=True):
            s.fill_host(2, "host")

    save = quietly(lambda: scheduler.offload([0], [2]).wait(), errors=(LeasedError,))
    yield [save, read, write]
    assert not s.pool.domain.busy([2])


def allocate_and_free(s: Setting) -> Iterator[Threads]:
    scheduler = s.scheduler()
    s.compute(writes=0, version="prompt")
    held: set[int] = set()

    def use() -> None:
        try:
            blocks = s.pool.allocate(2)
        except MemoryError:
            return
        assert not held & set(blocks), "a block was given out twice"
        held.update(blocks)
        scheduler.offload([0], blocks[:1])
        held.difference_update(blocks)
        s.pool.free(blocks)

    yield [use, use, use]
    scheduler.drain(1.0)
    assert s.pool.num_free_blocks == s.pool.num_blocks


def two_closers_and_a_waiter(s: Setting) -> Iterator[Threads]:
    scheduler = s.scheduler()
    save = scheduler.offload([0], [2], layerwise=True)
    save.mark_layer_written(0)
    yield [quietly(save.wait_on), scheduler.close, scheduler.close]
    assert save.error is not None


def wait_layer_beside_the_next_transfers(s: Setting) -> Iterator[Threads]:
    scheduler = s.scheduler()
    s.fill_host(3, "prefix")
    load = scheduler.onload([3], [1])
    seen: list[Any] = []

    def read() -> None:
        load.wait_layer(1)
        seen.append(s.simulation.compute(reads=[(s.cache, 1, 1)]))

    def save() -> None:
        load.done()
        scheduler.offload([0], [2], layerwise=True).cancel()  # takes events that it does not record

    yield [read, save]
    s.simulation.run()
    location = s.simulation.location(s.cache, 1, 1)
    assert seen[0].saw(location) == "prefix"


def load_beside_drop_and_save(s: Setting) -> Iterator[Threads]:
    """What a lease holds is dropped, and is being saved anew when it is loaded."""
    scheduler = s.scheduler()
    manager = KVOffloadManager(scheduler)
    s.compute(writes=0, version="prompt")
    manager.save([b"key"], [0]).wait()
    loads: list[Transfer] = []

    def load() -> None:
        with manager.lookup([b"key"]) as lease:
            if lease.num_blocks:
                loads.append(manager.onload(lease.hashes, [1]))

    def replace() -> None:
        assert manager.drop([b"key"]) == 1
        manager.save([b"key"], [0])

    yield [quietly(load, errors=(TransferError,)), replace]
    for one in loads:
        one.wait_on()
        s.assert_saw(s.compute(reads=1), 1, "prompt")
    scheduler.drain(1.0)
    assert (manager.peek([b"key"]), manager.stats()["pinned_blocks"]) == (1, 0)
    manager.close()


PROGRAMS: dict[str, Callable[[Setting], Iterator[Threads]]] = {
    program.__name__: program
    for program in (
        save_beside_close,
        record_event_beside_close,
        cancel_beside_wait,
        cancel_beside_wait_for_marks,
        marks_beside_load_and_cancel,
        lease_beside_transfers,
        allocate_and_free,
        two_closers_and_a_waiter,
        wait_layer_beside_the_next_transfers,
        load_beside_drop_and_save,
    )
}


def run(name: str, chooser: Chooser, most_switches: int | None = None, *, lines: bool = False) -> None:
    with fresh() as s:
        program = PROGRAMS[name](s)
        threads = next(program)
        s.simulation.device.chooser = chooser
        s.simulation.host.run(threads, most_switches=most_switches, lines=lines)
        assert next(program, None) is None
        s.finish()


OF_TWO = [
    "save_beside_close",
    "record_event_beside_close",
    "cancel_beside_wait",
    "wait_layer_beside_the_next_transfers",
]
EARLY = ["wait_layer_beside_the_next_transfers"]  # what is over by then is what matters
# How many changes between threads that could go on are enough for each order in seconds.
MOST_SWITCHES = dict.fromkeys(PROGRAMS, 2) | {
    "marks_beside_load_and_cancel": 0,
    "lease_beside_transfers": 0,
    "allocate_and_free": 0,
    "two_closers_and_a_waiter": 0,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_threads_in_each_order(name: str) -> None:
    found = explore(lambda chooser: run(name, OnlyThreads(chooser, late=True), MOST_SWITCHES[name]), max_runs=3000)
    assert found.complete and found.orders > 10


def left_once_at_each_line(name: str) -> Exploration:
    return explore(
        lambda chooser: run(name, OnlyThreads(chooser, late=name not in EARLY), 1, lines=True), max_runs=3000
    )


@pytest.mark.parametrize("name", OF_TWO)
def test_threads_left_once_at_each_line(name: str) -> None:
    found = left_once_at_each_line(name)
    assert found.complete and found.orders > 100


@pytest.mark.parametrize("name", PROGRAMS)
def test_threads_left_at_any_line(name: str) -> None:
    for seed in range(SEEDS):
        run(name, RandomChooser(seed), lines=True)


# ---- what is left out is found ----
def without_sections(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(group_module, "_change_here", lambda member, function: function())


def without_wake(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(group_module, "wake", lambda waiters: None)
    patch.setattr(movement_module, "wake", lambda waiters: None)


def without_uses(patch: pytest.MonkeyPatch) -> None:
    """Close does not wait for those who were let in before."""
    patch.setattr(LayerwiseScheduler, "_is_unused", lambda self: True)


def without_second_look(patch: pytest.MonkeyPatch) -> None:
    """Who waits does not look again behind the line in which he says so."""

    def wait_for(self: Transfer, condition: Callable[[], bool], deadline: Any, waiters: Any) -> bool:
        movement = self._movement
        while not condition():
            waiter = Waiter()
            movement.group.host._device.switch_point()
            waiters.append(waiter)
            movement.group.host.park(waiter, deadline.left_s())
        return True

    patch.setattr(Transfer, "_wait_for", wait_for)


def without_references(patch: pytest.MonkeyPatch) -> None:
    """Events are given back at the end of a transfer, whoever still looks at them."""
    end = settling._end

    def ends(movement: Any) -> None:
        for events in movement.held:
            resources = movement.scheduler.resources
            Events(events.events, resources._ties, resources._given_back)
            events.hold([])
        end(movement)

    patch.setattr(settling, "_end", ends)


def without_the_lock_of_close(patch: pytest.MonkeyPatch) -> None:
    """Each closer believes to be the first."""
    patch.setattr(LayerwiseScheduler, "_end_close", lambda self: True)


LEFT_OUT = [
    (without_sections, "allocate_and_free"),
    (without_wake, "cancel_beside_wait_for_marks"),
    (without_uses, "record_event_beside_close"),
    (without_second_look, "cancel_beside_wait_for_marks"),
    (without_references, "wait_layer_beside_the_next_transfers"),
    (without_the_lock_of_close, "two_closers_and_a_waiter"),
]


@pytest.mark.parametrize(("leave_out", "name"), LEFT_OUT, ids=[left_out.__name__ for left_out, _ in LEFT_OUT])
def test_what_is_left_out_is_found(leave_out: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch)
    with pytest.raises((AssertionError, Deadlock, LookupError, ValueError)) as caught:
        left_once_at_each_line(name)
    assert caught.value is not None


def test_the_table_of_what_is_left_out_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    for leave_out, name in LEFT_OUT:
        [row] = [line for line in text.splitlines() if line.startswith(f"| `{leave_out.__name__}` |")]
        assert row.endswith(f"| `{name}` |")
