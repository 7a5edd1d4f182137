"""The checksum of what lies below host memory: XXH3 with 64 bits, of the library xxhash, which releases the GIL where
it is given more than 64 KiB at once.

It finds what storage does to bytes; it does not stop somebody who may write to the storage.
"""

from __future__ import annotations

from collections.abc import Callable

try:
    from xxhash import xxh3_64, xxh3_64_intdigest
except ImportError:
    raise ImportError("paddle_kv.tiers needs xxhash: pip install 'paddle_kv[tiers]'") from None


checksum: Callable[[memoryview], int] = xxh3_64_intdigest


def checksum_of(*contents: memoryview | bytes) -> int:
    """Of all of them, one behind the other."""
    total = xxh3_64()
    for content in contents:
        total.update(content)
    return total.intdigest()
