"""What the two sides of a hand-over say to each other: eight hexadecimal digits, the CRC-32 of the rest, and JSON.

=========== ================= =========================================================================================
message     from              says
=========== ================= =========================================================================================
begin       sender            it has this grant (its digest), and asks whether it may write
accepted    receiver          it may
refused     receiver          it may not
layers      sender            layers ``first`` to ``end - 1`` of all blocks are in host memory; in order
done        sender            all layers were told, and it touches the blocks no more
failed      sender            it touches the blocks no more; what was not told does not come
revoke      receiver          nobody wants the rest; answered by ``done`` or ``failed``, repeated until then
=========== ================= =========================================================================================

Each of them names the grant, and the beginning that it belongs to: by what the sender has made up for its ``begin``. So
what is late or doubled of an earlier beginning says nothing of a later one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..tracking.keeper import log
from .grant import is_grant_id

MOST_BYTES = 4096  # of a message
CHECKSUM_BYTES = 8
MOST_REASON_CHARACTERS = 200

TO_RECEIVER: Mapping[str, Mapping[str, type]] = {
    "begin": {"digest": str},
    "layers": {"first": int, "end": int},
    "done": {},
    "failed": {"reason": str},
}
TO_SENDER: Mapping[str, Mapping[str, type]] = {"accepted": {}, "refused": {"reason": str}, "revoke": {}}


def encode(kind: str, grant_id: str, begin_id: str, **values: Any) -> bytes:
    if "reason" in values:
        values["reason"] = values["reason"][:MOST_REASON_CHARACTERS]
    return sealed({"kind": kind, "grant_id": grant_id, "begin_id": begin_id, **values})


def sealed(message: Mapping[str, Any]) -> bytes:
    return _with_checksum(json.dumps(message, separators=(",", ":")).encode())


def _with_checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text) + text


def heard(data: Any, kinds: Mapping[str, Mapping[str, type]]) -> dict[str, Any] | None:
    """As :func:`decode`; None for what is none of these messages, which is logged."""
    try:
        return decode(data, kinds)
    except ValueError as error:
        log.debug("a message was refused: %s", error)
        return None


def decode(data: Any, kinds: Mapping[str, Mapping[str, type]]) -> dict[str, Any]:
    """ValueError unless it is one of these kinds of messages, with all that belongs to it and nothing else."""
    found = opened(data, kinds, common={"grant_id": str, "begin_id": str})
    if not (is_grant_id(found["grant_id"]) and is_grant_id(found["begin_id"])):
        raise ValueError("not the fields of the message")
    return found


def opened(
    data: Any, kinds: Mapping[str, Mapping[str, type]], *, common: Mapping[str, type] = MappingProxyType({})
) -> dict[str, Any]:
    """What :func:`sealed` was given, with the fields of its kind and those that all have. ValueError unless it is
    that."""
    if not isinstance(data, bytes) or len(data) > MOST_BYTES:
        raise ValueError(f"no bytes, or more than {MOST_BYTES}")
    text = data[CHECKSUM_BYTES:]
    if data != _with_checksum(text):
        raise ValueError("not what was sent")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str) or found["kind"] not in kinds:
        raise ValueError("no message of a known kind")
    expected = {**common, **kinds[found["kind"]]}
    if set(found) != {"kind", *expected}:
        raise ValueError("not the fields of the message")
    if any(type(found[name]) is not kind for name, kind in expected.items()):  # True is no int
        raise ValueError("a field of the wrong type")
    return found
