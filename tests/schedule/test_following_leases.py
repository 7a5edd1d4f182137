"""Loads of host blocks that somebody writes under a lease of his own: he says which layers are there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paddle_kv import CancelledError, LayerwiseScheduler, LeasedError, Transfer, TransferError
from paddle_kv.schedule import arriving
from paddle_kv.tracking.group import change
from tests.schedule.rig import SHORT_S, WAIT_S, Rig, cache_memory, moved


class Writer:
    """Has host blocks 2 and 7, and a load of 4, 7, 2 follows it into 3, 1, 0."""

    def __init__(self, rig: Rig, scheduler: LayerwiseScheduler) -> None:
        self.rig, self.scheduler, self.domain = rig, scheduler, rig.pool.domain
        self.holds: list[int] = []
        assert change(self.domain, functools.partial(self.domain.try_lease, [2, 7], write=True))
        self.holds = [2, 7]

    def load(self, host_ids: list[int] = [4, 7, 2], device_ids: list[int] = [3, 1, 0]) -> Transfer:  # noqa: B006
        plan, compute = self.scheduler.plan("onload", device_ids, host_ids), self.scheduler.compute_stream(None)
        start = functools.partial(arriving.follow, self.scheduler, plan, compute, False, [2, 7])
        started: Transfer = change(self.scheduler, start)
        return started

    def tell(self, function: Callable[..., None], load: Transfer, *what: Any) -> None:
        change(self.scheduler, functools.partial(function, load._movement, *what))

    def let_go(self) -> None:
        held, self.holds = self.holds, []
        change(self.domain, functools.partial(self.domain.end_lease, held, write=True))
        change(self.domain, self.domain.group.notify)


@pytest.fixture
def writer(rig: Rig) -> Iterator[Writer]:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        made = Writer(rig, scheduler)
        yield made
        if made.holds:
            made.let_go()


def test_a_layer_is_loaded_when_it_is_marked(rig: Rig, writer: Writer) -> None:
    load = writer.load()
    before = rig.device
    with pytest.raises(TimeoutError, match="still being read into host memory"):
        load.wait_layer(0, timeout_s=SHORT_S)
    for layers in ([0], [3, 1], [2], [4]):
        writer.tell(arriving.mark, load, layers)
        for layer in layers:
            load.wait_layer(layer, timeout_s=WAIT_S)
        rig.device = moved(rig.host, rig.device, [4, 7, 2], [3, 1, 0], layers)
        if layers == [2]:
            assert not load.done()
    load.wait(WAIT_S)
    rig.device = before
    rig.expect_onload([4, 7, 2], [3, 1, 0])
    rig.check()


def test_it_is_over_although_they_are_leased(rig: Rig, writer: Writer) -> None:
    load = writer.load()
    writer.tell(arriving.mark, load, range(5))
    load.wait(WAIT_S)
    assert rig.pool.domain.busy([2, 4, 7]) == [2, 7]
    rig.expect_onload([4, 7, 2], [3, 1, 0])
    rig.check()
    writer.scheduler.offload([3, 1, 0], [10, 11, 12]).wait(WAIT_S)


@pytest.mark.parametrize("marked", [[], [0, 1]])
@pytest.mark.parametrize("how", ["fail", "cancel"])
def test_one_that_comes_to_nothing_is_over_while_they_are_still_written(
    rig: Rig, writer: Writer, how: str, marked: list[int]
) -> None:
    load = writer.load()
    writer.tell(arriving.mark, load, marked)
    if marked:
        load.wait_layer(1, timeout_s=WAIT_S)
    if how == "fail":
        writer.tell(arriving.fail, load, "7 does not come")
    else:
        load.cancel()
    load.wait_over(WAIT_S)
    with pytest.raises(TransferError if how == "fail" else CancelledError):
        load.wait(WAIT_S)
    assert rig.pool.domain.busy([2, 4, 7]) == [2, 7] and not rig.cache.domain.busy(range(13))
    with pytest.raises(TransferError, match=r"block 3 of the device cache holds no usable data"):
        writer.scheduler.offload([3], [10])
    writer.tell(arriving.mark, load, range(5))  # too late
    rig.expect_onload([4, 7, 2], [3, 1, 0], marked)
    rig.check()
    writer.let_go()
    again = writer.scheduler.onload([7, 2, 4], [3, 1, 0])  # nothing is wrong with what the others wrote
    again.wait(WAIT_S)
    rig.expect_onload([7, 2, 4], [3, 1, 0])
    rig.check()


def test_others_leave_them_alone(rig: Rig, writer: Writer) -> None:
    load = writer.load()
    with pytest.raises(LeasedError):
        writer.scheduler.offload([5], [7])
    with pytest.raises(LeasedError):
        writer.scheduler.onload([2], [5])
    writer.tell(arriving.mark, load, range(5))
    load.wait(WAIT_S)


def test_who_writes_them_behind_the_lease_comes_behind_the_load(rig: Rig, writer: Writer) -> None:
    load = writer.load()
    writer.tell(arriving.mark, load, [0])
    load.wait_layer(0, timeout_s=WAIT_S)
    writer.let_go()
    save = writer.scheduler.offload([5, 6], [7, 4])
    assert save.stands_behind(load)
    with pytest.raises(TimeoutError):
        save.wait_layer(1, timeout_s=SHORT_S)
    writer.tell(arriving.mark, load, range(5))
    load.wait(WAIT_S)
    save.wait(WAIT_S)
    rig.expect_onload([4, 7, 2], [3, 1, 0])
    rig.expect_offload([5, 6], [7, 4])
    rig.check()


def test_who_uses_its_targets_comes_behind_it(rig: Rig, writer: Writer) -> None:
    load = writer.load()
    save = writer.scheduler.offload([1], [10])
    with pytest.raises(TimeoutError):
        save.wait(SHORT_S)
    writer.tell(arriving.mark, load, range(5))
    save.wait(WAIT_S)
    rig.expect_onload([4, 7, 2], [3, 1, 0])
    rig.expect_offload([1], [10])
    rig.check()


def test_it_comes_behind_who_writes_what_is_not_leased(rig: Rig, writer: Writer) -> None:
    save = writer.scheduler.offload([5], [4], layerwise=True)
    load = writer.load()
    writer.tell(arriving.mark, load, range(5))
    with pytest.raises(TimeoutError):
        load.wait_layer(0, timeout_s=SHORT_S)
    for layer in range(5):
        save.mark_layer_written(layer)
    load.wait(WAIT_S)
    rig.expect_offload([5], [4])
    rig.expect_onload([4, 7, 2], [3, 1, 0])
    rig.check()


def test_the_others_of_its_blocks_are_checked(rig: Rig, writer: Writer) -> None:
    before = cache_memory(rig.cache)
    with rig.pool.lease([4], write=True), pytest.raises(LeasedError, match="block 4 of the host pool is leased"):
        writer.load()
    bad = writer.scheduler.offload([5], [4], layerwise=True)
    bad.cancel()
    bad.wait_over(WAIT_S)
    with pytest.raises(TransferError, match="block 4 of the host pool holds no usable data"):
        writer.load()
    assert all((bits == before[name]).all() for name, bits in cache_memory(rig.cache).items())
    load = writer.load([7, 2], [3, 0])
    writer.tell(arriving.mark, load, range(5))
    load.wait(WAIT_S)
