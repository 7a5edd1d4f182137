"""A trace with real transfers finds what the simulation finds."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddle_kv.memory.host_pool import HostPool
from paddle_kv.offload.manager import KVOffloadManager
from paddle_kv.testing.prefixes.live_replay import link_bytes_per_s, live_replay, shrunk, spec_of
from paddle_kv.testing.prefixes.replay import WAYS, Costs, replay
from paddle_kv.testing.prefixes.trace import Request
from tests.offload.test_replay import prompts_of

COSTS = Costs(block_bytes=480, num_layers=3, link_bytes_per_s=1e9, prefill_tokens_per_s=60_000.0)
TIME_SCALE = 1e-3


def requests_of(count: int) -> list[Request]:
    import random

    prompts = prompts_of(random.Random(3), count, 4, 9)
    return [Request(0.5 * number, 512 * len(prompt), prompt) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_hits_are_those_of_the_simulation(policy: str) -> None:
    requests, steps = requests_of(60), []
    run = live_replay(requests, policy, 40, COSTS, TIME_SCALE, steps.append)
    simulated = replay(requests, policy, 40, COSTS)
    assert run.hits == simulated.hits
    assert (run.saved_blocks, run.evicted_blocks) == (simulated.saved_blocks, simulated.evicted_blocks)
    assert 0 < run.hit_blocks < run.num_blocks and run.evicted_blocks > 0
    assert steps == list(range(1, len(WAYS) * len(requests) + 1))


@pytest.mark.parametrize("tier_blocks", [400, 60])
def test_hits_in_a_tier_are_those_of_the_simulation(tmp_path: Path, tier_blocks: int) -> None:
    requests = requests_of(60)
    run = live_replay(requests, "lru", 20, COSTS, TIME_SCALE, tier_blocks=tier_blocks, tier_folder=tmp_path)
    simulated = replay(requests, "lru", 20, COSTS, tier_blocks=tier_blocks)
    alone = replay(requests, "lru", 20, COSTS)
    assert sum(simulated.tier_hits) > 0 and simulated.hit_blocks > alone.hit_blocks
    if tier_blocks == 400:  # room for all
        assert (run.hits, run.tier_hits) == (simulated.hits, simulated.tier_hits)
        assert run.hits == replay(requests, "lru", 400, COSTS).hits
    else:  # an engine makes room in an order of its own
        assert run.hit_blocks == pytest.approx(simulated.hit_blocks, rel=0.2)
    assert list(tmp_path.iterdir()) == []


def test_what_comes_from_a_tier_takes_longer() -> None:
    requests = requests_of(40)
    quick, slow = (
        replay(requests, "lru", 20, replace(COSTS, tier_bytes_per_s=rate), tier_blocks=400) for rate in (1e12, 1e6)
    )
    block_s = [COSTS.block_bytes / rate for rate in (COSTS.link_bytes_per_s, 1e6)]
    for found, below, one, other in zip(
        quick.hits, quick.tier_hits, quick.prefills["whole"], slow.prefills["whole"], strict=True
    ):
        assert one.load_s == pytest.approx(found * block_s[0])
        assert other.load_s == pytest.approx((found - below) * block_s[0] + below * block_s[1])
    best = replay(requests, "optimum", 20, COSTS, tier_blocks=30)
    assert best.hits == replay(requests, "optimum", 50, COSTS).hits


def test_a_policy_that_would_evict_what_is_being_loaded_differs_a_little() -> None:
    """S3-FIFO may choose a block that this very request has found; a real one is held by its load."""
    requests = requests_of(60)
    run, simulated = live_replay(requests, "s3fifo", 40, COSTS, TIME_SCALE), replay(requests, "s3fifo", 40, COSTS)
    assert run.hit_blocks == pytest.approx(simulated.hit_blocks, rel=0.1)


def test_times_are_measured() -> None:
    requests = requests_of(20)
    run = live_replay(requests, "lru", 400, COSTS, TIME_SCALE)
    arrivals = shrunk(requests, TIME_SCALE)
    assert [request.arrival_s for request in arrivals[:3]] == pytest.approx([0.0, 0.0005, 0.001])
    for way in WAYS:
        previous_s = 0.0
        for prefill, request, found in zip(run.prefills[way], arrivals, run.hits, strict=True):
            tokens = request.input_tokens if way == "recompute" else max(1, request.input_tokens - 512 * found)
            assert prefill.start_s == max(request.arrival_s, previous_s)
            assert prefill.end_s - prefill.start_s >= tokens / 60_000 * TIME_SCALE  # the model did sleep
            assert (prefill.load_s > 0) == (way != "recompute" and found > 0)
            previous_s = prefill.end_s
    assert link_bytes_per_s(run, COSTS.block_bytes) == pytest.approx(
        run.hit_blocks * COSTS.block_bytes / sum(one.load_s for one in run.prefills["layerwise"])
    )


def test_the_call_that_saves_counts_in_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be longer than the model that is shrunk; and no load may gain from it."""
    held_s = 0.05
    save = KVOffloadManager.save

    def slowly(*arguments: Any, **named: Any) -> Any:
        time.sleep(held_s)
        return save(*arguments, **named)

    monkeypatch.setattr(KVOffloadManager, "save", slowly)
    run = live_replay(requests_of(6), "lru", 400, COSTS, TIME_SCALE)
    for way in WAYS:
        taken_s = [done.end_s - done.start_s for done in run.prefills[way]]
        assert statistics.median(taken_s) < held_s, way  # each request saves; a few may be held up by the machine
        assert all(done.compute_s > 0 for done in run.prefills[way])
    assert run.hit_blocks > 0


def test_blocks_have_the_layers_and_bytes_that_were_asked_for() -> None:
    spec = spec_of(COSTS)
    assert (spec.num_layers, spec.block_bytes * spec.num_layers) == (3, 480)


def test_bad_sizes_are_named_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[HostPool] = []
    close = HostPool.close
    monkeypatch.setattr(HostPool, "close", lambda pool: closed.append(pool) or close(pool))
    requests = requests_of(2)
    with pytest.raises(ValueError, match="time_scale = 0"):
        live_replay(requests, "lru", 4, COSTS, 0)
    with pytest.raises(ValueError, match="capacity_blocks = 0"):
        live_replay(requests, "lru", 0, COSTS, 1.0)
    with pytest.raises(ValueError, match="block_bytes = 481 must be a multiple of 12"):
        live_replay(requests, "lru", 4, replace(COSTS, block_bytes=481), 1.0)
    assert closed == []
    with pytest.raises(ValueError, match="'mru'"):
        live_replay(requests, "mru", 4, COSTS, 1.0)
    assert len(closed) == 1
