"""What a process holds: must not grow while traffic goes on."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
RSS_SLACK_BYTES = 32 << 20  # of arenas and caches of the allocators
DEVICE_SLACK_BYTES = 64 << 20
MINIMUM_SAMPLES = 6


def process() -> dict[str, int]:
    """Resident bytes, threads and open files of this process."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * PAGE_BYTES
    return {
        "rss_bytes": resident,
        "threads": len(os.listdir("/proc/self/task")),
        "open_files": len(os.listdir("/proc/self/fd")),
    }


def growth(samples: Sequence[dict[str, int]]) -> list[str]:
    """What was more in the last third of a run than in the second: one sentence each. The first third warms up."""
    if len(samples) < MINIMUM_SAMPLES:
        return []
    third = len(samples) // 3
    slack = {"rss_bytes": RSS_SLACK_BYTES, "device_bytes": DEVICE_SLACK_BYTES}
    found = []
    for name in samples[0]:
        before = statistics.median(sample[name] for sample in samples[third : 2 * third])
        after = statistics.median(sample[name] for sample in samples[-third:])
        if after > before + slack.get(name, 0):
            found.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return found
