"""What calls of Mooncake wait for, which its library reads from the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from .tracking.keeper import log

# A node that takes the place of a dead one under the same name (host and port) listens elsewhere for transfers. The
# library asks a node for that once, and never again by itself: all transfers to the new node would fail. It reads this
# variable when it is imported, by whichever part of this package comes first.
_REFRESH = "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS"
REFRESH_S = 5  # so often it asks again


def set_bounds(bounds: Mapping[str, str]) -> None:
    """Variables that are not set yet. To be called before Mooncake is imported."""
    if _REFRESH not in os.environ and not {"mooncake.store", "mooncake.engine"}.isdisjoint(sys.modules):
        log.warning(
            "Mooncake was imported without %s: it does not find nodes that take the name of a dead one", _REFRESH
        )
    for name, value in {**bounds, _REFRESH: str(REFRESH_S)}.items():
        os.environ.setdefault(name, value)
