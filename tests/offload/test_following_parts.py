"""What a load hears of the tier that it follows, by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv.offload import following
from paddle_kv.offload.following import Following

LAYERS = 5


def part(*, layers: int = 0, known: bool = False, lost: tuple[bytes, ...] = ()) -> Any:
    return SimpleNamespace(num_layers=layers, known=known, lost=frozenset(lost), followers=[])


class Load:
    """Of keys a, b and c."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *parts: Any) -> None:
        self.over = self.failed = self.told = False
        self.plan = SimpleNamespace(num_layers=LAYERS)
        self.marked: list[int] = []  # how many layers
        self.failures: list[str] = []
        marks = SimpleNamespace(
            mark=lambda one, layers: self.marked.append(len(layers)),
            fail=lambda one, message: self.failures.append(message),
        )
        monkeypatch.setattr(following, "arriving", marks)
        self.parts: Any = parts
        me: Any = self
        Following(me, [b"a", b"b", b"c"], parts)

    def tell(self, number: int) -> None:
        for one in self.parts[number].followers:
            one()


def test_a_layer_is_there_when_all_have_brought_it(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(monkeypatch, part(layers=3), part(layers=1))
    assert load.marked == [1]
    load.parts[1].num_layers = 2
    load.tell(1)
    load.parts[0].known = True
    load.tell(0)
    load.parts[1].num_layers = 4
    load.tell(1)
    assert load.marked == [1, 2, 2, 4]
    load.parts[1].known = True  # it may have brought them at once, without a word before
    load.tell(1)
    assert load.marked[-1] == LAYERS
    assert not load.failures


def test_what_others_have_lost_is_nothing_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(monkeypatch, part(known=True, lost=(b"x",)))
    assert (load.marked, load.failures) == ([LAYERS], [])


def test_it_fails_with_what_is_lost_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(monkeypatch, part(layers=1), part(layers=1))
    load.parts[1].known, load.parts[1].lost = True, frozenset([b"x", b"b"])
    load.tell(1)
    assert load.marked == [1] and load.told
    assert load.failures == ["1 of 3 blocks did not come from the tier"]


@pytest.mark.parametrize("end", ["over", "failed"])
def test_behind_its_end_it_hears_nothing(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    load = Load(monkeypatch, part(layers=1))
    setattr(load, end, True)
    load.parts[0].num_layers, load.parts[0].lost = 2, frozenset([b"a"])
    load.tell(0)
    assert (load.marked, load.failures) == ([1], [])
