"""The thread in which state changes for the main thread, one of the test's own."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from paddle_kv.tracking import keeper as keeper_module
from paddle_kv.tracking.keeper import Deadline, Keeper, Waiter, _Job
from tests.schedule.rig import SHORT_S, WAIT_S

NAME = "paddle_kv-keeper"


@pytest.fixture
def keeper():
    made = Keeper()
    yield made
    made.end()


def name() -> str:
    return threading.current_thread().name


def elsewhere(function):
    """Its result in a thread that is not the main one."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), name="another")
    thread.start()
    thread.join(WAIT_S)
    return found[0]


def test_the_main_thread_gets_what_the_function_returns_or_raises(keeper):
    assert keeper.call(name) == NAME
    assert keeper.call(threading.current_thread).daemon
    with pytest.raises(ZeroDivisionError):
        keeper.call(lambda: 1 / 0)
    with pytest.raises(SystemExit):  # whatever it is, the thread lives
        keeper.call(lambda: (_ for _ in ()).throw(SystemExit(3)))
    assert keeper.call(name) == NAME


def test_other_threads_run_it_themselves(keeper):
    done = []
    assert elsewhere(lambda: keeper.call(name)) == "another"
    elsewhere(lambda: keeper.soon(lambda: done.append(name())))
    assert done == ["another"]
    elsewhere(lambda: keeper.post(lambda: done.append(name())))
    keeper.call(list)
    assert done == ["another", NAME]


def test_nobody_waits_for_what_is_to_be_done_soon_and_the_order_is_kept(caplog, keeper):
    gate, done = threading.Event(), []

    def held():
        assert gate.wait(WAIT_S)
        done.append("first")
        raise RuntimeError("of nobody")

    keeper.soon(held)
    keeper.post(lambda: done.append("second"))
    assert done == []
    gate.set()
    keeper.call(lambda: done.append("third"))
    assert done == ["first", "second", "third"]
    assert [str(record.exc_info[1]) for record in caplog.records] == ["of nobody"]


def test_a_job_that_waits_lets_the_others_run(keeper):
    waiter, done = Waiter(), []
    keeper.post(lambda: done.append(keeper.park(waiter, WAIT_S)))
    keeper.post(waiter.release)
    never = Waiter()
    keeper.post(lambda: done.append(keeper.park(never, 0.0)))
    keeper.call(list)
    assert done == [True, False]


def test_a_job_that_waits_is_released_by_a_thread_without_a_job(keeper):
    waiter = Waiter()
    timer = threading.Timer(SHORT_S, waiter.release)
    timer.start()
    assert keeper.call(lambda: keeper.park(waiter, None))


def test_at_its_end_it_ends_the_others_and_functions_run_where_they_are_called():
    keeper, done = Keeper(), []
    keeper.at_end.append(lambda: done.append("ended"))
    keeper.call(list)
    thread = keeper._thread
    keeper.end()
    assert not thread.is_alive()
    assert done == ["ended"]
    assert keeper.call(name) == "MainThread"
    keeper.soon(lambda: done.append(name()))
    assert done == ["ended", "MainThread"]


def test_one_that_was_never_used_ends_too():
    keeper, done = Keeper(), []
    keeper.at_end.append(lambda: done.append("ended"))
    keeper.end()
    assert done == ["ended"]


@pytest.mark.parametrize("how", ["call", "call_here"])
def test_what_the_main_thread_waits_for_no_more_is_done_before_what_it_calls_next(keeper, how):
    keeper.undisturbed = lambda function: function()
    going_on, wanted, done, senders = threading.Event(), threading.Event(), [], []

    def long():
        assert going_on.wait(WAIT_S)
        time.sleep(SHORT_S)
        done.append("first")

    def interrupt(*_):
        if wanted.is_set():
            wanted.clear()
            raise Noted

    def send():
        # Again and again: one that comes just before the main thread falls asleep does not wake it. And to that thread:
        # another one would take it after a stop of the process.
        while wanted.is_set():
            time.sleep(SHORT_S)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    def park(waiter, timeout_s):
        wanted.set()
        senders.append(threading.Thread(target=send, daemon=True))
        senders[-1].start()  # from here on: it comes while the main thread waits
        return Keeper.park(keeper, waiter, timeout_s)

    before = signal.signal(signal.SIGALRM, interrupt)
    keeper.park = park
    try:
        for first in (True, False):  # the second one comes while it waits for what it has left
            with pytest.raises(Noted):
                keeper.call(long) if first else keeper.call_here(lambda: done.append("never"))
    finally:
        del keeper.park
        wanted.clear()
        for sender in senders:
            sender.join(WAIT_S)
        signal.signal(signal.SIGALRM, before)
    assert len(senders) == 2
    going_on.set()
    getattr(keeper, how)(lambda: done.append("second"))
    assert done == ["first", "second"]
    keeper._put = pytest.fail
    assert keeper.call_here(name) == "MainThread"  # and waits for nobody any more


