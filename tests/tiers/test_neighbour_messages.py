"""What a lender and a reader hear: what is damaged, forged or comes at the wrong time changes nothing."""

from __future__ import annotations

import json
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import pytest

from paddle_kv import HostPool
from paddle_kv.memory.shared_memory import host_identity
from paddle_kv.peers.messages import MOST_BYTES, sealed
from paddle_kv.testing.tiers.rig import ALIGNED, WAIT_S
from paddle_kv.tiers.neighbours import Lender
from paddle_kv.tiers.neighbours.messages import ABSENT, BUSY, MOST_NAMES, TO_LENDER, TO_READER, VERSION, encode, heard
from paddle_kv.tiers.neighbours.neighbour import Answer, Neighbour
from paddle_kv.tracking.keeper import log
from tests.peers.test_messages import damaged

WRONG: list[Any] = [None, True, -1, 1.0, 1e999, 1 << 70, "", "1", [], [1], {}, "x" * 300, "é" * 32, 6, 99, "ab" * 17]


class FakeLine:
    """Keeps what is sent to it."""

    process_id = 0

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def send(self, data: bytes) -> None:
        self.heard.append(json.loads(data[8:]))

    def _close(self) -> None:
        pass


class FakeLoop:
    def later(self, seconds: float, job: Callable[[], object]) -> None:
        pass


def forged(rng: random.Random, true: list[bytes]) -> bytes:
    """One that does not fit its own form, with the right checksum."""
    found = json.loads(rng.choice(true)[8:])
    name = rng.choice(list(found))
    kind = rng.randrange(4)
    if kind == 0:
        del found[name]
    elif kind == 1:
        found[rng.choice(["extra", "grant_id", "__class__"])] = 1
    elif kind == 2:
        found["kind"] = rng.choice(["begin", "JOIN", "_close", "__init__", "ended", "close", 7, None])
    else:
        found[name] = rng.choice([one for one in WRONG if type(one) is not type(found[name])])
    text = json.dumps(found).encode() if rng.random() < 0.95 else b"[" * 3000
    return b"%08x" % zlib.crc32(text) + text


@contextmanager
def one_reader(num_blocks: int = 6) -> Iterator[tuple[Lender, Any]]:
    """A lender over so many blocks, and the line of a reader that the test plays."""
    pool = HostPool(ALIGNED, num_blocks, layout="block_first", shared=True)
    with pool, Lender(pool, model=b"model") as lender:
        line = FakeLine()
        yield lender, line
        lender.gone(line)  # type: ignore[arg-type]


def test_ten_thousand_messages_to_a_lender() -> None:
    with one_reader() as (lender, line):
        lender.lend([b"one", b"two"], [3, 5])
        names = list(lender._lent.objects)
        lender.received(line, encode("join", version=VERSION))
        lender.received(line, encode("read", number=4, names=names, timeout_ms=60_000))
        rng = random.Random(3)
        true = [
            encode("join", version=VERSION),
            encode("more"),
            encode("read", number=7, names=names, timeout_ms=1000),
            encode("done", number=4),
        ]
        for number in range(10_000):
            data = damaged(rng, rng.choice(true)) if number % 2 else forged(rng, true)
            lender.received(line, data)
        assert lender.stats() == {
            "lent_blocks": 2,
            "leased_blocks": 2,
            "readers": 1,
            "read_blocks": 2,
            "expired_blocks": 0,
            "refused_messages": 10_000,
        }
        assert [one["kind"] for one in line.heard] == ["hello", "lent"]
        assert line.heard[1]["blocks"] == [3, 5]


@pytest.mark.parametrize(
    "data",
    [
        encode("join", version=VERSION),  # again
        encode("done", number=1 << 53),
        encode("read", number=1, names=[b"x" * 16], timeout_ms=60_000),  # a number that is in use
        encode("read", number=2, names=[b"x" * 15], timeout_ms=60_000),
        encode("read", number=2, names=[b"x" * 16], timeout_ms=-1),
        encode("lent", number=2, blocks=[1]),
    ],
)
def test_what_makes_no_sense_to_a_lender(data: bytes) -> None:
    with one_reader() as (lender, stranger):
        for early in (encode("more"), encode("read", number=0, names=[], timeout_ms=1), encode("done", number=0)):
            lender.received(stranger, early)
        lender.received(stranger, encode("join", version=VERSION + 1))
        assert lender.stats()["refused_messages"] == 4
        lender.received(stranger, encode("join", version=VERSION))
        lender.received(stranger, encode("read", number=1, names=[b"x" * 16], timeout_ms=60_000))
        lender.received(stranger, encode("more"))
        assert [one["kind"] for one in stranger.heard] == ["hello", "lent", "news"]
        lender.received(stranger, data)
        assert lender.stats()["refused_messages"] == 5
        assert len(stranger.heard) == 3
        lender.received(stranger, encode("more"))
        lender.received(stranger, encode("more"))  # before it has been answered
        assert lender.stats()["refused_messages"] == 6


