"""What a receiver lets a sender write, as plain data."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from dataclasses import asdict, dataclass, fields
from typing import Any

VERSION = 3
ID_CHARACTERS = 32  # 128 random bits


@dataclass(frozen=True)
class Grant:
    """Blocks of a host pool that one sender may write once. It can be pickled, and sent as JSON.

    Whoever has it and a channel to the receiver may write these blocks: it is to be kept from others.

    Attributes:
        version: of this description, and of what is said of it.
        grant_id: 128 random bits, in hexadecimal.
        pool_id: of the receiver's pool.
        host_block_ids: of that pool, one for each block that the sender has to give.
        num_layers: of the model.
        first_head, num_heads: of the receiver's heads those that the sender writes.
        deadline_s: on the monotonic clock of the host; what is not handed over by then is lost.

    Example:
        >>> from paddle_kv.peers import Grant
        >>> grant = Grant(3, "00" * 16, "pool", (4, 2), 5, 0, 8, 1234.5)
        >>> Grant.from_json(grant.to_json()) == grant
        True
    """

    version: int
    grant_id: str
    pool_id: str
    host_block_ids: tuple[int, ...]
    num_layers: int
    first_head: int
    num_heads: int
    deadline_s: float

    def to_json(self) -> str:
        """One line of text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Grant:
        """What :meth:`to_json` made.

        Raises:
            ValueError: it is not that.
        """
        try:
            found = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            raise ValueError("the text is not the JSON of a grant") from None
        if not isinstance(found, dict) or set(found) != {field.name for field in fields(cls)}:
            raise ValueError("the text does not have the fields of a grant")
        ids = found["host_block_ids"]
        made = cls(**{**found, "host_block_ids": tuple(ids) if isinstance(ids, list) else ids})
        check_grant(made)
        return made

    @property
    def digest(self) -> str:
        """Of all of it: by this the receiver knows that the sender has the grant that it gave."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def make_grant_id() -> str:
    return secrets.token_hex(ID_CHARACTERS // 2)


def is_grant_id(value: object) -> bool:
    return isinstance(value, str) and len(value) == ID_CHARACTERS and set(value) <= set("0123456789abcdef")


def check_grant(grant: Any) -> None:
    """TypeError unless it is a grant, ValueError unless its parts are what they should be: unpickled, it may hold
    anything."""
    if not isinstance(grant, Grant):
        raise TypeError(f"grant is {type(grant).__name__}; what Receiver.grant() returned is expected")
    if type(grant.version) is not int or grant.version != VERSION:
        raise ValueError(f"the grant has version {grant.version!r}; this process knows version {VERSION}")
    if not is_grant_id(grant.grant_id):
        raise ValueError(f"grant_id = {grant.grant_id!r} must be {ID_CHARACTERS} hexadecimal digits")
    if not isinstance(grant.pool_id, str):
        raise ValueError(f"pool_id = {grant.pool_id!r} must be a string")
    ids = grant.host_block_ids
    if not isinstance(ids, tuple) or not ids or not all(type(one) is int and one >= 0 for one in ids):
        raise ValueError("host_block_ids must be a tuple of ids of blocks, at least one")
    for name, least in (("num_layers", 1), ("first_head", 0), ("num_heads", 1)):
        value = getattr(grant, name)
        if type(value) is not int or value < least:
            raise ValueError(f"{name} = {value!r} must be an integer of at least {least}")
    if type(grant.deadline_s) is not float or not math.isfinite(grant.deadline_s):
        raise ValueError(f"deadline_s = {grant.deadline_s!r} must be a time")
