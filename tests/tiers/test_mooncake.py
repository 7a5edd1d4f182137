"""What a Mooncake Store does to its users, and what the engine makes of it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paddle_kv.cli import doctor
from paddle_kv.errors import ForkedError, TierError
from paddle_kv.mooncake_bounds import set_bounds
from paddle_kv.testing.tiers.rig import ODD, POISON, WAIT_S, Rig, keys
from paddle_kv.tiers import Job, Outcome, Tier, health, mooncake, mooncake_store
from paddle_kv.tiers.mooncake import MooncakeEngine
from paddle_kv.tiers.mooncake_store import MooncakeError

from . import mooncake_kills
from .mooncake_cluster import Cluster, loopback_only, stop, why_not

needs_store = pytest.mark.skipif(bool(why_not()), reason=why_not())
SOON_S = 20.0  # far more than any bound, far less than what Mooncake waits for by itself


class FakeStore:
    """Answers as it is told; keeps objects in a dictionary."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.answer: int | None = None  # to every object of a call
        self.registered: list[tuple[int, int]] = []
        self.touched: list[tuple[int, int]] = []
        self.calls: list[str] = []
        self.counts: list[int] = []  # of objects, of each call
        self.sessions: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.closed = 0

    def register_buffer(self, start: int, size: int) -> int:
        self.registered.append((start, size))
        return 0

    def unregister_buffer(self, start: int) -> int:
        return 0

    def close(self) -> int:
        self.closed += 1
        return 0

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self.gate.wait()
        return [self.answer if self.answer is not None else int(name in self.objects) for name in names]

    def batch_remove(self, names: list[str], force: bool = False) -> list[int]:
        assert force
        return [0 if self.objects.pop(name, None) is not None else -704 for name in names]

    def get_size(self, name: str) -> int:
        return len(self.objects[name]) if name in self.objects else -704

    def batch_put_from_multi_buffers(self, names: list[str], starts: Any, sizes: Any) -> list[int]:
        self._called("put", names, starts, sizes)
        if self.answer is not None:
            return [self.answer] * len(names)
        for name, places, lengths in zip(names, starts, sizes, strict=True):
            self.objects[name] = b"".join(bytes(_memory(*one)) for one in zip(places, lengths, strict=True))
        return [0] * len(names)

    def batch_get_into_multi_buffers(self, names: list[str], starts: Any, sizes: Any) -> list[int]:
        self._called("get", names, starts, sizes)
        return [self._get(*one, None) for one in zip(names, starts, sizes, strict=True)]

    def batch_get_into_multi_buffer_ranges(self, names: list[str], starts: Any, sizes: Any, offsets: Any) -> list[int]:
        self._called("range", names, starts, sizes)
        assert set(names) <= set(self.sessions)
        return [self._get(*one) for one in zip(names, starts, sizes, offsets, strict=True)]

    def batch_get_session_start(self, names: list[str]) -> list[int]:
        assert not set(names) & set(self.sessions)
        self.sessions += names
        return [0 if name in self.objects else -704 for name in names]

    def batch_get_session_end(self, names: list[str]) -> int:
        self.sessions = [name for name in self.sessions if name not in names]
        return 0

    def _called(self, what: str, names: list[str], starts: Any, sizes: Any) -> None:
        self.calls.append(what)
        self.counts.append(len(names))
        self.gate.wait()
        assert len(set(names)) == len(names), "the store mixes up what is twice in a call"
        self.touched += [pair for one in zip(starts, sizes, strict=True) for pair in zip(*one, strict=True)]

    def _get(self, name: str, starts: list[int], sizes: list[int], offsets: list[int] | None) -> int:
        if self.answer is not None:
            return self.answer
        if name not in self.objects:
            return -704
        content, at = self.objects[name], 0
        if offsets is None and len(content) > sum(sizes):
            return -600
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            at = at if offsets is None else offsets[number]
            if at + size > len(content):
                return -600 if offsets is not None else -800
            _memory(start, size)[:] = np.frombuffer(content, np.uint8)[at : at + size]
            at += size
        return sum(sizes)


def _memory(start: int, size: int) -> np.ndarray:
    import ctypes

    return np.frombuffer((ctypes.c_char * size).from_address(start), np.uint8)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()
    monkeypatch.setattr(health, "FIRST_REST_S", 60.0)  # no test waits for its end
    monkeypatch.setattr(mooncake, "CALL_RANGES", 16)  # eight objects: each has a header and a block
    monkeypatch.setattr(mooncake, "connect", lambda master, **options: store)
    return store


