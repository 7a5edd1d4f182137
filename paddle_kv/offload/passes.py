"""Passes of the model, each over tokens of one prompt or of several: what :class:`~.rates.Rates` remembers of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class Begun:
    """A pass of the model that has begun.

    Attributes:
        at_s: when.
        tokens, waiting: of the passes before it: the tokens, and how many of them waited for loads.
        is_aborted: nobody knows how much of it was computed.
        over_s: when all of it was, and that was heard of.
    """

    at_s: float
    tokens: int
    waiting: int
    is_aborted: bool = False
    over_s: float = math.inf


class WholePass(NamedTuple):
    """Of the model, over several prompts.

    Attributes:
        tokens: of all of them.
        prompts: how many.
    """

    tokens: int
    prompts: int


NO_PASS = WholePass(0, 0)
