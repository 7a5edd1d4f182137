"""Each call that can fail, fails: the first, the second, ... until a whole program runs without meeting the failure."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from paddle_kv import BackendError, CancelledError, HostPool, LayerwiseScheduler, Transfer, TransferError
from paddle_kv.memory import host_pool
from paddle_kv.testing.simulator.faults import CALLS, FaultyBackend, InjectedError
from paddle_kv.tracking import memories
from tests.schedule import rig as rig_module

from .scenarios import LAYERS, SPEC, Setting, fresh

HARMLESS = ("wait", "elapsed_ms")  # the caller asks again, or does without
MOST_CALLS = 60
DRAIN_TIMEOUT_S = 2.0
INJECTED = f"{InjectedError.__name__}: "  # how the text begins that a transfer keeps of it


class Program:
    """Saves, loads and saves again what was loaded. Each call may fail; the next one goes on as a server would."""

    def __init__(self, setting: Setting, make_backend: Callable[[], Any]) -> None:
        self.setting = setting
        self.errors: list[BaseException] = []
        self.transfers: dict[str, Transfer] = {}
        self.scheduler = self._retried(lambda: self._scheduler(make_backend()))

    def _scheduler(self, backend: Any) -> LayerwiseScheduler:
        made = LayerwiseScheduler(self.setting.cache, self.setting.pool, backend=backend)
        self.setting.schedulers.append(made)
        return made

    def _retried(self, call: Callable[[], Any]) -> Any:
        """Once more if it fails; a second failure would be one too many."""
        try:
            return call()
        except (InjectedError, TransferError) as error:
            self.errors.append(error)
            return call()

    def run(self) -> None:
        s, scheduler = self.setting, self.scheduler
        s.fill_host(3, "prefix")
        s.compute(writes=0, version="prompt")
        self._start("save", lambda: scheduler.offload([0], [2]))
        self._start("load", lambda: scheduler.onload([3], [1]))
        if "load" in self.transfers:
            self._use_load()
        self._start("save again", lambda: scheduler.offload([1], [4], layerwise=True))
        for layer in range(LAYERS):
            self._call("save again", lambda transfer, layer=layer: transfer.mark_layer_written(layer))
        self._start("dropped", lambda: scheduler.offload([0], [1]))
        self._call("dropped", lambda transfer: transfer.cancel())
        self._retried(lambda: scheduler.record_event("offload"))
        for name in list(self.transfers):
            self._call(name, lambda transfer: transfer.wait(DRAIN_TIMEOUT_S))

    def _start(self, name: str, start: Callable[[], Transfer]) -> None:
        try:
            self.transfers[name] = start()
        except (InjectedError, TransferError) as error:
            self.errors.append(error)

    def _call(self, name: str, call: Callable[[Transfer], object]) -> bool:
        """Whether the transfer is there and has not failed."""
        if name not in self.transfers:
            return False
        try:
            self._retried(lambda: call(self.transfers[name]))
        except (CancelledError, TransferError):
            return False
        return True

    def _use_load(self) -> None:
        for layer in range(LAYERS):
            if not self._call("load", lambda transfer, layer=layer: transfer.wait_layer(layer)):
                return
            self.setting.simulation.compute(reads=[(self.setting.cache, 1, layer)])

    def check(self) -> None:
        """Each transfer has failed, or moved what it should; at most one failed of itself; and the next ones work."""
        s, scheduler = self.setting, self.scheduler
        scheduler.drain(DRAIN_TIMEOUT_S)
        expected = {"save": (2, "prompt"), "save again": (4, "prefix")}
        for name, transfer in self.transfers.items():
            assert transfer.done()
            if transfer.error is None and name in expected and not (name == "save again" and self._failed("load")):
                s.assert_host(*expected[name])
        failed = {name for name in ("save", "load", "save again") if self._failed(name)}
        assert len(failed) <= 1 or failed == {"load", "save again"}, f"{failed} failed; the last reads from the load"
        for block, version in ((0, "next"), (1, "last")):
            s.compute(writes=block, version=version)
            s.cache.mark_rewritten([block])
            scheduler.offload([block], [2]).wait(DRAIN_TIMEOUT_S)
            load = scheduler.onload([2], [3])
            load.wait_on()
            seen = s.compute(reads=3)
            load.wait(DRAIN_TIMEOUT_S)
            s.assert_host(2, version)
            s.assert_saw(seen, 3, version)
        s.finish()
        assert scheduler.stats()["events"] == scheduler.stats()["streams"] == 0
        assert not rig_module.in_flight()
        s.pool.close()

    def _failed(self, name: str) -> bool:
        return name not in self.transfers or self.transfers[name].error is not None


def surfaced(error: BaseException | None) -> bool:
    cause = error.__cause__ if isinstance(error, TransferError) else error
    return isinstance(cause, InjectedError) or (isinstance(cause, BackendError) and str(cause).startswith(INJECTED))


@pytest.mark.parametrize("call", CALLS)
def test_call_that_fails(call: str) -> None:
    for number in range(1, MOST_CALLS):
        with fresh() as setting:
            backends: list[FaultyBackend] = []

            def make(setting: Setting = setting, made: list[FaultyBackend] = backends, number: int = number) -> Any:
                made.append(FaultyBackend(setting.simulation.backend(), call, number if not made else -1))
                return made[-1]

            program = Program(setting, make)
            program.run()
            fired = backends[0].fired
            backends[0].disarm()
            if fired and call not in HARMLESS:
                assert any(map(surfaced, program.errors)), f"the {number}. {call} failed and nobody was told"
            assert fired or not program.errors
            program.check()
        if not fired:
            assert number > 1, f"{call} is never called"
            return
    raise AssertionError(f"{call} still fails at call {MOST_CALLS}")


@pytest.mark.parametrize("kind", ["break_copy", "break_submission"])
def test_device_that_fails(kind: str) -> None:
    for number in range(1, MOST_CALLS):
        with fresh() as setting:
            device = setting.simulation.device
            program = Program(setting, setting.simulation.backend)
            getattr(device, kind)(number)
            program.run()
            fired = device.num_broken == 1
            assert fired == bool(program.errors), f"{kind} {number}: {program.errors}"
            getattr(device, kind)(0)
            program.check()
        if not fired:
            assert number > LAYERS
            return
    raise AssertionError(f"{kind} still fails at {MOST_CALLS}")


def test_allocation_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = host_pool.HostMemory
    gc.collect()
    known = set(memories._attached)
    for number in range(1, MOST_CALLS):
        made: list[int] = []

        def failing(*arguments: Any, made: list[int] = made, number: int = number, **named: Any) -> Any:
            made.append(1)
            if len(made) == number:
                raise MemoryError("allocation was made to fail")
            return allocate(*arguments, **named)

        monkeypatch.setattr(host_pool, "HostMemory", failing)
        if number <= LAYERS:
            with pytest.raises(MemoryError, match="made to fail"):
                HostPool(SPEC, 4, layout="layer_first")
            assert set(memories._attached) <= known  # pools of other tests may go meanwhile
        else:
            pool = HostPool(SPEC, 4, layout="layer_first")
            assert len(made) == LAYERS and pool.pinned_bytes == 4 * LAYERS * SPEC.block_bytes
            pool.close()
            return
