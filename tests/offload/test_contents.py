"""What a directory believes of blocks beside its plans: prompts that are expected, tiers below, snapshots, room."""

from __future__ import annotations

from typing import Any

import pytest

from paddle_kv.offload import Directory, Hello, Lru, Namespace
from paddle_kv.offload.found import BlockState
from paddle_kv.offload.slot_lru import SlotLru
from paddle_kv.offload.slots import NumberedSlots
from tests.offload.test_directory import KEYS, done, made, save


def test_a_prompt_that_was_expected_has_come_also_if_a_part_of_it_is_looked_up() -> None:
    directory = made(4, policy=Lru())
    save(directory, KEYS[:3])
    save(directory, KEYS[10:11])
    directory.expect(KEYS[:3])
    directory.lookup(KEYS[:1], prompt=KEYS[:3]).release()  # the others are known to be elsewhere
    directory.lookup(KEYS[10:11]).release()
    assert directory.evict(3) == 3
    assert (directory.peek(KEYS[:3]), directory.peek(KEYS[10:11])) == (0, 1)


def test_a_tier_that_says_twice_what_it_has_has_it_once() -> None:
    directory = made(4, max_events=9)
    assert directory.tiers_of(KEYS[0]) == ()
    directory.tier_stored("disk", KEYS[:1])
    directory.tier_stored("disk", KEYS[:2])
    assert [directory.tiers_of(key) for key in KEYS[:2]] == [("disk",), ("disk",)]
    assert [event.keys for event in directory.take_events()] == [tuple(KEYS[:1]), tuple(KEYS[1:2])]
    directory.tier_removed("disk", KEYS[:1])
    assert directory.tiers_of(KEYS[0]) == ()


def test_a_snapshot_leaves_out_what_is_arriving() -> None:
    directory = made(4)
    save(directory, KEYS[:1])
    job = directory.plan_save(KEYS[:3], [1, 2, 3]).job
    assert directory.snapshot().blocks == {"host": (KEYS[0],)}
    done(directory, job)
    assert set(directory.snapshot().blocks["host"]) == set(KEYS[:3])


def test_a_block_that_is_there_takes_no_slot_from_those_that_come_later() -> None:
    """Else the blocks of a prompt that is saved step by step were no neighbours."""
    directory = made(8)
    save(directory, KEYS[:2])
    jobs = [directory.plan_save(KEYS[:count], list(range(count))).job for count in (3, 4, 5)]
    assert [job.host_slots for job in jobs if job is not None] == [(2,), (3,), (4,)]


def test_no_more_slots_are_asked_for_than_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, asked = NumberedSlots(4), []
    take = slots.take
    monkeypatch.setattr(slots, "take", lambda count: asked.append(count) or take(count))
    directory = Directory(4, slots=slots)
    directory.join(Hello(0, 7, 4))
    for count in (1, 3, 5, 6):
        if job := directory.plan_save(KEYS[:count], list(range(count))).job:
            done(directory, job)
    assert asked == [1, 2, 1]  # and none where all are taken


def test_for_all_or_nothing_only_what_is_there_takes_room() -> None:
    directory = made(2)
    save(directory, KEYS[:2])
    directory.lookup(KEYS[:3]).release()
    assert directory.drop(KEYS[:1]) == 1  # the one before it stays
    assert directory.plan_save(KEYS[2:3], [5], all_or_nothing=True).job is not None


def test_nothing_is_kept_of_events_that_nobody_asks_for() -> None:
    directory = made(4)
    save(directory, KEYS[:2])
    assert directory.take_events() == []


def test_damage_of_a_block_that_lies_elsewhere_by_now_is_not_its_own() -> None:
    directory = made(4)
    save(directory, KEYS[:2])
    load = directory.plan_load(KEYS[:1], [3])
    assert directory.drop(KEYS[:2]) == 2
    save(directory, KEYS[1:2])
    save(directory, KEYS[:1])
    assert directory.plan_load(KEYS[:1], [4]).host_slots != load.host_slots
    done(directory, load, failed=(0,), damaged=(0,))
    assert directory.peek(KEYS[:1]) == 1
    assert directory.stats()["damaged_blocks"] == 0


def test_a_policy_fits_the_slots_and_the_clock_of_its_directory() -> None:
    class Far(NumberedSlots):
        def take(self, count: int) -> list[int]:
            return [1000 + slot for slot in super().take(count)]

        def give_back(self, slots: list[int]) -> None:
            super().give_back([slot - 1000 for slot in slots])

    assert type(made(2, policy="lru").index._policy) is SlotLru
    far = made(2, policy="lru", slots=Far(2))
    for key in KEYS[:4]:
        save(far, [key])
    assert far.plan_load(KEYS[2:4], [0, 1]).host_slots == (1000, 1001)
    policy: Any = made(2, policy="survival", clock=lambda: 7.0).index._policy
    assert policy.clock() == 7.0


