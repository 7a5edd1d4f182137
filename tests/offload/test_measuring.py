"""How a server hears of its model while it loads all that it finds, and of a link behind which one block lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_kv.offload.pieces import PieceState
from paddle_kv.offload.rates import MEASURED_SHARE, UNHEARD_PASSES, UNSEEN_S, Rates, Standing
from paddle_kv.tiers import FilesEngine
from tests.offload.chunk_rig import SIZE, ChunkRig, know, until
from tests.offload.real_times import Channel, throttle
from tests.offload.test_rates import Clock

CHUNK = 2 * SIZE
PROMPT = list(range(8 * SIZE + 1))
TABLE = [7, 3, 11, 5, 1, 9, 2, 8, 4]
WHOLE = [range(first, min(first + CHUNK, len(PROMPT))) for first in range(0, len(PROMPT), CHUNK)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ChunkRig]:
    made = ChunkRig(FilesEngine({tmp_path: 1 << 24}))
    made.prefill(PROMPT, TABLE, chunk_tokens=CHUNK)
    made.check_books()
    yield made
    made.close()


def wait_for_loads(rates: Rates, clock: Clock, passes: int, seconds: float) -> None:
    for _ in range(passes):
        rates.begin_pass(CHUNK, 0.0, waits=True)
    clock.now_s += seconds


def load_all(rig: ChunkRig, clock: Clock) -> list[range]:
    """As if a block took a second to be computed, and a tenth of one to be loaded; the chunks that were computed."""
    know(rig.manager, 0.1, 1.0, 0.1, clock)
    return served(rig)


def served(rig: ChunkRig) -> list[range]:
    rig.check_books()
    return rig.prefill(PROMPT, TABLE, chunk_tokens=CHUNK)


# ---- when ----
@pytest.mark.parametrize(
    ("passes", "seconds", "block_s", "is_due"),
    [
        (UNHEARD_PASSES, UNSEEN_S, 0.001, True),
        (UNHEARD_PASSES - 1, UNSEEN_S, 0.001, False),
        (UNHEARD_PASSES, UNSEEN_S - 0.1, 0.001, False),
        (UNHEARD_PASSES, 3.9 / MEASURED_SHARE, 1.0, False),  # that would be more than a hundredth of the time
        (UNHEARD_PASSES, 4.1 / MEASURED_SHARE, 1.0, True),
    ],
)
def test_it_is_measured_seldom(clock: Clock, passes: int, seconds: float, block_s: float, is_due: bool) -> None:
    rates = Rates(1000, SIZE, clock)
    clock.now_s = 1e6
    rates.observe_prefill(0, SIZE, block_s)
    wait_for_loads(rates, clock, passes, seconds)
    assert rates.take_measurement(1, 5) == is_due
    assert not rates.take_measurement(1, 5)


def test_a_pass_that_says_what_computing_takes_will_do(clock: Clock) -> None:
    rates = Rates(1000, SIZE, clock)
    rates.observe_prefill(0, SIZE, 0.001)
    wait_for_loads(rates, clock, UNHEARD_PASSES, UNSEEN_S)
    rates.observe_prefill(0, SIZE, 0.001)
    assert not rates.take_measurement(0, 1)
    wait_for_loads(rates, clock, 1, UNSEEN_S)
    assert not rates.take_measurement(0, 1)
    wait_for_loads(rates, clock, UNHEARD_PASSES - 1, 0.0)
    assert rates.take_measurement(0, 1)


def test_passes_that_wait_for_nothing_are_heard_of() -> None:
    rates = Rates(1000, SIZE, Clock())
    rates.observe_prefill(0, SIZE, 0.001)
    rates._clock = lambda: 1e6
    for _ in range(UNHEARD_PASSES):
        rates.begin_pass(SIZE, 0.0, waits=False)
    assert not rates.take_measurement(0, 1)


def test_what_a_measurement_has_found_is_measured_once_more(clock: Clock) -> None:
    rates = Rates(1000, SIZE, clock)
    rates.set_prefill(1.0)
    rates.observe_prefill(0, SIZE, 0.1 * SIZE)
    assert not rates.take_measurement(0, 1)  # that was no measurement, so it would have no end
    rates.set_prefill(1.0)
    for seconds, again in ((1.0, False), (0.1, True)):
        wait_for_loads(rates, clock, UNHEARD_PASSES, 10 / MEASURED_SHARE)
        assert rates.take_measurement(0, 1)
        rates.observe_prefill(0, SIZE, seconds * SIZE)
        assert rates.take_measurement(0, 1) == again and not rates.take_measurement(0, 1)
    rates.observe_prefill(0, SIZE, 0.1 * SIZE)
    assert not rates.take_measurement(0, 1) and rates.compute_s(0, 1) == pytest.approx(0.1 * SIZE, rel=0.1)


def test_of_the_first_passes_a_quick_one_is_confirmed(clock: Clock) -> None:
    """The first one compiled its kernels, say, all else was loaded meanwhile, and the second one is over one token."""
    rates = Rates(1000, SIZE, clock)
    rates.observe_prefill(0, 8 * SIZE, 80.0)
    rates.observe_prefill(8 * SIZE, 1, 0.1)
    assert rates.take_measurement(0, 8) and not rates.take_measurement(0, 8)
    rates.observe_prefill(0, 8 * SIZE, 3.2)
    assert rates.compute_s(0, 8) == pytest.approx(3.2, rel=0.1) and not rates.take_measurement(0, 8)


def test_a_measurement_that_was_taken_counts_from_then_on(clock: Clock) -> None:
    rates = Rates(1000, SIZE, clock)
    rates.set_prefill(0.001)
    wait_for_loads(rates, clock, UNHEARD_PASSES, UNSEEN_S)
    assert rates.take_measurement(0, 1)
    clock.now_s += UNSEEN_S
    assert not rates.take_measurement(0, 1)
    wait_for_loads(rates, clock, UNHEARD_PASSES, 0.0)
    assert rates.take_measurement(0, 1)


def test_nothing_is_measured_that_nothing_is_known_of(clock: Clock) -> None:
    rates = Rates(1000, SIZE, clock)
    wait_for_loads(rates, clock, UNHEARD_PASSES, UNSEEN_S)
    assert not rates.take_measurement(0, 1)


# ---- what is computed then ----
@pytest.mark.parametrize("in_tier", [0, 8, 4])
def test_the_first_piece_is_computed_and_the_others_come(
    rig: ChunkRig, clock: Clock, monkeypatch: pytest.MonkeyPatch, in_tier: int
) -> None:
    def arrange() -> None:
        rig.check_books()
        if in_tier:
            rig.manager.evict(1 << 20)
            hashes = rig.manager.block_hashes(PROMPT)
            rig.manager.prefetch(hashes[: 8 - in_tier], timeout_s=10.0).wait(10.0)

    know(rig.manager, 0.1, 1.0, 0.1, clock)
    rates, noted = rig.manager.rates, []
    monkeypatch.setattr(rates, "observe_prefill", lambda start, tokens, seconds: noted.append((start, tokens)))
    arrange()
    assert served(rig) == WHOLE[-1:]
    noted.clear()
    wait_for_loads(rates, clock, UNHEARD_PASSES, 2 / MEASURED_SHARE)
    arrange()
    rig.check_books()
    read, engine = [], rig.engine
    monkeypatch.setattr(engine, "read", lambda items: (read.extend(items), FilesEngine.read(engine, items)))
    assert served(rig) == [WHOLE[0], WHOLE[-1]]
    assert noted[0] == (0, CHUNK)
    rig.check_books()
    assert len(read) == min(in_tier, 6)  # and nothing of what is computed


def test_a_model_that_has_become_quicker_is_not_loaded_for(rig: ChunkRig, clock: Clock) -> None:
    """All was loaded for ever, however quick the model was."""
    for _ in range(3):
        assert load_all(rig, clock) == WHOLE[-1:]
    rates = rig.manager.rates
    wait_for_loads(rates, clock, UNHEARD_PASSES, 2 / MEASURED_SHARE)
    assert served(rig) == [WHOLE[0], WHOLE[-1]]
    assert served(rig)[0] == WHOLE[0]
    for _ in range(3):
        assert served(rig)[:2] == WHOLE[:2]


def test_a_prefix_of_one_piece_is_computed_whole(rig: ChunkRig, clock: Clock) -> None:
    know(rig.manager, 0.1, 1.0, 0.1, clock)
    wait_for_loads(rig.manager.rates, clock, UNHEARD_PASSES, 8 / MEASURED_SHARE)
    rig.check_books()
    assert rig.prefill(PROMPT, TABLE, chunk_tokens=16 * SIZE) == [range(len(PROMPT))]
    know(rig.manager, 0.1, 1.0, 0.1, clock)
    rig.check_books()
    assert rig.prefill(PROMPT, TABLE, chunk_tokens=16 * SIZE) == [range(8 * SIZE, len(PROMPT))]


def test_a_prompt_that_is_computed_anyway_leaves_it_to_the_next_one(rig: ChunkRig, clock: Clock) -> None:
    know(rig.manager, 10.0, 1.0, None, clock)
    wait_for_loads(rig.manager.rates, clock, UNHEARD_PASSES, 8 / MEASURED_SHARE)
    rig.check_books()
    with rig.manager.request(PROMPT, TABLE, chunk_tokens=CHUNK):
        pass
    assert rig.manager.rates.take_measurement(0, 1)


def test_what_others_have_brought_meanwhile_is_loaded_after_all(
    rig: ChunkRig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was computed while its load went on, into blocks that the prompt might have given back by then."""
    rig.check_books()
    rig.manager.evict(1 << 20)
    know(rig.manager, 0.1, 1.0, 0.1, clock)
    wait_for_loads(rig.manager.rates, clock, UNHEARD_PASSES, 8 / MEASURED_SHARE)
    engine, asked, link = rig.engine, [], Channel()
    link.block_s = 0.02
    monkeypatch.setattr(engine, "read", asked.append)
    restore = throttle(link, rig.spec.num_layers)
    rig.manager.prefetch(rig.manager.block_hashes(PROMPT), timeout_s=10.0)  # somebody else has asked for it
    with rig.manager.request(PROMPT, TABLE, chunk_tokens=CHUNK) as request:
        first = request._meeting.line.pieces[0]  # type: ignore[attr-defined]
        monkeypatch.undo()
        for items in asked:
            engine.read(items)
        until(lambda: rig.manager.stats() and first.state in (PieceState.LOADING, PieceState.LOADED))
        chunk = request.next_chunk(timeout_s=10.0)
        assert chunk is not None and chunk.start > 0 and first.state is not PieceState.COMPUTED
    restore()


