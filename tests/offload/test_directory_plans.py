"""What the plans of a directory say, and what it counts of them."""

from __future__ import annotations

import pytest

from paddle_kv.errors import TransferError
from paddle_kv.offload import Directory, Hello, Namespace, Result
from tests.offload.test_directory import KEYS, done, made, save


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_save_says_whether_its_layers_will_be_marked(layerwise: bool) -> None:
    job = made().plan_save(KEYS[:2], [3, 5], layerwise=layerwise).job
    assert job is not None and job.layerwise == layerwise


def test_two_blocks_may_be_saved_from_one_place() -> None:
    job = made().plan_save(KEYS[:2], [3, 3]).job
    assert job is not None and job.device_ids == (3, 3)


def test_what_comes_from_a_tier_may_be_loaded_behind_it_where_that_is_said() -> None:
    directory = made()
    directory.tier_stored("disk", KEYS[:2])
    first = directory.plan_load(KEYS[:2], [0, 1], tier="disk")
    with pytest.raises(KeyError, match="is not present"):
        directory.plan_load(KEYS[:2], [2, 3])
    directory.following.update(KEYS[:2])
    second = directory.plan_load(KEYS[:2], [2, 3])
    assert second.host_slots == first.host_slots


@pytest.mark.parametrize("forget", ["drop", "clear", "lost"])
def test_what_was_dropped_of_a_lookup_is_no_wrong_key_while_it_is_saved_anew(forget: str) -> None:
    directory = made()
    save(directory, KEYS[:2])
    found = directory.lookup(KEYS[:2])
    if forget == "drop":
        directory.drop(KEYS[1:2])
    elif forget == "clear":
        directory.clear()
    else:
        directory.lost(0)
        directory.join(Hello(0, 6, 8))
    plan = directory.plan_save(KEYS[:2], [0, 1])
    with pytest.raises(TransferError, match=r"hashes\[\d\] = 30\d+ was dropped or found damaged since the lookup"):
        directory.plan_load(found.keys, [2, 3])
    assert directory.stats()["jobs_in_flight"] == 1
    found.release()
    with pytest.raises(KeyError, match="is not present"):  # whoever has not looked it up, or not any more
        directory.plan_load(KEYS[1:2], [2])
    assert plan.job is not None
    directory.complete([Result(plan.job.id, 0, plan.job.epochs[0])])
    assert directory.plan_load(KEYS[:2], [2, 3]).host_slots == tuple(map(directory.index.slots.get, KEYS[:2]))


def test_a_lookup_of_what_was_dropped_has_it_again_when_it_is_saved_anew() -> None:
    directory = made()
    save(directory, KEYS[:1])
    with directory.lookup(KEYS[:1]) as found:
        directory.drop(KEYS[:1])
        save(directory, KEYS[:1])
        assert directory.plan_load(found.keys, [2]).host_slots == (directory.index.slots[KEYS[0]],)


def test_a_rank_with_a_cache_of_the_same_spec_joins() -> None:
    directory = Directory(8, space=Namespace(spec=b"one"))
    with pytest.raises(ValueError, match="another spec"):
        directory.join(Hello(0, 1, 8, b"other"))
    directory.join(Hello(0, 1, 8, b"one"))
    assert directory.ready


def test_what_is_saved_found_and_left_out_is_counted() -> None:
    directory = made(4)
    save(directory, KEYS[:2])
    held = directory.lookup(KEYS[:2])
    plan = directory.plan_save([*KEYS[:6], KEYS[5]], range(7))
    assert plan.left_out == (4, 5, 6)
    stats = directory.stats()
    assert (stats["blocks"], stats["saving_blocks"], stats["pinned_blocks"]) == (2, 2, 4)
    assert (stats["saved_blocks"], stats["deduplicated_blocks"], stats["left_out_blocks"]) == (4, 2, 2)
    assert (stats["lookups"], stats["looked_up_blocks"], stats["hit_blocks"]) == (1, 2, 2)
    done(directory, plan.job)
    assert directory.stats()["blocks"] == 4
    held.release()


def test_what_is_undone_was_never_counted() -> None:
    directory = made(4)
    save(directory, KEYS[:2])
    before = directory.stats()
    load, plan = directory.plan_load(KEYS[:2], [0, 1]), directory.plan_save(KEYS[2:3], [2])
    assert plan.job is not None
    counted = directory.stats()
    assert (counted["loaded_blocks"], counted["saved_blocks"]) == (2, before["saved_blocks"] + 1)
    for job in (load, plan.job):
        directory.undo(job)
    assert directory.stats() == before
