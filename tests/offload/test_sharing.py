"""Prompts that share passes of the model: what is known of the others, and what follows from it."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv.offload.chunks import blocks_of_passes
from paddle_kv.offload.passes import WholePass
from paddle_kv.offload.pieces import Piece
from paddle_kv.offload.rates import MOST_BEGUN, MOST_RUNNING, Rates
from paddle_kv.offload.request import Request
from paddle_kv.offload.waits import Waits
from paddle_kv.tiers import FilesEngine
from tests.offload.chunk_rig import SIZE, WAIT_S, ChunkRig, contents, know
from tests.offload.meeting_rig import BELOW, BLOCKS, HERE, Bench, states_of

CHUNK = 4 * SIZE


# ---- what is known of the others ----
@pytest.fixture
def rates() -> Rates:
    made = Rates(1000, SIZE)
    made.set_prefill(0.01)  # a second for 100 tokens
    return made


def test_what_began_together_is_one_pass(rates: Rates) -> None:
    rates.begin_pass(7, 0.5, waits=False)
    rates.begin_pass(100, 1.0 - 0.09, waits=True)
    own = rates.begin_pass(100, 1.0, waits=False)
    rates.begin_pass(50, 1.0 + 0.09, waits=False)
    rates.begin_pass(11, 1.5, waits=False)
    assert rates.end_pass(own, 100, 2.5) == WholePass(250, 3)
    assert (own.over_s, own.is_aborted) == (3.5, False)
    assert rates.end_pass(own, 100, 0.8) == WholePass(100, 1)  # it was quicker than known


def test_the_more_began_the_longer_it_takes_to_begin_with_them(rates: Rates) -> None:
    """Each prompt is asked some time behind the one before it."""
    begun = [rates.begin_pass(100, 1.0 + 0.09 * number, waits=False) for number in range(10)]
    for one in (begun[0], begun[5], begun[-1]):
        assert rates.end_pass(one, 100, 20.0) == WholePass(1000, 10)
    assert rates.begun_pass(100, 1.9) == WholePass(1100, 11)
    assert rates.begun_pass(100, 2.1) == WholePass(100, 1)


def test_a_prompt_that_pauses_behind_its_pass_shared_it_with_nobody(rates: Rates) -> None:
    own = rates.begin_pass(100, 1.0, waits=False)
    for number in range(300):  # by then it is forgotten
        rates.begin_pass(100, 2.0 + number, waits=False)
        assert rates.end_pass(own, 100, 1.0 + number) == WholePass(100, 1)


def test_what_was_over_before_is_another_pass(rates: Rates) -> None:
    """Of short passes many fit into a tenth of a long one: of prompts that have ended, or of those that go on."""
    short = [rates.begin_pass(1, 1.0, waits=False) for _ in range(10)]
    for one in short[:-1]:
        assert rates.end_pass(one, 1, 0.01) == WholePass(10, 10)
    rates.abort_pass(short[-1])
    assert rates.begun_pass(100, 1.02) == WholePass(100, 1)
    assert rates.running_pass(1.02) == WholePass(0, 0)
    own = rates.begin_pass(100, 1.02, waits=False)
    assert rates.end_pass(own, 100, 1.0) == WholePass(100, 1)


def test_prompts_that_went_on_with_a_longer_pass_count_once(rates: Rates) -> None:
    before = [rates.begin_pass(4, 0.98, waits=False) for _ in range(3)]
    own = rates.begin_pass(100, 1.0, waits=False)
    for number, one in enumerate(before):  # each says so when it is asked for the next one
        rates.end_pass(one, 4, 0.021 + 0.001 * number)
        rates.begin_pass(4, 1.001 + 0.001 * number, waits=False)
    assert rates.end_pass(own, 100, 1.2) == WholePass(112, 4)


def test_what_is_cancelled_of_a_pass_runs_no_more(rates: Rates) -> None:
    begun = [rates.begin_pass(100, 1.0, waits=False) for _ in range(4)]
    rates.abort_pass(begun[-1])
    rates.end_pass(begun[0], 100, 0.5)
    assert rates.running_pass(1.6) == WholePass(200, 2)


def test_far_behind_in_a_prompt_passes_take_longer() -> None:
    rates = Rates(1000, SIZE)
    rates.set_prefill(0.001, 0.0001)  # 0.6 s for 100 tokens, and 2.2 s for 200
    rates.begin_pass(100, 1.0, waits=False)
    assert rates.begun_pass(100, 1.21) == WholePass(200, 2)
    assert rates.begun_pass(100, 1.23) == WholePass(100, 1)
    waits = Waits(8, 200, CHUNK, 4)
    waits.share_passes(range(100, 116), WholePass(48, 3))
    known = rates.snapshot()
    assert waits._beside_s(known) == pytest.approx(2 * known.prefill_s(100, 116))
    slowed = waits._with_others(known)
    assert (slowed.base_s, slowed.slope_s) == (3 * 0.001, pytest.approx(3 * 0.0001))


def test_more_prompts_than_are_remembered(rates: Rates) -> None:
    begun = [rates.begin_pass(100, 1.0, waits=False) for _ in range(MOST_BEGUN + 50)]
    assert rates.end_pass(begun[0], 100, 500.0) == WholePass(100 * (MOST_BEGUN + 1), MOST_BEGUN + 1)
    assert rates.end_pass(begun[-1], 100, 500.0) == WholePass(100 * MOST_BEGUN, MOST_BEGUN)


def test_what_was_noted_in_another_order_than_it_began_counts_itself(rates: Rates) -> None:
    own = rates.begin_pass(100, 2.0, waits=False)
    rates.begin_pass(30, 1.0, waits=False)  # of another thread
    assert rates.end_pass(own, 100, 1.0) == WholePass(100, 1)


def test_by_the_time_that_a_pass_took_where_nothing_is_known_of_the_model() -> None:
    rates = Rates(1000, SIZE)
    begun = [rates.begin_pass(100, at_s, waits=False) for at_s in (1.0, 1.09, 1.2)]
    assert rates.end_pass(begun[0], 100, 1.0) == WholePass(200, 2)
    assert rates.running_pass(1.3) == WholePass(0, 0)
    assert rates.begun_pass(100, 1.2) == WholePass(100, 1)


def test_what_runs_still_is_the_last_pass_of_all_that_began_with_it(rates: Rates) -> None:
    assert rates.running_pass(0.0) == WholePass(0, 0)
    rates.begin_pass(40, 0.5, waits=False)
    for number in range(3):
        rates.begin_pass(100, 1.0 + 0.09 * number, waits=number == 1)
    end_s = 1.18 + 3 * MOST_RUNNING
    assert rates.running_pass(1.18) == rates.running_pass(end_s - 1e-6) == WholePass(300, 3)
    assert rates.running_pass(end_s + 1e-6) == WholePass(0, 0)


@pytest.mark.parametrize("end", ["end_pass", "abort_pass"])
def test_of_what_has_ended_nothing_runs(rates: Rates, end: str) -> None:
    begun = rates.begin_pass(100, 1.0, waits=False)
    assert rates.running_pass(1.5) == WholePass(100, 1)
    if end == "end_pass":
        rates.end_pass(begun, 100, 0.5)
    else:
        rates.abort_pass(begun)
    assert rates.running_pass(1.5) == WholePass(0, 0)
    rates.begin_pass(30, 1.6, waits=False)
    assert rates.running_pass(1.7) == WholePass(30, 1)


def test_a_pass_of_which_a_prompt_had_little_is_no_measure_of_the_next_ones(rates: Rates) -> None:
    """What the others left of it: the next one is shared equally, as far as one knows."""
    waits = Waits(8, 200, CHUNK, 4)
    assert waits.times_as_long == 1.0
    waits.share_passes(range(1), WholePass(8192, 2))
    assert waits.times_as_long == 2.0
    waits.share_passes(range(60), WholePass(90, 2))
    assert waits.times_as_long == 1.5
    known = rates.snapshot()
    assert waits.pass_s(known) == pytest.approx(rates.snapshot().prefill_s(32, 48) + 0.3)
    assert waits.pass_s(known, Piece(2, 5)) == pytest.approx(known.prefill_s(8, 20) + 0.3)


@pytest.mark.parametrize("block_size", [1, 4, 16, 512])
def test_blocks_of_as_few_passes_as_can_be(block_size: int) -> None:
    """Of which none is far from full."""
    for tokens in range(1, 3 * block_size + 2):
        found = blocks_of_passes(tokens, block_size)
        passes = -(-found * block_size // tokens)
        assert found >= 1 and found * block_size >= 0.9 * passes * tokens
        for fewer in range(1, passes):
            assert fewer * tokens // block_size * block_size < 0.9 * fewer * tokens


# ---- a meeting ----
@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_of_a_piece_as_much_is_computed_as_a_pass_takes(bench: Bench) -> None:
    """And the rest of it is loaded, if that is sooner by then."""
    bench.know(1.0, 0.1)
    meeting = bench.meeting([HERE] * 3 * BLOCKS)
    step = bench.next(meeting, 1)
    assert step.piece is not None and (step.piece.start, step.piece.stop) == (0, 1)
    assert meeting.num_computed_blocks == 1
    bench.know(1e-6, 1.0)
    bench.next(meeting, 1)
    assert bench.loaded[-1] == [1, 3 * BLOCKS - 1]
    assert states_of(meeting) == ["computed", "loading"]


@pytest.mark.parametrize("state", ["below", "reading"])
def test_what_of_a_piece_lies_in_the_tier_is_counted(bench: Bench, state: str) -> None:
    bench.know(1e-3, 0.1)
    states = [BELOW, HERE, BELOW, *[HERE] * (2 * BLOCKS - 3)]
    meeting = bench.meeting(states)
    first = meeting.line.pieces[0]
    assert first.tier_blocks == 2
    meeting._waits.for_rest = lambda *_, **__: False  # type: ignore[method-assign]
    meeting.line.set(first, type(first.state)(state))
    assert bench.next(meeting, 1).piece is not first
    assert [piece.tier_blocks for piece in meeting.line.pieces[:2]] == [1, 1]
    assert (meeting.line.pieces[1].start, meeting.line.pieces[1].state.value) == (1, state)


def test_what_is_left_comes_as_one_where_others_are_computed_meanwhile(bench: Bench) -> None:
    bench.know(1.0, 1.0)
    chunk = BLOCKS * bench.rates.block_tokens
    for sharing, begin in ((1, 2 * BLOCKS), (4, 0)):
        meeting = bench.meeting([HERE] * 3 * BLOCKS)
        meeting.share_passes(range(chunk), WholePass(sharing * chunk, sharing))
        assert meeting.load_next(bench, whole=True)  # type: ignore[arg-type]
        assert bench.loaded[-1] == [begin, 3 * BLOCKS - 1]
        meeting.end()


def test_the_model_comes_later_to_what_stands_behind_passes_over_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the beginning of a piece: to wait for it costs the others as much as this prompt."""
    monkeypatch.setattr(bench.rates, "take_probe", lambda name: False)
    meeting = bench.meeting([HERE] * 2 * BLOCKS)
    last = meeting.line.pieces[-1]
    for sharing in (1, 3, 4):  # a block is loaded in so many times the time of computing it
        meeting.share_passes(range(SIZE), WholePass(sharing * SIZE, sharing))
        for load_s, comes in ((sharing + 0.9, True), (sharing + 1.1, False)):
            bench.know(load_s, 1.0)
            assert meeting._comes_in_time(last) is comes


