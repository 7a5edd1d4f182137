"""Books of which the test is the link, the tier, and time: for meetings by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv.offload import bringing, feeding, pieces
from paddle_kv.offload.feed import Feed
from paddle_kv.offload.feeding import Meeting
from paddle_kv.offload.found import BlockState
from paddle_kv.offload.pieces import Piece
from paddle_kv.offload.rates import LINK, TIER, Rates, RateSnapshot
from paddle_kv.offload.waits import Step
from paddle_kv.schedule.movement import State

SIZE = 16  # tokens
BLOCKS = 4  # of a piece
BLOCK_BYTES = 1000
HERE, BELOW = BlockState.PRESENT, BlockState.TIER


class Copy:
    """A load to the device."""

    def __init__(self, positions: list[int], behind: Any, urgent: bool | None) -> None:
        self.positions, self.behind, self.urgent = positions, behind, urgent
        self.over, self.state, self.num_unsubmitted = False, State.ARRIVING, 0
        self.failed, self.unread = False, set[int]()
        self.callbacks: list[Callable[[], object]] = []
        self.ends_when_cancelled = False

    def end(self, state: State = State.DONE) -> None:
        self.over, self.state = True, state


class Read:
    """From the tier."""

    def __init__(self, keys: list[bytes], blocks_before: int) -> None:
        self.keys, self.done, self.cancelled = keys, False, 0
        self.blocks_until = blocks_before + len(keys)

    def cancel(self) -> None:
        self.cancelled += 1


class Bench:
    """Books of which the test is the link and the tier."""

    closed = reads_layerwise = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.copies: list[Copy] = []
        self.reads: list[Read] = []
        self.told: list[Callable[[], object]] = []
        self.cancelled: list[Copy] = []
        self.looked: list[Copy] = []
        self.late: list[tuple[str, int, float]] = []
        self.events: list[str] = []  # that are not over
        self.recorded: list[tuple[str, object]] = []
        self.over_at_once = self.read_at_once = self.fails = False
        self.alarms: list[tuple[float, Callable[[], object]]] = []
        self.failures: list[str] = []
        self.others_blocks = 0  # that are read from the tier for somebody else
        self.others: set[bytes] = set()  # what they are
        self.slots: dict[bytes, int] = {}
        self.index = SimpleNamespace(slots=self.slots, arriving={})
        self.feed = Feed()
        self.made: list[Meeting] = []  # the feed keeps none
        self.group = SimpleNamespace(host=SimpleNamespace(tell=self.told.append))
        self.scheduler = SimpleNamespace(
            device_cache=SimpleNamespace(spec=SimpleNamespace(num_layers=4)),
            resources=SimpleNamespace(take_events=self._take_events),
            backend=SimpleNamespace(
                is_complete=lambda event: event not in self.events,
                record=lambda event, stream: self.recorded.append((event, stream)),
            ),
        )
        self.rates = Rates(BLOCK_BYTES, SIZE, lambda: self.now_s)
        observe_late = self.rates.observe_late

        def spy(name: str, num_bytes: int, seconds: float) -> None:
            self.late.append((name, num_bytes, seconds))
            observe_late(name, num_bytes, seconds)

        monkeypatch.setattr(self.rates, "observe_late", spy)
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(pieces, "time", clock)
        settling = SimpleNamespace(progress=self.cancelled.append, look=self.looked.append)
        monkeypatch.setattr(bringing, "arriving", SimpleNamespace(fail=self._fail))
        for module in (bringing, feeding):
            monkeypatch.setattr(module, "time", clock)
            monkeypatch.setattr(module, "submission", SimpleNamespace(cancel=self._cancel))
            monkeypatch.setattr(module, "settling", settling)

    def _take_events(self, count: int) -> list[str]:
        taken = [f"event {number}" for number in range(count)]
        self.events += taken
        return taken

    def _cancel(self, copy: Copy) -> Copy:
        if copy.ends_when_cancelled:
            copy.failed = True
            copy.end(State.CANCELLED)
        return copy

    def _fail(self, copy: Copy, message: str) -> None:
        copy.failed = True
        self.failures.append(message)

    def know(self, load_s: float | None, compute_s: float | None, tier_s: float | None = None) -> None:
        """In seconds a block."""
        for name, seconds in ((LINK, load_s), (TIER, tier_s)):
            if seconds is not None:
                self.rates.set_load(name, BLOCK_BYTES / seconds)
        if compute_s is not None:
            self.rates.set_prefill(compute_s / SIZE)

    def onload(self, keys: list[bytes], device_ids: list[int], behind: Any, *, urgent: bool | None) -> Any:
        if self.fails:
            raise OSError("no link")
        assert [1000 + int(key) for key in keys] == device_ids
        copy = Copy([int(key) for key in keys], behind, urgent)
        if self.over_at_once:
            copy.end()
        self.copies.append(copy)
        return SimpleNamespace(_movement=copy)

    @property
    def num_reading_blocks(self) -> int:
        return self.others_blocks + sum(len(one.keys) for one in self.reads if not (one.done or one.cancelled))

    def is_read(self, keys: list[bytes]) -> bool:
        return self.others.issuperset(keys)

    def read_soon(self, keys: list[bytes]) -> Any:
        read = Read(keys, self.num_reading_blocks)
        self.reads.append(read)
        if self.read_at_once:
            self.arrive(read)
        return read

    def follow(self, keys: list[bytes], device_ids: list[int], behind: Any) -> Any:
        if self.fails:
            raise OSError("no room")
        assert [1000 + int(key) for key in keys] == device_ids
        read = Read([key for key in keys if key not in self.slots and not self._reads(key)], self.num_reading_blocks)
        copy = Copy([int(key) for key in keys], behind, None)
        copy.unread, copy.num_unsubmitted = set(range(4)), 4
        self.reads.append(read)
        self.copies.append(copy)
        return SimpleNamespace(_movement=copy), read

    def _reads(self, key: bytes) -> bool:
        return any(key in one.keys for one in self.reads if not (one.done or one.cancelled))

    def call_at(self, at_s: float, function: Callable[[], object]) -> None:
        self.alarms.append((at_s, function))

    def arrive(self, read: Read) -> None:
        read.done = True
        self.slots.update({key: 0 for key in read.keys})

    def meeting(self, states: list[BlockState], *, first_key: int = 0, end_blocks: int = 1) -> Meeting:
        """Of a prompt with so many blocks behind the prefix."""
        keys = [b"%d" % (first_key + number) for number in range(len(states))]
        self.slots.update({key: 0 for key, state in zip(keys, states, strict=True) if state is HERE})
        found = [Piece(start, start + BLOCKS) for start in range(0, len(states), BLOCKS)]
        ids = [1000 + int(key) for key in keys]
        num_tokens = (len(states) + end_blocks) * SIZE
        me: Any = self
        stream: Any = "stream"
        made = Meeting(me, keys, ids, states, found, self.rates, stream, num_tokens, BLOCKS * SIZE)
        self.made.append(made)
        return made

    def fill(self) -> None:
        me: Any = self
        self.feed.fill(me)

    def next(self, meeting: Meeting, most_blocks: int | None = None) -> Step:
        me: Any = self
        return meeting.next(me, most_blocks)

    @property
    def loaded(self) -> list[list[int]]:
        """First and last block of each load, in order."""
        return [[copy.positions[0], copy.positions[-1]] for copy in self.copies]


def states_of(meeting: Meeting) -> list[str]:
    return [piece.state.value for piece in meeting.line.pieces]


def wait_as_long_as_computing(bench: Bench, meeting: Meeting) -> None:
    """Whatever the pass behind that takes."""

    def for_one(rates: RateSnapshot, start: int, stop: int, begin_s: float, there_s: float, others_s: float) -> bool:
        return rates.base_s is not None and there_s <= rates.prefill_s(start * SIZE, stop * SIZE)

    meeting._waits.for_one = for_one  # type: ignore[method-assign]


def worth(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    def weigh(rates: Any, states: Sequence[BlockState], **_: Any) -> tuple[Any, int]:
        tier_stop = states.count(BlockState.TIER) if states[0] is BlockState.TIER else len(states)
        return SimpleNamespace(**fields), tier_stop - fields["tier_first"]

    monkeypatch.setattr(bringing, "weigh", weigh)
