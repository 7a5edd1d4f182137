"""Transfers that come while nothing else is in flight: as any other, but that nothing is noted of most of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest

from paddle_kv import (
    CancelledError,
    ClosedError,
    ForkedError,
    HostPool,
    LayerwiseScheduler,
    LeasedError,
    ReentryError,
    TransferError,
)
from paddle_kv.schedule import alone as alone_module
from paddle_kv.schedule import resources
from paddle_kv.schedule.movement import movements
from paddle_kv.schedule.transfer import Transfer
from paddle_kv.tracking import group as groups
from paddle_kv.tracking.domain import BlockDomain
from paddle_kv.tracking.group import change, change_soon, unite
from paddle_kv.tracking.keeper import keeper
from tests.schedule.alone_backend import AloneBackend
from tests.schedule.rig import WAIT_S, Rig, are_collected, in_threads, settles
from tests.schedule.ring_rig import RingRig
from tests.schedule.test_hearing_at_the_device import Hearing


class AloneHearing(Hearing, AloneBackend):
    """Whoever waits for the end hears of it himself."""


@pytest.fixture(params=[AloneBackend, AloneHearing])
def backend(request):
    return request.param()


@pytest.fixture
def scheduler(rig, backend):
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as made:
        warm_up(rig, made)
        yield made


def warm_up(rig, scheduler):
    """The first transfer has events taken for the next one. What earlier tests have left is done."""
    gc.collect()
    scheduler.offload([0], [0]).wait(WAIT_S)
    rig.expect_offload([0], [0])
    assert settles(lambda: scheduler.resources.reserve)
    quiet(scheduler)


def quiet(scheduler):
    """Nobody enters a section any more: a handle that goes in the moment in which its transfer ends has one called."""
    for _ in range(3):
        keeper.call(list)
        assert settles(scheduler.group.is_idle)


def is_alone(transfer):
    return transfer._alone is not None and not transfer._alone.over


def test_loads_and_saves_one_behind_the_other(rig, backend, scheduler):
    host, device = np.random.default_rng(5), np.random.default_rng(6)
    for number in range(1, 9):
        blocks = host.permutation(17)[:number].tolist(), device.permutation(13)[:number].tolist()
        for name in ("onload", "offload"):
            given = blocks if name == "onload" else blocks[::-1]
            kind = (list, tuple, np.array)[number % 3]
            transfer = getattr(scheduler, name)(*map(kind, given))
            getattr(rig, f"expect_{name}")(*given)
            for layer in range(5):
                transfer.wait_layer(layer)
            transfer.wait(WAIT_S)
            assert transfer.done() and transfer.state.value == "done" and transfer.error is None
            assert transfer.elapsed_ms > 0 and transfer.bytes == number * scheduler.bytes_per_block
            assert transfer.plan.device_ids.tolist() == blocks[1] and transfer.plan.host_ids.tolist() == blocks[0]
            assert settles(lambda: scheduler.resources.reserve)
    rig.check()
    assert backend.started_alone >= 12  # what a wait has not ended itself is ended a moment later
    stats = scheduler.stats()
    moved = sum(range(1, 9)) * scheduler.bytes_per_block
    assert (stats["onload_transfers"], stats["offload_transfers"]) == (8, 9)
    assert (stats["onload_bytes"], stats["offload_bytes"]) == (moved, moved + scheduler.bytes_per_block)
    assert stats["onload_us"] > 0 and stats["in_flight"] == stats["failed"] == stats["cancelled"] == 0
    assert settles(lambda: scheduler.stats()["events"] == 1)


def test_the_end_of_one_is_no_transfer_of_the_tracker(rig, backend, scheduler, monkeypatch):
    """Neither by who waits nor by who reports."""
    monkeypatch.setattr(alone_module.Alone, "write_down", lambda self: pytest.fail("somebody has asked for it"))
    for _ in range(3):
        load = scheduler.onload([3], [2])
        alone = load._alone
        while not alone.over:
            if isinstance(backend, AloneHearing):
                load.wait(WAIT_S)
            assert alone.over or settles(lambda one=alone: one.over)
        load.wait(WAIT_S)
        assert settles(lambda: scheduler.resources.reserve)
    assert backend.started_alone == 3


def ask_for_a_coming_end(transfer):
    over = queue.SimpleQueue()
    transfer.add_done_callback(over.put)
    return lambda: over.get(timeout=WAIT_S) is transfer


def awaited(transfer):
    async def wait():
        await transfer

    thread = threading.Thread(target=lambda: asyncio.run(wait()))
    thread.start()
    return lambda: thread.join(WAIT_S) is None and not thread.is_alive()


def is_too_soon(call, *given, **named):
    with pytest.raises(TimeoutError):
        call(*given, **named)
    return True


def cannot_lease(pool):
    return is_too_soon(pool.lease([2, 5], write=True, timeout_s=0.01).__enter__)


QUESTIONS = {
    "state": lambda rig, scheduler, load: load.state.value == "arriving",
    "done": lambda rig, scheduler, load: not load.done(),
    "error": lambda rig, scheduler, load: load.error is None,
    "text": lambda rig, scheduler, load: "in flight, 0 of 5 parts" in repr(load),
    "failed": lambda rig, scheduler, load: not load.failed,
    "times": lambda rig, scheduler, load: math.isnan(load.elapsed_ms) and load.layer_times_ms == [],
    "plan": lambda rig, scheduler, load: load.plan.device_ids.tolist() == [2, 4],
    "marks": lambda rig, scheduler, load: not load.layerwise and load.unmarked_layers == [] and load.layer_buffers == 5,
    "in flight": lambda rig, scheduler, load: scheduler.in_flight() == [load],
    "stats": lambda rig, scheduler, load: scheduler.stats()["in_flight"] == scheduler.stats()["onload_transfers"] == 1,
    "drain": lambda rig, scheduler, load: is_too_soon(scheduler.drain, 0.01),
    "wait": lambda rig, scheduler, load: is_too_soon(load.wait, 0.01),
    "wait_layer": lambda rig, scheduler, load: is_too_soon(load.wait_layer, 4, timeout_s=0.01),
    "busy": lambda rig, scheduler, load: change(scheduler, lambda: rig.cache.domain.busy([1, 2, 4])) == [2, 4],
    "source": lambda rig, scheduler, load: change(scheduler, lambda: rig.pool.domain.busy([6, 5, 3])) == [5, 3],
    "noted": lambda rig, scheduler, load: change_soon(rig.pool.domain, lambda: rig.pool.domain.busy([5])) is None,
    "finished": lambda rig, scheduler, load: scheduler.finished() == [],
    "callback": lambda rig, scheduler, load: ask_for_a_coming_end(load),
    "await": lambda rig, scheduler, load: awaited(load),
    "lease": lambda rig, scheduler, load: cannot_lease(rig.pool),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_whatever_is_asked_meanwhile_knows_of_it(rig, copies, scheduler, question):
    copies.hold("onload", 4)
    load = scheduler.onload([5, 3], [2, 4])
    assert is_alone(load) and movements == {}
    found = QUESTIONS[question](rig, scheduler, load)
    assert found
    assert question == "wait_layer" or settles(lambda: not is_alone(load))
    copies.go_on()
    load.wait(WAIT_S)
    assert not callable(found) or found()
    rig.expect_onload([5, 3], [2, 4])
    rig.check()
    if question == "finished":
        assert scheduler.finished() == [load]
        other = scheduler.onload([5], [2])  # from then on it hears of all
        other.wait(WAIT_S)
        assert other._alone is None and scheduler.finished() == [other]


def test_those_that_come_meanwhile_stand_behind_it(rig, copies, scheduler):
    copies.hold("onload", 0, 4)
    load = scheduler.onload([5, 3], [2, 4])
    assert is_alone(load)
    save = scheduler.offload([2, 9], [6, 3])  # of what it writes, over what it reads
    assert not is_alone(load) and load._movement in save._movement.depends_on
    assert save._movement.reads_from == {load._movement}
    copies.go_on("onload", 0)
    copies.go_on("onload", 4)
    save.wait(WAIT_S)
    load.wait(WAIT_S)
    rig.expect_onload([5, 3], [2, 4])
    rig.expect_offload([2, 9], [6, 3])
    rig.check()
    assert scheduler.stats()["onload_bytes"] == 2 * scheduler.bytes_per_block


def test_another_scheduler_of_the_same_cache_stands_behind_it(rig, copies, scheduler):
    other_pool = HostPool(rig.spec, 17)
    copies.hold("onload", 4)
    load = scheduler.onload([5, 3], [2, 4])
    with LayerwiseScheduler(rig.cache, other_pool, backend=AloneBackend()) as other:
        save = other.offload([2], [1])
        assert not is_alone(load) and save._movement.reads_from == {load._movement}
        copies.go_on()
        save.wait(WAIT_S)
    rig.expect_onload([5, 3], [2, 4])
    rig.check()
    assert other_pool.view("key", 4, 1).tobytes() == rig.device["key"][4, 2].tobytes()
    other_pool.close()


def test_of_groups_that_are_united_both_are_written_down(rig, copies, scheduler):
    other = Rig()
    with LayerwiseScheduler(other.cache, other.pool, backend=AloneBackend()) as another:
        warm_up(other, another)
        copies.hold("onload", 4)
        loads = scheduler.onload([5], [2]), another.onload([6], [3])
        assert all(map(is_alone, loads))
        left = another.group
        unite(scheduler.host_pool.domain, other.pool.domain)
        assert not any(map(is_alone, loads)) and left is not another.group and left.sections < 0
        assert sorted(scheduler.group.transfers) == sorted(load._movement.number for load in loads)
        assert not left.is_idle()
        copies.go_on()
        for load in loads:
            load.wait(WAIT_S)
    rig.expect_onload([5], [2])
    other.expect_onload([6], [3])
    rig.check()
    other.check()


def start_one(scheduler):
    return scheduler.onload([5], [2])


def not_started(scheduler, backend, start=start_one):
    before = backend.started_alone
    transfer = start(scheduler)
    assert transfer._alone is None and backend.started_alone == before
    return transfer


STARTS = {
    "urgent": lambda scheduler: scheduler.onload([5], [2], urgent=True),
    "layers": lambda scheduler: scheduler.onload([5], [2], layers=[1, 2]),
    "layerwise": lambda scheduler: scheduler.offload([5], [2], layerwise=True),
    "none": lambda scheduler: scheduler.onload([], []),
    "several": lambda scheduler: scheduler.onload([5], [2]) and scheduler.onload([6], [3]),
}


@pytest.mark.parametrize("kind", STARTS)
def test_what_is_more_than_a_plain_transfer_has_to_be_noted(scheduler, kind):
    transfer = STARTS[kind](scheduler)
    assert transfer._alone is None
    for layer in transfer.unmarked_layers:
        transfer.mark_layer_written(layer)
    transfer.wait(WAIT_S)
    scheduler.drain(WAIT_S)


def test_many_blocks_are_sorted_by_another_thread(rig, monkeypatch, scheduler, backend):
    monkeypatch.setattr(backend, "most_blocks", 3)
    not_started(scheduler, backend, lambda one: one.onload([5, 6, 7, 8], [1, 2, 3, 4])).wait(WAIT_S)
    assert settles(lambda: scheduler.resources.reserve)
    load = scheduler.onload([5, 6, 7], [1, 2, 3])
    assert load._alone is not None
    load.wait(WAIT_S)


@pytest.mark.parametrize("options", [{"record_layer_times": True}, {"checksum": True}, {"ring": True}])
def test_schedulers_that_have_more_to_note_do_so(monkeypatch, options):
    backend = AloneBackend()
    if options.pop("checksum", False):
        monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    if options.pop("ring", False):
        rig = RingRig(2)
        scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
        assert scheduler.device_cache.is_ring
        scheduler.close(WAIT_S)
        assert not scheduler._may_be_alone
        return
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend, **options) as scheduler:
        for _ in range(3):
            scheduler.offload([3], [2]).wait(WAIT_S)
        assert backend.started_alone == 0


BAD = {
    "device": ([5], [13], IndexError),
    "host": ([17], [2], IndexError),
    "negative": ([-1], [2], IndexError),
    "twice": ([5, 6], [2, 2], ValueError),
    "lengths": ([5, 6], [2], ValueError),
    "kind": ([5.0], [2], TypeError),
    "none": (None, [2], TypeError),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_ids_are_told_of_as_ever(rig, backend, scheduler, kind):
    host, device, error = BAD[kind]
    with pytest.raises(error) as alone:
        scheduler.onload(host, device)
    scheduler.resources.reserve.clear()
    with pytest.raises(error) as noted:
        scheduler.onload(host, device)
    assert str(alone.value) == str(noted.value)
    rig.check()


def test_a_closed_scheduler_or_pool_says_so(rig, backend):
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    warm_up(rig, scheduler)
    reserve = list(scheduler.resources.reserve)
    scheduler.close(WAIT_S)
    assert scheduler.resources.reserve == []
    scheduler.resources.reserve.extend(reserve)
    with pytest.raises(ClosedError):
        scheduler.onload([5], [2])
    with LayerwiseScheduler(rig.cache, rig.pool, backend=AloneBackend()) as other:
        warm_up(rig, other)
        rig.pool.close()
        with pytest.raises(ClosedError):
            other.onload([5], [2])


def test_leased_blocks_and_those_without_data(rig, copies, backend, scheduler):
    with rig.pool.lease([5]):
        not_started(scheduler, backend).wait(WAIT_S)  # others may read it too
        with pytest.raises(LeasedError):
            scheduler.offload([2], [5])
    copies.fail("onload", 1, RuntimeError("broken"))
    load = scheduler.onload([6], [3])
    with pytest.raises(TransferError, match="layer 1: broken"):
        load.wait(WAIT_S)
    copies.heal()
    with pytest.raises(TransferError, match="block 3 of the device cache holds no usable data"):
        scheduler.offload([3], [1])
    not_started(scheduler, backend, lambda one: one.onload([6], [3])).wait(WAIT_S)
    scheduler.offload([3], [1]).wait(WAIT_S)
    rig.expect_onload([5], [2])
    rig.expect_onload([6], [3])
    rig.expect_offload([3], [1])
    rig.check()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_failure_is_that_of_any_transfer(rig, copies, scheduler, when):
    copies.hold("onload", 3)
    copies.fail("onload", 3, RuntimeError("broken"))
    load = scheduler.onload([5, 3], [2, 4])
    assert is_alone(load)
    if when == "meanwhile":
        thread = threading.Timer(0.05, copies.go_on)
        thread.start()
    else:
        copies.go_on()
        assert settles(lambda: load._alone is None)
    with pytest.raises(TransferError, match="onload failed at layer 3: broken") as error:
        load.wait(WAIT_S)
    assert error.value.block_ids == [2, 4] and error.value.layer == 3
    with pytest.raises(TransferError):
        load.wait_layer(4)
    assert load.failed and load.state.value == "failed"
    stats = scheduler.stats()
    assert stats["failed"] == 1 and stats["in_flight"] == 0
    rig.expect_onload([5, 3], [2, 4], layers=range(3))
    rig.check()


def test_a_layer_of_one_that_has_failed(rig, copies, scheduler):
    copies.hold("onload", 3)
    copies.fail("onload", 3, RuntimeError("broken"))
    load = scheduler.onload([5], [2])
    thread = threading.Timer(0.05, copies.go_on)
    thread.start()
    with pytest.raises(TransferError, match="layer 3: broken"):
        load.wait_layer(3, timeout_s=WAIT_S)
    thread.join()
    rig.expect_onload([5], [2], layers=range(3))


def test_a_failure_that_nobody_asks_for_is_logged(rig, copies, scheduler, caplog):
    copies.hold("onload", 3)
    copies.fail("onload", 3, RuntimeError("broken"))
    with caplog.at_level(logging.ERROR, "paddle_kv"):
        load = scheduler.onload([5], [2])
        assert is_alone(load)
        del load
        copies.go_on()
        assert settles(lambda: "broken" in caplog.text)
    assert "nobody has waited for this transfer" in caplog.text
    scheduler.drain(WAIT_S)


def test_one_that_was_asked_for_and_is_dropped_then_is_logged_too(rig, copies, scheduler, caplog):
    copies.hold("onload", 3)
    copies.fail("onload", 3, RuntimeError("broken"))
    with caplog.at_level(logging.ERROR, "paddle_kv"):
        load = scheduler.onload([5], [2])
        assert load.state.value == "arriving"
        copies.go_on()
        assert settles(lambda: movements == {})
        del load
        assert settles(lambda: "broken" in caplog.text)


def test_cancelled(rig, copies, scheduler):
    copies.hold("onload", 1)
    load = scheduler.onload([5], [2])
    assert copies.arrived.acquire(timeout=WAIT_S)
    load.cancel()
    copies.go_on()
    with pytest.raises(CancelledError):
        load.wait(WAIT_S)
    assert scheduler.stats()["cancelled"] == 1
    rig.expect_onload([5], [2], layers=range(2))
    rig.check()


def test_close_drops_the_rest_of_it(rig, copies, backend):
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    warm_up(rig, scheduler)
    copies.hold("onload", 1)
    load = scheduler.onload([5], [2])
    assert copies.arrived.acquire(timeout=WAIT_S) and is_alone(load)
    thread = threading.Thread(target=scheduler.close, args=[WAIT_S])
    thread.start()
    assert settles(lambda: load.failed)
    copies.go_on()
    thread.join(WAIT_S)
    with pytest.raises(CancelledError):
        load.wait(WAIT_S)
    rig.expect_onload([5], [2], layers=range(2))
    rig.check()


def test_what_it_touches_lives_until_its_end(copies, backend):
    rig = Rig()
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    warm_up(rig, scheduler)
    copies.hold("onload", 4)
    assert is_alone(scheduler.onload([5], [2]))
    kept = weakref.ref(rig.cache), weakref.ref(rig.pool), weakref.ref(scheduler)
    del scheduler, rig
    gc.collect()
    assert all(one() is not None for one in kept)
    copies.go_on()
    assert are_collected(*kept)
    resources.release_abandoned()


def test_two_that_wait_for_the_same(rig, copies, scheduler):
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])
    timer = threading.Timer(0.1, copies.go_on)
    timer.start()
    in_threads(*3 * [lambda: load.wait(WAIT_S)], *2 * [lambda: load.wait_layer(4, timeout_s=WAIT_S)], timer.join)
    assert load.done() and scheduler.stats()["onload_transfers"] == 1
    rig.expect_onload([5], [2])
    rig.check()


def test_a_done_callback_that_waits_for_it(rig, copies, scheduler):
    """In the thread of the library, which has other ends to hear of."""
    copies.hold("onload", 4)
    heard = queue.SimpleQueue()
    save = scheduler.offload([3], [2])
    save.wait(WAIT_S)
    quiet(scheduler)

    def wait(_):
        load = scheduler.onload([5], [4])
        was_alone = is_alone(load)
        threading.Timer(0.05, copies.go_on).start()
        load.wait(WAIT_S)
        heard.put((was_alone, load.state.value))

    save.add_done_callback(wait)
    assert heard.get(timeout=WAIT_S) == (True, "done")
    assert "paddle_kv-keeper" not in getattr(scheduler.backend, "hearers", [])


def test_in_a_forked_child_it_is_none_of_its(rig, copies, scheduler):
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])
    assert is_alone(load)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(int(WAIT_S))
        code = 99
        with contextlib.suppress(BaseException):
            try:
                load.wait()
            except TransferError as error:
                is_as_ever = "forked" in str(error) and not scheduler.group.transfers
                code = 0 if is_as_ever and len(threading.enumerate()) == 1 else 98
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_alone(load)
    copies.go_on()
    load.wait(WAIT_S)
    rig.expect_onload([5], [2])
    rig.check()


@pytest.mark.parametrize("change_of", ["a section", "its own", "a close"])
def test_one_before_whose_step_something_has_changed_is_noted(rig, backend, scheduler, change_of):
    """As another thread does it between the look at the group and the step that starts it."""
    lease = rig.pool.lease([5])
    stack = contextlib.ExitStack()

    def asked():
        del scheduler.check_open
        if change_of == "a section":
            stack.enter_context(lease)
        elif change_of == "a close":
            scheduler.close(WAIT_S)
        else:
            others.append(scheduler.offload([2], [5]))

    others = []
    scheduler.check_open = asked
    with pytest.raises(ClosedError) if change_of == "a close" else contextlib.nullcontext():
        load = scheduler.onload([5], [2])
        assert load._alone is None
        load.wait(WAIT_S)
    for other in others:
        assert other._alone is None or other._alone.over
        other.wait(WAIT_S)
        rig.expect_offload([2], [5])
    stack.close()
    if change_of != "a close":
        rig.expect_onload([5], [2])
        assert settles(lambda: scheduler.stats()["events"] == 1)
    rig.check()


def test_threads_that_start_at_once(rig, scheduler):
    """Each in blocks of its own; a manager's questions in between."""

    def run(block):
        for _ in range(150):
            load = scheduler.onload([block], [block])
            load.wait_layer(block % 5)
            load.wait(WAIT_S)
            scheduler.offload([block], [block]).wait(WAIT_S)

    def ask():
        for _ in range(300):
            scheduler.stats()
            rig.pool.free(rig.pool.allocate(1))

    for block in range(4):
        rig.expect_onload([block], [block])
    in_threads(*(lambda block=block: run(block) for block in range(4)), ask)
    rig.check()
    stats = scheduler.stats()
    assert (stats["onload_transfers"], stats["offload_transfers"], stats["in_flight"]) == (600, 601, 0)
    assert settles(lambda: scheduler.stats()["events"] == 1)


