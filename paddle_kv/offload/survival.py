"""Survival: keeps the runs of blocks that are likeliest to be used again soon, as it learns while it serves.

A *run* is what one prompt used last: the blocks of its path that no later prompt has used. A head that several
prompts share is a run of its own. A run goes from its end, and only if nothing that is there hangs on its last block.
Runs are watched for a while after they have gone, so that it is known what would have come back. A run is of a class,
by its turn, by what a logistic score says of its chance to come back at all (:mod:`.score`) and by whether its
session is said to be over; when those of a class come back is counted by age (:mod:`.returns`). The run with the
lowest Gittins index goes first (:mod:`.queues`); one that comes competes with those that are there, and may not be
let in. While all of that finds less than the order of use would, the order of use decides (:mod:`.guard`).
"""

from __future__ import annotations

import operator
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Sequence
from functools import partial
from itertools import groupby, islice, takewhile
from typing import Generic

from .guard import Guard
from .last_blocks import LastBlocks
from .order_of_use import OrderOfUse
from .owners import NOBODY, Owners
from .policy import Key
from .queues import Queues
from .returns import Returns, part_of
from .run import Run
from .score import CLASSES, HORIZON_PART, LEVELS, TURNS, Score

OPEN, OVER, LEFT, HEAD = range(4)  # kinds of classes: sessions; those that are over; branches left behind; shared heads
PRIORS = [0.05, 0.0, 0.0, 0.05]  # the chance that such a run returns within a part of age, before anything was seen
PRICE_EVERY = 128  # prompts
COMING_FACTOR = 4  # blocks that were looked up and not inserted yet: so many times the capacity, at most
GHOST_SHARE = 16  # runs that have gone and are watched: one for so many blocks of the capacity,
MIN_GHOSTS = 4096  # and at least so many


