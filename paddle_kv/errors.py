"""Exceptions that are paddle_kv's own. Bad arguments raise Python's: ValueError, TypeError, IndexError, MemoryError.

All share :class:`PaddleKVError`, can be pickled and copied, and hold text and numbers only: nobody's frames, no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PaddleKVError(RuntimeError):
    """Base of all of them.

    Example:
        >>> import pickle
        >>> from paddle_kv import ClosedError, PaddleKVError
        >>> error = pickle.loads(pickle.dumps(ClosedError("the host pool is closed")))
        >>> isinstance(error, PaddleKVError), str(error)
        (True, 'the host pool is closed')
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__, self.__cause__))


def _rebuild(
    kind: type[PaddleKVError], arguments: tuple[Any, ...], state: dict[str, Any], cause: BaseException | None
) -> PaddleKVError:
    made = kind.__new__(kind, *arguments)
    RuntimeError.__init__(made, *arguments)
    made.__dict__.update(state)
    made.__cause__ = cause
    return made


class CudaError(PaddleKVError):
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


class BackendError(PaddleKVError):
    """What a backend other than CUDA reported, as text: the ``__cause__`` of a :class:`TransferError`."""


class _Unfinished(PaddleKVError):
    """A transfer did not move everything.

    Attributes:
        layer: the first layer that was not moved, or None where it is not known.
        block_ids: the target blocks that hold no usable data until they are rewritten: device blocks of an onload, host
            blocks of an offload.
    """

    def __init__(self, message: str, *, layer: int | None = None, block_ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.layer = layer
        self.block_ids = list(block_ids)


class TransferError(_Unfinished):
    """A transfer failed, or it would read blocks that another one left half written.

    Attributes:
        layer: the first layer that was not moved, or None where it is not known.
        block_ids: the target blocks that hold no usable data until they are rewritten: device blocks of an onload, host
            blocks of an offload.

        damaged_host_blocks: host blocks of which a checksum has found that they do not hold what was saved to them.

    ``__cause__`` says what the device reported, if it did: a :class:`CudaError`, or a :class:`BackendError`. Each call
    raises an exception of its own.

    Example:
        >>> from paddle_kv import TransferError
        >>> error = TransferError("onload failed at layer 3", layer=3, block_ids=[5, 6])
        >>> error.layer, error.block_ids
        (3, [5, 6])
    """

    damaged_host_blocks: Sequence[int] = ()


class CancelledError(_Unfinished):
    """The transfer was cancelled before all of it was moved.

    Attributes:
        layer: the first layer that was not moved.
        block_ids: as for :class:`TransferError`.

    Example:
        >>> from paddle_kv import CancelledError, DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> with LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)) as scheduler:
        ...     save = scheduler.offload([2, 3], [5, 6], layerwise=True)
        ...     save.cancel()
        ...     try:
        ...         save.wait()
        ...     except CancelledError as error:
        ...         error.layer, error.block_ids
        (0, [5, 6])
    """


class ClosedError(PaddleKVError):
    """The scheduler, the pool or the manager is closed."""


class LeasedError(PaddleKVError):
    """A lease of the host keeps the block.

    Attributes:
        block_ids: the blocks of the call that are leased.
    """

    def __init__(self, message: str, block_ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.block_ids = list(block_ids)


class CaptureError(PaddleKVError):
    """The stream is being captured into a CUDA graph, of which a transfer cannot become part."""


class ForkedError(PaddleKVError):
    """The object was made before the process forked, and this is the child."""


class ReentryError(PaddleKVError):
    """A finalizer, a policy or a backend has called a scheduler out of one of its own calls."""


class TierError(PaddleKVError):
    """Storage that cannot be used: a folder that another process has, or that cannot be written to."""


class AttachError(PaddleKVError):
    """Memory of another process that cannot be attached: it is gone, on another host, or of another spec."""


class PeerError(PaddleKVError):
    """A hand-over to another process that does not begin: the grant is over, revoked or unknown, or the receiver is
    gone."""
