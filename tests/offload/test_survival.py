"""The policy that learns: what it may let go of, what it remembers, and that it is not behind the order of use."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from typing import Any

import pytest

from paddle_kv.offload.guard import Guard
from paddle_kv.offload.index import FEW
from paddle_kv.offload.owners import NOBODY
from paddle_kv.offload.queues import MOST_STALE
from paddle_kv.offload.returns import NUM_PARTS, part_of
from paddle_kv.offload.score import CLASSES, FIT_EVERY, Score
from paddle_kv.offload.survival import HEAD, MIN_GHOSTS, Survival
from tests.offload.served import Served, hit_rate
from tests.offload.streams import STREAMS, sessions
from tests.offload.survival_model import watched_in

POINTS = 0.3


def check(served: Served) -> None:
    """All that the policy keeps agrees with the index, and with itself."""
    policy: Survival[int] = served.policy
    slots = served.index.slots
    owner = {key: policy._owner.get(key) for key in slots}
    assert {slot for slot, number in enumerate(policy._owner.numbers) if number != NOBODY} == set(slots.values())
    live: dict[Any, int] = {}
    for run in owner.values():
        live[run] = live.get(run, 0) + 1
    assert {run: run.live for run in policy._by_use.runs} == live
    hanging: dict[int, int] = {}
    for run in live:
        if run.parent is not None:
            hanging[run.parent] = hanging.get(run.parent, 0) + 1
    assert policy._hanging == hanging
    queued = {run for row in policy._queues._leaves for queue in row for run in queue}
    assert queued == {run for run in live if run.leaf}
    for run in live:  # who may go is queued, or something hangs on its end
        assert run.leaf or policy._owner.last(run) in hanging
    assert all(not run.live and run.watched for run in policy._ghosts)
    assert all(run.live and not run.head for run in policy._by_use.over)


@pytest.mark.parametrize("trusted", [False, True])
def test_books_and_victims(trusted: bool) -> None:
    """Each victim is there, free, and nothing that is there hangs on it."""
    rng = random.Random(5)
    served = Served("survival", 60)
    policy, index = served.policy, served.index
    cheap_heads = [[float(klass < HEAD * CLASSES)] * NUM_PARTS for klass in range((HEAD + 1) * CLASSES)]
    policy._returns.worth = lambda: cheap_heads  # so that only what hangs on them keeps them
    policy._queues.price()
    prompts = sessions(4, 600, length=6)
    below: dict[int, set[int]] = {}
    for _, prompt in prompts:
        for above, key in pairwise(prompt):
            below.setdefault(above, set()).add(key)
    held: list[list[int]] = []
    for step, (arrival_s, prompt) in enumerate(prompts):
        policy._guard.trusts = trusted
        if rng.random() < 0.3:  # another answer to the turn before
            prompt = [*prompt[:-2], -step - 1, -step - 2000]
        policy._guard.saw = lambda *arguments: None
        served.use(arrival_s, prompt)
        check(served)
        if rng.random() < 0.3:
            index.end(prompt)
        if rng.random() < 0.2:
            held.append(prompt[: index.peek(prompt)])
            index.pin(held[-1])
        if len(held) > 3:
            index.unpin(held.pop(0))
        if step % 7 == 0:
            before = dict(index.slots)
            served.free += index.evict(1)
            (gone,) = before.keys() - index.slots.keys()
            assert gone not in index.pins
            assert not below.get(gone, set()) & index.slots.keys()
            check(served)
        if step % 50 == 3:
            served.free.append(index.remove(rng.choice(list(index.slots))))
            served.free += index.evict(60)
            assert set(index.slots) == set(index.slots) & set(index.pins)
            check(served)


def test_it_is_lru_until_it_has_watched_long_enough() -> None:
    prompts = sessions(1, 300)
    one, other = Served("survival", 200), Served("lru", 200)
    for arrival_s, prompt in prompts:
        if one.policy._guard.trusts:
            break
        assert one.use(arrival_s, prompt) == other.use(arrival_s, prompt)
        assert one.index.slots.keys() == other.index.slots.keys()
    else:
        pytest.fail("it never decides")
    assert one.index.evicted_blocks > 200


def test_what_it_learns_is_worth_more_than_the_order_of_use() -> None:
    prompts = sessions(2, 4000)
    assert hit_rate("survival", 400, prompts) > 1.25 * hit_rate("lru", 400, prompts)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("capacity", [40, 150, 700])
def test_it_is_not_behind_the_order_of_use(stream: str, capacity: int) -> None:
    prompts = STREAMS[stream](capacity)
    assert hit_rate("survival", capacity, prompts) >= hit_rate("lru", capacity, prompts) - POINTS


def test_a_trial_waits_for_evidence_where_the_capacity_is_asked_for_a_few_times() -> None:
    """It would cost more than a point: what is known of sessions is little, and what was known before is of another
    kind."""
    prompts = STREAMS["bursts"](6000)
    assert hit_rate("survival", 6000, prompts) >= hit_rate("lru", 6000, prompts) - POINTS


def test_a_policy_that_finds_less_is_not_asked_and_asked_again_later() -> None:
    guard = Guard(64)
    for second in range(150):
        assert not guard.trusts or second >= 8 * 16
        guard.saw([1000 + 4 * second + position for position in range(4)], 0, float(second))
    assert guard.trusts
    asked = 0
    while guard.trusts:  # the shadow finds all of it, the policy nothing
        guard.saw([1, 2, 3, 4], 0, 100.0)
        asked += 4
    assert asked <= 16
    waited = 0
    while not guard.trusts:
        guard.saw([1, 2, 3, 4], 4, 100.0)
        waited += 4
        assert waited < 100_000
    assert waited > 20 * asked


def test_where_ends_are_told_it_looks_as_far_ahead_as_blocks_are_kept() -> None:
    served = Served("survival", 64)
    policy = served.policy
    for number, horizon_s in enumerate([180.0, 64.0, 64.0]):
        for second in range(256 * number, 256 * (number + 1)):
            served.use(float(second), [4 * second + position for position in range(4)])  # LRU keeps them for 16 s
        assert policy._queues.told_part == policy._score.horizon_part == part_of(horizon_s)
        served.index.end([4 * second + position for position in range(4)])


def test_the_guard_watches_a_sample_of_a_large_cache() -> None:
    guard = Guard(1 << 20)
    for number in range(0, 1 << 15, 32):
        guard.saw(list(range(number, number + 32)), 0, 0.0)
    assert 20 < len(guard._order) < 1000


def test_what_it_remembers_is_bounded() -> None:
    served = Served("survival", 8)
    policy = served.policy
    for number in range(5000):
        served.use(number * 0.01, [number * 10 + position for position in range(3)])
        served.index.lookup([-number * 10 - position for position in range(1, 6)])  # never saved
    assert len(policy._ghosts) <= MIN_GHOSTS
    assert len(policy._coming) <= 4 * 8 + 5
    assert len(policy._signs) <= MIN_GHOSTS + 8 + 5
    queues = policy._queues
    assert sum(queues._num_watched) == sum(len(watched_in(queues, part)) for part in range(NUM_PARTS))
    assert sum(queues._num_watched) <= MIN_GHOSTS + 8 + 5
    assert sum(map(len, queues._watched)) <= 2 * MIN_GHOSTS + NUM_PARTS * MOST_STALE
    for number in range(50):  # and nothing stays for ever
        served.use(1e5 + number, [-1])
    assert len(policy._ghosts) < 50


def test_blocks_of_an_answer_belong_to_its_prompt() -> None:
    served = Served("survival", 20)
    served.use(0.0, [1, 2, 3])
    served.index.admit([2, 3, 4, 5], served.free)
    assert len(set(served.policy._owner.of_slots(served.index.slots.values()))) == 1
    assert served.use(9.0, [1, 2, 3, 4, 5, 6]) == 5
    (run,) = set(served.policy._owner.of_slots(served.index.slots.values()))
    assert run.turn == 2
    check(served)


def failed_trial() -> tuple[Served, Any]:
    """Three sessions of three blocks: a cheap one used last at 2 s, two dear ones at 0 and 9 s. LRU would hold what
    was used since 5 s, and one block more than the cache."""
    served = Served("survival", 9)
    for arrival_s, first in ((0.0, 1), (2.0, 11), (9.0, 21)):
        served.use(arrival_s, [first, first + 1, first + 2])
    policy = served.policy
    (cheap,) = set(policy._owner.of_slots(policy._owner.slots_of([11])))
    policy._queues.reclass(cheap, CLASSES)
    policy._queues._returns.worth = lambda: [[float(klass < CLASSES)] * NUM_PARTS for klass in range(4 * CLASSES)]
    policy._queues.price()
    policy._guard._order.clear()
    policy._guard._order[99] = 5.0
    return served, policy


@pytest.mark.parametrize("lacking", [False, True])
def test_behind_a_trial_that_failed_what_it_kept_goes_by_its_worth(lacking: bool) -> None:
    _, policy = failed_trial()
    assert not policy._guard.trusts
    policy._guard.let_go([99] if lacking else [98])
    assert policy.victim(None, ()) == (13 if lacking else 3)


@pytest.mark.parametrize("hung_on", [False, True])
def test_what_is_held_is_passed_over_and_what_has_others_hanging_waits_for_them(hung_on: bool) -> None:
    _, policy = failed_trial()
    policy._guard.let_go([99])
    if hung_on:
        policy._hanging[13] = 1
    assert policy.victim(None, [] if hung_on else [13]) == 3
    assert policy._owner.get(13).leaf == (not hung_on)
    assert policy.victim(None, [2, 13]) == 23  # by the order of use: nothing else may go of what is old


def test_a_duel_is_between_the_policy_and_the_order_of_use_alone() -> None:
    _, policy = failed_trial()
    duels = policy._guard.duels
    duels.asked_blocks = 10**6
    policy._guard.let_go([99])
    assert policy.victim(None, ()) == 13
    assert duels.asked_blocks == 10**6  # it is still to come


def test_who_could_not_go_may_when_more_of_it_has_come_behind_what_hangs_on_it() -> None:
    served = Served("survival", 10)
    policy = served.policy
    policy._guard.trusts, policy._guard.saw = True, lambda *_: None
    served.index.lookup([1, 2, 3, 4])
    for keys in ([1], [1, 9]):
        served.index.admit(keys, served.free)
    served.index.pin([9])
    policy._worth_least()
    served.index.admit([2, 3, 4], served.free)
    check(served)


def test_what_is_saved_and_never_looked_up_is_forgotten_too() -> None:
    served = Served("survival", 4)
    for number in range(200):
        served.index.admit(list(range(6 * number, 6 * number + 6)), served.free)
    assert len(served.policy._coming) <= 4 * 4 + 6


def test_what_comes_does_not_push_out_its_own() -> None:
    served, policy = failed_trial()
    policy._guard.let_go([99])
    served.now_s = 3.0
    policy._coming[14] = policy._owner.get(11)  # to be saved behind what is there of it
    assert policy.victim(14, ()) == 3
    served.free.append(served.index.slots.pop(3))
    assert policy.victim(14, [2]) == 23  # of what LRU would have, as all else is held or its own


def test_hints_are_believed_as_far_as_they_are_true() -> None:
    """Ends are told of the sessions that go on, and of no other."""
    prompts = sessions(3, 1500, memory=False)
    used: dict[int, int] = {}
    for _, prompt in prompts:
        for key in prompt:
            used[key] = used.get(key, 0) + 1
    found = {}
    for name in ("lru", "survival"):
        served = Served(name, 700)
        hits = 0
        for arrival_s, prompt in prompts:
            hits += served.use(arrival_s, prompt)
            used[prompt[-1]] -= 1
            if used[prompt[-1]]:
                served.index.end(prompt)
        found[name] = 100 * hits / sum(len(prompt) for _, prompt in prompts)
        used = {key: count + (key in {prompt[-1] for _, prompt in prompts}) for key, count in used.items()}
    plain = hit_rate("lru", 700, prompts)
    assert found["lru"] < 0.5 * plain and found["survival"] > 0.8 * plain


def test_a_session_that_is_over_goes_on_together_with_what_hung_on_it() -> None:
    served = Served("survival", 20)
    served.use(0.0, [1, 2, 3, 9])
    served.index.admit([3, 4, 5], served.free)  # an answer, behind another one
    served.index.end([1, 2, 3, 9])
    served.free.append(served.index.remove(9))
    check(served)
    assert served.use(9.0, [1, 2, 3, 4, 5, 6]) == 5
    check(served)
    served.free += served.index.evict(20)
    assert not served.index.slots


def test_prompts_that_are_all_alike_are_no_reason_to_fail() -> None:
    """Rounding leaves equal values a spread above 0; divided by it, they are too large to be solved for."""
    for num_blocks in range(1, 100):
        score, facts = Score(), Score.facts(3, num_blocks, num_blocks // 3, 0.1 * num_blocks)
        for number in range(FIT_EVERY):
            score.learn(facts, 3, number % 2 == 0, 0.0)
        score.fit(1e6)
        assert score.class_of(3, facts) // 3 == 2


def test_a_block_of_a_long_prompt_costs_what_one_of_a_short_prompt_costs() -> None:
    def calls_a_block(length: int) -> float:
        served = Served("survival", 4 * length)
        prompts = [list(range(number * length, (number + 1) * length)) for number in range(12)]
        for prompt in prompts[:8]:
            served.use(0.0, prompt)
        calls = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            for prompt in prompts[8:]:  # each evicts one of those before
                served.use(0.0, prompt)
        finally:
            sys.setprofile(None)
        return calls / (4 * length)

    assert calls_a_block(1024) < 1.2 * calls_a_block(64)


def test_a_block_that_is_not_there_cannot_be_used_or_removed() -> None:
    served = Served("survival", 4)
    served.use(0.0, [1, 2])
    for call in (served.policy.on_access, served.policy.on_remove):
        with pytest.raises(KeyError, match=r"^7$"):
            call(7)
    check(served)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_long_prompt_asks_once_for_each_run_that_makes_room(trusted: bool) -> None:
    """The run of the last victim gives the next ones too."""
    served = Served("survival", 120)
    policy = served.policy
    for number in range(4):
        served.use(float(number), [1000 * number + position for position in range(30)])
    policy._guard.saw = lambda *_: None
    policy._guard.trusts = trusted
    asked = 0
    victim = policy.victim

    def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return victim(*arguments)

    policy.victim = counted
    served.use(9.0, [-position - 1 for position in range(90)])
    assert 3 <= asked <= 3 * FEW
    assert len(served.index.slots) == 120
    check(served)


def test_there_is_no_victim_where_there_is_no_block() -> None:
    for trusted in (False, True):
        policy = Served("survival", 4).policy
        policy._guard.trusts = trusted
        assert policy.victim(None, ()) is None and policy.victim(3, ()) is None


def test_the_end_of_a_session_may_be_told_again() -> None:
    served = Served("survival", 4)
    served.policy._score.class_of = lambda *_: 0
    served.use(0.0, [1, 2])
    for _ in range(2):
        served.index.end([1, 2])
        assert served.policy._owner.get(1).klass == CLASSES
        check(served)


def test_of_sessions_that_are_over_the_first_one_goes_first() -> None:
    served = Served("survival", 6)
    for talk in ([1, 2], [3, 4], [5, 6]):
        served.use(0.0, talk)
    for talk in ([5, 6], [3, 4]):
        served.index.end(talk)
    served.free += served.index.evict(1)
    assert set(served.index.slots) == {1, 2, 3, 4, 5}
    served.index.pin([5])
    served.free += served.index.evict(1)
    assert set(served.index.slots) == {1, 2, 3, 5}


def test_a_prompt_makes_no_room_for_its_own_end() -> None:
    """Its head is used longest ago, and has just made room for another run that is saved with it."""
    served = Served("survival", 8)
    policy, slots = served.policy, served.index.slots
    served.index.lookup(list(range(1, 13)))
    served.index.admit([1, 2, 3, 4], served.free)
    served.use(1.0, [20, 21, 22, 23])
    policy.on_save([5, 6, 7, 8, 9, 50])
    assert policy.victim(50, ()) == 4
    slots[50] = slots.pop(4)
    policy.on_insert(50)
    assert policy.replace_all([9, 8, 7, 6, 5], ()) == []
    assert policy.victim(9, ()) == 23


def test_each_run_that_is_saved_competes_with_the_one_that_makes_room() -> None:
    served = Served("survival", 7)
    policy = served.policy
    served.use(0.0, [1, 2, 3])
    served.index.lookup(list(range(1, 13)))  # its second turn
    served.use(1.0, [20, 21, 22, 23])
    second = policy._owner.get(1).klass
    worth = [[0.1 if klass == second else 0.5] * NUM_PARTS for klass in range((HEAD + 1) * CLASSES)]
    policy._returns.worth = lambda: worth
    policy._queues.price()
    policy._guard.trusts = True
    served.index.pin([1, 2, 3])
    served.index.admit([4, 5, 6, 7, 8, 9, 50], served.free)
    assert set(served.index.slots) == {1, 2, 3, 4, 20, 21, 22}  # those of the second turn find no room but that of 50
    check(served)


def test_a_block_that_nobody_has_heard_of_gets_room_all_the_same() -> None:
    served = Served("survival", 2)
    served.use(0.0, [1, 2])
    served.policy._guard.trusts = True
    assert served.policy.victim(77, ()) == 2
