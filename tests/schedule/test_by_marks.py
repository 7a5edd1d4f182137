"""Layerwise saves that the backend submits itself as their layers are marked. What the library's queue does for them on
a GPU is done here by the simulator's recorder, around the CPU backend; everything else is the scheduler's own."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from typing import Any

import pytest

from paddle_kv import CancelledError, DeviceCache, LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule import layer_ends, marking, settling
from paddle_kv.testing.simulator import Log, RecordingBackend, check
from paddle_kv.tracking.group import MemoryGroup, change
from paddle_kv.tracking.keeper import keeper
from tests.schedule.rig import SHORT_S, WAIT_S, in_threads, pool_memory


class Backend(RecordingBackend):
    """``taken``: numbers of the saves that were left to it; ``submissions``: of sections, and by marks."""

    def __init__(self) -> None:
        super().__init__(CpuBackend(), Log())
        self.taken: list[int] = []
        self.submissions: list[tuple[int, int]] = []
        self.before_mark: Any = None
        self.no_memory = False

    def submit_by_marks(self, binding, work, starts, stream):
        assert (work.first_group, work.end_group) == (0, work.plan.num_groups) == (0, len(starts))
        self.taken.append(work.number)
        return super().submit_by_marks(binding, work, starts, stream)

    def mark_layer(self, number, layer, stream):
        if self.before_mark is not None:
            self.before_mark(layer)
        return super().mark_layer(number, layer, stream)

    def copy_layers(self, binding, work, stream):
        if self.no_memory and work.number in self.taken and work.number in self._saves:
            raise MemoryError
        super().copy_layers(binding, work, stream)
        self.submissions.append((work.first_group, work.end_group))


@pytest.fixture
def backend():
    return Backend()


@pytest.fixture
def scheduler(rig, backend):
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as made:
        yield made
    assert backend._saves == {}, "nothing waits for marks behind the end"
    assert check(backend.log.entries) == []


def until(condition):
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def mark_all(save, *, but=()):
    for layer in range(save.num_layers):
        if layer not in but:
            save.mark_layer_written(layer)


def test_marks_submit_and_no_section_does(rig, backend, scheduler, monkeypatch):
    save = scheduler.offload([3, 1], [2, 7], layerwise=True)
    assert len(backend.taken) == 1
    posted: list[Any] = []
    monkeypatch.setattr(type(keeper), "post", lambda self, function: posted.append(function))
    mark_all(save, but=[0])
    assert posted == [] and len(backend.submissions) == save.num_layers - 1
    save.mark_layer_written(0)  # of the last one the keeper hears: it watches for the end
    assert len(posted) == 1
    monkeypatch.undo()
    save.wait(timeout_s=WAIT_S)
    assert backend._saves == {} and save._movement.by_marks is None
    assert backend.submissions == [(layer, layer + 1) for layer in (*range(1, save.num_layers), 0)]
    rig.expect_offload([3, 1], [2, 7])
    rig.check()


def test_groups_of_layers(rig, backend):
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend, layers_per_event=2) as scheduler:
        save = scheduler.offload([3, 1], [2, 7], layerwise=True)
        for layer in (3, 0, 4, 2):
            save.mark_layer_written(layer)
        assert backend.submissions == [(2, 3), (1, 2)]
        save.mark_layer_written(1)
        save.wait(timeout_s=WAIT_S)
    rig.expect_offload([3, 1], [2, 7])
    rig.check()


def test_who_waits_for_a_layer_hears_of_its_mark(rig, scheduler):
    save = scheduler.offload([3], [2], layerwise=True)
    waited = threading.Thread(target=save.wait_layer, args=(1,), kwargs={"timeout_s": WAIT_S})
    waited.start()
    with pytest.raises(TimeoutError, match="mark_layer_written was not called for layer 1"):
        save.wait_layer(1, timeout_s=SHORT_S)
    until(lambda: save._movement.layer_waiters)  # and nobody looks at the save meanwhile
    save.mark_layer_written(1)
    waited.join(WAIT_S)
    assert not waited.is_alive()
    save.wait_layer(1, timeout_s=0)  # the same thread has marked it
    mark_all(save, but=[1])
    save.wait_on(timeout_s=WAIT_S)


def test_a_load_behind_it_comes_layer_by_layer(rig, backend, scheduler):
    save = scheduler.offload([3], [2], layerwise=True)
    load = scheduler.onload([2], [5])
    with pytest.raises(TimeoutError):
        load.wait_layer(0, timeout_s=SHORT_S)
    save.mark_layer_written(0)
    load.wait_layer(0, timeout_s=WAIT_S)
    assert not load.done()
    mark_all(save, but=[0])
    load.wait(timeout_s=WAIT_S)
    assert rig.cache.tensor("key", 1)[5].numpy().tobytes() == rig.cache.tensor("key", 1)[3].numpy().tobytes()


def test_what_stands_behind_others_is_submitted_by_sections(rig, backend, scheduler):
    first = scheduler.offload([3], [2], layerwise=True)
    behind = scheduler.offload([4], [2], layerwise=True)  # the same host block
    assert backend.taken == [first._movement.number]
    mark_all(behind)
    mark_all(first)
    behind.wait(timeout_s=WAIT_S)
    rig.expect_offload([4], [2])
    rig.check()


@pytest.mark.parametrize("marked", [(), (1,), (0, 1, 2)])
def test_a_cancel_drops_what_is_not_marked(rig, backend, scheduler, marked):
    save = scheduler.offload([3], [2], layerwise=True)
    for layer in marked:
        save.mark_layer_written(layer)
        save.wait_layer(layer, timeout_s=WAIT_S)
    save.cancel()
    with pytest.raises(CancelledError) as caught:
        save.wait(timeout_s=WAIT_S)
    assert caught.value.layer == min(set(range(save.num_layers)) - set(marked))
    with pytest.raises(CancelledError):
        save.mark_layer_written(4)
    assert len(backend.submissions) == len(marked)


def test_a_cancel_behind_the_last_mark_drops_nothing(rig, backend, scheduler):
    save = scheduler.offload([3], [2], layerwise=True)
    mark_all(save)
    save.wait_on(timeout_s=WAIT_S)  # what has not begun a cancel drops too
    save.cancel()
    save.wait(timeout_s=WAIT_S)
    rig.expect_offload([3], [2])
    rig.check()


@pytest.mark.parametrize("how", ["drop", "close"])
def test_unmarked_layers_end_with_the_handle_and_with_the_scheduler(rig, backend, how):
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        save = scheduler.offload([3], [2], layerwise=True)
        save.mark_layer_written(0)
        if how == "drop":
            del save
            scheduler.drain(WAIT_S)
            assert backend._saves == {}
    assert backend._saves == {} and backend.submissions == [(0, 1)]


def test_a_failure_of_what_it_reads_ends_it(rig, copies, backend, scheduler):
    """It stands behind a load that was submitted as a whole on the same stream; so both directions have one here."""
    scheduler.resources.streams["offload"] = scheduler.resources.streams["onload"]
    copies.fail("onload", 1, RuntimeError("broken"))
    copies.hold("onload", 0)
    load = scheduler.onload([2], [3], urgent=False)
    save = scheduler.offload([3], [6], layerwise=True)
    assert backend.taken == [save._movement.number]
    copies.go_on()
    with pytest.raises(TransferError, match="broken"):
        load.wait(timeout_s=WAIT_S)
    with pytest.raises(TransferError, match="it reads blocks of a transfer that failed"):
        save.mark_layer_written(0)
    assert backend._saves == {} and len(backend.submissions) == 1


def test_without_memory_sections_go_on(rig, backend, scheduler):
    save = scheduler.offload([3, 1], [2, 7], layerwise=True)
    save.mark_layer_written(1)
    backend.no_memory = True
    save.mark_layer_written(0)
    until(lambda: save._movement.by_marks is None)  # from here on without a call of the backend for each mark
    mark_all(save, but=[0, 1])
    save.wait(timeout_s=WAIT_S)
    rig.expect_offload([3, 1], [2, 7])
    rig.check()


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_handler_that_raises_out_of_a_mark(rig, backend, scheduler, when):
    """Before, the layer is not marked; behind the backend's call it is, and counts as marked soon."""
    save = scheduler.offload([3], [2], layerwise=True)
    inner = Backend.mark_layer

    def mark(number, layer, stream):
        if when == "behind":
            inner(backend, number, layer, stream)
        backend.mark_layer = lambda *given: inner(backend, *given)
        raise KeyboardInterrupt

    backend.mark_layer = mark
    with pytest.raises(KeyboardInterrupt):
        save.mark_layer_written(0)
    if when == "before":
        save.mark_layer_written(0)
    else:
        until(lambda: 0 not in save.unmarked_layers)
    with pytest.raises(ValueError, match="layer = 0 is marked as written already"):
        save.mark_layer_written(0)
    mark_all(save, but=[0])
    save.wait(timeout_s=WAIT_S)
    assert sorted(group for first, end in backend.submissions for group in range(first, end)) == [0, 1, 2, 3, 4]
    rig.expect_offload([3], [2])
    rig.check()