# ---- a link that is not waited for ----
@pytest.mark.parametrize(("link_s", "begins"), [(0.9, True), (1.5, False)])
@pytest.mark.parametrize("is_trusted", [False, True])
def test_what_the_model_would_come_to_first_is_not_begun(
    rig: ChunkRig, clock: Clock, is_trusted: bool, link_s: float, begins: bool
) -> None:
    """Two pieces of two blocks: the second one is there after three seconds, and the model comes to it after two."""
    know(rig.manager, link_s if is_trusted else None, 1.0, None, clock)
    if not is_trusted:
        rig.manager.rates.observe_load("onload", rig.spec.block_bytes * rig.spec.num_layers, link_s)
    rig.check_books()
    rig.manager.drop(rig.manager.block_hashes(PROMPT)[4:])
    rig.check_books()
    with rig.manager.request(PROMPT, TABLE, chunk_tokens=CHUNK) as request:
        states = [piece.state for piece in request._meeting.line.pieces]  # type: ignore[attr-defined]
    assert (states[-1] is not PieceState.WAITING) == (begins or is_trusted)


@pytest.mark.parametrize("how", ["load", "compute"])
def test_who_says_how_is_not_asked(rig: ChunkRig, clock: Clock, how: Any) -> None:
    know(rig.manager, 0.1, 1.0, 0.1, clock)
    wait_for_loads(rig.manager.rates, clock, UNHEARD_PASSES, 8 / MEASURED_SHARE)
    rig.check_books()
    expected = WHOLE[-1:] if how == "load" else WHOLE
    assert rig.prefill(PROMPT, TABLE, chunk_tokens=CHUNK, how=how) == expected


