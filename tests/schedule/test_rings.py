"""Device caches whose layers share buffers in turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import paddle
import pytest

from paddle_kv import CancelledError, DeviceCache, LayerwiseScheduler, TransferError
from paddle_kv.integrations import ForwardPass
from paddle_kv.schedule import rings
from paddle_kv.schedule.movement import Movement
from paddle_kv.tracking.memories import check_access
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, make_spec
from tests.schedule.ring_rig import SPEC, RingRig, chunks

STEPS = [(0, 3), (0, 5), (1, 6), (1, 6), (2, 9), (0, 11)]


@pytest.fixture
def made(copies: Copies) -> Iterator[Callable[..., RingRig]]:
    rigs: list[RingRig] = []

    def make(*arguments: Any, **options: Any) -> RingRig:
        rigs.append(RingRig(*arguments, **options))
        return rigs[-1]

    yield make
    copies.go_on()
    copies.heal()
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("layer_buffers", [2, 3, 4, 6, 7])
def test_a_prompt_in_chunks_is_read_and_saved_bit_for_bit(made: Callable[..., RingRig], layer_buffers: int) -> None:
    rig = made(layer_buffers)
    chunks(rig, STEPS)
    rig.check()
    assert rig.cache.is_ring == (layer_buffers < 7)
    assert rig.cache.layer_buffers == layer_buffers


def test_all_tensors_of_a_ring_are_its_buffers() -> None:
    cache = DeviceCache(SPEC, 3, "cpu", layer_buffers=3)
    for name in SPEC.tensor_names:
        pointers = [cache.pointer(name, layer) for layer in range(7)]
        assert len(set(pointers)) == 3 and pointers == [pointers[layer % 3] for layer in range(7)]
        assert pointers == [cache.tensor(name, layer).data_ptr() for layer in range(7)]
        with pytest.raises(IndexError):
            cache.tensor(name, 7)


def test_a_ring_over_tensors_of_the_user(made: Callable[..., RingRig]) -> None:
    spec = make_spec(num_layers=5, extra={}, dtype="float32")
    names = {name: [paddle.zeros([4, *spec.block_shape(name)]) for _ in range(2)] for name in spec.tensor_names}
    cache = DeviceCache.adopt(spec, names, layer_buffers=2)
    assert cache.tensor("key", 3) is names["key"][1]
    assert (cache.layer_buffers, cache.num_blocks) == (2, 4)
    with pytest.raises(ValueError, match="has 2 layers; 3 are expected"):
        DeviceCache.adopt(spec, names, layer_buffers=3)
    with pytest.raises(ValueError, match="other blocks or layers"):
        DeviceCache.adopt(make_spec(num_layers=2, extra={}, dtype="float32"), names)  # the same memory, and no ring


@pytest.mark.parametrize("layer_buffers", [1, 0, -1, 8, True, 2.0, "2"])
def test_how_many_buffers_there_may_be(layer_buffers: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="layer_buffers"):
        DeviceCache(SPEC, 3, "cpu", layer_buffers=layer_buffers)


def test_what_a_ring_cannot_do_is_refused(made: Callable[..., RingRig]) -> None:
    rig = made(3)
    scheduler = rig.scheduler
    with pytest.raises(ValueError, match="layerwise = False must be True"):
        scheduler.offload([1], [1])
    with pytest.raises(ValueError, match="layers must be None"):
        scheduler.onload([1], [1], layers=[2])
    with pytest.raises(ValueError, match="layers_per_event = 2 must be 1"):
        LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=2)
    with pytest.raises(ValueError, match="each layer has its own memory"):
        scheduler.gates(timeout_s=1.0)
    with pytest.raises(ValueError, match="layer_buffers = 3 of 7 layers cannot be shared"):
        DeviceCache(SPEC, 3, "cpu", layer_buffers=3, shared=True)
    with pytest.raises(ValueError, match="a ring cannot be shared"):
        rig.cache.export()
    assert not scheduler.in_flight()
    rig.check()


def test_marks_of_what_was_read(made: Callable[..., RingRig]) -> None:
    rig = made(3)
    load = rig.scheduler.onload([4], [1])
    assert (load.unmarked_layers, load.layer_buffers, load.layerwise) == ([0, 1, 2, 3], 3, False)
    with pytest.raises(TimeoutError, match="mark_layer_read was not called for layer 0"):
        load.wait_layer(3, timeout_s=SHORT_S)
    with pytest.raises(TimeoutError, match="mark_layer_read was not called for layers 0, 1, 2, 3"):
        load.wait(SHORT_S)
    load.wait_layer(0, timeout_s=WAIT_S)
    load.mark_layer_read(0)
    with pytest.raises(ValueError, match="layer = 0 is marked as read already"):
        load.mark_layer_read(0)
    with pytest.raises(IndexError):
        load.mark_layer_read(7)
    with pytest.raises(ValueError, match="not layerwise"):
        load.mark_layer_written(0)
    for layer in range(1, 7):
        load.wait_layer(layer, timeout_s=WAIT_S)
        load.mark_layer_read(layer)
    load.wait(WAIT_S)
    assert load.unmarked_layers == []
    save = rig.scheduler.offload([1], [3], layerwise=True)
    assert save.unmarked_layers == list(range(7))
    with pytest.raises(ValueError, match="mark_layer_read is for onloads into a device cache with layer_buffers"):
        save.mark_layer_read(0)
    save.cancel()
    with LayerwiseScheduler(DeviceCache(SPEC, 3, "cpu"), rig.pool) as scheduler:
        plain = scheduler.onload([4], [1])
        assert plain.layer_buffers == 7
        with pytest.raises(ValueError, match="mark_layer_read is for onloads into a device cache with layer_buffers"):
            plain.mark_layer_read(0)


def test_a_layer_comes_when_the_one_before_it_was_read_and_not_sooner(
    made: Callable[..., RingRig], copies: Copies
) -> None:
    rig = made(2)
    load = rig.scheduler.onload([4, 2], [1, 0])
    load.wait_layer(1, timeout_s=WAIT_S)
    assert [layer for _, _, layer in copies.done] == [0, 1]
    load.mark_layer_read(1)  # in any order: the layer behind it comes before the one behind layer 0
    load.wait_layer(3, timeout_s=WAIT_S)
    assert [layer for _, _, layer in copies.done] == [0, 1, 3]
    load.mark_layer_read(0)
    load.wait_layer(2, timeout_s=WAIT_S)
    assert [layer for _, _, layer in copies.done] == [0, 1, 3, 2]
    load.cancel()
    with pytest.raises(CancelledError):
        load.mark_layer_read(2)
    with pytest.raises(CancelledError):
        load.mark_layer_read(6)


def test_a_load_that_nobody_marks_any_more_ends(made: Callable[..., RingRig]) -> None:
    rig = made(2)
    load = rig.scheduler.onload([4], [1])
    movement = load._movement
    del load
    gc.collect()
    rig.scheduler.drain(WAIT_S)
    assert movement.state.value == "cancelled"
    again = rig.scheduler.onload([4], [1])
    with pytest.raises(KeyError), ForwardPass([again], timeout_s=WAIT_S) as layers:
        with layers.layer(0):
            pass
        raise KeyError
    again.wait_over(WAIT_S)
    assert again.state.value == "cancelled"
    rig.cache.mark_rewritten([1])  # the passes that come do
    chunks(rig, STEPS)
    rig.check()


def test_a_pass_that_fails_is_run_again(made: Callable[..., RingRig], copies: Copies) -> None:
    rig = made(3)
    chunks(rig, STEPS[:2])
    copies.fail("onload", 4, OSError("lost"))
    reads, writes = rig.table(range(5)), {11: 5}
    expected = {name: array.copy() for name, array in rig.host.items()}
    with pytest.raises(TransferError, match="onload failed at layer 4"):
        rig.run(reads, writes)
    copies.heal()
    rig.scheduler.drain(WAIT_S)
    for name, array in expected.items():
        array[:, 5] = rig.host[name][:, 5]  # of the block that was being saved nobody knows
    rig.host = expected
    assert rig.pool.domain.poisoned([5]) == [5]
    rig.run(reads, writes)
    chunks(rig, STEPS)
    rig.check()


def test_a_save_that_fails_does_not_stop_the_pass(made: Callable[..., RingRig], copies: Copies) -> None:
    rig = made(2)
    chunks(rig, [(0, 4)])
    copies.fail("offload", 1, OSError("full"))
    rig.run(rig.table(range(4)), {11: 4})
    rig.run(*2 * [{0: 3}])  # a block that is loaded and saved
    copies.heal()
    rig.scheduler.drain(WAIT_S)
    assert not rig.wrong
    assert rig.pool.domain.poisoned(range(17)) == [3, 4]


def test_several_requests_share_the_ring(made: Callable[..., RingRig]) -> None:
    rig = made(3)
    chunks(rig, [(0, 4)])
    loads = [rig.scheduler.onload([0, 1], [2, 5]), rig.scheduler.onload([3], [7])]
    saves = [rig.scheduler.offload([9], [8], layerwise=True), rig.scheduler.offload([7], [9], layerwise=True)]
    with ForwardPass(loads, saves, timeout_s=WAIT_S) as layers:
        for layer in range(7):
            with layers.layer(layer):
                rig.compute(layer, {2: 0, 5: 1, 7: 3}, {9: 8})
                for name in SPEC.tensor_names:
                    rig.host[name][layer, 9] = rig.host[name][layer, 3]
    rig.touched |= {2, 5, 7, 9}
    rig.check()


def test_a_buffer_is_free_when_its_own_layers_were_saved(made: Callable[..., RingRig], copies: Copies) -> None:
    """The last layer of six lies in the other one."""
    rig = made(2, make_spec(num_layers=6))
    save = rig.scheduler.offload([1], [9], layerwise=True)
    copies.hold("offload", 5)
    for layer in range(6):
        save.mark_layer_written(layer)
    load = rig.scheduler.onload([4], [1])
    load.wait_layer(0, timeout_s=WAIT_S)
    with pytest.raises(TimeoutError):
        load.wait_layer(1, timeout_s=SHORT_S)
    copies.go_on()
    load.wait_layer(1, timeout_s=WAIT_S)
    load.cancel()


@pytest.mark.parametrize("held", [0, 1, 3])
def test_a_layer_comes_when_what_lay_in_its_buffer_was_saved(
    made: Callable[..., RingRig], copies: Copies, held: int
) -> None:
    rig = made(2)
    copies.hold("offload", held)
    load = rig.scheduler.onload([4], [1])
    save = rig.scheduler.offload([1], [9], layerwise=True)
    for layer in range(held + 1):
        load.wait_layer(layer, timeout_s=WAIT_S)
        load.mark_layer_read(layer)
        save.mark_layer_written(layer)  # behind the mark that asks for it
    with pytest.raises(TimeoutError):
        load.wait_layer(held + 2, timeout_s=SHORT_S)
    copies.go_on()
    load.wait_layer(held + 2, timeout_s=WAIT_S)
    save.cancel()
    load.cancel()


def test_a_save_that_was_cancelled_is_not_waited_for(made: Callable[..., RingRig]) -> None:
    """Nor are the events that it had: they may be another transfer's by then."""
    rig = made(2)
    load = rig.scheduler.onload([4], [1])
    save = rig.scheduler.offload([1], [9], layerwise=True)
    load.wait_layer(1, timeout_s=WAIT_S)
    load.mark_layer_read(1)  # asks for what was not saved
    save.mark_layer_written(0)
    save.wait_layer(0, timeout_s=WAIT_S)
    events, backend = set(save._movement.events), rig.scheduler.backend
    save.cancel()
    load.wait_layer(3, timeout_s=WAIT_S)
    save.wait_over(WAIT_S)
    waits: list[Any] = []
    copy_layers = backend.copy_layers

    def recording(binding: int, work: Any, stream: Any) -> None:
        waits.extend(event for of_group in work.waits for event in of_group)
        copy_layers(binding, work, stream)

    backend.copy_layers = recording
    load.mark_layer_read(0)
    load.wait_layer(2, timeout_s=WAIT_S)
    del backend.copy_layers
    assert waits and not events & set(waits)
    load.cancel()


