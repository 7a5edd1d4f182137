"""Memory of which several pools have a part."""

from __future__ import annotations

import pytest

from paddle_kv.tracking.memories import Extent, attach

BASE = 1 << 61  # no allocation lies there


class Owner:
    pass


def test_memory_that_begins_like_one_pool_and_reaches_into_another_is_refused():
    low, high, both = Owner(), Owner(), Owner()
    attach(low, [Extent(BASE, BASE + 160, 16, 0)])
    attach(high, [Extent(BASE + 160, BASE + 320, 16, 0)])
    with pytest.raises(ValueError, match=rf"overlaps that of another pool at {BASE + 160:#x}"):
        attach(both, [Extent(BASE, BASE + 320, 16, 0)])
