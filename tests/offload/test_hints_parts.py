"""What is expected and what is over, each by itself: counts, orders, and what is left behind by each call."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paddle_kv.offload.hints import LAPSE_TURNOVERS, Ended, Expected


# ---- expected ----
class Model:
    """Prompts as a list, with nothing kept beside it."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.number = capacity, 0
        self.prompts: list[Any] = []  # in the order in which they were told, also once more
        self.released: list[Any] = []  # those of them, in the order of that

    def add(self, keys: str, due_s: float, admitted: int) -> Any:
        self.number += 1
        self.prompts.append([due_s, self.number, keys, admitted])
        return self.prompts[-1]

    def remove(self, one: Any) -> None:
        self.prompts.remove(one)
        if one in self.released:
            self.released.remove(one)

    def again(self, last: Any, admitted: int) -> None:
        for one in [one for one in self.released if one[:2] <= last[:2]]:
            self.remove(one)
            one[3] = admitted
            self.prompts.append(one)

    def nearest(self) -> list[Any]:
        return sorted(one for one in self.prompts if one not in self.released)

    def came(self, prompt: str) -> None:
        if any(one[2][-1] in prompt for one in self.prompts):
            for key in prompt:
                of_key = sorted((one for one in self.prompts if one[2][-1] == key), key=lambda one: one[1])
                if of_key:
                    self.remove(of_key[0])
        else:
            known = [*self.nearest(), *self.released]
            short = [one for one in known if len(one[2]) == len(prompt) + 1 and one[2][-2] == prompt[-1]]
            if short:
                self.remove(short[0])

    def lapse(self, admitted: int) -> None:
        """The oldest first, and no further than one that is young enough."""
        while self.prompts and self.prompts[0][3] + LAPSE_TURNOVERS * self.capacity < admitted:
            self.remove(self.prompts[0])

    def blocks(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for one in self.nearest():
            for key in one[2]:
                found[key] = found.get(key, 0) + 1
        return found

    def all(self) -> list[str]:
        return list(dict.fromkeys("".join(one[2] for one in self.nearest())))[::-1]


@pytest.mark.parametrize("seed", range(30))
def test_expectations_beside_a_plain_list(seed: int) -> None:
    rng = random.Random(seed)
    expected: Expected[str] = Expected(3)
    model, admitted = Model(3), 0
    pairs: list[Any] = []  # one of the model, and what it stands for
    for _ in range(150):
        keys = "".join(rng.sample("abcdefg", rng.randint(2, 4)))
        action = rng.random()
        if action < 0.5:
            due_s = float(rng.randint(0, 3))
            made = expected.add(keys, due_s, admitted)
            pairs.append((model.add(keys, due_s, admitted), made))
        elif action < 0.6 and model.released:
            again = rng.choice(model.released)
            expected.again(next(made for one, made in pairs if one is again), admitted)
            model.again(again, admitted)
        elif action < 0.75:
            expected.came(keys)
            model.came(keys)
        elif action < 0.85 or not model.nearest():
            admitted += rng.randint(0, 8)
            expected.lapse(admitted)
            model.lapse(admitted)
        else:
            incoming, may_go = rng.choice([None, *"abcdefg"]), set(rng.sample("abcdefg", rng.randrange(8)))
            goes = expected.release_farthest(incoming, may_go.__contains__)
            while model.nearest():
                farthest = model.nearest()[-1]
                if incoming is not None and incoming in farthest[2] and model.blocks()[incoming] == 1:
                    assert not goes
                    break
                model.released.append(farthest)
                if may_go.intersection(farthest[2]) - model.blocks().keys():
                    assert goes
                    break
            else:
                assert not goes
        assert expected.blocks == model.blocks()
        assert expected.all() == model.all()
        for one, made in pairs:
            assert made.released is (one in model.released)
            assert made.over is (one not in model.nearest())


def test_it_lapses_when_so_many_were_let_in_and_not_before() -> None:
    expected: Expected[str] = Expected(10)
    expected.add("ab", 1.0, 5)
    expected.lapse(5 + LAPSE_TURNOVERS * 10)
    assert expected.blocks
    expected.lapse(6 + LAPSE_TURNOVERS * 10)
    assert not expected.blocks


def test_who_asks_hears_how_it_has_ended() -> None:
    expected: Expected[str] = Expected(10)
    came, released, lapsed = (expected.add(keys, due_s, 0) for keys, due_s in (("ab", 1.0), ("cd", 3.0), ("ef", 2.0)))
    expected.came("ab")
    assert expected.release_farthest()
    ends = [(one.over, one.released) for one in (came, released, lapsed)]
    assert ends == [(True, False), (True, True), (False, False)]
    expected.lapse(1 + LAPSE_TURNOVERS * 10)
    assert (lapsed.over, lapsed.released) == (True, False)


def test_what_has_come_is_not_remembered_for_so_long() -> None:
    expected: Expected[str] = Expected(10)
    for number in range(100):
        expected.add("ab", float(number), 0)
        expected.came("ab")
        expected.lapse(0)
    assert not expected._told


def test_what_lacks_its_last_block_is_one_prompt_of_that_length() -> None:
    expected: Expected[str] = Expected(10)
    for keys in ("xyzab", "yab", "zab"):  # "a" in front of the last block, but longer than what comes by more than one
        expected.add(keys, 1.0, 0)
    expected.came("qa")
    assert expected.all() == list(dict.fromkeys("xyzabzab"))[::-1]  # one of two is there still, and the long one
    expected.came("ra")
    expected.came("sa")
    assert expected.all() == list("xyzab")[::-1]


def test_what_a_policy_would_have_let_go_of_is_noted() -> None:
    expected: Expected[str] = Expected(10)
    expected.add("ab", 1.0, 0)
    beside = expected.beside({"p", "a"})
    assert [key in beside for key in "pabq"] == [True, True, True, False]
    assert expected.met == ["b"]  # "a" is pinned anyway
    assert beside.__contains__("q") is False


# ---- over ----
class There:
    """Blocks in slots, as an index has them."""

    def __init__(self, *prompts: str) -> None:
        self.slots: dict[str, int] = {}
        self.ended: Ended[str] = Ended(self.slots, 16)
        for prompt in prompts:
            self.let_in(prompt)

    def let_in(self, prompt: str) -> None:
        self.ended.saw(prompt, next((i for i, key in enumerate(prompt) if key not in self.slots), len(prompt)))
        for key in prompt:
            self.slots.setdefault(key, len(self.slots))
        self.ended.let_in(prompt, 0)

    def go(self, key: str) -> None:
        self.ended.gone(self.slots.pop(key))

    def take_all(self, kept: str = "") -> str:
        found = ""
        while (key := self.ended.take(kept)) is not None:
            self.go(key)
            found += key
        return found


def test_a_session_goes_from_its_end_and_is_forgotten_with_it() -> None:
    there = There("abc", "xy")
    there.ended.add("abc")
    there.ended.add("xy")
    assert there.ended.blocks == set("abcxy")
    assert there.take_all() == "cbayx"
    assert there.ended.blocks == set()


def test_only_what_is_there_is_over_and_once() -> None:
    there = There("abc")
    there.ended.add("abz")
    assert there.ended.blocks == set("ab")
    there.ended.add("cab")  # "a" and "b" keep their places
    assert there.ended.blocks == set("abc")
    assert list(there.ended._order) == ["b", "a", "c"]


def test_one_with_something_behind_it_waits_until_that_has_gone() -> None:
    there = There("abc", "abd")
    there.ended.add("abc")
    assert there.take_all() == "c"
    assert there.ended.take("") is None
    there.go("d")
    assert there.take_all() == "ba"


def test_one_that_waits_goes_on_when_what_hung_on_it_hangs_elsewhere() -> None:
    there = There("abc", "xy")
    there.ended.add("ab")
    assert there.ended.take("") is None  # "c" hangs on "b", and "b" on "a"
    there.ended.let_in(["x", "y", "c"], 0)
    assert there.take_all() == "ba"


def test_one_that_is_used_again_while_it_waits_is_not_over() -> None:
    there = There("abc", "abd")
    there.ended.add("abc")
    assert there.take_all() == "c"
    there.ended.saw("ab", 2)
    there.go("d")
    assert there.ended.take("") is None and there.ended.blocks == set()


def test_what_waits_in_a_slot_goes_with_its_block() -> None:
    there = There("abc")
    there.ended.add("b")
    assert there.ended.take("") is None
    slot = there.slots["b"]
    there.go("b")
    assert slot not in there.ended._waiting


def test_what_is_kept_stays_in_front() -> None:
    there = There("a", "b", "c", "d")
    for key in "abcd":
        there.ended.add(key)
    assert there.ended.take("ab") == "c"
    assert list(there.ended._order) == ["a", "b", "d"]


@pytest.mark.parametrize(("blocks", "order"), [("abcde", "abcdeg"), ("abcdef", "efg")])
def test_what_its_owner_took_out_is_forgotten_when_it_is_most(blocks: str, order: str) -> None:
    there = There(*blocks)
    for key in blocks:
        there.ended.add(key)
    for key in blocks[:-2]:
        there.go(key)
    there.slots["g"] = 7
    there.ended.add("g")
    assert "".join(there.ended._order) == order  # looked through when more than twice what is there
    assert there.ended.blocks == set(order)


def test_what_has_gone_otherwise_is_not_over_any_more() -> None:
    there = There("a", "b")
    for key in "ab":
        there.ended.add(key)
    there.go("a")
    assert there.ended.take("") == "b"
    assert there.ended.blocks == set()


def test_nothing_is_left_when_no_block_is_there() -> None:
    there = There("abc", "abd")
    there.ended.add("abc")
    there.ended.take("c")
    there.ended.take("c")
    there.ended.clear()
    ended = there.ended
    assert not (ended.blocks or ended._order or ended._waiting)
    there.slots.clear()
    assert ended.take("") is None
    there.let_in("a")
    assert ended.hanging.is_leaf(0)
