"""What other backends do can be checked as well: here the one with worker threads."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.backend.work import LayerWork
from paddle_kv.testing.simulator import Location, Log, RecordingBackend, check
from tests.schedule.rig import WAIT_S

from .scenarios import LAYERS, SPEC


class Gated(CpuBackend):
    """No copy runs before the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def _pass(self) -> None:
        assert self.gate.wait(WAIT_S)

    def copy_layers(self, binding: int, work: LayerWork, stream: Any) -> None:
        stream.submit(self._pass)
        super().copy_layers(binding, work, stream)


class RecordsWithoutWaits(RecordingBackend):
    """Leaves the waits out before they are recorded, as a scheduler would that forgot them."""

    def copy_layers(self, binding: Any, work: LayerWork, stream: Any) -> None:
        super().copy_layers(binding, dataclasses.replace(work, waits=[[] for _ in work.waits]), stream)


def traffic(backend: RecordingBackend) -> None:
    cache, pool = DeviceCache(SPEC, 4, "cpu"), HostPool(SPEC, 5)
    with LayerwiseScheduler(cache, pool, backend=backend) as scheduler:
        for layer in range(LAYERS):
            cache.tensor("latent", layer)[0] = 1.5 + layer
            backend.touch(None, writes=[(cache, 0, layer)])
        save = scheduler.offload([0], [2])
        load = scheduler.onload([2], [1])
        for layer in range(LAYERS):
            load.wait_layer(layer)
            backend.touch(None, reads=[(cache, 1, layer)])
            assert cache.tensor("latent", layer)[1].numpy().max() == 1.5 + layer
        load.wait()
        save.wait()
    pool.close()


def test_worker_threads_are_ordered() -> None:
    log = Log()
    traffic(RecordingBackend(CpuBackend(), log))
    assert check(log.entries) == []
    copies = [entry for entry in log.entries if "onload" in entry.label]
    assert len(copies) == LAYERS and all(copy.stream.startswith("transfer") for copy in copies)
    # The caller knows which blocks a copy moved.
    assert [location.slot for location in copies[1].writes] == [1]
    assert {location.layer for location in copies[1].writes} == {1}


def test_computation_that_does_not_wait_is_found() -> None:
    log, inner = Log(), Gated()  # or the host might know the copies to be over
    backend = RecordingBackend(inner, log)
    cache, pool = DeviceCache(SPEC, 4, "cpu"), HostPool(SPEC, 5)
    with LayerwiseScheduler(cache, pool, backend=backend) as scheduler:
        scheduler.onload([2], [1])
        backend.touch(None, reads=[(cache, 1, 0)], label="attention")
        inner.gate.set()
    [finding] = check(log.entries)
    assert finding.kind == "read after write" and finding.location == Location(log.pool_name(cache), 1, 0)
    assert "attention" in str(finding) and "test_recorder.py" in str(finding)


@pytest.mark.parametrize(("kind", "expected"), [(RecordingBackend, []), (RecordsWithoutWaits, ["write after read"])])
def test_missing_waits_between_transfers_are_found(kind: type[RecordingBackend], expected: list[str]) -> None:
    log, inner = Log(), Gated()
    cache, pool = DeviceCache(SPEC, 4, "cpu"), HostPool(SPEC, 5)
    with LayerwiseScheduler(cache, pool, backend=kind(inner, log)) as scheduler:
        scheduler.offload([0], [2])
        scheduler.onload([3], [0])
        inner.gate.set()
    assert sorted({finding.kind for finding in check(log.entries)}) == expected


def test_two_pools_over_one_memory_have_one_name() -> None:
    log = Log()
    cache = DeviceCache(SPEC, 4, "cpu")
    same = DeviceCache.adopt(SPEC, {"latent": [cache.tensor("latent", layer) for layer in range(LAYERS)]})
    other = DeviceCache(SPEC, 4, "cpu")
    assert log.pool_name(cache) == log.pool_name(same) != log.pool_name(other)
