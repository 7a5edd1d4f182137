"""Which CUDA stream is meant by ``stream=``, as an integer handle.

``None`` means Paddle's current stream, or inside ``with cupy_stream:`` that CuPy stream, which first is made to wait
for Paddle's current stream. A stream that is named gets no hidden ordering. Paddle's own lookup never sees CuPy's
current stream: operators that ask the tensor for its stream run on Paddle's, whatever ``with`` block they are in.
"""

from __future__ import annotations

import sys
from typing import Any

import paddle

from . import devices
from ._paddle import private


def paddle_stream(device: int) -> int:
    """The handle of Paddle's current stream. It may be 0 on 3.x: the legacy default stream, not "unset"."""
    return int(private("base.core", "_get_current_stream")(device).cuda_stream)


def handle_of(stream: Any) -> int:
    """The handle behind an int, a CuPy stream or a Paddle stream.

    Raises:
        TypeError: it is none of them.
    """
    if isinstance(stream, bool):
        raise TypeError(f"stream is {stream!r}; an int handle, a CuPy stream or a Paddle stream is expected")
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr"):  # Paddle's stream object, CuPy's
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    parameter = getattr(stream, "_as_parameter_", None)  # paddle.device.Stream
    if parameter is not None:
        return int(parameter.value or 0)
    raise TypeError(f"stream is {type(stream).__name__}; an int handle, a CuPy stream or a Paddle stream is expected")


def cupy_stream() -> Any | None:
    """The CuPy stream of the ``with`` block that this thread is in, or None."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    current = cupy.cuda.get_current_stream()
    return current if current.ptr != 0 else None


def current(device_id: int) -> int:
    """The handle that None stands for. Orders nothing."""
    stream = cupy_stream()
    return paddle_stream(device_id) if stream is None else int(stream.ptr)


def resolve_on(stream: Any, device_id: int) -> int:
    """The handle on which work for a GPU is enqueued, with the ordering that None stands for.

    Raises:
        TypeError: ``stream`` is not a stream.
        ValueError: no stream is named, and the CuPy stream of the ``with`` block, which would have to wait for
        Paddle's,
            is being captured into a CUDA graph.
    """
    if stream is not None:
        return handle_of(stream)
    surrounding = cupy_stream()
    if surrounding is None:
        return paddle_stream(device_id)
    if surrounding.is_capturing():
        raise ValueError(
            "the current CuPy stream is being captured into a CUDA graph and cannot wait for Paddle's stream; "
            "name the stream (stream=...)"
        )
    cuda = sys.modules["cupy"].cuda
    event = cuda.Event(disable_timing=True)  # CUDA keeps what a wait needs when the event goes out of scope
    cuda.runtime.eventRecord(event.ptr, paddle_stream(device_id))
    cuda.runtime.streamWaitEvent(surrounding.ptr, event.ptr)
    return int(surrounding.ptr)


def is_capturing(handle: int) -> bool:
    """Whether the stream is being captured into a CUDA graph: then nothing may wait for it. Without CuPy nobody can
    tell, and the answer is no."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and bool(cupy.cuda.runtime.streamIsCapturing(handle))


def resolve(stream: Any, tensor: paddle.Tensor) -> int:
    """The handle on which an operator on ``tensor`` enqueues; 0 for a tensor that is not on a GPU. Raises as
    :func:`resolve_on`."""
    device = devices.device_of(tensor)
    return resolve_on(stream, device) if device >= 0 else 0


PADDLE_CURRENT = -1  # in a program: Paddle's current stream at the time it runs


def traced(stream: Any, op: str) -> int:
    """What a traced program carries instead of a handle.

    Raises:
        NotImplementedError: a stream was named; the handle would mean nothing when the program runs.
    """
    if stream is not None:
        raise NotImplementedError(
            f"{op}: stream cannot be named in a traced program, which runs on Paddle's current stream"
        )
    return PADDLE_CURRENT
