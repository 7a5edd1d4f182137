"""One object of a job, as an engine sees it: what it is lent, what it may say, and what counts."""

from __future__ import annotations

from typing import Any

import pytest

from paddle_kv.tiers import Job, Outcome
from paddle_kv.tiers.items import ReadItem, WriteItem

HEADER_BYTES, LAYER_BYTES = 16, 8
STAGES = [range(0, 1), range(1, 3), range(3, 5)]
KEYS = [b"first", b"second"]
DONE, FAILED, MISSING, LATE, DROPPED, DAMAGED = (
    Outcome.DONE,
    Outcome.FAILED,
    Outcome.MISSING,
    Outcome.LATE,
    Outcome.DROPPED,
    Outcome.DAMAGED,
)


class Format:
    """What the header says is set by the test."""

    object_bytes = HEADER_BYTES + 5 * LAYER_BYTES
    layer_bytes = LAYER_BYTES

    def __init__(self) -> None:
        self.header: Any = [11, 12]
        self.damaged: list[range] = []
        self.calls: list[Any] = []

    def name_of(self, key: bytes) -> bytes:
        return b"name of " + key

    def write_header(self, header: memoryview, key: bytes, payload: memoryview) -> None:
        self.calls.append(("write", header, key, payload))

    def read_header(self, header: memoryview, key: bytes) -> Any:
        self.calls.append(("read", header, key))
        return self.header

    def intact(self, payload: memoryview, layers: range, sums: Any) -> bool:
        self.calls.append(("intact", payload, layers, sums))
        return layers not in self.damaged


class Ground:
    aligned = True

    def __init__(self) -> None:
        self.format = Format()
        self.payloads = {block: memoryview(bytearray(5 * LAYER_BYTES)) for block in (7, 4)}
        self.ends: list[tuple[Any, Job, int, Outcome]] = []
        self.layers: list[range] = []
        self.job = Job(KEYS, [7, 4], timeout_s=1000.0, observer=self)
        self.job.begin("load", len(STAGES), 1.0)
        self.header = memoryview(bytearray(HEADER_BYTES))

    def payload(self, block_id: int) -> memoryview:
        return self.payloads[block_id]

    def item_ended(self, item: Any, job: Job, position: int, outcome: Outcome) -> None:
        self.ends.append((item, job, position, outcome))

    def layers_arrived(self, job: Job, layers: range) -> None:
        self.layers.append(layers)

    def settled(self, job: Job) -> None:
        pass

    def over(self, job: Job) -> None:
        pass

    def write(self, position: int = 1) -> WriteItem:
        return WriteItem(self, self.job, position, self.header)  # type: ignore[arg-type]

    def read(self, position: int = 1) -> ReadItem:
        return ReadItem(self, self.job, position, self.header, STAGES)  # type: ignore[arg-type]

    def make_late(self) -> None:
        self.job.deadline._end_s = 0.0

    @property
    def outcomes(self) -> list[Outcome]:
        return [end[3] for end in self.ends]


@pytest.fixture
def ground() -> Ground:
    return Ground()


def test_what_an_item_is(ground: Ground) -> None:
    for item in (ground.write(), ground.read()):
        assert (item.key, item.name, item.size_bytes) == (b"second", b"name of second", Format.object_bytes)
        assert item.deadline is ground.job.deadline and item.aligned is True and item.header is ground.header
        item.ended(DONE if isinstance(item, WriteItem) else FAILED)
    assert [end[1:] for end in ground.ends] == [(ground.job, 1, DONE), (ground.job, 1, FAILED)]
    assert ground.read().num_stages == 3


def test_what_is_written(ground: Ground) -> None:
    item = ground.write()
    buffers = item.buffers()
    assert buffers is not None and buffers[0] is ground.header and buffers[1] is ground.payloads[4]
    assert ground.format.calls == [("write", ground.header, b"second", ground.payloads[4])]