class Asking:
    """Looks at a transfer when the garbage collector takes it."""

    def __init__(self, transfer, seen):
        self.me, self.transfer, self.seen = self, transfer, seen

    def __del__(self):
        self.seen.append(self.transfer.state.value)


@pytest.mark.parametrize("call", ["is_complete", "elapsed_ms"])
def test_a_finalizer_that_looks_at_one_in_the_section_that_ends_it(rig, copies, backend, scheduler, call):
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])
    inner, seen = getattr(backend, call), []
    gc.collect()

    def collecting(*events):
        answer = inner(*events)
        if answer and scheduler.group.inside:
            Asking(load, seen)
            gc.collect()
        return answer

    setattr(backend, call, collecting)
    copies.go_on()
    load.wait(WAIT_S)
    setattr(backend, call, inner)
    assert seen and set(seen) <= {"arriving", "done"}
    stats = scheduler.stats()
    assert stats["onload_transfers"] == 1 and stats["in_flight"] == 0 and movements == {}
    rig.expect_onload([5], [2])
    rig.check()


def test_a_finalizer_that_looks_at_one_while_it_is_written_down(rig, copies, scheduler, monkeypatch):
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])
    inner, seen = alone_module.Alone._as_movement, []

    def collecting(self):
        monkeypatch.setattr(alone_module.Alone, "_as_movement", inner)
        Asking(load, seen)
        gc.collect()
        return inner(self)

    monkeypatch.setattr(alone_module.Alone, "_as_movement", collecting)
    assert scheduler.in_flight() == [load] and seen == ["arriving"]
    copies.go_on()
    load.wait(WAIT_S)
    assert scheduler.stats()["onload_transfers"] == 1
    rig.expect_onload([5], [2])
    rig.check()


