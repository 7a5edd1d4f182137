"""The survival policy beside a plain model of it: the same books after each step, and the same blocks make room."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from paddle_kv.offload import BlockIndex, slot_numbers
from paddle_kv.offload.returns import NUM_PARTS
from paddle_kv.offload.run import Run
from paddle_kv.offload.score import LEVELS, TURNS
from paddle_kv.offload.survival import Survival
from tests.offload.index_traffic import hold_and_drop
from tests.offload.survival_model import PlainSurvival, watched_in


def said(run: Run[int] | None) -> tuple[Any, ...] | None:
    """All of a run that does not belong to one way of keeping the books."""
    if run is None:
        return None
    return (
        tuple(run.keys), run.parent, run.sign, run.touched_s, run.turn, run.klass, run.part, run.length, run.live,
        run.watched > 0, run.leaf, run.head, run.facts,
    )  # fmt: skip


def in_queues(queues: Any) -> list[Any]:
    leaves = [
        (part, klass, [said(run) for run in queue])
        for part, row in enumerate(queues._leaves)
        for klass, queue in enumerate(row)
        if queue
    ]
    watched = [watched_in(queues, part) for part in range(NUM_PARTS)]
    assert list(map(len, watched)) == queues._num_watched
    return [leaves, [[said(run) for run in runs] for runs in watched]]


class Beside:
    """An index with the policy, and one with the model. Each of them has a log of what its parts are told."""

    def __init__(self, capacity: int, max_ghosts: int | None = None) -> None:
        self.now_s = 0.0
        self.policy: Survival[int] = Survival(capacity, lambda: self.now_s)
        self.model = PlainSurvival(capacity, lambda: self.now_s)
        assert (self.policy._max_coming, self.policy._max_ghosts) == (self.model.max_coming, self.model.max_ghosts)
        if max_ghosts is not None:
            self.policy._max_ghosts = self.model.max_ghosts = max_ghosts
        self.indexes = [BlockIndex(self.policy, capacity), BlockIndex(self.model, capacity)]
        self.free = [list(range(capacity))[::-1] for _ in self.indexes]  # as a pool gives them out
        self.stays_cold = False
        self.logs: list[list[Any]] = [[], []]
        for index, log, policy in zip(self.indexes, self.logs, (self.policy, self.model), strict=True):
            index.evicted = []
            for part, names in (("guard", ("saw",)), ("returns", ("came_back",)), ("score", ("learn", "fit"))):
                self.listen(self.part(policy, part), names, log)
            self.listen(self.part(policy, "guard").duels, ("came_back", "begin"), log)
            self.listen(self.part(policy, "queues"), ("price", "advance"), log)

    @staticmethod
    def part(policy: Any, name: str) -> Any:
        return getattr(policy, "_" + name if isinstance(policy, Survival) else name)

    @staticmethod
    def listen(part: Any, names: tuple[str, ...], log: list[Any]) -> None:
        for name in names:
            method = getattr(part, name)

            def heard(*arguments: Any, name: str = name, method: Callable[..., Any] = method) -> Any:
                log.append((name, *(said(one) if isinstance(one, Run) else one for one in arguments)))
                return method(*arguments)

            setattr(part, name, heard)

    def classify(self, rng: random.Random) -> None:
        """As if outcomes had been seen: prompts of one turn are of three levels."""
        weights = [rng.uniform(-1.0, 1.0) for _ in range(9)]
        limits = [sorted(rng.uniform(-6.0, 6.0) for _ in range(LEVELS - 1)) for _ in range(TURNS)]
        for score in (self.policy._score, self.model.score):
            score._weights, score._limits = weights, limits

    def trust(self, trusts: bool) -> None:
        self.policy._guard.trusts = self.model.guard.trusts = trusts

    def each(self, call: Callable[[BlockIndex[int], list[int]], Any]) -> Any:
        """What both give; then both know the same."""
        if self.stays_cold:
            self.policy._guard.warm = self.model.guard.warm = False
        found = [call(index, free) for index, free in zip(self.indexes, self.free, strict=True)]
        assert found[0] == found[1]
        one, other = self.indexes
        assert one.evicted == other.evicted
        assert list(one.slots.items()) == list(other.slots.items())
        assert self.logs[0] == self.logs[1]
        policy, model = self.policy, self.model
        assert {key: said(policy._owner.get(key)) for key in one.slots} == {
            key: said(run) for key, run in model.owner.items()
        }
        assert [said(run) for run in policy._by_use.runs] == [said(run) for run in model.order]
        assert [said(run) for run in policy._by_use.over] == [said(run) for run in model.over]
        assert [said(run) for run in policy._ghosts] == [said(run) for run in model.ghosts]
        assert {key: said(run) for key, run in policy._coming.items()} == {
            key: said(run) for key, run in model.coming.items()
        }
        assert {key: said(run) for key, run in policy._signs.items()} == {
            key: said(run) for key, run in model.signs.items()
        }
        assert policy._hanging == model.hanging()
        assert policy._guard._lacking == model.guard._lacking
        assert set(policy._owner._runs) == {None, *policy._by_use.runs}  # numbers of others are given out again
        horizons = (policy._queues.told_part, policy._score.horizon_part)
        assert horizons == (model.queues.told_part, model.score.horizon_part)
        assert said(policy._going) == said(model.going)
        assert in_queues(policy._queues) == in_queues(model.queues)
        for index, log in zip(self.indexes, self.logs, strict=True):
            index.evicted = []
            log.clear()
        return found[0]


def traffic(rng: random.Random, beside: Beside, num_steps: int, trusts: Callable[[int], bool] | None) -> None:
    """Sessions go on, branch, begin alike, and are over; saves come late, in parts, or never; blocks are held."""
    sessions: list[list[int]] = []
    late: list[list[int]] = []
    held: list[list[int]] = []
    fresh = iter(range(10**9))
    most_fresh = rng.choice([4, 9, 25])
    for step in range(num_steps):
        beside.now_s += rng.choice([0.0, rng.uniform(0.0, 3.0), rng.expovariate(1 / 8)])
        if trusts is not None:
            beside.trust(trusts(step))
        prompt: list[int] = []
        if sessions and rng.random() < 0.7:
            prompt = rng.choice(sessions[-25:])
            if rng.random() < 0.3:
                prompt = prompt[: rng.randrange(len(prompt) + 1)]
        prompt = [*prompt, *(next(fresh) for _ in range(rng.randrange(most_fresh)))]
        if rng.random() < 0.03:
            prompt = [*prompt, *prompt[-5:], next(fresh)]  # names blocks twice
        if len(prompt) > 3 * most_fresh + 20:
            prompt = prompt[-20:]
        sessions.append(prompt)
        found: int = beside.each(lambda index, _, prompt=prompt: index.lookup(prompt))
        late.append(prompt[found:] if rng.random() < 0.8 else prompt[rng.randrange(found + 1) :])
        if rng.random() < 0.4:  # with an answer, from which a later prompt may go on
            answer = [next(fresh) for _ in range(rng.randrange(9))]
            late[-1] = [*late[-1], *answer]
            sessions.append([*prompt, *answer])
        if rng.random() < 0.2:  # another answer to what was asked before
            start = rng.choice(sessions[-12:])
            start = start[: rng.randrange(len(start) + 1)]
            sessions.append([*start, *(next(fresh) for _ in range(rng.randrange(1, 9)))])
            late.append(sessions[-1])
        while len(late) > rng.randrange(4):
            blocks = late.pop(rng.randrange(len(late)))
            stop = rng.randrange(len(blocks) + 1) if rng.random() < 0.2 else len(blocks)
            for part in (blocks[:stop], blocks[stop:]):
                if rng.random() < 0.95:
                    beside.each(lambda index, free, part=part: list(index.admit(part, free).items()))
        hold_and_drop(rng, list(beside.indexes[0].slots), held, beside.each, most_held=1 / 3)
        if rng.random() < 0.1:
            over = rng.choice(sessions[-12:])
            beside.each(lambda index, _, over=over: index.end(over))
        if sessions and rng.random() < 0.1:
            used = rng.choice(sessions[-12:])
            beside.each(lambda index, _, used=used: bool(index.expect(used, beside.now_s + 5.0)))


@pytest.mark.parametrize("seed", [*range(12), 15])
def test_the_books_and_the_blocks_that_make_room_are_those_of_the_model(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_numbers, "SLOTS_AT_ONCE", 4)  # the numbers of slots grow now and then
    rng = random.Random(seed)
    beside = Beside(rng.choice([12, 30, 90]), rng.choice([None, 5, 20]))
    if seed % 3:
        beside.classify(rng)
    beside.stays_cold = seed in (2, 8, 10)
    trusts = [None, lambda _: True, lambda _: False, lambda step: step // 20 % 2 == 0][seed % 4]
    traffic(rng, beside, 300, trusts)


@pytest.mark.parametrize("capacity", [1, 100, 16 * 4096, 16 * 4096 + 16, 1 << 20])
def test_how_much_it_remembers(capacity: int) -> None:
    Beside(capacity)
