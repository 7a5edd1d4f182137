"""Movers beside their caches, two ranks in one process: every byte of both sides compared, copies held or failed."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_kv import CancelledError, ClosedError, DeviceCache, HostPool, LayerwiseScheduler, TransferError
from paddle_kv.integrations import ForwardPass
from paddle_kv.offload import Directory, Hello, Job, Mover, Namespace, Outcome, Result, SavePlan, mover, spec_digest
from paddle_kv.schedule.movement import Failure, State
from paddle_kv.schedule.transfer import Transfer
from tests.schedule.rig import WAIT_S, Copies, Rig, assert_same, cache_memory, pool_memory
from tests.schedule.test_failures import FailingBackend

HOST_BLOCKS = 10
LAYERS = 5
KEYS = [b"%02d" % number for number in range(30)]


class Rank:
    def __init__(self, number: int, *, backend: Any = "auto", taken: int = 0, **options: Any) -> None:
        self.rig = Rig(host_blocks=HOST_BLOCKS)
        self.taken = self.rig.pool.allocate(taken)  # by others
        self.scheduler = LayerwiseScheduler(self.rig.cache, self.rig.pool, backend=backend)
        self.mover = Mover(self.scheduler, rank=number, **options)

    def results(self) -> list[Result]:
        self.scheduler.drain(WAIT_S)
        return self.mover.finished()

    def close(self) -> None:
        self.mover.close()
        self.scheduler.close(WAIT_S)
        assert self.rig.pool.num_free_blocks == HOST_BLOCKS - len(self.taken)


class Server:
    """A directory and its ranks, in lockstep."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.ranks = [Rank(number) for number in range(num_ranks)]
        space = Namespace(b"model", spec_digest(self.ranks[0].rig.spec))
        self.directory = Directory(HOST_BLOCKS, num_ranks=num_ranks, space=space)
        for rank in self.ranks:
            self.directory.join(rank.mover.hello())

    def run(self, *jobs: Job | None) -> list[Outcome]:
        for rank in self.ranks:
            rank.mover.submit([job for job in jobs if job is not None])
        return self.directory.complete(result for rank in self.ranks for result in rank.results())

    def save(self, keys: list[bytes], ids: list[int]) -> Job:
        job = self.directory.plan_save(keys, ids).job
        assert job is not None
        [outcome] = self.run(job)
        assert outcome.failed == ()
        return job


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    for rank in made.ranks:
        rank.close()


def job_of(rank: Rank, kind: Any, slots: list[int], ids: list[int], **changes: Any) -> Job:
    keys = tuple(KEYS[slot] for slot in slots)
    epochs = (0,) * rank.mover.rank + (rank.mover.epoch,)
    return replace(Job(1, kind, Namespace(), keys, tuple(slots), tuple(ids), epochs), **changes)


def test_what_was_saved_on_all_ranks_comes_back_bit_for_bit(server: Server) -> None:
    save = server.save(KEYS[:4], [9, 2, 11, 5])
    load = server.directory.plan_load(KEYS[:4], [0, 7, 3, 12])
    [outcome] = server.run(load)
    assert (outcome.job_id, outcome.failed, outcome.late) == (load.id, (), ())
    for rank in server.ranks:
        rank.rig.expect_offload([9, 2, 11, 5], save.host_slots)
        for name in rank.rig.spec.tensor_names:
            rank.rig.device[name][:, [0, 7, 3, 12]] = rank.rig.device[name][:, [9, 2, 11, 5]]
        rank.rig.check()


