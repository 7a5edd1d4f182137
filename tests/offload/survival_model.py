"""What the survival policy keeps, said as plainly as possible: who owns each block, and what follows from that is
looked for each time anew. What is learnt, and the queues by class and age, are the policy's own; they have tests of
their own."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import groupby, takewhile
from typing import Any

from paddle_kv.offload.guard import Guard
from paddle_kv.offload.last_blocks import LastBlocks
from paddle_kv.offload.queues import Queues
from paddle_kv.offload.returns import Returns, part_of
from paddle_kv.offload.run import Run
from paddle_kv.offload.score import Score

LEVELS, TURNS = 3, 5  # of a score; of a session
CLASSES = LEVELS * TURNS
OPEN, OVER, LEFT, HEAD = 0, CLASSES, 2 * CLASSES, 3 * CLASSES  # the first class of each kind
UNKNOWN = 1  # turn 1, the level in the middle: a run that no prompt was seen of


def watched_in(queues: Any, part: int) -> list[Run[Any]]:
    """Of this part of age, the one that grows out of it first in front."""
    return [run for run, number in queues._watched[part] if run.watched == number]


class PlainSurvival:
    """As :class:`~paddle_kv.offload.survival.Survival`, without its short cuts."""

    def __init__(self, capacity_blocks: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.max_coming = 4 * capacity_blocks
        self.max_ghosts = max(4096, capacity_blocks // 16)
        self.owner: dict[int, Run[int]] = {}  # of the blocks that are there
        self.coming: dict[int, Run[int]] = {}
        self.signs: dict[int, Run[int]] = {}
        self.order: list[Run[int]] = []  # with blocks, the one used longest ago first
        self.over: list[Run[int]] = []
        self.ghosts: list[Run[int]] = []
        self.returns = Returns([0.05, 0.0, 0.0, 0.05], CLASSES, LEVELS)
        self.queues: Queues[int] = Queues(self.returns, part_of(180.0), self.passed, self.faded)
        self.score = Score()
        self.last_blocks = LastBlocks()
        self.guard = Guard(capacity_blocks)
        self.num_prompts = 0
        self.going: Run[int] | None = None

    # ---- what follows from the owners ----
    def own_keys(self, run: Run[int]) -> list[int]:
        return [key for key in run.keys if self.owner.get(key) is run]

    def hanging(self) -> dict[int, int]:
        """On a block: how many runs."""
        found: dict[int, int] = {}
        for run in self.order:
            if run.parent is not None:
                found[run.parent] = found.get(run.parent, 0) + 1
        return found

    def hangs_on(self, key: int) -> bool:
        return any(run.parent == key for run in self.order)

    # ---- prompts ----
    def on_prompt(self, prompt: Sequence[int]) -> bool:
        now_s = self.clock()
        self.going = None
        if now_s >= self.queues.next_look_s:
            self.queues.advance(now_s)
        self.num_prompts += 1
        if self.num_prompts % 128 == 0:
            stays_s = 4.0 * self.guard.stay_s  # of LRU's; before the first there is none
            if stays_s and self.guard.told:
                part = part_of(stays_s if 30.0 < stays_s < 512.0 else 30.0 if stays_s < 512.0 else 512.0)
                self.queues.told_part = self.score.horizon_part = part
            self.score.fit(now_s)
            self.queues.price()
        prompt = list(dict.fromkeys(prompt))
        if not prompt:
            return True
        there = list(takewhile(self.owner.__contains__, prompt))
        self.guard.saw(prompt, len(there), now_s)
        back = [self.signs[key] for key in prompt if key in self.signs]
        for run in back:
            self.came_back(run, now_s)
            if run.live and run.sign != run.keys[-1]:
                self.last_blocks.came_back(run.keys[-1] in prompt)
        parts = [(run, list(keys)) for run, keys in groupby(there, self.owner.__getitem__)]
        heads = list(parts)  # all but those at the end that this session owned alone
        while heads and heads[-1][0] in back and not heads[-1][0].head:
            heads.pop()
        num_shared = sum(len(keys) for _, keys in heads)
        shared = [self.head_of(run, keys, back, now_s) for run, keys in heads]
        if prompt[num_shared:]:
            run = self.begin(prompt, num_shared, len(there), [one for one in back if not one.head], now_s)
            if parts[len(heads) :]:
                self.take(run, parts[len(heads) :])
            self.watch(run)
            self.queues.enter(run)
            self.expect(run, prompt[len(there) :])
        for run in back:
            if run.live and not run.watched and not run.head:  # the prompt went on from its middle
                self.queues.leave(run)
                self.forget_that_it_is_over(run)
                run.klass, run.sign = LEFT, run.keys[-1]
                self.watch(run)
                self.queues.enter(run)
        for run in reversed(shared):
            self.queues.leave(run)
            self.forget_that_it_is_over(run)
            run.touched_s, run.part, run.klass = now_s, 0, HEAD + LEVELS * (min(run.turn, TURNS) - 1)
            self.watch(run)
            self.queues.enter(run)
            self.order.remove(run)
            self.order.append(run)
        return True

    def came_back(self, run: Run[int], now_s: float) -> None:
        if run.watched:
            self.guard.duels.came_back(run)
            self.returns.came_back(run.klass, part_of(now_s - run.touched_s))
            if run.facts is not None:
                self.score.learn(run.facts, run.turn, True, run.touched_s)
                run.facts = None
        self.unwatch(run)

    def head_of(self, run: Run[int], keys: list[int], back: list[Run[int]], now_s: float) -> Run[int]:
        if run in back:
            run.turn += 1
            run.head = True
            return run
        head = Run(list(keys), run.parent, keys[-1], now_s, run.turn + 1, HEAD)
        head.head = True
        self.take(head, [(run, keys)])
        return head

    def begin(self, prompt: list[int], num_shared: int, found: int, before: list[Run[int]], now_s: float) -> Run[int]:
        turn, gap_s, known = 1, 0.0, found
        if before:
            latest = before[0]
            for one in before[1:]:
                if one.turn > latest.turn:
                    latest = one
            turn, gap_s = latest.turn + 1, now_s - latest.touched_s
            known = min(len(prompt), max(one.length for one in before))
        facts = self.score.facts(turn, len(prompt), known, gap_s)
        keys = prompt[num_shared:]
        sign = keys[-2] if len(keys) > 1 else keys[-1]
        parent = prompt[num_shared - 1] if num_shared > 0 else None
        run = Run(keys, parent, sign, now_s, turn, OPEN + self.score.class_of(turn, facts))
        run.length, run.facts = len(prompt), facts
        return run

    def expect(self, run: Run[int], fresh: list[int]) -> None:
        if len(self.coming) > self.max_coming:
            self.coming.clear()
        if fresh and fresh[0] in self.coming:
            for other, shared in groupby(fresh, self.coming.get):
                if other is not None and other is not run:
                    self.move(other, list(shared)[-1])
        self.coming.update(dict.fromkeys(fresh, run))

    def take(self, run: Run[int], parts: list[tuple[Run[int], list[int]]]) -> None:
        """These blocks become its own; the rest of each run that had them hangs behind."""
        for before, keys in parts:
            before.live -= len(keys)
            old = before.parent
            before.parent = keys[-1]
            if not before.live:
                before.parent = old  # as long as it is in the books
                self.disappear(before)
                before.parent = keys[-1]
            self.unhung(old)
        for _, keys in parts:
            self.owner.update(dict.fromkeys(keys, run))
            run.live += len(keys)
        if run not in self.order:
            self.appear(run)

    def move(self, run: Run[int], parent: int) -> None:
        old, run.parent = run.parent, parent
        if run.live:
            self.unhung(old)

    def on_save(self, keys: Sequence[int]) -> None:
        fresh = [key for key in dict.fromkeys(keys) if key not in self.owner and key not in self.coming]
        if not keys or keys[-1] not in fresh:
            return
        first = keys.index(fresh[0])
        above = keys[first - 1] if first else None
        run = None
        if above is not None:
            run = self.owner.get(above) or self.coming.get(above)
        if run is not None and run.keys[-1] == above:
            run.keys += fresh
            run.length += len(fresh)
        else:
            run = Run(fresh, above, fresh[-1], self.clock(), 1, UNKNOWN)
            self.watch(run)
        if len(self.coming) > self.max_coming:
            self.coming.clear()
        self.coming.update(dict.fromkeys(fresh, run))

    def on_end(self, prompt: Sequence[int]) -> None:
        self.guard.told = True
        self.going = None
        for run in dict.fromkeys(self.owner[key] for key in prompt if key in self.owner):
            if not run.head and run.klass < OVER and run.keys[-1] in prompt:
                self.queues.reclass(run, OVER + run.klass)
                self.over.append(run)

    # ---- blocks ----
    def on_insert(self, key: int) -> None:
        run = self.coming.pop(key, None)
        if run is None:
            run = Run([key], None, key, self.clock(), 1, UNKNOWN)
            self.watch(run)
        self.owner[key] = run
        run.live += 1
        if run.live == 1:
            self.appear(run)
        if run.live == 1 or not self.hangs_on(self.own_keys(run)[-1]):
            self.queues.enter(run)

    def on_access(self, key: int) -> None:
        self.queues.use_again(self.owner[key])

    def on_remove(self, key: int) -> None:
        run = self.owner.pop(key)
        run.live -= 1
        if not run.live:
            self.disappear(run)
            self.unhung(run.parent)

    def victim(self, incoming: int | None, pinned: Container[int]) -> int | None:
        own = None if incoming is None else self.coming.get(incoming)
        trusts = self.guard.trusts
        chosen = self.choose(incoming, own, pinned) if trusts else self.choose_by_use(own, pinned)
        if chosen is not None and trusts:
            self.guard.let_go([chosen])
        if chosen is not None and chosen in self.owner:
            self.on_remove(chosen)
        return chosen

    def choose(self, incoming: int | None, own: Run[int] | None, pinned: Container[int]) -> int | None:
        chosen = None if self.going is None else self.own_keys(self.going)[-1]
        if chosen is None or chosen in pinned or self.hangs_on(chosen):
            chosen = self.cheapest(pinned)
            if chosen is None:
                return self.oldest(pinned, own)
            self.going = self.owner[chosen]
        if own is not None and incoming not in pinned and self.worth_of(own, incoming) < self.worth(self.owner[chosen]):
            return incoming
        return chosen

    def choose_by_use(self, own: Run[int] | None, pinned: Container[int]) -> int | None:
        chosen = self.cheapest_of_old(own, pinned)
        if chosen is not None:
            return chosen
        chosen = self.oldest(pinned, own)
        duels = self.guard.duels
        if chosen is not None and duels.asked_blocks >= duels.every_blocks:
            other = self.worth_least()
            if other is not None:
                loser = own if own is not None and self.worth(own) < self.worth(other) else other
                duels.begin(self.owner[chosen], loser)
        return chosen

    def worth(self, run: Run[int]) -> float:
        return self.queues.worth[run.klass][run.part]

    def worth_of(self, run: Run[int], key: int | None) -> float:
        is_last = key == run.keys[-1] and run.sign != key
        return self.worth(run) * (self.last_blocks.share if is_last else 1.0)

    def cheapest(self, pinned: Container[int]) -> int | None:
        run = self.worth_least()
        if run is not None and self.own_keys(run)[-1] not in pinned:
            return self.own_keys(run)[-1]
        for run in self.queues.all():
            key = self.own_keys(run)[-1]
            if key not in pinned and not self.hangs_on(key):
                return key
        return None

    def cheapest_of_old(self, own: Run[int] | None, pinned: Container[int]) -> int | None:
        """Of the runs that are the first of their queue, as long as the cache lacks what LRU would have."""
        kept_from_s, held, run = self.guard.kept_from_s, set(), self.going
        while kept_from_s is not None:
            if run is None:
                first: dict[tuple[int, int], Run[int]] = {}
                for one in self.queues.all():
                    first.setdefault((one.klass, one.part), one)
                old = [one for queue, one in first.items() if queue not in held and one.touched_s < kept_from_s]
                if not old:
                    return None
                run = old[0]
            key = self.own_keys(run)[-1]
            if self.hangs_on(key):
                self.queues.leave(run)
            elif key in pinned or run is own:
                held.add((run.klass, run.part))
            else:
                self.going = run
                return key
            run = None
        return None

    def worth_least(self) -> Run[int] | None:
        while (run := self.queues.next()) is not None and self.hangs_on(self.own_keys(run)[-1]):
            self.queues.leave(run)
        return run

    def oldest(self, pinned: Container[int], own: Run[int] | None) -> int | None:
        if not self.guard.warm:
            for run in list(self.over):
                key = self.own_keys(run)[-1]
                if self.hangs_on(key):
                    self.over.remove(run)
                elif key not in pinned:
                    return key
        for run in self.order:
            key = self.own_keys(run)[-1]
            if key not in pinned and not self.hangs_on(key) and run is not own:
                return key
        for run in self.order:
            for key in reversed(self.own_keys(run)):
                if key not in pinned:
                    return key
        return None

    # ---- runs ----
    def appear(self, run: Run[int]) -> None:
        if run in self.ghosts:
            self.ghosts.remove(run)
        self.order.append(run)

    def disappear(self, run: Run[int]) -> None:
        self.queues.leave(run)
        self.order.remove(run)
        self.forget_that_it_is_over(run)
        if run is self.going:
            self.going = None
        if not set(run.keys) & set(self.coming):
            run.keys = []
        if run.watched:
            self.remember(run)

    def remember(self, run: Run[int]) -> None:
        if run not in self.ghosts:
            self.ghosts.append(run)
        if len(self.ghosts) > self.max_ghosts:
            self.unwatch(self.ghosts[0])

    def unhung(self, parent: int | None) -> None:
        """A run less hangs on this block."""
        above = self.owner.get(parent) if parent is not None else None
        if parent is None or above is None or not above.live or self.hangs_on(parent):
            return
        self.queues.enter(above)
        if OVER <= above.klass < LEFT and above not in self.over:
            self.over.append(above)

    def forget_that_it_is_over(self, run: Run[int]) -> None:
        if run in self.over:
            self.over.remove(run)

    def watch(self, run: Run[int]) -> None:
        other = self.signs.get(run.sign)
        if other is not None and other is not run:
            self.unwatch(other)
        self.signs[run.sign] = run
        self.queues.watch(run)
        if not run.live:
            self.remember(run)

    def unwatch(self, run: Run[int]) -> None:
        self.queues.unwatch(run)
        if run in self.ghosts:
            self.ghosts.remove(run)
        if self.signs.get(run.sign) is run:
            del self.signs[run.sign]

    def passed(self, run: Run[int]) -> None:
        if run.facts is not None:
            self.score.learn(run.facts, run.turn, False, run.touched_s)
            run.facts = None

    def faded(self, run: Run[int]) -> None:
        if not run.live:
            self.unwatch(run)
