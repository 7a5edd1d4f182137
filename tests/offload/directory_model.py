"""A directory beside a model that keeps plain lists, and ranks that move words instead of blocks.

    python -m tests.offload.directory_model --jobs 100000 --seed 0

Random lookups, plans, results, failures, deadlines, deaths and returns of ranks; after each call the two agree in all
that can be seen, a mirror fed by the events has what the directory has, and no load that is called good has brought
another word than the one that was saved.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paddle_kv.errors import TransferError
from paddle_kv.offload.directory import Directory
from paddle_kv.offload.events import Mirror
from paddle_kv.offload.jobs import HOST, Hello, Job, Outcome, Result
from paddle_kv.offload.slot_lru import SlotLru

TIMEOUT_S = 10.0
PROMPTS = 9
LONGEST = 12
DEVICE_BLOCKS = 40


@dataclass
class InFlight:
    job: Job
    deadline_s: float
    waiting: set[int]
    after: set[int]
    failed: set[int] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)
    decided: bool = False
    lost_s: float = float("inf")  # when who has not ended it is lost


class Model:
    """What a directory with the LRU policy is, said as simply as it can be."""

    def __init__(self, capacity: int, num_ranks: int) -> None:
        self.capacity, self.num_ranks = capacity, num_ranks
        self.order: list[bytes] = []  # the oldest first
        self.brought_by: dict[bytes, int] = {}
        self.pins: Counter[bytes] = Counter()
        self.jobs: dict[int, InFlight] = {}
        self.failed_loads: set[int] = set()
        self.alive = [False] * num_ranks
        self.slots: dict[bytes, int] = {}  # as the jobs said

    def present(self, key: bytes) -> bool:
        return key in self.order and key not in self.brought_by

    def prefix(self, keys: list[bytes]) -> list[bytes]:
        found = []
        for key in keys:
            if not self.present(key):
                break
            found.append(key)
        return found

    def touch(self, key: bytes) -> None:
        self.order.remove(key)
        self.order.append(key)

    def lookup(self, keys: list[bytes]) -> list[bytes]:
        found = self.prefix(keys)
        for key in reversed(found):
            self.touch(key)
        self.pins.update(found)
        return found

    def plan_save(self, keys: list[bytes], all_or_nothing: bool, computed_from: list[int]) -> list[bytes]:
        there = {key for key in keys if key in self.order}
        nothing = not all(self.alive) or any(load in self.failed_loads for load in computed_from)
        held = {key for key in self.order if self.pins[key]} | there
        if all_or_nothing and len(set(keys) - there) > self.capacity - len(held):
            nothing = True
        wanted = [key for key in keys if key in there or not nothing]
        first = next((i for i, key in enumerate(wanted) if key not in there), len(wanted))
        free = self.capacity - len(self.order)
        admitted: list[bytes] = []
        for key in reversed(wanted[first : len(self.order) + free]):
            if key in there:
                self.touch(key)
                continue
            if len(self.order) == self.capacity:
                held = {*there, *admitted[:-1]}  # no gap in a prompt
                victim = next((one for one in self.order if not self.pins[one] and one not in held), None)
                if victim is None and not admitted:
                    continue
                if victim is None or victim in admitted:
                    victim = admitted.pop()
                self.order.remove(victim)
            self.order.append(key)
            admitted.insert(0, key)
        for key in reversed(wanted[:first] if admitted else []):  # what they hang on is younger than they are
            self.touch(key)
        return admitted

    def add(self, job: Job, now_s: float, computed_from: list[int]) -> None:
        after = {load for load in computed_from if load in self.jobs and not self.jobs[load].decided}
        self.jobs[job.id] = InFlight(job, now_s + TIMEOUT_S, set(range(self.num_ranks)), after)
        self.pins.update(job.keys)
        if job.kind == "save":
            self.brought_by.update(dict.fromkeys(job.keys, job.id))
            self.slots.update(zip(job.keys, job.host_slots, strict=True))

    def remove(self, keys: Any) -> None:
        for key in list(keys):
            self.order.remove(key)
            self.brought_by.pop(key, None)

    def decide(self, one: InFlight, outcomes: list[tuple[Any, ...]]) -> None:
        one.decided = True
        self.pins.subtract(one.job.keys)
        if one.job.kind == "save":
            for position, key in enumerate(one.job.keys):
                if self.brought_by.get(key) == one.job.id:
                    del self.brought_by[key]
                    if position in one.failed:
                        self.order.remove(key)
        elif one.failed:
            self.failed_loads.add(one.job.id)
        self.drop_damaged(one.job, one.damaged)
        self.report(one, outcomes)
        self.release(one, bool(one.failed), outcomes)

    def drop_damaged(self, job: Job, positions: Iterable[int]) -> None:
        for position in positions:
            key = job.keys[position]
            if key in self.order and self.slots[key] == job.host_slots[position]:
                self.remove([key])

    def report(self, one: InFlight, outcomes: list[tuple[Any, ...]]) -> None:
        outcomes.append((one.job.id, tuple(sorted(one.failed)), tuple(sorted(one.waiting))))
        if not one.waiting:
            del self.jobs[one.job.id]

    def lose(self, rank: int, outcomes: list[tuple[Any, ...]]) -> None:
        self.alive[rank] = False
        for one in list(self.jobs.values()):
            waited = rank in one.waiting
            one.waiting.discard(rank)
            if not one.decided:
                one.failed.update(range(len(one.job.keys)))
                self.decide(one, outcomes)
            elif waited and not one.waiting:
                self.report(one, outcomes)
        self.order.clear()
        self.brought_by.clear()

    def undo(self, one: InFlight, outcomes: list[tuple[Any, ...]]) -> None:
        if one.decided:
            one.waiting.clear()
            self.report(one, outcomes)
            return
        one.decided = True
        del self.jobs[one.job.id]
        self.pins.subtract(one.job.keys)
        self.remove(key for key in one.job.keys if self.brought_by.get(key) == one.job.id)
        if one.job.kind == "load":
            self.failed_loads.add(one.job.id)
        self.release(one, True, outcomes)

    def release(self, one: InFlight, failed: bool, outcomes: list[tuple[Any, ...]]) -> None:
        """The saves that wait for how a load ends."""
        for other in list(self.jobs.values()):
            if one.job.id in other.after:
                other.after.discard(one.job.id)
                if failed:
                    other.failed.update(range(len(other.job.keys)))
                if not other.decided and not other.waiting and not other.after:
                    self.decide(other, outcomes)

    def complete(self, results: list[Result], now_s: float) -> list[tuple[Any, ...]]:
        outcomes: list[tuple[Any, ...]] = []
        for result in results:
            one = self.jobs.get(result.job_id)
            if one is None or result.rank not in one.waiting:
                continue
            one.waiting.discard(result.rank)
            if one.decided:
                self.drop_damaged(one.job, result.damaged)  # also what a late rank has seen
                if not one.waiting:
                    self.report(one, outcomes)
                continue
            one.failed.update(result.failed, result.damaged)
            one.damaged.update(result.damaged)
            if not one.waiting and not one.after:
                self.decide(one, outcomes)
        stuck = set()
        for one in sorted(self.jobs.values(), key=lambda one: (one.deadline_s, one.job.id)):
            if one.lost_s <= now_s:
                stuck |= one.waiting
            elif one.deadline_s <= now_s and one.lost_s == float("inf"):
                one.lost_s = now_s + TIMEOUT_S
                if not one.decided:
                    one.failed.update(range(len(one.job.keys)))
                    self.decide(one, outcomes)
        for rank in sorted(stuck):
            self.lose(rank, outcomes)
        return outcomes


class Rank:
    """Moves words, in the order of the jobs; may be slow, fail, die and come back."""

    def __init__(self, number: int, capacity: int) -> None:
        self.number, self.capacity, self.epoch = number, capacity, 0
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.host: list[Any] = [None] * self.capacity
        self.inbox: list[Job] = []

    def hello(self) -> Hello:
        return Hello(self.number, self.epoch, self.capacity)

    def step(self, fails: bool, good_loads: set[tuple[int, int]], wrong: set[tuple[int, int]]) -> Result:
        job = self.inbox.pop(0)
        if job.epochs[self.number] != self.epoch:
            return Result(job.id, self.number, self.epoch, tuple(range(len(job.keys))), reason="another epoch")
        if job.kind == "save":
            for position, (key, slot) in enumerate(zip(job.keys, job.host_slots, strict=True)):
                if fails and position:  # a part of it was written
                    return Result(job.id, self.number, self.epoch, tuple(range(len(job.keys))), reason="no")
                self.host[slot] = None if fails else key
            return Result(job.id, self.number, self.epoch, (0,) if fails else (), reason="no")
        if fails:
            return Result(job.id, self.number, self.epoch, tuple(range(len(job.keys))), (0,), "damaged")
        same = [self.host[slot] for slot in job.host_slots] == list(job.keys)
        (good_loads if same else wrong).add((job.id, self.number))
        return Result(job.id, self.number, self.epoch)


class Trial:
    """One directory, its model and its ranks."""

    def __init__(self, seed: int, capacity: int = 24, num_ranks: int = 2) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.directory = Directory(
            capacity, policy="lru", num_ranks=num_ranks, timeout_s=TIMEOUT_S, max_events=1000, clock=lambda: self.now_s
        )
        self.model = Model(capacity, num_ranks)
        self.ranks = [Rank(number, capacity) for number in range(num_ranks)]
        self.mirror = Mirror()
        self.held: list[Any] = []
        self.jobs = self.good = 0
        self.wrong: set[tuple[int, int]] = set()
        self.right: set[tuple[int, int]] = set()
        self.said: list[Result] = []
        self.loads: list[int] = []
        for rank in self.ranks:
            self.join(rank)

    def prompt(self) -> list[bytes]:
        which, length = self.random.randrange(PROMPTS), self.random.randrange(1, LONGEST)
        shared = which % 3  # prompts share their first blocks, three by three
        return [b"%d-%d" % (shared if i < 4 else which + 10, i) for i in range(length)]

    def send(self, job: Job, computed_from: list[int]) -> None:
        self.jobs += 1
        self.model.add(job, self.now_s, computed_from)
        for rank in self.ranks:
            if self.model.alive[rank.number]:
                rank.inbox.append(job)
        slots = self.directory.index.slots
        assert job.kind == "load" or [slots[key] for key in job.keys] == list(job.host_slots)
        assert [self.model.slots[key] for key in job.keys] == list(job.host_slots)

    def join(self, rank: Rank) -> None:
        expected: list[tuple[Any, ...]] = []
        if self.model.alive[rank.number]:
            self.model.lose(rank.number, expected)
        self.model.alive[rank.number] = True
        self.agree(self.directory.join(rank.hello()), expected)

    def agree(self, outcomes: list[Outcome], expected: list[tuple[Any, ...]]) -> None:
        assert sorted((one.job_id, one.failed, one.late) for one in outcomes) == sorted(expected)
        for one in outcomes:
            if one.kind == "load" and not one.failed and not one.late:
                assert {(one.job_id, rank.number) for rank in self.ranks} <= self.right, "a load was called good"
                self.good += 1

    def serve(self) -> None:
        keys = self.prompt()
        found = self.directory.lookup(keys)
        assert found.keys == self.model.lookup(keys)
        self.held.append(found)
        if found.keys and self.random.random() < 0.8:
            job = self.directory.plan_load(found.keys, self.random.sample(range(DEVICE_BLOCKS), len(found.keys)))
            self.send(job, [])
            self.loads.append(job.id)

    def save(self) -> None:
        keys, whole = self.prompt(), self.random.random() < 0.3
        computed_from = self.random.sample(self.loads[-6:], min(len(self.loads), self.random.randrange(2)))
        expected = self.model.plan_save(keys, whole, computed_from)
        plan = self.directory.plan_save(keys, list(range(len(keys))), all_or_nothing=whole, computed_from=computed_from)
        assert ([] if plan.job is None else list(plan.job.keys)) == expected
        assert plan.left_out == tuple(i for i, key in enumerate(keys) if key not in self.model.order)
        if plan.job is not None:
            self.send(plan.job, computed_from)

    def release(self) -> None:
        if self.held:
            found = self.held.pop(self.random.randrange(len(self.held)))
            stale = [key for key in found.keys if not self.model.present(key)]
            if stale:  # dropped, and perhaps on its way again
                try:
                    self.directory.plan_load(found.keys, list(range(len(found.keys))))
                    raise AssertionError("a block that was dropped was loaded")
                except TransferError:
                    pass
            self.model.pins.subtract(found.keys)
            if self.random.random() < 0.5:
                found.release()  # else it is lost

    def work(self) -> None:
        results = []
        for rank in self.random.sample(self.ranks, len(self.ranks)):
            if self.model.alive[rank.number] or self.random.random() < 0.5:
                while rank.inbox and self.random.random() < 0.6:
                    results.append(rank.step(self.random.random() < 0.1, self.right, self.wrong))
                    if self.random.random() < 0.1:
                        self.said.append(results[-1])
        results += self.random.sample(self.said[-9:], min(len(self.said), self.random.randrange(2)))  # a second time
        expected = self.model.complete(self.current(results), self.now_s)
        self.agree(self.directory.complete(results), expected)

    def current(self, results: list[Result]) -> list[Result]:
        return [
            one for one in results if self.model.alive[one.rank] and one.epoch == self.directory.ranks.epochs[one.rank]
        ]

    def pass_time(self) -> None:
        self.now_s += self.random.choice([0.1, 0.1, 0.1, 0.1, TIMEOUT_S * 0.7, TIMEOUT_S, TIMEOUT_S * 5])

    def undo(self) -> None:
        """No rank has begun it: nothing could be sent."""
        unsent = [one for one in self.model.jobs.values() if all(one.job in rank.inbox for rank in self.ranks)]
        if unsent:
            one = self.random.choice(unsent)
            for rank in self.ranks:
                rank.inbox.remove(one.job)
            expected: list[tuple[Any, ...]] = []
            self.model.undo(one, expected)
            self.agree(self.directory.undo(one.job), expected)

    def trouble(self) -> None:
        rank = self.random.choice(self.ranks)
        kind = self.random.randrange(4)
        if kind == 0 and self.model.alive[rank.number]:
            expected: list[tuple[Any, ...]] = []
            self.model.lose(rank.number, expected)
            self.agree(self.directory.lost(rank.number), expected)
        elif kind == 1:  # comes back, noticed or not
            rank.start()
            self.join(rank)
        elif kind == 2:
            keys = self.prompt()
            found = [key for key in keys if key in self.model.order]
            self.model.remove(found)
            assert self.directory.drop(keys) == len(found)
        else:
            count = self.random.randrange(5)
            free = [key for key in self.model.order if not self.model.pins[key]][:count]
            self.model.remove(free)
            assert self.directory.evict(count) == len(free)

    def revive(self) -> None:
        for rank in self.ranks:
            if not self.model.alive[rank.number]:
                rank.start()
                self.join(rank)

    def check(self) -> None:
        index, model = self.directory.index, self.model
        policy = index._policy
        assert isinstance(policy, SlotLru)
        order, slot = [], policy._younger[policy._end]
        while slot != policy._end:
            order.append(policy._keys[slot])
            slot = policy._younger[slot]
        assert order == model.order
        assert set(index.slots) == set(order)
        assert len(set(index.slots.values())) == len(order)
        assert index.arriving == model.brought_by
        assert index.pins == {key: count for key, count in model.pins.items() if count}
        assert set(self.directory.ranks.pending) == set(model.jobs)
        assert self.directory.lost_ranks == {rank for rank, alive in enumerate(model.alive) if not alive}
        free = self.directory._slots
        assert len(free._used) + free._end - free._fresh + len(order) == index.capacity_blocks  # type: ignore[attr-defined]
        assert self.mirror.apply(self.directory.take_events())
        assert self.mirror.tiers[HOST] == {key for key in order if key not in model.brought_by}

    def run(self, jobs: int) -> None:
        calls = [self.serve, self.save, self.release, self.work, self.pass_time, self.trouble, self.revive, self.undo]
        while self.jobs < jobs:
            self.random.choices(calls, [30, 30, 30, 60, 8, 1, 2, 2])[0]()
            self.directory._holds.end_lost()
            self.check()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--jobs", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    trial = Trial(given.seed)
    trial.run(given.jobs)
    print(f"{trial.jobs} jobs, {trial.good} loads called good, none with another word; the model agreed all the way")


if __name__ == "__main__":
    main()