def test_the_jobs_of_a_step_are_few_transfers(server: Server) -> None:
    server.save(KEYS[:6], list(range(6)))
    loads = [server.directory.plan_load([KEYS[one]], [6 + one]) for one in range(3)]
    saves = [server.directory.plan_save([KEYS[10 + one]], [one]).job for one in range(3)]
    jobs = [job for pair in zip(loads, saves, strict=True) for job in pair if job is not None]
    rank = server.ranks[0]
    submitted = rank.mover.submit(jobs)
    assert [len(load.plan.device_ids) for load in submitted.loads] == [3]
    assert rank.scheduler.stats()["offload_transfers"] == 2  # with the one of the beginning
    assert sorted((one.job_id, one.reason) for one in rank.results()) == sorted((job.id, "") for job in jobs)


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([("save", [0], [5]), ("load", [1], [5])], [[0], [1]]),  # the block is saved before it is written
        ([("load", [1], [5]), ("save", [0], [5])], [[0], [1]]),
        ([("save", [0], [5]), ("save", [1], [5])], [[0, 1]]),
        ([("save", [0], [5]), ("save", [0], [6])], [[0], [1]]),
        ([("load", [0], [5]), ("load", [0], [6])], [[0, 1]]),
        ([("load", [0], [5]), ("load", [1], [5])], [[0], [1]]),
        ([("load", [0], [5]), ("save", [0], [6])], [[0], [1]]),
        ([("save", [0], [5]), ("load", [0], [6])], [[0], [1]]),
        ([("save", [0], [5]), ("load", [1], [6]), ("save", [2], [7]), ("load", [3], [8])], [[0, 2], [1, 3]]),
        ([("save", [0], [5]), ("load", [1], [6]), ("save", [2], [6]), ("load", [3], [8])], [[0], [1], [2], [3]]),
        ([("load", [3], [8]), ("save", [0], [5]), ("load", [0], [6])], [[0], [1], [2]]),  # what was saved just now
    ],
)
def test_batches_keep_the_order_of_what_touches_a_block(
    server: Server, jobs: list[tuple[str, list[int], list[int]]], expected: list[list[int]]
) -> None:
    made = [job_of(server.ranks[0], *job, id=number) for number, job in enumerate(jobs)]
    assert [[job.id for job in batch] for batch in mover.batches_of(made)] == expected


def test_layerwise_saves_and_loads_go_through_a_pass(server: Server) -> None:
    server.save(KEYS[:2], [0, 1])
    load = server.directory.plan_load(KEYS[:2], [2, 3])
    save = server.directory.plan_save(KEYS[2:4], [4, 5], layerwise=True, computed_from=[load.id]).job
    assert save is not None
    for rank in server.ranks:
        submitted = rank.mover.submit([load, save])
        with ForwardPass(submitted.loads, submitted.saves, timeout_s=WAIT_S) as layers:
            for layer in range(LAYERS):
                with layers.layer(layer):
                    rank.rig.cache.tensor("key", layer)[4] = float(layer)
        del submitted, layers  # marks that are on their way count
        gc.collect()
    results = [result for rank in server.ranks for result in rank.results()]
    assert {result.failed for result in results} == {()}
    assert len(server.directory.complete(results)) == 2
    for rank in server.ranks:
        view = rank.rig.pool.view("key", 3, rank.mover._blocks[save.host_slots[0]])
        assert (view == np.float16(3)).all()
        rank.rig.device = cache_memory(rank.rig.cache)


def test_a_layerwise_save_that_is_lost_ends_as_failed(server: Server) -> None:
    save = server.directory.plan_save(KEYS[:2], [4, 5], layerwise=True).job
    [outcome] = server.run(save)
    assert outcome.failed == (0, 1)
    assert "cancelled" in outcome.reason


def test_a_failure_of_one_rank_is_a_miss_for_all(server: Server, copies: Copies) -> None:
    job = server.directory.plan_save(KEYS[:2], [4, 5]).job
    assert job is not None
    server.ranks[0].mover.submit([job])
    results = server.ranks[0].results()
    copies.fail("offload", 2, OSError("lost"))
    server.ranks[1].mover.submit([job])
    [outcome] = server.directory.complete(results + server.ranks[1].results())
    copies.heal()
    assert (outcome.failed, outcome.late) == ((0, 1), ())
    assert "rank 1" in outcome.reason
    assert server.directory.peek(KEYS[:2]) == 0
    server.save(KEYS[:2], [4, 5])
    assert [one.failed for one in server.run(server.directory.plan_load(KEYS[:2], [0, 1]))] == [()]


