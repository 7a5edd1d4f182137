"""KV-cache memory operations for PaddlePaddle."""

from . import ops
from .errors import CudaError, TransferError

__version__ = "0.1.0"
__all__ = ["CudaError", "TransferError", "ops"]
