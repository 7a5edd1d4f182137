"""A process that is killed while it writes leaves objects that are right, or none. PADDLE_KV_STRESS=200: so many."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paddle_kv.testing.tiers.rig import WAIT_S, Rig, keys
from paddle_kv.tiers import FilesEngine, Outcome, object_file
from tests.tiers.conftest import objects, wait_for_recovery

NUM_KILLED = int(os.environ.get("PADDLE_KV_STRESS", "0")) or 12
CAPACITY_BYTES = 14 * 53248  # so that most writes go over slots of evicted objects
CALLS = ("write_ranges", "write_table")


def dying(call: Callable[..., Any], left: int, how: str) -> Callable[..., Any]:
    """The process dies before, after or half way through this call of the system."""

    def wrapped(*given: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left:
            return call(*given, **named)
        if how == "half" and call.__name__ == "write_table":
            folder, path, slab, entries = given
            at, (offset, content) = len(entries) // 2, entries[len(entries) // 2]
            call(folder, path, slab, [*entries[:at], (offset, content[: len(content) // 2])])
        elif how == "half":
            for descriptor, offset, buffers in given[0][: -(-len(given[0]) // 2)]:
                whole = b"".join(buffers)
                os.pwrite(os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY), whole[: len(whole) // 2], offset)
        elif how == "after":
            call(*given, **named)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    return wrapped


def write_until_killed(folder: Path, rng: random.Random) -> None:
    engine = FilesEngine({folder: CAPACITY_BYTES})
    rig = Rig(engine)
    name = rng.choice(CALLS)
    call, left = getattr(object_file, name), rng.randrange(1, 60)
    setattr(object_file, name, dying(call, left, rng.choice(["before", "after", "half"])))
    while True:
        rig.store(rng.sample(keys(30), 6))


@pytest.mark.parametrize("number", range(NUM_KILLED))
def test_no_byte_is_wrong_afterwards(tmp_path: Path, number: int) -> None:
    rng = random.Random(number)
    for _ in range(2):  # the second process finds what the first one left
        child = os.fork()
        if child == 0:
            try:
                write_until_killed(tmp_path, rng)
            finally:
                os._exit(1)
        rng.random()
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
    engine = FilesEngine({tmp_path: CAPACITY_BYTES})
    rig = Rig(engine)
    wait_for_recovery(engine)
    there = [name for name, found in zip(keys(30), rig.tier.exists(keys(30)), strict=True) if found]
    assert engine.stats()["used_bytes"] == len(there) * 53248 <= CAPACITY_BYTES
    assert len(objects(tmp_path)) == len(there)
    job = rig.load(there)
    assert rig.wrong(job) == []
    assert set(job.outcomes) <= {Outcome.DONE}  # visible only when complete: nothing of it is damaged
    assert rig.store(keys(5, "new")).done
    rig.close()
    engine.close(WAIT_S)
