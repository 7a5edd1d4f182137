"""What a transfer stands behind, directly or through others: asked in a section of its group."""

from __future__ import annotations

from . import rings
from .movement import Movement


def stands_behind(movement: Movement, other: Movement) -> bool:
    """Whether a layer of it can be submitted only behind the same layer of the other."""
    found = {movement: None}
    left = [movement]
    for one in left:  # grows meanwhile
        if one.num_unsubmitted:
            left += [before for before in one.depends_on if before not in found]
            found.update(dict.fromkeys(one.depends_on))
    return other in found


def in_buffers(movement: Movement) -> dict[Movement, None]:
    """Those of which the last layers come before its first ones, since both use the same blocks of layer buffers."""
    found: dict[Movement, None] = {}
    left = [movement]
    for one in left:  # grows meanwhile
        new = [before for before in one.depends_on if before not in found and rings.shares_buffers(one, before)]
        left += new
        found.update(dict.fromkeys(new))
    return found
