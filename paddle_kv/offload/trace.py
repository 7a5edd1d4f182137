"""Reads a trace of requests: one JSON object per line, as the Mooncake project publishes its production traces.

Fields: ``timestamp`` in ms since the start, ``input_length`` and ``output_length`` in tokens, ``hash_ids``: one id per
block of 512 prompt tokens (the last may be partly filled); two requests share a prefix exactly as far as their ids
agree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENS_PER_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    arrival_s: float
    input_tokens: int
    block_ids: list[int]


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The requests of a file in order of arrival, at most ``limit`` of them.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a request; names the line. Or there is none.
    """
    requests: list[Request] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(requests) >= limit:
                break
            if not line.strip():
                continue
            try:
                requests.append(_request(json.loads(line)))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}; a request of a trace is expected") from None
    if not requests:
        raise ValueError(f"{path} holds no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _request(fields: Any) -> Request:
    arrival_ms, tokens, ids = float(fields["timestamp"]), fields["input_length"], fields["hash_ids"]
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"input_length = {tokens!r} must be an integer of at least 1")
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise ValueError("hash_ids must be a list of integers")
    if not 0 <= arrival_ms < float("inf"):
        raise ValueError(f"timestamp = {arrival_ms} must not be negative")
    return Request(arrival_ms / 1e3, tokens, ids)
