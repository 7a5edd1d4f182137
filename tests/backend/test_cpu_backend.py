"""The CPU backend against its protocol: streams keep order, events are passed once, waits time out."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

from paddle_kv import BackendError, DeviceCache, HostPool
from paddle_kv.backend import binding, create
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.backend.work import LayerWork, TransferPlan
from tests.schedule.rig import SHORT_S, WAIT_S, Rig, make_spec


@pytest.fixture
def backend():
    made = CpuBackend()
    yield made
    made.close()


@pytest.fixture
def stream(backend):
    made = backend.create_stream()
    yield made
    backend.destroy_stream(made)


def work_of(backend, plan, waits=None):
    groups = range(plan.num_groups)
    records = [backend.create_event() for _ in groups]
    return LayerWork(plan, 0, plan.num_groups, waits or [[] for _ in groups], backend.create_event(), records)


def test_a_stream_keeps_its_order(backend, stream):
    seen = []
    for number in range(200):
        stream.submit(lambda number=number: seen.append(number))
    event = backend.create_event()
    backend.record(event, stream)
    assert backend.wait(event, WAIT_S)
    assert seen == list(range(200))


def test_a_stream_is_a_thread_that_a_debugger_shows_by_its_name_and_no_exit_waits_for(backend, stream):
    seen = []
    stream.submit(lambda: seen.append(threading.current_thread()))
    event = backend.create_event()
    backend.record(event, stream)
    assert backend.wait(event, WAIT_S)
    [thread] = seen
    assert thread.daemon
    assert thread.name == str(stream)
    assert thread.name.startswith("paddle_kv-stream-")


def test_compute_has_no_stream_and_is_done_at_once(backend):
    assert backend.compute_stream("anything") is None
    event = backend.create_event()
    backend.record(event, None)
    assert backend.is_complete(event)


def test_a_stream_waits_for_an_event_of_another(backend, stream):
    other, gate, event, behind = backend.create_stream(), threading.Event(), *(backend.create_event() for _ in range(2))
    other.submit(lambda: gate.wait(WAIT_S))
    backend.record(event, other)
    backend.wait_on_stream(stream, event, None)
    backend.record(behind, stream)
    assert not backend.wait(behind, SHORT_S)
    gate.set()
    assert backend.wait(behind, WAIT_S)
    assert backend.elapsed_ms(event, behind) >= 0
    backend.destroy_stream(other)


def test_waits_time_out(backend):
    event = backend.create_event()
    started = time.monotonic()
    assert not backend.wait(event, SHORT_S)
    assert SHORT_S <= time.monotonic() - started < WAIT_S
    with pytest.raises(TimeoutError):
        backend.wait_on_stream(None, event, SHORT_S)
    assert not backend.is_complete(event)


def test_layers_in_order_with_an_event_behind_each_group(backend, stream):
    rig = Rig()
    bound = backend.bind(rig.cache, rig.pool)
    work = work_of(backend, TransferPlan("onload", (1, 6), (9, 0), 5, 2))
    backend.copy_layers(bound, work, stream)
    assert all(backend.wait(event, WAIT_S) for event in (work.start, *work.records))
    times = [event.time_s for event in (work.start, *work.records)]
    assert times == sorted(times)
    last = work_of(backend, TransferPlan("onload", (1, 6), (9, 0), 5, 5))  # one group
    backend.copy_layers(bound, last, stream)
    assert backend.wait(last.records[0], WAIT_S)
    assert not stream.copies, "what is over cannot be cancelled"
    rig.expect_onload([9, 0], [1, 6])
    rig.check()
    backend.unbind(bound)


def test_each_group_waits_for_its_own_events(backend, stream):
    rig = Rig()
    bound = backend.bind(rig.cache, rig.pool)
    gates = [backend.create_event() for _ in range(3)]
    work = work_of(backend, TransferPlan("onload", (1, 6), (9, 0), 5, 2), [[gate] for gate in gates])
    backend.copy_layers(bound, work, stream)
    assert not backend.wait(work.start, SHORT_S)
    for gate, event, layers in zip(gates, work.records, ([0, 1], [2, 3], [4]), strict=True):
        assert not backend.wait(event, SHORT_S)
        rig.check()
        gate.set()
        assert backend.wait(event, WAIT_S)
        rig.expect_onload([9, 0], [1, 6], layers=layers)
        rig.check()
    backend.unbind(bound)


def test_a_failure_is_carried_by_its_group_and_all_behind_it(backend, stream, monkeypatch):
    rig = Rig()
    bound = backend.bind(rig.cache, rig.pool)
    copy = binding.copy

    def fail_at_2(number, plan, layers):
        if 2 in layers:
            raise ValueError("x")
        copy(number, plan, layers)

    monkeypatch.setattr(binding, "copy", fail_at_2)
    work = work_of(backend, TransferPlan("onload", (1, 6), (9, 0), 5, 1))
    backend.copy_layers(bound, work, stream)
    assert backend.wait(work.records[1], WAIT_S)
    for event in work.records[2:]:
        with pytest.raises(ValueError, match=r"x"):
            backend.wait(event, WAIT_S)
        with pytest.raises(ValueError, match=r"x"):
            backend.is_complete(event)
    rig.expect_onload([9, 0], [1, 6], layers=[0, 1])
    rig.check()
    after = work_of(backend, TransferPlan("offload", (3,), (4,), 5, 5))  # the stream lives
    monkeypatch.setattr(binding, "copy", copy)
    backend.copy_layers(bound, after, stream)
    assert backend.wait(after.records[0], WAIT_S)
    rig.expect_offload([3], [4])
    rig.check()
    backend.unbind(bound)


def test_a_cancel_drops_all_but_the_group_that_has_begun(backend, stream, monkeypatch):
    rig = Rig()
    bound = backend.bind(rig.cache, rig.pool)
    copy, begun, gate = binding.copy, threading.Event(), threading.Event()

    def held(*arguments):
        begun.set()
        assert gate.wait(WAIT_S)
        copy(*arguments)

    monkeypatch.setattr(binding, "copy", held)
    work = work_of(backend, TransferPlan("onload", (1, 6), (9, 0), 5, 1))
    backend.copy_layers(bound, work, stream)
    assert begun.wait(WAIT_S)
    assert backend.cancel(stream, work.number + 1) is None
    assert backend.cancel(stream, work.number) == 1
    gate.set()
    assert backend.wait(work.records[0], WAIT_S)
    for event in work.records[1:]:
        with pytest.raises(BackendError, match="the transfer was cancelled before layer 1 was copied"):
            backend.wait(event, WAIT_S)
    assert backend.cancel(stream, work.number) is None
    rig.expect_onload([9, 0], [1, 6], layers=[0])
    rig.check()
    backend.unbind(bound)


def test_a_cancel_names_the_first_layer_of_all_that_it_drops(backend, stream):
    gate = threading.Event()
    stream.submit(lambda: gate.wait(WAIT_S))
    plan = TransferPlan("offload", (1,), (1,), 5, 1)
    works = [  # layers that were marked out of their order
        LayerWork(plan, group, group + 1, [[]], backend.create_event(), [backend.create_event()], number=7)
        for group in (3, 1, 4)
    ]
    for work in works:
        backend.copy_layers(0, work, stream)
    assert backend.cancel(stream, 7) == 1
    gate.set()
    for work in works:
        with pytest.raises(BackendError, match="cancelled"):
            backend.wait(work.records[0], WAIT_S)


def test_what_events_say(backend):
    start, end = backend.create_event(), backend.create_event()
    assert backend.is_complete(start, end) is False
    for event in (start, end):
        event.set()
    assert backend.is_complete(start, end) is True
    start.time_s, end.time_s = 1.0, 3.5
    assert backend.elapsed_ms(start, end) == 2500.0


def test_copies_of_two_streams_overlap(backend, stream, monkeypatch):
    """Both have to be inside of a copy at one time."""
    both = threading.Barrier(2, timeout=WAIT_S)
    monkeypatch.setattr(binding, "copy", lambda *_: both.wait())
    other = backend.create_stream()
    works = [work_of(backend, TransferPlan("onload", (1,), (1,), 1, 1)) for _ in range(2)]
    for work, where in zip(works, (stream, other), strict=True):
        backend.copy_layers(0, work, where)
    for work in works:
        assert backend.wait(work.records[0], WAIT_S)
    backend.destroy_stream(other)


def test_a_copy_lets_other_python_threads_run(backend, stream, monkeypatch):
    """The compiled copy runs without the interpreter's lock. Python never switches threads by itself here, so that this
    thread has several turns in the midst of a copy only if the copy leaves it the lock."""
    spec = make_spec(num_layers=1, num_kv_heads=8, head_dim=128, v_head_dim=None, block_size=64, extra={})
    cache, pool = DeviceCache(spec, 400, "cpu"), HostPool(spec, 400)
    bound = backend.bind(cache, pool)
    ids = tuple(np.random.default_rng(0).permutation(400).tolist())
    copy, inside = binding.copy, False

    def marked(*arguments):
        nonlocal inside
        inside = True
        copy(*arguments)
        inside = False

    monkeypatch.setattr(binding, "copy", marked)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for _ in range(100):  # on a loaded machine this thread may sleep through a whole copy
            turns, work = 0, work_of(backend, TransferPlan("onload", ids, ids[::-1], 1, 1))
            backend.copy_layers(bound, work, stream)
            while not backend.wait(work.records[0], 1e-4):
                turns += inside
            if turns >= 5:
                break
    finally:
        sys.setswitchinterval(interval)
    assert turns >= 5, "the interpreter was blocked"
    backend.unbind(bound)


def test_events_of_a_released_binding(backend, stream):
    rig = Rig()
    bound = backend.bind(rig.cache, rig.pool)
    backend.unbind(bound)
    work = work_of(backend, TransferPlan("onload", (1,), (1,), 5, 5))
    backend.copy_layers(bound, work, stream)
    with pytest.raises(ValueError, match=r"plan = .* is not registered"):
        backend.wait(work.records[0], WAIT_S)
    rig.check()


def test_bind_refuses_pools_that_do_not_fit(backend):
    cache = DeviceCache(make_spec(), 3, "cpu")
    with pytest.raises(ValueError, match=r"both must have the same spec"):
        backend.bind(cache, HostPool(make_spec(num_layers=2), 3))


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_create_by_name(name):
    assert isinstance(create(name, None), CpuBackend)


def test_create_passes_a_backend_on(backend):
    assert create(backend, None) is backend
    assert create(backend, 0) is backend


def test_the_cpu_backend_wants_a_cache_on_the_cpu(backend):
    class OnGpu:
        device_id = 3

    with pytest.raises(ValueError, match=r"the device cache is on GPU 3; the cpu backend needs it on the CPU"):
        backend.bind(OnGpu(), None)