def test_what_was_just_begun_for_a_pass_is_waited_for(bench: Bench) -> None:
    """Two estimates of one time are never the same."""
    bench.know(1.0, 1.0)
    meeting = bench.meeting([HERE] * BLOCKS)
    meeting._waits.for_rest = lambda *_, **__: True  # type: ignore[method-assign]
    meeting._waits.for_one = lambda *_: False  # type: ignore[method-assign]
    step = bench.next(meeting)
    assert (step.piece, step.leaving, len(step.loads)) == (None, None, 1)


def test_what_is_loading_already_is_asked_for_again(bench: Bench) -> None:
    bench.know(1.0, 1.0)
    meeting = bench.meeting([HERE] * 2 * BLOCKS)
    assert meeting.load_next(bench, whole=False)  # type: ignore[arg-type]
    meeting._waits.for_rest = lambda *_, **__: True  # type: ignore[method-assign]
    meeting._waits.for_one = lambda *_: False  # type: ignore[method-assign]
    assert bench.next(meeting).leaving is not None
    assert states_of(meeting) == ["loading", "cancelled"]


def test_of_a_piece_that_is_measured_as_much_is_handed_out_as_is_computed(bench: Bench) -> None:
    bench.know(1.0, 0.1)
    meeting = bench.meeting([HERE] * 2 * BLOCKS)
    meeting._measured = meeting.line.pieces[0]
    step = bench.next(meeting, 1)
    assert step.piece is not None and (step.piece.start, step.piece.stop) == (0, 1)
    assert states_of(meeting)[:2] == ["computed", "waiting"]