class Survival(Generic[Key]):
    """For an index of ``capacity_blocks``.

    Args:
        clock: seconds, never going back: ages of minutes are what it learns.
    """

    def __init__(self, capacity_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._max_coming = COMING_FACTOR * capacity_blocks
        self._max_ghosts = max(MIN_GHOSTS, capacity_blocks // GHOST_SHARE)
        self._owner: Owners[Key] = Owners(capacity_blocks)  # of each block that is there
        self.attach = self._owner.attach
        self._coming: dict[Key, Run[Key]] = {}  # of blocks that were looked up
        self._signs: dict[Key, Run[Key]] = {}
        self._hanging: dict[Key, int] = {}  # on a block: runs that have blocks which are there
        self._by_use: OrderOfUse[Key] = OrderOfUse(self._owner, self._hanging)
        self._ghosts: OrderedDict[Run[Key], None] = OrderedDict()  # without; watched
        self._returns = Returns(PRIORS, CLASSES, LEVELS)
        self._queues: Queues[Key] = Queues(self._returns, HORIZON_PART, self._passed, self._faded)
        self._score = Score()
        self._last_blocks = LastBlocks()
        self._guard = Guard(capacity_blocks)
        self._num_prompts = 0
        self._going: Run[Key] | None = None  # the one that makes room now
        self._giving: Run[Key] | None = None  # whose last block went last, for this very save

    # ---- prompts ----
    def on_prompt(self, prompt: Sequence[Key]) -> bool:
        """It is looked up: its blocks that are there are used, the others may come."""
        now_s, queues = self.clock(), self._queues
        self._going = None
        if now_s >= queues.next_look_s:
            queues.advance(now_s)
        self._num_prompts += 1
        if self._num_prompts % PRICE_EVERY == 0:
            if self._guard.told and self._guard.stay_s:
                queues.told_part = self._score.look_ahead(self._guard.stay_s)
            self._score.fit(now_s)
            queues.price()
        if not prompt:
            return True
        if len(set(prompt)) < len(prompt):  # hashes of prefixes never do that
            prompt = list(dict.fromkeys(prompt))
        slots, parts = self._owner.along(prompt)
        found = len(slots)
        self._guard.saw(prompt, found, now_s)
        back = list(filter(None, map(self._signs.get, prompt)))
        for known in back:
            self._came_back(known, now_s)
            if known.live and known.sign != known.keys[-1]:
                self._last_blocks.came_back(known.keys[-1] in prompt)
        own, num_heads = found, len(parts)
        while num_heads and parts[num_heads - 1][0] in back and not parts[num_heads - 1][0].head:
            num_heads -= 1
            own -= parts[num_heads][1]
        heads, start = [], 0
        for run, count in parts[:num_heads]:
            end = start + count
            heads.append(self._head_of(run, prompt[start:end], slots[start:end], back, now_s))
            start = end
        if own < len(prompt):
            run = self._begin(prompt, own, found, [run for run in back if not run.head] if back else back, now_s)
            if own < found:
                self._take(run, prompt[own:found], slots[own:found], parts[num_heads:])
            self._watch(run)
            if run.live:
                queues.enter(run)
            self._expect(run, prompt[found:] if found else prompt)
        for run in back:
            if run.live and not run.head:
                self._leave_behind(run)
        for run in heads[::-1]:  # as of one prompt: the first blocks are the ones used last
            queues.leave(run)
            self._by_use.over.pop(run, None)
            run.touched_s, run.part = now_s, 0
            run.klass = HEAD * CLASSES + (min(run.turn, TURNS) - 1) * LEVELS
            self._watch(run)
            queues.enter(run)
            self._by_use.runs.move_to_end(run)
        return True  # each run is the last of its queue: to use its blocks again would change nothing

    def _came_back(self, run: Run[Key], now_s: float) -> None:
        if run.watched:
            self._guard.duels.came_back(run)
            self._returns.came_back(run.klass, part_of(now_s - run.touched_s))
            if run.facts is not None:
                self._score.learn(run.facts, run.turn, True, run.touched_s)
                run.facts = None
        self._unwatch(run)

    def _head_of(
        self, run: Run[Key], keys: Sequence[Key], slots: list[int], back: list[Run[Key]], now_s: float
    ) -> Run[Key]:
        """These blocks of its front are shared by a prompt that goes elsewhere behind them."""
        if run in back:
            run.head = True
            run.turn += 1
            return run
        head = Run(list(keys), run.parent, keys[-1], now_s, run.turn + 1, HEAD * CLASSES)
        head.head = True
        self._take(head, keys, slots, [(run, len(keys))])
        return head

    def _begin(self, prompt: Sequence[Key], own: int, found: int, before: list[Run[Key]], now_s: float) -> Run[Key]:
        """A run of all behind the heads: of the session that goes on, or of a first turn."""
        length = len(prompt)
        turn, gap_s, known = 1, 0.0, found
        if before:
            last = max(before, key=lambda run: run.turn)
            turn, gap_s, known = last.turn + 1, now_s - last.touched_s, min(length, max(run.length for run in before))
        facts = self._score.facts(turn, length, known, gap_s)
        sign = prompt[-2] if length - 2 >= own else prompt[-1]
        parent = prompt[own - 1] if own else None
        keys = list(prompt[own:] if own else prompt)
        run = Run(keys, parent, sign, now_s, turn, OPEN * CLASSES + self._score.class_of(turn, facts))
        run.length, run.facts = length, facts
        return run

    def _expect(self, run: Run[Key], fresh: Sequence[Key]) -> None:
        """These blocks of it may come."""
        coming = self._coming
        self._forget_many()
        if fresh and fresh[0] in coming:  # another one, not saved yet, begins like this one
            for other, shared in groupby(fresh, coming.get):
                if other is not None:
                    self._hang_on(other, list(shared)[-1])
        coming.update(dict.fromkeys(fresh, run))

    def _take(self, run: Run[Key], keys: Sequence[Key], slots: list[int], parts: list[tuple[Run[Key], int]]) -> None:
        """Blocks that are there, along a path, become its own; what is left of those who had them hangs behind."""
        end = 0
        for before, count in parts:
            end += count
            before.live -= count
            self._move(before, keys[end - 1])
        self._owner.give(slots, run)
        run.live += len(keys)
        if run.live == len(keys):
            self._appear(run)

    def _hang_on(self, run: Run[Key], parent: Key) -> None:
        """It will lose blocks that are not there yet to another."""
        if run.live:
            self._move(run, parent)
        else:
            run.parent = parent

    def _move(self, run: Run[Key], parent: Key) -> None:
        """It has lost its front to another, up to this block."""
        old, run.parent = run.parent, parent
        if run.live:
            self._hanging[parent] = self._hanging.get(parent, 0) + 1
        else:
            self._disappear(run)
        self._unhang(old)

    def _leave_behind(self, run: Run[Key]) -> None:
        """Its prompt went on from the middle: what lies behind that is likely of no use."""
        self._queues.leave(run)
        self._by_use.over.pop(run, None)
        run.klass, run.sign = LEFT * CLASSES, run.keys[-1]
        self._watch(run)
        self._queues.enter(run)

    def on_save(self, keys: Sequence[Key]) -> None:
        """These are about to be inserted, as far as they are absent: answers, say, that no look-up has seen."""
        self._giving = None
        owner_of = self._owner.get
        if not keys or keys[-1] in self._coming or owner_of(keys[-1]) is not None:
            return
        fresh = [key for key in dict.fromkeys(keys) if owner_of(key) is None and key not in self._coming]
        first = keys.index(fresh[0])
        above = keys[first - 1] if first else None
        run = None if above is None else owner_of(above) or self._coming.get(above)
        if run is not None and run.keys[-1] == above:
            run.keys += fresh
            run.length += len(fresh)
        else:
            run = Run(fresh, above, fresh[-1], self.clock(), 1, LEVELS // 2)
            self._watch(run)
        self._forget_many()
        self._coming.update(dict.fromkeys(fresh, run))

    def _forget_many(self) -> None:
        """Of what may come: it was looked up, or told, and is not saved."""
        if len(self._coming) > self._max_coming:
            self._coming.clear()

    def on_end(self, prompt: Sequence[Key]) -> None:
        """The session of this prompt is over, it is said."""
        self._guard.told = True
        for run in {id(run): run for run in map(self._owner.get, prompt) if run is not None}.values():
            if run.klass < CLASSES and run.keys[-1] in prompt:
                self._queues.reclass(run, OVER * CLASSES + run.klass)
                self._by_use.over[run] = None
        self._going = None

    # ---- blocks ----
    def on_insert(self, key: Key) -> None:
        owner = self._owner
        slot = owner.slots[key]
        if slot < len(owner.numbers) and owner.numbers[slot] != NOBODY:
            return
        run = self._coming.pop(key, None)
        if run is None:  # of nobody knows what
            run = Run([key], None, key, self.clock(), 1, LEVELS // 2)
            self._watch(run)
        owner.put(slot, run)
        run.live += 1
        run.end = len(run.keys)
        if run.live == 1:
            self._appear(run)
            self._queues.enter(run)
        else:
            self._grew(run)

    def on_access(self, key: Key) -> None:
        self._queues.use_again(self._run_of(key))

    def on_use(self, keys: Sequence[Key]) -> None:
        """:meth:`on_access` of each, the last one first."""
        owner = self._owner
        for run, _ in groupby(owner.of_slots(owner.slots_of(reversed(keys)))):
            if run is not None:
                self._queues.use_again(run)

    def on_remove(self, key: Key) -> None:
        self._lose(self._run_of(key), key)

    def _run_of(self, key: Key) -> Run[Key]:
        run = self._owner.get(key)
        if run is None:
            raise KeyError(key)
        return run

    def _lose(self, run: Run[Key], key: Key) -> Key:
        """This block of it goes, and is returned."""
        owner = self._owner
        owner.numbers[owner.slots[key]] = NOBODY
        run.live -= 1
        if not run.live:
            self._disappear(run)
            self._unhang(run.parent)
        return key

    def victim(self, incoming: Key | None, pinned: Container[Key]) -> Key | None:
        """``incoming`` itself: it shall not be let in."""
        key = self._choose(incoming, pinned)
        if self._guard.trusts and key is not None:
            self._guard.let_go((key,))
        return key

    def _choose(self, incoming: Key | None, pinned: Container[Key]) -> Key | None:
        """:meth:`victim`."""
        self._giving = None
        guard = self._guard
        own = None if incoming is None else self._coming.get(incoming)
        if not guard.trusts:
            chosen = self._cheapest_of_old(pinned, own)
            if chosen is None:
                chosen = self._oldest(pinned, own)
                if chosen is not None and guard.duels.asked_blocks >= guard.duels.every_blocks:
                    self._duel(chosen[0], own)
            if chosen is not None:
                self._giving = chosen[0]
            return self._let_go(chosen)
        run = self._going
        if run is None or (key := self._owner.last(run)) in self._hanging or key in pinned:
            chosen = self._cheapest(pinned)
            if chosen is None:
                return self._let_go(self._oldest(pinned, own))
            run, key = chosen
            self._going = run
        if own is not None and incoming not in pinned and self._worth_of(own, incoming) < self._worth(run):
            return incoming
        self._giving = run
        return self._lose(run, key)

    def _oldest(self, pinned: Container[Key], but_for: Run[Key] | None) -> tuple[Run[Key], Key] | None:
        """The run used longest ago, and its last block; before all others those of sessions that are over, unless it is
        known better."""
        chosen = None if self._guard.warm else self._by_use.oldest_over(pinned)
        return chosen or self._by_use.oldest(pinned, but_for)

    def _let_go(self, chosen: tuple[Run[Key], Key] | None) -> Key | None:
        return None if chosen is None else self._lose(*chosen)

    def _worth(self, run: Run[Key]) -> float:
        return self._queues.worth[run.klass][run.part]

    def _worth_of(self, run: Run[Key], key: Key | None) -> float:
        """Of this block of it, which may be of less use than the others."""
        return self._worth(run) * (self._last_blocks.share if key == run.keys[-1] != run.sign else 1.0)

    def _duel(self, oldest: Run[Key], own: Run[Key] | None) -> None:
        """Between this one and the one that would go, or the one that comes, if what was learnt decided."""
        chosen = self._worth_least()
        if chosen is None:
            return
        run = chosen[0]
        if own is not None and self._worth(own) < self._worth(run):
            run = own
        self._guard.duels.begin(oldest, run)

    def replace_all(self, incoming: Sequence[Key], pinned: Container[Key]) -> list[Key]:
        """:meth:`victim` and :meth:`on_insert` for the first of these, while the run of the last victim gives the next
        ones too. Each gets the slot of its victim."""
        run, own = self._giving, self._coming.get(incoming[0])
        if run is None or own is None or own is run or not own.live:
            return []
        if self._guard.trusts and run is self._going and self._worth(own) < self._worth(run):
            return []
        expected = map(self._coming.get, islice(incoming, run.live - 1))
        found = self._ending(run, len(list(takewhile(partial(operator.is_, own), expected))), pinned)
        if found:
            run.live -= len(found)
            deque(map(self._coming.pop, incoming[: len(found)]), 0)
            self._owner.give(found.values(), own)
            own.live += len(found)
            self._grew(own)
            if self._guard.trusts:
                self._guard.let_go(found)
        return list(found)

    def also_refused(self, incoming: Sequence[Key], pinned: Container[Key]) -> int:
        """How many of the first of these :meth:`victim` would refuse, as it has just refused the one before them."""
        own = self._coming.get(incoming[0]) if incoming else None
        if own is None or self._going is None or self._worth(own) >= self._worth(self._going):
            return 0
        same = len(list(takewhile(partial(operator.is_, own), map(self._coming.get, incoming))))
        refused = len(list(takewhile(operator.not_, map(pinned.__contains__, incoming[:same]))))
        self._guard.let_go(incoming[:refused])
        return refused

    def _ending(self, run: Run[Key], count: int, pinned: Container[Key]) -> dict[Key, int]:
        """Up to so many of its last blocks that are there, the last one first, with their slots; none behind one that
        has to stay."""
        slots, numbers, number, hanging = self._owner.slots, self._owner.numbers, run.number, self._hanging
        found: dict[Key, int] = {}
        if not count:
            return found
        self._owner.last(run)
        for key in reversed(run.keys[max(0, run.end - count) : run.end]):
            slot = slots.get(key)
            if slot is not None and numbers[slot] == number:
                if key in pinned or key in hanging:
                    break
                found[key] = slot
        return found

    def _cheapest(self, pinned: Container[Key]) -> tuple[Run[Key], Key] | None:
        """The run that is worth least, and its last block."""
        chosen = self._worth_least()
        if chosen is not None and chosen[1] not in pinned:
            return chosen
        for run in self._queues.all():
            key = self._owner.last(run)
            if key not in pinned and key not in self._hanging:
                return run, key
        return None

    def _cheapest_of_old(self, pinned: Container[Key], but_for: Run[Key] | None) -> tuple[Run[Key], Key] | None:
        """:meth:`_cheapest`, of what LRU would not have, if there is such; but for one run."""
        kept_from_s, run = self._guard.kept_from_s, self._going
        if kept_from_s is None:
            return None
        held: set[tuple[int, int]] = set()  # queues
        while run is not None or (run := self._queues.least_before(kept_from_s, held)) is not None:
            key = self._owner.last(run)
            if key in self._hanging:
                self._queues.leave(run)  # until what hangs on it has gone
            elif key in pinned or run is but_for:
                held.add((run.klass, run.part))
            else:
                self._going = run
                return run, key
            run = None
        return None

    def _worth_least(self) -> tuple[Run[Key], Key] | None:
        """Of the runs on which nothing hangs, and its last block."""
        while (run := self._queues.next()) is not None:
            key = self._owner.last(run)
            if key not in self._hanging:
                return run, key
            self._queues.leave(run)  # until what hangs on it has gone
        return None

    # ---- runs ----
    def _appear(self, run: Run[Key]) -> None:
        """The first of its blocks is there; whether it may go is for the caller to say."""
        if run.parent is not None:
            self._hanging[run.parent] = self._hanging.get(run.parent, 0) + 1
        self._ghosts.pop(run, None)
        self._by_use.runs[run] = None

    def _grew(self, run: Run[Key]) -> None:
        """More of its blocks are there: what hung on its last one hangs in its midst now."""
        if not run.leaf and self._owner.last(run) not in self._hanging:
            self._queues.enter(run)

    def _disappear(self, run: Run[Key]) -> None:
        """The last of its blocks has gone."""
        self._queues.leave(run)
        del self._by_use.runs[run]
        self._owner.release(run)
        self._by_use.over.pop(run, None)
        if run is self._going:
            self._going = None
        if run is self._giving:
            self._giving = None
        if self._coming.keys().isdisjoint(run.keys):  # from now on it is known by its sign alone
            run.keys = []
        if run.watched:
            self._remember(run)

    def _remember(self, run: Run[Key]) -> None:
        """Without blocks it is watched, as long as there are not too many of these."""
        self._ghosts[run] = None
        if len(self._ghosts) > self._max_ghosts:
            self._unwatch(next(iter(self._ghosts)))

    def _unhang(self, parent: Key | None) -> None:
        """One run less hangs on this block."""
        if parent is None:
            return
        count = self._hanging[parent] - 1
        if count:
            self._hanging[parent] = count
            return
        del self._hanging[parent]
        above = self._owner.get(parent)
        if above is not None:
            self._queues.enter(above)
            if above.klass // CLASSES == OVER:
                self._by_use.over[above] = None

    def _watch(self, run: Run[Key]) -> None:
        other = self._signs.get(run.sign)
        if other is not None and other is not run:
            self._unwatch(other)
        self._signs[run.sign] = run
        self._queues.watch(run)
        if not run.live:
            self._remember(run)

    def _unwatch(self, run: Run[Key]) -> None:
        self._queues.unwatch(run)
        self._ghosts.pop(run, None)
        if self._signs.get(run.sign) is run:
            del self._signs[run.sign]

    def _passed(self, run: Run[Key]) -> None:
        assert run.facts is not None
        self._score.learn(run.facts, run.turn, False, run.touched_s)
        run.facts = None

    def _faded(self, run: Run[Key]) -> None:
        if not run.live:
            self._unwatch(run)
