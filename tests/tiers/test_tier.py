"""What a tier makes of what an engine says, whatever that says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from paddle_kv import ClosedError, HostPool, LeasedError
from paddle_kv.testing.tiers.rig import ALIGNED, WAIT_S, Rig, keys
from paddle_kv.tiers import Job, Outcome, Saver, Tier
from paddle_kv.tiers import tier as tier_module
from tests.tiers.conftest import MakeRig


class Silent:
    """Keeps what it is given; the test says what becomes of it."""

    name = "silent"

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.deleted: list[bytes] = []

    def register(self, memory: np.ndarray) -> None: ...

    def write(self, items: Sequence[Any]) -> None:
        self.items += items

    read = write

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        return [False] * len(names)

    def delete(self, names: Sequence[bytes]) -> None:
        self.deleted += names

    def stats(self) -> dict[str, float]:
        return {}

    def close(self, timeout_s: float | None = None) -> None: ...


@pytest.fixture
def rig() -> Rig:
    return Rig(Silent(), num_blocks=4)


def begun(rig: Rig, kind: str, **options: Any) -> tuple[Job, Any]:
    job = Job(keys(1), [2], **options)
    (rig.tier.load if kind == "load" else rig.tier.store)([job])
    return job, rig.tier.engine.items.pop()  # type: ignore[attr-defined]


def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise TimeoutError("it did not come about")


def test_what_was_not_looked_at_is_not_loaded(rig: Rig) -> None:
    job, item = begun(rig, "load")
    item.ended(Outcome.DONE)
    assert job.outcomes == [Outcome.FAILED]
    rig.close()


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_cancelled_job_moves_nothing(rig: Rig, kind: str) -> None:
    job, item = begun(rig, kind)
    given = (0,) if kind == "load" else ()
    assert item.buffers(*given) is not None
    job.cancel()
    assert item.buffers(*given) is None
    item.ended(Outcome.FAILED)
    assert job.outcomes == [Outcome.DROPPED]
    rig.close()


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_late_job_stays_late_and_holds_its_block(rig: Rig, kind: str) -> None:
    job, item = begun(rig, kind, timeout_s=0.02)
    until(lambda: job.settled)
    assert job.outcomes == [Outcome.LATE]
    assert not job.over
    assert item.buffers(*((0,) if kind == "load" else ())) is None
    with pytest.raises(TimeoutError):
        rig.tier.drain(0.01)
    item.ended(Outcome.DONE)
    assert job.outcomes == [Outcome.LATE]
    assert job.over
    stats = rig.tier.stats()
    assert (stats[f"{kind}_late"], stats[f"{kind}_done"], stats["store_bytes_in_flight"]) == (1, 0, 0)
    rig.close()


def test_headers_come_back(rig: Rig) -> None:
    tier = Tier(Silent(), rig.pool, model=b"m", max_objects=2)
    for _ in range(5):
        job = Job(keys(2), [0, 1])
        tier.store([job])
        for item in tier.engine.items:  # type: ignore[attr-defined]
            item.ended(Outcome.DONE)
            item.ended(Outcome.FAILED)
        tier.engine.items.clear()  # type: ignore[attr-defined]
        assert job.done
    tier.close()


def test_wrong_arguments_are_named(rig: Rig) -> None:
    for given, error, text in (
        (lambda: Job(b"key", [1]), TypeError, "keys is bytes; a list of bytes is expected"),
        (lambda: Job(["key"], [1]), TypeError, r"keys\[0\] is str; bytes are expected"),  # type: ignore[list-item]
        (lambda: Job([b"k" * 65], [1]), ValueError, r"keys\[0\] has 65 bytes; 1 to 64"),
        (lambda: Job(keys(2), [1]), ValueError, "keys has 2 entries, block_ids has 1"),
        (lambda: Job(keys(1), [1], timeout_s=None), TypeError, "timeout_s is None"),  # type: ignore[arg-type]
        (lambda: rig.tier.store([Job(keys(1), [4])]), IndexError, r"block_ids\[0\] = 4"),
        (lambda: rig.tier.load([Job(keys(2), [1, 1])]), ValueError, "names block 1 more than once"),
        (
            lambda: Tier(Silent(), HostPool(ALIGNED, 2, layout="layer_first"), model=b"m"),
            ValueError,
            "layout='block_first'",
        ),
        (lambda: Tier(Silent(), rig.pool, model="m"), TypeError, "model is str"),  # type: ignore[arg-type]
        (lambda: Tier(Silent(), rig.pool, model=b"m", max_objects=0), ValueError, "max_objects = 0"),
    ):
        with pytest.raises(error, match=text):
            given()  # type: ignore[no-untyped-call]
    job, item = begun(rig, "store")
    with pytest.raises(ValueError, match="handed to a tier before"):
        rig.tier.store([job])
    item.ended(Outcome.DONE)
    assert rig.tier.engine.items == []  # type: ignore[attr-defined]
    rig.close()
    with pytest.raises(ClosedError):
        rig.tier.exists(keys(1))


def test_a_deadline_while_the_tier_is_closed(rig: Rig) -> None:
    entered, go = threading.Event(), threading.Event()

    class Slow(Job):
        def end(self, ends: Iterable[tuple[int, Outcome]]) -> list[Outcome]:
            if threading.current_thread().name == "paddle_kv-tier-deadlines":
                entered.set()
                go.wait(WAIT_S)
            return super().end(ends)

    job = Slow(keys(1), [2], timeout_s=0.02)
    rig.tier.store([job])
    assert entered.wait(WAIT_S)
    rig.tier.engine.items.pop().ended(Outcome.DONE)  # type: ignore[attr-defined]
    thread = threading.Thread(target=rig.tier.close, daemon=True)
    thread.start()
    until(lambda: rig.tier._deadlines._closed)
    go.set()
    thread.join(5.0)
    assert not thread.is_alive()


# ---- closing while the engine has something ----
@pytest.mark.parametrize("kind", ["load", "store"])
@pytest.mark.parametrize("how", ["late", "cancelled", "live"])
def test_a_tier_closes_without_what_the_engine_does_not_let_go_of(
    rig: Rig, caplog: pytest.LogCaptureFixture, kind: str, how: str
) -> None:
    """In the time of the job, or that of the call, and a second; the blocks stay held."""
    pool = rig.pool
    pool.allocate(4)
    job, item = begun(rig, kind, timeout_s=0.5 if how == "late" else WAIT_S)
    other, its = begun(rig, kind)  # of the same block
    assert item.buffers(*((0,) if kind == "load" else ())) is not None
    its.ended(Outcome.FAILED)
    if how == "cancelled":
        job.cancel()
    began_s = time.monotonic()
    rig.tier.close(0.2 if how == "live" else None)
    took_s = time.monotonic() - began_s
    assert took_s < (0.9 if how == "live" else 3.0)
    assert job.outcomes == [Outcome.LATE if how == "late" else Outcome.DROPPED]
    assert (job.over, other.over) == (False, True)
    assert item.buffers(*((0,) if kind == "load" else ())) is None
    assert "the engine silent had not let go of 1 jobs; their blocks are held" in caplog.text
    # What the engine still writes nobody reads; what it reads anybody may.
    read = pool.domain.try_lease([2], write=False)
    assert read == (kind == "store")
    if read:
        pool.domain.end_lease([2], write=False)
    assert not pool.domain.try_lease([2], write=True)
    pool.free(range(4))
    assert pool.allocate(3) == [0, 1, 3]
    with pytest.raises(MemoryError):
        pool.allocate(1)
    with pytest.raises(LeasedError, match="1 blocks"):
        pool.close()
    with pytest.raises(TimeoutError, match=r"1 jobs of the tier were not over after timeout_s = 0\.01"):
        rig.tier.drain(0.01)
    rig.tier.close()
    item.ended(Outcome.DONE)
    item.ended(Outcome.DONE)
    assert job.over
    rig.tier.drain(0.0)
    assert pool.allocate(1) == [2]
    assert pool.domain._num_leases == 0
    assert not pool.domain._write_leases.any() and not rig.tier._kept
    pool.close()


@pytest.mark.parametrize("where", ["before it is held", "while it is held", "behind that"])
def test_what_ends_while_the_tier_is_closed_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """Also what the engine answers in the middle of it: from then on its block is whoever's."""
    monkeypatch.setattr(tier_module, "LET_GO_S", 0.01)
    rig = Rig(Silent(), num_blocks=4, room_bytes=4096)
    domain, keep = rig.pool.domain, rig.tier._keep
    job, item = begun(rig, "load", timeout_s=0.02)
    held: list[list[int]] = []
    add_lease = domain.add_lease

    def answers() -> None:
        threading.Thread(target=item.ended, args=[Outcome.FAILED]).start()
        until(lambda: job.over)  # what is to be done behind that may have to wait for this section

    def add(block_ids: Sequence[int], *, write: bool) -> None:
        if where == "while it is held":
            answers()
        add_lease(block_ids, write=write)

    def keeps(jobs: Any) -> int:
        if where == "before it is held":
            answers()
        found = keep(jobs)
        held.append(domain.busy(range(4)))
        if where == "behind that":
            answers()
        return found

    monkeypatch.setattr(rig.tier, "_keep", keeps)
    monkeypatch.setattr(domain, "add_lease", add)
    rig.tier.close()
    assert held == [[] if where == "before it is held" else [2]]
    assert ("had not let go of" in caplog.text) == (where != "before it is held")
    until(lambda: job.told and not rig.tier._jobs)
    until(lambda: domain._num_leases == 0)
    assert not domain.busy(range(4))
    assert not rig.tier._kept and not rig.pool.room_lent
    rig.pool.close()


