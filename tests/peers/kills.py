"""Kills one side of a hand-over at a point of its work, and looks at what is left on the other one.

In a hunt: ``python -m tests.peers.kills 200``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

from paddle_kv import AttachError, DeviceCache, LayerwiseScheduler, PaddleKVError
from paddle_kv.peers import Listener, Receiver, connect
from tests.peers.prefill import BLOCKS, SEED, Points, Prefill, attach, bits, context
from tests.schedule.rig import (
    WAIT_S,
    Rig,
    assert_same,
    cache_memory,
    in_flight,
    make_spec,
    moved,
    random_bits,
    set_cache,
)

SENDER_POINTS = 30  # in one hand-over of five layers; behind them it is over
RECEIVER_POINTS = 17
LAYERS = range(5)
SOURCE, TARGET = [8, 0, 5, 3], [2, 12, 0, 7]


def make_rig(direct: bool) -> Rig:
    return Rig(shared_cache=True) if direct else Rig(shared=True)


def described(rig: Rig, direct: bool) -> Any:
    return rig.cache.export() if direct else rig.pool.export()


def kill_a_sender(at: int, *, steps_s: float = 0.0, direct: bool = False) -> str:
    """The state in which the load ended."""
    rig = make_rig(direct)
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(LayerwiseScheduler(rig.cache, rig.pool))
        receiver = Receiver(scheduler, direct=direct)
        stack.callback(receiver.close, WAIT_S)
        listener = stack.enter_context(Listener(receiver))
        prefill = Prefill(described(rig, direct), listener.path, at)
        stack.callback(prefill.kill)
        transfer, grant = receiver.grant(TARGET, timeout_s=WAIT_S)
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
        assert receiver.stats()["open"] == 0
    rig.pool.close()
    return transfer.state.value


def serve_receiver(pipe: Connection, kill_at: int, path: str, direct: bool) -> None:
    rig = make_rig(direct)
    Points(kill_at)
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    receiver = Receiver(scheduler, direct=direct)
    with Listener(receiver, path):
        transfer, grant = receiver.grant(TARGET, timeout_s=WAIT_S)
        pipe.send((described(rig, direct), grant))
        transfer.wait(WAIT_S)
        pipe.recv()


def kill_a_receiver(at: int, *, direct: bool = False) -> str:
    """How it ended for the sender."""
    with tempfile.TemporaryDirectory() as folder:
        return _kill_a_receiver(at, os.path.join(folder, "receiver"), direct)


def _kill_a_receiver(at: int, path: str, direct: bool) -> str:
    spec = make_spec()
    pipe, there = multiprocessing.Pipe()
    process = context.Process(target=serve_receiver, args=(there, at, path, direct), daemon=True)
    process.start()
    there.close()
    try:
        exported, grant = pipe.recv()
        pool = attach(spec, exported)
    except (EOFError, AttachError):  # it died before it had anything to give, or before that was taken
        process.join(WAIT_S)
        return "refused"
    cache = DeviceCache(spec, BLOCKS, "cpu")
    set_cache(cache, bits())
    began_s = time.monotonic()
    ended = "refused"
    with LayerwiseScheduler(cache, pool) as scheduler:
        with contextlib.suppress(PaddleKVError):
            sender = connect(scheduler, path)
            try:
                save = sender.send(grant, SOURCE, timeout_s=WAIT_S)
                with contextlib.suppress(PaddleKVError):
                    for layer in LAYERS:
                        save.mark_layer_written(layer)
                        time.sleep(0.003)  # the other one comes along, and dies
                    save.wait(WAIT_S)
                save.wait_over(WAIT_S)
                ended = save.state.value
            finally:
                sender.close(WAIT_S)
        assert time.monotonic() - began_s < WAIT_S / 2
        scheduler.offload([0], [0]).wait(WAIT_S)  # everything here goes on
    assert_same(cache_memory(cache), random_bits(spec, BLOCKS, SEED))
    pool.close()
    assert in_flight() == []
    process.kill()
    process.join(WAIT_S)
    return ended


def main(count: int) -> None:
    rng, found = random.Random(), dict[str, int]()
    for number in range(count):
        direct = bool(number // 2 % 2)
        if number % 2:
            steps_s = rng.choice([0.0, 0.001, 0.01])
            end = "sender: " + kill_a_sender(rng.randrange(SENDER_POINTS), steps_s=steps_s, direct=direct)
        else:
            end = "receiver: " + kill_a_receiver(rng.randrange(RECEIVER_POINTS), direct=direct)
        found[end] = found.get(end, 0) + 1
        print(f"\r{number + 1} of {count} kills; {found}", end="", flush=True)
    print()


if __name__ == "__main__":
    main(int(sys.argv[1]))
