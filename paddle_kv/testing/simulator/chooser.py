"""Who goes on next: at random from a seed, as late as possible, or in each order that can make a difference."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Transition:
    """What a party would do next, and what that touches. The key names it in every run that begins alike."""

    key: tuple[Any, ...]
    reads: frozenset[Any]
    writes: frozenset[Any]

    @property
    def party(self) -> Any:
        return self.key[:2] if self.key[0] == "thread" else self.key[0]

    @property
    def is_host(self) -> bool:
        return bool(self.key[0] == "host")

    def commutes_with(self, other: Transition) -> bool:
        """Whether both orders lead to the same state."""
        if self.key[0] == other.key[0] or "thread" in (self.key[0], other.key[0]):  # a thread may do anything
            return False
        return not (self.writes & (other.reads | other.writes) or other.writes & self.reads)


class Chooser(Protocol):
    """Decides what runs next."""

    needs_footprints: bool

    def choose(self, options: Sequence[Transition]) -> Transition: ...


class LateChooser:
    """The device does nothing before the host has to wait for it: each missing wait shows."""

    needs_footprints = False

    def choose(self, options: Sequence[Transition]) -> Transition:
        return options[-1]  # the host if it may, else the stream made last


class RandomChooser:
    """From a seed. Streams have speeds that differ widely and change now and then."""

    needs_footprints = False

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._speeds: dict[Any, float] = {}

    def choose(self, options: Sequence[Transition]) -> Transition:
        if self._random.random() < 0.02:
            self._speeds.clear()
        return self._random.choices(options, [self._speed(option.party) for option in options])[0]

    def _speed(self, party: Any) -> float:
        if party not in self._speeds:
            self._speeds[party] = float(10 ** self._random.uniform(-2, 1))
        return self._speeds[party]


@dataclass
class _Node:
    options: list[Transition]
    asleep: list[Transition]
    current: int = 0


@dataclass(frozen=True)
class Exploration:
    """``orders`` that differ were tried, in ``runs`` (the others turned out to repeat one). ``complete`` says that
    there is no further order."""

    orders: int
    runs: int
    complete: bool


@dataclass
class _ScriptChooser:
    """Follows a path of the search tree, and beyond its end makes it longer."""

    path: list[_Node]
    depth: int = 0
    asleep: list[Transition] = field(default_factory=list)
    pruned: bool = False  # this order was tried already
    needs_footprints: bool = True

    def choose(self, options: Sequence[Transition]) -> Transition:
        if self.pruned:  # nothing new can follow; the run only has to come to an end
            return options[0]
        here = {option.key: option for option in options}
        if self.depth == len(self.path):
            sleeping = {transition.key for transition in self.asleep}
            awake = [option for option in options if option.key not in sleeping]
            if not awake:
                self.pruned = True
                return options[0]
            self.path.append(_Node(awake, self.asleep))
        node = self.path[self.depth]
        self.depth += 1
        chosen = here[node.options[node.current].key]
        # What was tried here before needs no other try until something that it does not commute with has happened.
        done = [*node.asleep, *node.options[: node.current]]
        current = [here.get(transition.key, transition) for transition in done]
        self.asleep = [transition for transition in current if transition.commutes_with(chosen)]
        return chosen


def explore(scenario: Callable[[Chooser], None], *, max_runs: int = 10_000) -> Exploration:
    """Runs the scenario in each order that can make a difference: depth first with sleep sets.

    The scenario has to do the same things whenever it is given the same choices. What it raises ends the search.

    Source of the method: P. Godefroid, Partial-Order Methods for the Verification of Concurrent Systems, 1996.
    """
    path: list[_Node] = []
    orders = runs = 0
    while True:
        chooser = _ScriptChooser(path)
        scenario(chooser)
        runs += 1
        orders += not chooser.pruned
        while path and path[-1].current == len(path[-1].options) - 1:
            path.pop()
        if not path:
            return Exploration(orders, runs, complete=True)
        if runs == max_runs:
            return Exploration(orders, runs, complete=False)
        path[-1].current += 1