@pytest.mark.parametrize("waits", [True, False])
def test_a_pass_writes_what_the_one_before_it_saves_behind_a_wait(
    made: Callable[..., RingRig], copies: Copies, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Clause 5: nothing is loaded into the block, so only the caller knows that it is about to be written. Without the
    wait layer 0 of one pass is saved as layer 6 of the other. The debug mode sees it."""
    rig = made(2)
    copies.hold("offload", 6)
    rig.run({}, {1: 9})
    with pytest.raises(RuntimeError, match="block 1 of layer buffer 0 is used while a transfer is reading it"):
        check_access(rig.cache.pointer("key", 0), [1], True, None)
    if waits:
        with pytest.raises(TimeoutError):
            rig.wait_for_earlier([1], SHORT_S)
        copies.go_on()
    else:
        monkeypatch.setattr(rig, "wait_for_earlier", lambda _: None)
    compute = rig.compute

    def computing(layer: int, *tables: dict[int, int]) -> None:
        compute(layer, *tables)
        copies.go_on()  # what was held comes behind layer 0

    monkeypatch.setattr(rig, "compute", computing)
    rig.run({}, {1: 10})
    if waits:
        rig.check()
    else:
        with pytest.raises(AssertionError):
            rig.check()


# ---- what each protection is good for: without it something wrong is read or saved ----
def _no_savers(movement: Movement) -> None:
    """The load does not wait for the saves of what the model has written to its blocks."""


def _same_layer(movement: Movement, before: Movement, layer: int) -> list[Any]:
    return [before.events[layer]]


class _Slow:
    """Holds the copies of some layers for a while."""

    def __init__(self, copies: Copies, direction: str, layers: set[int]) -> None:
        self._copy, self._direction, self._layers = copies._copy, direction, layers
        copies._copy = self

    def __call__(self, number: int, plan: Any, layers: range) -> None:
        if plan.direction == self._direction and self._layers.intersection(layers):
            time.sleep(2 * SHORT_S)
        self._copy(number, plan, layers)


def _two_passes(rig: RingRig) -> None:
    rig.run({}, {0: 0, 3: 1})
    rig.run({0: 0, 3: 1}, {3: 1, 5: 2})
    rig.run({0: 0, 3: 1, 5: 2}, {5: 2})
    rig.check()


CASES: dict[str, tuple[str, set[int], Any, str, Any]] = {
    "a buffer is loaded while what lay there is being saved": ("offload", {1, 2}, rings, "note_savers", _no_savers),
    "a buffer is loaded while the last pass saves it": ("offload", {5, 6}, rings, "events_in_buffer", _same_layer),
    "a buffer is written while what lay there is being saved": (
        "offload", {1, 2}, ForwardPass, "_wait_for_buffer", lambda *_: None
    ),
    "a buffer is loaded while the model reads it": (
        "offload", set(), Movement, "is_held_back", lambda self, group: self.layerwise and self.marks[group] is None
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("removed", [False, True])
def test_each_wait_is_needed(
    made: Callable[..., RingRig], copies: Copies, monkeypatch: pytest.MonkeyPatch, what: str, removed: bool
) -> None:
    direction, slow, where, name, instead = CASES[what]
    _Slow(copies, direction, slow)
    if removed:
        monkeypatch.setattr(where, name, instead)
    if not removed:
        _two_passes(made(2))
        return
    for _ in range(10):  # a thread that the machine holds up may come late enough by luck
        try:
            _two_passes(made(2))
        except (AssertionError, TransferError, ValueError):
            return
    pytest.fail("nothing was wrong without it")


def test_a_save_takes_each_layer_when_it_is_marked(made: Callable[..., RingRig], copies: Copies) -> None:
    """Not behind the layer that lay in the buffer before, as a load does."""
    ring = made(2)
    save = ring.scheduler.offload([1], [9], layerwise=True)
    for layer in (4, 2):
        save.mark_layer_written(layer)
        save.wait_layer(layer, timeout_s=WAIT_S)
    assert [layer for _, _, layer in copies.done] == [4, 2]
    save.cancel()


def test_the_debug_mode_asks_for_a_wait_for_the_layer_that_came_last_alone(made: Callable[..., RingRig]) -> None:
    ring = made(2)
    load = ring.scheduler.onload([4], [1])
    for layer in (0, 2):
        load.mark_layer_read(layer)  # by somebody who has no use for it
    load.wait_layer(4, timeout_s=WAIT_S)
    check_access(ring.cache.pointer("key", 4), [1], True, None)
    load.cancel()
