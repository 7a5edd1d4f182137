"""When a reader calls a lender, asks it, and leaves it alone: the test plays its loop, and the lender."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv import HostPool
from paddle_kv.testing.tiers.rig import ALIGNED, WAIT_S
from paddle_kv.tiers.neighbours import neighbour as neighbour_module
from paddle_kv.tiers.neighbours.lent import Leased
from paddle_kv.tiers.neighbours.messages import ABSENT, BUSY, VERSION, encode
from paddle_kv.tiers.neighbours.neighbour import ANSWER_S, Answer, Memory, Neighbour
from tests.tiers.test_neighbour_messages import FakeLine, Hearing


class PlayedLoop:
    """Does at once what is left for it, and keeps what is to be done later."""

    def __init__(self) -> None:
        self.timed: list[tuple[float, Callable[[], object]]] = []

    def post(self, job: Callable[[], object]) -> None:
        job()

    def later(self, seconds: float, job: Callable[[], object]) -> None:
        self.timed.append((seconds, job))

    def watch(self, *_: object) -> None:
        pass

    def forget(self, *_: object) -> None:
        pass

    @property
    def waits(self) -> list[float]:
        return [seconds for seconds, _ in self.timed]

    def go_on(self) -> None:
        """What was to be done first."""
        self.timed.pop(0)[1]()


class Played(Hearing):
    """With a loop that the test plays. It has joined, and been told that ``names`` are all."""

    def __init__(self, pool: HostPool, names: list[bytes]) -> None:
        super().__init__(pool)
        self.loop, self.changes = PlayedLoop(), 0
        self.neighbour = Neighbour(self.loop, "/nobody", self._changed)  # type: ignore[arg-type]
        self.come_back()
        if names:
            self.hear(encode("news", added=names, removed=[], is_all=True))

    def _changed(self) -> None:
        self.changes += 1

    def come_back(self) -> None:
        self.neighbour._line = self.line = FakeLine()
        self.line.process_id = os.getpid()
        self.hear(self.hello())

    def ask_for(self, timeout_s: float, *names: bytes) -> None:
        items: Any = [SimpleNamespace(name=name) for name in names]
        self.neighbour.ask(items, timeout_s, self.answers.append)

    def answer(self, number: int, *blocks: int) -> Answer | None:
        """What comes of this answer of the lender."""
        self.hear(encode("lent", number=number, blocks=list(blocks)))
        return self.answers[-1]


@contextmanager
def played(*names: bytes) -> Iterator[Played]:
    with HostPool(ALIGNED, 6, layout="block_first", shared=True) as pool:
        made = Played(pool, list(names))
        yield made
        made.lender.close(WAIT_S)


@pytest.fixture
def path() -> Iterator[Path]:
    """Of a socket that is short enough, in a private folder."""
    with tempfile.TemporaryDirectory(prefix="paddle_kv-") as folder:
        yield Path(folder) / "lender"


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        made.listen(0)
        made.setblocking(False)
        yield made


def calling(path: Path) -> tuple[PlayedLoop, Neighbour]:
    loop = PlayedLoop()
    return loop, Neighbour(loop, str(path), lambda: None)  # type: ignore[arg-type]


NAME, OTHER = b"n" * 16, b"o" * 16


# ---- calls ----
def test_who_is_not_there_is_called_more_and_more_seldom(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop, neighbour = calling(path)
    neighbour.call()
    for expected in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0):
        assert loop.waits == [expected]
        loop.go_on()
    assert not caplog.records  # which is nothing to be told


def test_who_comes_back_is_called_soon_when_it_has_gone() -> None:
    with played() as reader:
        neighbour, loop = reader.neighbour, reader.loop
        for expected in ([0.1], [0.1, 0.2]):  # two that are gone before they have said where their memory is
            neighbour._line = FakeLine()  # type: ignore[assignment]
            neighbour._ended(neighbour._line)  # type: ignore[arg-type]
            assert loop.waits == expected
        reader.come_back()
        neighbour._ended(reader.line)
        assert loop.waits == [0.1, 0.2, 0.1]
        neighbour._ended(reader.line)  # as the end of its process, behind that of its connection
        assert loop.waits == [0.1, 0.2, 0.1]


def test_who_is_connected_is_told_so_once(path: Path) -> None:
    loop, neighbour = calling(path)
    with listening(path) as lender:
        neighbour.call()
        connected, _ = lender.accept()
        with connected:
            size = int.from_bytes(connected.recv(4), "big")
            assert json.loads(connected.recv(1 << 16)[8:size]) == {"kind": "join", "version": VERSION}
            neighbour.call()
            with pytest.raises(BlockingIOError):
                lender.accept()
            neighbour.close()
            assert connected.recv(1) == b""
    assert loop.timed == []


def test_who_is_closed_calls_nobody(path: Path) -> None:
    _, neighbour = calling(path)
    neighbour.close()
    with listening(path) as lender:
        neighbour.call()  # for which it was waiting
        with pytest.raises(BlockingIOError):
            lender.accept()


def test_a_lender_that_takes_no_connections_is_not_waited_for(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop, neighbour = calling(path)
    with listening(path), socket.socket(socket.AF_UNIX) as first:
        first.connect(str(path))
        call = threading.Thread(target=neighbour.call, daemon=True)
        call.start()
        call.join(WAIT_S / 4)
        assert loop.waits == [0.1]
    assert not caplog.records


def test_a_lender_of_another_user_is_hung_up_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    made: list[socket.socket] = []

    def make(*given: Any) -> socket.socket:
        made.append(socket.socket(*given))
        return made[-1]

    monkeypatch.setattr(neighbour_module, "socket", SimpleNamespace(AF_UNIX=socket.AF_UNIX, socket=make))
    loop, neighbour = calling(path)
    with listening(path) as lender:
        neighbour.call()
        connected, _ = lender.accept()
        with connected:
            assert connected.recv(1) == b""
    assert [one.fileno() for one in made] == [-1]
    assert loop.waits == [0.1]
    [record] = caplog.records
    assert str(path) in record.getMessage()
    assert "it is not trusted" in record.getMessage()


def test_memory_that_cannot_be_mapped_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    with played() as reader:
        reader.neighbour._ended(reader.line)
        reader.neighbour._line = reader.line = FakeLine()
        assert reader.hear(reader.hello(host="another")) == 1
        [record] = caplog.records
        assert "it is on another host" in record.getMessage()
        assert reader.neighbour._line is None
        assert reader.loop.waits == [0.1, 0.2]
        assert reader.hear(encode("news", added=[NAME], removed=[], is_all=True)) == 1  # what it had sent is not heard
        reader.come_back()
        assert reader.neighbour.asked


def test_what_goes_on_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with played() as reader:
        for again in (1, 2):
            for host in ("another", "another", "a third", "another"):
                reader.neighbour._ended(reader.line)
                reader.neighbour._line = reader.line = FakeLine()
                reader.hear(reader.hello(host=host))
            told = [record.getMessage()[-9:] for record in caplog.records]
            assert told == ["'another'", "'a third'", "'another'"] * again
            reader.come_back()


# ---- what it is told ----
def test_all_is_told_when_the_lender_says_so() -> None:
    with played() as reader:
        neighbour = reader.neighbour
        assert [one["kind"] for one in reader.line.heard] == ["more"]
        reader.hear(encode("news", added=[NAME], removed=[], is_all=False))
        assert (neighbour.told, reader.changes) == (False, 0)
        for number in (1, 2):
            reader.hear(encode("news", added=[OTHER], removed=[NAME], is_all=True))
            assert (neighbour.told, reader.changes, neighbour.removed) == (True, 1, number)
        assert neighbour.names == {OTHER}
        assert [one["kind"] for one in reader.line.heard] == ["more"] * 4
        neighbour._ended(reader.line)
        assert (neighbour.told, neighbour.names, neighbour.memory, neighbour.asked) == (False, set(), None, False)
        reader.come_back()
        reader.hear(encode("news", added=[NAME], removed=[], is_all=True))
        assert (neighbour.told, reader.changes) == (True, 2)


def test_twice_as_many_names_as_blocks_are_kept_and_one_message_more() -> None:
    with played() as reader:
        for number in range(12):
            assert reader.hear(encode("news", added=[b"%016d" % number], removed=[], is_all=True)) == 0
        assert reader.hear(encode("news", added=[NAME], removed=[], is_all=True)) == 0
        assert reader.hear(encode("news", added=[OTHER], removed=[], is_all=True)) == 1
        assert len(reader.neighbour.names) == 13


# ---- questions ----
def test_an_answer_says_of_each_where_it_is() -> None:
    with played(NAME, OTHER) as reader:
        reader.ask_for(1.5, NAME, OTHER, NAME, NAME)
        assert reader.loop.waits == [1.5]
        asked = {"kind": "read", "number": 0, "names": (NAME + OTHER + NAME + NAME).hex(), "timeout_ms": 1500}
        assert reader.line.heard[-1] == asked
        answer = reader.answer(0, 3, ABSENT, BUSY, 0)
        assert answer is not None
        assert answer.memory is reader.neighbour.memory
        assert [(item.name, block) for item, block in answer.found] == [(NAME, 3), (NAME, 0)]
        assert [item.name for item in answer.absent] == [OTHER]
        assert [item.name for item in answer.busy] == [NAME]
        assert reader.neighbour.names == {NAME}
        answer.done()
        assert reader.line.heard[-1] == {"kind": "done", "number": 0}
        count = len(reader.line.heard)
        reader.loop.go_on()  # the time is over
        assert (reader.answers, reader.neighbour.errors, len(reader.line.heard)) == ([answer], 0, count)


def test_what_nobody_has_asked_is_not_answered() -> None:
    with played(NAME) as reader:
        assert reader.hear(encode("lent", number=0, blocks=[1])) == 1
        for number in range(2):
            reader.ask_for(1.0, NAME)
            assert reader.line.heard[-1]["number"] == number
        assert reader.hear(encode("lent", number=2, blocks=[1])) == 2
        assert reader.answers == []
        assert reader.answer(1, 5) is not None
        assert reader.answer(0, 4) is not None
        assert len(reader.answers) == 2


def test_who_does_not_answer_is_not_asked_until_it_says_something() -> None:
    with played(NAME) as reader:
        neighbour = reader.neighbour
        reader.ask_for(60.0, NAME)
        assert reader.loop.waits == [ANSWER_S] == [2.0]
        reader.loop.go_on()
        assert (reader.answers, neighbour.errors, neighbour.asked) == ([None], 1, False)
        assert reader.line.heard[-1] == {"kind": "done", "number": 0}
        assert reader.loop.timed == []
        assert reader.hear(encode("lent", number=0, blocks=[1])) == 0  # late
        assert (reader.answers, neighbour.asked) == ([None], True)


@pytest.mark.parametrize("says", [False, True])
def test_who_does_not_answer_in_a_short_time_has_two_seconds_to_say_anything(says: bool) -> None:
    with played(NAME) as reader:
        neighbour = reader.neighbour
        reader.ask_for(0.5, NAME)
        reader.loop.go_on()
        assert (reader.answers, neighbour.errors, neighbour.asked) == ([None], 1, True)
        assert reader.loop.waits == [1.5]
        if says:
            reader.hear(encode("news", added=[], removed=[], is_all=True))
        reader.loop.go_on()
        assert neighbour.asked == says


def test_what_is_asked_of_one_that_ends_is_not_answered() -> None:
    with played(NAME) as reader:
        neighbour, asked = reader.neighbour, reader.loop.timed
        for _ in range(2):
            reader.ask_for(0.5, NAME)
        neighbour._ended(reader.line)
        assert (reader.answers, neighbour.errors) == ([None, None], 2)
        reader.come_back()
        heard = len(reader.line.heard)
        for _ in range(2):
            reader.loop.go_on()  # the times of these questions
        assert (reader.answers, neighbour.errors, len(reader.line.heard)) == ([None, None], 2, heard)
        assert len(asked) == 1
        assert neighbour.asked


def test_a_neighbour_that_is_closed_answers_what_was_asked() -> None:
    with played(NAME) as reader:
        reader.ask_for(0.5, NAME)
        reader.neighbour.close()
        assert reader.answers == [None]
        assert reader.neighbour.memory is None


# ---- memory ----
def test_header_and_block_are_one_object() -> None:
    with played() as reader:
        memory, form = reader.neighbour.memory, reader.lender._form
        assert isinstance(memory, Memory)
        sizes = (memory.num_blocks, memory.header_bytes, memory.object_bytes)
        assert sizes == (6, form.header_bytes, form.header_bytes + form.payload_bytes)
        reader.lender.lend([b"one"], [4])
        [one] = reader.lender._lent.objects.values()
        lent = reader.lender._lent
        lent.write_headers(Leased([one], None))
        lent._payload(4)[:] = bytes(range(256)) * (form.payload_bytes // 256)
        whole = bytes(lent._header(4)) + bytes(lent._payload(4))
        found = bytearray(memory.object_bytes)
        cut = form.header_bytes, form.header_bytes + 1000
        targets = [memoryview(found)[: cut[0]], memoryview(found)[cut[0] : cut[1]], memoryview(found)[cut[1] :]]
        memory.copy(4, 0, targets)
        assert bytes(found) == whole
