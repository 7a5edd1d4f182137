"""A server that does what it should not: nothing wrong is kept or handed out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_kv import ClosedError
from paddle_kv.tiers import FilesEngine
from tests.offload.chunk_rig import SIZE, WAIT_S, ChunkRig, contents, know

TOKENS = list(range(10 * SIZE))
TABLE = list(range(20, 30))


@pytest.fixture
def rig() -> Iterator[ChunkRig]:
    found = ChunkRig()
    yield found
    found.close()


def test_a_chunk_whose_save_could_not_begin_is_handed_out_again(rig: ChunkRig, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = contents(TOKENS)
    computed = []
    with rig.manager.request(TOKENS, TABLE, chunk_tokens=2 * SIZE) as request:
        with monkeypatch.context() as patch:
            patch.setattr(rig.manager._books, "save_chunk", _raise)
            with pytest.raises(MemoryError):
                request.next_chunk(timeout_s=WAIT_S)
        while (chunk := request.next_chunk(timeout_s=WAIT_S)) is not None:
            rig.run(request, chunk, TABLE, expected)
            computed += chunk
    assert computed == TOKENS
    rig.check(TABLE, expected)


def _raise(*_: Any, **__: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize("end", ["cancel", "leave"])
def test_a_request_that_has_ended_hands_nothing_out(rig: ChunkRig, end: str) -> None:
    rig.prefill(TOKENS, TABLE, chunk_tokens=2 * SIZE)
    rig.scheduler.drain(WAIT_S)
    know(rig.manager, 1e-3, 1.0)
    request = rig.manager.request([*TOKENS, 7, 7], list(range(11)), chunk_tokens=2 * SIZE)
    if end == "cancel":
        request.cancel()
    else:
        with request:
            pass
    with pytest.raises(ClosedError, match="with block was left"):
        request.next_chunk(timeout_s=WAIT_S)
    rig.check_books()


def test_behind_its_end_a_request_stays_at_its_end(rig: ChunkRig) -> None:
    with rig.manager.request(TOKENS, TABLE, chunk_tokens=10 * SIZE) as request:
        chunk = request.next_chunk(timeout_s=WAIT_S)
        assert chunk is not None
        rig.run(request, chunk, TABLE, contents(TOKENS))
        assert request.next_chunk(timeout_s=WAIT_S) is None
    assert request.next_chunk(timeout_s=WAIT_S) is None


def test_a_salt_is_not_lost_beside_hashes_that_are_made_already(rig: ChunkRig) -> None:
    prefix = rig.manager.prefix()
    prefix.append(TOKENS)
    with pytest.raises(ValueError, match="request_salt must be empty"):
        rig.manager.request(prefix, TABLE, request_salt=b"adapter")


@pytest.mark.parametrize("chunk_tokens", [None, SIZE])
def test_a_block_holds_one_part_of_a_prompt(rig: ChunkRig, chunk_tokens: int | None) -> None:
    with pytest.raises(ValueError, match="names block 20 more than once"):
        rig.manager.request(TOKENS, [*TABLE[:-1], 20], chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", [None, SIZE])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_tokens": "4"}, TypeError, "max_tokens is '4'"),
        ({"max_tokens": float("nan")}, TypeError, "max_tokens is nan"),
        ({"max_tokens": 0}, ValueError, "max_tokens = 0 must be at least"),
        ({"timeout_s": "4"}, TypeError, "timeout_s is '4'"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s = nan must be"),
    ],
)
def test_nonsense_is_refused_and_no_token_is_lost(
    rig: ChunkRig, chunk_tokens: int | None, arguments: dict[str, Any], error: Any, message: str
) -> None:
    with rig.manager.request(TOKENS, TABLE, chunk_tokens=chunk_tokens) as request:
        with pytest.raises(error, match=message):
            request.next_chunk(**arguments)
        found = request.next_chunk(timeout_s=WAIT_S)
        assert found is not None
        assert found.start == 0
        request.cancel()


@pytest.mark.parametrize(
    ("tokens", "seconds", "error", "message"),
    [
        (5, 1.0, TypeError, "tokens is int"),
        (range(10, 0, -1), 1.0, ValueError, "in steps of 1"),
        (range(0, 10, 3), 1.0, ValueError, "in steps of 1"),
        (range(5, 5), 1.0, ValueError, "one token or more"),
        (range(2**70), 1.0, ValueError, "one token or more"),
        (range(2**63 - 1, 2**63), 1.0, ValueError, "one token or more"),
        (range(5), "1", TypeError, "seconds is '1'"),
        (range(5), True, TypeError, "seconds is True"),
    ],
)
def test_a_time_that_is_none_is_not_learned(rig: ChunkRig, tokens: Any, seconds: Any, error: Any, message: str) -> None:
    before = rig.manager.rates.stats()
    with pytest.raises(error, match=message):
        rig.manager.observe_prefill(tokens, seconds)
    assert rig.manager.rates.stats() == before


@pytest.mark.parametrize(
    ("timeout_s", "error", "message"),
    [
        (None, TypeError, "timeout_s is None; a number of seconds is expected"),
        ("4", TypeError, "timeout_s is '4'"),
        (True, TypeError, "timeout_s is True"),
        (float("nan"), ValueError, "timeout_s = nan must be"),
        (float("inf"), ValueError, "timeout_s = inf must be"),
    ],
)
@pytest.mark.parametrize("below", [False, True])
def test_a_prefetch_without_an_end_is_refused_with_and_without_a_tier(
    below: bool, timeout_s: Any, error: Any, message: str, tmp_path: Path
) -> None:
    rig = ChunkRig(FilesEngine({tmp_path: 1 << 24}) if below else None)
    try:
        with pytest.raises(error, match=message):
            rig.manager.prefetch([b"a" * 32], timeout_s=timeout_s)
        assert rig.manager.prefetch([b"a" * 32], timeout_s=WAIT_S).wait(WAIT_S)
        rig.manager.close()
        with pytest.raises(ClosedError):
            rig.manager.prefetch([b"a" * 32], timeout_s=WAIT_S)
    finally:
        rig.close()


@pytest.mark.parametrize("how", ["load", "compute", "sooner"])
@pytest.mark.parametrize("chunk_tokens", [None, SIZE])
def test_of_an_empty_prompt_nothing_is_handed_out(rig: ChunkRig, chunk_tokens: int | None, how: Any) -> None:
    with rig.manager.request([], [], chunk_tokens=chunk_tokens, how=how) as request:
        assert [request.next_chunk(timeout_s=WAIT_S) for _ in range(2)] == [None, None]
        assert (request.start, request.loads) == (0, [])
    with rig.manager.request([7], [3], chunk_tokens=chunk_tokens, how=how) as request:
        assert [request.next_chunk(timeout_s=WAIT_S) for _ in range(2)] == [range(1), None]
    rig.check_books()