def test_blocks_of_a_load_that_failed_are_saved_for_another_request_when_all_ranks_know(
    server: Server, copies: Copies
) -> None:
    server.save(KEYS[:2], [4, 5])
    load = server.directory.plan_load(KEYS[:2], [0, 1])
    copies.fail("onload", 2, OSError("lost"))
    assert [(one.failed, one.late) for one in server.run(load)] == [((0, 1), ())]
    copies.heal()
    [outcome] = server.run(server.directory.plan_save(KEYS[7:9], [0, 6]).job)  # another request has got block 0
    assert (outcome.failed, outcome.reason.count("block 0 of the device cache holds no usable data")) == ((0, 1), 1)
    for rank in server.ranks:
        rank.rig.cache.mark_rewritten([0, 6])
    server.save(KEYS[7:9], [0, 6])
    server.run(server.directory.plan_load(KEYS[7:8], [1]))  # and a load that ends well does it by itself
    server.save(KEYS[9:10], [1])


def test_a_save_that_failed_here_is_not_held_here(
    server: Server, copies: Copies, caplog: pytest.LogCaptureFixture
) -> None:
    rank = server.ranks[0]
    copies.fail("offload", 2, OSError("lost"))
    rank.mover.submit([job_of(rank, "save", [0], [3])])
    [result] = rank.results()
    assert result.failed == (0,) and "lost" in result.reason
    assert "nobody has waited" not in caplog.text  # the result tells
    copies.heal()
    rank.mover.submit([job_of(rank, "load", [0], [5])])
    assert [result.damaged for result in rank.mover.finished()] == [(0,)]


def test_a_load_that_fails_takes_no_save_of_the_step_with_it(server: Server, copies: Copies) -> None:
    rank = server.ranks[0]
    rank.mover.submit([job_of(rank, "save", [0, 1], [3, 4])])
    rank.results()
    copies.fail("onload", 2, OSError("lost"))
    submitted = rank.mover.submit(
        [job_of(rank, "load", [0], [5], id=2), job_of(rank, "save", [2], [6], layerwise=True, id=3)]
    )
    with pytest.raises(TransferError), ForwardPass(submitted.loads, submitted.saves, timeout_s=WAIT_S) as layers:
        for layer in range(LAYERS):
            with layers.layer(layer):
                pass
    assert {result.job_id: result.failed for result in rank.results()} == {2: (0,), 3: ()}


def test_the_model_waits_for_what_still_runs_of_a_submission_that_failed(copies: Copies) -> None:
    backend = FailingBackend()
    rank = Rank(0, backend=backend)
    rank.mover.submit([job_of(rank, "save", [0], [3])])
    rank.results()
    copies.hold("onload", LAYERS - 1)
    backend.fail("copy_layers", 1, OSError("lost"), after=True)

    def let_it_run() -> None:
        copies.arrived.acquire(timeout=WAIT_S)
        time.sleep(0.05)
        copies.go_on()

    runs = threading.Thread(target=let_it_run)
    runs.start()
    rank.mover.submit([job_of(rank, "load", [0], [5])])  # from here on the model may write
    assert copies.done[-1] == ("onload", (5,), LAYERS - 1)
    runs.join()
    assert [result.failed for result in rank.results()] == [(0,)]
    rank.close()


def test_a_mover_is_closed_behind_its_pool() -> None:
    rank = Rank(0)
    rank.rig.pool.close()
    rank.mover.close()
    rank.scheduler.close(WAIT_S)


def test_close_cancels_what_is_on_its_way() -> None:
    rank = Rank(0)
    submitted = rank.mover.submit([job_of(rank, "save", [0], [3], layerwise=True)])
    rank.mover.close()
    with pytest.raises(CancelledError):
        submitted.saves[0].wait(WAIT_S)
    rank.close()


