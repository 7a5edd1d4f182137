"""Waits and marks inside graphs, on the CPU: a "replay" is code that waits and marks layer by layer."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from paddle_kv import CancelledError, ClosedError, Gates, LayerwiseScheduler, TransferError
from paddle_kv.backend import cpu_gates
from paddle_kv.tracking.keeper import Waiter
from tests.schedule.rig import (
    POISON,
    SHORT_S,
    WAIT_S,
    Bits,
    Copies,
    Rig,
    assert_same,
    cache_memory,
    settles,
    threads_since,
    traced_bytes,
)

READ, WRITTEN = 3, 6  # device blocks of the replay
MOST_GROWN_BYTES = 40_000  # in 400 turns: 100 bytes a turn


def bits_of(rig: Rig, block: int, layer: int) -> Bits:
    return {name: array[layer, block].copy() for name, array in cache_memory(rig.cache).items()}


def replay(rig: Rig, gates: Gates, *, value: int = POISON, joined: bool = False) -> Bits:
    """Each layer looks at block READ, then fills block WRITTEN; what was seen, [layers, bytes].

    With ``joined``, a mark and the wait behind it are one call.
    """
    seen: dict[str, list[np.ndarray]] = {name: [] for name in rig.spec.tensor_names}
    for layer in range(rig.spec.num_layers):
        if layer == 0 or not joined:
            gates.wait(layer)
        for name, bits in bits_of(rig, READ, layer).items():
            seen[name].append(bits)
        rig.write_device(WRITTEN, [layer], value)
        gates.mark_and_wait(layer) if joined else gates.mark(layer)
    return {name: np.array(layers) for name, layers in seen.items()}


def host_block(rig: Rig, number: int) -> Bits:
    return {name: array[:, number] for name, array in rig.host.items()}


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("layers_per_event", [1, 2, 7])
def test_every_byte_of_loads_and_saves_of_replays(rig: Rig, layers_per_event: int, joined: bool) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=layers_per_event) as scheduler:
        gates = scheduler.gates(timeout_s=WAIT_S)
        for turn, (host, target) in enumerate([(5, 7), (2, 9), (5, 0)]):
            others = [8, 1, 11], [10, 12, 0]
            loads = [scheduler.onload([host], [READ]), scheduler.onload(*others)]
            saves = [scheduler.offload([WRITTEN], [one], layerwise=True) for one in (target, target + 6)]
            gates.arm(loads=loads, saves=saves)
            assert_same(replay(rig, gates, value=turn, joined=joined), host_block(rig, host))
            for transfer in (*loads, *saves):
                transfer.wait(WAIT_S)
            rig.expect_onload([host], [READ])
            rig.expect_onload(*others)
            for one in (target, target + 6):
                rig.expect_offload([WRITTEN], [one])
            rig.check()
        assert_same(replay(rig, gates, value=9), host_block(rig, 5))  # not armed: open, and no mark for anybody
    rig.check()


@pytest.mark.parametrize("joined", [False, True])
def test_a_replay_waits_layer_by_layer(rig: Rig, copies: Copies, joined: bool) -> None:
    copies.hold("onload", *range(rig.spec.num_layers))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=WAIT_S)
        load = scheduler.onload([5], [READ])
        gates.arm(loads=[load])
        passed: list[int] = []
        arrived = threading.Semaphore(0)

        def run() -> None:
            gates.wait(0)
            for layer in range(rig.spec.num_layers):
                passed.append(layer)
                arrived.release()
                if joined:
                    gates.mark_and_wait(layer)
                elif layer + 1 < rig.spec.num_layers:
                    gates.wait(layer + 1)

        thread = threading.Thread(target=run)
        thread.start()
        for layer in range(rig.spec.num_layers):
            assert not arrived.acquire(timeout=SHORT_S)
            copies.go_on("onload", layer)
            assert arrived.acquire(timeout=WAIT_S)
            assert passed == list(range(layer + 1))
        thread.join(WAIT_S)


def test_a_replay_begins_before_its_load_is_submitted(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=WAIT_S)
        save = scheduler.offload([4], [10], layerwise=True)
        load = scheduler.onload([10], [READ])
        gates.arm(loads=[load])
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(replay(rig, gates)))
        thread.start()
        thread.join(SHORT_S)
        assert not seen
        for layer in range(rig.spec.num_layers):
            save.mark_layer_written(layer)
        thread.join(WAIT_S)
        load.wait(WAIT_S)
        assert_same(seen[0], {name: array[:, 4] for name, array in rig.device.items()})


def test_an_earlier_replay_is_let_through_first(rig: Rig) -> None:
    """The load of the second replay is there long before that of the first."""
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=WAIT_S)
        save = scheduler.offload([4], [10], layerwise=True)
        first, second = scheduler.onload([10], [READ]), scheduler.onload([2], [9])
        gates.arm(loads=[first])
        gates_open = threading.Event()

        def run() -> None:
            gates.wait(0)
            gates_open.set()

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(SHORT_S)
        gates.arm(loads=[second])
        second.wait(WAIT_S)
        assert not gates_open.wait(SHORT_S)
        for layer in range(rig.spec.num_layers):
            save.mark_layer_written(layer)
        assert gates_open.wait(WAIT_S)
        thread.join(WAIT_S)
        first.wait(WAIT_S)
        gates.wait(rig.spec.num_layers - 1)  # of the second


@pytest.mark.parametrize("how", ["cancel", "close", "fail"])
def test_gates_open_when_a_load_comes_to_nothing(rig: Rig, copies: Copies, how: str) -> None:
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    gates = scheduler.gates(timeout_s=WAIT_S)
    if how == "fail":
        copies.fail("onload", 1, RuntimeError("the link is down"))
    save = scheduler.offload([4], [10], layerwise=True)
    load = scheduler.onload([10], [READ])  # waits for the save, so it cannot fail before it is armed
    gates.arm(loads=[load])
    thread = threading.Thread(target=replay, args=(rig, gates)) if how != "close" else threading.Thread()
    thread.start()
    if how == "cancel":
        load.cancel()
    elif how == "close":
        scheduler.close(WAIT_S)
    else:
        for layer in range(rig.spec.num_layers):
            save.mark_layer_written(layer)
    thread.join(WAIT_S / 2)
    assert not thread.is_alive()
    with pytest.raises((CancelledError, TransferError)):
        load.wait(WAIT_S)
    if how == "cancel":
        save.cancel()
    scheduler.close(WAIT_S)


def test_a_gate_that_gives_up_fails_its_load(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    in_vain: list[float | None] = []

    class Sleeping(Waiter):
        def sleep(self, timeout_s: float | None) -> bool:
            released = super().sleep(timeout_s)
            if not released:
                in_vain.append(timeout_s)
            return released

    monkeypatch.setattr(cpu_gates, "Waiter", Sleeping)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=SHORT_S)
        save = scheduler.offload([4], [10], layerwise=True)
        load = scheduler.onload([10], [READ])
        gates.arm(loads=[load])
        started = time.monotonic()
        replay(rig, gates)
        assert time.monotonic() - started >= SHORT_S
        assert len(in_vain) == 1, in_vain  # one waits for its time, not each
        for layer in range(rig.spec.num_layers):
            save.mark_layer_written(layer)
        with pytest.raises(TransferError, match=r"the gate of layer 0 in a graph gave up after timeout_s = 0\.05"):
            load.wait(WAIT_S)
        with pytest.raises(TransferError):
            scheduler.offload([READ], [1])  # nobody may trust what it holds
        rig.cache.mark_rewritten([READ])
        load = scheduler.onload([5], [READ])
        load.wait(WAIT_S)
        gates.arm(loads=[load])  # over already: nothing to wait for
        assert_same(replay(rig, gates), host_block(rig, 5))


def test_a_save_that_no_replay_marks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=SHORT_S)
        save = scheduler.offload([WRITTEN], [7], layerwise=True)
        gates.arm(saves=[save])
        assert save.unmarked_layers == []
        with pytest.raises(TransferError, match=r"no graph marked its layers within timeout_s = 0\.05 of the gates"):
            save.wait(WAIT_S)
        with pytest.raises(TransferError):
            scheduler.onload([7], [1])
        save = scheduler.offload([WRITTEN], [8], layerwise=True)
        monkeypatch.setattr(gates._alarms, "add", lambda *_: None)  # however slowly the replay marks its layers
        gates.arm(saves=[save])
        replay(rig, gates, value=1)
        save.wait(WAIT_S)
        rig.expect_offload([WRITTEN], [8])
        assert_same({name: a[:, 8] for name, a in rig.host.items()}, {n: a[:, WRITTEN] for n, a in rig.device.items()})


def test_closing_lets_go_of_an_armed_save(rig: Rig) -> None:
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    gates = scheduler.gates(timeout_s=1000.0)
    save = scheduler.offload([WRITTEN], [7], layerwise=True)
    gates.arm(saves=[save])
    scheduler.close(WAIT_S)
    with pytest.raises((CancelledError, TransferError)):
        save.wait(WAIT_S)
    for call in (lambda: gates.wait(0), lambda: gates.mark(0), gates.arm, lambda: scheduler.gates(timeout_s=1.0)):
        with pytest.raises(ClosedError):
            call()


def test_some_layers_no_blocks_and_both_directions(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=WAIT_S)
        loads = [scheduler.onload([5], [READ], layers=[1, 3]), scheduler.onload([], []), scheduler.offload([1], [2])]
        gates.arm(loads=loads, saves=[scheduler.offload([], [], layerwise=True)])
        for layer in range(rig.spec.num_layers):
            gates.wait(layer)
        for load in loads:
            load.wait(WAIT_S)
        rig.expect_onload([5], [READ], [1, 3])
        rig.expect_offload([1], [2])
    rig.check()


def test_what_is_refused(rig: Rig) -> None:
    other = Rig()
    with (
        LayerwiseScheduler(rig.cache, rig.pool) as scheduler,
        LayerwiseScheduler(other.cache, other.pool) as stranger,
    ):
        gates = scheduler.gates(timeout_s=WAIT_S)
        load, foreign = scheduler.onload([5], [READ]), stranger.onload([5], [READ])
        save = scheduler.offload([WRITTEN], [7], layerwise=True)
        marked = scheduler.offload([WRITTEN], [8], layerwise=True)
        marked.mark_layer_written(2)
        behind = scheduler.onload([7], [9])
        dropped = scheduler.offload([2], [9], layerwise=True)
        dropped.cancel()
        refusals: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"loads": [1]}, TypeError, "loads is"),
            ({"loads": load}, TypeError, "loads is"),
            ({"loads": ""}, TypeError, "loads is"),
            ({"saves": [None]}, TypeError, "saves is"),
            ({"loads": [foreign]}, ValueError, "another scheduler"),
            ({"loads": [load, load]}, ValueError, "twice"),
            ({"saves": [save, save]}, ValueError, "twice"),
            ({"saves": [load]}, ValueError, "layerwise=True"),
            ({"saves": [marked]}, ValueError, "marked already"),
            ({"loads": [save], "saves": [save]}, ValueError, "would never come"),
            ({"loads": [behind], "saves": [save]}, ValueError, "would never come"),
            ({"saves": [dropped]}, CancelledError, "cancelled"),
        ]
        for given, error, text in refusals:
            with pytest.raises(error, match=text):
                gates.arm(**given)
        assert save.unmarked_layers == list(range(rig.spec.num_layers))
        for layer in range(rig.spec.num_layers):
            gates.wait(layer)  # nothing was armed
        for layer, error in ((-1, IndexError), (5, IndexError), (True, TypeError), (1.0, TypeError), ("0", TypeError)):
            for call in (gates.wait, gates.mark):
                with pytest.raises(error, match="layer"):
                    call(layer)  # type: ignore[arg-type]
        for timeout_s, wrong in ((0, ValueError), (-1.0, ValueError), (float("nan"), ValueError), (None, TypeError)):
            with pytest.raises(wrong, match="timeout_s"):
                scheduler.gates(timeout_s=timeout_s)  # type: ignore[arg-type]
        for one in (save, marked):
            one.cancel()


def test_nothing_is_left_behind(rig: Rig) -> None:
    before = set(threading.enumerate())
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    gates = scheduler.gates(timeout_s=1000.0)
    for _ in range(3):
        load, save = scheduler.onload([5], [READ]), scheduler.offload([WRITTEN], [7], layerwise=True)
        gates.arm(loads=[load], saves=[save])
        replay(rig, gates)
        load.wait(WAIT_S)
        save.wait(WAIT_S)
    assert scheduler.stats()["in_flight"] == 0
    scheduler.drain(WAIT_S)
    assert settles(lambda: scheduler.stats()["events"] == 1)  # its own
    assert not gates._armed_saves and not gates._waiting
    scheduler.close(WAIT_S)
    assert not {thread.name for thread in threads_since(before)} - {"paddle_kv-keeper"}


def test_memory_stays_flat(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=WAIT_S)

        def turn() -> None:
            load = scheduler.onload([5], [READ])
            gates.arm(loads=[load])
            gates.wait(rig.spec.num_layers - 1)
            load.wait(WAIT_S)

        for _ in range(50):
            turn()
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(400):
            turn()
        grown = traced_bytes(scheduler, before + MOST_GROWN_BYTES) - before
        tracemalloc.stop()
    assert grown < MOST_GROWN_BYTES, grown


def test_random_replays(rig: Rig) -> None:
    rng = np.random.default_rng(5)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        gates = scheduler.gates(timeout_s=WAIT_S)
        for turn in range(120):
            with_load, with_save, cancelled = rng.random(3) < (0.7, 0.5, 0.2)
            host, target = int(rng.integers(0, 6)), int(rng.integers(6, 17))
            loads = [scheduler.onload([host], [READ])] if with_load else []
            saves = [scheduler.offload([WRITTEN], [target], layerwise=True)] if with_save else []
            gates.arm(loads=loads, saves=saves)
            if loads and cancelled:
                loads[0].cancel()
            seen = replay(rig, gates, value=turn)
            for save in saves:
                save.wait(WAIT_S)
                rig.expect_offload([WRITTEN], [target])
            try:
                for load in loads:
                    load.wait(WAIT_S)
                    rig.expect_onload([host], [READ])
            except CancelledError:
                rig.cache.mark_rewritten([READ])
                rig.write_device(READ)
                continue
            assert_same(seen, {name: array[:, READ] for name, array in rig.device.items()})
    rig.check()
