"""Kills one side of a hand-over by a fabric at a point of its work, and looks at what is left on the other one.

In a hunt: ``python -m tests.peers.fabrics.kills 200``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler, PaddleKVError
from paddle_kv.backend import binding
from paddle_kv.peers import Receiver, RemoteSender, receiver
from paddle_kv.peers.fabrics import Fabric, describe, register
from paddle_kv.peers.fabrics.shared_memory import SharedMemoryFabric
from tests.peers.fabrics import network
from tests.peers.fabrics.remote import POOL_BLOCKS, Points, RemotePrefill
from tests.peers.fabrics.test_conformance import make_mooncake, make_nixl
from tests.peers.prefill import BLOCKS, bits
from tests.schedule.rig import WAIT_S, Rig, assert_same, cache_memory, in_flight, make_spec, moved, set_cache
from tests.tiers.mooncake_cluster import loopback_only

SENDER_POINTS = 33  # in one hand-over of five layers; behind them it is over
RECEIVER_POINTS = 12
LAYERS = range(5)
SOURCE, TARGET = [8, 0, 5, 3], [2, 12, 0, 7]


def kill_a_sender(make_fabric: Callable[[], Fabric], at: int, *, steps_s: float = 0.0) -> str:
    """The state in which the load ended."""
    rig = Rig(shared=True)
    fabric = make_fabric()
    with contextlib.ExitStack() as stack:
        stack.callback(fabric.close, WAIT_S)
        scheduler = stack.enter_context(LayerwiseScheduler(rig.cache, rig.pool))
        remote = describe(fabric, rig.pool)
        made = Receiver(scheduler, remote=remote)
        stack.callback(made.close, WAIT_S)
        prefill = RemotePrefill(made, make_fabric, remote, kill_at=at)
        stack.callback(prefill.kill)
        transfer, grant = made.grant(TARGET, timeout_s=WAIT_S)
        began_s = time.monotonic()
        prefill.tell("send", "a", grant.to_json(), SOURCE)
        if prefill.answer() is None:  # it asked, or did not come so far
            transfer.cancel()
        for layer in LAYERS:
            time.sleep(steps_s)
            prefill.tell("mark", "a", [layer])
        for layer in LAYERS:
            with contextlib.suppress(PaddleKVError):
                transfer.wait_layer(layer, timeout_s=WAIT_S)
                rig.device = moved(bits(), rig.device, SOURCE, TARGET, [layer])  # it counts as loaded
                now = cache_memory(rig.cache)
                for name in now:
                    assert (now[name][layer] == rig.device[name][layer]).all()
        transfer.wait_over(WAIT_S)
        assert time.monotonic() - began_s < WAIT_S / 2  # by the death, not by the deadline
        if transfer.state.value != "done":
            assert rig.cache.domain.poisoned(TARGET) == TARGET
            now = cache_memory(rig.cache)
            for name in now:
                rig.device[name][:, TARGET] = now[name][:, TARGET]
        assert_same(cache_memory(rig.cache), rig.device)
        assert rig.pool.num_free_blocks == rig.pool.num_blocks
        assert made.stats()["open"] == 0
    rig.pool.close()
    return transfer.state.value


class _Channel:
    """A peer over a pipe."""

    def __init__(self, pipe: Connection, points: Points) -> None:
        self.send = points.around(pipe.send_bytes)


def serve_receiver(pipe: Connection, channel: Connection, make_fabric: Callable[[], Fabric], kill_at: int) -> None:
    rig = Rig(shared=True)
    points = Points(kill_at)
    binding.copy = points.around(binding.copy)
    fabric = make_fabric()
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    remote = describe(fabric, rig.pool)
    made = Receiver(scheduler, remote=remote)
    peer = _Channel(channel, points)

    def hear() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                made.received(peer, channel.recv_bytes())

    threading.Thread(target=hear, daemon=True).start()
    transfer, grant = made.grant(TARGET, timeout_s=WAIT_S)
    pipe.send((remote, grant))
    transfer.wait(WAIT_S)
    pipe.recv()


def kill_a_receiver(make_fabric: Callable[[], Fabric], at: int) -> str:
    """How it ended for the sender."""
    spec = make_spec()
    (pipe, there), (channel, channel_there) = multiprocessing.Pipe(), multiprocessing.Pipe()
    process = network.start(serve_receiver, there, channel_there, make_fabric, at)
    there.close()
    channel_there.close()
    remote, grant = pipe.recv()
    cache, pool = DeviceCache(spec, BLOCKS, "cpu"), HostPool(spec, POOL_BLOCKS, shared=True)
    set_cache(cache, bits())
    fabric = make_fabric()
    register(fabric, pool)
    began_s, ended = time.monotonic(), "refused"

    def send(data: bytes) -> None:
        with contextlib.suppress(OSError):
            channel.send_bytes(data)

    with LayerwiseScheduler(cache, pool) as scheduler:
        sender = RemoteSender(scheduler, remote, fabric, send)

        def hear() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    sender.received(channel.recv_bytes())
            sender.gone()

        thread = threading.Thread(target=hear, daemon=True)
        thread.start()
        with contextlib.suppress(PaddleKVError):
            save = sender.send(grant, SOURCE, timeout_s=WAIT_S)
            with contextlib.suppress(PaddleKVError):
                for layer in LAYERS:
                    save.mark_layer_written(layer)
                    time.sleep(0.003)  # the other one comes along, and dies
            save.wait_over(WAIT_S)
            ended = save.state.value
        process.kill()
        thread.join(WAIT_S)
        sender.close(WAIT_S)
        assert time.monotonic() - began_s < WAIT_S
        scheduler.offload([0], [0]).wait(WAIT_S)  # everything here goes on
        assert pool.num_free_blocks == POOL_BLOCKS
    fabric.close(WAIT_S)
    assert_same(cache_memory(cache), bits())
    pool.close()
    assert in_flight() == []
    process.join(WAIT_S)
    return ended


def main(count: int) -> None:
    receiver.SETTLE_S = 0.3
    rng, found = random.Random(), dict[str, int]()
    fabrics = {"shared memory": SharedMemoryFabric, "nixl": make_nixl, "mooncake": make_mooncake}
    with loopback_only():
        for number in range(count):
            name, make_fabric = list(fabrics.items())[number // 2 % len(fabrics)]
            if number % 2:
                steps_s = rng.choice([0.0, 0.001, 0.01])
                end = "sender: " + kill_a_sender(make_fabric, rng.randrange(SENDER_POINTS), steps_s=steps_s)
            else:
                end = "receiver: " + kill_a_receiver(make_fabric, rng.randrange(RECEIVER_POINTS))
            found[f"{name}, {end}"] = found.get(f"{name}, {end}", 0) + 1
            print(f"\r{number + 1} of {count} kills; {found}", end="", flush=True)
    print()


if __name__ == "__main__":
    main(int(sys.argv[1]))
