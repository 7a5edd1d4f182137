"""How often a block was offered that is not kept: for saves of what comes more than once."""

from __future__ import annotations

from collections.abc import Container, Sequence


class UseCounts:
    """Two generations of at most ``limit`` blocks; the older one is forgotten when the younger one is full."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def often(self, keys: Sequence[bytes], min_uses: int, kept: Container[bytes]) -> list[bytes]:
        """Those that are kept, and those that are offered for at least the ``min_uses``-th time; counts this one."""
        found = []
        for key in keys:
            if key in kept:
                found.append(key)
                continue
            uses = self._young.get(key, self._old.get(key, 0)) + 1
            if uses >= min_uses:
                found.append(key)
                self._young.pop(key, None)
                self._old.pop(key, None)
                continue
            self._young[key] = uses
            if len(self._young) >= self._limit:
                self._young, self._old = {}, self._young
        return found
