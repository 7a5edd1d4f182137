"""Loads whose host blocks are written meanwhile, without a tier: the test says what comes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from paddle_kv import CancelledError, DeviceCache, LayerwiseScheduler, Transfer, TransferError
from paddle_kv.schedule import arriving, checksum
from paddle_kv.tracking.group import change
from tests.schedule.rig import SHORT_S, WAIT_S, Rig
from tests.schedule.ring_rig import RingRig


class Reading:
    """Writes these host blocks."""

    def __init__(self, *block_ids: int) -> None:
        self.block_ids = list(block_ids)

    def cancel(self) -> None:
        pass


class Arrivals:
    def __init__(self, scheduler: LayerwiseScheduler) -> None:
        self.scheduler = scheduler
        self._loads: list[Transfer] = []

    def load(self, host_ids: list[int], device_ids: list[int]) -> Transfer:
        plan, compute = self.scheduler.plan("onload", device_ids, host_ids), self.scheduler.compute_stream(None)
        start = functools.partial(arriving.start, self.scheduler, plan, compute, False, Reading(*host_ids))
        load: Transfer = change(self.scheduler, start)
        self._loads.append(load)
        return load

    def end_all(self) -> None:
        """No scheduler closes before."""
        for load in self._loads:
            self.tell(arriving.fail, load, "the test is over")
            self.tell(arriving.end, load)

    def tell(self, function: Callable[..., None], load: Transfer, *what: Any) -> None:
        change(self.scheduler, functools.partial(function, load._movement, *what))


@pytest.fixture
def arrivals(rig: Rig) -> Iterator[Arrivals]:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        made = Arrivals(scheduler)
        yield made
        made.end_all()


def test_the_record_of_the_checksums_says_which_loads_lost_blocks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        arrivals = Arrivals(scheduler)
        load = arrivals.load([2, 7], [3, 1])
        arrivals.tell(arriving.lose, load, [7], "7 was not there")
        arrivals.tell(arriving.end, load)
        with pytest.raises(TransferError, match="7 was not there") as raised:
            load.wait(WAIT_S)
        assert raised.value.block_ids == [1]
        assert checksum._recent[-1]["error"] == "7 was not there"


def test_what_is_lost_says_nothing_of_a_reader_that_was_cancelled(arrivals: Arrivals) -> None:
    load = arrivals.load([2, 7], [3, 1])
    reader = arrivals.scheduler.onload([7], [5])
    reader.cancel()
    arrivals.tell(arriving.lose, load, [7], "7 was not there")
    with pytest.raises(TransferError, match=r"block 5 .* holds no usable data \(onload was cancelled"):
        arrivals.scheduler.offload([5], [9])
    arrivals.tell(arriving.end, load)
    load.wait_over(WAIT_S)
    with pytest.raises(TransferError, match="7 was not there"):
        load.wait(WAIT_S)
    with pytest.raises(CancelledError):
        reader.wait(WAIT_S)
    with pytest.raises(TransferError, match=r"block 5 .* holds no usable data \(onload was cancelled"):
        arrivals.scheduler.offload([5], [9])


def test_who_reads_what_was_written_anew_loses_nothing(rig: Rig, arrivals: Arrivals) -> None:
    load = arrivals.load([2, 7], [3, 1])
    save = arrivals.scheduler.offload([6], [7])
    later = arrivals.scheduler.onload([7], [3])  # behind the load, whose target it overwrites
    arrivals.tell(arriving.lose, load, [7], "7 was not there")
    arrivals.tell(arriving.end, load)
    save.wait(WAIT_S)
    later.wait(WAIT_S)
    assert load.error is not None
    rig.expect_onload([7], [1])  # whatever block 7 held: of no use, and poisoned
    rig.expect_offload([6], [7])
    rig.expect_onload([7], [3])
    rig.check()
    arrivals.scheduler.offload([3], [9]).wait(WAIT_S)


def test_what_moves_nothing_is_behind_a_load_that_failed_and_not_behind_what_that_was_behind(
    arrivals: Arrivals,
) -> None:
    scheduler = arrivals.scheduler
    save = scheduler.offload([3], [9], layerwise=True)
    load = arrivals.load([2], [3])
    plan, compute = scheduler.plan("onload", [], []), scheduler.compute_stream(None)
    start = functools.partial(scheduler.start_here, plan, compute, False, False, [load._movement])
    nothing: Transfer = change(scheduler, start)
    arrivals.tell(arriving.fail, load, "nothing came")
    assert not nothing.done()
    arrivals.tell(arriving.end, load)
    assert (load.done(), nothing.done(), save.done()) == (True, True, False)
    assert nothing.error is None
    assert load.error is not None
    save.cancel()


def test_what_is_lost_is_known_before_the_load_is_over(arrivals: Arrivals) -> None:
    load = arrivals.load([2, 7], [3, 1])
    assert (load.failed, load.error) == (False, None)
    arrivals.tell(arriving.lose, load, [7], "7 was not there")
    for is_over in (False, True):
        assert (load.failed, load.done()) == (True, is_over)
        assert isinstance(load.error, TransferError) and load.error.block_ids == [1]
        if not is_over:
            arrivals.tell(arriving.end, load)
            load.wait_over(WAIT_S)


def test_a_load_loses_blocks_one_after_the_other(arrivals: Arrivals) -> None:
    load = arrivals.load([2, 7, 8], [3, 1, 5])
    arrivals.tell(arriving.lose, load, [7], "7 was not there")
    arrivals.tell(arriving.lose, load, [2], "nor was 2")
    arrivals.tell(arriving.end, load)
    with pytest.raises(TransferError, match="7 was not there") as raised:
        load.wait(WAIT_S)
    assert sorted(raised.value.block_ids) == [1, 3]
    for device, host in ((3, 9), (1, 9)):
        with pytest.raises(TransferError, match=f"block {device} .* holds no usable data"):
            arrivals.scheduler.offload([device], [host])
    arrivals.scheduler.offload([5], [9]).wait(WAIT_S)


def test_a_save_into_a_block_that_is_still_being_written_waits_though_the_load_has_failed(
    rig: Rig, arrivals: Arrivals
) -> None:
    load = arrivals.load([2], [3])
    save = arrivals.scheduler.offload([5], [2])
    arrivals.tell(arriving.fail, load, "the tier is lost")
    with pytest.raises(TimeoutError):
        save.wait(SHORT_S)
    arrivals.tell(arriving.end, load)
    save.wait(WAIT_S)
    rig.expect_offload([5], [2])
    rig.check()


def test_layers_may_come_in_any_order(rig: Rig, arrivals: Arrivals) -> None:
    load = arrivals.load([2, 7], [3, 1])
    for layer in (3, 4, 0, 2, 1):
        for name, array in rig.host.items():
            array[layer, 2] += 1  # the bytes that come
            rig.pool.view(name, layer, 2).reshape(-1).view(np.uint8)[:] = array[layer, 2]
        arrivals.tell(arriving.mark, load, [layer])
        load.wait_layer(layer, timeout_s=WAIT_S)
        rig.expect_onload([2, 7], [3, 1], [layer])
        rig.check()
    arrivals.tell(arriving.end, load)
    load.wait(WAIT_S)
    rig.check()


def test_a_load_of_a_ring_out_of_a_lost_block_fails_as_a_whole() -> None:
    """Nobody marks its layers any more. The load that lost the block has a cache with all layers: its others came."""
    ring = RingRig(2)
    with LayerwiseScheduler(DeviceCache(ring.spec, 4, "cpu"), ring.pool) as scheduler:
        arrivals = Arrivals(scheduler)
        load = arrivals.load([4, 5], [1, 2])
        reader = ring.scheduler.onload([5, 6], [3, 7])
        arrivals.tell(arriving.lose, load, [5], "5 was not there")
        arrivals.tell(arriving.end, load)
        for one, device_ids in ((load, [2]), (reader, [3, 7])):
            with pytest.raises(TransferError, match="5 was not there") as caught:
                one.wait(WAIT_S)
            assert caught.value.block_ids == device_ids
    ring.close()