def test_what_this_rank_does_not_hold_is_not_loaded(server: Server) -> None:
    server.save(KEYS[:3], [0, 1, 2])
    rank = server.ranks[0]
    memory = cache_memory(rank.rig.cache)
    for slots, keys, damaged in (([0, 1], [KEYS[0], KEYS[7]], (1,)), ([0, 5], [KEYS[0], KEYS[1]], (1,))):
        rank.mover.submit([job_of(rank, "load", slots, [5, 6], keys=tuple(keys))])
        assert rank.mover.finished() == [
            Result(1, 0, rank.mover.epoch, (0, 1), damaged, "a block is not in host memory")
        ]
    assert_same(cache_memory(rank.rig.cache), memory)


def test_a_block_that_is_being_replaced_is_not_there_until_the_new_one_is(server: Server, copies: Copies) -> None:
    server.save(KEYS[:1], [0])
    rank = server.ranks[0]
    copies.hold("offload", 1)
    rank.mover.submit([job_of(rank, "save", [0], [3], keys=(KEYS[9],), id=8)])
    for key in (KEYS[0], KEYS[9]):
        rank.mover.submit([job_of(rank, "load", [0], [5], keys=(key,), id=9)])
        assert [result.damaged for result in rank.mover.finished()] == [(0,)]
    copies.go_on()
    assert [result.job_id for result in rank.results()] == [8]
    rank.mover.submit([job_of(rank, "load", [0], [5], keys=(KEYS[9],), id=10)])
    assert [result.failed for result in rank.results()] == [()]


def test_a_save_that_ends_when_a_later_one_writes_its_slot_leaves_nothing_there(server: Server) -> None:
    rank = server.ranks[0]
    rank.mover.submit([job_of(rank, "save", [0], [3], id=1)])
    second = rank.mover.submit([job_of(rank, "save", [0], [4], keys=(KEYS[9],), id=2, layerwise=True)])
    second.saves[0].mark_layer_written(0)  # written over the first
    end_s, results = time.monotonic() + WAIT_S, rank.mover.finished()
    while not results and time.monotonic() < end_s:
        time.sleep(0.001)
        results = rank.mover.finished()
    assert [(result.job_id, result.failed) for result in results] == [(1, ())]
    second.saves[0].cancel()
    assert [(result.job_id, result.failed) for result in rank.results()] == [(2, (0,))]
    rank.mover.submit([job_of(rank, "load", [0], [5], id=3)])
    assert [result.damaged for result in rank.mover.finished()] == [(0,)]


def test_a_slot_that_a_step_saves_to_is_not_loaded_from_behind_it(server: Server) -> None:
    server.save(KEYS[:1], [0])
    rank = server.ranks[0]
    rank.mover.submit([job_of(rank, "save", [0], [3], keys=(KEYS[9],), id=8), job_of(rank, "load", [0], [5], id=9)])
    assert {result.job_id: result.damaged for result in rank.results()} == {8: (), 9: (0,)}


def test_each_job_has_its_own_time(server: Server, copies: Copies) -> None:
    rank = server.ranks[0]
    copies.hold("offload", 1)
    jobs = [job_of(rank, "save", [slot], [slot], id=slot, timeout_s=bound) for slot, bound in ((0, 0.0), (1, None))]
    rank.mover.submit(jobs)
    assert copies.arrived.acquire(timeout=WAIT_S)
    rank.mover.finished()  # cancels the first one alone
    copies.go_on()
    assert {result.job_id: result.failed for result in rank.results()} == {0: (0,), 1: ()}
    assert rank.mover._deadlines == {}


