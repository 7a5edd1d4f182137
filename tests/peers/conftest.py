from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.peers import Listener, Receiver
from tests.peers.prefill import Prefill
from tests.schedule.conftest import copies, nothing_left  # noqa: F401
from tests.schedule.rig import WAIT_S, Rig, assert_same, cache_memory


def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


class Decode:
    """The receiver of the tests, in this process, with all that it has. ``direct``: senders write into its cache."""

    def __init__(self, direct: bool = False) -> None:
        self.direct = direct
        self.rig = Rig(shared_cache=True) if direct else Rig(shared=True)
        self.pool = self.rig.pool
        self.exported = self.rig.cache.export() if direct else self.pool.export()
        self.scheduler = LayerwiseScheduler(self.rig.cache, self.pool)
        self.receiver = Receiver(self.scheduler, direct=direct)
        self.listener = Listener(self.receiver)

    @property
    def num_held(self) -> int:
        """Blocks that a sender may be writing: of the pool, or of the cache."""
        if not self.direct:
            return self.pool.num_blocks - self.pool.num_free_blocks
        landing = self.receiver._loads.host_pool
        return len(landing.domain.busy(range(self.rig.cache.num_blocks)))

    def forget(self, blocks: list[int]) -> None:
        """What is in these blocks of the cache does not matter; all others are as they were."""
        now = cache_memory(self.rig.cache)
        for name, bits in self.rig.device.items():
            bits[:, blocks] = now[name][:, blocks]
        assert_same(now, self.rig.device)
        self.rig.cache.mark_rewritten(blocks)

    def close(self) -> None:
        self.receiver.close(WAIT_S)
        self.listener.close(WAIT_S)
        self.scheduler.close(WAIT_S)
        assert self.pool.num_free_blocks == self.pool.num_blocks
        self.pool.close()


@pytest.fixture(scope="module")
def decode() -> Iterator[Decode]:
    with contextlib.closing(Decode()) as made:
        yield made


@pytest.fixture(scope="module")
def prefill(decode: Decode) -> Iterator[Prefill]:
    made = Prefill(decode.exported, decode.listener.path)
    yield made
    made.end()


@pytest.fixture(scope="module")
def another(decode: Decode) -> Iterator[Prefill]:
    made = Prefill(decode.exported, decode.listener.path)
    yield made
    made.end()