@pytest.mark.parametrize("then", ["wait", "cancel"])
def test_a_handler_that_raises_out_of_the_last_mark(rig, backend, scheduler, then):
    """All of it is submitted, and the mark has told nobody."""
    save = scheduler.offload([3], [2], layerwise=True)
    mark_all(save, but=[4])
    inner = backend.mark_layer

    def mark(*given):
        inner(*given)
        raise KeyboardInterrupt

    backend.mark_layer = mark
    waiting = threading.Thread(target=save.wait, kwargs={"timeout_s": WAIT_S})
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        save.mark_layer_written(4)
    rig.expect_offload([3], [2])
    until(lambda: pool_memory(rig.pool)["flag"][4, 2].tobytes() == rig.host["flag"][4, 2].tobytes())
    getattr(save, then)()
    save.wait(timeout_s=WAIT_S)
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    rig.check()


def test_marks_wake_nobody_who_waits_for_the_end(rig, backend, scheduler, monkeypatch):
    save = scheduler.offload([3], [2], layerwise=True)
    waiting = threading.Thread(target=save.wait, kwargs={"timeout_s": WAIT_S})
    waiting.start()
    until(lambda: save._movement.waiters)
    posted: list[Any] = []
    monkeypatch.setattr(type(keeper), "post", lambda self, function: posted.append(function))
    mark_all(save, but=[4])
    assert posted == []
    monkeypatch.undo()
    save.mark_layer_written(4)
    waiting.join(WAIT_S)
    assert not waiting.is_alive()