def test_there_is_one_thread_however_many_were_started(keeper):
    names = {keeper.call(threading.get_ident)}
    for _ in range(3):
        keeper._start()
    names |= {keeper.call(threading.get_ident) for _ in range(10)}
    assert len(names) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_forked_child_begins_anew(keeper):
    thread = keeper.call(threading.current_thread)
    jobs = keeper._jobs
    keeper.at_end.append(pytest.fail)
    keeper.after_fork_in_child()
    assert keeper._jobs is not jobs
    assert keeper.at_end == []
    assert keeper.call(threading.current_thread) is not thread
    keeper.end()
    jobs.put(list)  # to the first thread, which a child would not have
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_thread_that_forks_is_the_main_one_in_the_child():
    """Python runs the handlers of signals there."""

    def status() -> int:
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            os._exit(0 if keeper_module.keeper.defers and threading.current_thread() is threading.main_thread() else 1)
        return os.waitpid(pid, 0)[1]

    assert not elsewhere(lambda: keeper_module.keeper.defers)
    assert elsewhere(status) == 0


def test_the_end_of_a_time_out():
    assert Deadline(None).left_s() is None
    assert not Deadline(None).over
    assert Deadline(0).over and Deadline(-1.0).left_s() == 0.0
    far = Deadline(1000.0)
    assert not far.over and 900.0 < far.left_s() <= 1000.0


def test_a_waiter_sleeps_until_it_is_released_or_its_time_is_over():
    waiter = Waiter()
    assert not waiter.sleep(0.0)
    assert not waiter.sleep(-1.0)
    waiter.release()
    assert waiter.sleep(1e300)
    waiter.release()
    assert waiter.sleep(None)


def test_a_time_out_is_over_at_its_end(monkeypatch):
    clock_s = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock_s[0])
    deadline = Deadline(5)
    found = []
    for clock_s[0] in (14.5, 15.0, 15.5):
        found.append((deadline.left_s(), deadline.over))
    assert found == [(0.5, False), (0.0, True), (0.0, True)]


def test_a_waiter_sleeps_no_longer_than_it_is_told():
    waiter, told = Waiter(), []
    waiter._lock = SimpleNamespace(acquire=lambda timeout: told.append(timeout))
    for timeout_s in (-1.0, 0.0, 0.5, 1e300):
        waiter.sleep(timeout_s)
    assert told == [0.0, 0.0, 0.5, threading.TIMEOUT_MAX]


def test_callbacks_come_one_after_the_other_also_where_one_waits(caplog, keeper):
    heard, waiter, over = [], Waiter(), threading.Event()

    def waits():
        heard.append("begins")
        keeper.park(waiter, WAIT_S)
        heard.append("ends")

    for callback in (waits, lambda: heard.append("second"), lambda: heard.append("third")):
        keeper.tell(callback)
    keeper.post(waiter.release)
    keeper.tell(over.set)
    assert over.wait(WAIT_S)
    keeper.call(list)  # behind whatever was posted for them
    assert heard == ["begins", "ends", "second", "third"]
    assert caplog.records == []


def test_what_is_put_is_done_by_a_keeper_that_did_nothing_before(keeper):
    done = threading.Event()
    keeper.put(done.set)
    assert done.wait(WAIT_S)


class Noted(Exception):
    pass


def test_a_job_keeps_nothing_of_its_caller():
    """Whoever waits goes on while the job is on its way out: it must hold nothing by then."""
    owner, seen = Noted(), []
    alive = weakref.ref(owner)
    job = _Job(functools.partial(id, owner))
    del owner
    job.over = SimpleNamespace(release=lambda: seen.append(alive()))
    job()
    assert seen == [None]


def test_an_error_that_was_told_is_not_kept_by_itself():
    def fails():
        raise Noted

    gc.disable()
    try:
        job = _Job(fails)
        job()
        try:
            job.take()
        except Noted as error:
            alive = weakref.ref(error)
        assert alive() is None
    finally:
        gc.enable()
