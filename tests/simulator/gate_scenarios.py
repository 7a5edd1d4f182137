"""Replays of a captured graph that waits at gates and marks its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from paddle_kv import CancelledError, Gates, TransferError
from paddle_kv.testing.simulator.device import Deadlock

from .scenarios import LAYERS, Setting, refused


@contextlib.contextmanager
def ending(what: str) -> Iterator[None]:
    """What is waited for comes."""
    try:
        yield
    except (Deadlock, TimeoutError) as error:
        raise AssertionError(f"{what} never ends: {error}") from None


def replay(s: Setting, gates: Gates, *, reads: int | None = None, writes: int | None = None, version: str = "") -> Any:
    """A launch of the graph; what each layer has seen."""
    seen = []
    for layer in range(LAYERS):
        gates.wait(layer)
        seen.append(
            s.simulation.compute(
                reads=[] if reads is None else [(s.cache, reads, layer)],
                writes=[] if writes is None else [(s.cache, writes, layer)],
                version=version or None,
                label=f"replay, layer {layer}",
            )
        )
        gates.mark(layer)
    return seen


def assert_replay_saw(s: Setting, seen: Any, block: int, version: str) -> None:
    with ending("a replay"):
        s.simulation.run()
    for layer in range(LAYERS):
        location = s.simulation.location(s.cache, block, layer)
        assert seen[layer].saw(location) == version, f"{location}: saw {seen[layer].seen[location]}, not {version}"


def replay_waits_for_its_load(s: Setting) -> None:
    s.fill_host(3, "prefix")
    scheduler = s.scheduler()
    gates = scheduler.gates(timeout_s=1.0)
    load = scheduler.onload([3], [1])
    gates.arm(loads=[load])
    assert_replay_saw(s, replay(s, gates, reads=1), 1, "prefix")
    with ending("a load"):
        load.wait(1.0)
    assert_replay_saw(s, replay(s, gates, reads=1), 1, "prefix")  # not armed: the gates are open


def replay_is_launched_before_its_load_is_submitted(s: Setting) -> None:
    side = s.simulation.stream("side")
    scheduler = s.scheduler()
    gates = scheduler.gates(timeout_s=1.0)
    s.compute(writes=0, version="prompt")
    s.simulation.order(s.simulation.compute_stream, side)
    save = scheduler.offload([0], [2], layerwise=True)
    load = scheduler.onload([2], [1])
    gates.arm(loads=[load])
    seen = replay(s, gates, reads=1)
    for layer in range(LAYERS):
        save.mark_layer_written(layer, stream=side)
    assert_replay_saw(s, seen, 1, "prompt")
    with ending("a load"):
        load.wait(1.0)


def replays_in_flight_wait_each_for_its_load(s: Setting) -> None:
    s.fill_host(3, "first")
    s.fill_host(4, "second")
    scheduler = s.scheduler()
    gates = scheduler.gates(timeout_s=1.0)
    seen = []
    for host in (3, 4):
        load = scheduler.onload([host], [1])
        gates.arm(loads=[load])
        seen.append(replay(s, gates, reads=1))
    assert_replay_saw(s, seen[0], 1, "first")
    assert_replay_saw(s, seen[1], 1, "second")
    with ending("a load"):
        load.wait(1.0)


def replay_marks_the_layers_of_its_saves(s: Setting) -> None:
    scheduler = s.scheduler()
    gates = scheduler.gates(timeout_s=1.0)
    saves = [scheduler.offload([0], [host], layerwise=True) for host in (2, 4)]
    gates.arm(saves=saves)
    replay(s, gates, writes=0, version="prompt")
    for save, host in zip(saves, (2, 4), strict=True):
        with ending("a save"):
            save.wait(1.0)
        s.assert_host(host, "prompt")


def replay_with_two_loads_and_a_save(s: Setting) -> None:
    s.fill_host(3, "prefix")
    s.fill_host(4, "other")
    scheduler = s.scheduler(layers_per_event=2)
    gates = scheduler.gates(timeout_s=1.0)
    loads = [scheduler.onload([4], [2]), scheduler.onload([3], [1])]
    save = scheduler.offload([0], [2], layerwise=True)
    gates.arm(loads=loads, saves=[save])
    seen = replay(s, gates, reads=1, writes=0, version="answer")
    assert_replay_saw(s, seen, 1, "prefix")
    with ending("a save"):
        save.wait(1.0)
    s.assert_host(2, "answer")


def gates_open_when_a_load_is_cancelled(s: Setting) -> None:
    scheduler = s.scheduler()
    gates = scheduler.gates(timeout_s=1.0)
    save = scheduler.offload([0], [2], layerwise=True)
    load = scheduler.onload([2], [1])  # comes only behind the marks of the save
    gates.arm(loads=[load])
    replay(s, gates)
    load.cancel()
    with ending("a replay"):
        s.simulation.run()
    refused(load.wait, 1.0, error=CancelledError)
    save.cancel()


def gates_open_when_a_copy_of_their_load_breaks(s: Setting) -> None:
    side = s.simulation.stream("side")
    s.fill_host(3, "prefix")
    scheduler = s.scheduler()
    gates = scheduler.gates(timeout_s=1.0)
    save = scheduler.offload([0], [2], layerwise=True)
    load = scheduler.onload([3, 2], [1, 3])  # comes only behind the marks of the save
    gates.arm(loads=[load])
    replay(s, gates)
    s.simulation.device.break_copy(3)
    for layer in range(LAYERS):
        save.mark_layer_written(layer, stream=side)
    failed = 0
    for transfer in (save, load):
        try:
            with ending("a transfer"):
                transfer.wait(1.0)
        except TransferError:
            failed += 1
    assert failed
    with ending("a replay"):
        s.simulation.run()
    s.cache.mark_rewritten([1, 3])
    s.pool.mark_rewritten([2])


def replay_behind_one_whose_load_was_dropped(s: Setting) -> None:
    """Both wait; that the first gets nothing is nothing to the second."""
    s.fill_host(3, "prefix")
    scheduler = s.scheduler()
    gates = scheduler.gates(timeout_s=1.0)
    save = scheduler.offload([0], [2], layerwise=True)
    dropped = scheduler.onload([2], [3])  # comes only behind the marks of the save
    gates.arm(loads=[dropped])
    replay(s, gates)
    load = scheduler.onload([3], [1])
    gates.arm(loads=[load])
    seen = replay(s, gates, reads=1)
    dropped.cancel()
    assert_replay_saw(s, seen, 1, "prefix")
    save.cancel()


def save_is_cancelled_behind_its_arming(s: Setting) -> None:
    s.compute(writes=3, version="prompt")
    scheduler = s.scheduler()
    gates = scheduler.gates(timeout_s=1.0)
    save = scheduler.offload([0], [2], layerwise=True)
    gates.arm(saves=[save])
    save.cancel()
    behind = scheduler.offload([3], [3])
    replay(s, gates, writes=0, version="answer")
    with ending("a save"):
        behind.wait()
    s.assert_host(3, "prompt")
    refused(save.wait, 1.0, error=CancelledError)


def gates_open_when_the_scheduler_is_closed(s: Setting) -> None:
    scheduler = s.scheduler()
    gates = scheduler.gates(timeout_s=1.0)
    load = scheduler.onload([3], [1])
    save = scheduler.offload([0], [2], layerwise=True)
    gates.arm(loads=[load], saves=[save])
    with ending("a scheduler"):
        scheduler.close(timeout_s=1.0)
    refused(save.wait, 1.0, error=CancelledError)


def gate_that_gives_up_fails_its_load(s: Setting) -> None:
    scheduler = s.scheduler()
    gates = scheduler.gates(timeout_s=1.0)
    save = scheduler.offload([0], [2], layerwise=True)
    load = scheduler.onload([2], [1])
    gates.arm(loads=[load])
    replay(s, gates)
    s.simulation.give_up(turn=1, layer=0)
    with ending("a replay"):
        s.simulation.run()
    for layer in range(LAYERS):
        save.mark_layer_written(layer)
    refused(load.wait, 1.0, error=TransferError)
    refused(scheduler.offload, [1], [3], error=TransferError)
    s.cache.mark_rewritten([1])


GATE_SCENARIOS: dict[str, Callable[[Setting], None]] = {
    name: function
    for name, function in list(globals().items())
    if getattr(function, "__module__", "") == __name__
    and getattr(function, "__annotations__", {}) == {"s": "Setting", "return": "None"}
}