FILES = ("schedule/alone.py", "schedule/movement.py", "tracking/domain.py")


class Broken(BaseException):
    """Of a line: no exception that anybody expects."""


def broken_at(number, function):
    """Whether there was such a line of these files in it."""
    left = number

    def at_line(frame, event, given):
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                raise Broken
        return at_line

    def at_call(frame, event, given):
        return at_line if frame.f_code.co_filename.endswith(FILES) else None

    def run():
        sys.settrace(at_call)
        try:
            function()
        except Broken:
            pass
        finally:
            sys.settrace(None)

    in_threads(run)
    return left <= 0


def test_an_error_at_each_line_while_it_is_written_down(rig, copies):
    """As for want of memory: the next section does it."""
    number = 0
    for _ in range(1000):
        number += 1
        with LayerwiseScheduler(rig.cache, rig.pool, backend=AloneBackend()) as scheduler:
            warm_up(rig, scheduler)
            copies.hold("onload", 4)
            load = scheduler.onload([5, 3], [2, 4])
            is_broken = broken_at(number, lambda load=load, one=scheduler: change(one, lambda: load))
            assert load.state.value == "arriving", number
            save = scheduler.offload([2], [3])
            assert save._movement.reads_from == {load._movement}, number
            copies.go_on()
            save.wait(WAIT_S)
            load.wait(WAIT_S)
            stats = scheduler.stats()
            assert stats["onload_transfers"] == 1 and stats["in_flight"] == 0, number
            assert movements == {} and scheduler.group.transfers == {}, number
            assert change(rig.cache.domain, rig.cache.domain.is_quiet)
        rig.expect_onload([5, 3], [2, 4])
        rig.expect_offload([2], [3])
        if not is_broken and number > 60:
            break
        number -= not is_broken  # another thread has written it down
    assert 60 < number < 200
    rig.check()