def closing(rig: Rig) -> threading.Thread:
    thread = threading.Thread(target=rig.tier.close, daemon=True)
    thread.start()
    until(lambda: bool(rig.tier._closers))
    return thread


def test_a_job_that_is_cancelled_while_the_tier_is_closed_is_not_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells the tier itself: also in the middle of what the tier does, as a finalizer may."""
    monkeypatch.setattr(tier_module, "LET_GO_S", WAIT_S)  # nobody would look sooner
    job, item = begun(rig, "load", timeout_s=WAIT_S)
    other, its = begun(rig, "store", timeout_s=WAIT_S)
    thread = closing(rig)
    with rig.tier._lock:
        job.cancel()
    thread.join(0.1)
    assert rig.tier._closers and not other.cancelled  # whose time is not over
    other.cancel()
    until(lambda: bool(rig.tier._drains))
    assert not rig.tier._closers
    item.ended(Outcome.DROPPED)
    its.ended(Outcome.DROPPED)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    rig.pool.close()


def test_while_a_tier_is_closed_nobody_looks_again_and_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "LET_GO_S", 0.01)
    asked: list[bool] = []
    is_unawaited = rig.tier._is_unawaited
    monkeypatch.setattr(rig.tier, "_is_unawaited", lambda: asked.append(is_unawaited()) or asked[-1])
    _, item = begun(rig, "store", timeout_s=WAIT_S)
    thread = closing(rig)
    thread.join(0.2)
    assert asked == [False]
    item.ended(Outcome.DONE)
    thread.join(WAIT_S)
    assert asked == [False, True] and not thread.is_alive()
    rig.pool.close()


def test_what_is_cancelled_before_somebody_could_be_told_is_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever closes the tier stands in the list before it asks."""
    monkeypatch.setattr(tier_module, "LET_GO_S", 0.01)
    job, item = begun(rig, "load", timeout_s=WAIT_S)
    is_unawaited = rig.tier._is_unawaited

    def cancels_behind_it() -> bool:
        found = is_unawaited()
        job.cancel()
        return found

    monkeypatch.setattr(rig.tier, "_is_unawaited", cancels_behind_it)
    began_s = time.monotonic()
    rig.tier.close()
    assert time.monotonic() - began_s < WAIT_S / 4
    item.ended(Outcome.DROPPED)
    rig.pool.close()


