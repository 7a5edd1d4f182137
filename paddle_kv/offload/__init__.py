"""Which prefix of a prompt is kept in host memory: hashes, eviction policies, and the manager that a server calls.

:class:`KVOffloadManager` needs Paddle; :class:`BlockIndex` and the policies behind it are plain Python and are what
``paddle-kv replay`` simulates with.
"""

from .arc import Arc
from .hashing import BlockHasher, cache_salt
from .index import BlockIndex
from .lease import Lease
from .lru import Lru
from .manager import KVOffloadManager
from .policies import POLICIES, make_policy
from .policy import Policy
from .ranks import lookup_common, paddle_all_reduce_min
from .s3fifo import S3Fifo

__all__ = [
    "POLICIES",
    "Arc",
    "BlockHasher",
    "BlockIndex",
    "KVOffloadManager",
    "Lease",
    "Lru",
    "Policy",
    "S3Fifo",
    "cache_salt",
    "lookup_common",
    "make_policy",
    "paddle_all_reduce_min",
]
