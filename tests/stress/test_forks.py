"""Forks while transfers run, sections are entered and other threads call: no child hangs in any call."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterator

import pytest

from paddle_kv import CancelledError, ForkedError, LayerwiseScheduler, LeasedError, TransferError
from paddle_kv.offload import KVOffloadManager
from tests.schedule.rig import WAIT_S, Rig

FORKS = 60 * int(os.environ.get("PADDLE_KV_STRESS", "1"))
REFUSED = (TransferError, CancelledError, LeasedError, MemoryError, TimeoutError)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def child(rig: Rig, scheduler: LayerwiseScheduler, manager: KVOffloadManager, transfers: list) -> None:
    for transfer in transfers[-3:]:
        transfer.cancel()
        with contextlib.suppress(*REFUSED):
            transfer.wait(WAIT_S)
        assert transfer.done()
    with pytest.raises(ForkedError):
        scheduler.offload([1], [4])
    scheduler.stats()
    scheduler.drain(WAIT_S)
    with contextlib.suppress(*REFUSED):
        rig.pool.free(rig.pool.allocate(1))
    rig.pool.mark_rewritten(range(17))
    rig.cache.mark_rewritten(range(13))
    with rig.pool.lease(range(17), write=True, timeout_s=WAIT_S):
        pass
    manager.stats()
    with LayerwiseScheduler(rig.cache, rig.pool) as own:
        own.offload([1, 2], [4, 5]).wait(WAIT_S)
        own.onload([4], [3]).wait(WAIT_S)
        with KVOffloadManager(own) as another, contextlib.suppress(*REFUSED):
            another.save(another.block_hashes(range(14)), [1, 2]).wait(WAIT_S)
    scheduler.close(WAIT_S)


def fork(*arguments: object) -> int:
    number = os.fork()
    if number == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)  # a child that hangs ends by it, and so with another code
            child(*arguments)
            code = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc(file=sys.stderr)
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_forks(quick_switches: None, where: str) -> None:
    rig, stop, codes = Rig(), threading.Event(), []
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    manager = KVOffloadManager(scheduler, capacity_bytes=4 * 5 * rig.spec.block_bytes)
    transfers: list = []
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            call(seed)
        except BaseException as error:  # noqa: BLE001  told by the main thread
            failures.append(error)

    def call(seed: int) -> None:
        choose = random.Random(seed)
        hashes = manager.block_hashes(range(14))
        while not stop.is_set():
            with contextlib.suppress(*REFUSED):
                device, host = choose.sample(range(13), 2), choose.sample(range(17), 2)
                transfers.append(scheduler.offload(device, host, layerwise=choose.random() < 0.3))
                transfers.append(scheduler.onload(host, device))
                if choose.random() < 0.3:
                    transfers[-2].cancel()
                manager.save(hashes, device)
                with rig.pool.lease(host[:1], timeout_s=0.01):
                    pass
                rig.pool.num_free_blocks  # noqa: B018
            del transfers[:-20]
            rig.pool.mark_rewritten(range(17))
            rig.cache.mark_rewritten(range(13))

    def forks() -> None:
        codes.extend(fork(rig, scheduler, manager, transfers) for _ in range(FORKS // 2))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        if where == "main thread":
            forks()
        else:
            forking = threading.Thread(target=forks)
            forking.start()
            forking.join()
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
    transfers.clear()
    manager.close()
    scheduler.close(WAIT_S)
    assert codes == [0] * (FORKS // 2)
    assert failures == []
