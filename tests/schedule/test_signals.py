"""A signal whose handler raises, between any two instructions of each call: nothing is held that nobody owns."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import paddle_kv
from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.tracking import group
from tests.schedule.rig import WAIT_S, bytes_at, in_flight, settles

PACKAGE = os.path.dirname(paddle_kv.__file__) + os.sep
SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=3, block_size=1, dtype="float32", latent=True)
BLOCK_BYTES = SPEC.block_bytes
PUT_OFF_EACH = 37


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers


class Interrupted(BaseException):
    """What a handler raises."""


def interrupt(number: int, frame: object) -> None:
    raise Interrupted


@contextlib.contextmanager
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


class At:
    """Sends the signal at the n-th instruction of the package in the main thread. Where handlers are put off, at each
    instruction alike, only some count, each time others."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""
        self._put_off = number

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if signal.getsignal(signal.SIGUSR1) is not interrupt:
                self._put_off += 1
                if self._put_off % PUT_OFF_EACH:
                    return self
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGUSR1)
        return self

    def run(self, call: Callable[[], object]) -> bool:
        """Whether it came so far."""
        sys._getframe().f_trace_opcodes = True  # Python 3.12 tells of instructions only where a frame wants it before
        with handled():
            sys.settrace(self)
            try:
                call()
            except Interrupted:
                return True
            finally:
                sys.settrace(None)
        return self.left <= 0  # a finalizer or a hook keeps the exception to itself


class Server:
    def __init__(self) -> None:
        self.cache, self.pool = DeviceCache(SPEC, 4, "cpu"), HostPool(SPEC, 5)
        self.scheduler = LayerwiseScheduler(self.cache, self.pool)
        self.got: list[int] = []

    def fill(self, value: int) -> None:
        for layer in range(SPEC.num_layers):
            bytes_at(self.cache.tensor("latent", layer).data_ptr(), 4 * BLOCK_BYTES)[:] = value

    def save(self) -> None:
        self.scheduler.offload([0], [2]).wait(WAIT_S)

    def load(self) -> None:
        load = self.scheduler.onload([2], [1])
        for layer in range(SPEC.num_layers):
            load.wait_layer(layer)
        load.wait_on()

    def save_layerwise(self) -> None:
        save = self.scheduler.offload([0], [3], layerwise=True)
        for layer in range(SPEC.num_layers):
            save.mark_layer_written(layer)

    def cancel(self) -> None:
        save = self.scheduler.offload([0], [3], layerwise=True)
        save.cancel()
        save.done()

    def callback(self) -> None:
        self.scheduler.offload([0], [2]).add_done_callback(lambda _: None)

    def record_event(self) -> None:
        self.scheduler.record_event("onload")

    def drain(self) -> None:
        self.scheduler.drain(WAIT_S)
        self.scheduler.stats()
        self.scheduler.in_flight()

    def lease(self) -> None:
        with self.pool.lease([2], write=True, timeout_s=WAIT_S):
            pass

    def mark_rewritten(self) -> None:
        self.pool.mark_rewritten([2])
        self.cache.mark_rewritten([1])

    def allocate(self) -> None:
        self.got = self.pool.allocate(2)

    def free(self) -> None:
        got, self.got = self.got, []
        self.pool.free(got)

    def check(self, where: str) -> None:
        """Everything ends, nobody holds a block, and what is moved now is right."""
        self.scheduler.drain(WAIT_S)
        assert not in_flight(), where
        assert not self.pool.domain.busy(range(5)) and not self.cache.domain.busy(range(4)), where
        assert settles(lambda: self.scheduler.stats()["events"] == 1), f"{where}: events are held"
        self.pool.mark_rewritten([2, 3])
        self.cache.mark_rewritten([1])


