"""Prompts of many kinds, with the times at which they come: what policies are tried on."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

Prompts = list[tuple[float, list[int]]]
Pause = Callable[[random.Random], float]


def talks(
    seed: int,
    num_prompts: int,
    pause_s: Pause,
    *,
    goes_on: float | Callable[[int], float] = 0.6,
    most_fresh: int = 20,
    per_s: float = 1.0,
) -> Prompts:
    """Sessions behind one common block, each turn longer than the one before. They go on, when they have paused, with
    the same chance after each turn, or with one by the number of turns."""
    rng, fresh, number = random.Random(seed), count(1), count()
    waiting: list[tuple[float, int, list[int], int]] = []
    prompts: Prompts = []
    begun_s = 0.0
    while len(prompts) < num_prompts:
        begun_s += rng.expovariate(per_s)
        heapq.heappush(waiting, (begun_s, next(number), [0], 1))
        while waiting and waiting[0][0] <= begun_s:
            arrival_s, _, prompt, turn = heapq.heappop(waiting)
            prompt = prompt + [next(fresh) for _ in range(rng.randint(1, most_fresh))]
            prompts.append((arrival_s, prompt))
            if rng.random() < (goes_on(turn) if callable(goes_on) else goes_on):
                heapq.heappush(waiting, (arrival_s + pause_s(rng), next(number), prompt, turn + 1))
    return prompts[:num_prompts]


def sessions(seed: int, num_prompts: int, *, length: int = 10, memory: bool = True) -> Prompts:
    """With ``memory`` those that have gone on are likelier to go on, after a minute or two."""
    if memory:
        return talks(
            seed,
            num_prompts,
            lambda rng: rng.uniform(40, 120),
            goes_on=lambda turn: min(0.9, 0.25 * turn),
            most_fresh=2 * length,
        )
    return talks(seed, num_prompts, lambda rng: rng.expovariate(1 / 60), goes_on=0.5, most_fresh=2 * length)


def constant_return(capacity: int) -> Prompts:
    """The chance of a return is the same at any age and turn: the order of use is as good as any."""
    return sessions(capacity, 2500, memory=False)


def scans(capacity: int) -> Prompts:
    """A hot set, and long prompts that never come again."""
    rng, fresh = random.Random(capacity), count(10_000)
    prompts = []
    for number in range(2500):
        if rng.random() < 0.2:
            prompt = [next(fresh) for _ in range(capacity // 8 + 3)]
        else:
            talk = rng.randrange(max(2, capacity // 12))
            prompt = [8 * talk + position for position in range(rng.randint(1, 8))]
        prompts.append((0.7 * number, prompt))
    return prompts


def zipf(capacity: int) -> Prompts:
    rng = random.Random(capacity)
    prompts = []
    for number in range(4000):
        talk = min(int(rng.paretovariate(0.7)), 2000)
        prompts.append((0.4 * number, [10 * talk + position for position in range(rng.randint(1, 10))]))
    return prompts


def loops(capacity: int) -> Prompts:
    """Round and round: more than fits, and a little less."""
    prompts = []
    for number in range(3000):
        talks = capacity // 10 + 2 if number < 1500 else max(1, capacity // 10 - 1)
        prompts.append((0.5 * number, [10 * (number % talks) + position for position in range(10)]))
    return prompts


def bursts(capacity: int) -> Prompts:
    """Each prompt comes three times in a row, and never again; then the kind of sessions changes."""
    prompts = [(0.5 * number, [1000 + 5 * (number // 3) + position for position in range(5)]) for number in range(2000)]
    return prompts + [(1000.0 + time_s, [-key - 1 for key in keys]) for time_s, keys in sessions(7, 1200)]


STREAMS: dict[str, Callable[[int], Prompts]] = {
    "constant return": constant_return,
    "sessions": lambda capacity: sessions(capacity, 2500),
    "scans": scans,
    "zipf": zipf,
    "loops": loops,
    "bursts": bursts,
}