def test_an_error_at_each_line_of_a_start(rig):
    """It is started, or it is not; nothing is held."""
    for number in range(1, 500):
        with LayerwiseScheduler(rig.cache, rig.pool, backend=AloneBackend()) as scheduler:
            warm_up(rig, scheduler)
            is_broken = broken_at(number, lambda one=scheduler: one.onload([5], [2]))
            scheduler.drain(WAIT_S)
            assert settles(lambda one=scheduler: one.group.alone is None), number
            scheduler.onload([6], [2]).wait(WAIT_S)
            assert movements == {}, number
            assert settles(lambda one=scheduler: one.stats()["events"] == 1), number
        rig.expect_onload([6], [2])
        if not is_broken:
            break
    assert number > 20
    rig.check()


def test_events_are_in_use_until_the_end(rig, copies, scheduler):
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])
    assert scheduler.resources._num_events == 1 + 7 and not scheduler.resources.reserve
    assert scheduler.stats()["events"] == 8
    copies.go_on()
    load.wait(WAIT_S)
    assert settles(lambda: scheduler.stats()["events"] == 1)


def test_work_on_a_stream_behind_a_layer_is_known_to_be_behind_it(rig, copies, scheduler):
    """The debug mode asks; also of one that was written down meanwhile."""
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])
    load.wait_layer(1)
    assert is_alone(load)
    movement = load._movement
    assert movement.is_ordered_before(None, 1) and not movement.is_ordered_before(None, 3)
    load.wait_layer(3)
    assert movement.is_ordered_before(None, 3) and not movement.is_ordered_before(None, 4)
    copies.go_on()
    load.wait(WAIT_S)