@pytest.mark.parametrize(("most", "stop"), [(1, 1), (3, 3), (BLOCKS, BLOCKS), (2 * BLOCKS, BLOCKS), (None, BLOCKS)])
def test_the_pass_that_follows_a_tier_is_as_long_as_what_it_computes(bench: Bench, most: int | None, stop: int) -> None:
    """It begins the later the shorter it is."""
    bench.know(1.0, 1.0)
    meeting, asked = bench.meeting([HERE] * 2 * BLOCKS), []
    loading = SimpleNamespace(unread={1}, failed=False)
    followed = meeting.line.pieces[1]
    followed.due_s, followed.begin_s, followed.late_s = 1e9, 0.0, 2e9
    meeting._followed[followed], meeting.moving[followed] = None, loading  # type: ignore[assignment]
    meeting._waits.pass_s = lambda rates, piece: float(bool(asked.append(piece)))  # type: ignore
    meeting._most_blocks = 2 * BLOCKS if most is None else most
    meeting._too_early(meeting.line.pieces[0], [loading])  # type: ignore[list-item]
    assert (asked[0].start, asked[0].stop) == (0, stop)


@pytest.mark.parametrize(("most", "stop"), [(1, 1), (3, 3), (BLOCKS, BLOCKS), (2 * BLOCKS, BLOCKS), (None, BLOCKS)])
def test_a_load_of_the_rest_is_weighed_against_what_the_pass_computes(
    bench: Bench, most: int | None, stop: int
) -> None:
    bench.know(1.0, 1.0)
    meeting, asked = bench.meeting([HERE] * 2 * BLOCKS), []
    meeting._waits.for_rest = lambda rates, *given, **_: asked.append(given)  # type: ignore
    bench.next(meeting, most)
    assert asked[0] == (0, stop, 2 * BLOCKS)


