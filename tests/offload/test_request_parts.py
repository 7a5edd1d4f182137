"""A request by itself: what it asks of a manager, call by call, where transfers, rates and time are the test's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv import CancelledError, ClosedError, TransferError
from paddle_kv.offload import chunks
from paddle_kv.offload import request as module
from paddle_kv.offload.chunks import ChunkedRequest, checked_targets, make_request
from paddle_kv.offload.found import BlockState
from paddle_kv.offload.pieces import Piece
from paddle_kv.offload.rates import LINK, TIER, Rates
from paddle_kv.offload.request import Request, full_table
from paddle_kv.offload.waits import Step

SIZE = 16
HERE, BELOW = BlockState.PRESENT, BlockState.TIER
TABLE = [9, 2, 11, 5, 30, 31]


class Load:
    """A transfer."""

    unmarked_layers = range(0)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = self.failed = self.over = False

    def done(self) -> bool:
        return self.over

    def wait(self, timeout_s: float | None) -> None:
        if self.fails:
            raise TransferError("lost")

    def wait_over(self, timeout_s: float | None = None) -> None:
        self.calls.append("wait_over")

    def cancel(self) -> None:
        self.calls.append("cancel")


class Manager:
    """Writes down what it is asked for."""

    write_through = True

    def __init__(self, states: list[BlockState]) -> None:
        self.states = states
        self.rates = Rates(1000, SIZE, lambda: 0.0)
        self._books = SimpleNamespace(rates=self.rates)
        self.device_cache = SimpleNamespace(spec=SimpleNamespace(num_layers=4), mark_rewritten=lambda ids: None)
        self.calls: list[Any] = []
        self.load, self.save = Load(), Load()
        self.lost: list[int] = []
        self.refuses = False

    def know(self, load_s: float, tier_s: float | None = None) -> None:
        """Seconds a block; computing one takes a second."""
        self.rates.set_load(LINK, 1000 / load_s)
        self.rates.set_prefill(1.0 / SIZE)
        if tier_s is not None:
            self.rates.set_load(TIER, 1000 / tier_s)

    @contextlib.contextmanager
    def lookup(self, hashes: list[bytes], *, num_tokens: int) -> Iterator[Any]:
        lease = SimpleNamespace(hashes=hashes[: len(self.states)], states=self.states, num_blocks=len(self.states))

        def keep_first(count: int) -> None:
            lease.hashes, lease.num_blocks = lease.hashes[:count], count

        lease.keep_first = keep_first
        yield lease

    def prefetch(self, hashes: list[bytes], *, timeout_s: float) -> None:
        self.calls.append(("prefetch", hashes, timeout_s))

    def onload(self, hashes: list[bytes], ids: list[int]) -> Load:
        self.calls.append(("onload", hashes, ids))
        return self.load

    def blocks_full(self, hashes: list[bytes], ids: list[int], **_: Any) -> Load:
        if self.refuses:
            raise ZeroDivisionError
        self.calls.append(("save", hashes, ids))
        return self.save

    def observe_prefill(self, tokens: range, seconds: float) -> None:
        self.calls.append((tokens, seconds))

    def blocks_to_recompute(self, load: Load) -> list[int]:
        return self.lost


KEYS = [b"%d" % number for number in range(5)]
NUM_TOKENS = 5 * SIZE + 3


def made(manager: Manager, how: str) -> Request:
    return Request(manager, KEYS, NUM_TOKENS, TABLE, SIZE, how)


def test_what_is_to_be_computed_is_not_loaded() -> None:
    manager = Manager([HERE] * 4)
    manager.know(1e-3)
    request = made(manager, "compute")
    assert (manager.calls, request.start, request.loads) == ([("save", KEYS, TABLE[:5])], 0, [])


def test_what_is_not_there_sooner_is_computed() -> None:
    manager = Manager([HERE] * 4)
    manager.know(10.0)
    request = made(manager, "sooner")
    assert (manager.calls, request.start, request.loads) == ([("save", KEYS, TABLE[:5])], 0, [])


def test_of_what_lies_in_the_tier_the_head_is_loaded_and_the_rest_is_brought_for_others() -> None:
    manager = Manager([HERE, HERE, BELOW, HERE])
    manager.know(1e-3, 1e-2)
    request = made(manager, "sooner")
    late_s = manager.rates.late_s(1, TIER)
    assert manager.calls == [
        ("prefetch", KEYS[:4], late_s),
        ("onload", KEYS[:2], TABLE[:2]),
        ("save", KEYS[2:], TABLE[2:5]),
    ]
    assert (request.start, request.loads, request.saves) == (2 * SIZE, [manager.load], [manager.save])


def test_a_load_that_nobody_gets_is_over_before_its_blocks_are_anybodys() -> None:
    manager = Manager([HERE] * 4)
    manager.refuses = True
    with pytest.raises(ZeroDivisionError):
        made(manager, "load")
    assert manager.load.calls == ["cancel", "wait_over"]


def test_the_time_of_a_pass_is_learned_unless_it_has_waited_for_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now_s, now_s=100.0)
    monkeypatch.setattr(module, "time", clock)

    def learned(how: str, seconds: float) -> list[Any]:
        manager = Manager([HERE] * 4)
        request = made(manager, how)
        manager.calls.clear()
        assert request.next_chunk() == range(request.start, NUM_TOKENS)
        clock.now_s += seconds
        assert request.next_chunk() is None
        return manager.calls

    assert learned("compute", 0.5) == [(range(NUM_TOKENS), 0.5)]
    assert learned("compute", 0.0) == []  # by a coarse clock
    assert learned("load", 0.5) == []


@pytest.mark.parametrize("how", ["load", "compute"])
def test_a_pass_is_learned_once_however_often_the_end_is_asked_for(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now_s, now_s=100.0)
    monkeypatch.setattr(module, "time", clock)
    manager = Manager([HERE] * 4)
    request = made(manager, how)
    manager.load.over = True
    manager.calls.clear()
    request.next_chunk()
    for _ in range(3):
        clock.now_s += 0.5
        assert request.next_chunk() is None
    assert manager.calls == [(range(request.start, NUM_TOKENS), 0.5)]


def test_without_chunks_all_that_is_left_is_one_pass() -> None:
    request = made(Manager([HERE] * 4), "load")
    left = NUM_TOKENS - 4 * SIZE
    with pytest.raises(ValueError, match=f"max_tokens = {left - 1} must be at least {left}"):
        request.next_chunk(left - 1)
    assert request.next_chunk(left) == range(4 * SIZE, NUM_TOKENS)


@pytest.mark.parametrize(("lost", "start"), [([3, 2], 2), ([], 0)])
def test_a_pass_whose_load_has_failed_is_handed_out_again(lost: list[int], start: int) -> None:
    manager = Manager([HERE] * 4)
    request = made(manager, "load")
    assert request.next_chunk() == range(4 * SIZE, NUM_TOKENS)
    manager.load.fails, manager.lost = True, lost
    assert request.wait() is False
    assert request.next_chunk() == range(start * SIZE, NUM_TOKENS)
    assert (request.loads, manager.calls[-1]) == ([], ("save", KEYS[start:], TABLE[start:5]))
    assert manager.load.calls == manager.save.calls == ["wait_over"]
    manager.load.fails = False
    assert request.wait() is True
    assert request.next_chunk() is None


def test_a_failure_that_the_next_call_finds_is_handed_out_again() -> None:
    manager = Manager([HERE] * 4)
    request = made(manager, "load")
    request.next_chunk()
    manager.load.fails, manager.lost = True, [1]
    assert request.next_chunk() == range(SIZE, NUM_TOKENS)


def test_a_time_that_is_none_is_refused_also_where_nothing_is_waited_for() -> None:
    request = made(Manager([]), "load")
    for call in (request.wait, lambda timeout_s: request.next_chunk(timeout_s=timeout_s)):
        with pytest.raises(ValueError, match="timeout_s = 1e\\+300 must be at most"):
            call(1e300)
        with pytest.raises(TypeError, match="timeout_s is '1'"):
            call("1")  # type: ignore[arg-type]


# ---- in chunks ----
class ChunkLoad(Load):
    """A movement and its handle."""

    def __init__(self, log: list[Any], name: str) -> None:
        super().__init__()
        self.log, self.name = log, name

    def handle(self) -> ChunkLoad:
        return self

    def __repr__(self) -> str:
        return self.name

    def wait(self, timeout_s: float | None) -> None:
        self.log.append(f"wait {self.name}")
        if self.failed:
            raise TransferError("lost")

    def wait_over(self, timeout_s: float | None = None) -> None:
        self.log.append(f"wait_over {self.name}")
        if self.fails:
            self.fails = False
            raise TimeoutError

    def cancel(self) -> None:
        self.log.append(f"cancel {self.name}")


class ChunkManager(Manager):
    """Of which the steps of a prompt are given."""

    def __init__(self, states: list[BlockState], steps: list[Step], log: list[Any]) -> None:
        super().__init__(states)
        self.log = log
        self.takes = True
        self.device_cache.mark_rewritten = lambda ids: log.append(("rewritten", ids))
        self._scheduler = SimpleNamespace(compute_stream=lambda _: "stream", check_started=self._check_started)
        self.meeting = SimpleNamespace(
            next=lambda books, most_blocks: steps.pop(0),
            lost_blocks=set(),
            under_way=[],
            compute_again=lambda: log.append("compute again"),
            share_passes=lambda *given: None,
        )
        self._books = SimpleNamespace(
            rates=self.rates,
            begin_meeting=self._begin,
            end_meeting=lambda meeting: log.append("end"),
            save_chunk=self._save_chunk,
        )

    def _lookup(self, hashes: list[bytes], num_tokens: int, *, joins: bool) -> Any:
        assert joins
        self.log.append(("lookup", len(hashes), num_tokens))
        lease = SimpleNamespace(hashes=hashes[: len(self.states)], states=self.states, num_blocks=len(self.states))
        lease.release = lambda: self.log.append("release")
        return _Lease(lease)

    def _begin(self, lease: Any, table: list[int], pieces: list[Piece], compute: Any, tokens: int, chunk: int) -> Any:
        self.log.append((table, [(piece.start, piece.stop) for piece in pieces], compute, tokens, chunk))
        return self.meeting

    def _save_chunk(self, written: list[int], hashes: list[bytes], ids: list[int], loads: Any, compute: Any) -> Any:
        self.device_cache.mark_rewritten(written)
        self.log.append(("takes", len(hashes)))
        assert compute == "stream"
        return self.blocks_full(hashes, ids, layerwise=True, computed_from=loads) if self.takes else None

    def _check_started(self, save: Any) -> Any:
        if self.refuses:
            raise TransferError("no copy could begin")
        return save

    def onload(self, hashes: list[bytes], ids: list[int]) -> Any:
        return ChunkLoad(self.log, "load")

    def blocks_full(self, hashes: list[bytes], ids: list[int], **options: Any) -> Any:
        self.log.append((hashes, ids, options["layerwise"], list(options["computed_from"])))
        return ChunkLoad(self.log, f"save {ids}")

    def observe_prefill(self, tokens: range, seconds: float) -> None:
        self.log.append((tokens, seconds))


class _Lease:
    def __init__(self, lease: Any) -> None:
        self._lease = lease

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)

    def __enter__(self) -> Any:
        return self._lease

    def __exit__(self, *_: object) -> None:
        pass


CHUNK = 2 * SIZE
LONG_KEYS = [b"%d" % number for number in range(7)]
LONG_TABLE = [9, 2, 11, 5, 30, 31, 7, 8]
LONG_TOKENS = 7 * SIZE + 3


def chunked(manager: ChunkManager, how: str = "sooner") -> ChunkedRequest:
    return ChunkedRequest(manager, LONG_KEYS, LONG_TOKENS, LONG_TABLE, SIZE, how, CHUNK)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of what passes take."""
    made = SimpleNamespace(monotonic=lambda: made.now_s, now_s=100.0)
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(chunks, "change", lambda books, function: function())
    return made


