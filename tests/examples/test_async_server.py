from __future__ import annotations

import asyncio

import pytest

from examples import async_server
from paddle_kv import CancelledError, LayerwiseScheduler
from tests.schedule.rig import Rig


def test_all_requests_have_their_blocks_back() -> None:
    assert asyncio.run(async_server.main()) == async_server.REQUESTS


def test_a_cancelled_transfer_raises_where_it_is_awaited_and_a_cancelled_task_leaves_it_alone() -> None:
    rig = Rig()

    async def run(scheduler: LayerwiseScheduler) -> None:
        save = scheduler.offload([1], [4], layerwise=True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_of(save), 0.05)
        assert save.error is None
        asyncio.get_running_loop().call_later(0.05, save.cancel)
        with pytest.raises(CancelledError):
            await save

    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        asyncio.run(run(scheduler))


async def _of(transfer: object) -> None:
    await transfer  # type: ignore[misc]
