"""KV-cache memory operations for PaddlePaddle: operators on paged caches, and a scheduler that overlaps their transfer
to and from host memory with the model's computation."""

import sys as _sys

try:
    from . import ops
except ImportError as _error:
    # `paddle-kv doctor` is meant for such an installation: the command says in one line what is wrong.
    _name = _sys.argv[0].rpartition("/")[2] if _sys.argv else ""
    if _name == "paddle-kv" or (_name == "-m" and "paddle_kv" in _sys.orig_argv):
        _sys.exit(f"paddle-kv: {_error}")
    raise
from .errors import (
    BackendError,
    CancelledError,
    CaptureError,
    ClosedError,
    CudaError,
    ForkedError,
    LeasedError,
    PaddleKVError,
    ReentryError,
    TransferError,
)
from .layout import KVCacheSpec
from .memory import DeviceCache, HostPool
from .schedule.movement import State
from .schedule.scheduler import LayerwiseScheduler
from .schedule.trace import Span, write_trace
from .schedule.transfer import Transfer

__version__ = "0.1.0"
__all__ = [
    "BackendError",
    "CancelledError",
    "CaptureError",
    "ClosedError",
    "CudaError",
    "DeviceCache",
    "ForkedError",
    "HostPool",
    "KVCacheSpec",
    "LayerwiseScheduler",
    "LeasedError",
    "PaddleKVError",
    "ReentryError",
    "Span",
    "State",
    "Transfer",
    "TransferError",
    "ops",
    "write_trace",
]