def test_where_nobody_closes_the_tier_and_in_a_forked_child_nobody_is_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a child locks may be held by threads that it has not."""
    job, item = begun(rig, "load")
    posted: list[Any] = []
    monkeypatch.setattr(rig.pool.domain.group.host, "post", posted.append)
    job.cancel()
    assert not posted
    monkeypatch.setattr(rig.tier, "_closers", [None])
    with monkeypatch.context() as patch:
        patch.setattr(rig.tier, "_process_id", -1)
        job.cancel()
        assert not posted
    job.cancel()
    assert len(posted) == 1
    monkeypatch.undo()
    item.ended(Outcome.DROPPED)
    rig.close()


def test_nothing_begins_behind_a_close(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may have looked whether the tier is open before that."""
    start = rig.tier._deadlines.start

    def closes() -> None:
        start()
        rig.tier.close()

    monkeypatch.setattr(rig.tier._deadlines, "start", closes)
    job = Job(keys(1), [2], timeout_s=WAIT_S)
    with pytest.raises(ClosedError):
        rig.tier.load([job])
    assert not rig.tier._jobs and not job.started_s
    assert rig.tier.engine.items == []  # type: ignore[attr-defined]
    rig.pool.close()


def test_a_tier_waits_for_what_still_has_time(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    job, item = begun(rig, "store", timeout_s=WAIT_S)
    thread = closing(rig)
    thread.join(0.1)
    assert thread.is_alive()
    assert item.buffers() is not None
    item.ended(Outcome.DONE)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert job.done
    assert not caplog.records
    rig.pool.close()


def test_a_second_for_what_is_late_and_comes(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    job, item = begun(rig, "load", timeout_s=0.02)
    until(lambda: job.settled)
    threading.Timer(0.1, item.ended, [Outcome.DONE]).start()
    rig.tier.close()
    assert job.over
    assert not caplog.records
    rig.pool.close()


@pytest.mark.parametrize("timeout_s", ["1", True, float("nan")])
def test_a_time_that_is_none_closes_nothing(rig: Rig, timeout_s: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout_s"):
        rig.tier.close(timeout_s)
    assert rig.tier.finished() == []
    rig.close()


@pytest.mark.parametrize("kind", ["load", "store"])
def test_what_the_engine_has_let_go_of_is_free_beside_the_rest(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(tier_module, "LET_GO_S", 0.01)
    job = Job(keys(2), [1, 2], timeout_s=0.3)
    (rig.tier.load if kind == "load" else rig.tier.store)([job])
    first, second = rig.tier.engine.items  # type: ignore[attr-defined]
    if kind == "load":
        _, [header, _] = first.buffers(0)
        rig.tier.format.write_headers([(header, job.keys[0], rig.tier.payload(1))])
        assert first.buffers(0) is not None
        assert all(first.arrived(stage) for stage in range(first.num_stages))
    first.ended(Outcome.DONE)
    rig.tier.close()
    assert job.outcomes == [Outcome.DONE, Outcome.LATE]
    assert rig.pool.domain.busy(range(4)) == [2]
    with pytest.raises(TimeoutError), rig.pool.lease([2], write=True, timeout_s=0.01):
        pass
    second.ended(Outcome.FAILED)
    until(lambda: not rig.pool.domain.busy(range(4)))
    rig.pool.close()


def test_the_room_of_a_closed_tier_is_its_own_until_nobody_writes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "LET_GO_S", 0.01)
    rig = Rig(Silent(), num_blocks=4, room_bytes=4096)
    job, item = begun(rig, "load", timeout_s=0.02)
    rig.tier.close()
    second = Tier(Silent(), rig.pool, model=b"m")
    assert not second._has_room
    second.close()
    assert rig.pool.room_lent
    item.ended(Outcome.DROPPED)
    assert job.over
    assert not rig.pool.room_lent
    third = Tier(Silent(), rig.pool, model=b"m")
    assert third._has_room
    third.close()
    rig.pool.close()


def test_an_observer_that_raises_holds_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    class Wrong:
        def layers_arrived(self, job: Job, layers: range) -> None:
            raise RuntimeError("wrong")

        def settled(self, job: Job) -> None:
            raise RuntimeError("wrong")

        def over(self, job: Job) -> None:
            raise RuntimeError("wrong")

    job, item = begun(rig, "load", observer=Wrong())
    _, [header, _] = item.buffers(0)
    rig.tier.format.write_headers([(header, job.keys[0], rig.tier.payload(2))])
    assert item.arrived(0)
    item.ended(Outcome.FAILED)
    rig.tier.drain(1.0)
    assert job.over
    assert caplog.text.count("an error in the observer of a job") == 3
    rig.close()


def test_a_tier_that_gets_no_thread_takes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    rig.tier.finished()  # the thread that changes state is there
    job = Job(keys(1), [2])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            rig.tier.store([job])
    rig.tier.drain(0.0)
    rig.tier.store([job])
    rig.tier.engine.items.pop().ended(Outcome.DONE)  # type: ignore[attr-defined]
    rig.tier.drain(0.0)
    assert job.done
    rig.close()


def test_a_time_out_of_numpy_is_exact(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 2.0**27)  # seconds: a float32 counts them by eights
    rig.tier._deadlines.start()
    _, item = begun(rig, "store", timeout_s=np.float32(3.0))
    [(end_s, _, _)] = rig.tier._deadlines._queue
    assert end_s == 2.0**27 + 3
    monkeypatch.undo()
    item.ended(Outcome.DONE)
    rig.close()


def test_those_that_waited_in_vain_are_forgotten(rig: Rig) -> None:
    _, item = begun(rig, "store")
    for _ in range(3):
        with pytest.raises(TimeoutError, match="1 jobs"):
            rig.tier.drain(0.0)
    assert not rig.tier._drains
    item.ended(Outcome.DONE)
    rig.close()


def test_those_that_did_not_have_to_wait_are_forgotten(rig: Rig) -> None:
    """Else each drain of an idle tier would leave something behind, and whoever ends a job would wake it again."""
    for _ in range(3):
        rig.tier.drain(0.0)
    assert not rig.tier._drains
    rig.tier.close()
    assert not rig.tier._closers
    rig.pool.close()


def test_a_job_that_is_settled_behind_close_writes_to_no_descriptor(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may still be at it; the number may be that of another file by now."""
    rig.close()
    written: list[int] = []
    monkeypatch.setattr("os.eventfd_write", lambda descriptor, _: written.append(descriptor))
    job = Job(keys(1), [2])
    job.begin("store", 1, time.monotonic())
    job.end([(0, Outcome.DONE)])
    rig.tier._look(job)
    assert job.settled
    assert written == []


def test_a_drain_waits_for_the_last_job(rig: Rig) -> None:
    _, first = begun(rig, "store")
    _, second = begun(rig, "store")
    draining = threading.Thread(target=rig.tier.drain, daemon=True)
    draining.start()
    until(lambda: len(rig.tier._drains) == 1)
    first.ended(Outcome.DONE)
    assert len(rig.tier._drains) == 1
    second.ended(Outcome.DONE)
    draining.join(WAIT_S)
    assert not draining.is_alive()
    rig.close()


@pytest.mark.parametrize("method", ["write", "read", "exists", "delete", "stats"])
def test_an_engine_that_raises_is_a_miss(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    rig = make_rig()
    rig.store(keys(2))

    def raising(*given: Any) -> Any:
        raise RuntimeError("an engine of somebody")

    with monkeypatch.context() as patch:
        patch.setattr(rig.tier.engine, method, raising)
        if method in ("write", "read"):
            job = rig.store(keys(3, "new")) if method == "write" else rig.load(keys(3))
            assert job.outcomes == [Outcome.FAILED] * 3
            assert job.over
            assert rig.tier.stats()[f"{'store' if method == 'write' else 'load'}_failed"] == 3
        elif method == "exists":
            with pytest.raises(RuntimeError, match="of somebody"):
                rig.tier.exists(keys(2))
            job = Saver(rig.tier, "write_through").saved(keys(2), [0, 1])
            assert job is not None
            rig.tier.drain(WAIT_S)
            assert job.done
        elif method == "delete":
            rig.tier.delete(keys(2))
            assert rig.load([b"absent"]).outcomes == [Outcome.MISSING]  # which the tier wants deleted
        else:
            assert rig.tier.stats()["store_done"] == 2
    assert "an error in the engine files" in caplog.text
    job = rig.load(keys(2))
    assert job.done
    assert rig.wrong(job) == []
    assert rig.tier.stats()["jobs_in_flight"] == rig.tier.stats()["store_bytes_in_flight"] == 0
