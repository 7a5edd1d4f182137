"""A server with the library is never slower than one without, nor than one that loads all: in simulated time."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from paddle_kv.testing.prefixes.channel import Fault, Faults
from paddle_kv.testing.prefixes.conversations import conversations
from paddle_kv.testing.prefixes.replay import Costs, replay
from paddle_kv.testing.prefixes.serving import COMPUTE, DECIDE, LOAD, Machine, serve
from paddle_kv.testing.prefixes.trace import Request

# Llama-3.1-70B, 8 ranks, 512 tokens a block.
COSTS = Costs(512 * 40_960, 80, 50e9, 60_000.0, 512, 5e9)
REQUESTS = conversations(250, 1.5)
Found = list[tuple[int, int]]


@cache
def found_of(host_blocks: int) -> tuple[tuple[int, int], ...]:
    run = replay(REQUESTS, "lru", host_blocks, COSTS, tier_blocks=40_000)
    return tuple((hits - below, below) for hits, below in zip(run.hits, run.tier_hits, strict=True))


def machine_of(link_gbps: float = 50.0, tier_gbps: float = 5.0, **others: object) -> Machine:
    costs = replace(COSTS, link_bytes_per_s=link_gbps * 1e9, tier_bytes_per_s=tier_gbps * 1e9)
    return replace(Machine(costs), **others)  # type: ignore[arg-type]


def first_tokens_s(found: Found | tuple[tuple[int, int], ...], machine: Machine, way: str) -> np.ndarray:
    return np.array([one.first_token_s for one in serve(REQUESTS, found, machine, way)])


@pytest.mark.parametrize(("link_gbps", "tier_gbps"), [(0.1, 0.05), (2, 0.05), (3, 5), (10, 0.5), (50, 5)])
@pytest.mark.parametrize("queue", [0, 1, 2, 4, 8])
def test_it_is_never_slower_than_the_better_of_computing_and_loading(
    link_gbps: float, tier_gbps: float, queue: int
) -> None:
    found, machine = found_of(1200), machine_of(link_gbps, tier_gbps, queue=queue)
    compute, load, own = (first_tokens_s(found, machine, way) for way in (COMPUTE, LOAD, DECIDE))
    skipped = 20  # it has measured nothing yet, while "load" is told that loading is what to do
    for figure in (np.mean, lambda values: np.percentile(values, 99)):
        assert figure(own[skipped:]) <= 1.02 * min(figure(compute[skipped:]), figure(load[skipped:]))
    assert own[:skipped].mean() <= 1.02 * compute[:skipped].mean()


@pytest.mark.parametrize("queue", [1, 4, 8])
@pytest.mark.parametrize("link_gbps", [2, 5, 20, 50])
def test_a_link_is_not_blamed_for_what_waits_for_others(link_gbps: float, queue: int) -> None:
    """Prompts that wait load ahead, in a crowded server, from sources that keep their time: nothing is late."""
    requests = conversations(250, 5.0)
    for host_blocks, tier_blocks in ((10_000, 0), (1200, 40_000)):
        run = replay(requests, "lru", host_blocks, COSTS, tier_blocks=tier_blocks)
        below = run.tier_hits or [0] * len(run.hits)
        found = [(hits - tier, tier) for hits, tier in zip(run.hits, below, strict=True)]
        machine = machine_of(link_gbps, queue=queue)
        times = {way: serve(requests, found, machine, way) for way in (LOAD, DECIDE)}
        assert sum(one.faults for one in times[DECIDE]) == 0
        load_s, own_s = (np.mean([one.first_token_s for one in times[way]]) for way in (LOAD, DECIDE))
        assert own_s <= 1.01 * load_s


@pytest.mark.parametrize(("num_prompts", "blocks"), [(5, 8), (10, 40)])
def test_prompts_that_come_at_once_load_as_quickly_as_if_all_is_loaded(num_prompts: int, blocks: int) -> None:
    """Of a quick link, with all of them in the queue."""
    rng = random.Random(1)
    requests, found = [], []
    for number in range(60 * num_prompts):
        size = rng.randint(1, 2 * blocks)
        requests.append(Request(5.0 * (number // num_prompts), 512 * size + 100, list(range(size))))
        found.append((size, 0))
    machine = machine_of(50, queue=num_prompts)
    load_s, own_s = (
        np.mean([one.first_token_s for one in serve(requests, found, machine, way)][5 * num_prompts :])
        for way in (LOAD, DECIDE)
    )
    assert own_s <= 1.02 * load_s


def mixed(seed: int, blocks: int, in_host: float, load: float) -> tuple[list[Request], Found]:
    """Prompts of so many blocks, of which that part lies in host memory and the others, behind them, in the tier; a
    third more is found nowhere. ``load``: the part of the time in which a server that computes all would be busy."""
    rng = random.Random(seed)
    now_s, requests, found = 0.0, [], []
    for _ in range(300):
        now_s += rng.expovariate(load / (4 / 3 * blocks * 512 / 60_000))
        size = rng.randint(1, 2 * blocks)
        of_host = round(size * in_host)
        total = size + rng.randint(0, max(1, 2 * size // 3))
        requests.append(Request(now_s, 512 * total + rng.randint(1, 512), list(range(total))))
        found.append((of_host, size - of_host))
    return requests, found


@pytest.mark.parametrize(("link_gbps", "tier_gbps"), [(5, 3), (5, 5), (20, 3), (50, 5)])
@pytest.mark.parametrize(
    ("blocks", "in_host", "queue"),
    [(8, 0.8, 0), (8, 0.5, 0), (8, 0.8, 4), (8, 0.5, 4), (30, 0.7, 0), (30, 0.7, 4), (30, 0.2, 4)],
)
def test_prompts_half_in_host_memory_and_half_in_a_tier_are_never_slower(
    blocks: int, in_host: float, link_gbps: float, tier_gbps: float, queue: int
) -> None:
    requests, found = mixed(1, blocks, in_host, 0.5)
    machine = machine_of(link_gbps, tier_gbps, queue=queue)
    compute, load, own = (
        np.array([one.first_token_s for one in serve(requests, found, machine, way)][20:])
        for way in (COMPUTE, LOAD, DECIDE)
    )
    assert own.mean() <= 1.02 * min(compute.mean(), load.mean())
    # What a short prompt has on its way from a tier when its turn comes is not put side by side any more.
    most = 1.04 if queue and blocks < 10 and in_host < 0.6 else 1.02
    assert np.percentile(own, 99) <= most * min(np.percentile(compute, 99), np.percentile(load, 99))


def test_at_the_crossing_it_is_much_quicker_than_both() -> None:
    """Where loading all and computing all take as long as each other."""
    found = found_of(10_000)
    low, high = 0.5, 8.0
    for _ in range(7):
        middle = (low * high) ** 0.5
        machine = machine_of(middle)
        compute_s, load_s = (first_tokens_s(found, machine, way).mean() for way in (COMPUTE, LOAD))
        low, high = (middle, high) if load_s > compute_s else (low, middle)
    machine = machine_of((low * high) ** 0.5)
    compute_s, load_s, own_s = (first_tokens_s(found, machine, way).mean() for way in (COMPUTE, LOAD, DECIDE))
    assert load_s == pytest.approx(compute_s, rel=0.1)
    assert own_s <= 0.62 * min(compute_s, load_s)


FAULTS: dict[str, Faults] = {
    "stalls": lambda read, now_s, blocks: Fault(stall_s=10),
    "stalls later": lambda read, now_s, blocks: Fault(stall_s=10 * (read > 40)),
    "stalls now and then": lambda read, now_s, blocks: Fault(stall_s=10 * (read % 20 == 0)),
    "fails": lambda read, now_s, blocks: Fault(fails=True),
    "fails later": lambda read, now_s, blocks: Fault(fails=read > 40),
    "fails now and then": lambda read, now_s, blocks: Fault(fails=read % 7 == 0),
    "is ten times slower than it was": lambda read, now_s, blocks: Fault(factor=1 + 9 * (read > 40)),
    "answers quickly where little is asked": lambda read, now_s, blocks: Fault(factor=1 + 9 * (blocks > 1)),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("queue", [0, 4])
def test_a_tier_that_cannot_be_relied_on_costs_nothing(name: str, queue: int) -> None:
    """From the third request on, of those that find something; all that is found lies in the tier."""
    found = [(0, sum(one)) for one in found_of(10_000)]
    machine = machine_of(20, queue=queue, faults=FAULTS[name])
    compute, own = (first_tokens_s(found, machine, way) for way in (COMPUTE, DECIDE))
    third = [number for number, one in enumerate(found) if one[1]][2]
    assert own[third:].mean() <= 1.05 * compute[third:].mean()
    assert np.percentile(own[third:], 99) <= 1.05 * np.percentile(compute[third:], 99)
    if name in ("stalls", "fails"):
        assert (own <= 1.05 * compute).all()


def test_a_tier_that_recovers_is_used_again() -> None:
    found = [(0, sum(one)) for one in found_of(10_000)]
    machine = machine_of(20, faults=lambda read, now_s, blocks: Fault(stall_s=10 * (now_s < 60)))
    served = serve(REQUESTS, found, machine, DECIDE)
    late = [one for one, request in zip(served, REQUESTS, strict=True) if request.arrival_s > 110]
    assert sum(one.loaded_blocks for one in late) > 0.5 * sum(one.found_blocks for one in late)


def test_it_takes_what_it_expected() -> None:
    """Without noise, and once everything is measured, in an empty server."""
    requests = [Request(10.0 * number, 512 * 60 + 300, list(range(60))) for number in range(12)]
    found = [(60, 0)] * 12
    served = serve(requests, found, machine_of(4, noise=0.0), DECIDE)[6:]
    for one in served:
        assert one.decision is not None and one.decision.choice == "meet"
        assert one.first_token_s == pytest.approx(one.decision.expected_s, rel=0.08)
        assert one.loaded_blocks == pytest.approx(60 - one.decision.host_first, abs=2)


def test_ways_of_one_request_by_hand() -> None:
    """100 blocks of 10 ms each way; layers: 10."""
    costs = Costs(1000, 10, 1e5, 51_200.0, 512, 1e5)
    machine = Machine(costs, attention_doubles_at=1e12, chunk_tokens=512, noise=0.0)
    requests = [Request(0.0, 512 * 101, list(range(101)))]

    def taken_s(found: tuple[int, int], way: str) -> float:
        [one] = serve(requests, [found], machine, way)
        return one.first_token_s

    assert taken_s((100, 0), COMPUTE) == pytest.approx(1.01)
    assert taken_s((100, 0), LOAD) == pytest.approx(1.0 + 0.001)
    assert taken_s((0, 100), LOAD) == pytest.approx(1.0 + 0.1 + 0.001)  # out of the tier, and its last layer on
    assert taken_s((60, 40), LOAD) == pytest.approx(1.0 + 0.001)  # the link moves all of them, and only it is busy
    assert taken_s((20, 80), LOAD) == pytest.approx(1.0 + 0.001)  # 0.8 s in the tier, of which the link is idle for 0.6
    with pytest.raises(ValueError, match="way = 'whole'"):
        taken_s((1, 0), "whole")
