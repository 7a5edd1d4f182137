"""What became of prompts: of the last ones what was known of each, in columns."""

from __future__ import annotations

from array import array
from typing import Any


class Outcomes:
    """
    Args:
        most: so many are remembered.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._facts, self._touched_s = array("d"), array("d")
        self._turns, self._back = array("q"), array("b")

    def add(self, facts: tuple[float, ...], turn: int, back: bool, touched_s: float) -> None:
        """Of as many facts as the others."""
        if len(self._turns) == 2 * self._most:
            del self._facts[: self._most * len(facts)]
            for column in (self._touched_s, self._turns, self._back):
                del column[: self._most]
        self._facts.extend(facts)
        self._touched_s.append(touched_s)
        self._turns.append(turn)
        self._back.append(back)

    def until(self, touched_s: float) -> tuple[Any, Any, Any]:
        """Of those that were used last by then: a row for each fact, the turns, and 1.0 for each that came back."""
        import numpy as np  # a server that does not learn does without

        last = slice(-self._most, None)
        known = np.array(self._touched_s)[last] <= touched_s
        facts = np.array(self._facts).reshape(len(self._turns), -1)[last][known]
        return facts.T.copy(), np.array(self._turns)[last][known], np.array(self._back, float)[last][known]
