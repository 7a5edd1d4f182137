"""Which block lies in which slot. Moves no bytes and knows no device: the manager and the replay share it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Generic

from .hints import Ended, Expectation, Expected
from .policy import Key, Policy

FEW = 4  # blocks: to go through them one by one costs less than what is gained by doing it together


class BlockIndex(Generic[Key]):
    """Blocks by key, at most ``capacity_blocks`` of them; ``policy`` decides which ones stay.

    Not thread-safe: the owner serialises the calls.

    Attributes:
        slots: block -> its slot, also for blocks that are still arriving.
        arriving: blocks whose bytes are not there yet, and the number of what brings them; the owner keeps it, and
            :meth:`lookup` stops at them.
        pins: block -> how often it is held; see :meth:`pin`. Also blocks that were removed while they were held.
        evicted_blocks: blocks that made room for others.
        evicted: which ones, since the owner last emptied it; None: nobody wants to know.
    """

    def __init__(self, policy: Policy[Key], capacity_blocks: int) -> None:
        self.slots: dict[Key, int] = {}
        self.arriving: dict[Key, int] = {}
        self.pins: dict[Key, int] = {}
        self.capacity_blocks = capacity_blocks
        self.evicted_blocks = 0
        self.evicted: list[Key] | None = None
        self._policy = policy
        if hasattr(policy, "attach"):
            policy.attach(self.slots)
        self.expected: Expected[Key] = Expected(capacity_blocks)
        self.ended: Ended[Key] = Ended(self.slots, capacity_blocks)
        self._admitted_blocks = 0
        self._on_prompt = getattr(policy, "on_prompt", None)
        self._on_end = getattr(policy, "on_end", None)
        self._on_save = getattr(policy, "on_save", None)
        self._by_order = getattr(policy, "by_order", False)
        self._needs_path = self._on_end is None or self._by_order
        self._replace = _own(policy, "replace")
        self._replace_all = _own(policy, "replace_all")
        self._also_refused = _own(policy, "also_refused")
        self._on_use = _own(policy, "on_use")

    def lookup(self, keys: Sequence[Key], prompt: Sequence[Key] | None = None) -> int:
        """Length of the longest prefix of ``keys`` whose blocks are all there; counts as a use of these blocks, the
        last one first: of blocks that were used together, the head of a prefix goes last. ``prompt``: all of it, where
        ``keys`` leaves out what lies elsewhere."""
        count = self.peek(keys)
        whole, found = (keys, count) if prompt is None else (prompt, self._first_absent(prompt))
        try:
            if found < len(whole) or self.ended.blocks:
                self.ended.saw(whole, found)
            if self.expected.by_end:
                self.expected.came(whole)
            used = self._on_prompt is not None and self._on_prompt(whole)
            if count and (not used or prompt is not None):
                self._use(keys[:count])
        except BaseException:
            self._tell_anew()
            raise
        return count

    def _use(self, keys: Sequence[Key]) -> None:
        """These are there, and are used, the last one first."""
        if self._on_use is not None:
            if keys:
                self._on_use(keys)
            return
        on_access = self._policy.on_access
        for key in reversed(keys):
            on_access(key)

    # ---- hints ----
    def expect(self, keys: Sequence[Key], due_s: float) -> Expectation[Key] | None:
        """A prompt that begins with these blocks will come, at that time: they go after all others, those that are due
        last first, and make no room for what is due later. Counts as a use of those that are there. Until then
        :meth:`lookup` has seen it, or four times the capacity was let in. None: no blocks."""
        if not keys:
            return None
        one = self.expected.add(keys, due_s, self._admitted_blocks)
        try:
            self._use(list(filter(self.slots.__contains__, keys)))
        except BaseException:
            self._tell_anew()
            raise
        return one

    def expect_again(self, one: Expectation[Key]) -> list[Expectation[Key]]:
        """It was given up since there was no room, and there may be some now. See :meth:`Expected.again`."""
        return self.expected.again(one, self._admitted_blocks)

    def end(self, keys: Sequence[Key]) -> None:
        """The session of this prompt is over: its blocks go before all others, from its end on, except for those on
        which blocks of others hang. A policy that has a method ``on_end`` is told instead."""
        if self._on_end is None:
            self.ended.add(keys)
            return
        try:
            self._on_end(keys)
        except BaseException:
            self._tell_anew()
            raise

    def peek(self, keys: Sequence[Key]) -> int:
        """As :meth:`lookup`, and no use."""
        count, arriving = self._first_absent(keys), self.arriving
        if arriving and not arriving.keys().isdisjoint(keys):
            return next((position for position, key in enumerate(keys[:count]) if key in arriving), count)
        return count

    def admit(self, keys: Sequence[Key], free_slots: list[int]) -> dict[Key, int]:
        """Gives slots to those of the blocks that are absent: free ones (taken from the list), then those of victims.
        Returns the blocks that are new, in order, with their slots.

        A block that is there already keeps its place; it counts as used only behind an absent one, since
        :meth:`lookup` has counted the others. Of more blocks than there are slots in all, the first are taken. The
        policy hears of the last block first, as in :meth:`lookup`, and may choose the last one that this very call has
        let in as victim: then that one is not admitted. So, where others are pinned, the first blocks get the room that
        there is. Those of the blocks that were there before are pinned meanwhile: they make no room for the others.

        If the policy raises, nothing is admitted, and all slots that became free are in the list.
        """
        admitted: dict[Key, int] = {}
        held: list[Key] = []
        if self.expected.by_end:
            self.expected.lapse(self._admitted_blocks)
        if self._on_save is not None:
            self._on_save(keys)
        slots = self.slots
        first = self._first_absent(keys)
        if first == len(keys):
            return admitted
        path, at, others = self.ended.hanging.path(keys, first)
        rest = keys[first + 1 :]
        behind = [] if slots.keys().isdisjoint(rest) else list(filter(slots.__contains__, rest))
        there, head = [*keys[:first], *behind], () if path is keys else path[:at]
        if there or head:
            held = self._hold_present(there, head)
        try:
            self._admit(keys, first, not behind, free_slots, admitted, held)
            if admitted and self._needs_path:
                self._let_in(path, at)
        except BaseException:
            for key in keys:
                self._forget(key)  # it may have heard of any of them
            left = [slots.pop(key) for key in admitted]
            for slot in left:
                self.ended.gone(slot)
            free_slots += left
            self._tell_anew()
            raise
        finally:
            if held:
                self.unpin(held)
            if others:
                self.ended.hanging.goes_on(others)
        self._admitted_blocks += len(admitted)
        return dict(reversed(admitted.items())) if len(admitted) > 1 else admitted

    def hung_on(self, keys: Sequence[Key]) -> Sequence[Key]:
        """The blocks of the same prompt, before the first absent one, which :meth:`admit` would hold too."""
        first = self._first_absent(keys)
        if first == len(keys):
            return ()
        path, at, _ = self.ended.hanging.path(keys, first)
        return path[:at]

    def _first_absent(self, keys: Sequence[Key]) -> int:
        """Where the first block without a slot stands: other than for :meth:`peek`, one that is arriving has one."""
        slots = self.slots
        return len(list(takewhile(slots.__contains__, keys))) if keys and keys[0] in slots else 0

    def _hold_present(self, there: list[Key], head: Sequence[Key]) -> list[Key]:
        """Pins what is there or arriving: a save must not evict what it relies on, nor a prompt lose its head to its
        end."""
        there += filter(self.slots.__contains__, head)
        if there:
            self.pin(there)
        return there

    def _let_in(self, path: Sequence[Key], at: int) -> None:
        """These of a prompt are there now, as far as there was room; those before ``at`` are what they hang on."""
        if self._on_end is None:  # else the policy knows by itself what hangs on what
            self.ended.let_in(path, at)
        if self._by_order and at:  # else what they hang on were older than they are
            self._use(list(filter(self.slots.__contains__, path[:at])))

    def _admit(
        self,
        keys: Sequence[Key],
        first: int,
        all_absent: bool,
        free_slots: list[int],
        admitted: dict[Key, int],
        held: list[Key],
    ) -> None:
        """Of these from ``first`` on; ``all_absent``: none of them is there. Those that others must not take the place
        of are pinned, and are ``held``: the prompt makes room from its end on, since what is behind a gap is no use."""
        slots, pins, on_insert = self.slots, self.pins, self._policy.on_insert
        replace, replace_all = self._replace, self._replace_all
        hints = bool(self.expected.blocks or self.ended.blocks)
        if hints:
            replace = replace_all = None
        make_room = replace or (self._victim if hints else self._policy.victim)
        free = min(len(free_slots), self.capacity_blocks - len(slots)) if free_slots else 0
        wanted = list(reversed(keys[first : len(slots) + free]))
        if len(wanted) <= FEW or not all_absent or len(set(wanted)) < len(wanted):
            replace_all = None
        at, refused = 0, False
        while at < len(wanted):
            if replace_all is not None and not free and not refused and len(wanted) > at + FEW:
                at += self._replace_together(replace_all, wanted[at:], admitted, held)
                if at == len(wanted):
                    break
            key = wanted[at]
            at += 1
            if key in slots:
                self._policy.on_access(key)
                continue
            told = False
            if free:
                free -= 1
                slot = free_slots.pop()
            else:
                victim = make_room(key, pins)
                refused = victim == key
                if refused:
                    victim = None  # the policy would rather have it stay away
                    if not admitted and replace_all is not None and self._also_refused is not None:
                        at += self._also_refused(wanted[at:], pins)
                told = replace is not None and victim is not None
                if victim is not None and (victim not in slots or victim in pins):
                    if told:
                        self._policy.on_remove(key)
                    victim, told = self._another_victim(victim), False
                if victim is None:
                    if not admitted:
                        continue
                    victim = next(iter(admitted))  # all are held, this one since before it was dropped
                    self._policy.on_remove(victim)
                if victim in admitted:
                    self._take_back(victim, admitted, held)
                else:
                    self.evicted_blocks += 1
                    if self.evicted is not None:
                        self.evicted.append(victim)
                slot = slots.pop(victim)
                if hints:  # else what hangs on what is only asked for when all are let in
                    self.ended.gone(slot)
            admitted[key] = slots[key] = slot
            if len(admitted) > 1 and at < len(wanted):
                pins[key] = pins.get(key, 0) + 1
                held.append(key)
            if not told:
                on_insert(key)

    def _replace_together(
        self,
        replace_all: Callable[[list[Key], Container[Key]], list[Key]],
        wanted: list[Key],
        admitted: dict[Key, int],
        held: list[Key],
    ) -> int:
        """How many of the first of these, which are absent, were let in."""
        slots, pins = self.slots, self.pins
        end = next(iter(admitted)) if admitted else None
        if end is None or end in pins:
            victims = replace_all(wanted, pins)
        else:  # it is to be taken back by itself
            pins[end] = 1
            try:
                victims = replace_all(wanted, pins)
            finally:
                del pins[end]
        if not victims:
            return 0
        let_in = dict(zip(wanted, map(slots.pop, victims), strict=False))
        slots.update(let_in)
        if len(victims) < len(wanted):
            kept = wanted[not admitted : len(victims)]
            self.pin(kept)
            held += kept
        admitted.update(let_in)
        self.evicted_blocks += len(victims)
        if self.evicted is not None:
            self.evicted += victims
        return len(victims)

    def _victim(self, incoming: Key | None, pins: Container[Key]) -> Key | None:
        """As that of the policy: what is over goes first, what is expected last."""
        expected, policy = self.expected, self._policy
        while True:
            kept = expected.beside(pins) if expected.blocks else pins
            if self.ended.blocks and (over := self.ended.take(kept)) is not None:
                policy.on_remove(over)
                return over
            victim = policy.victim(incoming, kept)
            if expected.met:  # they stay, and shall not be met each time
                met = expected.all() if self._by_order else expected.met  # or heads would be older than what was met
                again = [key for key in dict.fromkeys(met) if key in self.slots and key != victim]
                expected.met.clear()
                for key in again:
                    policy.on_access(key)
            if victim is not None or not any(key in self.slots and key not in pins for key in expected.blocks):
                return victim
            if not expected.release_farthest(incoming, lambda key: key in self.slots and key not in pins):
                return None

    def _take_back(self, key: Key, admitted: dict[Key, int], held: list[Key]) -> None:
        """What the prompt ends with is not let in; what it ends with then may go next."""
        del admitted[key]
        if admitted:
            end = next(iter(admitted))
            held.remove(end)
            self.unpin([end])

    def pin(self, keys: Iterable[Key]) -> None:
        """Keeps blocks from being evicted until as many calls of :meth:`unpin`."""
        pins, keys = self.pins, list(keys)
        if len(keys) > FEW and keys[0] not in pins:
            once = dict.fromkeys(keys, 1)
            if len(once) == len(keys) and pins.keys().isdisjoint(once):
                pins.update(once)
                return
        for key in keys:
            pins[key] = pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[Key]) -> None:
        """One :meth:`pin` of each of these blocks less."""
        pins, keys = self.pins, list(keys)
        if len(keys) > FEW and pins[keys[0]] == 1 and list(map(pins.get, keys)).count(1) == len(keys):
            deque(map(pins.pop, keys), 0)  # by nobody else
            return
        for key in keys:
            if pins[key] == 1:
                del pins[key]
            else:
                pins[key] -= 1

    def remove(self, key: Key) -> int:
        """Forgets a block, also one that is arriving or held; its slot."""
        confused = False
        try:
            self._policy.on_remove(key)
        except Exception:  # noqa: BLE001  the block is gone, whatever the policy says
            confused = True
        slot = self.slots.pop(key)
        self.ended.gone(slot)
        self.arriving.pop(key, None)
        if confused:
            self._tell_anew([key])
        return slot

    def clear(self) -> list[int]:
        """Forgets all blocks, whoever holds them; their slots."""
        taken: list[int] = []
        with suppress(Exception):
            while (victim := self._policy.victim(None, ())) in self.slots:  # some policies remove slowly
                taken.append(self.slots.pop(victim))
        self.arriving.clear()
        taken += [self.remove(key) for key in list(self.slots)]
        self.ended.clear()
        return taken

    def evict(self, num_blocks: int) -> list[int]:
        """Lets go of up to so many blocks that nothing holds; their slots. Of one it may raise what the policy does."""
        return list(self.take_out(num_blocks).values())

    def take_out(self, num_blocks: int, incoming: Key | None = None) -> dict[Key, int]:
        """:meth:`evict`: which ones, each with its slot. ``incoming``: it is expected, and others make room for it."""
        taken: dict[Key, int] = {}
        try:
            while len(taken) < num_blocks:
                victim = self._victim(incoming, self.pins)
                if victim is not None and victim == incoming:
                    break  # the policy would rather have it stay away
                if victim is not None and (victim not in self.slots or victim in self.pins):
                    victim = self._another_victim(victim)
                if victim is None:
                    break
                taken[victim] = self.slots.pop(victim)
                self.ended.gone(taken[victim])
                self._count_evicted(victim)
        except Exception:
            self._tell_anew()
            if not taken:
                raise
        return taken

    def _count_evicted(self, key: Key) -> None:
        self.evicted_blocks += 1
        if self.evicted is not None:
            self.evicted.append(key)

    # ---- policies that go wrong ----
    def _another_victim(self, wrong: Key) -> Key | None:
        """Behind one that is not there or held: such a policy is told of what is there, and asked again."""
        for _ in range(len(self.slots) + 1):
            if wrong in self.slots:
                self._policy.on_insert(wrong)
            victim = self._policy.victim(None, self.pins)
            if victim is None or (victim in self.slots and victim not in self.pins):
                return victim
            wrong = victim
        return None

    def _tell_anew(self, gone: Iterable[Key] = ()) -> None:
        """The policy has raised and may have lost any block, or keep one that is gone."""
        for key in gone:
            self._forget(key)
        for key in self.slots:
            self._forget(key)
            with suppress(Exception):
                self._policy.on_insert(key)

    def _forget(self, key: Key) -> None:
        with suppress(Exception):
            self._policy.on_remove(key)


def _own(policy: Any, name: str) -> Any:
    """A method that its class defines; not one that it inherits: that would pass by those which it overrides."""
    return getattr(policy, name) if name in vars(type(policy)) else None
