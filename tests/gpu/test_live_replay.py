"""A trace with real transfers on a GPU finds what the simulation finds."""

from __future__ import annotations

import pytest

from paddle_kv.testing.prefixes.live_replay import live_replay
from paddle_kv.testing.prefixes.replay import Costs, replay
from tests.offload.test_live_replay import requests_of

COSTS = Costs(block_bytes=1 << 20, num_layers=4, link_bytes_per_s=50e9, prefill_tokens_per_s=60_000.0)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_hits_are_those_of_the_simulation(policy: str) -> None:
    requests = requests_of(60)
    run = live_replay(requests, policy, 40, COSTS, 1e-2)
    simulated = replay(requests, policy, 40, COSTS)
    assert run.hits == simulated.hits
    assert (run.saved_blocks, run.evicted_blocks) == (simulated.saved_blocks, simulated.evicted_blocks)
    assert run.transfer_s > 0
