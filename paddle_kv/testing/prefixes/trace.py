"""Reads a trace of requests: one JSON object per line, as the Mooncake project publishes its production traces.

Fields: ``timestamp`` in ms since the start, ``input_length`` and ``output_length`` in tokens, ``hash_ids``: one id per
block of 512 prompt tokens (the last may be partly filled); two requests share a prefix exactly as far as their ids
agree. So each id stands for all that is before it, too: :func:`not_of_prefixes` tells if it does not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOKENS_PER_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    arrival_s: float
    input_tokens: int
    block_ids: list[int]


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The requests of a file in order of arrival (equal times: as in the file), the first ``limit`` of its lines.

    Blank lines, fields in any order, and fields of other names are passed over.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a request; names the line and what is wrong. Or there is none.
    """
    requests: list[Request] = []
    with path.open("rb") as lines:  # bytes, so that a character that is none is found in its line
        for number, line in enumerate(lines, 1):
            if limit is not None and len(requests) >= limit:
                break
            if not line.strip():
                continue
            try:
                requests.append(_request(line))
            except (ValueError, OverflowError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}; a request of a trace is expected") from None
    if not requests:
        raise ValueError(f"{path} holds no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def not_of_prefixes(requests: Sequence[Request]) -> str | None:
    """None if each id always follows the same one, as hashes of prefixes do; else which one does not."""
    before: dict[int, int | None] = {}
    for number, request in enumerate(requests):
        for previous, block in zip((None, *request.block_ids), request.block_ids, strict=False):
            if before.setdefault(block, previous) != previous:
                places = [f"behind {one}" if one is not None else "first" for one in (before[block], previous)]
                return f"in hash_ids {block} stands {places[0]} and, in request {number}, {places[1]}"
    return None


def _request(line: bytes) -> Request:
    try:
        fields = json.loads(line.rstrip().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg}, column {error.pos + 1})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__} instead of an object")
    for name in ("timestamp", "input_length", "hash_ids"):
        if name not in fields:
            raise ValueError(f"no field {name}")
    arrival_ms, tokens, ids = fields["timestamp"], fields["input_length"], fields["hash_ids"]
    if type(arrival_ms) not in (int, float) or not 0 <= arrival_ms < float("inf"):
        raise ValueError(f"timestamp = {arrival_ms!r} must be a number of at least 0")
    if type(tokens) is not int or tokens < 0:
        raise ValueError(f"input_length = {tokens!r} must be an integer of at least 0")
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise ValueError("hash_ids must be a list of integers")
    return Request(arrival_ms / 1e3, tokens, ids)
