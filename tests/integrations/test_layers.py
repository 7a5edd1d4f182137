"""Waits and marks around layers: by hand and by hooks, in the same cases."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import paddle
import pytest

from paddle_kv import CancelledError, LayerwiseScheduler, TransferError
from paddle_kv.integrations import ForwardPass, LayerHooks
from paddle_kv.offload import KVOffloadManager
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, Rig, in_threads

LAYERS = 5


class Block(paddle.nn.Layer):
    """Calls ``work(number)`` where a decoder layer would compute."""

    def __init__(self, number: int, work: Callable[[int], object]) -> None:
        super().__init__()
        self._number = number
        self._work = work

    def forward(self, hidden: Any) -> Any:
        self._work(self._number)
        return hidden + 1


class Runner:
    """Runs ``work(layer)`` for each layer in a forward pass, by hooked layers or by the context manager."""

    def __init__(self, way: str) -> None:
        self._work: Callable[[int], object] = lambda number: None
        self.blocks = [Block(number, lambda number: self._work(number)) for number in range(LAYERS)]
        self.hooks = LayerHooks(self.blocks) if way == "hooks" else None

    def run(self, work: Callable[[int], object], loads: Any = (), saves: Any = (), count: int = LAYERS) -> None:
        self._work = work
        if self.hooks is None:
            with ForwardPass(loads, saves, timeout_s=WAIT_S) as layers:
                for number in range(count):
                    with layers.layer(number):
                        work(number)
            return
        with self.hooks.forward_pass(loads, saves, timeout_s=WAIT_S):
            hidden = paddle.zeros([2])
            for block in self.blocks[:count]:
                hidden = block(hidden)
            assert hidden.numpy().tolist() == [count, count]


@pytest.fixture(params=["hooks", "by hand"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


@pytest.fixture
def scheduler(rig: Rig) -> Iterator[LayerwiseScheduler]:
    with LayerwiseScheduler(rig.cache, rig.pool) as made:
        yield made


def test_each_layer_runs_when_it_is_loaded_and_is_saved_when_it_has_run(
    rig: Rig, scheduler: LayerwiseScheduler, runner: Runner, copies: Copies
) -> None:
    load, save = scheduler.onload([3, 8], [0, 1]), scheduler.offload([5], [2], layerwise=True)

    def work(layer: int) -> None:
        assert ("onload", (0, 1), layer) in copies.done
        assert ("offload", (5,), layer) not in copies.done
        rig.write_device(5, [layer], value=40 + layer)

    runner.run(work, [load], [save])
    load.wait(WAIT_S)
    save.wait(WAIT_S)
    rig.expect_onload([3, 8], [0, 1])
    rig.expect_offload([5], [2])
    rig.check()


def test_a_layer_that_is_not_loaded_holds_the_model(
    rig: Rig, scheduler: LayerwiseScheduler, runner: Runner, copies: Copies
) -> None:
    copies.hold("onload", 3)
    load = scheduler.onload([3], [0])
    reached: list[int] = []
    blocked = threading.Event()

    def work(layer: int) -> None:
        reached.append(layer)
        if layer == 2:
            blocked.set()

    thread = threading.Thread(target=runner.run, args=(work, [load]))
    thread.start()
    assert blocked.wait(WAIT_S)
    thread.join(SHORT_S)
    assert reached == [0, 1, 2]
    copies.go_on()
    thread.join(WAIT_S)
    assert reached == list(range(LAYERS))
    load.wait(WAIT_S)


def test_a_pass_that_raises_ends_its_saves(rig: Rig, scheduler: LayerwiseScheduler, runner: Runner) -> None:
    save = scheduler.offload([5], [2], layerwise=True)

    def work(layer: int) -> None:
        if layer == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        runner.run(work, [], [save])
    with pytest.raises(CancelledError, match="cancelled"):
        save.wait(WAIT_S)
    runner.run(lambda layer: None)  # the next pass is not disturbed


def test_a_pass_that_leaves_layers_out_ends_its_saves(scheduler: LayerwiseScheduler, runner: Runner) -> None:
    save = scheduler.offload([5], [2], layerwise=True)
    runner.run(lambda layer: None, [], [save], count=LAYERS - 1)
    with pytest.raises(CancelledError, match="cancelled"):
        save.wait(WAIT_S)


def test_a_failed_load_stops_the_model(scheduler: LayerwiseScheduler, runner: Runner, copies: Copies) -> None:
    copies.fail("onload", 1, OSError("lost"))
    load = scheduler.onload([3], [0])
    with pytest.raises(TransferError):
        load.wait(WAIT_S)
    reached: list[int] = []
    with pytest.raises(TransferError, match=r"loads\[0\]: onload failed at layer 1"):
        runner.run(reached.append, [load])
    assert reached == []


def test_a_failed_load_ends_a_save_of_which_nothing_is_known(
    scheduler: LayerwiseScheduler, runner: Runner, copies: Copies
) -> None:
    copies.fail("onload", 1, OSError("lost"))
    load, save = scheduler.onload([3], [0]), scheduler.offload([5], [2], layerwise=True)
    with pytest.raises(TransferError, match=r"loads\[0\]: onload failed at layer 1"):
        runner.run(lambda layer: None, [load], [save])
    with pytest.raises(CancelledError, match="cancelled"):
        save.wait(WAIT_S)


def test_hooks_do_nothing_outside_of_a_pass_and_can_be_removed(scheduler: LayerwiseScheduler) -> None:
    runner = Runner("hooks")
    assert runner.blocks[0](paddle.zeros([1])).item() == 1
    assert runner.hooks is not None
    runner.hooks.remove()
    runner.hooks.remove()
    save = scheduler.offload([5], [2], layerwise=True)
    with runner.hooks.forward_pass(saves=[save]):
        runner.blocks[0](paddle.zeros([1]))
        save.mark_layer_written(0)  # would raise if the hook had done it
    with pytest.raises(CancelledError):
        save.wait(WAIT_S)


def test_passes_do_not_nest() -> None:
    hooks = LayerHooks([paddle.nn.Linear(2, 2)])
    with hooks.forward_pass(), pytest.raises(RuntimeError, match="running already"), hooks.forward_pass():
        pass


def test_wrong_arguments_are_named(scheduler: LayerwiseScheduler) -> None:
    layer = paddle.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"layers\[1\] is str"):
        LayerHooks([layer, "layer"])
    assert not layer._forward_pre_hooks
    with pytest.raises(TypeError, match="loads is"):
        ForwardPass(scheduler.onload([], []))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="saves is"):
        ForwardPass(saves=[None])  # type: ignore[list-item]


def test_a_layer_is_hooked_once() -> None:
    layer, other = paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"layers\[2\] is layers\[0\] again"):
        LayerHooks([layer, other, layer])
    assert not layer._forward_pre_hooks
    assert not other._forward_pre_hooks


def test_a_load_is_not_given_to_hooks_that_are_removed(scheduler: LayerwiseScheduler) -> None:
    runner = Runner("hooks")
    assert runner.hooks is not None
    runner.hooks.remove()
    save = scheduler.offload([5], [2], layerwise=True)
    load = scheduler.onload([4], [3])
    with pytest.raises(RuntimeError, match="the hooks are removed"), runner.hooks.forward_pass([load], [save]):
        raise AssertionError("the model would run without a wait")
    assert "cancelled" in str(save.error)
    load.wait(WAIT_S)


def test_a_pass_that_cannot_begin_cancels_its_saves(scheduler: LayerwiseScheduler) -> None:
    hooks = Runner("hooks").hooks
    assert hooks is not None
    save = scheduler.offload([5], [2], layerwise=True)
    with hooks.forward_pass(), pytest.raises(RuntimeError, match="running already"), hooks.forward_pass([], [save]):
        pass
    assert "cancelled" in str(save.error)


@pytest.mark.parametrize("count", [LAYERS - 1, LAYERS + 1])
def test_the_hooks_are_on_as_many_layers_as_a_transfer_has(scheduler: LayerwiseScheduler, count: int) -> None:
    hooks = LayerHooks([paddle.nn.Linear(2, 2) for _ in range(count)])
    load, save = scheduler.onload([4], [3]), scheduler.offload([5], [2], layerwise=True)
    message = f"the hooks are on {count} layers, a transfer has {LAYERS}"
    with pytest.raises(ValueError, match=message), hooks.forward_pass([load], [save]):
        raise AssertionError("a layer would run without a wait")
    assert "cancelled" in str(save.error)
    with hooks.forward_pass():
        pass
    load.wait(WAIT_S)


def test_transfers_may_come_from_a_generator(scheduler: LayerwiseScheduler) -> None:
    save = scheduler.offload([5], [2], layerwise=True)
    with ForwardPass(saves=(one for one in [save])) as layers:  # type: ignore[arg-type]
        for number in range(LAYERS):
            with layers.layer(number):
                pass
    save.wait(WAIT_S)
    with pytest.raises(TypeError, match="loads is None"):
        ForwardPass(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["hooks", "by hand"])
def test_a_pass_refuses_what_it_would_wait_for_forever(scheduler: LayerwiseScheduler, kind: str) -> None:
    """Loads and saves in each other's place: the first layer would wait for the mark behind it."""
    hooks = LayerHooks([paddle.nn.Linear(2, 2) for _ in range(LAYERS)])
    begin = hooks.forward_pass if kind == "hooks" else ForwardPass
    load, save = scheduler.onload([4], [3]), scheduler.offload([5], [2], layerwise=True)
    other, plain = scheduler.offload([6], [1], layerwise=True), scheduler.offload([7], [0])
    for loads, saves, message in (
        ([load, save], [other], r"loads\[1\] is a layerwise offload whose layers are not marked: <Transfer: offload"),
        ([save], [load], r"loads\[0\] is a layerwise offload"),
        ([], [save, load], r"saves\[1\] is not a layerwise offload: <Transfer: onload of 1 blocks"),
        ([], [plain], r"saves\[0\] is not a layerwise offload: <Transfer: offload of 1 blocks"),
    ):
        with pytest.raises(ValueError, match=message), begin(loads, saves):
            raise AssertionError("the pass would have begun")
    assert "cancelled" in str(other.error) and "cancelled" in str(save.error)
    load.wait(WAIT_S)
    plain.wait(WAIT_S)
    with hooks.forward_pass():  # the hooks are free
        pass


