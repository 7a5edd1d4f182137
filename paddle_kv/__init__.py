"""KV-cache memory operations for PaddlePaddle: operators on paged caches, and a scheduler that overlaps their transfer
to and from host memory with the model's computation.

Names are imported when they are asked for: ``paddle_kv.offload.Directory`` runs where there is no Paddle.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from ._lazy import lazy_name as _lazy_name

if _TYPE_CHECKING:
    from . import ops
    from .errors import (
        AttachError,
        BackendError,
        CancelledError,
        CaptureError,
        ClosedError,
        CudaError,
        ForkedError,
        LeasedError,
        PaddleKVError,
        PeerError,
        ReentryError,
        TransferError,
    )
    from .layout import KVCacheSpec
    from .memory import DeviceCache, HostPool, ResidentRows
    from .schedule.gates import Gates
    from .schedule.movement import State
    from .schedule.scheduler import LayerwiseScheduler
    from .schedule.trace import Span, write_trace
    from .schedule.transfer import Transfer

__version__ = "0.1.0"
__all__ = [
    "AttachError",
    "BackendError",
    "CancelledError",
    "CaptureError",
    "ClosedError",
    "CudaError",
    "DeviceCache",
    "ForkedError",
    "Gates",
    "HostPool",
    "KVCacheSpec",
    "LayerwiseScheduler",
    "LeasedError",
    "PaddleKVError",
    "PeerError",
    "ReentryError",
    "ResidentRows",
    "Span",
    "State",
    "Transfer",
    "TransferError",
    "ops",
    "write_trace",
]
_MODULE_OF = {
    **{name: "errors" for name in __all__ if name.endswith("Error")},
    "KVCacheSpec": "layout",
    "DeviceCache": "memory",
    "HostPool": "memory",
    "ResidentRows": "memory",
    "State": "schedule.movement",
    "Gates": "schedule.gates",
    "LayerwiseScheduler": "schedule.scheduler",
    "Span": "schedule.trace",
    "write_trace": "schedule.trace",
    "Transfer": "schedule.transfer",
}


def __getattr__(name: str) -> _Any:
    if name == "ops":
        return _importlib.import_module(f"{__name__}.ops")
    return _lazy_name(__name__, _MODULE_OF, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