@pytest.mark.parametrize("layers", [1, 64])
def test_a_pass_hides_a_load_but_for_its_first_layer(rates: Rates, layers: int) -> None:
    """Of one layer nothing: 11.2 s for all of three prompts, against 4 s for each, and 16 s more for this one."""
    rates.set_prefill(1.0 / SIZE)
    rates.set_load("onload", 1000 / 1.4)
    waits = Waits(8, 9 * SIZE, 8 * SIZE, layers)
    waits.share_passes(range(8 * SIZE), WholePass(24 * SIZE, 3))
    none = {"tier_blocks": 0, "behind_blocks": 0, "link_wait_s": 0.0, "tier_wait_s": 0.0, "others_s": 0.0}
    assert waits.for_rest(rates.snapshot(), 0, 4, 8, **none) is (layers > 1)  # type: ignore[arg-type]


# ---- a server ----
@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ChunkRig]:
    made = ChunkRig(FilesEngine({tmp_path: 1 << 24}))
    yield made
    made.close()


PROMPTS = [[number] * (4 * CHUNK + 3) for number in range(3)]
TABLES = [list(range(first, first + 17)) for first in (0, 20, 40)]


def begin(rig: ChunkRig, number: int) -> Any:
    return rig.manager.request(PROMPTS[number], TABLES[number], chunk_tokens=CHUNK)


def sharing(request: Any) -> float:
    found: float = request._meeting._waits.times_as_long
    return found


def pieces(request: Any) -> list[Piece]:
    found: list[Piece] = request._meeting.line.pieces
    return found


def shared(request: Any) -> tuple[range, WholePass]:
    found: tuple[range, WholePass] = request._meeting._waits._shared
    return found


def known(rig: ChunkRig, compute_s: float) -> None:
    for prompt, table in zip(PROMPTS, TABLES, strict=True):
        rig.prefill(prompt, table, chunk_tokens=CHUNK)
    rig.check_books()
    know(rig.manager, 1e6, compute_s)  # nothing comes in time


