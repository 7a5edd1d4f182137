"""Continuations of a trace, made from its first requests alone, and how near policies come to the optimum on them.

    python -m tests.offload.continuations conversation_trace.jsonl --seeds 1 2 3 4 --told nothing ends --csv rows.csv

A request is a turn of the session of an earlier one if it repeats that one up to its last block, which is seldom full.
New sessions begin as the later ones did that were given, as often, with the blocks that these shared with others. A
turn goes on as a donor did, one of the 40 given turns that were nearest to it by number, length, growth and gap: when,
and by how many blocks, is drawn from the Kaplan-Meier estimate of their returns, as of many it is only known for how
long they had not returned when the requests ended. The sessions that were given go on in the same way, from the end on.

The table has means over the seeds, of what is found behind the requests that were given; the CSV has each seed. The gap
that is closed is that between the first of the policies and the optimum. What the policies are told is as in a replay.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import math
import random
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from paddle_kv.testing.prefixes.hints import Hints
from paddle_kv.testing.prefixes.replay import OPTIMUM, Costs, replay
from paddle_kv.testing.prefixes.trace import Request, read_trace
from tests.offload.streams import Prompts

GIVEN_REQUESTS = 3_000
REQUESTS = 12_000
CAPACITIES = (1_828, 5_484, 18_279)
POLICIES = ("lru", "survival")
TOLD = {
    "nothing": Hints(),
    "ends": Hints(ends=True),
    "wrong ends": Hints(ends=True, wrong_share=0.2),
    "expected": Hints(queued_requests=128),
}
NO_TIME = Costs(1, 1, 1.0, 1.0)  # only hits are counted

DONORS = 40
DONORS_FROM_S = 150.0  # before, many a first turn is a later one of a session that began before the trace
BEGINNINGS_S = 480.0  # of the end: sessions begin as those did,
ARRIVALS_S = 318.0  # and as often as those
LAST_GROUP = 5  # turns beyond are too few to have donors of their own
HEAD_BLOCKS = 3  # who shares more than these with others began in the middle of a session
NEIGHBOURS = 1_000  # the latest requests, in the middle of which such a session may begin
GAP_SPREAD = 0.12  # of the logarithm, so that gaps are more than those of the donors
LEAST_GAP_S = 3.0
TICK_S = 3.0  # arrivals of the trace have this resolution
FRESH_BLOCKS = 10**7  # ids from here on are in no trace

Row = dict[str, Any]


@dataclass(slots=True)
class Turn:
    """A request as a turn of its session."""

    arrival_s: float
    prompt: list[int]
    number: int = 1
    known_blocks: int = 0  # seen before, in whatever session
    gap_s: float = 0.0  # since the turn before
    growth: int = 0
    following: Turn | None = None


def turns_of(prompts: Prompts) -> list[Turn]:
    """All requests, in their order."""
    last_uses: dict[int, Turn] = {}
    turns = []
    for arrival_s, prompt in prompts:
        known = next((place for place, block in enumerate(prompt) if block not in last_uses), len(prompt))
        turn = Turn(arrival_s, prompt, known_blocks=known)
        if known > 1:  # the first block may be a head that all share
            before = last_uses[prompt[known - 1]]
            if known >= len(before.prompt) - 1:
                turn.number, before.following = before.number + 1, turn
                turn.gap_s, turn.growth = arrival_s - before.arrival_s, len(prompt) - len(before.prompt)
        last_uses.update(dict.fromkeys(prompt, turn))
        turns.append(turn)
    return turns


class Looks(NamedTuple):
    """By which turns are near to each other: logarithms, of the gap a half."""

    length: float
    gap: float
    growth: float

    @classmethod
    def of(cls, number: int, length: int, gap_s: float, growth: int) -> Looks:
        if number == 1:
            return cls(math.log2(1 + length), 0.0, 0.0)
        return cls(math.log2(1 + length), math.log2(1 + gap_s) / 2, math.log2(1 + max(0, growth)))

    def rounded(self) -> Looks:
        """To halves, so that few laws are ever estimated."""
        return Looks(*(round(2 * value) / 2 for value in self))

    def distance(self, other: Looks) -> float:
        """Squared."""
        return (self.length - other.length) ** 2 + (self.gap - other.gap) ** 2 + (self.growth - other.growth) ** 2


class Donor(NamedTuple):
    looks: Looks
    watched_s: float  # until it went on, or until the end
    growth: int | None  # None: it had not gone on by then


class Return(NamedTuple):
    gap_s: float
    growth: int
    chance: float


class Laws:
    """How turns go on, by what they look like."""

    def __init__(self, turns: list[Turn], end_s: float) -> None:
        groups: dict[int, list[Donor]] = {group: [] for group in range(1, LAST_GROUP + 1)}
        for turn in turns:
            if turn.arrival_s < DONORS_FROM_S:
                continue
            looks = Looks.of(turn.number, len(turn.prompt), turn.gap_s, turn.growth)
            donor = Donor(looks, end_s - turn.arrival_s, None)
            if turn.following is not None:
                growth = len(turn.following.prompt) - len(turn.prompt)
                donor = Donor(looks, turn.following.arrival_s - turn.arrival_s, growth)
            groups[min(turn.number, LAST_GROUP)].append(donor)
        # The last two groups lend to each other; those of the last count twice in their own.
        groups[LAST_GROUP - 1] += groups[LAST_GROUP]
        groups[LAST_GROUP] = groups[LAST_GROUP - 1] + groups[LAST_GROUP]
        self._groups = groups
        self._known: dict[tuple[int, Looks], list[Return]] = {}

    def returns(self, number: int, length: int, gap_s: float, growth: int) -> list[Return]:
        """By gap; what is left of the chances is that it does not go on."""
        group, looks = min(number, LAST_GROUP), Looks.of(number, length, gap_s, growth).rounded()
        if (group, looks) not in self._known:
            nearest = sorted(self._groups[group], key=lambda donor: donor.looks.distance(looks))[:DONORS]
            self._known[group, looks] = kaplan_meier(nearest)
        return self._known[group, looks]


def kaplan_meier(donors: list[Donor]) -> list[Return]:
    """The chance of each return that was seen. Who was watched for less is no evidence against it."""
    returns = []
    remaining = 1.0
    by_time = sorted(donors, key=lambda donor: (donor.watched_s, donor.growth is None, donor.growth or 0))
    for watched, donor in zip(range(len(donors), 0, -1), by_time, strict=True):
        if donor.growth is not None:
            returns.append(Return(donor.watched_s, donor.growth, remaining / watched))
            remaining *= 1 - 1 / watched
    return returns


class Waiting(NamedTuple):
    """A session that will go on; the order in which it was drawn decides between equal times."""

    arrival_s: float
    order: int
    prompt: list[int]
    number: int
    gap_s: float
    growth: int


class Continuation:
    """The given requests, and what is made behind them."""

    def __init__(self, given: Prompts, seed: int) -> None:
        turns = turns_of(given)
        self._end_s = turns[-1].arrival_s
        self._laws = Laws(turns, self._end_s)
        firsts = [turn for turn in turns if turn.number == 1]
        self._beginnings = [turn for turn in firsts if turn.arrival_s > self._end_s - BEGINNINGS_S]
        self._per_s = sum(turn.arrival_s > self._end_s - ARRIVALS_S for turn in firsts) / ARRIVALS_S
        self._sharers = Counter(block for turn in firsts for block in turn.prompt)
        self._rng, self._fresh, self._order = random.Random(seed), count(FRESH_BLOCKS), count()
        self._waiting: list[Waiting] = []
        self._given, self._prompts = len(given), list(given)
        for turn in turns:
            if turn.following is None:
                age_s = self._end_s - turn.arrival_s
                self._go_on(turn.arrival_s, turn.prompt, turn.number, turn.gap_s, turn.growth, age_s)

    def make(self, num_requests: int) -> Prompts:
        """So many, those that were given among them."""
        now_s = self._end_s
        while (
            len(self._prompts) < num_requests + 200
        ):  # of those of the last tick, all are there before they are sorted
            now_s += self._rng.expovariate(self._per_s)
            while self._waiting and self._waiting[0].arrival_s <= now_s:
                self._continue(heapq.heappop(self._waiting))
            self._begin(now_s)
        # Within a tick nothing is known of the order; that of the ids is one.
        made = [(self._ticked(arrival_s), prompt) for arrival_s, prompt in self._prompts[self._given :]]
        return (self._prompts[: self._given] + sorted(made))[:num_requests]

    def _ticked(self, arrival_s: float) -> float:
        return max(self._end_s, round(arrival_s / TICK_S) * TICK_S)

    def _begin(self, now_s: float) -> None:
        turn = self._rng.choice(self._beginnings)
        head = self._middle(turn.known_blocks) if turn.known_blocks > HEAD_BLOCKS else self._shared(turn.prompt)
        prompt = head + self._new_blocks(len(turn.prompt) - len(head))
        self._prompts.append((now_s, prompt))
        self._go_on(now_s, prompt, 1, 0.0, 0, 0.0)

    def _middle(self, num_blocks: int) -> list[int]:
        """So many of any recent prompt, which is longer: a question asked again in another way."""
        longer = [prompt for _, prompt in self._prompts[-NEIGHBOURS:] if len(prompt) > num_blocks + 1]
        return self._rng.choice(longer)[:num_blocks] if longer else []

    def _shared(self, prompt: list[int]) -> list[int]:
        """The blocks with which others began, too."""
        sharers = [self._sharers[block] for block in prompt]
        shared = next((place for place, number in enumerate(sharers) if number == 1), len(prompt))
        # What two have sent by chance would else be sent often.
        return prompt[: shared - (shared == len(prompt) > 1 and sharers[-1] == 2)]

    def _continue(self, session: Waiting) -> None:
        kept = len(session.prompt) - 1  # the last block was not full: it has another id when it is
        length = max(1, len(session.prompt) + session.growth)
        prompt = (session.prompt[:kept] + self._new_blocks(max(1, length - kept)))[:length]
        self._prompts.append((session.arrival_s, prompt))
        self._go_on(session.arrival_s, prompt, session.number, session.gap_s, session.growth, 0.0)

    def _go_on(self, arrival_s: float, prompt: list[int], number: int, gap_s: float, growth: int, age_s: float) -> None:
        """Draws when, if at all: given that it has not for ``age_s``."""
        returns = self._laws.returns(number, len(prompt), gap_s, growth)
        left = self._rng.random() * (1 - sum(one.chance for one in returns if one.gap_s <= age_s))
        for one in returns:
            if one.gap_s <= age_s:
                continue
            left -= one.chance
            if left < 0:
                gap_s = max(LEAST_GAP_S, age_s + 0.5, one.gap_s * math.exp(self._rng.gauss(0, GAP_SPREAD)))
                again = Waiting(arrival_s + gap_s, next(self._order), prompt, number + 1, gap_s, one.growth)
                heapq.heappush(self._waiting, again)
                return

    def _new_blocks(self, number: int) -> list[int]:
        return [next(self._fresh) for _ in range(number)]


def continuation(given: Prompts, seed: int, num_requests: int) -> Prompts:
    return Continuation(given, seed).make(num_requests)


def measure(given: Prompts, seed: int, capacities: list[int], policies: list[str], told: list[str]) -> list[Row]:
    requests = [Request(arrival_s, 0, prompt) for arrival_s, prompt in continuation(given, seed, REQUESTS)]

    def rate(policy: str, capacity: int, hints: Hints) -> float:
        run = replay(requests, policy, capacity, NO_TIME, hints=hints, warm_up=len(given))
        return round(100 * run.hit_rate, 3)

    rows = []
    for capacity in capacities:
        best = rate(OPTIMUM, capacity, Hints())
        for hint in told:
            row: Row = {"seed": seed, "told": hint, "capacity_blocks": capacity}
            for policy in policies:
                row[policy] = rate(policy, capacity, TOLD[hint])
                print(f"seed {seed}, told {hint}, {capacity} blocks: {policy} {row[policy]:.1f} %", file=sys.stderr)
            rows.append({**row, OPTIMUM: best})
    return rows


def gap_closed(row: Row, policy: str, base: str) -> float:
    """In percent. There may be no gap where all fits."""
    gap = row[OPTIMUM] - row[base]
    return 100 * (row[policy] - row[base]) / gap if gap else math.nan


def table(rows: list[Row], policies: list[str]) -> list[str]:
    header = f"{'told':<12}{'blocks':>8}" + "".join(f"{name:>10}" for name in (*policies, OPTIMUM))
    lines = [header + "".join(f"{'closed by ' + name:>20}" for name in policies[1:])]
    for told, capacity in dict.fromkeys((row["told"], row["capacity_blocks"]) for row in rows):
        alike = [row for row in rows if (row["told"], row["capacity_blocks"]) == (told, capacity)]
        found = [_mean([row[name] for row in alike]) for name in (*policies, OPTIMUM)]
        closed = [_mean([gap_closed(row, name, policies[0]) for row in alike]) for name in policies[1:]]
        line = f"{told:<12}{capacity:8}" + "".join(f"{one:8.1f} %" for one in found)
        lines.append(line + "".join(f"{one:18.0f} %" for one in closed))
    return lines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("trace", type=Path, help=f"of which the first {GIVEN_REQUESTS} requests are given")
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    options.add_argument("--capacity", type=int, nargs="+", default=list(CAPACITIES), help="blocks")
    options.add_argument("--policy", nargs="+", default=list(POLICIES))
    options.add_argument("--told", nargs="+", default=["nothing"], choices=list(TOLD))
    options.add_argument("--csv", type=Path)
    asked = options.parse_args()
    given = [(request.arrival_s, request.block_ids) for request in read_trace(asked.trace, GIVEN_REQUESTS)]
    rows = [row for seed in asked.seeds for row in measure(given, seed, asked.capacity, asked.policy, asked.told)]
    print("\n".join(table(rows, asked.policy)))
    if asked.csv is not None:
        with asked.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