@pytest.mark.parametrize(
    "name",
    ["save", "load", "save_layerwise", "cancel", "callback", "record_event", "drain", "lease", "mark_rewritten"],
)
def test_a_handler_raises_anywhere_in_a_call(name: str) -> None:
    server = Server()
    for number in range(1, 100_000):
        at = At(number)
        came = at.run(getattr(server, name))
        server.check(at.where)
        if not came:
            break
    assert number > 20
    server.fill(number % 251)
    server.save()
    assert server.pool.view("latent", 1, 2).reshape(-1).view("uint8").tolist() == [number % 251] * BLOCK_BYTES
    server.scheduler.close(WAIT_S)
    server.pool.close()


def test_a_handler_raises_anywhere_in_allocate_and_free() -> None:
    """Blocks whose ids have not reached the caller go back, but for the last instructions: those that return them."""
    server = Server()
    lost: list[str] = []
    for name in ("allocate", "free"):
        for number in range(1, 10_000):
            if name == "free":
                server.allocate()
            owned = list(server.got)
            at = At(number)
            came = at.run(getattr(server, name))
            with contextlib.suppress(ValueError):  # they went back before the exception came
                server.pool.free(server.got if name == "allocate" else owned)
            server.got = []
            if server.pool.num_free_blocks != 5:
                lost.append(at.where)
                server.pool.free(sorted(server.pool._allocated))
            if not came:
                break
    assert {where.split(":")[0] for where in lost} <= {"take", "allocate"} and len(lost) <= 5, lost
    server.scheduler.close(WAIT_S)
    server.pool.close()


def test_what_finished_was_to_tell_is_told_later_if_a_handler_raises():
    server = Server()
    server.scheduler.finished()
    lost: list[str] = []
    for number in range(1, 10_000):
        server.save()
        found: list[Any] = []
        at = At(number)
        came = at.run(lambda: found.extend(server.scheduler.finished()))  # noqa: B023
        server.scheduler.stats()  # behind what brings it back
        found += server.scheduler.finished()
        if len(found) != 1:
            lost.append(at.where)
        if not came:
            break
    assert number > 20
    assert {where.split(":")[0] for where in lost} <= {"take", "finished"} and len(lost) <= 5, lost
    server.scheduler.close(WAIT_S)


def test_the_last_reference_to_a_layerwise_save_goes_while_handlers_raise():
    server = Server()
    for number in range(1, 100):
        kept = [server.scheduler.offload([0], [3], layerwise=True)]
        came = At(number).run(kept.clear)
        server.check(f"instruction {number} of the end of a save that nobody marks")
        if not came:
            break
    server.scheduler.close(WAIT_S)


def test_a_signal_that_comes_with_the_end_of_a_save_leaves_nothing_of_it():
    """As above, with real signals: they are seen at the first instruction of a finalizer, if there is one."""

    class Last:
        def __init__(self) -> None:
            self.save = server.scheduler.offload([0], [3], layerwise=True)

        def __del__(self) -> None:
            with contextlib.suppress(Interrupted):
                signal.raise_signal(signal.SIGUSR1)

    server = Server()
    with handled():
        for _ in range(20):
            last = Last()
            del last
            server.check("a save that nobody marks")
    server.scheduler.close(WAIT_S)


def test_a_handler_raises_anywhere_before_a_fork(monkeypatch):
    """The hook runs to its end all the same, and what it holds is released by C code."""
    server = Server()
    # Those of tests before are not looked at: each would be many places more, and each place is a run.
    monkeypatch.setattr(group, "_groups", weakref.WeakSet([server.pool.domain.group]))
    locks = [group.registry, server.pool.domain.group.lock]

    def free() -> list[bool]:
        found = []

        def ask() -> None:
            for lock in locks:
                found.append(lock.acquire(blocking=False))
                if found[-1]:
                    lock.release()

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return found

    def hooks() -> None:
        for _ in range(2):  # as they are registered
            with contextlib.suppress(Interrupted):
                group._before_fork()

    for number in range(1, 10_000):
        at = At(number)
        came = at.run(hooks)
        assert free() == [False, False], at.where
        group._held_for_fork.clear()
        assert free() == [True, True], at.where
        if not came:
            break
    assert number > 20 and not came
    server.scheduler.close(WAIT_S)
    server.pool.close()
