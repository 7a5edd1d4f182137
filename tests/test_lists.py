"""What callers give as lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paddle_kv.lists import listed


@pytest.mark.parametrize("given", [[1, 2], (1, 2), {1: 0, 2: 0}, iter([1, 2]), np.array([1, 2])])
def test_what_can_be_gone_through(given: Any) -> None:
    assert listed(given) == [1, 2]


@pytest.mark.parametrize("given", [None, 1, "ab", b"ab", bytearray(b"ab"), np.array(1), object()])
def test_what_is_no_list(given: Any) -> None:
    assert listed(given) is None


def test_what_is_raised_on_the_way_is_the_callers() -> None:
    def fails() -> Iterator[int]:
        yield 1
        raise TypeError("his own")

    with pytest.raises(TypeError, match="his own"):
        listed(fails())