def test_the_time_of_a_job_is_over_when_it_is_reached(
    server: Server, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = server.ranks[0]
    now_s = [50.0]
    monkeypatch.setattr(mover, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    copies.hold("offload", 1)
    for slot in (0, 1):
        rank.mover.submit([job_of(rank, "save", [slot], [slot], id=slot, timeout_s=2.0 + slot)])
    assert copies.arrived.acquire(timeout=WAIT_S)
    for now_s[0] in (50.0, 51.75, 52.0):
        assert rank.mover.finished() == []
    copies.go_on()
    assert {result.job_id: result.failed for result in rank.results()} == {0: (0,), 1: ()}


def test_a_damaged_block_fails_its_own_job_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    server = Server(1)
    save = server.save(KEYS[:4], [0, 1, 2, 3])
    rank = server.ranks[0]
    rank.rig.pool.view("key", 3, rank.mover._blocks[save.host_slots[2]])[...] = 1
    first, second = server.directory.plan_load(KEYS[:2], [5, 6]), server.directory.plan_load(KEYS[2:4], [7, 8])
    outcomes = {one.job_id: one for one in server.run(first, second)}
    assert (outcomes[first.id].failed, outcomes[second.id].failed) == ((), (0, 1))
    assert [server.directory.peek([key]) for key in KEYS[:4]] == [1, 1, 0, 1]
    rank.close()


def test_the_slots_of_a_directory_are_not_the_blocks_of_the_pool(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage that is found at the end of a load is told of the right block, where others have some of the pool."""
    monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    rank = Rank(0, taken=3)
    rank.mover.submit([job_of(rank, "save", [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])])
    rank.results()
    copies.hold("onload", 1)
    rank.mover.submit([job_of(rank, "load", slots, slots, id=slots[0]) for slots in ([0, 1], [3, 4])])
    assert copies.arrived.acquire(timeout=WAIT_S)
    failure = Failure(State.FAILED, "wrong", damaged=(rank.mover._blocks[4],))
    monkeypatch.setattr(rank.scheduler.observer, "over", lambda *_: failure)
    copies.go_on()
    assert {one.job_id: one.damaged for one in rank.results()} == {0: (), 3: (1,)}
    rank.close()


def test_what_is_not_over_in_its_time_is_cancelled_and_its_memory_is_free(server: Server, copies: Copies) -> None:
    rank = server.ranks[0]
    copies.hold("offload", 1)
    rank.mover.submit([job_of(rank, "save", [0, 1], [3, 4], timeout_s=0.0)])
    assert rank.mover.finished() == []  # cancelled, and still moving
    copies.go_on()
    [result] = rank.results()
    assert result.failed == (0, 1)
    assert "cancelled" in result.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epochs": (7,)}, "another life of the rank"),
        ({"epochs": ()}, "another life of the rank"),
        ({"space": Namespace(b"", b"other")}, "another spec"),
        ({"tier": "disk"}, "no tier 'disk'"),
    ],
)
def test_what_is_not_for_this_rank_is_refused(server: Server, changes: dict[str, Any], reason: str) -> None:
    rank = server.ranks[0]
    before = pool_memory(rank.rig.pool)
    rank.mover.submit([job_of(rank, "save", [0, 1], [3, 4], **changes)])
    [result] = rank.mover.finished()
    assert (result.failed, result.damaged) == ((0, 1), ())
    assert reason in result.reason
    assert_same(pool_memory(rank.rig.pool), before)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"version": 2}, ValueError, "Job has version 2; 1 is expected"),
        ({"device_ids": (3, 13)}, IndexError, r"device_ids of job 1\[1\] = 13 must be in \[0, 13\)"),
        ({"host_slots": (0, 10)}, IndexError, r"host_slots of job 1\[1\] = 10 must be in \[0, 10\)"),
        ({"host_slots": (-1, 1)}, IndexError, r"host_slots of job 1\[0\] = -1"),
        ({"kind": "move"}, ValueError, "kind of job 1 = 'move' must be 'load' or 'save'"),
        ({"keys": tuple(KEYS[:1])}, ValueError, "job 1 must have as many host slots and device ids as keys"),
        ({"device_ids": (3,)}, ValueError, "job 1 must have as many"),
        ({"host_slots": (1, 1)}, ValueError, "each target once"),
        ({"kind": "load", "device_ids": (3, 3)}, ValueError, "each target once"),
    ],
)
def test_bad_jobs_move_nothing(server: Server, changes: dict[str, Any], error: Any, message: str) -> None:
    rank = server.ranks[0]
    before = pool_memory(rank.rig.pool)
    with pytest.raises(error, match=message):
        rank.mover.submit([job_of(rank, "save", [5], [7]), replace(job_of(rank, "save", [0, 1], [3, 4]), **changes)])
    with pytest.raises(TypeError, match="job is SavePlan, no message that can stand here; Job is expected"):
        rank.mover.submit([job_of(rank, "save", [5], [7]), SavePlan(None)])  # type: ignore[list-item]
    assert rank.mover.finished() == []
    assert_same(pool_memory(rank.rig.pool), before)


def test_a_rank_begins_anew_with_nothing(server: Server, copies: Copies) -> None:
    server.save(KEYS[:2], [0, 1])
    rank = server.ranks[0]
    old = rank.mover.hello()
    copies.hold("offload", 1)
    job = server.directory.plan_save(KEYS[2:4], [2, 3]).job
    assert job is not None
    rank.mover.submit([job])
    assert copies.arrived.acquire(timeout=WAIT_S)
    with pytest.raises(TimeoutError):
        rank.mover.restart(0.05)
    copies.go_on()
    hello = rank.mover.restart(WAIT_S)
    assert (hello.rank, hello.capacity_blocks, hello.spec) == (0, HOST_BLOCKS, old.spec)
    assert hello.epoch != old.epoch
    assert rank.mover.finished() == []
    rank.mover.submit([job])
    assert [result.reason for result in rank.mover.finished()] == ["it was planned for another life of the rank"]
    rank.mover.submit([job_of(rank, "load", [0, 1], [5, 6])])
    assert [result.damaged for result in rank.mover.finished()] == [(0, 1)]
    server.directory.join(hello)
    assert server.directory.peek(KEYS[:2]) == 0
    server.save(KEYS[:2], [0, 1])


def test_what_is_submitted_during_a_restart_is_over_before_the_new_life_begins(
    server: Server, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = server.ranks[0]
    copies.hold("offload", 1)
    rank.mover.submit([job_of(rank, "save", [0], [0])])
    assert copies.arrived.acquire(timeout=WAIT_S)
    submitted = []
    wait_over = Transfer.wait_over

    def meanwhile(transfer: Transfer, timeout_s: float | None = None) -> None:
        if not submitted:
            submitted.append(rank.mover.submit([job_of(rank, "save", [1], [1], id=2, layerwise=True)]))
            copies.go_on()
        wait_over(transfer, timeout_s)

    monkeypatch.setattr(Transfer, "wait_over", meanwhile)
    rank.mover.restart(WAIT_S)
    assert submitted[0].saves[0].done()
    assert rank.mover.finished() == []


def test_after_close_the_blocks_are_the_pools_again() -> None:
    rank = Rank(1, capacity_blocks=7)
    assert rank.mover.hello() == Hello(1, rank.mover.epoch, 7, spec_digest(rank.rig.spec))
    assert rank.rig.pool.num_free_blocks == HOST_BLOCKS - 7
    with rank.mover:
        pass
    with pytest.raises(ClosedError):
        rank.mover.submit([])
    with pytest.raises(ClosedError):
        rank.mover.restart()
    rank.close()


def test_a_mover_needs_a_scheduler_and_a_rank() -> None:
    with pytest.raises(TypeError, match="scheduler is"):
        Mover(None)  # type: ignore[arg-type]
    rig = Rig(host_blocks=HOST_BLOCKS)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        with pytest.raises(ValueError, match="rank = -1"):
            Mover(scheduler, rank=-1)
        with pytest.raises(MemoryError):
            Mover(scheduler, capacity_blocks=HOST_BLOCKS + 1)
        with Mover(scheduler, capacity_blocks=1) as small:
            assert small.hello().rank == 0
        with Mover(scheduler) as only:
            assert only.hello().rank == 0


def test_two_specs_have_two_digests() -> None:
    rig = Rig()
    assert spec_digest(rig.spec) == spec_digest(Rig().spec)
    other = replace(rig.spec, num_layers=4)
    with LayerwiseScheduler(DeviceCache(other, 3, "cpu"), HostPool(other, 2)) as scheduler:
        assert Mover(scheduler).hello().spec == spec_digest(other) != spec_digest(rig.spec)
