"""An exception of a signal handler between any two instructions of a call: no job without an end, no block held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paddle_kv import DeviceCache, KVCacheSpec, LayerwiseScheduler
from paddle_kv.testing.tiers.rig import WAIT_S, Rig, keys
from paddle_kv.tiers import FilesEngine, Job, Saver, load
from tests.schedule.test_signals import At

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=3, block_size=1, dtype="float32", latent=True)

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers


class Server:
    def __init__(self, folder: Path) -> None:
        self.engine = FilesEngine({folder: 1 << 20}, threads_per_root=1)
        self.rig = Rig(self.engine, SPEC, num_blocks=3)
        self.tier, self.pool = self.rig.tier, self.rig.pool
        self.scheduler = LayerwiseScheduler(DeviceCache(SPEC, 2, "cpu"), self.pool)
        self.pool.allocate(3)
        self.rig.store(keys(1))

    def store(self) -> None:
        self.tier.store([Job([b"stored"], [0], timeout_s=WAIT_S)])

    def load(self) -> None:
        self.tier.load([Job(keys(1), [1], timeout_s=WAIT_S)])

    def save(self) -> None:
        Saver(self.tier, "write_through", timeout_s=WAIT_S).saved([b"saved"], [0])

    def load_to_device(self) -> None:
        load(self.tier, self.scheduler, keys(1), [1], [1], timeout_s=WAIT_S)

    def wait(self) -> None:
        self.tier.drain(WAIT_S)
        self.tier.finished()

    def check(self) -> None:
        self.tier.drain(WAIT_S)
        self.scheduler.drain(WAIT_S)
        assert self.pool.domain.busy(range(3)) == []
        self.tier.delete([b"stored", b"saved"])
        self.pool.mark_rewritten([1])
        assert self.rig.load(keys(1), [1]).done

    def close(self) -> None:
        self.scheduler.close(WAIT_S)
        self.rig.close()
        self.engine.close(WAIT_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("call", [Server.store, Server.load, Server.save, Server.load_to_device, Server.wait])
def test_every_instruction(server: Server, call: Callable[[Server], None]) -> None:
    number = 1
    while (at := At(number)).run(lambda: call(server)):
        try:
            server.check()
        except Exception as error:
            raise AssertionError(f"interrupted in {at.where}") from error
        number += 1
    assert number > 20
    server.check()
