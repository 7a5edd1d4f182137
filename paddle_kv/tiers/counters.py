"""What a tier has counted."""

from __future__ import annotations

import bisect
import threading
from typing import Any

from .protocol import Outcome

KINDS = ("store", "load")
LATENCY_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Counters:
    """Objects by kind and outcome, bytes, and how long jobs took."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes = {(kind, outcome): 0 for kind in KINDS for outcome in Outcome}
        self._bytes = {"store": 0, "load": 0}
        self._seconds = {"store": 0.0, "load": 0.0}
        self._jobs = {kind: [0] * (len(LATENCY_BOUNDS_S) + 1) for kind in KINDS}

    def ended(self, kind: str, outcomes: list[Outcome], size_bytes: int) -> None:
        """Of objects of so many bytes each."""
        done = outcomes.count(Outcome.DONE)
        with self._lock:
            self._outcomes[kind, Outcome.DONE] += done
            self._bytes[kind] += done * size_bytes
            for outcome in outcomes if done < len(outcomes) else ():
                if outcome is not Outcome.DONE:
                    self._outcomes[kind, outcome] += 1

    def job(self, kind: str, seconds: float) -> None:
        with self._lock:
            self._seconds[kind] += seconds
            self._jobs[kind][bisect.bisect_left(LATENCY_BOUNDS_S, seconds)] += 1

    def as_dict(self) -> dict[str, Any]:
        """``load_done``, ``store_dropped``, ...; ``load_bytes``; ``load_seconds``; and ``load_latency``: how many jobs
        took at most each of ``LATENCY_BOUNDS_S``, and longer."""
        with self._lock:
            return {
                **{f"{kind}_{outcome.value}": count for (kind, outcome), count in self._outcomes.items()},
                **{f"{kind}_bytes": count for kind, count in self._bytes.items()},
                **{f"{kind}_seconds": seconds for kind, seconds in self._seconds.items()},
                **{f"{kind}_latency": list(counts) for kind, counts in self._jobs.items()},
            }
