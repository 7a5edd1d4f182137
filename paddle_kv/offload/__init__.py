"""Which prefix of a prompt is kept in host memory: hashes, eviction policies, the manager that a server calls, and its
two halves for servers of several processes.

:class:`KVOffloadManager` and :class:`Mover` need Paddle. :class:`Directory`, :class:`BlockIndex` and the policies are
plain Python: names are imported when they are asked for.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from .arc import Arc
    from .hashing import BlockHasher, PrefixHasher, cache_salt
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
    "PrefixHasher",
    "S3Fifo",
    "cache_salt",
    "lookup_common",
    "make_policy",
    "paddle_all_reduce_min",
]
_MODULE_OF = {
    "Arc": "arc",
    "BlockHasher": "hashing",
    "BlockIndex": "index",
    "KVOffloadManager": "manager",
    "Lease": "lease",
    "Lru": "lru",
    "POLICIES": "policies",
    "Policy": "policy",
    "PrefixHasher": "hashing",
    "S3Fifo": "s3fifo",
    "cache_salt": "hashing",
    "lookup_common": "ranks",
    "make_policy": "policies",
    "paddle_all_reduce_min": "ranks",
}


def __getattr__(name: str) -> _Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
