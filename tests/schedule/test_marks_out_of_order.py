"""Layers are submitted in the order of their marks: what is submitted last is not the last layer."""

from __future__ import annotations

import pytest

from paddle_kv import LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from tests.schedule.rig import SHORT_S, WAIT_S


@pytest.fixture
def scheduler(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as made:
        yield made


def marked_backwards(scheduler):
    save = scheduler.offload([3, 1], [2, 7], layerwise=True)
    for layer in (4, 3, 2, 1, 0):
        save.mark_layer_written(layer)
    return save


@pytest.mark.parametrize("name", ["wait", "wait_on"])
def test_a_wait_is_for_the_last_submission(rig, copies, scheduler, name):
    copies.hold("offload", 0)
    save = marked_backwards(scheduler)
    save.wait_layer(4, timeout_s=WAIT_S)
    with pytest.raises(TimeoutError):
        getattr(save, name)(timeout_s=SHORT_S)
    assert not save.done()
    copies.go_on()
    getattr(save, name)(timeout_s=WAIT_S)
    rig.expect_offload([3, 1], [2, 7])
    rig.check()


def test_a_failure_of_a_group_names_its_first_layer(rig, copies):
    copies.fail("onload", 2, RuntimeError("broken"))
    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=2) as scheduler:
        load = scheduler.onload([3], [2])
        with pytest.raises(TransferError, match=r"onload failed at layer 2: broken") as caught:
            load.wait(WAIT_S)
        assert caught.value.layer == 2


def test_a_submission_of_a_group_that_fails_names_its_first_layer(rig):
    class Refusing(CpuBackend):
        def copy_layers(self, binding, work, stream):
            raise RuntimeError("refused")

    with LayerwiseScheduler(rig.cache, rig.pool, backend=Refusing(), layers_per_event=2) as scheduler:
        save = scheduler.offload([3], [2], layerwise=True)
        save.mark_layer_written(4)
        with pytest.raises(TransferError, match=r"offload failed at layer 4: refused") as caught:
            save.wait(WAIT_S)
        assert caught.value.layer == 4


def test_the_times_of_a_layer_begin_where_those_of_the_one_before_end(rig):
    with LayerwiseScheduler(rig.cache, rig.pool, record_layer_times=True) as scheduler:
        load = scheduler.onload([3], [2])
        load.wait(WAIT_S)
        times = load.layer_times_ms
    assert [start for start, _ in times[1:]] == [end for _, end in times[:-1]]
    assert times[0][0] < times[0][1]


def test_a_layerwise_save_stands_behind_its_marks_and_nothing_else(rig):
    """Not behind what the compute stream was given before: the layers may be written on another one."""

    class Recording(CpuBackend):
        def __init__(self):
            super().__init__()
            self.recorded = []

        def record(self, event, stream):
            self.recorded.append(event)
            super().record(event, stream)

    backend = Recording()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        backend.recorded.clear()
        save = scheduler.offload([3], [2], layerwise=True)
        assert backend.recorded == []
        for layer in range(save.num_layers):
            save.mark_layer_written(layer)
        save.wait(WAIT_S)
        assert len(backend.recorded) == save.num_layers
        scheduler.offload([3], [2]).wait(WAIT_S)
        assert len(backend.recorded) == save.num_layers + 1
