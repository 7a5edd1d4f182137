"""What is shared changes under the lock alone: each write to it checks that its thread holds the lock.

A race that a missing lock allows shows once in a million calls; a write without the lock shows each time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler, Transfer, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.memory import free_extents
from paddle_kv.offload import KVOffloadManager, index
from paddle_kv.schedule import checksum
from paddle_kv.tracking import hazards
from tests.schedule.rig import WAIT_S, Rig

SHARED = {
    Transfer: None,  # all attributes
    LayerwiseScheduler: {"_closed", "_closers"},
    HostPool: {"_closed"},
}
UNDER_THE_LOCK: list[tuple[Any, list[str]]] = [
    (Transfer, ["poll", "_advance", "_drop", "_retire", "_fence", "_take_events", "_give_back_events"]),
    (hazards.BlockDomain, ["check", "read", "write", "poison", "release", "try_lease", "end_lease"]),
    (HostPool, ["_reclaim"]),
    (free_extents.FreeExtents, ["allocate", "free"]),
    (hazards, ["add_in_flight", "remove_in_flight"]),
    (checksum, ["forget"]),
    (checksum.ChecksumObserver, ["check", "started", "over"]),
]
OF_A_MANAGER: list[tuple[Any, list[str]]] = [
    (index.BlockIndex, ["admit", "pin", "unpin", "remove", "evict", "lookup"]),
    (KVOffloadManager, ["_settle", "_give_back", "_take_slots"]),
]


class Watch:
    """Notes who touches what without holding the lock. ``ready`` holds what is shared by now: nobody knows an object
    while it is being made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[str] = []
        self.manager_locks: dict[Any, Any] = {}
        self._patch = monkeypatch

    def calls(self, owner: Any, name: str, lock: Callable[..., Any] = lambda *_: hazards.lock) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def checked(*arguments: Any, **named: Any) -> Any:
            if not lock(*arguments)._is_owned():
                self.found.append(f"{name} was called")
            return inner(*arguments, **named)

        self._patch.setattr(owner, name, checked)

    def writes(self, owner: type, attributes: set[str] | None) -> None:
        def checked(instance: Any, name: str, value: Any) -> None:
            made = name in instance.__dict__  # the first one belongs to whoever makes the object
            if made and (attributes is None or name in attributes) and not hazards.lock._is_owned():
                self.found.append(f"{owner.__name__}.{name} was set")
            object.__setattr__(instance, name, value)

        self._patch.setattr(owner, "__setattr__", checked)


class Guarded(dict):
    """A dict that belongs to the lock."""

    watch: Watch

    def _check(self) -> None:
        if not hazards.lock._is_owned():
            self.watch.found.append("a table of the tracker was changed")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check()
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._check()
        super().__delitem__(key)

    def setdefault(self, key: Any, value: Any = None) -> Any:
        self._check()
        return super().setdefault(key, value)

    def pop(self, *arguments: Any) -> Any:
        self._check()
        return super().pop(*arguments)

    def copy(self) -> dict:
        self._check()
        return super().copy()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    made = Watch(monkeypatch)
    for owner, names in UNDER_THE_LOCK:
        for name in names:
            made.calls(owner, name)
    for owner, attributes in SHARED.items():
        made.writes(owner, attributes)
    for owner, names in OF_A_MANAGER:
        for name in names:
            made.calls(owner, name, lambda *arguments: made.manager_locks[arguments[0]])
    Guarded.watch = made
    attached = hazards._attached
    monkeypatch.setattr(hazards, "_attached", Guarded(attached))
    yield made
    attached.clear()
    attached.update(hazards._attached)  # pools that this test has made
    assert sorted(set(made.found)) == []


def guarded_rig() -> Rig:
    rig = Rig()
    for pool in (rig.cache, rig.pool):
        pool.domain._poison = Guarded()
    return rig


def test_saves_and_loads(watch):
    rig = guarded_rig()
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
    rig.pool.close()


def test_events_of_a_direction(watch, monkeypatch):
    rig = guarded_rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler, monkeypatch.context() as while_open:
        of_resources = Watch(while_open)
        for name in ("take_events", "give_back"):
            of_resources.calls(scheduler.resources, name)
        scheduler.onload([4], [1], urgent=True).wait(WAIT_S)
        scheduler.record_event("onload").wait(WAIT_S)
        assert of_resources.found == []


def test_what_fails(watch, copies, monkeypatch):
    rig = guarded_rig()
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


def test_close_that_takes_too_long(watch, copies):
    rig = guarded_rig()
    copies.hold("onload", 0)
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    load = scheduler.onload([5], [2])
    with pytest.raises(TimeoutError):
        scheduler.close(timeout_s=0.0)
    copies.go_on()
    load.wait(WAIT_S)
    scheduler.close(WAIT_S)


def test_a_manager(watch):
    rig = guarded_rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        manager = KVOffloadManager(scheduler)
        watch.manager_locks = {manager: manager._lock, manager._index: manager._lock}
        watch.calls(rig.pool, "allocate")  # nobody else may take the blocks that the manager has counted
        manager.save([b"a", b"b", b"c"], [1, 2, 3]).wait(WAIT_S)
        with manager.lookup([b"a", b"b", b"c"]) as lease:
            lease.keep_first(2)
            load = manager.onload(lease.hashes, [4, 5])
        load.wait(WAIT_S)
        assert manager.blocks_to_recompute(load) == []
        assert manager.stats()["blocks"] == 3
        assert manager.evict(1) == 1
        manager.close()


def test_tables_of_the_tracker(watch):
    """Pools come and go, and the operators ask whether a block is in flight."""
    rig = guarded_rig()
    again = DeviceCache.adopt(
        rig.spec, {name: [rig.cache.tensor(name, layer) for layer in range(5)] for name in rig.spec.tensor_names}
    )
    hazards.check_access(rig.cache.tensor("key", 0).data_ptr(), [1], True, None)
    del again
    rig.pool.close()


def broken(*_: Any) -> None:
    raise OSError("broken")


def refuse(call: Callable[[], object]) -> None:
    with contextlib.suppress(TransferError):
        call()
        raise AssertionError("no failure was told")
