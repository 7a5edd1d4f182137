"""What keeps a policy from falling behind the order of use, held against all of it computed plainly."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from paddle_kv.offload import guard
from paddle_kv.offload.guard import Guard


class Verdict:
    """Of duels that are said to have gone that way."""

    def __init__(self) -> None:
        self.asked_blocks = 0
        self.won = self.lost = False
        self.most_failures = 0
        self.clears = 0

    def won_after(self, failures: int) -> bool:
        return self.won and failures <= self.most_failures

    def clear(self) -> None:
        self.clears += 1
        self.won = self.lost = False


class Plain:
    """With what is written there: (shadow blocks, behind, chance, ahead, share, trial turnovers, watched stays,
    memory turnovers, long)."""

    def __init__(self, capacity: int, numbers: tuple[Any, ...], duels: Verdict) -> None:
        shadow, self.behind, self.chance, self.ahead, share, trial_turnovers, self.stays, turnovers, self.long = numbers
        self.duels, self.has_won, self.tried = duels, False, False
        self.failures = 0
        self.every = next(2**n for n in itertools.count() if capacity // 2**n <= shadow)
        self.size, self.memory = capacity // self.every, turnovers * capacity
        self.share = self.size / share
        self.squares = 0.0
        self.trial_from = trial_turnovers * self.size
        self.used: list[tuple[Any, float]] = []  # the one used longest ago first
        self.lacking: set[Any] = set()
        self.lead = self.steady = self.asked = self.prompts = 0.0
        self.started_s: float | None = None
        self.warm = self.trusts = False
        self.stay_s = 0.0

    def is_sampled(self, key: Any) -> bool:
        number = key[0] + 256 * key[1] if isinstance(key, bytes) else hash(key) * 0x9E3779B97F4A7C15 // 2**40
        return bool(number % self.every == 0)

    def saw(self, prompt: list[Any], found: int, now_s: float) -> None:
        self.started_s = now_s if self.started_s is None else self.started_s
        found = len([key for key in prompt[:found] if self.is_sampled(key)])
        prompt = [key for key in prompt if self.is_sampled(key)]
        if not prompt:
            return
        there = {key for key, _ in self.used}
        by_use = len(list(itertools.takewhile(there.__contains__, prompt)))
        self.asked += len(prompt)
        self.squares += (found - by_use) ** 2
        self.prompts += 1
        most, long = self.share + self.ahead * self.asked, self.long * self.asked / self.prompts
        self.lead = min(self.lead + (found - by_use), most)
        self.steady = min(self.steady + sorted([-long, found - by_use, long])[1], most)
        if self.asked * self.every > self.memory:
            self.lead, self.asked, self.squares = self.lead / 2, self.asked / 2, self.squares / 4
            self.steady, self.prompts = self.steady / 2, self.prompts / 2
        allowed = self.behind * self.asked
        is_behind = min(self.lead, self.steady) < -allowed / 2
        if self.warm and self.trusts:
            if self.has_won:
                chance = min(self.chance * math.sqrt(self.squares), allowed + self.share) / 2**self.failures
                few = max(allowed, self.long * self.asked / self.prompts) / 2**self.failures
                self.trusts = self.lead >= -allowed - chance and self.steady >= -allowed - few
            else:
                self.trusts = self.lead >= -allowed
            self.failures += not self.trusts
            if not (self.trusts or self.has_won):
                self.lacking = set()
        elif self.warm and (not is_behind or not self.tried or self.duels.won_after(self.failures)):
            if is_behind or not self.tried:
                self.lead = self.steady = 0.0
            is_open = not self.duels.lost and self.asked >= self.trial_from
            self.has_won = self.duels.won
            self.trusts = self.has_won or is_open
            self.squares = 0.0 if self.trusts else self.squares
            self.tried = self.tried or self.trusts
        new = set(prompt)
        self.used = [one for one in self.used if one[0] not in new]
        self.used += [(key, now_s) for key in reversed(prompt)]
        gone, self.used = self.used[: -self.size], self.used[-self.size :]
        self.lacking -= {*prompt, *(key for key, _ in gone)}
        for _, used_s in gone:
            self.stay_s = now_s - used_s
            if not self.warm and 2.0 <= now_s - used_s <= (now_s - self.started_s) / self.stays:
                self.warm = True


AS_IT_IS = (16384, 0.001, 1.0, 0.005, 32, 8, 4.0, 64, 4.0)
ROUND = (8, 2**-3, 1.0, 2**-2, 8, 2, 4.0, 8, 0.5)  # where bounds are met exactly
NAMES = (
    "SHADOW_BLOCKS",
    "BEHIND",
    "CHANCE",
    "AHEAD",
    "SHARE",
    "TRIAL_TURNOVERS",
    "WATCHED_STAYS",
    "MEMORY_TURNOVERS",
    "LONG",
)


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
    made, duels, now_s = Guard(capacity), Verdict(), 500.0
    made.duels = duels  # type: ignore[assignment]
    plain = Plain(capacity, numbers, duels)
    better, asked_blocks, begun = 0.5, 0, 0
    for number in range(400):
        now_s += rng.choice([0.25, 1.0, 2.0])
        if number % 50 == 0:
            better = rng.choice([0.0, 0.2, 0.5, 1.0])
        if number % 20 == 0:
            duels.won, duels.lost = rng.choice([(False, False), (True, False), (False, True)])
            duels.most_failures = rng.randrange(6)
        prompt = rng.sample(keys, rng.randint(0, len(keys)))
        found = len(prompt) if rng.random() < better else rng.randint(0, len(prompt) // 8)
        asked_blocks += len(prompt)
        did_trust = plain.trusts
        plain.saw(prompt, found, now_s)  # first: what the duels say is forgotten when a trial begins
        made.saw(prompt, found, now_s)
        begun += plain.trusts and not did_trust
        assert (duels.asked_blocks, duels.clears) == (asked_blocks, begun)
        assert (made.warm, made.trusts, made.stay_s) == (plain.warm, plain.trusts, plain.stay_s)
        assert (made._lead, made._asked, made._squares) == (plain.lead, plain.asked, plain.squares)
        assert (made._steady, made._prompts) == (plain.steady, plain.prompts)
        assert list(made._order.items()) == plain.used
        let_go = rng.sample(keys, rng.randrange(3))
        made.let_go(let_go)
        plain.lacking |= {key for key, _ in plain.used if key in let_go}
        assert made._lacking == plain.lacking
        assert made.kept_from_s == (plain.used[0][1] if plain.lacking else None)


@pytest.mark.parametrize("trusts", [True, False])
def test_a_bound_that_is_just_met_is_kept(trusts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BEHIND", 0.5)
    made = Guard(64)
    duels = Verdict()
    made.duels = duels  # type: ignore[assignment]
    duels.won, duels.most_failures = True, -1
    made.warm, made.trusts, made._has_won, made._tried = True, trusts, True, True
    made._asked, made._lead = 1.0, -4.0 if trusts else -0.5
    made._prompts = 1.0
    made._squares = 9.0  # one of 3: as much as the 1 of what was asked for and 2 of the capacity allow
    made.saw([b"xyz"], 0, 1.0)
    assert made.trusts


@pytest.mark.parametrize(("lost", "long"), [(4, 1), (41, 10), (1, 41)])
@pytest.mark.parametrize("has_won", [True, False])
def test_a_long_prompt_does_not_end_a_trial_that_evidence_began_and_several_do(
    lost: int, long: int, has_won: bool
) -> None:
    """Of a thousand blocks in a thousand prompts one may be lost: and four more, that one prompt counts at most."""
    made, duels = Guard(64), Verdict()
    made.duels = duels  # type: ignore[assignment]
    made.warm = made.trusts = made._tried = True
    made._has_won = has_won
    made._share, made._squares = 1e3, 1e6
    made._asked = made._prompts = 1000.0
    for number in range(lost):
        made._order.update(dict.fromkeys(range(number * long, (number + 1) * long), 0.0))
        made.saw(list(range(number * long, (number + 1) * long)), 0, 1.0)
    assert made.trusts == (has_won and lost < 10)


def test_many_trials_that_have_failed_are_no_overflow() -> None:
    made = Guard(64)
    made.warm = True
    for _ in range(1200):
        made.trusts, made._tried, made._lead = True, True, -1e6
        made.saw([1], 0, 1.0)
        assert not made.trusts
        made.saw([1], 0, 1.0)
        assert not made.trusts


@pytest.mark.parametrize("evidence", ["none", "told", "won", "lost, long after"])
def test_a_trial_needs_evidence_or_time(evidence: str) -> None:
    made, duels = Guard(64), Verdict()
    made.duels = duels  # type: ignore[assignment]
    made.warm, made.told = True, evidence == "told"
    duels.won, duels.lost = evidence == "won", evidence == "lost, long after"
    made._asked = 1e5 if duels.lost else 8.0
    made.saw([1], 0, 1.0)
    assert made.trusts == (evidence in ("told", "won"))


@pytest.mark.parametrize("has_won", [True, False])
def test_what_a_failed_trial_has_let_go_is_lacking_if_it_had_won(has_won: bool) -> None:
    made = Guard(64)
    made.saw([1, 2, 3], 0, 0.0)
    made.warm = made.trusts = made._tried = True
    made._has_won, made._lead = has_won, -1e6
    made.let_go([1, 99])
    made.saw([5], 0, 1.0)
    assert not made.trusts
    assert made.kept_from_s == (0.0 if has_won else None)


def test_a_trial_that_failed_is_followed_by_one_with_more_evidence() -> None:
    made, duels = Guard(64), Verdict()
    made.duels = duels  # type: ignore[assignment]
    made.warm = True
    for failures in range(3):
        duels.won, duels.most_failures = True, failures - 1
        if failures:
            made.saw([1], 0, 1.0)
            assert not made.trusts
        duels.most_failures = failures
        made.saw([1], 0, 1.0)
        assert made.trusts and not duels.won
        for _ in range(20):
            made.saw(list(range(16)), 0, 1.0)
        assert not made.trusts and made._lead < 0.0


@pytest.mark.parametrize(
    ("capacity", "shadow", "size"),
    [(16384, 16384, 16384), (16385, 16384, 8192), (32768, 16384, 16384), (32771, 16384, 8192), (6000, 2, 2)],
)
def test_of_large_caches_a_part_is_watched(
    capacity: int, shadow: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shadow != AS_IT_IS[0]:
        monkeypatch.setattr(guard, "SHADOW_BLOCKS", shadow)
    made, plain = Guard(capacity), Plain(capacity, (shadow, *AS_IT_IS[1:]), Verdict())
    rng = random.Random(1)
    prompt = [rng.randbytes(8) for _ in range(2 * capacity)]
    for one in (made, plain):
        one.saw(prompt, 1000, 0.0)
    assert list(made._order.items()) == plain.used
    assert (len(plain.used), plain.size, made._lead) == (size, size, plain.lead)