def test_a_lender_bounds_what_a_reader_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_kv.tiers.neighbours.lender.MOST_READS", 3)
    with one_reader() as (lender, line):
        lender.received(line, encode("join", version=VERSION))
        for number in range(5):
            lender.received(line, encode("read", number=number, names=[b"n" * 16], timeout_ms=60_000))
        assert [one["blocks"] for one in line.heard[1:]] == [[ABSENT]] * 3 + [[BUSY]] * 2
        assert len(lender._readers[line].reads) == 3
        lender.received(line, encode("done", number=4))
        assert lender.stats()["refused_messages"] == 0


def test_a_name_that_was_lent_again_for_a_moment_is_taken_back() -> None:
    with one_reader() as (lender, line):
        lender.lend([b"one", b"two"], [0, 1])
        wait_for_thread(lender)
        lender.received(line, encode("join", version=VERSION))
        lender.received(line, encode("more"))
        lender.take_back([b"one"])
        for call in (lambda: lender.lend([b"one"], [0]), lambda: lender.take_back([b"one"])):
            wait_for_thread(lender)  # each is a change of its own
            call()
        busy = threading.Event()
        lender._listening.post(lambda: busy.wait(WAIT_S))
        lender.take_back([b"two"])  # these are one
        lender.lend([b"two"], [1])
        lender.take_back([b"two"])
        busy.set()
        wait_for_thread(lender)
        lender.received(line, encode("more"))
        assert (line.heard[-1]["added"], len(line.heard[-1]["removed"])) == ("", 2 * 32)


def wait_for_thread(lender: Lender) -> None:
    """It has done what it was given before."""
    done = threading.Event()
    lender._listening.post(done.set)
    assert done.wait(WAIT_S)


def hears(lender: Lender, line: Any, data: bytes) -> None:
    """In the thread in which it does."""
    lender._listening.post(lambda: lender.received(line, data))
    wait_for_thread(lender)


def test_the_end_of_what_there_is_is_told_though_the_rest_has_gone_meanwhile() -> None:
    count = MOST_NAMES + 1
    with one_reader(count) as (lender, line):
        keys = [b"%d" % number for number in range(count)]
        lender.lend(keys, range(count))
        hears(lender, line, encode("join", version=VERSION))
        hears(lender, line, encode("more"))
        assert not line.heard[-1]["is_all"]
        lender.take_back(keys[-1:])
        hears(lender, line, encode("more"))
        assert (line.heard[-1]["added"], line.heard[-1]["is_all"]) == ("", True)


def test_a_number_that_is_used_again_has_a_time_of_its_own() -> None:
    with one_reader() as (lender, line):
        lender.lend([b"one"], [1])
        name = next(iter(lender._lent.objects))
        hears(lender, line, encode("join", version=VERSION))
        brief, done = encode("read", number=1, names=[name], timeout_ms=50), encode("done", number=1)
        # In one go: its time cannot be over in between.
        lender._listening.post(lambda: [lender.received(line, data) for data in (brief, done)])
        hears(lender, line, encode("read", number=1, names=[name], timeout_ms=60_000))
        time.sleep(0.2)
        assert (lender.stats()["leased_blocks"], lender.stats()["expired_blocks"]) == (1, 0)


def test_who_waits_for_a_block_is_woken_when_it_is_read() -> None:
    with one_reader() as (lender, line):
        lender.lend([b"one"], [1])
        name = next(iter(lender._lent.objects))
        hears(lender, line, encode("join", version=VERSION))
        hears(lender, line, encode("read", number=1, names=[name], timeout_ms=60_000))
        written = threading.Event()

        def write() -> None:
            with lender.pool.lease([1], write=True, timeout_s=WAIT_S):
                written.set()

        threading.Thread(target=write, daemon=True).start()
        assert not written.wait(0.1)
        hears(lender, line, encode("done", number=1))
        assert written.wait(WAIT_S / 4)


def test_a_reader_that_does_not_ask_costs_a_lender_no_more_than_its_blocks() -> None:
    with one_reader() as (lender, line):
        lender.lend([b"told"], [5])
        wait_for_thread(lender)
        lender.received(line, encode("join", version=VERSION))
        lender.received(line, encode("more"))
        for number in range(100):
            lender.lend([b"%d" % number], [number % 6])
        lender.take_back([b"95"])
        wait_for_thread(lender)
        assert len(lender._readers[line].changed) == 6  # five that are lent, and one that was
        lender.received(line, encode("more"))
        news = line.heard[-1]
        assert (len(news["added"]), len(news["removed"]), news["is_all"]) == (5 * 32, 32, True)


