"""Kills nodes or masters of a Mooncake Store while a server stores and loads.

    python -m tests.tiers.mooncake_kills node|master [--points 200] [--seed 0]

At each point a process ends without farewell at another moment of a store and a load. No wrong byte may count as
loaded, each job must be settled by its deadline, and what is lost is computed again and stored, by the time that
follows from what the store and its client wait for. Nodes share few ports: many come under the name of a dead one.
"""

from __future__ import annotations

import argparse
import itertools
import random
import threading
import time
from dataclasses import dataclass, field

from paddle_kv import KVCacheSpec
from paddle_kv.mooncake_bounds import REFRESH_S
from paddle_kv.testing.tiers.rig import WAIT_S, Rig, keys
from paddle_kv.tiers import Job
from paddle_kv.tiers.mooncake import CALL_RANGES, MooncakeEngine

from .mooncake_cluster import Cluster, loopback_only, why_not

OBJECTS = 12
SPEC = KVCacheSpec(num_layers=6, num_kv_heads=1, head_dim=128, block_size=256, dtype="float16")  # 768 KiB a block
NODE_BYTES = 64 << 20
TIMEOUT_S = 3.0
SLACK_S = 5.0  # a loaded machine wakes threads late
CLIENT_TTL_S = 1  # without a sign of life; the master looks each second whose time is over
NODE_PORTS = (15000, 15099)

# How long stores may fail: the master gives out the memory of a dead node, or the client does not know where the new
# one listens. Each takes a second at most to be seen.
OUTAGE_S = max(CLIENT_TTL_S + 2.0, REFRESH_S + 1.0)
CALL_S = CALL_RANGES * 1.0 + 2.0  # of a load at a dead node, and what it has left
# The rests, 1 s at first and each twice as long, end after 2 * outage + 1; then connections to a dead node whose port
# the new one has may fail once more, which doubles that once more.
RECOVERY_S = 2 * (2 * OUTAGE_S + 1.0) + 1.0 + CALL_S + SLACK_S
KILL_WITHIN_S = 0.04  # about what a round takes


@dataclass
class Found:
    wrong: list[bytes] = field(default_factory=list)
    late: list[float] = field(default_factory=list)  # seconds a job took that should have been settled by then
    lost: int = 0  # objects that were computed again
    hit: int = 0  # points at which a job noticed
    longest_s: float = 0.0  # until all was served again


class _Clock:
    """When a job was settled."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.took_s = -1.0
        self.end = threading.Event()

    def layers_arrived(self, job: Job, layers: range) -> None:
        pass

    def settled(self, job: Job) -> None:
        self.took_s = time.monotonic() - self.started_s
        self.end.set()

    def over(self, job: Job) -> None:
        pass


def run(what: str, points: int, seed: int) -> Found:
    """In a network namespace."""
    found, chance = Found(), random.Random(seed)
    with Cluster(NODE_BYTES, NODE_BYTES, options=(f"--client_ttl={CLIENT_TTL_S}",), node_ports=NODE_PORTS) as cluster:
        engine = MooncakeEngine(cluster.master, answer_s=0.2)
        rig = Rig(engine, SPEC, num_blocks=3 * OBJECTS)
        names = keys(OBJECTS, "before")
        until_done(rig, names, found)
        for point in range(points):
            new = keys(OBJECTS, f"point{point}")
            for block_id, name in enumerate(new, 2 * OBJECTS):
                rig.rows[block_id] = rig.content(name)
            clocks = [_Clock(), _Clock()]
            load = Job(names, range(OBJECTS, 2 * OBJECTS), timeout_s=TIMEOUT_S, observer=clocks[0])
            store = Job(new, range(2 * OBJECTS, 3 * OBJECTS), timeout_s=TIMEOUT_S, observer=clocks[1])
            rig.tier.load([load])
            rig.tier.store([store])
            time.sleep(chance.uniform(0, KILL_WITHIN_S))
            if what == "master":
                cluster.kill(cluster.master_process)
            else:
                cluster.kill(cluster.nodes.pop(chance.randrange(len(cluster.nodes))))
            for clock in clocks:
                if not clock.end.wait(TIMEOUT_S + SLACK_S):
                    found.late.append(time.monotonic() - clock.started_s)
            found.late += [clock.took_s for clock in clocks if clock.took_s > TIMEOUT_S + SLACK_S]
            rig.tier.drain(WAIT_S)
            found.wrong += rig.wrong(load)
            found.hit += not (load.done and store.done)
            if what == "master":
                cluster.start_master()
            else:
                cluster.start_node(NODE_BYTES)
            rig.tier.delete(names)
            names = new
            until_done(rig, names, found)
        rig.close()
        engine.close(WAIT_S)
    return found


def until_done(rig: Rig, names: list[bytes], found: Found | None = None) -> None:
    """As a server does: what does not come from the store is computed, and stored again."""
    found = found or Found()
    started_s = time.monotonic()
    for attempt in itertools.count():
        load = rig.load(names, timeout_s=TIMEOUT_S)
        found.wrong += rig.wrong(load)
        took_s = time.monotonic() - started_s
        if load.done:
            found.longest_s = max(found.longest_s, took_s)
            return
        if took_s > RECOVERY_S:
            raise TimeoutError(f"the store serves nothing {RECOVERY_S} s later: {load.outcomes}, {rig.tier.stats()}")
        missing = [name for name, outcome in zip(names, load.outcomes, strict=True) if outcome.value != "done"]
        found.lost += len(missing) * (attempt > 0)
        rig.store(missing, timeout_s=TIMEOUT_S)
        time.sleep(0.05 * (attempt > 0))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("what", choices=("node", "master"))
    options.add_argument("--points", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    if reason := why_not():
        raise SystemExit(f"no Mooncake Store here: {reason}")
    started_s = time.monotonic()
    with loopback_only():
        found = run(given.what, given.points, given.seed)
    print(
        f"{given.points} kills of a {given.what}, {found.hit} in the middle of a job: {len(found.wrong)} wrong blocks, "
        f"{len(found.late)} jobs later than their deadline, {found.lost} objects lost, all served again within "
        f"{found.longest_s:.1f} s (at most {RECOVERY_S:g}), {time.monotonic() - started_s:.0f} s"
    )
    raise SystemExit(bool(found.wrong or found.late))


if __name__ == "__main__":
    main()
