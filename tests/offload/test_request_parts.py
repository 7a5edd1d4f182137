"""A request by itself: what it asks of a manager, call by call, where transfers, rates and time are the test's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv import TransferError
from paddle_kv.offload import request as module
from paddle_kv.offload.found import BlockState
from paddle_kv.offload.rates import LINK, TIER, Rates
from paddle_kv.offload.request import Request

SIZE = 16
HERE, BELOW = BlockState.PRESENT, BlockState.TIER
TABLE = [9, 2, 11, 5, 30, 31]


class Load:
    """A transfer."""

    unmarked_layers = range(0)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = False

    def wait(self, timeout_s: float | None) -> None:
        if self.fails:
            raise TransferError("lost")

    def wait_over(self, timeout_s: float | None = None) -> None:
        self.calls.append("wait_over")

    def cancel(self) -> None:
        self.calls.append("cancel")


class Manager:
    """Writes down what it is asked for."""

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