class Stop(BaseException):
    """Of a signal handler."""


def interrupt_behind_the_next_mark(backend):
    def mark(*given):
        Backend.mark_layer(backend, *given)
        del backend.mark_layer
        raise Stop

    backend.mark_layer = mark


def test_a_mark_is_tried_again_while_a_section_takes_the_first_one(rig, copies, backend, scheduler):
    """The backend has given the group away, and the section has not noted it yet."""
    save = scheduler.offload([3], [2], layerwise=True)
    mark_all(save, but=[4])
    taken, go_on = threading.Event(), threading.Event()

    def take(*given):
        found = Backend.take_enqueued(backend, *given)
        if 4 in found:
            taken.set()
            go_on.wait(WAIT_S)
        return found

    interrupt_behind_the_next_mark(backend)
    backend.take_enqueued = take
    with pytest.raises(Stop):
        save.mark_layer_written(4)
    assert taken.wait(WAIT_S)
    again = threading.Thread(target=save.mark_layer_written, args=(4,))
    again.start()
    until(lambda: 4 not in save.unmarked_layers)
    go_on.set()
    again.join(WAIT_S)
    save.wait(timeout_s=WAIT_S)
    assert backend.submissions == [(layer, layer + 1) for layer in range(5)]
    rig.expect_offload([3], [2])
    rig.check()


@pytest.mark.parametrize("when", ["behind the backend's call", "behind the note"])
def test_a_section_takes_a_mark_before_it_is_interrupted(rig, backend, scheduler, monkeypatch, when):
    """To the caller it is marked then, though an exception came."""
    save = scheduler.offload([3], [2], layerwise=True)

    def take_and_stop():
        in_threads(lambda: change(save._movement, lambda: settling.look(save._movement)))
        assert save._movement.num_unsubmitted == 4
        raise Stop

    def mark(*given):
        Backend.mark_layer(backend, *given)
        del backend.mark_layer
        take_and_stop()

    inner = MemoryGroup.note

    def note(self, function):
        monkeypatch.undo()
        inner(self, function)
        take_and_stop()

    if when == "behind the note":
        monkeypatch.setattr(MemoryGroup, "note", note)
    else:
        backend.mark_layer = mark
    with pytest.raises(Stop):
        save.mark_layer_written(0)
    change(save._movement, lambda: None)  # what is handed over is done
    if when == "behind the note":
        assert save.unmarked_layers == [1, 2, 3, 4]
    with contextlib.suppress(ValueError):
        save.mark_layer_written(0)
    assert save.unmarked_layers == [1, 2, 3, 4]
    mark_all(save, but=[0])
    save.wait(timeout_s=WAIT_S)
    assert backend.submissions == [(layer, layer + 1) for layer in range(5)]
    rig.expect_offload([3], [2])
    rig.check()


