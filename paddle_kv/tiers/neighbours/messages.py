"""What a lender and its readers say to each other, sealed as the messages of a hand-over are.

======= ====== ====================================================================================================
message from   says
======= ====== ====================================================================================================
join    reader asks where the memory is
hello   lender where it is: a memory with all blocks, and one with a header for each of them
more    reader asks for names; answered as soon as there are any, and asked again then
news    lender objects that are lent since, and such as are not any more; whether that is all
read    reader asks to read these objects for so long
lent    lender for each of them the block, which stays as it is until then; ``ABSENT``; or ``BUSY``
done    reader it reads them no more
======= ====== ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...peers.messages import opened, sealed
from ...tracking.keeper import log
from ..object_format import NAME_BYTES

VERSION = 1
ABSENT, BUSY = -1, -2  # in the place of a block
MOST_NAMES = 112  # in a message
MOST_NUMBER = 1 << 53

TO_LENDER: Mapping[str, Mapping[str, type]] = {
    "join": {"version": int},
    "more": {},
    "read": {"number": int, "names": str, "timeout_ms": int},
    "done": {"number": int},
}
TO_READER: Mapping[str, Mapping[str, type]] = {
    "hello": {
        "version": int,
        "host": str,
        "num_blocks": int,
        "block_bytes": int,
        "header_bytes": int,
        "blocks": list,
        "headers": list,
    },
    "news": {"added": str, "removed": str, "is_all": bool},
    "lent": {"number": int, "blocks": list},
}
_NAMES = ("names", "added", "removed")
_LEAST = {"number": 0, "timeout_ms": 0, "num_blocks": 1, "block_bytes": 1, "header_bytes": 1, "version": 0}


def encode(kind: str, **values: Any) -> bytes:
    """Names as bytes, one behind the other."""
    fields = {name: b"".join(value).hex() if name in _NAMES else value for name, value in values.items()}
    return sealed({"kind": kind, **fields})


def heard(data: Any, kinds: Mapping[str, Mapping[str, type]]) -> dict[str, Any] | None:
    """The message, with lists of names; None for what is none of these, which is logged."""
    try:
        found = opened(data, kinds)
        for name in found:
            if name in _NAMES:
                found[name] = _names(found[name])
            elif name in _LEAST and not _LEAST[name] <= found[name] < MOST_NUMBER:
                raise ValueError(f"{name} is out of its range")
            elif name in ("blocks", "headers") and len(found[name]) > MOST_NAMES:
                raise ValueError("a list that is too long")
    except ValueError as error:
        log.debug("a message was refused: %s", error)
        return None
    return found


def _names(text: str) -> Sequence[bytes]:
    together = bytes.fromhex(text)  # which passes over any white space
    if 2 * len(together) != len(text) or len(together) % NAME_BYTES or len(together) > MOST_NAMES * NAME_BYTES:
        raise ValueError("not the names of objects")
    return [together[at : at + NAME_BYTES] for at in range(0, len(together), NAME_BYTES)]