# ---- a prefix of one block ----
def one_block(rig: ChunkRig) -> list[range]:
    rig.check_books()
    rig.manager.drop(rig.manager.block_hashes(PROMPT)[1:])
    return served(rig)


def test_the_model_waits_for_the_only_block_of_a_link_that_nothing_bad_is_known_of(rig: ChunkRig) -> None:
    """Else nobody would ever hear of the link, as nothing comes while the model computes this one block."""
    know(rig.manager, None, 1.0)
    rig.manager.rates.observe_save(100 * rig.spec.block_bytes * rig.spec.num_layers, 1.0)
    found = []
    while rig.manager.rates.standing("onload") is not Standing.TRUSTED:
        rig.manager.rates.set_prefill(1.0)
        found.append(one_block(rig)[0])
        assert len(found) < 8
    assert found == [range(SIZE, CHUNK)] * len(found) and len(found) >= 3


@pytest.mark.parametrize("blame", ["late", "failed", "slow"])
def test_but_for_no_other(rig: ChunkRig, blame: str) -> None:
    found = []
    while found[-1:] != [range(CHUNK)]:  # where this thread is held up, a probe may be there before it asks
        know(rig.manager, None, 1.0)
        rates = rig.manager.rates
        rates.observe_save(rig.spec.block_bytes * rig.spec.num_layers, 2.0 if blame == "slow" else 0.01)
        if blame == "late":
            rates.observe_late("onload", 1, 1e-9)
        if blame == "failed":
            rates.observe_failed("onload")
        found.append(one_block(rig)[0])
        assert len(found) < 6


def test_of_two_blocks_one_comes_while_the_other_is_computed(rig: ChunkRig) -> None:
    know(rig.manager, None, 1.0)
    rig.manager.rates.observe_save(rig.spec.block_bytes * rig.spec.num_layers, 0.01)
    rig.check_books()
    rig.manager.drop(rig.manager.block_hashes(PROMPT)[2:])
    assert served(rig)[0].start == 0
