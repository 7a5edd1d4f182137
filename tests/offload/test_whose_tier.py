"""A tier is one manager's until that is closed, by whatever way it was given, and nobody's that could not be made."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from paddle_kv.offload import KVOffloadManager
from paddle_kv.offload.books import Books
from paddle_kv.tiers import Saver, Tier
from paddle_kv.tiers.neighbours import lender as lender_module
from tests.offload.test_manager_tiers import MakeRig, make
from tests.offload.tiered_rig import KEYS, WAIT_S, TieredRig, until

__all__ = ["make"]
WAYS: dict[str, Callable[[TieredRig], Any]] = {
    "the tier": lambda rig: rig.tier,
    "its saver": lambda rig: rig.saver,
    "another saver": lambda rig: Saver(rig.tier, "exclusive"),
}


@pytest.mark.parametrize("other", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_a_tier_belongs_to_one_manager_that_is_open(make: MakeRig, first: str, other: str) -> None:
    rig = make()
    rig.manager.close()
    rig.manager = KVOffloadManager(rig.scheduler, tier=WAYS[first](rig))
    before, told, threads = rig.manager.stats(), rig.saver.told, threading.active_count()
    with pytest.raises(ValueError, match=r"^tier is .* that another manager has"):
        KVOffloadManager(rig.scheduler, tier=WAYS[other](rig))
    assert (rig.manager.stats(), rig.saver.told, threading.active_count()) == (before, told, threads)
    rig.save(KEYS[:3])
    rig.manager.flush(WAIT_S)
    was = rig.manager
    was.close()
    rig.manager = KVOffloadManager(rig.scheduler, tier=WAYS[other](rig))
    was.close()  # once more: it is not its own any more
    with pytest.raises(ValueError, match=r"^tier is .* that another manager has"):
        KVOffloadManager(rig.scheduler, tier=WAYS[first](rig))
    rig.load(KEYS[:2], [4, 5]).wait(WAIT_S)
    assert all(rig.right(KEYS[:2], [4, 5]))


def test_of_managers_that_are_made_at_once_one_gets_the_tier(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    rig.manager.close()
    monkeypatch.setattr(Tier, "check_unused", together(Tier.check_unused, 4))
    made: list[Any] = []

    def new() -> None:
        try:
            made.append(KVOffloadManager(rig.scheduler, tier=rig.tier))
        except ValueError as error:
            made.append(error)

    threads = [threading.Thread(target=new) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    [rig.manager] = [one for one in made if isinstance(one, KVOffloadManager)]
    assert len(made) == 4


def together(check: Callable[[Tier], None], count: int) -> Callable[[Tier], None]:
    """The first calls, so many, all end before one of their callers goes on."""
    barrier, calls = threading.Barrier(count), iter(range(count))

    def found(tier: Tier) -> None:
        check(tier)
        if next(calls, None) is not None:
            barrier.wait(WAIT_S)

    return found


def test_a_manager_that_nobody_refers_to_has_no_tier(make: MakeRig) -> None:
    rig = make()
    rig.manager.close()
    forgotten = KVOffloadManager(rig.scheduler, tier=rig.tier)
    del forgotten
    gc.collect()
    rig.manager = KVOffloadManager(rig.scheduler, tier=rig.tier)


def _no_thread(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    return {}


def _no_lending(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def lend(books: Books, lender: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(lender_module, "check_lender", lambda lender, pool: None)
    monkeypatch.setattr(Books, "lend", lend)
    return {"lender": object()}


FAILURES: dict[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "policy": lambda monkeypatch: {"policy": "mru"},
    "max_events": lambda monkeypatch: {"max_events": -1},
    "thread": _no_thread,
    "lender": _no_lending,
}


@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("way", WAYS)
def test_a_manager_that_could_not_be_made_has_no_tier(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch, way: str, what: str
) -> None:
    rig = make()
    rig.manager.close()
    free, threads, tier = rig.pool.num_free_blocks, threading.active_count(), WAYS[way](rig)
    with monkeypatch.context() as patch, pytest.raises((ValueError, RuntimeError, MemoryError)) as failed:
        KVOffloadManager(rig.scheduler, tier=tier, **FAILURES[what](patch))
    assert (rig.pool.num_free_blocks, rig.saver.told) == (free, None)
    until(lambda: threading.active_count() == threads)
    rig.manager = KVOffloadManager(rig.scheduler, tier=tier)  # while the error still refers to what was made
    assert failed.value is not None
    rig.save(KEYS[:3])
    assert rig.tier.exists(KEYS[:3]) == ([False] if way == "another saver" else [True]) * 3
    rig.check_books()
