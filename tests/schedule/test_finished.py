"""What ``finished`` tells and when its descriptor can be read from."""

from __future__ import annotations

import functools
import os
import select
import weakref
from typing import Any

import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.tracking.group import change
from tests.schedule.rig import WAIT_S, Rig


def readable(descriptor: int, timeout_s: float = 0.0) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def saved(scheduler: Any, block: int = 1) -> Any:
    save = scheduler.offload([block], [block])
    save.wait(WAIT_S)
    scheduler.stats()  # a section behind the one that told of it: the wait may be over in the middle of that
    return save


def test_the_descriptor_can_be_read_from_when_something_has_ended(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        early = saved(scheduler)
        descriptor = scheduler.fileno()
        assert scheduler.fileno() == descriptor and not readable(descriptor)
        assert not os.get_inheritable(descriptor) and not os.get_blocking(descriptor)
        one, other = saved(scheduler), saved(scheduler, 2)
        assert readable(descriptor, WAIT_S)
        assert os.eventfd_read(descriptor) == 2, "one for each"
        assert scheduler.finished() == [one, other], f"not {early!r}, which ended before anybody asked"
        assert scheduler.finished() == [] and not readable(descriptor)
        saved(scheduler)
        assert len(scheduler.finished()) == 1 and not readable(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_what_has_ended_before_the_descriptor_is_opened_is_kept(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        assert scheduler.finished() == []
        save = saved(scheduler)
        scheduler.fileno()
        assert scheduler.finished() == [save]


def test_a_transfer_whose_handle_is_lost_is_told_of_by_a_new_one(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.finished()
        scheduler.offload([1], [1])
        scheduler.drain(WAIT_S)
        [told] = scheduler.finished()
        assert told.done() and list(told.plan.host_ids) == [1]
        kept = scheduler.offload([2], [2])
        scheduler.drain(WAIT_S)
        assert scheduler.finished()[0] is kept


def test_without_anybody_who_asks_nothing_is_collected(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = weakref.ref(saved(scheduler))
        assert save() is None


@pytest.mark.parametrize("with_descriptor", [False, True])
def test_what_did_not_reach_the_caller_is_told_again_before_the_rest(
    rig: Rig, caplog: pytest.LogCaptureFixture, with_descriptor: bool
) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.finished()
        descriptor = scheduler.fileno() if with_descriptor else None
        first = saved(scheduler)
        on_its_way = change(scheduler, functools.partial(scheduler._finished.take, scheduler))
        assert descriptor is None or not readable(descriptor)
        second = saved(scheduler, 2)
        if descriptor is not None:
            os.eventfd_read(descriptor)
        del on_its_way
        assert descriptor is None or (readable(descriptor, WAIT_S) and os.eventfd_read(descriptor) == 1)
        scheduler.stats()  # a section behind what brings them back
        assert scheduler.finished() == [first, second]
        nothing = change(scheduler, functools.partial(scheduler._finished.take, scheduler))
        del nothing
        scheduler.stats()
        assert descriptor is None or not readable(descriptor)
        assert scheduler.finished() == []
    assert caplog.records == [], "nothing went wrong where nobody looks"


def test_a_closed_scheduler_can_still_be_asked(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.fileno()
        save = saved(scheduler)
    assert scheduler.finished() == [save]
    assert scheduler.finished() == []
