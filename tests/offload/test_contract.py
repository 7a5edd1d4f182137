"""The contract of docs/offload.md, clause by clause: each holds, and is broken where its protection is left out."""

from __future__ import annotations

import gc
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_kv import CancelledError, ClosedError, LayerwiseScheduler, TransferError
from paddle_kv.offload import POLICIES, BlockState, KVOffloadManager, Lru, books, directory, hints, index, moving
from paddle_kv.offload.survival import Survival
from paddle_kv.tracking import group, keeper
from tests.offload import chunk_clauses, tier_clauses
from tests.offload.disorder import Rebel, in_child, interrupted
from tests.offload.test_manager_tiers import MakeRig, make
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, Rig

__all__ = ["make"]
HOST_BLOCKS = 6
LAYERS = 5
PAGE = Path(__file__).parents[2] / "docs" / "offload.md"
KEYS = [bytes([number]) for number in range(20)]
DRAIN_S = 3.0


class Case:
    """What a clause is tried on."""

    def __init__(self, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies, self.patch = copies, monkeypatch
        self.made: list[KVOffloadManager] = []
        self.rig = Rig(host_blocks=HOST_BLOCKS)

    def manager(self, **options: Any) -> KVOffloadManager:
        scheduler = LayerwiseScheduler(self.rig.cache, self.rig.pool)
        self.made.append(KVOffloadManager(scheduler, **options))
        return self.made[-1]

    def close(self) -> None:
        self.copies.go_on()
        for manager in self.made:
            manager.close()
            manager._scheduler.close(WAIT_S)

    def check_books(self, manager: KVOffloadManager) -> None:
        """What the books say, and what the pool has given out."""
        found = manager._books

        def compare() -> None:
            found.settle()
            slots = list(found.index.slots.values())
            assert len(set(slots)) == len(slots)
            assert set(slots) == found.slots.taken == self.rig.pool._allocated
            assert found.index.arriving.keys() <= set(found.index.slots)
            assert set(found.index.pins) == {key for one in found.moves.moving for job in one.jobs for key in job.keys}
            policy = found.index._policy
            if isinstance(policy, Survival):
                assert None not in map(policy._owner.get, found.index.slots)
                assert sum(run.live for run in policy._by_use.runs) == len(found.index.slots)
            else:
                assert set(policy._order) == set(found.index.slots)

        group.change(found, compare)


def clause_1(case: Case) -> None:
    manager = case.manager()
    case.copies.hold("offload", LAYERS - 1)
    save = manager.save(KEYS[:3], [4, 1, 8])
    assert case.copies.arrived.acquire(timeout=WAIT_S)
    assert manager.peek(KEYS[:3]) == 0
    case.copies.go_on()
    save.wait(WAIT_S)
    assert manager.peek(KEYS[:3]) == 3


def clause_2(case: Case) -> None:
    manager = case.manager()
    case.copies.fail("offload", 2, OSError("lost"))
    with pytest.raises(TransferError):
        manager.save(KEYS[:3], [0, 1, 2]).wait(WAIT_S)
    assert (manager.peek(KEYS[:3]), case.rig.pool.num_free_blocks) == (0, HOST_BLOCKS)


def clause_3(case: Case) -> None:
    manager = case.manager()
    manager.save(KEYS[:2], [0, 1]).wait(WAIT_S)
    case.copies.fail("onload", 3, OSError("lost"))
    load = manager.onload(KEYS[:2], [2, 3])
    save = manager.save(KEYS[2:4], [4, 5], computed_from=[load])
    save.wait(WAIT_S)
    load.wait_over(WAIT_S)
    assert manager.peek(KEYS[:4]) == 2


def clause_4(case: Case) -> None:
    manager = case.manager()
    manager.save(KEYS[:3], [0, 1, 2]).wait(WAIT_S)
    case.copies.hold("onload", 2)
    load = manager.onload(KEYS[1:3], [4, 5])
    with manager.lookup(KEYS[:1]):
        assert manager.evict(9) == 0
    case.copies.go_on()
    load.wait(WAIT_S)
    assert manager.evict(9) == 3


def clause_5(case: Case) -> None:
    manager = case.manager()
    for again in (KEYS[:2], KEYS[1:3]):  # nothing of it is moved again; a part of it
        for wait in ("wait", "wait_on", "wait_layer"):
            case.copies.hold("offload", 1)
            first = manager.save(KEYS[:2], [4, 7])
            second = manager.blocks_evicted(again, [4, 7])
            arguments = [LAYERS - 1] if wait == "wait_layer" else []
            with pytest.raises(TimeoutError):
                getattr(second, wait)(*arguments, timeout_s=SHORT_S)
            assert not second.done()
            case.copies.go_on()
            getattr(second, wait)(*arguments, timeout_s=WAIT_S)
            assert first.done()
            second.wait(WAIT_S)
            manager.clear()


def clause_6(case: Case) -> None:
    for policy in ("lru", "arc", "s3fifo"):
        manager = case.manager(policy=policy, capacity_bytes=4 * LAYERS * case.rig.spec.block_bytes)
        manager.save(KEYS[1:3], [1, 2]).wait(WAIT_S)
        manager.lookup(KEYS[1:2]).release()
        manager.save(KEYS[2:6], [2, 3, 4, 5]).wait(WAIT_S)
        assert manager.peek(KEYS[2:6]) == (3 if policy == "arc" else 4)  # it keeps what was used twice
        manager.close()


def clause_7(case: Case) -> None:
    for policy in ("lru", "arc", "s3fifo"):
        manager = case.manager(policy=policy)
        manager.save(KEYS[:5], range(5)).wait(WAIT_S)
        manager.lookup(KEYS[:5]).release()
        assert manager.evict(3) == 3
        assert manager.peek(KEYS[:5]) == 2
        manager.close()


def clause_8(case: Case) -> None:
    manager = case.manager()
    manager.save(KEYS[:4], range(4)).wait(WAIT_S)
    with manager.lookup(KEYS[:4]):
        assert manager.evict(4) == 0
        save = manager.save(KEYS[4:9], range(5))
        save.wait(WAIT_S)
        assert manager.left_out(save) == [2, 3, 4]
        assert manager.peek(KEYS[:9]) == 6


def clause_9(case: Case) -> None:
    case.patch.setenv("PADDLE_KV_CHECKSUM", "1")
    manager = case.manager()
    manager.save(KEYS[:3], [0, 1, 2]).wait(WAIT_S)
    case.rig.pool.view("key", 3, manager._books.index.slots[KEYS[1]])[...] = 1
    for _ in range(2):
        with manager.lookup(KEYS[:3]) as lease:
            found = lease.num_blocks
            if found == 3:
                with pytest.raises(TransferError):
                    manager.onload(lease.hashes, [4, 5, 6])
    assert found == 1
    assert manager.stats()["damaged_blocks"] == 1
    manager.save(KEYS[:3], [0, 1, 2]).wait(WAIT_S)
    manager.onload(KEYS[:3], [4, 5, 6]).wait(WAIT_S)
    case.rig.device = {name: bits.copy() for name, bits in case.rig.device.items()}
    for name in case.rig.spec.tensor_names:
        case.rig.device[name][:, 4:7] = case.rig.device[name][:, :3]
    case.rig.expect_offload([0, 1, 2], [manager._books.index.slots[key] for key in KEYS[:3]])
    manager.drop(KEYS[:1])


def clause_10(case: Case) -> None:
    def disobey(left: int, behind: bool) -> None:
        policy = Rebel()
        manager = case.manager(policy=policy)
        policy.left, policy.behind = left, behind
        for call in 2 * (
            lambda: manager.save(KEYS[:4], range(4)).wait(WAIT_S),
            lambda: manager.lookup(KEYS[:4]).release(),
            lambda: manager.save(KEYS[2:9], range(7)).wait(WAIT_S),
            lambda: manager.evict(3),
            lambda: manager.drop(KEYS[4:6]),
        ):
            before = policy.left
            try:
                call()
            except ZeroDivisionError:
                assert before > 0, "a later call fails"
            case.check_books(manager)
        manager.save(KEYS[:6], range(6)).wait(WAIT_S)
        assert manager.peek(KEYS[:6]) == 6
        manager.close()
        manager._scheduler.close(WAIT_S)
        case.made.remove(manager)

    for left in range(1, 30):
        disobey(left, False)
        disobey(left, True)


def clause_11(case: Case) -> None:
    manager = case.manager()
    manager.save(KEYS[:1], [0]).wait(WAIT_S)
    lease = manager.lookup(KEYS[:1])
    save = manager.save(KEYS[1:3], [1, 2], layerwise=True)
    save.mark_layer_written(0)
    assert [one.plan.device_ids.tolist() for one in manager.in_flight()] == [[1, 2]]
    del lease, save
    gc.collect()
    manager._scheduler.drain(DRAIN_S)
    assert manager.evict(1) == 1
    assert case.rig.pool.num_free_blocks == HOST_BLOCKS
    manager.save(KEYS[1:3], [1, 2]).wait(WAIT_S)
    assert manager.peek(KEYS[1:3]) == 2


def clause_12(case: Case) -> None:
    manager = case.manager()

    def serve() -> None:
        with manager.lookup(KEYS[:4]) as lease:
            load = manager.onload(lease.hashes, range(lease.num_blocks))
        save = manager.save(KEYS[:6], range(6), layerwise=True, computed_from=[load])
        for layer in range(LAYERS):
            save.mark_layer_written(layer)
        save.wait(WAIT_S)
        manager.evict(2)

    lines = 1
    while interrupted(serve, lines):
        gc.collect()
        manager._scheduler.drain(DRAIN_S)
        case.check_books(manager)
        assert manager.stats()["pinned_blocks"] == 0
        lines += 5
    assert lines > 200
    manager.save(KEYS[:6], range(6)).wait(WAIT_S)
    assert manager.peek(KEYS[:6]) == 6


def clause_13(case: Case) -> None:
    class Slow(Lru[bytes]):
        def on_access(self, key: bytes) -> None:
            if not begun.is_set():
                begun.set()
                time.sleep(20 * SHORT_S)  # until the fork
            super().on_access(key)

    begun = threading.Event()
    manager = case.manager(policy=Slow())
    manager.save(KEYS[:2], [0, 1]).wait(WAIT_S)
    thread = threading.Thread(target=lambda: manager.lookup(KEYS[:2]).release())
    thread.start()
    assert begun.wait(WAIT_S)
    in_child(lambda: [None][manager.peek(KEYS[:2]) - 2])
    thread.join(WAIT_S)
    assert manager.peek(KEYS[:2]) == 2


def clause_14(case: Case) -> None:
    manager = case.manager()
    manager.save(KEYS[:2], [0, 1]).wait(WAIT_S)
    case.copies.hold("offload", 1)
    save = manager.save(KEYS[2:4], [2, 3])
    lease = manager.lookup(KEYS[:2])
    assert manager.clear() == 4
    with pytest.raises(TransferError, match="was dropped"):
        manager.onload(lease.hashes, [4, 5])
    case.copies.go_on()
    save.wait(WAIT_S)
    assert [manager.peek([key]) for key in KEYS[:4]] == [0] * 4
    assert case.rig.pool.num_free_blocks == HOST_BLOCKS
    case.copies.hold("offload", 1)
    save = manager.save(KEYS[:2], [0, 1])
    with pytest.raises(TransferError, match="was dropped"):  # and is on its way again
        manager.onload(lease.hashes, [4, 5])
    case.copies.go_on()
    save.wait(WAIT_S)
    lease.release()
    assert manager.drop(KEYS[1:9]) == 1
    assert manager.peek(KEYS[:2]) == 1


def clause_15(case: Case) -> None:
    manager = case.manager()
    size = case.rig.spec.block_size
    hashes = manager.block_hashes(np.arange(3 * size))
    manager.save(hashes, [0, 1, 2]).wait(WAIT_S)
    for num_tokens, found in ((3 * size, 2), (3 * size + 1, 3)):
        with manager.lookup(hashes, num_tokens=num_tokens) as lease:
            assert lease.num_blocks == found


def clause_16(case: Case) -> None:
    with case.manager() as manager:
        manager.save(KEYS[:2], [0, 1]).wait(WAIT_S)
        unmarked = manager.save(KEYS[2:4], [2, 3], layerwise=True)
        lease = manager.lookup(KEYS[:2])
    assert case.rig.pool.num_free_blocks == HOST_BLOCKS
    with pytest.raises(CancelledError):
        unmarked.wait(WAIT_S)
    lease.release()
    with pytest.raises(ClosedError):
        manager.lookup(KEYS[:2])


def clause_31(case: Case) -> None:
    for policy in POLICIES:
        manager = case.manager(policy=policy, capacity_bytes=3 * LAYERS * case.rig.spec.block_bytes)
        for number in range(3):
            manager.save(KEYS[number : number + 1], [number]).wait(WAIT_S)
        manager.expect(KEYS[0:1], in_seconds=9)
        manager.expect(KEYS[1:2])
        assert manager.evict(1) == 1 and manager.peek(KEYS[2:3]) == 0
        assert manager.evict(1) == 1 and manager.peek(KEYS[0:1]) == 0
        assert manager.peek(KEYS[1:2]) == 1
        manager.close()


def clause_32(case: Case) -> None:
    for policy in POLICIES:
        manager = case.manager(policy=policy, capacity_bytes=5 * LAYERS * case.rig.spec.block_bytes)
        for prompt in (KEYS[3:5], [KEYS[0], KEYS[2]], KEYS[:2]):  # the last two share their first block
            manager.lookup(prompt).release()
            manager.save(prompt, list(range(len(prompt)))).wait(WAIT_S)
        manager.end(KEYS[:2])
        assert manager.evict(1) == 1 and manager.states(KEYS[:2]) == [BlockState.PRESENT, BlockState.ABSENT]
        manager.end(KEYS[3:5])
        assert manager.evict(1) == 1 and manager.states(KEYS[3:5]) == [BlockState.PRESENT, BlockState.ABSENT]
        assert manager.peek([KEYS[0], KEYS[2]]) == 2
        manager.close()


CLAUSES = {int(name.partition("_")[2]): run for name, run in list(globals().items()) if name.startswith("clause_")}


def keep_handle(self: Any, movement: Any, *arguments: Any, **options: Any) -> None:
    MOVING_INIT(self, movement, *arguments, **options)
    self.handle = movement.handle()


MOVING_INIT = moving.Moving.__init__
# Clause -> what is patched, and by what.
MUTATIONS: dict[int, tuple[Any, str, Any]] = {
    1: (moving.Moving, "over", property(lambda self: True)),
    2: (moving.Moving, "failed", property(lambda self: False)),
    3: (moving.Moving, "failed", property(lambda self: self.movement.failed)),
    4: (books.Books, "unpin", lambda self, keys: None),
    5: (books.Books, "users_of", lambda self, device_ids: []),
    6: (index.BlockIndex, "_hold_present", lambda self, there, head: []),
    7: (index, "reversed", list),
    8: (index, "reversed", list),
    9: (directory.Directory, "_drop_damaged", lambda self, job, positions: None),
    10: (index.BlockIndex, "_tell_anew", lambda self, gone=(): None),
    11: (moving.Moving, "__init__", keep_handle),
    12: (keeper.Keeper, "call_here", lambda self, function: function()),
    13: (group, "_groups", set()),
    14: (index.BlockIndex, "clear", lambda self: []),
    15: (KVOffloadManager, "_reusable", lambda self, keys, num_tokens: keys),
    16: (books.PoolSlots, "give_back", lambda self, slots: None),
    31: (hints.Expected, "beside", lambda self, pins: pins),
    32: (hints.Ended, "add", lambda self, prompt: None),
}
MUTATIONS[4] = (index.BlockIndex, "pin", lambda self, keys: None)


@pytest.fixture
def case(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Case(copies, monkeypatch)
    yield made
    monkeypatch.undo()
    made.close()


@pytest.mark.parametrize("number", CLAUSES)
def test_clause_holds(case: Case, number: int) -> None:
    CLAUSES[number](case)


@pytest.mark.parametrize("number", MUTATIONS)
def test_removal_is_noticed(case: Case, number: int) -> None:
    where, name, instead = MUTATIONS[number]
    case.patch.setattr(where, name, instead, raising=False)
    if number == 4:
        case.patch.setattr(where, "unpin", instead)
    with pytest.raises((AssertionError, KeyError, TransferError, TimeoutError, pytest.fail.Exception)):
        if number == 12:  # what it leaves behind is damaged
            in_child(lambda: CLAUSES[number](case))
        CLAUSES[number](case)


@pytest.mark.parametrize("number", tier_clauses.CLAUSES)
def test_clause_of_a_tier_holds(make: MakeRig, number: int) -> None:
    tier_clauses.CLAUSES[number](make)


@pytest.mark.parametrize("number", tier_clauses.MUTATIONS)
def test_removal_of_a_tier_is_noticed(make: MakeRig, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    where, name, instead = tier_clauses.MUTATIONS[number]
    monkeypatch.setattr(where, name, instead)
    if number == 19:
        monkeypatch.setattr(where, "end_lease", lambda self, block_ids, write: None)
    with pytest.raises((AssertionError, TransferError, pytest.fail.Exception)):
        tier_clauses.CLAUSES[number](make)


@pytest.fixture
def chunk_case(copies: Copies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = chunk_clauses.Case(copies, tmp_path)
    yield made
    monkeypatch.undo()
    made.close()


@pytest.mark.parametrize("number", chunk_clauses.CLAUSES)
def test_clause_of_chunks_holds(chunk_case: chunk_clauses.Case, number: int) -> None:
    chunk_clauses.CLAUSES[number](chunk_case)


@pytest.mark.parametrize("number", chunk_clauses.MUTATIONS)
def test_removal_of_chunks_is_noticed(
    chunk_case: chunk_clauses.Case, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(*chunk_clauses.MUTATIONS[number])
    with pytest.raises((AssertionError, TransferError, CancelledError, TimeoutError)):
        chunk_clauses.CLAUSES[number](chunk_case)


def test_the_page_and_the_tests_have_the_same_clauses() -> None:
    text = PAGE.read_text()
    contract = text.partition("## The contract")[2].partition("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", contract, re.MULTILINE)]
    rows = dict(re.findall(r"^\| (\d+) \| .*`test_clause\w*_holds\[\d+\]` \| `([\w.]+)`", contract, re.MULTILINE))
    clauses = {**CLAUSES, **tier_clauses.CLAUSES, **chunk_clauses.CLAUSES}
    mutations = {**MUTATIONS, **tier_clauses.MUTATIONS, **chunk_clauses.MUTATIONS}
    assert numbers == sorted(clauses) == sorted(mutations) == [int(number) for number in rows]
    for number, (where, name, _) in mutations.items():
        assert rows[str(number)] == f"{where.__name__.rpartition('.')[2]}.{name}"
