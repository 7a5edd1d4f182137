"""What the scheduler submits to a real GPU, checked for the edges that it needs."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy")

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, streams
from paddle_kv.backend.cupy_backend import CupyBackend
from paddle_kv.testing.simulator import Log, RecordingBackend, check
from tests.gpu.delay import busy, cupy_stream

LAYERS = 3
SPEC = KVCacheSpec(num_layers=LAYERS, num_kv_heads=2, head_dim=64, block_size=5, dtype="float16")
WAIT_S = 20.0
DELAY_MS = 100


@pytest.fixture
def recorded():
    cache, pool = DeviceCache(SPEC, 7, "gpu:0"), HostPool(SPEC, 9)
    backend = RecordingBackend(CupyBackend(0), Log())
    yield cache, pool, backend, streams.paddle_stream(0)
    pool.close()


def test_traffic_is_ordered(recorded) -> None:
    cache, pool, backend, compute = recorded
    with LayerwiseScheduler(cache, pool, backend=backend, layers_per_event=2) as scheduler:
        backend.touch(compute, writes=[(cache, 3, layer) for layer in range(LAYERS)])
        scheduler.offload([3, 4], [0, 1])
        load = scheduler.onload([0, 1, 1], [4, 3, 5])
        save = scheduler.offload([6], [0], layerwise=True)
        for layer in range(LAYERS):
            load.wait_layer(layer)
            backend.touch(compute, reads=[(cache, block, layer) for block in (3, 4, 5)])
            backend.touch(compute, writes=[(cache, 6, layer)])
            save.mark_layer_written(layer)
        again = scheduler.onload([0], [6])
        again.wait_on()
        backend.touch(compute, writes=[(cache, 6, layer) for layer in range(LAYERS)])
        again.wait(WAIT_S)
        save.wait(WAIT_S)
        load.wait(WAIT_S)
    assert sum("load of" in entry.label for entry in backend.log.entries) >= 4 * LAYERS
    assert [str(finding) for finding in check(backend.log.entries)] == []


def test_computation_that_does_not_wait_is_found(recorded) -> None:
    cache, pool, backend, compute = recorded
    with LayerwiseScheduler(cache, pool, backend=backend) as scheduler:
        busy(cupy_stream(compute), DELAY_MS)  # a load that is seen to be over orders what comes later
        load = scheduler.onload([0], [4])
        backend.touch(compute, reads=[(cache, 4, 1)])
        load.wait(WAIT_S)
    [finding] = check(backend.log.entries)
    assert finding.kind == "read after write"
    assert finding.location == backend.locations([(cache, 4, 1)])[0]