def test_a_mark_is_handed_over_twice_before_its_turn(rig, backend, scheduler, monkeypatch):
    """Behind another save sections submit it: an exception came to the caller behind the first time, and its group
    waits for its turn."""
    first = scheduler.offload([3], [2], layerwise=True)
    behind = scheduler.offload([4], [2], layerwise=True)
    go_on, inside = threading.Event(), threading.Event()

    def hold():
        inside.set()
        go_on.wait(WAIT_S)

    holding = threading.Thread(target=change, args=(first._movement, hold))
    holding.start()
    assert inside.wait(WAIT_S)
    inner = marking.change_soon

    def hand_over(*given):
        monkeypatch.undo()
        inner(*given)
        raise Stop

    monkeypatch.setattr(marking, "change_soon", hand_over)
    with pytest.raises(Stop):
        behind.mark_layer_written(0)
    behind.mark_layer_written(0)
    go_on.set()
    holding.join(WAIT_S)
    mark_all(behind, but=[0])
    mark_all(first)
    behind.wait(timeout_s=WAIT_S)
    submitted = sorted(group for one, end in backend.submissions for group in range(one, end))
    assert submitted == sorted([*range(5), *range(5)])
    rig.expect_offload([4], [2])
    rig.check()


def test_gates_take_no_save_of_which_a_mark_was_enqueued(rig, backend, scheduler):
    gates = scheduler.gates(timeout_s=WAIT_S)
    save = scheduler.offload([3], [2], layerwise=True)
    interrupt_behind_the_next_mark(backend)
    with pytest.raises(Stop):
        save.mark_layer_written(0)
    with pytest.raises(ValueError, match="a layer is marked already"):
        gates.arm(saves=[save])
    assert save.unmarked_layers == [1, 2, 3, 4]
    mark_all(save, but=[0])
    save.wait(timeout_s=WAIT_S)
    assert backend.submissions.count((0, 1)) == 1


def test_marks_of_a_replay_are_submitted_by_sections(rig, backend, scheduler):
    gates = scheduler.gates(timeout_s=WAIT_S)
    save = scheduler.offload([3], [2], layerwise=True)
    gates.arm(saves=[save])
    assert backend._saves == {}
    for layer in range(save.num_layers):
        gates.mark(layer)
    save.wait(timeout_s=WAIT_S)
    rig.expect_offload([3], [2])
    rig.check()


@pytest.mark.parametrize("memory", [True, False])
def test_a_handler_that_raises_behind_the_note_of_a_mark(rig, backend, scheduler, monkeypatch, memory):
    """Also where the backend had no memory for it."""
    save = scheduler.offload([3], [2], layerwise=True)
    backend.no_memory = not memory
    inner = MemoryGroup.note

    def note(self, function):
        inner(self, function)
        monkeypatch.undo()
        backend.no_memory = False
        raise Stop

    monkeypatch.setattr(MemoryGroup, "note", note)
    with pytest.raises(Stop):
        save.mark_layer_written(0)
    mark_all(save, but=[0])
    save.wait(timeout_s=WAIT_S)
    rig.expect_offload([3], [2])
    rig.check()


def test_a_mark_that_is_interrupted_before_its_note_while_the_marks_end(rig, backend, scheduler, monkeypatch):
    """Another thread's mark has no memory meanwhile."""
    save = scheduler.offload([3], [2], layerwise=True)
    waits = backend._saves[save._movement.number].work.waits

    def mark_next():
        backend.no_memory = True
        save.mark_layer_written(1)
        backend.no_memory = False

    def mark(number, layer, stream):
        del backend.mark_layer
        backend.record(waits[layer][0], stream)
        in_threads(mark_next)
        return True  # it is recorded, and not enqueued since the marks have ended

    inner = MemoryGroup.note

    def note(self, function):
        if threading.current_thread() is threading.main_thread():
            monkeypatch.undo()
            raise Stop
        inner(self, function)

    backend.mark_layer = mark
    monkeypatch.setattr(MemoryGroup, "note", note)
    with pytest.raises(Stop):
        save.mark_layer_written(0)
    mark_all(save, but=[0, 1])
    save.wait(timeout_s=WAIT_S)
    rig.expect_offload([3], [2])
    rig.check()


def give_the_group_up_before_its_next_note(rig, monkeypatch):
    """The pool gets another scheduler in that moment, the only one of the list that is returned."""
    inner, made = MemoryGroup.note, []

    def note(self, function):
        monkeypatch.undo()
        other = DeviceCache(rig.spec, 4, "cpu")
        in_threads(lambda: made.append(LayerwiseScheduler(other, rig.pool)))
        inner(self, function)

    monkeypatch.setattr(MemoryGroup, "note", note)
    return made