def test_what_is_over_is_as_any_other(rig, scheduler):
    load = scheduler.onload([5], [2])
    load.wait(WAIT_S)
    for _ in range(2):
        load.wait(WAIT_S)
        load.wait_layer(4)
        load.wait_on()
        load.wait_over(0.0)
        load.cancel()
        assert load.done() and repr(load).endswith("; done>")
    told = queue.SimpleQueue()
    load.add_done_callback(told.put)
    assert told.get(timeout=WAIT_S) is load
    with pytest.raises(IndexError):
        load.wait_layer(5)
    with pytest.raises(ValueError, match="not layerwise"):
        load.mark_layer_written(0)
    with pytest.raises(AttributeError, match="'Transfer' object has no attribute 'nonsense'"):
        _ = load.nonsense
    scheduler.close(WAIT_S)
    assert load.state.value == "done" and not BlockDomain.busy(rig.cache.domain, [2])


# ---- what is left to the next section, or comes in between ----
def test_what_somebody_has_asked_to_hear_of_is_noted(scheduler, backend):
    """Also while events for one that comes alone are there."""
    assert scheduler.finished() == []
    for _ in range(2):
        load = not_started(scheduler, backend)
        load.wait(WAIT_S)
        assert scheduler.finished() == [load]


def test_a_descriptor_tells_of_each_end(scheduler, backend):
    assert scheduler.fileno() >= 0
    load = not_started(scheduler, backend)
    load.wait(WAIT_S)
    assert scheduler.finished() == [load]


