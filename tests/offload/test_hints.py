"""Sessions that are over go first, prompts that are expected last; whatever the policy."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from paddle_kv.offload import POLICIES, BlockIndex, Directory, Hello, make_policy
from paddle_kv.offload.hints import LAPSE_TURNOVERS

names = pytest.mark.parametrize("name", list(POLICIES))


class Index:
    """An index of one-letter blocks, without anything that moves."""

    def __init__(self, name: str, capacity: int) -> None:
        self.index: BlockIndex[Any] = BlockIndex(make_policy(name, capacity), capacity)
        self.free = list(range(capacity))

    def use(self, prompt: Any) -> int:
        prompt = list(prompt)
        found = self.index.lookup(prompt)
        self.index.admit(prompt[found:], self.free)
        return found

    def evict(self) -> Any:
        before = set(self.index.slots)
        self.free += self.index.evict(1)
        gone = before - set(self.index.slots)
        return gone.pop() if gone else None

    def evict_all(self) -> str:
        return "".join(iter(self.evict, None))


@names
def test_what_is_over_goes_first_and_from_its_end(name: str) -> None:
    one = Index(name, 9)
    one.use("abc")
    one.use("xyz")
    one.use("klm")
    one.index.end(list("xyz"))
    one.index.end(list("klm"))
    one.use("stuv")  # makes room as evict does
    assert set(one.index.slots) == set("abcstuvkl")
    assert one.evict_all()[:2] == "lk"


@names
def test_what_others_share_stays_until_they_are_gone(name: str) -> None:
    one = Index(name, 9)
    one.use("shb")
    one.use("shaA")
    one.use("q")
    one.index.end(list("shaA"))
    assert one.evict() + one.evict() == "Aa"
    assert one.index.lookup(list("shb")) == 3
    one.index.end(list("shaA"))  # nothing of its own is left
    assert one.evict_all().index("h") > 0
    assert one.index.slots == {}


def test_a_head_goes_as_soon_as_what_hung_on_it_is_gone() -> None:
    one = Index("lru", 9)
    one.use("sb")
    one.use("q")
    one.use("sa")
    one.index.end(list("sa"))
    assert one.evict_all() == "absq"  # b is the oldest; then s is over, and q is not


@names
def test_a_session_that_goes_on_is_not_over(name: str) -> None:
    one = Index(name, 6)
    one.use("xyz")
    one.use("abc")
    one.index.end(list("abc"))
    one.use("abc")
    one.index.end(list("xyz"))
    assert one.evict_all()[:3] == "zyx"


@names
def test_what_is_held_is_passed_over(name: str) -> None:
    one = Index(name, 6)
    one.use("xyz")
    one.use("abc")
    one.index.end(list("abc"))
    one.index.pin("c")
    assert one.evict() in "xyz"
    one.index.unpin("c")
    gone = one.evict_all()
    assert gone.index("c") < gone.index("b") < gone.index("a")


@names
def test_what_is_expected_goes_last_and_the_farthest_of_it_first(name: str) -> None:
    one = Index(name, 8)
    for prompt in ("ab", "cd", "ef", "gh"):
        one.use(prompt)
    one.index.expect(list("ab"), 5.0)
    one.index.expect(list("ef"), 3.0)
    one.index.expect(list("cd"), 5.0)
    assert set(one.evict_all()[:2]) == set("gh")


@names
def test_expectations_are_given_up_from_the_farthest_on(name: str) -> None:
    one = Index(name, 8)
    for prompt in ("ab", "cd", "ef", "gh"):
        one.use(prompt)
    for prompt, due_s in (("ab", 5.0), ("ef", 3.0), ("cd", 5.0)):
        one.index.expect(list(prompt), due_s)
    gone = one.evict_all()
    assert [set(gone[at : at + 2]) for at in (0, 2, 4, 6)] == [set("gh"), set("cd"), set("ab"), set("ef")]
    assert gone[0] == "h"


@names
def test_an_expected_block_stays_while_others_come_and_go(name: str) -> None:
    one = Index(name, 6)
    one.use("ab")
    one.index.expect(list("abX"), 0.0)
    for number in range(8):
        one.use(f"{number}{number + 100}")
    assert one.index.lookup(list("abX")) == 2  # it came, and is expected no more
    assert one.index.expected.blocks == {}
    for number in range(4):
        one.use([f"m{number}", f"n{number}", f"o{number}"])
    if name == "lru":  # the others have seen it twice
        assert one.index.peek(list("ab")) == 0


def test_what_does_not_come_is_given_up() -> None:
    one = Index("lru", 4)
    one.use("ab")
    one.index.expect(list("ab"), 0.0)
    for number in range(LAPSE_TURNOVERS * 4 + 1):
        assert one.index.peek(["a", "b"]) == 2
        one.use([number])
    for number in range(4):
        one.use([-number - 1])
    assert one.index.peek(["a", "b"]) == 0
    assert not one.index.expected.blocks


def test_what_was_given_up_for_want_of_room_is_forgotten_in_the_end() -> None:
    one = Index("lru", 4)
    one.use("ab")
    made = one.index.expect(list("ab"), 0.0)
    one.evict_all()
    assert made is not None and (made.over, made.released) == (True, True)
    for number in range(LAPSE_TURNOVERS * 4 + 1):
        one.use([number])
        assert one.index.expected.by_end
    one.use([-1])
    assert not one.index.expected.by_end
    assert not made.released


def test_a_look_up_without_the_last_block_is_the_one_that_was_expected() -> None:
    one = Index("lru", 4)
    one.index.expect(list("abc"), 0.0)
    one.use("a")
    assert one.index.expected.blocks
    one.use("ab")
    assert not one.index.expected.blocks


def test_what_is_expected_of_a_shared_head_is_not_there_with_another_prompt() -> None:
    one = Index("lru", 4)
    one.use("sa")
    one.index.expect(list("sa"), 0.0)
    one.use("sb")
    one.use("sc")
    one.use("sd")
    assert one.index.peek(list("sa")) == 2


def prompts_of(rng: random.Random) -> list[tuple[int, ...]]:
    names: dict[tuple[int, ...], int] = {}
    prompts = []
    for _ in range(14):
        path: tuple[int, ...] = ()
        prompt = []
        for _ in range(rng.randint(1, 6)):
            path = (*path, rng.randrange(3))
            prompt.append(names.setdefault(path, len(names)))
        prompts.append(tuple(prompt))
    return prompts


@pytest.mark.parametrize("seed", range(6))
def test_hints_beside_a_model(seed: int) -> None:
    """Which blocks may go, said as simply as it can be."""
    rng = random.Random(seed)
    prompts, capacity = prompts_of(rng), 16
    one = Index("lru", capacity)
    index = one.index
    children: dict[int, set[int]] = {}
    for prompt in prompts:
        for above, below in pairwise(prompt):
            children.setdefault(above, set()).add(below)
    over: set[int] = set()
    expected: list[tuple[float, int, tuple[int, ...]]] = []
    released: list[tuple[float, int, tuple[int, ...]]] = []
    leases: list[tuple[int, ...]] = []
    met = {"over": 0, "expected": 0}
    left_to_evict = 0
    for step in range(900):
        prompt = rng.choice(prompts)
        what = (
            "evict"
            if left_to_evict
            else rng.choice(["use", "use", "use", "end", "expect", "lease", "release", "evict", "evict"])
        )
        if what == "use":
            one.use(prompt)
            over -= set(prompt)
            known = sorted([*expected, *released], key=lambda e: e[1])  # in the order of the calls
            came = [next((e for e in known if e[2][-1] == key), None) for key in prompt]  # of each end the first
            if not any(came):
                shorter = [e for e in [*sorted(expected), *released] if e[2][:-1] == prompt]
                came = list(shorter[:1])
            expected = [e for e in expected if e not in came]
            told = [one.keys for one in index.expected._nearest]
            assert set(told) <= {e[2] for e in expected}
            left = [e for e in [*released, *expected] if e not in came]
            expected = [e for e in expected if e[2] in told]  # to make room it may have given up some
            order = [one.keys for one in index.expected._released]
            released = sorted((e for e in left if e[2] in order), key=lambda e: order.index(e[2]))
        elif what == "end":
            index.end(prompt)
            over |= {key for key in prompt if key in index.slots}
        elif what == "expect" and len(expected) < 3 and prompt not in [e[2] for e in [*expected, *released]]:
            due_s = float(rng.randrange(3))
            index.expect(prompt, due_s)
            expected.append((due_s, step, prompt))
        elif what == "lease" and len(leases) < 2:
            held = prompt[: index.peek(prompt)]
            index.pin(held)
            leases.append(held)
        elif what == "release" and leases:
            index.unpin(leases.pop())
        elif what == "evict":
            left_to_evict = left_to_evict - 1 if left_to_evict else rng.choice([0, 0, 0, 14])
            over &= set(index.slots)
            free = set(index.slots) - set(index.pins)
            kept = {key for *_, keys in expected for key in keys}
            leaves = {key for key in over & free - kept if not children.get(key, set()) & set(index.slots)}
            victim = one.evict()
            assert (victim is None) == (not free)
            if victim is None:
                continue
            if leaves:
                met["over"] += 1
                assert victim in leaves
            elif free - kept:
                assert victim not in kept
            else:
                met["expected"] += 1
                left = sorted(expected)
                while victim in {key for *_, keys in left for key in keys}:
                    released.append(left.pop())
                assert [entry[2] for entry in left] == [entry.keys for entry in index.expected._nearest]
                expected = left
        assert len(index.slots) <= capacity
    assert met["over"] > 10 and met["expected"] > 1


def test_the_directory_takes_hints() -> None:
    now = [100.0]
    directory = Directory(4, clock=lambda: now[0])
    directory.join(Hello(0, 1, 4))
    for number, key in enumerate([b"a", b"b", b"c", b"d"]):
        directory.complete([_saved(directory, [key], number)])
    directory.expect([b"a"], 60.0)
    directory.expect([b"c"])
    directory.end([b"d"])
    assert directory.evict(1) == 1 and directory.peek([b"d"]) == 0
    assert directory.evict(1) == 1 and directory.peek([b"b"]) == 0
    assert directory.evict(1) == 1 and directory.peek([b"a"]) == 0
    assert directory.peek([b"c"]) == 1
    for wrong, error in ((-1.0, ValueError), (float("nan"), ValueError), ("1", TypeError), (True, TypeError)):
        with pytest.raises(error, match="in_seconds"):
            directory.expect([b"a"], wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="hashes"):
        directory.end("a")  # type: ignore[arg-type]
    directory.expect([])
    directory.end([])


def _saved(directory: Directory, keys: list[bytes], device: int) -> Any:
    from paddle_kv.offload import Result

    job = directory.plan_save(keys, [device]).job
    assert job is not None
    return Result(job.id, 0, 1)


@names
def test_what_is_over_again_and_again_is_remembered_once(name: str) -> None:
    one = Index(name, 40)
    for _ in range(200):
        one.use("abcdefghij")
        one.index.end(list("abcdefghij"))
    ended = one.index.ended
    assert len(ended.blocks) == len(ended._order) <= 10
    assert set(one.evict_all()) == set("abcdefghij")
    assert not ended.blocks and not ended._order


@names
def test_what_its_owner_took_out_is_not_remembered_as_over(name: str) -> None:
    one = Index(name, 40)
    one.use("abc")
    for number in range(300):
        prompt = [(number, block) for block in range(5)]
        one.use(prompt)
        one.index.end(prompt)
        one.free += [one.index.remove(key) for key in prompt]
    assert len(one.index.ended.blocks) <= 2 * 8 and len(one.index.ended._order) <= 2 * 8
    one.index.end(list("abc"))
    assert one.evict_all() == "cba"


def test_nothing_goes_for_a_block_that_the_policy_would_rather_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Index("lru", 4)
    one.use("ab")
    monkeypatch.setattr(one.index._policy, "victim", lambda incoming, pins: incoming)
    assert one.index.take_out(1, "z") == {}
    assert set(one.index.slots) == set("ab")
