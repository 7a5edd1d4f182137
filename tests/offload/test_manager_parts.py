"""The short calls of a manager, the checks of what it is given, and the names of the package."""

from __future__ import annotations

from collections import UserList
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from paddle_kv import LayerwiseScheduler, offload
from paddle_kv.offload import KVOffloadManager
from paddle_kv.offload.checks import checked_count, checked_device_ids, checked_hashes, checked_list
from tests.schedule.rig import WAIT_S, Rig


@pytest.fixture
def manager() -> Iterator[KVOffloadManager]:
    """Three prompts of one block each were saved: first a, then b, then c."""
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler, KVOffloadManager(scheduler, policy="lru") as made:
        for device_id, key in enumerate((b"a", b"b", b"c")):
            made.save([key], [device_id]).wait(WAIT_S)
        yield made


def left(manager: KVOffloadManager) -> list[bytes]:
    return [key for key in (b"a", b"b", b"c") if manager.peek([key])]


# ---- what comes ----
def test_what_is_expected_goes_last_and_of_it_what_is_due_last_goes_first(manager: KVOffloadManager) -> None:
    for key, in_seconds in ((b"a", 5.0), (b"b", 500.0)):
        prefetch = manager.expect([key], in_seconds)
        assert prefetch.done and prefetch.num_blocks == 0  # nothing is in a tier
    kept = []
    for _ in range(3):
        manager.evict(1)
        kept.append(left(manager))
    assert kept == [[b"a", b"b"], [b"a"], []]


def test_what_is_over_goes_first(manager: KVOffloadManager) -> None:
    manager.end([b"b"])
    manager.evict(1)
    assert left(manager) == [b"a", b"c"]
    with pytest.raises(TypeError, match="hashes is str"):
        manager.end("b")  # type: ignore[arg-type]


# ---- what is kept ----
def test_less_than_no_block_is_not_evicted(manager: KVOffloadManager) -> None:
    with pytest.raises(ValueError, match=r"^num_blocks = -1 must not be negative$"):
        manager.evict(-1)
    assert manager.evict(0) == 0 and left(manager) == [b"a", b"b", b"c"]


@pytest.mark.parametrize(("timeout_s", "error"), [("1", TypeError), (float("nan"), ValueError)])
def test_a_flush_refuses_what_is_no_time_also_without_a_tier(
    manager: KVOffloadManager, timeout_s: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="timeout_s"):
        manager.flush(timeout_s)
    manager.flush(60.0)


def test_a_snapshot_tells_what_is_there(manager: KVOffloadManager) -> None:
    assert {name: set(keys) for name, keys in manager.snapshot().blocks.items()} == {"host": {b"a", b"b", b"c"}}


def test_the_hit_rate_is_a_part_of_the_blocks_that_were_looked_up(manager: KVOffloadManager) -> None:
    assert manager.stats()["hit_rate"] == 0.0  # of none
    manager.lookup([b"a"]).release()
    assert manager.stats()["hit_rate"] == 1.0
    manager.lookup([b"x"]).release()
    assert manager.stats()["hit_rate"] == 0.5


# ---- what is refused ----
@pytest.mark.parametrize("largest", [2**63, 2**63 + 1, 2**64])
def test_a_block_that_no_integer_of_64_bits_names_is_refused(largest: int) -> None:
    checked_device_ids([b"a", b"b"], [0, 2**63 - 1])
    for ids in ([0, largest], [largest, 0]):
        with pytest.raises(ValueError, match=rf"names block {largest}; it must be in \[0, 2\*\*63\)"):
            checked_device_ids([b"a", b"b"], ids)
    for ids in ([3, -1], [-1, 3]):
        with pytest.raises(ValueError, match=r"names block -1; it must not be negative"):
            checked_device_ids([b"a", b"b"], ids)
    assert checked_count(2**63 - 1, "many") == 2**63 - 1
    with pytest.raises(ValueError, match=rf"^many = {largest} must be in \[0, 2\*\*63\)$"):
        checked_count(largest, "many")


@pytest.mark.parametrize("values", ["ab", b"ab", bytearray(b"ab"), 7])
def test_a_string_is_no_list_of_its_letters(values: Any) -> None:
    with pytest.raises(TypeError, match=f"^many is {type(values).__name__}; a list of things is expected$"):
        checked_list(values, "many", "things")
    assert checked_list(iter((1, 2)), "many", "things") == [1, 2]


def test_of_hashes_the_first_that_is_none_is_named() -> None:
    with pytest.raises(TypeError, match=r"^hashes\[1\] is str; bytes are expected$"):
        checked_hashes([b"a", "b", 3])  # type: ignore[list-item]
    assert checked_hashes(UserList([b"a", b"b"])) == [b"a", b"b"]


def test_a_count_of_another_kind_becomes_an_int() -> None:
    found = checked_count(np.int64(3), "many", least=3)
    assert (found, type(found)) == (3, int)


def test_an_argument_of_the_manager_that_is_none_is_named(manager: KVOffloadManager) -> None:
    given: Any = {"write_through": 1}, {"tier_timeout_s": "soon"}
    for options in given:
        with pytest.raises(TypeError, match=f"^{next(iter(options))} "):
            KVOffloadManager(manager._scheduler, **options)
    with pytest.raises(TypeError, match=r"^layerwise "):
        manager.save([], [], layerwise=1)  # type: ignore[arg-type]


# ---- names ----
def test_the_package_imports_none_of_its_modules_by_itself() -> None:
    anew = ModuleType(offload.__name__)
    anew.__package__ = offload.__name__
    assert offload.__spec__ is not None and offload.__spec__.loader is not None
    offload.__spec__.loader.exec_module(anew)
    assert not set(vars(anew)) & set(offload.__all__)


def test_names_come_when_they_are_asked_for_and_are_listed_before() -> None:
    listed = offload.__dir__()
    assert listed == sorted(set(listed)) and {*offload.__all__, "__name__"} <= set(listed)
    for name in offload.__all__:
        assert offload.__getattr__(name) is getattr(offload, name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        offload.__getattr__("Nothing")
