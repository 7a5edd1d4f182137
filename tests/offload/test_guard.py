"""What keeps a policy from falling behind the order of use, held against all of it computed plainly."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from paddle_kv.offload import guard
from paddle_kv.offload.guard import Guard


class Plain:
    """With what is written there: (shadow blocks, behind, ahead, granted share, watched stays, turnovers)."""

    def __init__(self, capacity: int, numbers: tuple[Any, ...]) -> None:
        shadow, self.behind, self.ahead, granted_share, self.stays, turnovers = numbers
        self.every = next(2**n for n in itertools.count() if capacity // 2**n <= shadow)
        self.size, self.memory = capacity // self.every, turnovers * capacity
        self.granted = self.size / granted_share
        self.used: list[tuple[Any, float]] = []  # the one used longest ago first
        self.lead = self.asked = 0.0
        self.started_s: float | None = None
        self.warm = self.trusts = False

    def is_sampled(self, key: Any) -> bool:
        number = key[0] + 256 * key[1] if isinstance(key, bytes) else hash(key) * 0x9E3779B97F4A7C15 // 2**40
        return bool(number % self.every == 0)

    def saw(self, prompt: list[Any], found: int, now_s: float) -> None:
        self.started_s = now_s if self.started_s is None else self.started_s
        found = len([key for key in prompt[:found] if self.is_sampled(key)])
        prompt = [key for key in prompt if self.is_sampled(key)]
        there = {key for key, _ in self.used}
        by_use = len(list(itertools.takewhile(there.__contains__, prompt)))
        self.asked += len(prompt)
        allowed = self.granted + self.behind * self.asked
        self.lead = min(self.lead + found - by_use, 2 * self.granted + self.ahead * self.asked)
        if self.asked * self.every > self.memory:
            self.lead, self.asked = self.lead / 2, self.asked / 2
        if self.warm:
            self.trusts = self.lead >= -allowed if self.trusts else self.lead >= -allowed / 2
        new = set(prompt)
        self.used = [one for one in self.used if one[0] not in new]
        self.used += [(key, now_s) for key in reversed(prompt)]
        gone, self.used = self.used[: -self.size], self.used[-self.size :]
        for _, used_s in gone:
            if not self.warm and 2.0 <= now_s - used_s <= (now_s - self.started_s) / self.stays:
                self.warm = self.trusts = True
                self.lead = self.asked = 0.0


AS_IT_IS = (4096, 0.001, 0.002, 32, 4.0, 64)
ROUND = (8, 2**-3, 2**-2, 16, 4.0, 8)  # where bounds are met exactly
NAMES = ("SHADOW_BLOCKS", "BEHIND", "AHEAD", "GRANTED_SHARE", "WATCHED_STAYS", "MEMORY_TURNOVERS")


@pytest.mark.parametrize("numbers", [AS_IT_IS, ROUND])
@pytest.mark.parametrize("kind", ["bytes", "int"])
@pytest.mark.parametrize("capacity", [1, 5, 48, 70])
@pytest.mark.parametrize("seed", range(3))
def test_it_trusts_when_plain_counting_does(
    seed: int, capacity: int, kind: str, numbers: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(NAMES, numbers, strict=True) if numbers is ROUND else ():
        monkeypatch.setattr(guard, name, value)
    rng = random.Random(seed)
    keys = [rng.randbytes(8) if kind == "bytes" else rng.randrange(2**60) for _ in range(3 * capacity)]
    made, plain, now_s = Guard(capacity), Plain(capacity, numbers), 500.0
    better = 0.5
    for number in range(400):
        now_s += rng.choice([0.25, 1.0, 2.0])
        if number % 50 == 0:
            better = rng.choice([0.0, 0.2, 0.5, 1.0])
        prompt = rng.sample(keys, rng.randint(0, len(keys)))
        found = len(prompt) if rng.random() < better else rng.randint(0, len(prompt) // 8)
        made.saw(prompt, found, now_s)
        plain.saw(prompt, found, now_s)
        assert (made.warm, made.trusts) == (plain.warm, plain.trusts)
        assert (made._lead, made._asked) == (plain.lead, plain.asked)
        assert list(made._order.items()) == plain.used


@pytest.mark.parametrize("trusts", [True, False])
def test_a_bound_that_is_just_met_is_kept(trusts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BEHIND", 0.5)
    made = Guard(32)  # of which one block is granted
    made.warm, made.trusts = True, trusts
    made._asked, made._lead = 1.0, -2.0 if trusts else -1.0
    made.saw([b"xyz"], 0, 1.0)
    assert made.trusts


@pytest.mark.parametrize(
    ("capacity", "shadow", "size"),
    [(4096, 4096, 4096), (4097, 4096, 2048), (8192, 4096, 4096), (8195, 4096, 2048), (6000, 2, 2)],
)
def test_of_large_caches_a_part_is_watched(
    capacity: int, shadow: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shadow != 4096:
        monkeypatch.setattr(guard, "SHADOW_BLOCKS", shadow)
    made, plain = Guard(capacity), Plain(capacity, (shadow, *AS_IT_IS[1:]))
    rng = random.Random(1)
    prompt = [rng.randbytes(8) for _ in range(2 * capacity)]
    for one in (made, plain):
        one.saw(prompt, 1000, 0.0)
    assert list(made._order.items()) == plain.used
    assert (len(plain.used), plain.size, made._lead) == (size, size, plain.lead)
