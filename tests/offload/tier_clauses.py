"""The clauses of docs/offload.md that speak of a tier, and what each is broken by; run by ``test_contract.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paddle_kv import TransferError
from paddle_kv.offload import BlockState, below, tiered
from paddle_kv.schedule import arriving
from paddle_kv.tiers import saving
from paddle_kv.tracking import domain
from tests.offload.test_manager_tiers import damage
from tests.offload.tiered_rig import KEYS, SHORT_S, SPEC, WAIT_S, TieredRig, until

TIER = BlockState.TIER
MakeRig = Callable[..., TieredRig]


def clause_17(make: MakeRig) -> None:
    make().save(KEYS[:4])
    rig = make()
    rig.save(KEYS[:2])
    rig.engine.stages[1].clear()
    load = rig.load(KEYS[:4], [7, 6, 5, 4])
    assert rig.engine.asked == 2
    load.wait_layer(1, timeout_s=WAIT_S)
    assert all(rig.right(KEYS[:4], [7, 6, 5, 4], slice(0, 2)))
    with pytest.raises(TimeoutError):
        load.wait_layer(2, timeout_s=SHORT_S)
    rig.engine.open()
    load.wait(WAIT_S)
    assert all(rig.right(KEYS[:4], [7, 6, 5, 4]))


def clause_18(make: MakeRig) -> None:
    make().save(KEYS[:4])
    rig = make()
    damage(rig, KEYS[2])
    load = rig.load(KEYS[:4], [7, 6, 5, 4])
    with pytest.raises(TransferError):
        load.wait(WAIT_S)
    assert rig.manager.blocks_to_recompute(load) == [2]
    assert rig.right(KEYS[:4], [7, 6, 5, 4]) == [True, True, False, True]
    assert rig.manager.peek(KEYS[:4]) == 2


def clause_19(make: MakeRig) -> None:
    rig = make(when="write_back", host_blocks=8)
    rig.save(KEYS[:8])
    rig.engine.writes.clear()
    rig.manager.evict(2)
    until(lambda: rig.tier.stats()["jobs_in_flight"])
    gone = list(rig.manager._books.below.storing)  # type: ignore[attr-defined]
    for start in (20, 24, 28):
        rig.fill(KEYS[start : start + 4], range(4))
        rig.manager.save(KEYS[start : start + 4], range(4)).wait(WAIT_S)
    rig.engine.open()
    rig.settle()
    rig.forget()
    for key in gone:
        rig.load([key], [5]).wait(WAIT_S)
        assert rig.right([key], [5]) == [True]


def clause_20(make: MakeRig) -> None:
    rig = make(host_blocks=8)
    rig.engine.writes.clear()
    for start in range(0, 24, 4):
        rig.fill(KEYS[start : start + 4], range(4))
        save = rig.manager.save(KEYS[start : start + 4], range(4))
        save.wait(WAIT_S)
        rig.manager.stats()
    assert rig.manager.left_out(save) == [2, 3]  # six of eight are on their way down
    assert rig.manager.stats()["tier_dropped_blocks"] > 0


def clause_21(make: MakeRig) -> None:
    rig = make()
    rig.engine.writes.clear()
    rig.fill(KEYS[:2], [0, 1])
    rig.manager.save(KEYS[:2], [0, 1]).wait(WAIT_S)
    until(lambda: rig.tier.stats()["jobs_in_flight"])
    rig.manager.drop(KEYS[:1])
    rig.engine.open()
    rig.settle()
    assert rig.manager.evict(2) == 1
    assert rig.manager.states(KEYS[:1]) == [BlockState.ABSENT]
    assert rig.manager.states(KEYS[1:2]) == [TIER]


def clause_22(make: MakeRig) -> None:
    make().save(KEYS[:4])
    assert make().manager.peek(KEYS[:4]) == 4
    assert make(tier={"rank": 1}).manager.peek(KEYS[:4]) == 0


def clause_23(make: MakeRig) -> None:
    make().save(KEYS[:3])
    rig = make()
    rig.engine.stages[0].clear()
    prefetch = rig.manager.prefetch(KEYS[:3], timeout_s=1.0)  # all three are being read by then
    for _ in range(3):
        assert rig.engine.reading.acquire(timeout=WAIT_S)
    assert prefetch.wait(5.0)
    assert rig.manager.states(KEYS[:3]) == [TIER] * 3
    assert rig.pool.num_free_blocks == 9
    rig.engine.open()
    assert rig.manager.prefetch(KEYS[:3], timeout_s=WAIT_S).wait(WAIT_S)
    assert rig.manager.stats()["prefetched_blocks"] == 3
    assert rig.manager.evict(9) == 3


def all_layers(movement: Any, layers: Any) -> None:
    MARK(movement, range(SPEC.num_layers))


MARK = arriving.mark
CLAUSES = {int(name.partition("_")[2]): run for name, run in list(globals().items()) if name.startswith("clause_")}
MUTATIONS: dict[int, tuple[Any, str, Any]] = {
    17: (arriving, "mark", all_layers),
    18: (arriving, "lose", lambda movement, host_ids, message: arriving.fail(movement, message)),
    19: (domain.BlockDomain, "try_lease", lambda self, block_ids, write: True),
    20: (tiered.TieredBooks, "_most_held", lambda self: 1 << 30),
    21: (below.Below, "forget", lambda self, keys: None),
    22: (saving.Saver, "saved", lambda self, keys, block_ids: None),
    23: (tiered.TieredBooks, "fetched", lambda self, job, outcomes: None),
}
