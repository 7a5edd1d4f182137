"""A wait with a backend that lets the waiting thread hear of the end itself, in place of the keeper."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import warnings
import weakref

import pytest

from paddle_kv import CancelledError, LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule import settling
from paddle_kv.schedule.movement import Follower
from paddle_kv.tracking import group
from paddle_kv.tracking.keeper import keeper
from tests.schedule.rig import SHORT_S, WAIT_S


class Watched:
    """What the backend is asked for; ``reported`` or heard of, in the end."""

    def __init__(self, report, event):
        self._report = report
        self._event = weakref.ref(event)
        self._lock = threading.Lock()
        self._hearer = None
        self.is_over = False
        self.begun = threading.Event()

    def is_of(self, events):
        return self._event() in events

    def tell(self):
        with self._lock:
            self.is_over = True
            if self._hearer is not None:
                self._hearer.set()
                return None
        return self._let_go()()

    def _let_go(self):
        """It keeps the events."""
        report, self._report = self._report, None
        return report

    def hear(self, timeout_s, told, report):
        with self._lock:
            if self.is_over or self._hearer is not None:
                return
            self._hearer = threading.Event()
        self.begun.set()
        is_told = self._hearer.wait(timeout_s)
        with self._lock:
            is_told |= self.is_over
            self._hearer = None
        if is_told:
            self._let_go()
            try:
                told()
            except BaseException:
                report()
                raise


class Hearing(CpuBackend):
    def __init__(self):
        self.watched = []
        self.reported = []
        self.hearers = []

    def watch(self, events, report):
        def noted():
            self.reported.append(watched)
            return report()

        watched = Watched(noted, events[0])
        self.watched.append(watched)
        super().watch(events, watched.tell)
        return watched

    def hear(self, watched, timeout_s, told, report):
        def noted():
            self.reported.append(watched)
            report()

        self.hearers.append(threading.current_thread().name)
        watched.hear(timeout_s, told, noted)


class Bringing(Hearing):
    """Is asked for it along with the copies, where all of them are submitted at once."""

    def copy_and_watch(self, binding, work, stream, report):
        self.copy_layers(binding, work, stream)
        return super().watch(work.records[-1:], report)

    def watch(self, events, report):
        assert not any(one.is_of(events) for one in self.watched)  # twice
        return super().watch(events, report)


@pytest.fixture(params=[Hearing, Bringing])
def backend(request):
    return request.param()


@pytest.fixture
def scheduler(rig, backend):
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as made:
        yield made


def when_somebody_hears(watched, function):
    def run():
        assert watched.begun.wait(WAIT_S)
        time.sleep(SHORT_S)
        function()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_whoever_waits_ends_the_transfer_and_all_others_hear_of_it(rig, copies, backend, scheduler):
    copies.hold("onload", 4)
    load = scheduler.onload([3], [2])
    told, ended = queue.SimpleQueue(), []
    load.add_done_callback(told.put)
    other = threading.Thread(target=lambda: (backend.watched[0].begun.wait(WAIT_S), load.wait(WAIT_S), ended.append(1)))
    other.start()
    thread = when_somebody_hears(backend.watched[0], copies.go_on)
    load.wait(WAIT_S)
    assert load.state.value == "done"
    assert told.get(timeout=WAIT_S) is load
    other.join(WAIT_S)
    thread.join(WAIT_S)
    assert ended == [1]
    assert backend.reported == []  # to nobody else
    assert scheduler.stats()["in_flight"] == 0
    rig.expect_onload([3], [2])
    rig.check()


def test_what_is_over_is_not_waited_for(backend, scheduler):
    save = scheduler.offload([3], [2])
    assert save._movement.last_event.wait(WAIT_S)
    save.wait(WAIT_S)
    save.wait(WAIT_S)
    assert backend.hearers == []


def test_what_nobody_has_reported_yet_is_found_out_by_asking(backend, scheduler, monkeypatch):
    monkeypatch.setattr(Watched, "tell", lambda self: None)
    load = scheduler.onload([3], [2])
    assert load._movement.last_event.wait(WAIT_S)
    load.wait(WAIT_S)
    assert backend.hearers == []
    backend.watched[0]._let_go()


def test_a_forked_child_waits_for_nothing(copies, backend, scheduler):
    copies.hold("onload", 4)
    load = scheduler.onload([3], [2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(int(WAIT_S))
        try:
            load.wait()
        except TransferError:
            os._exit(len(backend.hearers))
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    copies.go_on()
    load.wait(WAIT_S)


def test_a_handler_that_closes_when_a_wait_was_told_has_nothing_to_wait_for(rig, copies, backend):
    """It runs before the section, which would let go of the events."""
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    copies.hold("onload", 4)
    load = scheduler.onload([3], [2])
    hear = backend.hear

    def closing(told):
        scheduler.close(WAIT_S)
        told()

    backend.hear = lambda watched, timeout_s, told, report: hear(watched, timeout_s, lambda: closing(told), report)
    thread = when_somebody_hears(backend.watched[0], copies.go_on)
    load.wait(WAIT_S)
    thread.join(WAIT_S)
    assert scheduler._released


def test_while_layers_are_not_marked_there_is_nothing_to_hear_of(rig, backend, scheduler):
    save = scheduler.offload([3], [2], layerwise=True)
    with pytest.raises(TimeoutError, match="mark_layer_written was not called"):
        save.wait(SHORT_S)
    assert backend.hearers == backend.watched == []
    for layer in range(5):
        save.mark_layer_written(layer)
    save.wait(WAIT_S)
    rig.expect_offload([3], [2])
    rig.check()


@pytest.mark.parametrize("timeout_s", [0.0, SHORT_S])
def test_behind_a_time_out_the_keeper_hears_of_the_end(copies, backend, scheduler, timeout_s):
    copies.hold("onload", 4)
    load = scheduler.onload([3], [2])
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="not over"):
        load.wait(timeout_s)
    assert timeout_s <= time.monotonic() - began < WAIT_S
    over = queue.SimpleQueue()
    load.add_done_callback(over.put)
    copies.go_on()
    assert over.get(timeout=WAIT_S) is load
    assert backend.reported == backend.watched


def test_the_time_is_that_of_the_whole_call(copies, backend, scheduler, monkeypatch):
    """What was spent in hearing is gone."""
    copies.hold("onload", 4)
    load = scheduler.onload([3], [2])
    backend.hear = lambda watched, timeout_s, told, report: time.sleep(timeout_s / 2)  # somebody else is told
    park, left_s = keeper.park, []
    monkeypatch.setattr(keeper, "park", lambda waiter, timeout_s: left_s.append(timeout_s) or park(waiter, timeout_s))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="not over"):
        load.wait(10 * SHORT_S)
    assert time.monotonic() - began >= 10 * SHORT_S
    assert [one for one in left_s if one is not None] and all(one is None or one <= 5 * SHORT_S for one in left_s)
    monkeypatch.undo()
    copies.go_on()


def test_a_failure_that_a_waiter_hears_of(rig, copies, backend, scheduler):
    copies.hold("onload", 1)
    copies.fail("onload", 1, RuntimeError("broken"))
    load = scheduler.onload([3], [2])
    thread = when_somebody_hears(backend.watched[0], copies.go_on)
    with pytest.raises(TransferError, match="layer 1: broken"):
        load.wait(WAIT_S)
    thread.join(WAIT_S)
    assert backend.hearers and backend.reported == []
    rig.expect_onload([3], [2], layers=[0])
    rig.check()


def test_one_that_is_cancelled_while_somebody_hears(rig, copies, backend, scheduler):
    copies.hold("onload", 1)
    load = scheduler.onload([3], [2])

    def cancel():
        load.cancel()
        copies.go_on()

    thread = when_somebody_hears(backend.watched[0], cancel)
    with pytest.raises(CancelledError):
        load.wait(WAIT_S)
    thread.join(WAIT_S)
    assert scheduler.stats()["in_flight"] == 0
    rig.expect_onload([3], [2], layers=[0, 1])
    rig.check()


def test_whoever_is_interrupted_when_he_hears_leaves_it_to_the_keeper(copies, backend, scheduler, monkeypatch):
    """As a signal handler does that raises before the section begins."""
    copies.hold("onload", 4)
    load = scheduler.onload([3], [2])
    over, me = queue.SimpleQueue(), threading.current_thread()
    load.add_done_callback(over.put)
    hear = backend.hear

    def interrupted():
        raise KeyboardInterrupt

    backend.hear = lambda watched, timeout_s, told, report: hear(watched, timeout_s, interrupted, report)
    thread = when_somebody_hears(backend.watched[0], copies.go_on)
    with pytest.raises(KeyboardInterrupt):
        load.wait(WAIT_S)
    assert over.get(timeout=WAIT_S) is load
    assert me is threading.main_thread() and backend.reported == backend.watched
    thread.join(WAIT_S)


def test_the_keeper_itself_goes_on_hearing_of_others(copies, backend, scheduler):
    """A done callback that waits: it must not sleep where only one transfer is told of."""
    heard = queue.SimpleQueue()

    def wait_for_the_load(_):
        copies.go_on("onload")
        load.wait(WAIT_S)
        heard.put(load.state.value)

    save, load = copies.hold_a_save_and_a_load(scheduler)
    save.add_done_callback(wait_for_the_load)
    copies.go_on("offload")
    assert heard.get(timeout=WAIT_S) == "done"
    assert "paddle_kv-keeper" not in backend.hearers


def test_what_a_follower_still_holds_is_waited_for_behind_the_device(copies, backend, scheduler):
    class Holder(Follower):
        is_held = True

        def holds(self, movement):
            return self.is_held

    holder = Holder()
    copies.hold("onload", 4)
    load = scheduler.onload([3], [2])
    load._movement.followers.append(holder)
    thread = when_somebody_hears(backend.watched[0], copies.go_on)
    with pytest.raises(TimeoutError):
        load.wait(20 * SHORT_S)
    thread.join(WAIT_S)
    holder.is_held = False
    group.change(load._movement, lambda: settling.look(load._movement))
    load.wait(WAIT_S)


@pytest.mark.parametrize("options", [{"layerwise": True}, {"record_layer_times": True}, {"part": True}, {}])
def test_only_a_whole_transfer_is_watched_by_its_submission(rig, options):
    """Of several submissions, or several events, not one of them tells that all of it is over."""
    backend, calls = Bringing(), []
    for name in ("copy_and_watch", "watch"):
        inner = getattr(backend, name)
        setattr(backend, name, lambda *given, name=name, inner=inner: (calls.append(name), inner(*given))[1])
    times = options.get("record_layer_times", False)
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend, record_layer_times=times) as scheduler:
        if "part" in options:
            scheduler.onload([3], [2], layers=[1, 2]).wait(WAIT_S)
        else:
            save = scheduler.offload([3], [2], layerwise=options.get("layerwise", False))
            for layer in range(5) if "layerwise" in options else ():
                save.mark_layer_written(layer)
            save.wait(WAIT_S)
    assert calls == (["watch"] if options else ["copy_and_watch"])