def test_a_rank_that_does_not_say_its_spec_joins() -> None:
    directory = Directory(2, space=Namespace(b"model", b"spec"))
    assert directory.plan_load([], []).epochs == (0,)  # nobody is there
    directory.join(Hello(0, 5, 2))
    assert directory.ready


def test_the_first_job_of_a_directory_may_be_what_others_were_computed_from() -> None:
    directory = made(2)
    load = directory.plan_load([], [])
    assert directory.plan_save(KEYS[:1], [0], computed_from=[load.id]).job is not None


def test_what_a_tier_is_not_known_to_have_is_not_loaded_from_it() -> None:
    directory = made(4)
    directory.tier_stored("memory of others", KEYS[1:2])
    for key in KEYS[:2]:
        with pytest.raises(KeyError, match="is not in tier 'disk' alone"):
            directory.plan_load([key], [0], tier="disk")


def test_of_a_tier_what_comes_behind_a_block_without_room_is_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made(4)
    directory.tier_stored("disk", KEYS[:3])
    admit = directory._admit
    monkeypatch.setattr(directory, "_admit", lambda keys: admit([KEYS[0], KEYS[2]]))  # a policy has its own ideas
    job = directory.plan_load(KEYS[:3], [0, 1, 2], tier="disk")
    assert (job.keys, job.device_ids) == ((KEYS[0],), (0,))
    assert directory.states(KEYS[:3]) == [BlockState.ARRIVING, BlockState.TIER, BlockState.TIER]
    assert directory.stats()["loaded_blocks"] == 1


def test_an_offer_that_asks_for_no_uses_leaves_their_count_alone() -> None:
    directory = made(1)
    assert directory.plan_save(KEYS[1:2], [0], min_uses=2).job is None
    save(directory, KEYS[:1])
    with directory.lookup(KEYS[:1]):
        assert directory.plan_save(KEYS[1:2], [0]).left_out == (0,)
    assert directory.plan_save(KEYS[1:2], [0], min_uses=2).job is not None


def test_what_a_tier_has_damaged_is_not_there_any_more() -> None:
    directory = made(4)
    directory.tier_stored("disk", KEYS[:2])
    load = directory.plan_load(KEYS[:2], [0, 1], tier="disk")
    done(directory, load, failed=(1,), damaged=(1,))
    assert [directory.tiers_of(key) for key in KEYS[:2]] == [("disk",), ()]
    assert directory.states(KEYS[:2]) == [BlockState.PRESENT, BlockState.ABSENT]


def test_what_is_kept_as_a_whole_counts_those_that_are_there_behind_a_gap() -> None:
    directory = made(3, policy=Lru())
    save(directory, KEYS[9:10])
    save(directory, [KEYS[0], KEYS[2]])
    plan = directory.plan_save(KEYS[:4], [0, 1, 2, 3], all_or_nothing=True)
    assert (plan.job, plan.left_out) == (None, (1, 3))
    assert directory.peek(KEYS[9:10]) == 1  # which made no room


def test_a_policy_that_raises_where_it_is_asked_for_room_is_heard() -> None:
    class Raising(Lru[bytes]):
        def victim(self, incoming: bytes | None, pinned: Any) -> bytes | None:
            raise ZeroDivisionError

    directory = made(3, policy=Raising())
    save(directory, KEYS[:2])
    with pytest.raises(ZeroDivisionError):
        directory.evict(1)
    assert directory.peek(KEYS[:2]) == 2


def test_of_what_was_cleared_nothing_is_over_any_more() -> None:
    directory = made(3, policy=Lru())
    save(directory, KEYS[:2])
    directory.end(KEYS[:2])
    assert directory.clear() == 2
    save(directory, KEYS[9:10])
    save(directory, KEYS[:2])
    assert directory.evict(1) == 1
    assert (directory.peek(KEYS[9:10]), directory.peek(KEYS[:2])) == (0, 2)


def test_nobody_hears_of_what_went_before_it_had_come() -> None:
    directory = made(4, max_events=9)
    save(directory, KEYS[:1])
    assert directory.plan_save(KEYS[1:2], [1]).job is not None
    directory.take_events()
    assert directory.drop(KEYS[:2]) == 2
    assert [(event.kind, event.keys) for event in directory.take_events()] == [("removed", (KEYS[0],))]
