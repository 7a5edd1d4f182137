"""KV-cache memory operations for PaddlePaddle: operators on paged caches, and a scheduler that overlaps their transfer
to and from host memory with the model's computation."""

from . import ops
from .errors import CudaError, TransferError
from .layout import KVCacheSpec
from .memory import DeviceCache, HostPool
from .schedule.scheduler import LayerwiseScheduler
from .schedule.trace import Span, write_trace
from .schedule.transfer import Transfer

__version__ = "0.1.0"
__all__ = [
    "CudaError",
    "DeviceCache",
    "HostPool",
    "KVCacheSpec",
    "LayerwiseScheduler",
    "Span",
    "Transfer",
    "TransferError",
    "ops",
    "write_trace",
]
