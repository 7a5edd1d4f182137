"""Whoever hears of a transfer's end: callbacks, coroutines, and the log where nobody else did."""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading

import pytest

from paddle_kv import CancelledError, LayerwiseScheduler, TransferError
from tests.schedule import rig as rig_module
from tests.schedule.rig import WAIT_S


@pytest.fixture
def scheduler(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as made:
        yield made


def settled(scheduler):
    """Behind all that the keeper has been given."""
    heard = queue.SimpleQueue()
    scheduler.offload([], []).add_done_callback(heard.put)
    heard.get(timeout=WAIT_S)


# ---- callbacks ----
def test_callbacks_run_in_order_at_the_end_once(copies, scheduler):
    heard = []
    copies.hold("onload", 4)
    load = scheduler.onload([3], [2])
    for number in range(3):
        load.add_done_callback(lambda told, number=number: heard.append((told, number, told.done())))
    settled(scheduler)
    assert heard == []
    copies.go_on()
    load.wait(WAIT_S)
    settled(scheduler)
    assert heard == [(load, number, True) for number in range(3)]
    assert load._movement.callbacks == []
    load.add_done_callback(lambda told: heard.append(threading.current_thread().name))
    settled(scheduler)
    assert heard[3:] == ["paddle_kv-keeper"]


def test_a_callback_that_raises_is_logged_and_holds_nobody_up(caplog, scheduler):
    def broken(_):
        raise RuntimeError("of the callback")

    heard = queue.SimpleQueue()
    load = scheduler.onload([3], [2])
    load.add_done_callback(broken)
    load.add_done_callback(heard.put)
    assert heard.get(timeout=WAIT_S) is load
    [record] = caplog.records
    assert record.name == "paddle_kv"
    assert "of the callback" in str(record.exc_info[1])


def test_a_callback_may_wait_for_another_transfer(copies, scheduler):
    heard = queue.SimpleQueue()

    def wait_for_the_load(_):
        try:
            load.wait(0.0)
        except TimeoutError:
            heard.put("too early")
        copies.go_on("onload")
        load.wait(WAIT_S)
        heard.put(load.state.value)

    save, load = copies.hold_a_save_and_a_load(scheduler)
    save.add_done_callback(wait_for_the_load)
    copies.go_on("offload")
    assert heard.get(timeout=WAIT_S) == "too early"
    assert heard.get(timeout=WAIT_S) == "done"


def test_no_callback_runs_inside_another_one_that_waits(copies, scheduler):
    """Else their number would be the depth of the stack, and the first would end last."""
    heard = []

    def wait_for_the_load(told):
        heard.append("the first begins")
        for end in (copies.go_on, lambda: None):
            end()
            load.wait(WAIT_S)
            scheduler.drain(WAIT_S)
        heard.append("the first ends")

    save, load = copies.hold_a_save_and_a_load(scheduler)
    save.add_done_callback(wait_for_the_load)
    for number in range(2):
        save.add_done_callback(lambda _, number=number: heard.append(number))
        load.add_done_callback(lambda _, number=number: heard.append(number + 2))
    copies.go_on("offload")
    load.wait(WAIT_S)
    settled(scheduler)
    assert heard == ["the first begins", "the first ends", 0, 1, 2, 3]


# ---- coroutines ----
def test_a_coroutine_waits_for_the_end(rig, copies, scheduler):
    async def program():
        copies.hold("onload", 0)
        load = scheduler.onload([3], [2])
        waiting = asyncio.ensure_future(wait(load))
        await asyncio.sleep(0)
        assert not waiting.done()
        copies.go_on()
        await asyncio.wait_for(waiting, WAIT_S)
        assert load.state.value == "done"
        copies.fail("onload", 1, RuntimeError("broken"))
        with pytest.raises(TransferError, match="broken"):
            await asyncio.wait_for(wait(scheduler.onload([4], [5])), WAIT_S)

    async def wait(transfer):
        await transfer

    asyncio.run(program())
    rig.expect_onload([3], [2])
    rig.expect_onload([4], [5], layers=[0])
    rig.check()


def test_a_task_that_gives_up_leaves_the_transfer_alone(caplog, copies, scheduler):
    async def wait(transfer):
        await transfer

    async def program(load):
        waiting = asyncio.ensure_future(wait(load))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        copies.go_on()
        load.wait(WAIT_S)
        await asyncio.get_running_loop().run_in_executor(None, settled, scheduler)

    copies.hold("onload", 0)
    load = scheduler.onload([3], [2])
    asyncio.run(program(load))
    assert load.state.value == "done"
    assert caplog.records == []


def test_a_loop_that_was_closed_is_not_called(caplog, copies, scheduler):
    async def wait(transfer):
        await transfer

    loop = asyncio.new_event_loop()
    copies.hold("onload", 0)
    load = scheduler.onload([3], [2])
    waiting = loop.create_task(wait(load))
    loop.run_until_complete(asyncio.sleep(0))
    waiting.cancel()
    loop.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
    loop.close()
    with caplog.at_level(logging.DEBUG, "paddle_kv"):
        copies.go_on()
        load.wait(WAIT_S)
        settled(scheduler)
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("DEBUG", None)]


# ---- the log ----
def logged(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


UNTOLD = "onload failed at layer 1: broken; nobody has waited for this transfer"


def test_a_failure_of_which_nobody_can_ask_any_more_is_logged(caplog, copies, scheduler):
    copies.fail("onload", 1, RuntimeError("broken"))
    copies.hold("onload", 0)
    event = scheduler.onload([3], [2])._movement.last_event
    gc.collect()
    assert logged(caplog) == []
    copies.go_on()
    assert event.wait(WAIT_S)
    rig_module.collect()
    assert logged(caplog) == [UNTOLD]


def test_a_failure_of_which_nobody_has_asked_is_logged_with_the_last_reference(caplog, copies, scheduler):
    copies.fail("onload", 1, RuntimeError("broken"))
    load = scheduler.onload([3], [2])
    load.wait_over(WAIT_S)
    movement = load._movement
    assert logged(caplog) == []
    del load
    gc.collect()
    settled(scheduler)
    assert logged(caplog) == [UNTOLD]
    assert movement.told


@pytest.mark.parametrize("ask", ["wait", "error"])
def test_a_failure_that_somebody_knows_is_not_logged(caplog, copies, scheduler, ask):
    copies.fail("onload", 1, RuntimeError("broken"))
    load = scheduler.onload([3], [2])
    if ask == "wait":
        with pytest.raises(TransferError):
            load.wait(WAIT_S)
    else:
        load.wait_over(WAIT_S)
        assert load.error is not None
    del load
    gc.collect()
    settled(scheduler)
    assert logged(caplog) == []


def test_a_transfer_that_was_cancelled_is_no_failure_to_log(caplog, scheduler):
    save = scheduler.offload([3], [2], layerwise=True)
    save.cancel()
    del save
    save = scheduler.offload([3], [2], layerwise=True)
    movement = save._movement
    del save  # nobody could mark it any more
    gc.collect()
    settled(scheduler)
    assert movement.over and isinstance(movement.error(), CancelledError)
    assert logged(caplog) == []
