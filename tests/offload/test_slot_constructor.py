"""A message is in all that can be seen what a frozen dataclass is."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass, make_dataclass, replace
from typing import Any

import pytest

from paddle_kv.offload.jobs import Job, Outcome, Result, SavePlan
from paddle_kv.offload.slot_constructor import slot_constructor

MESSAGES = [Job, Result, Outcome, SavePlan]


@slot_constructor
@dataclass(frozen=True, slots=True)
class Made:
    """In two ways."""

    number: int
    names: tuple[str, ...]
    late: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """In two ways."""

    number: int
    names: tuple[str, ...]
    late: bool = False
    reason: str | None = None


BOTH: Any = (Made, Expected)


def told(call: Any, kind: Any) -> str:
    with pytest.raises((TypeError, FrozenInstanceError, AttributeError)) as raised:
        call(kind)
    return repr(raised.value).replace("Expected", "Made")


def test_it_takes_the_place_of_the_constructor_that_was_there() -> None:
    fields_of_it = [("number", int), ("names", tuple), ("late", bool, False), ("reason", str, None)]
    kind: Any = make_dataclass("Late", fields_of_it, frozen=True, slots=True, namespace={"__module__": __name__})
    before = kind.__init__
    assert slot_constructor(kind) is kind
    made = kind.__init__
    assert made is not before
    assert inspect.signature(made) == inspect.signature(before)
    assert (made.__annotations__, made.__module__) == (before.__annotations__, __name__)
    one = kind(1, names=("a",), reason="why")
    assert (one.number, one.names, one.late, one.reason) == (1, ("a",), False, "why")


def test_it_is_made_alike() -> None:
    made, expected = (kind.__init__ for kind in BOTH)
    assert inspect.signature(made) == inspect.signature(expected)
    assert made.__module__ == Made.__module__ and made.__qualname__ == "Made.__init__"
    for kind in BOTH:
        one = kind(1, names=("a",), reason="why")
        assert (one.number, one.names, one.late, one.reason) == (1, ("a",), False, "why")
        assert kind(1, ("a",), True, None) == kind(number=1, names=("a",), late=True)
        assert not hasattr(one, "__dict__") and is_dataclass(one)
    assert [one.name for one in fields(Made)] == [one.name for one in fields(Expected)]  # type: ignore[arg-type]
    assert repr(Made(1, ())) == repr(Expected(1, ())).replace("Expected", "Made")
    assert hash(Made(1, ())) == hash(Expected(1, ())) and Made(1, ()) != Expected(1, ())


@pytest.mark.parametrize(
    "call",
    [
        lambda kind: kind(1),
        lambda kind: kind(1, (), False, None, 5),
        lambda kind: kind(1, (), number=2),
        lambda kind: kind(1, (), other=2),
        lambda kind: setattr(kind(1, ()), "number", 2),
        lambda kind: delattr(kind(1, ()), "number"),
        lambda kind: setattr(kind(1, ()), "other", 2),
    ],
)
def test_it_refuses_alike(call: Any) -> None:
    assert told(call, Made) == told(call, Expected)


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_is_copied_and_sent(kind: Any) -> None:
    needed = [one for one in inspect.signature(kind).parameters.values() if one.default is inspect.Parameter.empty]
    one = kind(*range(len(needed)))
    assert [getattr(one, parameter.name) for parameter in needed] == list(range(len(needed)))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(one, protocol)) == one
    assert copy.copy(one) == one == copy.deepcopy(one)
    last = fields(kind)[-1].name
    changed = replace(one, **{last: "another"})
    assert getattr(changed, last) == "another" and changed != one
    assert type(one).__match_args__ == tuple(one.name for one in fields(kind))


def test_what_derives_from_it_is_made_and_stays_what_it_is() -> None:
    class Slim(Made):
        __slots__ = ()

    class Wide(Made):
        pass

    for kind in (Slim, Wide):
        one = kind(1, ("a",), reason="why")
        assert type(one) is kind and (one.number, one.names, one.late, one.reason) == (1, ("a",), False, "why")
        with pytest.raises(FrozenInstanceError):
            one.number = 2  # type: ignore[misc]


def test_what_derives_from_it_is_given_all_that_there_is() -> None:
    @slot_constructor
    @dataclass(frozen=True, slots=True)
    class Base:
        number: int
        name: str = "none"

    class Derived(Base):
        pass

    assert [(one.number, one.name) for one in (Derived(1), Derived(2, "b"))] == [(1, "none"), (2, "b")]
