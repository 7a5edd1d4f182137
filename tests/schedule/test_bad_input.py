"""Wrong arguments, wherever they are given: a typed exception names them, nothing has moved, the next call works."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule import scheduler as scheduling
from paddle_kv.testing.simulator import Simulation
from tests.schedule.rig import WAIT_S, bytes_at, cpu_tensor, make_spec, settles

DEVICE, HOST = "device_block_ids", "host_block_ids"


@pytest.fixture
def scheduler(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as made:
        yield made
        rig.check()
        made.offload([12, 0], [3, 16]).wait(WAIT_S)
        rig.expect_offload([12, 0], [3, 16])
        made.onload([0], [5]).wait(WAIT_S)
        rig.expect_onload([0], [5])
        rig.check()
        assert made.stats()["in_flight"] == 0
        assert settles(lambda: made.stats()["events"] == 1)


@pytest.mark.parametrize(
    ("direction", "first", "second", "error", "message"),
    [
        ("offload", [13], [0], IndexError, rf"{DEVICE}\[0\] = 13 must be in \[0, 13\)"),
        ("offload", [1, -1], [0, 1], IndexError, rf"{DEVICE}\[1\] = -1 must be in \[0, 13\)"),
        ("offload", [1, 2], [0, 17], IndexError, rf"{HOST}\[1\] = 17 must be in \[0, 17\)"),
        ("onload", [17], [0], IndexError, rf"{HOST}\[0\] = 17 must be in \[0, 17\)"),
        ("onload", [1, 2], [5, 13], IndexError, rf"{DEVICE}\[1\] = 13 must be in \[0, 13\)"),
        ("onload", [0], [2**31], IndexError, rf"{DEVICE}\[0\] = 2147483648 must be in \[0, 13\)"),
        ("offload", [0], [-(2**40)], IndexError, rf"{HOST}\[0\] = -1099511627776 must be in \[0, 17\)"),
        ("offload", [1, 2], [3], ValueError, f"{DEVICE} has 2 ids, {HOST} has 1"),
        ("offload", [], [3], ValueError, f"{DEVICE} has 0 ids, {HOST} has 1"),
        ("offload", [1, 2, 3], [4, 5, 4], ValueError, f"{HOST} names block 4 more than once"),
        ("onload", [1, 2, 3], [4, 4, 5], ValueError, f"{DEVICE} names block 4 more than once"),
        ("offload", None, [0], TypeError, f"{DEVICE} is None"),
        ("onload", "01", [0, 1], TypeError, f"{HOST} is '01'"),
        ("onload", [0.0], [1], TypeError, HOST),
        ("onload", [0], ["1"], TypeError, DEVICE),
        ("offload", [True], [1], TypeError, DEVICE),
        ("offload", np.array([0.5]), [1], TypeError, f"{DEVICE} has dtype float64"),
        ("offload", [[1, 2]], [1, 2], ValueError, rf"{DEVICE} has shape \[1, 2\]"),
        ("offload", np.zeros((2, 1), np.int64), [1, 2], ValueError, rf"{DEVICE} has shape \[2, 1\]"),
        ("offload", cpu_tensor(np.zeros(2, np.float32)), [1, 2], TypeError, DEVICE),
        ("offload", 3, [1], (TypeError, ValueError), DEVICE),
    ],
)
@pytest.mark.parametrize("layerwise", [False, True])
def test_ids(scheduler, direction, first, second, error, message, layerwise):
    if layerwise and direction == "onload":
        return
    options = {"layerwise": True} if layerwise else {}
    with pytest.raises(error, match=message):
        getattr(scheduler, direction)(first, second, **options)


@pytest.mark.parametrize("call", ["wait_layer", "mark_layer_written"])
@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (5, IndexError, r"layer = 5 must be in \[0, 5\)"),
        (-1, IndexError, r"layer = -1 must be in \[0, 5\)"),
        (1.0, TypeError, "layer is 1.0"),
        ("1", TypeError, "layer is '1'"),
        (None, TypeError, "layer is None"),
        (True, TypeError, "layer is True"),
    ],
)
def test_layers(rig, scheduler, call, layer, error, message):
    save = scheduler.offload([1], [2], layerwise=True)
    with pytest.raises(error, match=message):
        getattr(save, call)(layer)
    for each in np.arange(5):
        save.mark_layer_written(each)
        save.wait_layer(each)
    save.wait(WAIT_S)
    rig.expect_offload([1], [2])


@pytest.mark.parametrize("value", [1, "yes"])
def test_switches(rig, scheduler, value):
    with pytest.raises(TypeError, match=f"layerwise = {value!r} is {type(value).__name__}; a bool is expected"):
        scheduler.offload([1], [2], layerwise=value)
    with pytest.raises(TypeError, match=f"urgent = {value!r} is {type(value).__name__}; a bool or None is expected"):
        scheduler.onload([1], [2], urgent=value)
    with pytest.raises(TypeError, match="layerwise = None is NoneType; a bool is expected"):
        scheduler.offload([1], [2], layerwise=None)
    assert not scheduler.in_flight()
    rig.check()


def test_marks(rig, scheduler):
    save = scheduler.offload([1], [2], layerwise=True)
    save.mark_layer_written(3)
    with pytest.raises(ValueError, match=r"layer = 3 is marked as written already"):
        save.mark_layer_written(3)
    for layer in (0, 1, 2, 4):
        save.mark_layer_written(layer)
    save.wait(WAIT_S)
    rig.expect_offload([1], [2])
    with pytest.raises(ValueError, match=r"layer = 3 is marked as written already"):
        save.mark_layer_written(3)
    for other in (scheduler.offload([1], [2]), scheduler.onload([2], [1])):
        with pytest.raises(ValueError, match=r"mark_layer_written is for offload\(\.\.\., layerwise=True\)"):
            other.mark_layer_written(0)
        other.wait(WAIT_S)
    rig.expect_onload([2], [1])


@pytest.mark.parametrize(
    ("timeout_s", "error", "message"),
    [
        ("1", TypeError, "timeout_s is '1'"),
        (True, TypeError, "timeout_s is True"),
        (float("nan"), ValueError, "timeout_s = nan"),
        (float("inf"), ValueError, "timeout_s = inf"),
        (1e12, ValueError, "timeout_s = 1000000000000.0"),
    ],
)
def test_timeouts(rig, scheduler, timeout_s, error, message):
    load = scheduler.onload([2], [1])
    rig.expect_onload([2], [1])
    calls = [
        lambda: load.wait(timeout_s),
        lambda: load.wait_layer(0, timeout_s=timeout_s),
        lambda: load.wait_on(timeout_s=timeout_s),
        lambda: scheduler.drain(timeout_s),
        lambda: scheduler.close(timeout_s),
    ]
    for call in calls:
        with pytest.raises(error, match=message):
            call()
    load.wait(np.float32(WAIT_S))


def test_leased_blocks(rig, scheduler):
    with rig.pool.lease([2]):
        with pytest.raises(RuntimeError, match=r"block 2 of the host pool is leased; release the lease"):
            scheduler.offload([1, 4], [5, 2])
        scheduler.onload([2], [1]).wait(WAIT_S)
        rig.expect_onload([2], [1])
    with (
        rig.pool.lease([2], write=True),
        pytest.raises(RuntimeError, match=r"block 2 of the host pool is leased"),
    ):
        scheduler.onload([2], [1])
    scheduler.offload([1], [2]).wait(WAIT_S)
    rig.expect_offload([1], [2])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"device_cache": None}, TypeError, "device_cache is NoneType; a DeviceCache is expected"),
        ({"host_pool": [1]}, TypeError, "host_pool is list; a HostPool is expected"),
        ({"backend": "cuda"}, ValueError, "backend = 'cuda' must be 'auto', 'cupy', 'cpu' or a Backend"),
        ({"backend": "cupy"}, ValueError, "backend = 'cupy' needs a device cache on a GPU; this one is on the CPU"),
        ({"backend": None}, TypeError, "backend is None"),
        ({"engine": "dma"}, ValueError, "engine = 'dma' must be one of 'auto', 'copy_engine', 'kernel', 'staging'"),
        ({"layers_per_event": 0}, ValueError, "layers_per_event = 0 must be an integer of at least 1"),
        ({"layers_per_event": 2.0}, ValueError, "layers_per_event = 2.0"),
        ({"layers_per_event": True}, ValueError, "layers_per_event = True"),
    ],
)
def test_arguments_of_the_scheduler(rig, change, error, message):
    arguments = {"device_cache": rig.cache, "host_pool": rig.pool, **change}
    with pytest.raises(error, match=message):
        LayerwiseScheduler(arguments.pop("device_cache"), arguments.pop("host_pool"), **arguments)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload([1], [2]).wait(WAIT_S)
    rig.expect_offload([1], [2])
    rig.check()


@pytest.mark.parametrize(
    "changes", [{"num_layers": 4}, {"dtype": "bfloat16"}, {"layout": "NHD"}, {"extra": {}}, {"latent": True}]
)
def test_pools_of_different_specs(rig, changes):
    other = HostPool(make_spec(**changes), 5)
    with pytest.raises(ValueError, match=r"host_pool has .* device_cache has .*; both must have the same spec"):
        LayerwiseScheduler(rig.cache, other)


class Indifferent(CpuBackend):
    """Asks a pool for nothing when it is bound."""

    def bind(self, device_cache, host_pool):
        return 0


def test_a_closed_pool(rig):
    other = HostPool(rig.spec, 5)
    scheduler = LayerwiseScheduler(rig.cache, other)
    other.close()
    with pytest.raises(RuntimeError, match=r"the host pool is closed"):
        LayerwiseScheduler(rig.cache, other)
    for backend in (Simulation().backend(), Indifferent()):
        with pytest.raises(RuntimeError, match=r"the host pool is closed"):
            LayerwiseScheduler(rig.cache, other, backend=backend)
    for call in (
        lambda: scheduler.offload([1], [2]),
        lambda: scheduler.onload([1], [2]),
        lambda: scheduler.record_event("onload"),
    ):
        with pytest.raises(RuntimeError, match=r"the host pool is closed"):
            call()
    scheduler.close()
    rig.check()


def test_a_scheduler_that_is_closed_during_the_call(rig, monkeypatch):
    """By another thread, between the look at the arguments and the submission."""
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    inner = scheduling.make_plan

    def close_and_plan(*arguments, **named):
        scheduler.close()
        return inner(*arguments, **named)

    monkeypatch.setattr(scheduling, "make_plan", close_and_plan)
    with pytest.raises(RuntimeError, match=r"the scheduler is closed"):
        scheduler.offload([1], [2])
    rig.check()


def test_a_closed_scheduler(rig):
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    load = scheduler.onload([1], [2])
    rig.expect_onload([1], [2])
    load.wait(WAIT_S)  # close would drop it if it had not begun
    scheduler.close()
    for call in (
        lambda: scheduler.onload([99], [2]),  # nobody looks at arguments any more
        lambda: scheduler.offload([1], [2]),
        lambda: scheduler.onload([1], [2]),
        lambda: scheduler.record_event("onload"),
    ):
        with pytest.raises(RuntimeError, match=r"the scheduler is closed"):
            call()
    load.wait(0)
    load.wait_layer(3)
    load.wait_on()
    assert load.done()
    scheduler.drain(0)
    rig.check()


def test_a_pool_in_the_memory_of_the_cache(rig):
    """Its blocks would be source and target of one copy."""
    spec = make_spec(num_layers=2, extra={})
    cache = DeviceCache(spec, 5, "cpu")
    pointers = {name: [cache.tensor(name, layer).data_ptr() for layer in range(2)] for name in spec.tensor_names}
    pool = HostPool.adopt(spec, pointers, 5)
    bytes_at(pointers["key"][0], 4)[:] = 1
    with pytest.raises(ValueError, match=r"host_pool lies in the memory of device_cache"):
        LayerwiseScheduler(cache, pool)


@pytest.mark.parametrize("layer", [np.int64(1), np.uint8(1)], ids=["int64", "uint8"])
def test_a_layer_may_be_any_integer(rig, layer):
    with LayerwiseScheduler(rig.cache, rig.pool) as made:
        save = made.offload([2], [3], layerwise=True)
        save.mark_layer_written(layer)
        save.wait_layer(layer, timeout_s=WAIT_S)
        with pytest.raises(ValueError, match="layer = 1 is marked as written already"):
            save.mark_layer_written(layer)
        save.cancel()
        rig.expect_offload([2], [3], layers=[1])
        made.drain(WAIT_S)
        rig.check()


@pytest.mark.parametrize(
    "layer", [None, "1", 1.0, True, *map(cpu_tensor, (np.array([0, 1]), np.array(1.0), np.array(1)))]
)
def test_a_layer_that_is_no_integer_is_named(rig, layer):
    with LayerwiseScheduler(rig.cache, rig.pool) as made:
        load = made.onload([2], [3])
        with pytest.raises(TypeError, match=r"(?s)layer is .*; an integer is expected"):
            load.wait_layer(layer)
        load.wait(WAIT_S)
