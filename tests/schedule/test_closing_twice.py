"""A scheduler that is closed while others are at it, and what it tells of its time."""

from __future__ import annotations

import functools
import gc
import threading
import time

import pytest

from paddle_kv import ClosedError, LayerwiseScheduler
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule.resources import Events, abandoned
from paddle_kv.tracking.group import change
from tests.schedule.rig import SHORT_S, WAIT_S


def test_a_second_closer_returns_when_the_first_one_has_closed(rig):
    at_it, go_on, returned = threading.Event(), threading.Event(), threading.Event()

    class Slow(CpuBackend):
        def destroy_stream(self, stream):
            at_it.set()
            assert go_on.wait(WAIT_S)
            super().destroy_stream(stream)

    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=Slow())
    first = threading.Thread(target=scheduler.close)
    second = threading.Thread(target=lambda: (scheduler.close(), returned.set()))
    first.start()
    assert at_it.wait(WAIT_S)
    second.start()
    assert not returned.wait(4 * SHORT_S)
    go_on.set()
    assert returned.wait(WAIT_S)
    for thread in (first, second):
        thread.join(WAIT_S)


def test_close_waits_for_a_thread_that_asks_for_an_event(rig):
    at_it, go_on = threading.Event(), threading.Event()

    class Slow(CpuBackend):
        def user_event(self, stream):
            at_it.set()
            assert go_on.wait(WAIT_S)
            return super().user_event(stream)

    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=Slow())
    asking = threading.Thread(target=scheduler.record_event, args=("offload",))
    asking.start()
    assert at_it.wait(WAIT_S)
    with pytest.raises(TimeoutError, match=r"other threads were still about to wait after timeout_s = 0.05") as caught:
        scheduler.close(SHORT_S)
    scheduler.offload([1], [2]).wait(WAIT_S)
    del caught
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    closing.join(SHORT_S)
    assert closing.is_alive()
    go_on.set()
    for thread in (asking, closing):
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_call_that_failed_holds_no_closer_up_while_its_exception_is_kept(rig):
    at_it, go_on, kept = threading.Event(), threading.Event(), []

    class Lost(CpuBackend):
        def user_event(self, stream):
            at_it.set()
            assert go_on.wait(WAIT_S)
            raise RuntimeError("lost")

    def ask() -> None:
        try:
            scheduler.record_event("offload")
        except RuntimeError as error:
            kept.append(error)  # and by it the frames of the call

    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=Lost())
    asking, closing = threading.Thread(target=ask), threading.Thread(target=scheduler.close)
    asking.start()
    assert at_it.wait(WAIT_S)
    closing.start()
    closing.join(SHORT_S)
    assert closing.is_alive()
    go_on.set()
    for thread in (asking, closing):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(kept) == 1


def test_a_close_that_failed_holds_no_other_up_while_its_exception_is_kept(rig):
    at_it, go_on, kept = threading.Event(), threading.Event(), []

    class Lost(CpuBackend):
        def unbind(self, binding):
            super().unbind(binding)
            at_it.set()
            assert go_on.wait(WAIT_S)
            raise RuntimeError("lost")

    def close() -> None:
        try:
            scheduler.close()
        except RuntimeError as error:
            kept.append(error)

    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=Lost())
    first, second = threading.Thread(target=close), threading.Thread(target=scheduler.close)
    first.start()
    assert at_it.wait(WAIT_S)
    second.start()
    second.join(SHORT_S)
    assert second.is_alive()
    go_on.set()
    for thread in (first, second):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(kept) == 1


def test_close_waits_for_whoever_holds_an_event(rig):
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    held = change(scheduler, lambda: scheduler.resources.take_events(1))
    with pytest.raises(TimeoutError, match="other threads were still about to wait"):
        scheduler.close(SHORT_S)
    del held
    scheduler.close(WAIT_S)


def test_nothing_is_taken_while_one_closes_also_if_another_has_given_up(rig):
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    held = change(scheduler, lambda: scheduler.resources.take_events(1))
    closing = threading.Thread(target=scheduler.close, args=(WAIT_S,))
    closing.start()
    deadline_s = time.monotonic() + WAIT_S
    while not scheduler._closers and time.monotonic() < deadline_s:
        time.sleep(0.001)
    with pytest.raises(TimeoutError):
        scheduler.close(SHORT_S)
    for call in (lambda: scheduler.onload([1], [2]), lambda: scheduler.offload([1], [2]), scheduler.fileno):
        with pytest.raises(RuntimeError, match=r"the scheduler is closed"):
            call()
    assert closing.is_alive()
    del held
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_a_scheduler_whose_close_has_given_up_takes_calls_again(rig):
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    held = change(scheduler, lambda: scheduler.resources.take_events(1))
    with pytest.raises(TimeoutError):
        scheduler.close(SHORT_S)
    scheduler.onload([1], [2]).wait(WAIT_S)
    del held
    scheduler.close(WAIT_S)


def test_events_that_no_memory_was_left_for_are_given_back_without_an_error(rig):
    """Whoever took them is gone before it is said which they are."""
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        resources = scheduler.resources
        owner = Events([], set(), resources._given_back)
        tie = type(next(iter(resources._ties)))(owner, resources._given_back.append)
        resources._ties.add(tie)
        del owner
        assert change(scheduler, lambda: resources.num_events) == 1


def test_what_a_closed_scheduler_held_is_not_given_back_again(rig):
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    scheduler.close()
    gc.collect()  # of other tests
    before = len(abandoned)
    del scheduler
    gc.collect()
    assert len(abandoned) == before


def test_what_was_dropped_without_close_is_given_back_by_the_next_close(rig):
    ended = []

    class Counting(CpuBackend):
        def destroy_stream(self, stream):
            ended.append(stream)
            super().destroy_stream(stream)

    other = LayerwiseScheduler(rig.cache, rig.pool)
    dropped = LayerwiseScheduler(rig.cache, rig.pool, backend=Counting())
    del dropped
    gc.collect()
    assert ended == []
    other.close()
    assert len(ended) == 2


def test_the_time_of_a_scheduler_is_that_since_it_was_made(rig, monkeypatch):
    clock_s = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock_s[0])
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        clock_s[0] = 7.5
        assert scheduler.now_ms() == 2500.0


def test_times_of_layers_are_told_where_they_were_asked_for(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4], [1])
        load.wait(WAIT_S)
        assert load.elapsed_ms >= 0.0
        assert load.layer_times_ms == []


def test_a_mark_that_failed_holds_no_closer_up_while_its_exception_is_kept(rig):
    class Lost(CpuBackend):
        is_lost = False

        def record(self, event, stream):
            if self.is_lost:
                raise RuntimeError("lost")
            super().record(event, stream)

    backend = Lost()
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    save = scheduler.offload([1], [2], layerwise=True)
    backend.is_lost = True
    with pytest.raises(RuntimeError, match="lost") as kept:
        save.mark_layer_written(0)
    assert 0 in save.unmarked_layers
    save.cancel()
    scheduler.close(WAIT_S)
    assert kept.value.__traceback__ is not None


def test_what_was_planned_before_a_scheduler_is_closed_is_not_started_behind_that(rig):
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    plan, compute = scheduler.plan("onload", [1], [2]), scheduler.compute_stream(None)
    scheduler.close(WAIT_S)
    with pytest.raises(ClosedError):
        change(scheduler, functools.partial(scheduler.start_here, plan, compute, False, None))
    with pytest.raises(ClosedError):
        scheduler.plan("onload", [1], [2])