class Hearing:
    """A neighbour that has joined a lender which the test plays."""

    def __init__(self, pool: HostPool) -> None:
        self.lender = Lender(pool, model=b"model")
        self.line: Any = FakeLine()
        self.line.process_id = pool.export().allocations[0].process_id  # type: ignore[union-attr]
        self.neighbour = Neighbour(FakeLoop(), "/nobody", lambda: None)  # type: ignore[arg-type]
        self.neighbour._line = self.line
        self.memory = [astuple(pool.export().allocations[0]), astuple(self.lender._lent.headers.handle())]
        self.answers: list[Answer | None] = []

    def hello(self, **changes: Any) -> bytes:
        form, pool = self.lender._form, self.lender.pool
        values = {
            "version": VERSION,
            "host": host_identity(),
            "num_blocks": pool.num_blocks,
            "block_bytes": form.payload_bytes,
            "header_bytes": form.header_bytes,
            "blocks": self.memory[0],
            "headers": self.memory[1],
        }
        return encode("hello", **{**values, **changes})

    def hear(self, data: bytes) -> int:
        """How many it has refused so far."""
        self.neighbour._heard(self.line, data)
        return self.neighbour.refused

    def ask(self, count: int) -> None:
        class Item:
            name = b"n" * 16

        self.neighbour.ask([Item()] * count, 1.0, self.answers.append)  # type: ignore[list-item]


def test_ten_thousand_messages_to_a_reader() -> None:
    with HostPool(ALIGNED, 6, layout="block_first", shared=True) as pool:
        hearing = Hearing(pool)
        assert hearing.hear(hearing.hello()) == 0
        hearing.ask(2)
        assert hearing.hear(encode("news", added=[b"a" * 16], removed=[], is_all=True)) == 0
        rng = random.Random(4)
        true = [
            hearing.hello(),
            encode("news", added=[b"b" * 16], removed=[b"a" * 16], is_all=False),
            encode("lent", number=0, blocks=[1, ABSENT]),
        ]
        for number in range(10_000):
            data = damaged(rng, rng.choice(true)) if number % 2 else forged(rng, true)
            assert hearing.hear(data) == number + 1, data
        assert (hearing.answers, hearing.neighbour.names) == ([], {b"a" * 16})
        hearing.hear(true[2])
        assert [one and ([block for _, block in one.found], len(one.absent)) for one in hearing.answers] == [([1], 1)]
        hearing.lender.close()


def test_a_hello_is_of_memory_of_that_process_and_size() -> None:
    with HostPool(ALIGNED, 6, layout="block_first", shared=True) as pool:
        hearing = Hearing(pool)
        blocks, headers = (list(one) for one in hearing.memory)
        wrong = [
            {"version": VERSION + 1},
            {"host": "another"},
            {"num_blocks": 7},
            {"num_blocks": 0},
            {"block_bytes": 1},
            {"block_bytes": 1 << 60, "num_blocks": 1 << 50},
            {"header_bytes": hearing.lender._form.header_bytes * 2},
            {"blocks": headers},
            {"blocks": [blocks[0] + 1, *blocks[1:]]},
            {"blocks": [1, *blocks[1:]]},
            {"blocks": [blocks[0], -1, "0" * 32, blocks[3]]},
            {"blocks": [blocks[0], 10**300, "0" * 32, blocks[3]]},
            {"blocks": [*blocks[:2], "", blocks[3]]},
            {"blocks": [*blocks[:2], "0" * 32, blocks[3]]},
            {"blocks": [*blocks[:2], "../" + "0" * 29, blocks[3]]},
            {"blocks": [*blocks[:2], blocks[2], float(blocks[3])]},
            {"headers": headers[:3]},
            {"headers": []},
        ]
        for number, changes in enumerate(wrong):
            assert hearing.hear(hearing.hello(**changes)) == number + 1, changes
            hearing.neighbour._line = hearing.line  # it is called again
            assert hearing.neighbour.memory is None
        assert hearing.hear(encode("news", added=[], removed=[], is_all=True)) == len(wrong) + 1  # nobody yet
        assert hearing.hear(hearing.hello()) == len(wrong) + 1
        assert hearing.neighbour.memory is not None
        assert hearing.hear(hearing.hello()) == len(wrong) + 2  # again
        hearing.lender.close()