def test_layers_that_share_an_event(rig, copies, backend):
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend, layers_per_event=2) as scheduler:
        warm_up(rig, scheduler)
        assert scheduler.resources._num_events == 1 + 2 + 3
        copies.hold("onload", 4)
        load = scheduler.onload([5, 5, 3], [2, 1, 4])
        for layer in range(4):
            load.wait_layer(layer, timeout_s=WAIT_S)
        with pytest.raises(TimeoutError):
            load.wait_layer(4, timeout_s=0.01)
        assert is_alone(load) and load._alone.ordered == {None: {0, 1}}
        copies.go_on()
        load.wait_layer(4, timeout_s=WAIT_S)
        load.wait(WAIT_S)
    rig.expect_onload([5, 5, 3], [2, 1, 4])
    rig.check()


def test_a_source_may_be_named_twice(rig, backend, scheduler):
    for name, sources, targets in (("onload", [5, 5], [2, 3]), ("offload", [2, 2], [6, 7])):
        transfer = getattr(scheduler, name)(sources, targets)
        assert transfer._alone is not None
        transfer.wait(WAIT_S)
        getattr(rig, f"expect_{name}")(sources, targets)
        assert settles(lambda: scheduler.resources.reserve)
    rig.check()


def test_there_is_one_reserve(scheduler):
    for urgent in (False, True, False, True):
        scheduler.onload([5], [2], urgent=urgent).wait(WAIT_S)
        assert settles(lambda: scheduler.resources.reserve)
        assert len(scheduler.resources.reserve) == 1