@pytest.fixture
def rig(fake: FakeStore) -> Iterator[Rig]:
    engine = MooncakeEngine("fake", objects_per_call=8)
    made = Rig(engine)
    yield made
    fake.gate.set()
    made.tier.drain(WAIT_S)
    made.close()
    engine.close(WAIT_S)
    assert fake.sessions == []
    assert fake.closed == 1


OUTCOMES = [(-704, Outcome.MISSING), (-703, Outcome.MISSING), (-712, Outcome.MISSING), (-200, Outcome.DROPPED)]
FAILURES = [-1, -706, -707, -800, -900, -901, -1010, -424242]


def test_measuring_a_store_without_a_node_says_what_is_missing(fake: FakeStore) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from paddle_kv.cli.main import app

    fake.answer = mooncake_store.NO_ROOM
    words = ["tier", "bench", "mooncake:10.0.0.1:50051", "--objects", "3", "--kib", "64", "--repeats", "1"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 2
    told = " ".join(ran.output.replace("│", " ").split())
    assert "tier store: of 3 objects 3 dropped; has the store of 10.0.0.1:50051 a node, with room for 393216" in told


@pytest.mark.parametrize(("code", "outcome"), [*OUTCOMES, *((code, Outcome.FAILED) for code in FAILURES)])
def test_codes_have_a_meaning_and_an_unknown_one_is_a_failure(
    fake: FakeStore, rig: Rig, code: int, outcome: Outcome
) -> None:
    assert rig.store(keys(3)).done
    fake.answer = code
    for layerwise in (True, False):
        rig.tier.engine.reads = mooncake.Health("reading")
        assert set(rig.load(keys(3), layerwise=layerwise).outcomes) == {outcome}
    assert set(rig.store(keys(3, "new")).outcomes) == {outcome}
    fault = outcome is Outcome.FAILED
    assert rig.tier.engine.reads.resting == rig.tier.engine.writes.resting == fault
    assert rig.tier.exists(keys(1)) == [False]


@pytest.mark.parametrize("code", [1, 7, 53247, 53249])
def test_a_positive_number_that_is_not_the_size_is_a_failure(fake: FakeStore, rig: Rig, code: int) -> None:
    rig.store(keys(1))
    fake.answer = code
    assert rig.load(keys(1)).outcomes == [Outcome.FAILED]
    assert len(fake.objects) == 1
    assert rig.store(keys(1, "new")).outcomes == [Outcome.FAILED]


@pytest.mark.parametrize(("objects", "calls"), [(3, [3, 3, 2]), (0.5, [1] * 8), (100, [8])])
def test_a_call_moves_so_many_objects_and_bytes_at_most(
    fake: FakeStore, rig: Rig, monkeypatch: pytest.MonkeyPatch, objects: float, calls: list[int]
) -> None:
    for name in ("CALL_BYTES", "STORE_CALL_BYTES"):
        monkeypatch.setattr(mooncake, name, int(objects * rig.tier.format.object_bytes))
    assert rig.store(keys(8)).done
    assert rig.load(keys(8), layerwise=False).done
    assert sorted(fake.counts, reverse=True) == sorted([*calls, *calls], reverse=True)


def test_the_next_store_is_made_ready_while_one_is_under_way(fake: FakeStore, rig: Rig) -> None:
    """One call at a time, and one store that waits with its headers made; closing drops it and what is behind it."""
    called, going = threading.Event(), threading.Event()

    class Gate(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            called.set()
            return going.wait(WAIT_S)

    fake.gate = Gate()
    for block, key in enumerate(keys(32)):
        rig.rows[block] = rig.content(key)
    job = Job(keys(32), range(32))
    rig.tier.store([job])
    assert called.wait(WAIT_S)
    engine = rig.tier.engine
    end_s = time.monotonic() + WAIT_S
    while not engine._ready and time.monotonic() < end_s:
        time.sleep(0.001)
    assert (len(engine._ready), len(engine._writes), fake.calls) == (1, 2, ["put"])
    assert all(bytes(move.buffers[0][:8]) == b"PDKVTIER" for move in engine._ready[0].moves)
    engine._closed = True
    going.set()
    rig.tier.drain(WAIT_S)
    engine._closed = False
    assert job.outcomes == [Outcome.DONE] * 8 + [Outcome.DROPPED] * 24
    assert rig.load(keys(8)).done
    assert rig.store(keys(32)).done
    assert rig.wrong(rig.load(keys(32))) == []


def test_with_room_before_its_block_an_object_is_one_buffer(fake: FakeStore) -> None:
    engine = MooncakeEngine("fake")
    rig = Rig(engine, room_bytes=8192)
    plain = Tier(engine, rig.pool, model=b"model")  # the room is the first one's
    size = rig.tier.format.object_bytes
    start, step = rig.rows.ctypes.data, rig.rows.strides[0]
    assert rig.store(keys(20), range(5, 25)).done
    assert sorted(fake.touched) == [(start + block * step - 4096, size) for block in range(5, 25)]
    fake.touched.clear()
    job = rig.load(keys(20), range(10, 30), layerwise=False)
    assert job.done
    assert rig.wrong(job) == []
    assert sorted(fake.touched) == [(start + block * step - 4096, size) for block in range(10, 30)]
    fake.touched.clear()
    again = Job(keys(20), range(10, 30), layerwise=False)
    plain.load([again])
    plain.drain(WAIT_S)
    assert again.done
    assert len(fake.touched) == 40  # header and block
    assert all(not any(row[: 8192 - 4096]) for row in rig.tier._whole)  # no more than a header is written to
    plain.close()
    rig.close()
    assert not rig.pool.room_lent
    third = Tier(engine, rig.pool, model=b"model")
    assert third._has_room
    third.close()
    engine.close(WAIT_S)


def test_two_objects_of_one_block_at_once_have_headers_of_their_own(fake: FakeStore) -> None:
    engine = MooncakeEngine("fake", threads=1)
    rig = Rig(engine, room_bytes=4096, max_objects=3)
    rig.rows[2] = rig.content(b"key-0")
    fake.gate.clear()
    jobs = [Job([key], [2]) for key in keys(3)]
    rig.tier.store(jobs)
    fake.gate.set()
    rig.tier.drain(WAIT_S)
    assert [job.done for job in jobs] == [True] * 3
    for key in keys(3):
        load = Job([key], [7])
        rig.tier.load([load])
        rig.tier.drain(WAIT_S)
        assert load.done
        assert bytes(rig.rows[7]) == bytes(rig.content(b"key-0"))
    assert len(rig.tier._headers) == 3
    assert not rig.tier._in_room
    rooms = {rig.tier._whole[block].ctypes.data for block in range(40)}
    assert not rooms & {np.frombuffer(one, np.uint8).ctypes.data for one in rig.tier._headers}
    rig.close()
    engine.close(WAIT_S)


def test_what_rests_is_not_asked(fake: FakeStore, rig: Rig) -> None:
    rig.store(keys(2))
    fake.answer = -900
    assert rig.load(keys(2)).outcomes == [Outcome.FAILED] * 2
    fake.answer, fake.calls = None, []
    assert rig.load(keys(2)).outcomes == [Outcome.DROPPED] * 2
    assert rig.tier.exists(keys(2)) == [False] * 2
    assert fake.calls == []


@pytest.mark.parametrize("layerwise", [True, False])
def test_what_waits_when_the_store_fails_is_not_tried(fake: FakeStore, rig: Rig, layerwise: bool) -> None:
    rig.tier.engine.close(WAIT_S)
    fake.closed = 0
    engine = rig.tier.engine = MooncakeEngine("fake", objects_per_call=8, threads=1)
    rig.store(keys(24))
    fake.answer, fake.calls = -900, []
    assert rig.load(keys(24), layerwise=layerwise).outcomes == [Outcome.FAILED] * 8 + [Outcome.DROPPED] * 16
    assert rig.store(keys(24, "new")).outcomes == [Outcome.FAILED] * 8 + [Outcome.DROPPED] * 16
    assert fake.calls == ["range", "put"]
    engine.close(WAIT_S)


def test_one_object_that_fails_does_not_stop_the_others(fake: FakeStore, rig: Rig) -> None:
    rig.store(keys(3))
    first = rig.tier.engine._key(rig.tier.format.name_of(b"key-0"))
    get = fake._get
    fake._get = lambda name, *rest: -800 if name == first else get(name, *rest)  # type: ignore[method-assign]
    load = rig.load(keys(3))
    assert load.outcomes == [Outcome.FAILED, Outcome.DONE, Outcome.DONE]
    assert not rig.tier.engine.reads.resting
    assert first in fake.objects


@pytest.mark.parametrize("stage", [0, 1])
def test_a_load_asks_a_dead_node_for_few_ranges(fake: FakeStore, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Each costs a second in the store: a call of all objects would keep blocks and a thread for minutes."""
    engine = MooncakeEngine("fake")
    rig = Rig(engine)
    rig.store(keys(40))
    monkeypatch.setattr(mooncake, "DEAD_S", -1.0)
    dead = {engine._key(rig.tier.format.name_of(key)) for key in keys(40)[::2]}
    get, asked = fake._get, []

    def get_or_fail(name: str, starts: list[int], sizes: list[int], offsets: list[int] | None) -> int:
        if name not in dead or (offsets is not None and stage and not offsets[0]):
            return get(name, starts, sizes, offsets)
        asked.extend([] if offsets is None else offsets)
        return -800

    fake._get = get_or_fail  # type: ignore[method-assign]
    load = rig.load(keys(40))
    assert 0 < len(asked) <= mooncake.CALL_RANGES
    assert all(outcome is Outcome.FAILED for outcome in load.outcomes[::2])
    done = [outcome is Outcome.DONE for outcome in load.outcomes[1::2]]
    assert all(done) if stage == 0 else any(done)  # later all that was not asked has failed
    assert rig.wrong(load) == []
    assert fake.sessions == []
    assert not engine.reads.resting
    rig.close()
    engine.close(WAIT_S)


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("change", [-5000, -1, 1, 5000])
def test_an_object_of_another_size_is_damaged_and_goes(fake: FakeStore, rig: Rig, change: int, layerwise: bool) -> None:
    rig.store(keys(2))
    name = rig.tier.engine._key(rig.tier.format.name_of(b"key-1"))
    content = fake.objects[name]
    fake.objects[name] = content[:change] if change < 0 else content + bytes(change)
    load = rig.load(keys(2), layerwise=layerwise)
    assert rig.wrong(load) == []
    if change < 0:  # nobody reads what is too much
        assert load.outcomes == [Outcome.DONE, Outcome.DAMAGED]
        assert rig.tier.exists(keys(2)) == [True, False]


def test_the_same_object_several_times_at_once(fake: FakeStore, rig: Rig) -> None:
    rig.store(keys(2))
    jobs = [Job([b"key-0", b"key-1", b"key-0", b"key-0"], range(10 + 4 * n, 14 + 4 * n)) for n in range(5)]
    rig.tier.load(jobs)
    rig.tier.drain(WAIT_S)
    assert all(job.done and not rig.wrong(job) for job in jobs)


def test_layers_of_all_objects_come_before_the_next_ones_and_nothing_is_copied(fake: FakeStore, rig: Rig) -> None:
    rig.store(keys(20))
    fake.calls, fake.touched = [], []
    assert rig.load(keys(20)).done
    stages = len(rig.tier._stages[True])
    assert fake.calls == ["range"] * 3 * stages  # 20 objects in calls of 8
    own = [(memory.ctypes.data, memory.nbytes) for memory in rig.tier.engine._memory]
    assert own == fake.registered
    assert sum(size for _, size in fake.touched) == 20 * rig.tier.format.object_bytes
    for start, size in fake.touched:
        assert any(first <= start and start + size <= first + room for first, room in own)


def test_a_load_right_after_another_one_has_a_session_of_its_own(fake: FakeStore, rig: Rig) -> None:
    rig.store(keys(3))
    fake.calls, end = [], fake.batch_get_session_end
    fake.batch_get_session_end = lambda names: [time.sleep(0.01), end(names)][1]  # type: ignore[method-assign,func-returns-value]
    for _ in range(5):
        assert rig.load(keys(3)).done
    assert set(fake.calls) == {"range"}


def test_a_transfer_that_the_store_gave_up_keeps_its_block_until_the_store_is_left(
    fake: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MooncakeEngine("fake")
    rig = Rig(engine)
    rig.store(keys(2))
    monkeypatch.setattr(mooncake, "GIVES_UP_S", -1.0)
    fake.answer = -800
    load = Job(keys(2), [5, 6], timeout_s=0.05)
    rig.tier.load([load])
    with pytest.raises(TimeoutError):
        rig.tier.drain(0.2)
    assert load.settled
    assert set(load.outcomes) == {Outcome.LATE}
    assert not load.over
    assert engine.stats()["given_up"] == 2
    engine.close(WAIT_S)
    assert fake.closed == 1
    assert load.over
    rig.close()


def test_a_call_that_hangs_holds_nobody_up_beyond_the_deadline(fake: FakeStore) -> None:
    engine = MooncakeEngine("fake", threads=1, answer_s=0.01)
    rig = Rig(engine)
    rig.store(keys(2))
    fake.gate.clear()
    load = Job(keys(2), [5, 6], timeout_s=2.0)
    queued = Job(keys(2), [7, 8])
    fake.calls = []
    rig.tier.load([load, queued])
    while not (load.settled and fake.calls):
        time.sleep(0.01)
    assert rig.tier.exists(keys(2)) == [False, False]
    assert engine.asks.resting
    with pytest.raises(TimeoutError):
        rig.tier.drain(0.2)
    assert set(load.outcomes) == {Outcome.LATE}
    assert not load.over
    rig.tier.delete([])  # of what rests: returns at once
    rig.tier.close(0.1)
    assert set(queued.outcomes) == {Outcome.DROPPED}
    with pytest.raises(TimeoutError):
        engine.close(0.1)
    assert fake.closed == 0
    fake.calls = []
    fake.gate.set()
    engine.close(WAIT_S)
    assert load.over
    assert set(queued.outcomes) == {Outcome.DROPPED}
    assert fake.calls == []
    rig.close()
    engine.close()
    assert fake.closed == 1


def test_an_answer_that_is_late_is_not_taken_for_the_next_one(fake: FakeStore, rig: Rig) -> None:
    rig.store(keys(1))
    fake.gate.clear()
    assert rig.tier.exists(keys(1)) == [False]
    fake.gate.set()
    rig.tier.engine.asks = mooncake.Health("asking")
    assert rig.tier.exists([b"absent"]) == [False]
    rig.tier.engine.asks = mooncake.Health("asking")
    rig.tier.engine._answer_s = WAIT_S
    assert rig.tier.exists([b"absent", b"key-0"]) == [False, True]


def test_the_threads_live_whatever_is_raised_in_them(fake: FakeStore, rig: Rig) -> None:
    def broken(*given: object) -> Any:
        raise SystemExit("of the store")

    rig.store(keys(2))
    answer, get = fake.batch_is_exist, fake._get
    fake.batch_is_exist = fake._get = broken  # type: ignore[method-assign]
    assert rig.tier.exists(keys(2)) == [False, False]
    assert rig.load(keys(2)).outcomes == [Outcome.FAILED] * 2
    fake.batch_is_exist, fake._get = answer, get  # type: ignore[method-assign]
    for name in ("asks", "reads"):
        setattr(rig.tier.engine, name, mooncake.Health(name))
    rig.tier.engine._answer_s = WAIT_S
    assert rig.tier.exists(keys(2)) == [True, True]
    assert rig.load(keys(2)).done
    assert all(thread.is_alive() for thread in rig.tier.engine._threads)


def test_memory_that_the_store_refuses(fake: FakeStore, rig: Rig) -> None:
    fake.register_buffer = lambda start, size: -600  # type: ignore[method-assign]
    with pytest.raises(MooncakeError, match=r"invalid parameters \(-600\)") as caught:
        Tier(rig.tier.engine, rig.pool, model=b"m")
    assert caught.value.code == -600


def test_a_child_does_not_use_the_clients_of_its_parent(rig: Rig) -> None:
    child = os.fork()
    if not child:
        try:
            rig.tier.engine.close(0.0)
            rig.tier.engine.exists([b"name"])
        except ForkedError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# ---- with a real store ----


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    with loopback_only(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "FIRST_REST_S", 0.05)
        patch.setattr(health, "LONGEST_REST_S", 0.2)
        for name in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"):
            patch.setenv(name, "1")
        patch.setenv("MC_RPC_TIMEOUT_MS", "1000")
        yield


@needs_store
def test_no_master(network: None) -> None:
    started_s = time.monotonic()
    with pytest.raises(TierError, match="does not listen"):
        MooncakeEngine("127.0.0.1:19999")
    assert time.monotonic() - started_s < SOON_S


def test_a_library_that_was_imported_without_its_bounds_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS"
    for module in ("mooncake.store", "mooncake.engine"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delenv(name, raising=False)
    set_bounds(mooncake_store.BOUNDS)
    assert os.environ[name] == "5"
    monkeypatch.setitem(sys.modules, "mooncake.engine", sys)
    set_bounds(mooncake_store.BOUNDS)
    assert caplog.records == []
    monkeypatch.delenv(name)
    set_bounds(mooncake_store.BOUNDS)
    assert [record.getMessage() for record in caplog.records] == [
        f"Mooncake was imported without {name}: it does not find nodes that take the name of a dead one"
    ]


@needs_store
def test_bounds_are_set_unless_the_user_has_set_them(network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1234")
    for name in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TierError):
        MooncakeEngine("127.0.0.1:19999")
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "1234"
    assert os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == mooncake_store.BOUNDS["MC_TCP_PROGRESS_TIMEOUT_SEC"]
    assert os.environ["MC_TE_METADATA_REFRESH_INTERVAL_SECONDS"] == "5"  # never, else


@needs_store
def test_nodes_and_masters_die_stop_and_come_back(
    network: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One store for all of it: each start takes a while."""
    with Cluster(32 << 20, options=("--client_ttl=1",)) as cluster:
        engine = MooncakeEngine(cluster.master, answer_s=1.0, metrics=cluster.metrics)
        assert "metadata refresh polling enabled, interval_seconds=5" in capfd.readouterr().err
        rig = Rig(engine, ODD)
        names = keys(10)
        monkeypatch.setenv("MOONCAKE_MASTER", cluster.master)
        assert "stored and loaded" in doctor._mooncake()
        assert rig.store(names).done
        assert rig.load(names).done
        rig.tier.delete(names[:1])  # right after a get: the store's lease does not protect it
        assert rig.tier.exists(names[:2]) == [False, True]
        with _killed_node(engine, cluster):  # a thread of the engine goes on asking for it for a while
            mooncake_kills.until_done(rig, names)
            _stopped_node(rig, cluster)
            _stopped_master(rig, cluster)
        rig.close()
        engine.close(WAIT_S)


def _stopped_node(rig: Rig, cluster: Cluster) -> None:
    """What it sends when it goes on must not reach memory that was given back."""
    names = keys(4, "stopped")
    mooncake_kills.until_done(rig, names)
    rig.rows[20:30] = POISON
    stop(cluster.nodes[0])
    for _ in range(100):  # for a while nothing is asked, where a call to the node that was killed has failed just now
        load = Job(names, range(20, 24), timeout_s=0.5, layerwise=False)
        rig.tier.load([load])
        rig.tier.drain(WAIT_S)
        if Outcome.DROPPED not in load.outcomes:
            break
        time.sleep(0.05)
    assert set(load.outcomes) <= {Outcome.LATE, Outcome.FAILED}
    rig.rows[20:30] = POISON
    os.kill(cluster.nodes[0].pid, signal.SIGCONT)
    mooncake_kills.until_done(rig, keys(10))
    assert (rig.rows[20:30] == POISON).all()


def _stopped_master(rig: Rig, cluster: Cluster) -> None:
    stop(cluster.master_process)
    try:
        ticks, blocked = 0, Job(keys(10), range(20, 30), timeout_s=0.3)
        rig.tier.load([blocked])
        while not blocked.settled:  # the call has given up the interpreter's lock
            ticks += 1
            time.sleep(0.001)
        assert ticks > 10
        assert set(blocked.outcomes) == {Outcome.LATE}
        assert rig.tier.exists(keys(2)) == [False, False]
        started_s = time.monotonic()
        rig.tier.delete(keys(1))
        rig.tier.drain(WAIT_S)
        assert time.monotonic() - started_s < SOON_S
    finally:
        os.kill(cluster.master_process.pid, signal.SIGCONT)
    mooncake_kills.until_done(rig, keys(10))


@contextlib.contextmanager
def _killed_node(engine: MooncakeEngine, cluster: Cluster) -> Iterator[None]:
    """Its objects are said to be there for a while; a load finds out, in time."""
    rig = Rig(engine, ODD)
    names = keys(2)
    assert rig.tier.exists(names) == [False, True]
    loads = [Job(keys(10), range(10), timeout_s=0.5), Job(names[1:], [17], timeout_s=0.5)]
    rig.tier.load(loads[:1])  # in the middle of it
    cluster.kill(cluster.nodes.pop())
    assert rig.tier.exists(names) == [False, True]
    rig.tier.load(loads[1:])
    while not all(load.settled for load in loads):
        time.sleep(0.01)
    assert rig.wrong(loads[0]) == []
    assert loads[1].outcomes[0] in (Outcome.LATE, Outcome.FAILED)
    cluster.start_node(32 << 20)
    yield
    rig.tier.drain(WAIT_S)
    rig.close()


@needs_store
def test_kills_of_the_master_serve_no_wrong_byte(network: None) -> None:
    found = mooncake_kills.run("master", points=2, seed=5)
    assert found.wrong == []
    assert found.late == []