def test_what_is_read(ground: Ground) -> None:
    item = ground.read()
    for stage, layers in enumerate(STAGES):
        found = item.buffers(stage)
        assert found is not None
        offset, buffers = found
        if stage == 0:
            assert offset == 0 and buffers[0] is ground.header
        else:
            assert offset == HEADER_BYTES + layers.start * LAYER_BYTES and len(buffers) == 1
        part = buffers[-1]
        part[:] = bytes([stage + 1]) * len(part)
        assert len(part) == len(layers) * LAYER_BYTES
    ones = [bytes([stage + 1]) * (len(layers) * LAYER_BYTES) for stage, layers in enumerate(STAGES)]
    assert ground.payloads[4] == b"".join(ones)
    assert not any(ground.payloads[7])


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("how", ["ended", "cancelled", "late"])
def test_nothing_is_lent_for_what_nobody_wants(ground: Ground, kind: str, how: str) -> None:
    item = getattr(ground, kind)()
    if how == "ended":
        item.ended(FAILED)
    elif how == "cancelled":
        ground.job.cancel()
    else:
        ground.make_late()
    assert (item.buffers(0) if kind == "read" else item.buffers()) is None
    assert ground.format.calls == []
    item.give_up()  # it has no addresses
    assert ground.outcomes == [{"ended": FAILED, "cancelled": DROPPED, "late": LATE}[how]]


@pytest.mark.parametrize("lent", [False, True])
def test_an_engine_that_raises_ends_what_it_was_not_lent(ground: Ground, lent: bool) -> None:
    item = ground.write()
    if lent:
        item.buffers()
    item.give_up()
    assert ground.outcomes == ([] if lent else [FAILED])
    item.ended(DONE)
    assert ground.outcomes == ([DONE] if lent else [FAILED])
    item.ended(FAILED)
    item.give_up()
    assert len(ground.ends) == 1


@pytest.mark.parametrize("said", list(Outcome))
@pytest.mark.parametrize("how", ["wanted", "cancelled", "late", "both"])
def test_what_counts_of_what_an_engine_says(ground: Ground, said: Outcome, how: str) -> None:
    item = ground.write()
    if how in ("cancelled", "both"):
        ground.job.cancel()
    if how in ("late", "both"):
        ground.make_late()
    item.ended(said)
    expected = said if said is DONE or how == "wanted" else LATE if how == "late" else DROPPED
    assert ground.outcomes == [expected]


def test_stages_arrive_once_each_and_in_order(ground: Ground) -> None:
    item, other = ground.read(1), ground.read(0)
    assert not item.arrived(1)
    assert item.arrived(0) and not item.arrived(0)
    assert not item.arrived(2)
    assert ground.layers == []  # the other block has not come
    assert other.arrived(0)
    assert ground.layers == [STAGES[0]]
    assert item.arrived(1) and item.arrived(2) and not item.arrived(2)
    payload = ground.payloads[4]
    assert [call for call in ground.format.calls if call[1] is payload or call[0] == "read"][:2] == [
        ("read", ground.header, b"second"),
        ("intact", payload, STAGES[0], [11, 12]),
    ]
    assert [call[2] for call in ground.format.calls if call[1] is payload] == STAGES
    item.ended(DONE)
    assert not other.arrived(0) and other.arrived(1)
    other.ended(DONE)  # one stage was not looked at
    assert [end[2:] for end in ground.ends] == [(1, DONE), (0, FAILED)]
    assert not item.arrived(0)


@pytest.mark.parametrize("wrong", [MISSING, DAMAGED])
def test_a_header_that_is_not_its_own(ground: Ground, wrong: Outcome) -> None:
    item = ground.read()
    ground.format.header = wrong
    assert not item.arrived(0)
    ground.format.header = [11, 12]
    assert not item.arrived(0) and not item.arrived(1)
    assert [call[0] for call in ground.format.calls] == ["read"]
    item.ended(DONE)
    assert ground.outcomes == [wrong]
    assert ground.layers == []


def test_layers_that_are_not_what_was_stored(ground: Ground) -> None:
    item = ground.read()
    ground.format.damaged = [STAGES[1]]
    assert item.arrived(0) and not item.arrived(1)
    ground.format.damaged = []
    assert not item.arrived(1) and not item.arrived(2)
    ground.job.cancel()
    item.ended(FAILED)
    assert ground.outcomes == [DAMAGED]  # whatever the engine, or who does not want it any more, says


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_stage_that_nobody_wants_any_more_counts_and_is_the_last(ground: Ground, how: str) -> None:
    item = ground.read()
    assert item.arrived(0)
    ground.job.cancel() if how == "cancelled" else ground.make_late()
    assert not item.arrived(1)
    assert ground.job._arrived == [1, 1, 0]
    item.ended(DONE)
    assert ground.outcomes == [DROPPED if how == "cancelled" else LATE]
