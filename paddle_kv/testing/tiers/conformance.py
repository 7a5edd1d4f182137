"""What every engine has to do, whatever it stores its objects in. For pytest::

class TestMyEngine(EngineConformance):
    def make_engine(self, folder, capacity_bytes):
        return MyEngine(...)
"""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...layout import KVCacheSpec
from ...tiers import Engine, Job, Outcome
from ...tiers.object_format import ObjectFormat
from .faults import Fault, FaultyEngine
from .rig import ALIGNED, ODD, POISON, SPECS, WAIT_S, Rig, keys

CAPACITY_BYTES = 64 << 20


class EngineConformance:
    """Each ``test_`` method is given an empty folder (pytest's ``tmp_path``)."""

    persistent = True  # what was stored is there when the engine is made again
    capacity_spec = ALIGNED  # of the objects of which ten are the capacity
    capacity_step_bytes = 1000  # what a capacity is a multiple of
    room_bytes = 0  # before each block of the pool

    def make_engine(self, folder: Path, capacity_bytes: int) -> Engine:
        """The engine, with room for so many bytes; empty the first time that it is made for the folder."""
        raise NotImplementedError

    @contextmanager
    def rig(
        self, folder: Path, spec: KVCacheSpec = ALIGNED, capacity_bytes: int = CAPACITY_BYTES, **options: Any
    ) -> Iterator[Rig]:
        engine = self.make_engine(folder, capacity_bytes)
        rig = Rig(engine, spec, **{"room_bytes": self.room_bytes, **options})
        try:
            yield rig
        finally:
            rig.close()
            engine.close(WAIT_S)

    def test_what_was_stored_is_loaded_bit_for_bit(self, tmp_path: Path) -> None:
        for number, spec in enumerate(SPECS):
            with self.rig(tmp_path / str(number), spec) as rig:
                names = keys(10)
                assert rig.store(names, [9, 3, 7, 0, 1, 2, 8, 4, 6, 5]).done
                for layerwise in (True, False):
                    rig.rows[:] = POISON
                    order = np.random.default_rng(number).permutation(10)
                    job = rig.load([names[i] for i in order], [2 * i + 11 for i in range(10)], layerwise=layerwise)
                    assert job.done
                    assert rig.wrong(job) == []
                    untouched = sorted(set(range(len(rig.rows))) - set(job.block_ids))
                    assert (rig.rows[untouched] == POISON).all()
                stats = rig.tier.stats()
                assert stats["load_done"] == 20
                assert stats["load_bytes"] == 20 * rig.rows.shape[1]
                assert stats["store_bytes_in_flight"] == stats["jobs_in_flight"] == 0

    def test_layers_are_there_when_it_is_told(self, tmp_path: Path) -> None:
        for number, spec in enumerate(SPECS):
            with self.rig(tmp_path / str(number), spec) as rig:
                names = keys(6)
                rig.store(names)
                seen = _Seen(rig)
                rig.tier.load([Job(names, range(10, 16), observer=seen)])
                rig.tier.drain(WAIT_S)
                assert seen.layers == list(range(spec.num_layers))
                assert seen.calls > 1
                assert seen.wrong == []
                assert seen.ends == ["settled", "over"]

    def test_what_is_not_there_is_a_miss(self, tmp_path: Path) -> None:
        with self.rig(tmp_path) as rig:
            rig.store(keys(3))
            seen = _Seen(rig)
            job = Job([b"key-1", b"absent", b"key-2"], [5, 6, 7], observer=seen)
            rig.tier.load([job])
            rig.tier.drain(WAIT_S)
            assert job.outcomes == [Outcome.DONE, Outcome.MISSING, Outcome.DONE]
            assert seen.layers == []
            assert rig.wrong(job) == []
            assert rig.tier.exists([b"key-1", b"absent"]) == [True, False]

    def test_objects_of_others_are_a_miss(self, tmp_path: Path) -> None:
        engine = self.make_engine(tmp_path, CAPACITY_BYTES)
        first = Rig(engine)
        others = [Rig(engine, model=b"other"), Rig(engine, rank=1), Rig(engine, group=1), Rig(engine, ODD)]
        names = keys(3)
        first.store(names)
        for rig in others:
            assert rig.tier.exists(names) == [False] * 3
            assert rig.load(names).outcomes == [Outcome.MISSING] * 3
        assert first.load(names, [7, 8, 9]).done
        for rig in [first, *others]:
            rig.close()
        engine.close(WAIT_S)

    def test_what_is_deleted_is_gone(self, tmp_path: Path) -> None:
        with self.rig(tmp_path) as rig:
            names = keys(4)
            rig.store(names)
            rig.tier.delete([names[1], b"absent"])
            assert rig.tier.exists(names) == [True, False, True, True]
            assert [outcome is Outcome.DONE for outcome in rig.load(names).outcomes] == [True, False, True, True]
            assert rig.store(names).done
            assert rig.load(names, range(10, 14)).done

    def test_a_deadline_that_is_over_moves_nothing(self, tmp_path: Path) -> None:
        with self.rig(tmp_path) as rig:
            rig.store(keys(2))
            load, store = rig.load(keys(2), timeout_s=0.0), rig.store(keys(2, "new"), timeout_s=0.0)
            assert {*load.outcomes, *store.outcomes} == {Outcome.LATE}
            assert (rig.rows[[2, 3]] == POISON).all()
            assert rig.tier.exists(keys(2, "new")) == [False, False]
            assert rig.load(keys(2)).done

    def test_a_cancelled_job_ends(self, tmp_path: Path) -> None:
        with self.rig(tmp_path) as rig:
            job = Job(keys(8), range(8))
            job.cancel()
            rig.tier.store([job])
            rig.tier.drain(WAIT_S)
            assert job.over
            assert set(job.outcomes) == {Outcome.DROPPED}
            assert rig.tier.exists(keys(8)) == [False] * 8

    def test_the_capacity_is_kept(self, tmp_path: Path) -> None:
        step = self.capacity_step_bytes
        room = -(-10 * ObjectFormat(self.capacity_spec, b"").object_bytes // step) * step
        with self.rig(tmp_path, self.capacity_spec, capacity_bytes=room) as rig:
            names = keys(35)
            for first in range(0, 35, 5):
                rig.store(names[first : first + 5])
                stats = rig.tier.stats()
                assert stats["engine_used_bytes"] <= stats["engine_capacity_bytes"] == room
            there = [name for name, found in zip(names, rig.tier.exists(names), strict=True) if found]
            assert 5 <= len(there) <= 10
            assert rig.load(there).done

    def test_a_full_queue_drops_and_counts(self, tmp_path: Path) -> None:
        with self.rig(tmp_path, max_store_bytes=5 * 53248, max_objects=7) as rig:
            store = rig.store(keys(9))
            assert store.outcomes.count(Outcome.DROPPED) == 4
            load = rig.load(keys(9))
            assert load.outcomes[7:] == [Outcome.DROPPED] * 2
            assert rig.wrong(load) == []
            assert rig.tier.stats()["store_dropped"] == 4
            assert rig.store(keys(5)).done

    def test_completion_by_descriptor(self, tmp_path: Path) -> None:
        with self.rig(tmp_path) as rig:
            assert select.select([rig.tier.fileno()], [], [], 0)[0] == []
            jobs = [Job([key], [block_id]) for block_id, key in enumerate(keys(3))]
            rig.tier.store(jobs)
            found: list[Job] = []
            while len(found) < 3:
                assert select.select([rig.tier.fileno()], [], [], WAIT_S)[0]
                found += rig.tier.finished()
            assert sorted(job.number for job in found) == [job.number for job in jobs]
            assert rig.tier.finished() == []
            assert select.select([rig.tier.fileno()], [], [], 0)[0] == []

    def test_faults_serve_no_wrong_byte(self, tmp_path: Path) -> None:
        for number, fault in enumerate(Fault):
            engine = FaultyEngine(self.make_engine(tmp_path / str(number), CAPACITY_BYTES), [fault], seed=number)
            rig = Rig(engine, num_blocks=80)
            hidden = fault is Fault.LOST  # nothing tells of it but the deadline
            for attempt in range(1 if hidden else 2):
                names = keys(20, f"key{attempt}")
                jobs = [Job(names, range(20), timeout_s=1.0 if hidden else WAIT_S)]
                for block_id, name in enumerate(names):
                    rig.rows[block_id] = rig.content(name)
                rig.tier.store(jobs)
                _settle(jobs)
                jobs += [Job(names, range(20 + 20 * attempt, 40 + 20 * attempt), timeout_s=jobs[0].timeout_s)]
                rig.tier.load(jobs[1:])
                _settle(jobs)
                assert rig.wrong(jobs[1]) == []
                done = jobs[1].outcomes.count(Outcome.DONE)
                assert (done == 20) if fault in (Fault.LATE, Fault.TWICE) else (0 < done < 20)
            assert engine.num_hit > 10
            engine.close(WAIT_S)
            rig.close()
            assert rig.tier.stats()["jobs_in_flight"] == 0

    def test_dead_for_a_while(self, tmp_path: Path) -> None:
        engine = FaultyEngine(self.make_engine(tmp_path, CAPACITY_BYTES), [])
        rig = Rig(engine)
        rig.store(keys(4))
        engine.dead = True
        assert rig.tier.exists(keys(4)) == [False] * 4
        assert set(rig.load(keys(4)).outcomes) == {Outcome.FAILED}
        assert set(rig.store(keys(4, "new")).outcomes) == {Outcome.FAILED}
        engine.dead = False
        assert rig.load(keys(4)).done
        rig.close()
        engine.close(WAIT_S)

    def test_threads(self, tmp_path: Path) -> None:
        with self.rig(tmp_path, capacity_bytes=12 * 53248) as rig:
            errors: list[object] = []

            def run(number: int) -> None:
                rng = np.random.default_rng(number)
                blocks = list(range(10 * number, 10 * number + 10))
                try:
                    for _ in range(12):
                        names = [keys(20)[i] for i in rng.permutation(20)[:5]]
                        for block_id, name in zip(blocks, names, strict=False):
                            rig.rows[block_id] = rig.content(name)
                        jobs = [Job(names, blocks[:5]), Job(names, blocks[5:])]
                        for start, job in ((rig.tier.store, jobs[0]), (rig.tier.load, jobs[1])):
                            start([job])
                            _settle([job])
                        if wrong := rig.wrong(jobs[1]):
                            errors.append(wrong)
                except BaseException as error:  # noqa: BLE001  the test reports it
                    errors.append(error)

            threads = [threading.Thread(target=run, args=[number]) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert errors == []

    def test_a_closed_engine_ends_all(self, tmp_path: Path) -> None:
        engine = self.make_engine(tmp_path, CAPACITY_BYTES)
        rig = Rig(engine)
        jobs = [Job([key], [block_id]) for block_id, key in enumerate(keys(30))]
        rig.tier.store(jobs)
        engine.close(WAIT_S)
        rig.tier.drain(WAIT_S)
        assert all(job.over for job in jobs)
        rig.close()

    def test_a_restart_finds_what_was_there(self, tmp_path: Path) -> None:
        if not self.persistent:
            return
        with self.rig(tmp_path) as rig:
            rig.store(keys(5))
            used = rig.tier.stats()["engine_used_bytes"]
        with self.rig(tmp_path) as rig:
            assert rig.tier.stats()["engine_used_bytes"] == used
            assert rig.tier.exists(keys(6)) == [True] * 5 + [False]
            job = rig.load(keys(5))
            assert job.done
            assert rig.wrong(job) == []


class _Seen:
    """Looks at the blocks in the moment in which it is told of a layer."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.layers: list[int] = []
        self.wrong: list[int] = []
        self.ends: list[str] = []
        self.calls = 0

    def layers_arrived(self, job: Job, layers: range) -> None:
        step = self.rig.pool.spec.block_bytes
        part = slice(layers.start * step, layers.stop * step)
        pairs = zip(job.keys, job.block_ids, strict=True)
        if not all(np.array_equal(self.rig.rows[one][part], self.rig.content(key)[part]) for key, one in pairs):
            self.wrong.append(layers.start)
        self.layers += layers
        self.calls += 1

    def settled(self, job: Job) -> None:
        self.ends.append("settled" if None not in job.outcomes else "too early")

    def over(self, job: Job) -> None:
        self.ends.append("over")


def _settle(jobs: list[Job]) -> None:
    """Waits for jobs of which blocks may never be given back."""
    waiting = threading.Event()
    for _ in range(int(WAIT_S / 0.001)):
        if all(job.settled for job in jobs):
            return
        waiting.wait(0.001)
    raise TimeoutError("a job was not settled")
