"""The checksum of what lies below host memory: XXH3 with 64 bits, of the library xxhash, which releases the GIL.

It finds what storage does to bytes; it does not stop somebody who may write to the storage.
"""

from __future__ import annotations

try:
    from xxhash import xxh3_64
except ImportError:
    raise ImportError("paddle_kv.tiers needs xxhash: pip install 'paddle_kv[tiers]'") from None


def checksum(content: memoryview) -> int:
    return xxh3_64(content).intdigest()


def checksum_of(*contents: memoryview) -> int:
    """Of all of them, one behind the other."""
    total = xxh3_64()
    for content in contents:
        total.update(content)
    return total.intdigest()
