"""What is left of a simulation when nobody holds it any more."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, TransferError
from paddle_kv.testing.simulator import Simulation
from paddle_kv.tracking import group

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")


def failed_save(simulation: Simulation, kept: list[Any]) -> None:
    """A save that fails; its handle goes when ``kept`` does."""
    cache, pool = DeviceCache(SPEC, 5, "cpu"), HostPool(SPEC, 8)
    scheduler = LayerwiseScheduler(cache, pool, backend=simulation.backend())
    simulation.device.break_copy(1)
    simulation.compute(writes=[(cache, 2, layer) for layer in range(2)], version="prompt")
    kept.append(scheduler.offload([2], [0]))
    with pytest.raises(TransferError):
        kept[0].wait()
    scheduler.close(1.0)
    simulation.verify()


def test_a_handle_that_goes_behind_the_end_of_its_simulation_leaves_nothing_behind() -> None:
    Simulation()
    gc.collect()
    before = set(group._guards)
    kept: list[Any] = []
    simulation = Simulation()
    failed_save(simulation, kept)
    del simulation
    kept.clear()
    gc.collect()  # its error has kept it; no section of that simulation comes any more
    assert not group._guards <= before
    Simulation()
    assert group._guards <= before


def test_a_simulation_that_goes_on_while_another_one_begins_loses_nothing() -> None:
    kept: list[Any] = []
    one = Simulation()
    failed_save(one, kept)
    kept.clear()
    Simulation()
    failed_save(one, kept)
    assert not any(one.held().values())