def piece_of(start: int, stop: int) -> Piece:
    return Piece(start, stop)


def test_a_chunk_whose_save_cannot_begin_is_handed_out_by_the_next_call(clock: Any) -> None:
    manager = ChunkManager([], [], [])
    request = chunked(manager)
    assert request.next_chunk() == range(CHUNK)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(manager, "blocks_full", lambda *_, **__: 1 // 0)  # a policy raises
        request.next_chunk(SIZE)
    assert request.next_chunk(SIZE) == range(CHUNK, CHUNK + SIZE)


def test_a_chunk_of_whose_save_no_copy_could_begin_raises_and_has_no_save(clock: Any) -> None:
    manager = ChunkManager([], [], [])
    request = chunked(manager)
    assert request.next_chunk() == range(CHUNK) and request.saves
    manager.refuses = True
    with pytest.raises(TransferError, match="no copy could begin"):
        request.next_chunk()
    assert request.saves == []
    manager.refuses = False
    assert request.next_chunk() == range(CHUNK, 2 * CHUNK)


@pytest.fixture
def failing(clock: Any) -> tuple[ChunkManager, ChunkLoad]:
    """The first chunk reads a load. It fails when the call for the second one has looked for that, so the step names
    it no more."""
    log: list[Any] = []
    load = ChunkLoad(log, "load")
    steps = [Step(piece_of(0, 2), (load,)), Step(piece_of(2, 4)), Step(piece_of(0, 2))]  # type: ignore[arg-type]
    manager = ChunkManager([BELOW] * 4, steps, log)

    def step(books: Any, most_blocks: int | None) -> Step:
        load.failed = len(steps) == 2
        return steps.pop(0)

    manager.meeting.next = step
    return manager, load


def test_a_chunk_is_computed_from_the_loads_of_all_chunks_before_it(failing: tuple[ChunkManager, ChunkLoad]) -> None:
    """Or what is wrong would be saved, and be found by others."""
    manager, load = failing
    request = chunked(manager)
    for start, ids in ((0, [9, 2]), (CHUNK, [11, 5])):
        assert request.next_chunk() == range(start, start + CHUNK)
        assert manager.log[-1] == (LONG_KEYS[start // SIZE :][:2], ids, True, [load])
    assert load.failed and request.loads == []


def test_chunks_begin_again_behind_the_saves_of_all_passes_and_without_them(
    failing: tuple[ChunkManager, ChunkLoad],
) -> None:
    """The first one was not run: nobody would mark its layers any more."""
    manager, _ = failing
    request = chunked(manager)
    request.next_chunk()
    request.saves[0].unmarked_layers = range(1)  # type: ignore[misc]
    request.next_chunk()
    manager.log.clear()
    assert request.next_chunk() == range(CHUNK)
    ends = ["wait load", "wait_over load", "cancel save [9, 2]", "wait_over save [9, 2]", "wait_over save [11, 5]"]
    assert manager.log[: len(ends) + 1] == [*ends, "compute again"]
    saves = request.saves
    request.cancel()
    assert request.saves == saves and request.loads == []


@pytest.mark.parametrize("how", ["cancelled", "left"])
def test_what_begins_until_it_has_ended_is_among_its_loads(clock: Any, how: str) -> None:
    log: list[Any] = []
    manager, last = ChunkManager([HERE] * 4, [Step(piece_of(0, 2))], log), ChunkLoad(log, "last")
    manager._books.end_meeting = lambda meeting: meeting.under_way.append(last)
    with chunked(manager) as request:
        assert request.next_chunk() == range(CHUNK)
        if how == "cancelled":
            request.cancel()
    assert list(request.loads) == [last]


@pytest.mark.parametrize("chunk_tokens", [None, CHUNK])
@pytest.mark.parametrize("over", ["no", "in the middle", "before it", "failed"])
def test_a_pass_waits_for_loads_that_are_not_over_when_it_begins(
    clock: Any, over: str, chunk_tokens: int | None
) -> None:
    log: list[Any] = []
    manager = ChunkManager([HERE] * 4, [], log)
    if chunk_tokens is None:
        request: Request = Request(manager, LONG_KEYS, LONG_TOKENS, LONG_TABLE, SIZE, "load")
    else:
        request = chunked(manager, "load")
    load: Any = request.loads[0]
    load.over, load.failed = over in ("before it", "failed"), over == "failed"
    beside = manager.rates.begin_pass(SIZE, clock.now_s, waits=False)
    chunk = request.next_chunk()
    assert chunk is not None
    if over == "failed":
        assert chunk_tokens is None or chunk.start == 0  # of a chunk it was seen, and none of it is left
    load.over = over != "no"
    clock.now_s += 1.0
    waits = over in ("no", "in the middle") or (over == "failed" and chunk_tokens is None)
    share = None if waits else SIZE / (SIZE + len(chunk))
    assert manager.rates.share_of(beside, SIZE, 1.0) == share
    with contextlib.suppress(TransferError):
        request.next_chunk()
    assert ((chunk, pytest.approx(len(chunk) / (SIZE + len(chunk)))) in log) == (not waits)


@pytest.mark.parametrize("waits", [False, True])
def test_others_know_whether_a_pass_meanwhile_had_to_wait_for_loads(clock: Any, waits: bool) -> None:
    log: list[Any] = []
    loads = (ChunkLoad(log, "load"),) if waits else ()
    manager = ChunkManager([HERE] * 4, [Step(piece_of(0, 2), loads)], log)  # type: ignore[arg-type]
    begun = manager.rates.begin_pass(SIZE, clock.now_s, waits=False)
    assert chunked(manager).next_chunk() == range(CHUNK)
    assert manager.rates.share_of(begun, SIZE, 1.0) == (None if waits else SIZE / (SIZE + CHUNK))


def test_a_pass_beside_one_that_had_to_wait_says_nothing_of_the_model(clock: Any) -> None:
    log: list[Any] = []
    manager = ChunkManager([], [], log)
    request = chunked(manager)
    assert request.next_chunk() == range(CHUNK)
    clock.now_s += 1.0
    manager.rates.begin_pass(SIZE, clock.now_s, waits=True)
    clock.now_s += 1.0
    assert request.next_chunk() == range(CHUNK, 2 * CHUNK)
    assert not [entry for entry in log if isinstance(entry, tuple) and isinstance(entry[0], range)]
    clock.now_s += 5.0
    assert request.next_chunk() == range(2 * CHUNK, 3 * CHUNK)
    assert (range(CHUNK, 2 * CHUNK), 5.0) in log


@pytest.mark.parametrize("chunk_tokens", [None, CHUNK])
@pytest.mark.parametrize("how", ["cancelled", "raises", "left before it", "left behind it"])
def test_beside_a_prompt_that_is_aborted_the_model_is_not_taken_for_quicker(
    clock: Any, monkeypatch: pytest.MonkeyPatch, how: str, chunk_tokens: int | None
) -> None:
    """A pass of both takes two seconds, and one of the other alone takes one."""
    log: list[Any] = []
    manager = ChunkManager([], [], log)
    monkeypatch.setattr(ChunkLoad, "unmarked_layers", range(4 if how == "left before it" else 0))
    other = chunked(manager)

    def learned_behind(seconds: float) -> list[float]:
        clock.now_s += seconds
        other.next_chunk()
        return [entry[1] for entry in log if isinstance(entry[0], range)]

    assert learned_behind(0.0) == []
    if chunk_tokens is None:
        request: Request = Request(manager, LONG_KEYS[:2], CHUNK, LONG_TABLE, SIZE, "compute")
    else:
        request = chunked(manager)
    with contextlib.suppress(ZeroDivisionError), request:
        request.next_chunk()
        clock.now_s += 0.5
        if how == "cancelled":
            request.cancel()
        if how == "raises":
            raise ZeroDivisionError
    if how == "left behind it":
        assert learned_behind(1.5) == [1.0]
        assert learned_behind(1.0) == [1.0] * 2
    else:
        assert learned_behind(0.5) == []
        assert learned_behind(1.0) == [1.0]


@pytest.mark.parametrize("is_saved", [False, True])
def test_left_behind_a_pass_that_saves_nothing_it_counts_as_aborted(clock: Any, is_saved: bool) -> None:
    """All its blocks are in host memory, so that nothing says whether the pass was run."""
    log: list[Any] = []
    manager = ChunkManager([] if is_saved else [HERE] * 4, [] if is_saved else [Step(piece_of(0, 2))], log)
    other = manager.rates.begin_pass(CHUNK, clock.now_s, waits=False)
    with chunked(manager) as request:
        request.next_chunk()
    assert manager.rates.share_of(other, CHUNK, 1.0) == (0.5 if is_saved else None)


def test_a_prompt_goes_from_chunk_to_chunk(clock: Any) -> None:
    log: list[Any] = []
    load, slow = ChunkLoad(log, "load"), ChunkLoad(log, "slow")
    steps = [Step(piece_of(0, 2)), Step(leaving=slow), *[Step(None, (load,))] * 3]  # type: ignore[arg-type]
    manager = ChunkManager([HERE, BELOW, HERE, HERE], steps, log)
    request = chunked(manager)
    pieces = [(0, 2), (2, 3), (3, 4)]  # nothing is known of the link
    began = [("lookup", 7, LONG_TOKENS), (LONG_TABLE[:4], pieces, "stream", LONG_TOKENS, CHUNK)]
    assert (log, request.start, request.loads, request.saves) == (began, 0, [], [])
    log.clear()

    assert request.next_chunk() == range(CHUNK)
    assert log == [("rewritten", [9, 2]), ("takes", 1), ([b"1"], [2], True, [])]
    assert (request.loads, repr(request.saves)) == ([], "[save [2]]")
    log.clear()
    clock.now_s += 0.5
    slow.fails = True
    for _ in range(2):  # what it took is learned once
        with contextlib.suppress(TimeoutError):
            steps.insert(0, Step(leaving=slow))  # type: ignore[arg-type]
            steps.insert(0, Step(leaving=slow))  # type: ignore[arg-type]
            request.next_chunk()
    assert log[0] == (range(CHUNK), 0.5)
    assert log.count((range(CHUNK), 0.5)) == 1
    assert log[1] == "wait_over slow"
    assert log[-2:] == [("takes", 2), ([b"4", b"5"], [30, 31], True, [load])]
    assert (request.start, request.loads) == (4 * SIZE, [load])
    log.clear()
    clock.now_s += 0.5

    manager.takes = False
    assert request.next_chunk(10) == range(6 * SIZE, 6 * SIZE + 10)
    assert (log, request.saves) == ([("rewritten", [7])], [])
    log.clear()
    assert request.next_chunk(6) == range(6 * SIZE + 10, 7 * SIZE)
    assert (log, request.saves) == ([("rewritten", [7]), ("takes", 1)], [])
    log.clear()
    assert request.next_chunk() == range(7 * SIZE, LONG_TOKENS)
    assert log == [("rewritten", [8])]  # the last block, which is not full
    log.clear()
    assert request.next_chunk() is None
    assert log == ["wait load", "end", "release"]
    assert (request.loads, request.saves) == ([], [])
    assert request.next_chunk() is None
    assert log[3:] == []


def test_what_a_failed_load_has_spoilt_is_handed_out_again(clock: Any) -> None:
    log: list[Any] = []
    load = ChunkLoad(log, "load")
    steps = [Step(None, (load,)), Step(piece_of(0, 2)), Step(piece_of(2, 4))]  # type: ignore[arg-type]
    manager = ChunkManager([HERE] * 4, steps, log)
    request = chunked(manager)
    assert request.next_chunk(5) == range(4 * SIZE, 4 * SIZE + 5)
    assert request.next_chunk(SIZE) == range(4 * SIZE + 5, 5 * SIZE + 5)
    [save] = request.saves
    save.unmarked_layers = range(2)
    load.failed = True
    manager.meeting.lost_blocks = {3}
    log.clear()
    assert request.next_chunk() == range(CHUNK)
    assert log == [
        "wait load",
        "wait_over load",
        "cancel save [30]",
        "wait_over save [30]",
        "compute again",
        ("rewritten", [9, 2]),
    ]
    log.clear()
    assert request.next_chunk() == range(2 * SIZE, 4 * SIZE)  # and its blocks that were lost are saved
    assert log == [("rewritten", [11, 5]), ("takes", 1), ([b"3"], [5], True, [])]


@pytest.mark.parametrize(("lost", "start"), [([3, 2], 2), ([], 0)])
def test_a_prefix_that_is_loaded_as_a_whole_is_computed_from_its_first_loss(
    clock: Any, lost: list[int], start: int
) -> None:
    log: list[Any] = []
    manager = ChunkManager([HERE] * 4, [], log)
    request = chunked(manager, "load")
    assert request.next_chunk() == range(4 * SIZE, 6 * SIZE)
    assert [repr(load) for load in request.loads] == ["load"]
    manager.lost = lost
    made: Any = request.loads[0]
    made.failed = True
    assert request.wait() is False
    assert request.loads == []
    log.clear()
    assert request.next_chunk() == range(start * SIZE, start * SIZE + CHUNK)
    assert log[0] == ("rewritten", LONG_TABLE[start : start + 2])


def test_a_request_that_is_cancelled_ends_what_it_has_begun(clock: Any) -> None:
    log: list[Any] = []
    load, other = ChunkLoad(log, "load"), ChunkLoad(log, "other")
    manager = ChunkManager([HERE] * 4, [Step(None, (load,))] * 2, log)  # type: ignore[arg-type]
    request = chunked(manager)
    for _ in range(2):
        request.next_chunk()
    manager.meeting.under_way = [other]
    log.clear()
    request.cancel()
    assert log == ["end", "release", "cancel load", "cancel other", "cancel save [30, 31]", "cancel save [7]"]
    with pytest.raises(ClosedError):
        request.next_chunk()
    with request:
        pass
    assert log[6:] == []


def test_behind_a_failure_what_comes_behind_the_prefix_is_computed_again(clock: Any) -> None:
    log: list[Any] = []
    load = ChunkLoad(log, "load")
    steps = [Step(None, (load,)), Step(piece_of(0, 2)), Step()]  # type: ignore[arg-type]
    request = chunked(ChunkManager([HERE] * 4, steps, log))
    assert request.next_chunk() == range(4 * SIZE, 6 * SIZE)
    load.failed = True
    assert [request.next_chunk() for _ in range(2)] == [range(CHUNK), range(4 * SIZE, 6 * SIZE)]


def test_one_of_several_loads_that_fails_is_enough(clock: Any) -> None:
    log: list[Any] = []
    loads = ChunkLoad(log, "first"), ChunkLoad(log, "second")
    steps = [Step(None, loads), Step(piece_of(0, 2)), Step()]  # type: ignore[arg-type]
    request = chunked(ChunkManager([HERE] * 4, steps, log))
    assert request.next_chunk() == range(4 * SIZE, 6 * SIZE)
    loads[1].failed = True
    assert [request.next_chunk() for _ in range(2)] == [range(CHUNK), range(4 * SIZE, 6 * SIZE)]


def test_a_load_that_was_cancelled_is_a_load_that_failed(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    load = ChunkLoad(log, "load")
    request = chunked(ChunkManager([HERE] * 4, [Step(None, (load,))], log))  # type: ignore[arg-type]
    request.next_chunk()

    def refuse(timeout_s: float | None) -> None:
        raise CancelledError("cancelled")

    monkeypatch.setattr(load, "wait", refuse)
    assert request.wait() is False
    assert log[-1] == "compute again"


@pytest.mark.parametrize(
    ("left_s", "waited_s", "end"),
    [(None, 2.0, "late"), (3.0, 2.0, "late"), (2.0, 2.0, "late"), (1.0, 1.0, "call again")],
)
def test_a_chunk_waits_for_a_tier_until_either_time_is_over(
    clock: Any, monkeypatch: pytest.MonkeyPatch, left_s: float | None, waited_s: float, end: str
) -> None:
    request: Any = chunked(ChunkManager([HERE] * 4, [], []))
    log: list[Any] = []
    reading = SimpleNamespace(wait=log.append)  # which has not come
    monkeypatch.setattr(chunks, "change", lambda books, function: function())
    request._meeting = SimpleNamespace(read_late=lambda late: log.append(late is reading))
    step, deadline = SimpleNamespace(reading=reading, left_s=2.0), SimpleNamespace(left_s=lambda: left_s)
    if end == "late":
        request._wait_for_reading(step, deadline)
        assert log == [waited_s, True]
    else:
        with pytest.raises(TimeoutError, match="had not come from the tier within timeout_s; call again"):
            request._wait_for_reading(step, deadline)
        assert log == [waited_s]


# ---- what is asked for ----
def asked(block_size: int, chunk_tokens: int, how: Any = "compute", tokens: int = 5) -> tuple[Any, Any]:
    log: list[Any] = []
    manager: Any = ChunkManager([HERE], [], log)
    manager.device_cache.spec.block_size, manager.device_cache.num_blocks = block_size, 64
    manager.device_cache.is_ring = False

    def block_hashes(tokens: Any, *, request_salt: bytes) -> list[bytes]:
        log.append((list(tokens), request_salt))
        return LONG_KEYS[: len(tokens) // block_size]

    manager.block_hashes = block_hashes
    return make_request(manager, range(tokens), LONG_TABLE[:5], b"salt", chunk_tokens, how), log


def test_chunks_are_of_whole_blocks_of_any_size() -> None:
    request, log = asked(1, 1)
    assert isinstance(request, ChunkedRequest)
    assert log[0] == ([0, 1, 2, 3, 4], b"salt")
    for block_size, wrong in ((4, 0), (4, -4), (4, 2), (4, 6), (1, 0)):
        with pytest.raises(ValueError, match=f"chunk_tokens = {wrong} must be a positive multiple of the block size"):
            asked(block_size, wrong)
    with pytest.raises(ValueError, match="how = 'now' must be one of 'load', 'compute', 'sooner'"):
        asked(4, 4, "now")


def test_each_hash_needs_a_block() -> None:
    assert checked_targets([3, 1], 2, 4) == [3, 1]
    for ids in ([3], [3, 1, 2]):
        with pytest.raises(ValueError, match=f"hashes has 2 blocks, device_block_ids has {len(ids)}"):
            checked_targets(ids, 2, 4)
    with pytest.raises(IndexError):
        checked_targets([3, 4], 2, 4)


def test_a_time_that_is_none_is_refused_where_chunks_wait_for_nothing(clock: Any) -> None:
    request = chunked(ChunkManager([HERE] * 4, [], []))
    for call in (request.wait, lambda timeout_s: request.next_chunk(timeout_s=timeout_s)):
        with pytest.raises(ValueError, match="timeout_s = 1e\\+300 must be at most"):
            call(1e300)


def test_each_token_needs_a_block() -> None:
    assert full_table([3, 1], 2 * SIZE, SIZE) == [3, 1]
    with pytest.raises(ValueError, match=f"device_block_ids has 2 blocks; {2 * SIZE + 1} tokens need 3"):
        full_table([3, 1], 2 * SIZE + 1, SIZE)
