"""Exceptions that are paddle_kv's own. Bad arguments raise Python's: ValueError, TypeError, IndexError, MemoryError."""

from __future__ import annotations

from collections.abc import Sequence


class CudaError(RuntimeError):
    """A CUDA call failed.

    Attributes:
        name: CUDA's name of the error, for example ``"cudaErrorIllegalAddress"``.
        code: its number.

    Example:
        >>> from paddle_kv import CudaError
        >>> error = CudaError("cudaErrorInvalidValue", 1, "cudaMemcpyAsync: cudaErrorInvalidValue")
        >>> error.name, error.code
        ('cudaErrorInvalidValue', 1)

    After ``cudaErrorIllegalAddress`` and ``cudaErrorLaunchFailure`` the process cannot use the GPU any more.
    """

    def __init__(self, name: str, code: int, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.code = code


class TransferError(RuntimeError):
    """A transfer failed or was cancelled, or it would read blocks that such a transfer left half written.

    Attributes:
        layer: the first layer that was not moved, or None where it is not known.
        block_ids: the target blocks that hold no usable data until they are rewritten: device blocks of an onload, host
            blocks of an offload.

    ``__cause__`` is what the device reported, if it did: a :class:`CudaError`.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, TransferError
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> with LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)) as scheduler:
        ...     save = scheduler.offload([2, 3], [5, 6], layerwise=True)
        ...     save.cancel()
        ...     try:
        ...         save.wait()
        ...     except TransferError as error:
        ...         error.layer, error.block_ids
        (0, [5, 6])
    """

    def __init__(self, message: str, *, layer: int | None = None, block_ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.layer = layer
        self.block_ids = list(block_ids)
