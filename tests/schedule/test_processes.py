"""What of this package another process may have: the spec. Fork is in test_lifetime.py."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading

import numpy as np
import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from tests.schedule.rig import WAIT_S


def work(spec: KVCacheSpec, connection) -> None:
    cache, pool = DeviceCache(spec, 3, "cpu"), HostPool(spec, 4)
    cache.tensor("key", 2)[1] = 2.5
    with LayerwiseScheduler(cache, pool) as scheduler:
        scheduler.offload([1], [3]).wait(WAIT_S)
        connection.send(float(pool.view("key", 2, 3).min()))
    pool.close()


def test_a_spawned_process_gets_the_spec_and_makes_the_rest(rig):
    """Beside transfers in flight here, of which it knows nothing."""
    here, there = multiprocessing.Pipe()
    spec = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=4, block_size=5, dtype="float32")
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        child = multiprocessing.get_context("spawn").Process(target=work, args=(spec, there))
        child.start()
        assert here.poll(60)
        assert here.recv() == 2.5
        child.join(WAIT_S)
        assert child.exitcode == 0
        for layer in range(5):
            save.mark_layer_written(layer)
        save.wait(WAIT_S)
    rig.expect_offload([1], [4])
    rig.check()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_a_forked_child_does_to_its_blocks_stays_there(rig):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        code = 1
        with contextlib.suppress(BaseException):
            with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
                scheduler.offload([1, 2], [4, 9]).wait(WAIT_S)
                scheduler.onload([5], [3]).wait(WAIT_S)
            rig.expect_offload([1, 2], [4, 9])
            rig.expect_onload([5], [3])
            rig.check()
            code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    rig.check()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_keeps_the_leases_of_its_own_thread_alone(rig):
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with rig.pool.lease([3], write=True):
            held.set()
            end.wait(WAIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(WAIT_S)
    with rig.pool.lease([5], write=True):
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            code = 1
            with contextlib.suppress(BaseException), rig.pool.lease([3], write=True, timeout_s=1):
                with pytest.raises(TimeoutError), rig.pool.lease([5], timeout_s=0):
                    pass
                code = 0
            os._exit(code)
        _, status = os.waitpid(child, 0)
    with pytest.raises(TimeoutError), rig.pool.lease([3], timeout_s=0):
        pass
    end.set()
    thread.join(WAIT_S)
    assert os.waitstatus_to_exitcode(status) == 0


def test_nothing_that_holds_memory_can_be_sent(rig):
    pointers = {name: [rig.pool.pointer(name, layer) for layer in range(5)] for name in rig.spec.tensor_names}
    strides = {name: rig.pool.stride_bytes(name) for name in rig.spec.tensor_names}
    adopted = HostPool.adopt(rig.spec, pointers, 17, strides_bytes=strides)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4])
        for thing in (scheduler, save, rig.pool, adopted, rig.cache):
            with pytest.raises(TypeError):
                pickle.dumps(thing)
        save.wait(WAIT_S)
    np.testing.assert_equal(pickle.loads(pickle.dumps(rig.spec)), rig.spec)