def test_a_pass_waits_for_a_layerwise_save_that_is_marked(scheduler: LayerwiseScheduler) -> None:
    save = scheduler.offload([5], [2], layerwise=True)
    for layer in range(LAYERS):
        assert save.unmarked_layers == list(range(layer, LAYERS))
        save.mark_layer_written(layer)
    with ForwardPass([save], timeout_s=WAIT_S) as layers:
        for layer in range(LAYERS):
            layers.before(layer)  # compute may overwrite block 5 behind it
    assert save.layerwise and not scheduler.onload([2], [5]).layerwise


@pytest.mark.parametrize("number", [0, 1])
def test_a_load_behind_a_save_of_the_same_pass_is_refused(scheduler: LayerwiseScheduler, number: int) -> None:
    """It waits for the marks of the save, also through another load, and the pass would wait for it before the first
    one."""
    save = scheduler.offload([5], [2], layerwise=True)
    loads = [scheduler.onload([3], [5]), scheduler.onload([4], [5])]
    other = scheduler.offload([6], [0], layerwise=True)
    with pytest.raises(ValueError, match=r"loads\[0\] waits for the layers of saves\[1\].*start the load first"):
        ForwardPass(loads[number:], [other, save])
    assert "cancelled" in str(other.error) and "cancelled" in str(save.error)
    loads[1].wait(WAIT_S)


