"""A sender in another process that reaches the receiver's pool by a fabric, and is told everything by pipes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler
from paddle_kv.backend import binding
from paddle_kv.peers import Grant, Receiver, RemoteSender
from paddle_kv.peers.fabrics import Fabric, RemotePool, Sink, Write, register
from paddle_kv.testing.peers import FaultyFabric
from tests.peers.fabrics import network
from tests.peers.prefill import BLOCKS, SEED, bits
from tests.schedule.rig import Copies, cache_memory, set_cache

POOL_BLOCKS = 7


class Points:
    """Ends the process at one of the points that it passes: around each message, each copy and each write."""

    def __init__(self, at: int | None) -> None:
        self._left = at

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def around(*given: Any) -> Any:
            self.pass_one()
            result = function(*given)
            self.pass_one()
            return result

        return around

    def pass_one(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)


class TornFabric(FaultyFabric):
    """Whose writes are made in two halves, with a point between them."""

    def __init__(self, fabric: Fabric, points: Points) -> None:
        super().__init__(fabric)
        self._points = points

    def connect(self, address: bytes) -> Any:
        return _TornSink(self._fabric.connect(address), self._points)


class _TornSink:
    def __init__(self, sink: Sink, points: Points) -> None:
        self._sink, self._points = sink, points

    def write(self, write: Write) -> None:
        half = (len(write.sizes) + 1) // 2

        def second(why: str) -> None:
            self._points.pass_one()
            rest = (write.sources[half:], write.targets[half:], write.sizes[half:])
            last = Write(*rest, write.deadline, lambda found: write.ended(why or found), write.wanted)
            self._sink.write(last)

        self._points.pass_one()
        first = (write.sources[:half], write.targets[:half], write.sizes[:half])
        self._sink.write(Write(*first, write.deadline, second, write.wanted))

    def close(self, timeout_s: float | None = None) -> None:
        self._sink.close(timeout_s)


def serve(
    pipe: Connection,
    channel: Connection,
    make_fabric: Callable[[], Fabric],
    remote: RemotePool,
    num_heads: int,
    seed: int,
    kill_at: int | None,
) -> None:
    spec = remote.spec if num_heads == remote.spec.num_kv_heads else remote.spec.with_heads(num_heads)
    cache, pool = DeviceCache(spec, BLOCKS, "cpu"), HostPool(spec, POOL_BLOCKS, shared=True)
    set_cache(cache, bits(spec, seed))
    points = Points(kill_at)
    copies = Copies(binding.copy)
    binding.copy = points.around(copies) if kill_at is not None else copies
    fabric: Any = make_fabric()
    register(fabric, pool)
    fabric = FaultyFabric(fabric) if kill_at is None else TornFabric(fabric, points)
    scheduler = LayerwiseScheduler(cache, pool)
    sender = RemoteSender(scheduler, remote, fabric, points.around(channel.send_bytes))
    threading.Thread(target=_hear, args=(channel, sender), daemon=True).start()
    saves: dict[str, Any] = {}
    orders: dict[str, Callable[..., Any]] = {
        "send": lambda name, text, ids: saves.update({name: sender.send(Grant.from_json(text), ids)}),
        "mark": lambda name, layers: [saves[name].mark_layer_written(layer) for layer in layers] and None,
        "wait": lambda name: saves[name].wait_over(20.0) or saves[name].state.value,
        "wait_layers": lambda name: [saves[name].wait_layer(layer, timeout_s=20.0) for layer in range(5)] and None,
        "raise": lambda name: saves[name].wait(20.0),
        "done": lambda name: saves[name].done(),
        "cancel": lambda name: saves[name].cancel(),
        "overwrite": lambda: set_cache(cache, {name: array * 0 for name, array in cache_memory(cache).items()}),
        "restore": lambda: set_cache(cache, bits(spec, seed)),
        "fail": lambda number: fabric.sinks[0].fail(fabric.sinks[0]._number + number),
        "tear": lambda number: fabric.sinks[0].tear(fabric.sinks[0]._number + number),
        "hold": lambda number: fabric.sinks[0].hold(fabric.sinks[0]._number + number),
        "held": lambda: fabric.sinks[0].arrived.acquire(timeout=20.0) or 1 / 0,
        "go_on": lambda: fabric.sinks[0].go_on(),
        "free": lambda: pool.num_free_blocks,
        "close": lambda: [one.close(20.0) for one in (sender, scheduler, fabric)] and pool.close(),
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


def _hear(channel: Connection, sender: RemoteSender) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            sender.received(channel.recv_bytes())
    sender.gone()


class RemotePrefill:
    """The handle of it, and a peer of the receiver."""

    def __init__(
        self,
        receiver: Receiver,
        make_fabric: Callable[[], Fabric],
        remote: RemotePool,
        *,
        num_heads: int | None = None,
        seed: int = SEED,
        kill_at: int | None = None,
    ) -> None:
        self._receiver = receiver
        self._pipe, pipe = multiprocessing.Pipe()
        self._channel, channel = multiprocessing.Pipe()
        heads = remote.spec.num_kv_heads if num_heads is None else num_heads
        self.process = network.start(serve, pipe, channel, make_fabric, remote, heads, seed, kill_at)
        pipe.close()
        channel.close()
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._channel.send_bytes(data)

    def _hear(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._receiver.received(self, self._channel.recv_bytes())
        self.process.join()
        self._receiver.gone(self)

    def tell(self, *order: Any) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(order)

    def answer(self) -> Any:
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
        self._thread.join(20)
        self._pipe.close()

    def end(self) -> None:
        self.ask("close")
        self._pipe.close()
        self._thread.join(20)
        assert self.process.exitcode == 0
