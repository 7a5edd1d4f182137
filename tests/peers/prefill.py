"""The other process of the tests: a sender that does what it is asked, and dies where it is asked to."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.backend import binding
from paddle_kv.backend.work import TransferPlan
from paddle_kv.peers import Grant, PeerBlocks, connect, heads_of
from paddle_kv.peers.connection import Line
from tests.schedule.rig import Copies, make_spec, random_bits, set_cache

BLOCKS = 9
SEED = 77
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.peers.preload"])


def bits(spec: KVCacheSpec | None = None, seed: int = SEED) -> dict[str, Any]:
    """What is in its cache."""
    return random_bits(spec or make_spec(), BLOCKS, seed)


class Points:
    """Ends the process at one of the points that it passes: in front of, in the middle of and behind each copy, and in
    front of and behind each message."""

    def __init__(self, at: int) -> None:
        self._left = at
        self._copy, self._write = binding.copy, Line._write
        binding.copy = self.copy
        Line._write = lambda line, data: self.write(line, data)  # type: ignore[method-assign]

    def pass_one(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def copy(self, number: int, plan: TransferPlan, layers: range) -> None:
        self.pass_one()
        half = len(plan.device_ids) // 2
        part = TransferPlan(plan.direction, plan.device_ids[:half], plan.host_ids[:half], plan.num_layers, 1)
        self._copy(number, part, layers)
        self.pass_one()
        self._copy(number, plan, layers)
        self.pass_one()

    def write(self, line: Line, data: bytes) -> None:
        self.pass_one()
        self._write(line, data)
        self.pass_one()


def attach(spec: KVCacheSpec, exported: Any) -> HostPool:
    """What a receiver has described: its pool, or its cache."""
    if exported.kind == "host_pool":
        return HostPool.attach(spec, exported)
    return PeerBlocks(DeviceCache.attach(spec, exported))


@dataclass(frozen=True)
class Cut:
    """A sender with another number of heads than the receiver: which of its own it sends, to which of the receiver."""

    num_heads: int
    own: tuple[int, int] | None = None  # the first one, and how many; None: all
    theirs: tuple[int, int] | None = None
    seed: int = SEED


def serve(pipe: Connection, exported: Any, path: str, kill_at: int | None, cut: Cut | None) -> None:
    spec = exported.spec if cut is None else exported.spec.with_heads(cut.num_heads)
    cache, pool = DeviceCache(spec, BLOCKS, "cpu"), attach(exported.spec, exported)
    set_cache(cache, bits(spec, SEED if cut is None else cut.seed))
    if cut is not None:
        cache = cache if cut.own is None else heads_of(cache, *cut.own)
        pool = pool if cut.theirs is None else heads_of(pool, *cut.theirs)
    copies = Copies(binding.copy)
    binding.copy = copies
    if kill_at is not None:
        Points(kill_at)
    scheduler = LayerwiseScheduler(cache, pool)
    sender = connect(scheduler, path)
    line: Any = sender._hang_up.__self__  # type: ignore[union-attr]
    saves: dict[str, Any] = {}
    orders: dict[str, Callable[..., Any]] = {
        "send": lambda name, text, ids: saves.update({name: sender.send(Grant.from_json(text), ids)}),
        "mark": lambda name, layers: [saves[name].mark_layer_written(layer) for layer in layers] and None,
        "wait": lambda name: saves[name].wait_over(20.0) or saves[name].state.value,
        "failed": lambda name: saves[name].failed,
        "cancel": lambda name: saves[name].cancel(),
        "drop": lambda name: saves.pop(name) and None,
        "hold": lambda *layers: copies.hold("offload", *layers),
        "held": lambda: copies.arrived.acquire(timeout=20.0) or 1 / 0,
        "go_on": lambda *layers: copies.go_on("offload", *layers),
        "sendings": lambda: len(sender._sendings),
        "raw": lambda data: line._loop.post(lambda: line._socket.send(data)),
        "shut": lambda: line._socket.shutdown(socket.SHUT_WR),
        "fork": fork_and_sleep,
        "close": lambda: sender.close(20.0),
    }
    while True:
        try:
            order, *given = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("ok", orders[order](*given)))
        except Exception as error:  # noqa: BLE001  the test looks at it
            pipe.send((type(error).__name__, str(error)))


def fork_and_sleep() -> int:
    child = os.fork()
    if child == 0:
        time.sleep(30.0)
        os._exit(0)
    return child


class Prefill:
    """The handle of such a process."""

    def __init__(self, exported: Any, path: str, kill_at: int | None = None, cut: Cut | None = None) -> None:
        self._pipe, there = multiprocessing.Pipe()
        self.process = context.Process(target=serve, args=(there, exported, path, kill_at, cut), daemon=True)
        self.process.start()
        there.close()

    def tell(self, *order: Any) -> None:
        """Without an answer; one that is dead does not hear it."""
        with contextlib.suppress(OSError):
            self._pipe.send(order)

    def answer(self) -> Any:
        """(``"ok"``, what was returned), or (the exception's type, its text); None: it is dead."""
        try:
            assert self._pipe.poll(60), "the other process does not answer"
            return self._pipe.recv()
        except (EOFError, OSError):
            return None

    def ask(self, *order: Any) -> Any:
        self.tell(*order)
        kind, value = self.answer()
        assert kind == "ok", f"{kind}: {value}"
        return value

    def refused(self, *order: Any) -> tuple[str, str]:
        self.tell(*order)
        kind, value = self.answer()
        assert kind != "ok"
        return kind, value

    def kill(self) -> None:
        self.process.kill()
        self.process.join(20)
        self._pipe.close()

    def end(self) -> None:
        """As a process ends."""
        self._pipe.close()
        self.process.join(20)
        assert self.process.exitcode == 0


def own_a_pool(pipe: Connection) -> None:
    """A process that has a pool and does nothing with it."""
    pool = HostPool(make_spec(), BLOCKS, shared=True)
    pipe.send(pool.export())
    with contextlib.suppress(EOFError):
        pipe.recv()