@pytest.mark.parametrize("left", ["noted", "dropped", "behind"])
def test_what_was_left_to_the_next_section_comes_first(rig, backend, scheduler, left):
    done = []
    group = scheduler.group
    if left == "noted":
        group.note(lambda: done.append(group.alone))
    elif left == "dropped":
        owner = Rig(device_blocks=1, host_blocks=1)
        guard = groups.Guard.over(owner, rig.pool.domain, lambda: done.append(group.alone))
        group.host.dropped.append(guard)  # as if the owner were gone; but the keeper is not told
    else:
        keeper.behind = True
        done.append(None)
    load = not_started(scheduler, backend)
    assert done == [None]
    load.wait(WAIT_S)


def test_what_is_noted_in_the_section_that_does_not_end_it_finds_it(rig, copies, backend, scheduler):
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])
    inner, busy = backend.is_complete, []

    def noting(*events):
        scheduler.group.note(lambda: busy.append(rig.cache.domain.busy([1, 2])))
        return inner(*events)

    backend.is_complete = noting
    change(load._alone, load._alone)
    backend.is_complete = inner
    assert busy == [[2]] and not is_alone(load)
    copies.go_on()
    load.wait(WAIT_S)


def test_a_start_across_a_union(rig, backend, scheduler):
    """The group that is left may have transfers now."""
    other = Rig()

    def united():
        del scheduler.check_open
        unite(scheduler.host_pool.domain, other.pool.domain)

    scheduler.check_open = united
    not_started(scheduler, backend).wait(WAIT_S)


@pytest.mark.parametrize("call", ["wait", "wait_layer"])
def test_a_wait_out_of_the_section_that_would_end_it_is_refused(copies, backend, scheduler, call):
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])
    inner, refused = backend.is_complete, []

    def waiting(*events):
        backend.is_complete = inner
        began = time.monotonic()
        with pytest.raises(ReentryError):
            load.wait(WAIT_S) if call == "wait" else load.wait_layer(4, timeout_s=WAIT_S)
        refused.append(call)
        assert time.monotonic() - began < WAIT_S / 2
        return inner(*events)

    backend.is_complete = waiting
    change(load._alone, load._alone)
    assert refused == [call]
    copies.go_on()
    load.wait(WAIT_S)


def test_a_close_in_the_middle_of_a_wait_for_a_layer_is_refused(backend, scheduler):
    """As of a signal handler: the event is still to be used."""
    load = scheduler.onload([5], [2])
    inner, refused = backend.wait_on_stream, []

    def closing(*given):
        with pytest.raises(ReentryError):
            scheduler.close(WAIT_S)
        refused.append(given)
        inner(*given)

    backend.wait_on_stream = closing
    load.wait_layer(3)
    assert len(refused) == 1
    load.wait(WAIT_S)


class Handled(Exception):
    """Of a handler."""


def test_what_a_handler_raises_in_a_wait_for_a_layer_goes_on(copies, backend, scheduler):
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])

    def interrupted(*given):
        raise Handled

    backend.wait_on_stream = interrupted
    with pytest.raises(Handled):
        load.wait_layer(0)
    del backend.wait_on_stream
    load.wait_layer(0, timeout_s=WAIT_S)
    copies.go_on()
    load.wait(WAIT_S)


@pytest.mark.parametrize("call", ["wait", "wait_layer"])
def test_a_failure_of_which_nobody_reports(copies, backend, scheduler, call):
    copies.fail("onload", 3, RuntimeError("broken"))
    backend.watch = lambda events, report: None
    backend.hear = lambda *given: None
    load = scheduler.onload([5], [2])
    event = load._alone.held.events[-1]
    assert event.wait(WAIT_S) and is_alone(load)
    with pytest.raises(TransferError, match="layer 3: broken"):
        load.wait(WAIT_S) if call == "wait" else load.wait_layer(4)
    del backend.watch, backend.hear
    assert scheduler.stats()["failed"] == 1


def test_a_report_of_one_that_is_over_long_since(scheduler, caplog):
    load = scheduler.onload([5], [2])
    load.wait(WAIT_S)
    report = alone_module.Alone.reporter(load._alone) if load._alone else None
    if report is not None:
        report()
        keeper.call(list)
    assert load.done() and scheduler.stats()["onload_transfers"] == 1 and caplog.text == ""


# ---- other threads, in the smallest gaps ----
def at_line_of(function, text, act):
    """A trace function: calls ``act`` once, before the line of the function that has the text."""
    lines, first = inspect.getsourcelines(function)
    [number] = [first + i for i, line in enumerate(lines) if text in line]
    left = [act]

    def at_line(frame, event, given):
        if event == "line" and frame.f_lineno == number and left:
            left.pop()()
        return at_line

    def at_call(frame, event, given):
        return at_line if frame.f_code is function.__code__ else None

    return at_call


def traced(trace, function):
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(None)


def test_one_that_another_thread_writes_down_while_it_is_asked_for(copies, scheduler):
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])
    trace = at_line_of(Transfer.__getattr__, "alone = self._alone", lambda: in_threads(scheduler.stats))
    found = []
    in_threads(lambda: found.append(traced(trace, lambda: load.state.value)))
    assert found == ["arriving"] and not is_alone(load)
    copies.go_on()
    load.wait(WAIT_S)


