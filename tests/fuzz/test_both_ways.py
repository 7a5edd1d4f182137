"""Calls of the fuzzer by both ways to an operator: whatever one does, the other does."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddle_kv.ops import _library
from tests.fuzz.both_ways import difference

COUNT = 1200


def test_the_first_calls_are_the_same_by_both() -> None:
    assert list(filter(None, (difference(3, index) for index in range(COUNT)))) == []


def wrong_error(arguments: tuple[Any, ...]) -> None:
    raise ValueError("another sentence")


def writes_too_much(arguments: tuple[Any, ...]) -> None:
    arguments[0][0].fill_(1) if isinstance(arguments[0], list) else None


def counts_a_write(arguments: tuple[Any, ...]) -> None:
    if isinstance(arguments[0], list):
        paddle.assign(arguments[0][0].clone(), arguments[0][0])


@pytest.mark.parametrize("fault", [wrong_error, writes_too_much, counts_a_write])
def test_a_difference_is_told(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    real = _library.operators["copy_blocks"]

    def wrong(*arguments: Any) -> Any:
        result = real(*arguments)
        fault(arguments)
        return result

    monkeypatch.setitem(_library.operators, "copy_blocks", wrong)
    assert any("copy_blocks: " in difference(0, index) for index in range(300))