def test_an_answer_names_blocks_that_are_there() -> None:
    with HostPool(ALIGNED, 6, layout="block_first", shared=True) as pool:
        hearing = Hearing(pool)
        hearing.hear(hearing.hello())
        hearing.ask(2)
        wrong: list[list[Any]] = [[0], [0, 1, 2], [0, 6], [-3, 0], [0, True], [0, 1.0], [0, None], [0, "1"], [0, [1]]]
        for number, blocks in enumerate(wrong):
            assert hearing.hear(encode("lent", number=0, blocks=blocks)) == number + 1
        assert hearing.hear(encode("lent", number=1, blocks=[0, 1])) == len(wrong) + 1  # nobody has asked
        assert hearing.answers == []
        assert hearing.hear(encode("lent", number=0, blocks=[0, 5])) == len(wrong) + 1
        assert len(hearing.answers) == 1
        assert hearing.hear(encode("lent", number=0, blocks=[0, 5])) == len(wrong) + 1  # late: it changes nothing
        assert len(hearing.answers) == 1
        hearing.lender.close()


def test_names_without_end_are_refused() -> None:
    with HostPool(ALIGNED, 6, layout="block_first", shared=True) as pool:
        hearing = Hearing(pool)
        hearing.hear(hearing.hello())
        for number in range(20):
            added = [b"%08d%08d" % (number, one) for one in range(MOST_NAMES)]
            hearing.hear(encode("news", added=added, removed=[], is_all=False))
        assert len(hearing.neighbour.names) <= 2 * pool.num_blocks + MOST_NAMES
        assert hearing.neighbour.refused == 19
        hearing.lender.close()


def test_the_longest_messages_fit() -> None:
    names = [b"\xff" * 16] * MOST_NAMES
    for kinds, data in (
        (TO_LENDER, encode("read", number=(1 << 53) - 1, names=names, timeout_ms=(1 << 53) - 1)),
        (TO_READER, encode("news", added=names, removed=[], is_all=False)),
        (TO_READER, encode("lent", number=(1 << 53) - 1, blocks=[(1 << 31) - 1] * MOST_NAMES)),
    ):
        assert len(data) <= MOST_BYTES
        assert heard(data, kinds) is not None
    assert heard(encode("read", number=0, names=[*names, b"x" * 16], timeout_ms=1), TO_LENDER) is None
    assert heard(encode("lent", number=0, blocks=[0] * (MOST_NAMES + 1)), TO_READER) is None


@pytest.mark.parametrize(
    "text",
    [
        "ab" * 15,
        "ab" * 17,
        "a" * 31,
        "zz" * 16,
        "é" * 32,
        *(f"{'ab' * 15}{blank}{blank}" for blank in " \t\n\r"),
        " ".join(["ab" * 16] * 2),
        f"{'ab' * 16}\t",
    ],
)
def test_what_are_no_names_is_refused(text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", log.name)

    def news(added: str) -> dict[str, Any] | None:
        return heard(sealed({"kind": "news", "added": added, "removed": "", "is_all": False}), TO_READER)

    assert news(text) is None
    [record] = caplog.records
    assert record.getMessage().startswith("a message was refused: n")  # and why
    found = news("AB" * 32)
    assert found is not None
    assert found["added"] == [b"\xab" * 16] * 2


def test_numbers_are_in_their_range() -> None:
    def lent(number: int, blocks: Any) -> dict[str, Any] | None:
        return heard(encode("lent", number=number, blocks=blocks), TO_READER)

    def read(timeout_ms: int) -> dict[str, Any] | None:
        return heard(encode("read", number=0, names=[], timeout_ms=timeout_ms), TO_LENDER)

    most = (1 << 53) - 1
    assert [lent(number, []) is not None for number in (-1, 0, most, most + 1)] == [False, True, True, False]
    assert [read(number) is not None for number in (-1, 0, most, most + 1)] == [False, True, True, False]
    assert [lent(0, [1] * count) is not None for count in (0, MOST_NAMES, MOST_NAMES + 1)] == [True, True, False]
    values: dict[str, Any] = {"num_blocks": 1, "block_bytes": 1, "header_bytes": 1, "version": 0}
    for name, least in values.items():
        for wrong in (least - 1, most + 1):
            changed = {**values, name: wrong}
            assert heard(encode("hello", host="", blocks=[], headers=[], **changed), TO_READER) is None
    for name in ("blocks", "headers"):
        for count in (MOST_NAMES, MOST_NAMES + 1):
            lists = {"blocks": [], "headers": [], name: [1] * count}
            found = heard(encode("hello", host="", **lists, **values), TO_READER)
            assert (found is not None) == (count == MOST_NAMES)
    hello = heard(encode("hello", host="h", blocks=[3], headers=[4], **values), TO_READER)
    assert hello == {"kind": "hello", "host": "h", "blocks": [3], "headers": [4], **values}
