"""The search: it finds each order that makes a difference, and no other one."""

from __future__ import annotations

import pytest

from paddle_kv.testing.simulator import Exploration, LateChooser, RandomChooser, explore
from paddle_kv.testing.simulator.chooser import Chooser
from paddle_kv.testing.simulator.device import PATIENCE, Deadlock, Device, Job, SimulatedStream, Step
from paddle_kv.testing.simulator.memory import Cell


def cell(number: int) -> Cell:
    return Cell("pool", "key", 0, number)


def step(name: str, order: list[str], reads: tuple[Cell, ...] = (), writes: tuple[Cell, ...] = ()) -> Step:
    return Step(Job(name, ""), lambda: order.append(name), reads, writes)


def orders(streams: list[list[tuple[str, tuple[Cell, ...], tuple[Cell, ...]]]]) -> tuple[list[str], Exploration]:
    """All orders of steps (name, reads, writes) that are tried."""
    tried: list[str] = []

    def scenario(chooser: Chooser) -> None:
        device, order = Device(chooser, pieces=1), []  # type: ignore[var-annotated]
        for number, steps in enumerate(streams):
            stream = device.add_stream(str(number))
            device.steps(stream, [step(name, order, reads, writes) for name, reads, writes in steps])
        device.drain(device.streams)
        if not chooser.pruned:  # type: ignore[attr-defined]
            tried.append("".join(order))

    return tried, explore(scenario)


def test_independent_streams_need_one_order() -> None:
    one = [("a", (), (cell(0),)), ("b", (), (cell(0),))]
    two = [("c", (), (cell(1),)), ("d", (cell(1),), ())]
    tried, result = orders([one, two])
    assert result.orders == len(tried) == 1 and result.complete


def test_readers_need_one_order() -> None:
    tried, _ = orders([[("a", (cell(0),), ())], [("b", (cell(0),), ())]])
    assert len(tried) == 1


def test_two_writers_need_both_orders() -> None:
    tried, result = orders([[("a", (), (cell(0),))], [("b", (), (cell(0),))]])
    assert sorted(tried) == ["ab", "ba"] and result.complete


def test_conflicting_queues_need_all_interleavings() -> None:
    one = [(name, (), (cell(0),)) for name in "ab"]
    two = [(name, (), (cell(0),)) for name in "xyz"]
    tried, result = orders([one, two])
    assert len(set(tried)) == len(tried) == result.orders == 10  # 5 over 2


def test_only_the_conflict_counts() -> None:
    # p and q touch nothing in common with the others: two classes, by who of a and b is first.
    one = [("p", (), (cell(1),)), ("a", (), (cell(0),))]
    two = [("q", (), (cell(2),)), ("b", (cell(0),), ())]
    tried, _ = orders([one, two])
    assert {order.index("a") < order.index("b") for order in tried} == {True, False}
    assert len(tried) == 2


def test_host_sees_both_answers() -> None:
    answers = []

    def scenario(chooser: Chooser) -> None:
        device = Device(chooser, pieces=1)
        stream = device.add_stream("a")
        device.steps(stream, [step("a", []), step("b", [])])
        mark = device.record(stream)
        answer = device.look(mark, 0.0)
        device.drain(device.streams)
        if not chooser.pruned:  # type: ignore[attr-defined]
            answers.append(answer)

    assert explore(scenario).complete
    assert sorted(answers) == [False, True]


def test_search_ends_at_the_bound() -> None:
    streams = [[(name, (), (cell(0),)) for name in names] for names in ("abc", "xyz")]

    def scenario(chooser: Chooser) -> None:
        device = Device(chooser, pieces=1)
        for steps in streams:
            device.steps(device.add_stream(steps[0][0]), [step(*s[:1], [], *s[1:]) for s in steps])
        device.drain(device.streams)

    assert explore(scenario, max_runs=7) == Exploration(orders=7, runs=7, complete=False)


def test_wait_holds_a_stream_until_the_event() -> None:
    for seed in range(20):
        order: list[str] = []
        device = Device(RandomChooser(seed), pieces=1)
        first, second = device.add_stream("first"), device.add_stream("second")
        device.steps(first, [step("a", order), step("b", order)])
        mark = device.record(first)
        device.wait(second, mark)
        device.steps(second, [step("c", order)])
        assert not mark.passed
        device.drain(device.streams)
        assert mark.passed and order == ["a", "b", "c"]


def test_random_choices_repeat_with_their_seed_and_differ_without() -> None:
    def run(seed: int) -> str:
        order: list[str] = []
        device = Device(RandomChooser(seed), pieces=1)
        for names in ("abcdef", "uvwxyz"):
            device.steps(device.add_stream(names), [step(name, order) for name in names])
        device.drain(device.streams)
        return "".join(order)

    assert [run(seed) for seed in range(5)] == [run(seed) for seed in range(5)]
    assert len({run(seed) for seed in range(5)}) > 1


def test_who_polls_for_ever_is_answered() -> None:
    device = Device(LateChooser(), pieces=1)
    stream = device.add_stream("a")
    device.steps(stream, [step("a", [])])
    mark = device.record(stream)
    assert [device.look(mark, 0.0) for _ in range(PATIENCE + 1)] == [False] * PATIENCE + [True]


def test_deadlock_is_reported() -> None:
    device = Device(LateChooser(), pieces=1)
    stream: SimulatedStream = device.add_stream("a")
    device.steps(stream, [step("a", [])])
    mark = device.record(stream)
    stream.held = True
    assert not device.look(mark, 0.0)
    with pytest.raises(Deadlock, match="a: 2 left"):
        device.look(mark, None)