@pytest.mark.parametrize("line", ["group.alone = None", "self.held = None", "self.scheduler.note_alone(self)"])
def test_one_that_another_thread_asks_for_while_it_ends(copies, scheduler, line):
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])
    alone, seen = load._alone, []
    copies.go_on()
    assert alone.held is None or alone.held.events[-1].wait(WAIT_S)

    def ask():
        seen.append((load.state.value, load.plan.device_ids.tolist(), load.error))

    trace = at_line_of(alone_module.Alone._look, line, lambda: in_threads(ask))
    in_threads(lambda: traced(trace, lambda: change(alone, alone)))
    assert seen in ([("done", [2], None)], [])  # none: the report was quicker
    load.wait(WAIT_S)
    assert load.done() and movements == {}
    assert settles(lambda: scheduler.stats()["events"] == 1)


def test_a_finalizer_in_the_middle_of_a_union_is_refused(rig, copies, scheduler, monkeypatch):
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])
    inner, refused = BlockDomain.read, []

    def reading(self, *given):
        monkeypatch.setattr(BlockDomain, "read", inner)
        found = inner(self, *given)
        with pytest.raises(ReentryError):
            scheduler.offload([2], [6])
        refused.append(load.state.value)
        return found

    monkeypatch.setattr(BlockDomain, "read", reading)
    unite(scheduler.host_pool.domain, Rig().pool.domain)
    assert refused == ["arriving"] and not is_alone(load)
    save = scheduler.offload([2], [6])
    assert save._movement.reads_from == {load._movement}
    copies.go_on()
    save.wait(WAIT_S)
    rig.expect_onload([5], [2])
    rig.expect_offload([2], [6])
    rig.check()


def test_a_start_out_of_whose_middle_a_handler_forks(scheduler):
    """The child goes on with it, and is told what it is."""
    result = []

    def forking():
        del scheduler.check_open
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            result.append(os.fork())

    scheduler.check_open = forking
    try:
        load = scheduler.onload([5], [2])
        code = 98
    except ForkedError:
        code = 0
    if result == [0]:
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(result[0], 0)[1]) == 0
    load.wait(WAIT_S)


@pytest.mark.parametrize(("timeout_s", "error"), [("soon", TypeError), (float("nan"), ValueError)])
def test_a_time_that_is_none(copies, scheduler, timeout_s, error):
    copies.hold("onload", 4)
    load = scheduler.onload([5], [2])
    for call in (lambda: load.wait_layer(0, timeout_s=timeout_s), lambda: load.wait(timeout_s)):
        with pytest.raises(error):
            call()
    assert is_alone(load)
    copies.go_on()
    load.wait(WAIT_S)


# ---- exceptions of signal handlers, which somebody may keep ----
def lines_of(function):
    lines, first = inspect.getsourcelines(function)
    return range(first, first + len(lines))


def raising_at(code, number):
    """A trace function: raises once, before that line of that code."""
    left = [number]

    def at_line(frame, event, given):
        if event == "line" and frame.f_lineno in left:
            left.clear()
            raise Handled
        return at_line

    return lambda frame, event, given: at_line if frame.f_code is code else None


@pytest.mark.parametrize("call", ["start", "wait", "wait_layer"])
def test_an_exception_at_any_line_keeps_no_events(rig, copies, backend, call):
    """Whoever keeps the exception may close: nothing is about to be used any more."""
    function = alone_module.start if call == "start" else getattr(alone_module.Alone, call)
    function = inspect.unwrap(function)
    num_raised = 0
    for number in lines_of(function):
        scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=type(backend)())
        warm_up(rig, scheduler)
        load = None if call == "start" else scheduler.onload([5], [2])
        calls = {
            "start": lambda one=scheduler: one.onload([5], [2]),
            "wait": lambda one=load: one.wait(WAIT_S),
            "wait_layer": lambda one=load: one.wait_layer(4, timeout_s=WAIT_S),
        }
        kept = None
        try:
            traced(raising_at(function.__code__, number), calls[call])
        except Handled as error:
            kept = error
            num_raised += 1
        is_at_the_edge = function is not alone_module.start and kept is not None and holds_a_line(kept, function)
        if is_at_the_edge:  # of the statement that takes the events, or lets go of them
            kept = None
        scheduler.close(WAIT_S)
        del kept
    assert num_raised > 3


def holds_a_line(error, function):
    frames = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is function.__code__:
            frames.append(trace.tb_frame.f_locals.get("held"))
        trace = trace.tb_next
    return any(frames)


@pytest.mark.parametrize("call", ["start", "wait"])
def test_a_handler_that_closes_in_the_middle(rig, backend, call):
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    warm_up(rig, scheduler)
    if call == "start":
        inner = backend.start_alone

        def closing(*given):
            scheduler.close(WAIT_S)
            return inner(*given)

        backend.start_alone = closing
        with pytest.raises(ClosedError):
            scheduler.onload([5], [2])
        return
    load = scheduler.onload([5], [2])
    group = scheduler.group
    inner_check = group.check_outside

    def closing_first():
        del group.check_outside
        scheduler.close(WAIT_S)
        inner_check()

    group.check_outside = closing_first
    with contextlib.suppress(CancelledError):
        load.wait(WAIT_S)
    assert scheduler._released