def test_a_mark_is_noted_while_its_pool_gets_another_scheduler(rig, backend, scheduler, monkeypatch):
    """The group that it is noted in is given up in this moment."""
    save = scheduler.offload([3], [2], layerwise=True)
    over = threading.Event()
    save.add_done_callback(lambda _: over.set())
    made = give_the_group_up_before_its_next_note(rig, monkeypatch)
    mark_all(save)
    assert over.wait(WAIT_S)
    made[0].close(WAIT_S)


def test_whoever_waits_looks_at_a_mark_of_a_group_that_was_given_up(rig, backend, scheduler, monkeypatch):
    """The note lies where no section comes by."""
    save = scheduler.offload([3], [2], layerwise=True)
    made = give_the_group_up_before_its_next_note(rig, monkeypatch)
    save.mark_layer_written(0)
    save.wait_layer(0, timeout_s=WAIT_S)
    mark_all(save, but=[0])
    save.wait(timeout_s=WAIT_S)
    made[0].close(WAIT_S)


def test_layer_times_and_ends(rig, backend):
    """The same is told of them as of what sections submit."""
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend, record_layer_times=True) as scheduler:
        ended: list[int] = []
        plan = scheduler.plan("offload", [3], [2])
        start = functools.partial(layer_ends.start, scheduler, plan, None, ended.extend, lambda _: None)
        save = change(scheduler, start)
        assert backend.taken
        for layer in (1, 0):
            save.mark_layer_written(layer)
            until(lambda layer=layer: layer in ended)
        mark_all(save, but=[0, 1])
        save.wait(timeout_s=WAIT_S)
        until(lambda: len(ended) == 5)
        assert [len(times) for times in save.layer_times_ms] == [2] * 5
        begins, ends = zip(*save.layer_times_ms, strict=True)
        assert begins[1] <= ends[1] <= begins[0] <= ends[0] <= begins[4] <= ends[4]
        assert save.elapsed_ms == pytest.approx(ends[4] - begins[1])


def test_threads_mark_while_another_cancels(rig, backend, scheduler):
    for round_ in range(30):
        save = scheduler.offload([3, 1], [2, 7], layerwise=True)

        def mark(first, save=save):
            for layer in range(first, save.num_layers, 2):
                try:
                    save.mark_layer_written(layer)
                except CancelledError:
                    return

        def cancel(save=save, round_=round_):
            if round_ % 3:
                save.cancel()

        in_threads(lambda: mark(0), lambda: mark(1), cancel)
        with contextlib.suppress(CancelledError, TransferError):
            save.wait(timeout_s=WAIT_S)
        assert save.done() and rig.pool.domain.busy([2, 7]) == []


@pytest.mark.parametrize("how", ["raises", "says no"])
def test_a_refused_offer_is_submitted_by_sections(rig, backend, scheduler, monkeypatch, how):
    def refuse(*_):
        if how == "raises":
            raise RuntimeError("refused")
        return False

    monkeypatch.setattr(backend, "submit_by_marks", refuse)
    save = scheduler.offload([3], [2], layerwise=True)
    assert save._movement.by_marks is None
    mark_all(save)
    save.wait(timeout_s=WAIT_S)
    rig.expect_offload([3], [2])
    rig.check()


def test_a_save_of_nothing_is_not_offered(backend, scheduler):
    scheduler.offload([], [], layerwise=True).wait(timeout_s=WAIT_S)
    assert backend.taken == []


def test_saves_of_a_ring_are_submitted_by_sections(rig, backend):
    """A layer waits for what was in its buffer before."""
    ring = DeviceCache(rig.spec, 4, "cpu", layer_buffers=2)
    with LayerwiseScheduler(ring, rig.pool, backend=backend) as scheduler:
        save = scheduler.offload([3], [2], layerwise=True)
        mark_all(save)
        save.wait(timeout_s=WAIT_S)
    assert backend.taken == [] and len(backend.submissions) == rig.spec.num_layers


def test_a_forked_child_leaves_it_to_the_parent(rig, backend, scheduler):
    save = scheduler.offload([3], [2], layerwise=True)
    save.mark_layer_written(0)
    child = os.fork()
    if child == 0:
        signal.alarm(int(WAIT_S))
        try:
            save.mark_layer_written(1)
        except TransferError:
            os._exit(7 if len(backend.submissions) == 1 else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    mark_all(save, but=[0])
    save.wait(timeout_s=WAIT_S)
    rig.expect_offload([3], [2])
    rig.check()