def computed_from(scheduler: LayerwiseScheduler, *loads: Any) -> list[Any]:
    """Layerwise saves of a manager, one computed from each of the loads, and one from none."""
    manager = KVOffloadManager(scheduler)
    given = [[load] for load in loads] + [[]]
    return [
        manager,
        *(
            manager.save([bytes([number])], [8 + number], layerwise=True, computed_from=of)
            for number, of in enumerate(given)
        ),
    ]


def test_a_failed_load_takes_no_healthy_request_with_it(
    rig: Rig, scheduler: LayerwiseScheduler, runner: Runner, copies: Copies
) -> None:
    host = rig.pool.allocate(2)
    copies.fail("onload", 2, OSError("lost"))
    bad = scheduler.onload(host[:1], [0])
    with pytest.raises(TransferError):
        bad.wait(WAIT_S)
    copies.heal()
    good = scheduler.onload(host[1:], [1])
    manager, of_bad, of_good, of_none = computed_from(scheduler, bad, good)
    reached: list[int] = []
    with pytest.raises(TransferError, match=r"loads\[0\]: onload failed at layer 2: lost") as caught:
        runner.run(reached.append, [bad, good], [of_bad, of_good, of_none])
    assert (caught.value.layer, caught.value.block_ids) == (2, [0])
    assert reached == list(range(LAYERS))
    of_good.wait(WAIT_S)
    of_none.wait(WAIT_S)
    with pytest.raises(CancelledError):
        of_bad.wait(WAIT_S)
    assert [manager.peek([bytes([number])]) for number in range(3)] == [0, 1, 1]
    manager.close()
    rig.pool.free(host)


def test_a_save_that_is_cancelled_does_not_end_the_pass(scheduler: LayerwiseScheduler, runner: Runner) -> None:
    saves = [scheduler.offload([block], [block], layerwise=True) for block in (5, 6)]

    def work(layer: int) -> None:
        if layer == 2:
            saves[0].cancel()

    runner.run(work, [], saves)
    saves[1].wait(WAIT_S)
    with pytest.raises(CancelledError):
        saves[0].wait(WAIT_S)


def test_passes_of_several_threads_share_the_hooks(rig: Rig, scheduler: LayerwiseScheduler) -> None:
    meet = threading.Barrier(2)
    layers = [Block(number, lambda _: meet.wait(WAIT_S)) for number in range(LAYERS)]
    hooks = LayerHooks(layers)
    saves = [scheduler.offload([block], [block], layerwise=True) for block in (5, 6)]

    def run(save: Any) -> None:
        with hooks.forward_pass([], [save]):
            for layer in layers:
                layer(paddle.zeros([2]))

    in_threads(*[functools.partial(run, save) for save in saves])
    scheduler.drain(WAIT_S)
    rig.expect_offload([5, 6], [5, 6])
    rig.check()
