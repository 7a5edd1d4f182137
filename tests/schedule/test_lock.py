"""What is shared changes in sections alone: each write to it checks that its thread runs one.

A race that a missing section allows shows once in a million calls; a write outside of one shows each time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paddle_kv import CancelledError, HostPool, LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.memory import free_extents
from paddle_kv.schedule import checksum, movement, settling, submission
from paddle_kv.schedule.resources import DeviceResources
from paddle_kv.tracking import domain, group, stamps
from tests.schedule.rig import WAIT_S, Rig

SHARED = {
    movement.Movement: {"state", "failure", "ready", "events", "num_unsubmitted", "held", "depends_on", "reads_from"},
    LayerwiseScheduler: {"_closed", "_queued_bytes", "_finished"},
    HostPool: {"closed"},
}
IN_SECTIONS: list[tuple[Any, list[str]]] = [
    (movement.Movement, ["enter", "hold_events"]),
    (settling, ["begin", "progress", "look", "look_for_failure", "_retire"]),
    (submission, ["advance", "fail", "cancel", "fence"]),
    (domain.BlockDomain, ["check", "read", "write", "poison", "release", "try_lease", "end_lease", "mark_rewritten"]),
    (HostPool, ["_reclaim", "allocate_here", "free_here"]),
    (free_extents.FreeExtents, ["allocate", "free"]),
    (stamps, ["forget"]),
    (checksum.ChecksumObserver, ["check", "started", "over"]),
]


def in_a_section() -> bool:
    return any(one.inside for one in group._groups)


class Watch:
    """Notes who touches what outside of a section."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[str] = []
        self.seen: set[str] = set()
        self._patch = monkeypatch

    def calls(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def checked(*arguments: Any, **named: Any) -> Any:
            self.seen.add(name)
            if not in_a_section():
                self.found.append(f"{name} was called")
            return inner(*arguments, **named)

        self._patch.setattr(owner, name, checked)

    def writes(self, owner: type, attributes: set[str]) -> None:
        def checked(instance: Any, name: str, value: Any) -> None:
            made = name in instance.__dict__  # the first one belongs to whoever makes the object
            if made and name in attributes and not in_a_section():
                self.found.append(f"{owner.__name__}.{name} was set")
            object.__setattr__(instance, name, value)

        self._patch.setattr(owner, "__setattr__", checked)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    made = Watch(monkeypatch)
    for owner, names in IN_SECTIONS:
        for name in names:
            made.calls(owner, name)
    for module in (settling, submission):  # what they have from each other by name
        for name in ("advance", "fail"):
            monkeypatch.setattr(module, name, getattr(submission, name))
    for owner, attributes in SHARED.items():
        made.writes(owner, attributes)
    yield made
    assert made.seen
    assert sorted(set(made.found)) == []


def test_saves_and_loads(watch):
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        blocks = rig.pool.allocate(3)
        save = scheduler.offload([1, 2, 3], blocks, layerwise=True)
        load = scheduler.onload(blocks, [4, 5, 6], urgent=True)
        for layer in range(5):
            save.mark_layer_written(layer)
            load.wait_layer(layer, timeout_s=WAIT_S)
        load.wait_on(timeout_s=WAIT_S)
        rig.pool.free(blocks)
        assert rig.pool.num_free_blocks == 17
        save.wait(WAIT_S)
        load.wait(WAIT_S)
        assert load.done() and load.error is None and not load.failed
        with rig.pool.lease([1, 2], write=True), pytest.raises(RuntimeError, match="leased"):
            scheduler.onload([1], [1])
        scheduler.record_event("onload").wait(WAIT_S)
        scheduler.drain(WAIT_S)
        assert scheduler.stats()["in_flight"] == 0
        assert {"_retire", "enter", "write", "end_lease", "allocate_here"} <= watch.seen
    rig.pool.close()


def test_events_of_a_direction(watch, monkeypatch):
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        watch.calls(DeviceResources, "take_events")
        scheduler.onload([4], [1], urgent=True).wait(WAIT_S)
        scheduler.record_event("onload").wait(WAIT_S)
        assert "take_events" in watch.seen


def test_what_fails(watch, copies, monkeypatch):
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        copies.fail("offload", 2, OSError("broken"))
        save = scheduler.offload([1], [4])
        with pytest.raises(TransferError):
            save.wait(WAIT_S)
        copies.hold("onload", 1)
        load = scheduler.onload([5], [2])
        cancelled = scheduler.offload([2], [6], layerwise=True)
        cancelled.mark_layer_written(0)
        waiting = threading.Thread(target=lambda: refuse(lambda: cancelled.wait_layer(4)))
        waiting.start()
        cancelled.cancel()
        waiting.join()
        copies.fail("onload", 1, OSError("broken"))
        late = threading.Thread(target=lambda: refuse(lambda: load.wait_layer(3)))
        late.start()
        copies.go_on()
        late.join()
        refuse(lambda: load.wait_on(timeout_s=WAIT_S))
        monkeypatch.setattr(CpuBackend, "copy_layers", broken)
        refuse(lambda: scheduler.offload([3], [7]))
        scheduler.drain(WAIT_S)
        rig.pool.mark_rewritten([4, 6, 7])
        rig.cache.mark_rewritten([2])
        assert scheduler.stats()["failed"] == 3
        assert {"fail", "cancel", "fence", "poison", "mark_rewritten"} <= watch.seen


def test_close_that_takes_too_long(watch, copies):
    rig = Rig()
    copies.hold("onload", 0)
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    load = scheduler.onload([5], [2])
    assert copies.arrived.acquire(timeout=WAIT_S)
    with pytest.raises(TimeoutError):
        scheduler.close(timeout_s=0.0)
    copies.go_on()
    refuse(lambda: load.wait(WAIT_S))
    scheduler.close(WAIT_S)


def broken(*_: Any) -> None:
    raise OSError("broken")


def refuse(call: Callable[[], object]) -> None:
    with contextlib.suppress(TransferError, CancelledError):
        call()
        raise AssertionError("no failure was told")