def test_a_prompt_knows_with_whom_its_passes_are_shared(rig: ChunkRig) -> None:
    known(rig, 100.0)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(begin(rig, number)) for number in (0, 1))
        assert (sharing(first), sharing(second)) == (1.0, 1.0)
        assert first.next_chunk(timeout_s=WAIT_S) == range(CHUNK)
        assert second.next_chunk(SIZE, timeout_s=WAIT_S) == range(SIZE)
        assert [piece.stop for piece in pieces(second)[:2]] == [1, 4]
        assert (sharing(first), sharing(second)) == (1.0, 2.0)  # by what has just begun
        late = stack.enter_context(begin(rig, 2))
        assert sharing(late) == 1.0 + 5 / 4  # by what is running
        assert late.next_chunk(timeout_s=WAIT_S) == range(CHUNK)
        assert sharing(late) == 1.0 + 5 / 4
        for request in (first, second, late):
            request.next_chunk(timeout_s=WAIT_S)
        for request in (first, second, late):
            request.cancel()


def test_a_prompt_has_no_more_of_a_pass_than_its_chunk_and_its_tokens(rig: ChunkRig) -> None:
    short = PROMPTS[2][: 2 * SIZE + 3]
    known(rig, 100.0)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(begin(rig, number)) for number in (0, 1))
        assert first.next_chunk(SIZE + 2, timeout_s=WAIT_S) == range(SIZE + 2)
        assert [piece.stop for piece in pieces(first)[:2]] == [3, 4]  # three blocks in two passes
        assert second.next_chunk(9 * CHUNK, timeout_s=WAIT_S) == range(CHUNK)
        assert shared(second) == (range(CHUNK), WholePass(SIZE + 2 + CHUNK, 2))
        third = stack.enter_context(rig.manager.request(short, TABLES[2], chunk_tokens=CHUNK))
        others = SIZE + 2 + CHUNK
        assert shared(third) == (range(len(short)), WholePass(others + len(short), 3))
        third.next_chunk(SIZE, timeout_s=WAIT_S)
        assert shared(third) == (range(SIZE), WholePass(others + SIZE, 3))
        for request in (first, second, third):
            request.cancel()


def test_a_prompt_that_comes_behind_others_is_alone(rig: ChunkRig) -> None:
    known(rig, 100.0)
    rig.prefill(PROMPTS[0], TABLES[0], chunk_tokens=CHUNK)  # its last pass is over
    with begin(rig, 1) as request:
        assert sharing(request) == 1.0
        request.next_chunk(timeout_s=WAIT_S)
        request.cancel()
    with begin(rig, 1) as request:  # that one was aborted
        assert sharing(request) == 1.0
        request.cancel()


def test_a_pass_is_shared_as_the_one_before_it_was(rig: ChunkRig) -> None:
    known(rig, 100.0)
    requests = [begin(rig, number) for number in range(3)]
    for request in requests:
        request.next_chunk(timeout_s=WAIT_S)
    time.sleep(1.0)  # so that it was the same moment for all, also on a loaded machine
    requests[0].next_chunk(timeout_s=WAIT_S)
    assert [sharing(request) for request in requests] == [3.0, 2.0, 3.0]  # it is known behind the pass
    for request in requests:
        request.cancel()


@pytest.mark.parametrize("seed", range(6))
def test_all_tokens_are_computed_once_or_loaded_whatever_a_pass_takes_of_each(rig: ChunkRig, seed: int) -> None:
    """Passes over several prompts, of any sizes, found in host memory, the tier, or nowhere. All bytes are compared."""
    rng = random.Random(seed)
    known(rig, 1e-3)
    know(rig.manager, rng.choice([1e-6, 1e-3, 1e-2]), 1e-3, rng.choice([1e-4, 1e-2]))
    if rng.random() < 0.7:
        rig.manager.evict(1 << 20)
    expected = [contents(prompt) for prompt in PROMPTS]
    for table in TABLES:
        rig.poison(table)
    left: dict[int, Request] = {number: begin(rig, number) for number in range(3)}
    while left:
        most = rng.choice([None, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 3 * CHUNK])
        work: list[tuple[int, Request, range]] = []
        for number, request in [*left.items()]:
            chunk = request.next_chunk(most, timeout_s=WAIT_S)
            if chunk is None:
                rig.check(TABLES[number], expected[number])
                del left[number]
            else:
                assert len(chunk) <= (most or CHUNK)
                work.append((number, request, chunk))
        run(rig, work, expected)
    rig.check_books()


def run(rig: ChunkRig, work: Sequence[tuple[int, Request, range]], expected: Sequence[Any]) -> None:
    for number, request, chunk in work:
        rig.run_or_fail(request, chunk, TABLES[number], expected[number])
