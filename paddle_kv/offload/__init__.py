"""Which prefix of a prompt is kept in host memory: hashes, eviction policies, the manager that a server calls, and its
two halves for servers of several processes.

:class:`KVOffloadManager` and :class:`Mover` need Paddle. :class:`Directory`, :class:`BlockIndex` and the policies are
plain Python: names are imported when they are asked for.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from .._lazy import lazy_name as _lazy_name

if _TYPE_CHECKING:
    from .arc import Arc
    from .decision import Decision, Prompt, decide
    from .directory import Directory
    from .events import Mirror
    from .found import BlockState, Found
    from .hashing import BlockHasher, PrefixHasher, cache_salt, spec_digest
    from .index import BlockIndex
    from .jobs import BlockKey, Event, Hello, Job, Namespace, Outcome, Result, SavePlan, Snapshot
    from .lease import Lease
    from .lru import Lru
    from .manager import KVOffloadManager
    from .mover import Mover, Submitted
    from .policies import POLICIES, make_policy
    from .policy import Policy
    from .ranks import lookup_common, paddle_all_reduce_min
    from .rates import Rates, RateSnapshot
    from .request import Request
    from .s3fifo import S3Fifo
    from .survival import Survival

__all__ = [
    "POLICIES",
    "Arc",
    "BlockHasher",
    "BlockIndex",
    "BlockKey",
    "BlockState",
    "Decision",
    "Directory",
    "Event",
    "Found",
    "Hello",
    "Job",
    "KVOffloadManager",
    "Lease",
    "Lru",
    "Mirror",
    "Mover",
    "Namespace",
    "Outcome",
    "Policy",
    "PrefixHasher",
    "Prompt",
    "RateSnapshot",
    "Rates",
    "Request",
    "Result",
    "S3Fifo",
    "SavePlan",
    "Snapshot",
    "Submitted",
    "Survival",
    "cache_salt",
    "decide",
    "lookup_common",
    "make_policy",
    "paddle_all_reduce_min",
    "spec_digest",
]
_MODULE_OF = {
    "Arc": "arc",
    "BlockHasher": "hashing",
    "BlockIndex": "index",
    "BlockKey": "jobs",
    "BlockState": "found",
    "Decision": "decision",
    "Directory": "directory",
    "Event": "jobs",
    "Found": "found",
    "Hello": "jobs",
    "Job": "jobs",
    "KVOffloadManager": "manager",
    "Lease": "lease",
    "Lru": "lru",
    "Survival": "survival",
    "Mirror": "events",
    "Mover": "mover",
    "Namespace": "jobs",
    "Outcome": "jobs",
    "POLICIES": "policies",
    "Policy": "policy",
    "PrefixHasher": "hashing",
    "Prompt": "decision",
    "RateSnapshot": "rates",
    "Rates": "rates",
    "Request": "request",
    "Result": "jobs",
    "S3Fifo": "s3fifo",
    "SavePlan": "jobs",
    "Snapshot": "jobs",
    "Submitted": "mover",
    "cache_salt": "hashing",
    "decide": "decision",
    "lookup_common": "ranks",
    "make_policy": "policies",
    "paddle_all_reduce_min": "ranks",
    "spec_digest": "hashing",
}


def __getattr__(name: str) -> _Any:
    return _lazy_name(__name__, _MODULE_OF, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
