"""What a lender keeps of what it lends, and what it tells and answers, step by step."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from paddle_kv import ClosedError, HostPool
from paddle_kv.memory.host_rows import block_rows
from paddle_kv.testing.tiers.rig import ALIGNED, WAIT_S
from paddle_kv.tiers.neighbours import Lender
from paddle_kv.tiers.neighbours.lender import check_lender
from paddle_kv.tiers.neighbours.messages import BUSY, MOST_NAMES, VERSION, encode
from paddle_kv.tiers.object_format import ObjectFormat
from paddle_kv.tracking.group import change
from tests.peers.conftest import until
from tests.tiers.test_neighbour_messages import FakeLine, hears, one_reader, wait_for_thread


class Pinned:
    """The books of a manager, which notes what it has to keep."""

    def __init__(self) -> None:
        self.pins: list[bytes] = []

    def pin(self, keys: Iterable[bytes]) -> None:
        self.pins += keys

    def unpin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.pins.remove(key)


@pytest.fixture
def lender() -> Iterator[Lender]:
    with one_reader() as (made, _):
        yield made


def blocks(lender: Lender) -> dict[bytes, int]:
    return {one.key: one.block_id for one in lender._lent.objects.values()}


def read(lender: Lender, line: Any, *keys: bytes, number: int = 0) -> Any:
    """The answer of the lender to a reader that has joined."""
    names = [lender._form.name_of(key) for key in keys]
    hears(lender, line, encode("read", number=number, names=names, timeout_ms=60_000))
    return line.heard[-1]["blocks"]


def joined(lender: Lender) -> Any:
    line = FakeLine()
    hears(lender, line, encode("join", version=VERSION))
    return line


@pytest.mark.parametrize("taken_back", [False, True])
def test_a_key_that_lies_elsewhere_now_has_nothing_to_do_with_its_old_block(lender: Lender, taken_back: bool) -> None:
    lender.lend([b"one"], [1])
    if taken_back:
        lender.take_back([b"one"])
    lender.lend([b"one"], [5])
    lender.lend([b"two"], [1])
    assert blocks(lender) == {b"one": 5, b"two": 1}
    lender.take_back([b"one"])
    assert blocks(lender) == {b"two": 1}


def test_a_key_that_is_lent_again_is_not_missing_for_a_moment(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    lender.lend([b"one"], [1])
    told: list[bool] = []
    monkeypatch.setattr(lender._lent, "_told", lambda _, is_lent: told.append(is_lent))
    lender.lend([b"one"], [1])
    lender.lend([b"one"], [2])
    assert told == [True, True]


@pytest.mark.parametrize(("num_blocks", "room"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_half_of_a_pool_can_be_read_at_once_and_one_block_of_the_smallest(num_blocks: int, room: int) -> None:
    with one_reader(num_blocks) as (lender, line):
        keys = [b"%d" % block for block in range(num_blocks)]
        lender.lend(keys, range(num_blocks))
        hears(lender, line, encode("join", version=VERSION))
        assert read(lender, line, *keys) == [*range(room), *[BUSY] * (num_blocks - room)]
        assert read(lender, line, keys[-1], number=1) == [BUSY]
        assert lender.stats()["leased_blocks"] == room
        hears(lender, line, encode("done", number=0))
        assert read(lender, line, keys[-1], number=2) == [num_blocks - 1]


def test_several_read_a_block_at_once_and_nobody_while_it_is_written(lender: Lender) -> None:
    lender.lend([b"one"], [1])
    first, second = joined(lender), joined(lender)
    assert read(lender, first, b"one") == read(lender, second, b"one") == [1]
    for line in (first, second):
        with pytest.raises(TimeoutError), lender.pool.lease([1], write=True, timeout_s=0.0):
            pass
        hears(lender, line, encode("done", number=0))
    with lender.pool.lease([1], write=True, timeout_s=0.0):
        assert read(lender, first, b"one") == [BUSY]


def test_a_header_is_made_once(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    write_headers = ObjectFormat.write_headers

    def write(form: ObjectFormat, objects: Any) -> None:
        made.extend(key for _, key, _ in objects)
        write_headers(form, objects)

    monkeypatch.setattr(ObjectFormat, "write_headers", write)
    lender.lend([b"one", b"two"], [1, 2])
    line = joined(lender)
    for number, keys in enumerate(([b"one"], [b"one"], [b"one", b"two"])):
        read(lender, line, *keys, number=number)
        hears(lender, line, encode("done", number=number))
    assert made == [b"one", b"two"]
    block_rows(lender.pool)[3] = 7
    lender.lend([b"one"], [3])  # with other content
    read(lender, line, b"one", number=3)
    assert made == [b"one", b"two", b"one"]


def test_what_is_lent_has_the_name_of_its_group_and_rank() -> None:
    with (
        HostPool(ALIGNED, 2, layout="block_first", shared=True) as pool,
        Lender(pool, model=b"model", rank=2, group=3) as lender,
    ):
        lender.lend([b"one"], [1])
        assert list(lender._lent.objects) == [ObjectFormat(ALIGNED, b"model", rank=2, group=3).name_of(b"one")]


def test_a_manager_keeps_what_is_read_until_it_has_been_read(lender: Lender) -> None:
    pinned = Pinned()
    lender.begin(pinned)
    with pytest.raises(ValueError, match="another manager"):
        lender.begin(Pinned())
    change(lender.pool.domain, lambda: lender.stored([b"one", b"two", b"three"], [1, 2, 3]))
    line = joined(lender)
    assert read(lender, line, b"one", b"two", b"one") == [1, 2, 1]
    assert sorted(pinned.pins) == [b"one", b"two"]
    assert read(lender, line, b"one", number=1) == [1]
    hears(lender, line, encode("done", number=0))
    assert pinned.pins == [b"one"]
    change(lender.pool.domain, lambda: lender.removed([b"two", b"nobody's"]))
    assert blocks(lender) == {b"one": 1, b"three": 3}
    change(lender.pool.domain, lender.cleared)
    assert blocks(lender) == {}
    change(lender.pool.domain, lambda: lender.stored([b"four"], [4]))
    change(lender.pool.domain, lender.end)
    assert blocks(lender) == {}
    other = Pinned()
    lender.begin(other)
    hears(lender, line, encode("done", number=1))
    assert pinned.pins == other.pins == []  # of whoever had to keep it


def test_a_lender_is_one_over_the_pool_of_the_scheduler(lender: Lender) -> None:
    check_lender(lender, lender.pool)
    with pytest.raises(TypeError, match="lender is HostPool"):
        check_lender(lender.pool, lender.pool)
    with (
        HostPool(ALIGNED, 2, layout="block_first", shared=True) as other,
        pytest.raises(ValueError, match="another host pool"),
    ):
        check_lender(lender, other)


def test_a_lease_is_as_long_as_the_reader_asks_for_and_ten_seconds_at_most(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(lender._listening, "later", lambda seconds, _: waits.append(seconds))
    line = joined(lender)
    for number, timeout_ms in enumerate((500, 9_999, 60_000)):
        hears(lender, line, encode("read", number=number, names=[], timeout_ms=timeout_ms))
    assert waits == [0.5, 9.999, 10.0]


def test_what_comes_and_goes_unheard_is_not_told(lender: Lender) -> None:
    line = joined(lender)
    for call in (lambda: lender.lend([b"one"], [1]), lambda: lender.take_back([b"one"])):
        hears(lender, line, encode("more"))
        call()
        wait_for_thread(lender)
    hears(lender, line, encode("more"))
    assert [(len(one["added"]), len(one["removed"])) for one in line.heard[1:]] == [(0, 0), (32, 0), (0, 32)]
    hears(lender, line, encode("more"))  # it waits for more
    lender._listening.post(lambda: (lender.lend([b"one"], [1]), lender.take_back([b"one"])))
    wait_for_thread(lender)
    wait_for_thread(lender)  # and what that left for it
    assert len(line.heard) == 4


def test_only_the_first_end_of_what_there_is_is_told_without_a_name() -> None:
    count = MOST_NAMES + 1
    with one_reader(count) as (lender, line):
        keys = [b"%d" % number for number in range(count)]
        hears(lender, line, encode("join", version=VERSION))
        hears(lender, line, encode("more"))
        assert line.heard[-1] == {"kind": "news", "added": "", "removed": "", "is_all": True}
        lender.lend(keys, range(count))
        wait_for_thread(lender)
        hears(lender, line, encode("more"))
        assert not line.heard[-1]["is_all"]
        lender.take_back(keys[-1:])
        hears(lender, line, encode("more"))
        assert len(line.heard) == 3  # it knows nothing that is not so


def test_a_wrong_time_closes_nothing(lender: Lender) -> None:
    with pytest.raises(TypeError, match="timeout_s"):
        lender.close("soon")  # type: ignore[arg-type]
    lender.lend([b"one"], [1])
    assert joined(lender).heard


def test_who_comes_while_a_lender_closes_is_refused(lender: Lender) -> None:
    lender.close(WAIT_S)
    line = FakeLine()
    lender.received(line, encode("join", version=VERSION))  # type: ignore[arg-type]
    assert line.heard == []
    assert lender.stats()["readers"] == 0
    assert lender.stats()["refused_messages"] == 1


def test_a_lender_is_closed_behind_its_block(lender: Lender) -> None:
    with lender:
        pass
    with pytest.raises(ClosedError):
        lender.lend([b"one"], [1])


@pytest.mark.parametrize("joins", [False, True])
def test_a_connection_that_has_ended_is_forgotten_though_its_process_lives(lender: Lender, joins: bool) -> None:
    with socket.socket(socket.AF_UNIX) as reader:
        reader.connect(lender.path)
        if joins:
            data = encode("join", version=VERSION)
            reader.sendall(len(data).to_bytes(4, "big") + data)
            assert reader.recv(1)
        until(lambda: len(lender._listening._lines) == 1)
    until(lambda: not lender._listening._lines)
    assert lender.stats()["readers"] == 0
