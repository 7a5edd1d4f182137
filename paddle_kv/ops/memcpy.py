"""Copies of memory that is given by addresses, and questions about the compiled operators."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
import paddle

from .. import streams
from .._paddle import private
from . import _arguments as arguments
from ._library import call
from ._tracing import refuse_tracing, traceable

BULK_COPY_ARCHITECTURE = 90
NO_DEVICE = -1  # all memory is host memory, and the CPU copies it
INFO_BYTES = 4096


@traceable
def vectorized_copy(source_pointers: Any, target_pointers: Any, sizes: Any, *, stream: Any = None) -> None:
    """Copies ``sizes[i]`` bytes from ``source_pointers[i]`` to ``target_pointers[i]``, all with one kernel.

    Each piece is copied in the widest words that its own two addresses allow; any address and any size will do. The
    kernel runs on the GPU that the first device address belongs to, and uses few of its multiprocessors where a piece
    is in host memory. If all addresses are host memory, the CPU copies at once, in no order with any stream.

    Ordered after the work on ``stream`` (for None see :mod:`paddle_kv.streams`) and after nothing else. The memory must
    stay alive, and must not be written (nor, where it is a target, read), until the stream has passed the copy; the
    lists may be dropped at once. A captured CUDA graph repeats the copy with the same addresses.

    Args:
        source_pointers: addresses: list, tuple, range, array or tensor of integers.
        target_pointers: as many addresses. No target overlaps another target or a source.
        sizes: bytes of each piece, or one number for all. A piece of 0 bytes is skipped, whatever its addresses.

    Raises:
        ValueError: lengths differ, a size is negative, an address is null, targets overlap, the GPU cannot reach the
            memory (pageable host memory, another GPU). Nothing has moved.
        TypeError: not integers.
        NotImplementedError: called while a program is traced.
        CudaError: CUDA reported a failure.

    Example:
        >>> import numpy as np
        >>> from paddle_kv import ops
        >>> source, target = np.arange(6, dtype="uint8"), np.zeros(6, "uint8")
        >>> first, second = source.ctypes.data, target.ctypes.data
        >>> ops.vectorized_copy([first + 4, first], [second, second + 3], [2, 3])
        >>> target.tolist()
        [4, 5, 0, 0, 1, 2]
    """
    lists = _lists("vectorized_copy", source_pointers, target_pointers, sizes)
    if lists[0].size:
        call("vectorized_copy", *map(arguments.in_memory, lists), *_where(lists[0], lists[1], stream))


@traceable
def memcpy_batch(
    source_pointers: Any,
    target_pointers: Any,
    sizes: Any,
    *,
    mode: Literal["fallback", "loop", "batch"] = "fallback",
    stream: Any = None,
) -> None:
    """:func:`vectorized_copy` by the GPU's copy engine, which leaves the multiprocessors to others.

    Ordering, lifetime and arguments as there, but host memory may be pageable: CUDA then reads it before the call
    returns, or makes the call wait.

    Args:
        mode: ``"batch"``: ``cudaMemcpyBatchAsync``, in calls of at most 8192 pieces, sources read in the order of the
            stream. ``"loop"``: one ``cudaMemcpyAsync`` for each piece. ``"fallback"``: batch where the driver has it,
            otherwise the loop. Where the batched call is not allowed or not safe (legacy default stream, handles 0 and
            1; while a graph is captured; pageable memory), both batch and fallback use the loop.

    Raises:
        NotImplementedError: mode ``"batch"`` without ``cudaMemcpyBatchAsync``, see :func:`has_memcpy_batch_async`.

    Example:
        >>> import numpy as np
        >>> from paddle_kv import ops
        >>> source, target = np.arange(4, dtype="uint8"), np.zeros(4, "uint8")
        >>> ops.memcpy_batch([source.ctypes.data], [target.ctypes.data], 3)
        >>> target.tolist()
        [0, 1, 2, 0]
    """
    if mode not in ("fallback", "loop", "batch"):
        raise ValueError(f'mode is {mode!r}; "fallback", "loop" or "batch" is expected')
    lists = _lists("memcpy_batch", source_pointers, target_pointers, sizes)
    batched = mode != "loop" and has_memcpy_batch_async()
    if mode == "batch" and not batched:
        raise NotImplementedError(
            'mode="batch" needs cudaMemcpyBatchAsync (CUDA 12.8), which this build or this driver does not have; '
            'use mode="fallback"'
        )
    if lists[0].size:
        call("memcpy_batch", *map(arguments.in_memory, lists), batched, *_where(lists[0], lists[1], stream))


@functools.cache
def has_memcpy_batch_async() -> bool:
    """Whether the driver has ``cudaMemcpyBatchAsync`` (12.8 and later). False on a machine without a driver.

    Example:
        >>> from paddle_kv import ops
        >>> ops.has_memcpy_batch_async() in (True, False)
        True
    """
    return not is_stub_build() and bool(_ask("has_memcpy_batch_async"))


@functools.cache
def is_stub_build() -> bool:
    """Whether the operators were built without CUDA, so that they refuse GPU tensors.

    Example:
        >>> from paddle_kv import ops
        >>> ops.is_stub_build() == (ops.build_info()["cuda"] is None)
        True
    """
    return not _compiled_facts()["architectures"]


def build_info() -> dict[str, Any]:
    """What the compiled operators were made from.

    Returns:
        ``paddle``: version of Paddle they were built for; ``cuda``: version of the toolkit, None without CUDA;
        ``architectures``: list of compute capabilities, ``["80", "90"]``; ``commit``: the last one that changed the
        operators, with "-modified" if they differed from it, "" if not built from a checkout; ``compiler``: version of
        the C++ compiler; ``features``: list of ``"cpu"``, ``"cuda"``, ``"memcpy_batch_async"`` (without it pieces are
        copied one by one) and ``"bulk_copy"`` (code for ``cp.async.bulk`` is built in; without it, and on older GPUs,
        transfers use 16-byte words).

    Example:
        >>> from paddle_kv import ops
        >>> "cpu" in ops.build_info()["features"]
        True
    """
    facts = _compiled_facts()
    with_cuda = not is_stub_build()
    version = _ask("cuda_version") if with_cuda else 0
    features = ["cpu"]
    if with_cuda:
        features.append("cuda")
    if has_memcpy_batch_async():
        features.append("memcpy_batch_async")
    architectures = facts["architectures"].split(";") if with_cuda else []
    if any(int(architecture) >= BULK_COPY_ARCHITECTURE for architecture in architectures):
        features.append("bulk_copy")
    return {
        "paddle": paddle.__version__,  # the library of any other version is not loaded
        "cuda": f"{version // 1000}.{version % 1000 // 10}" if with_cuda else None,
        "architectures": architectures,
        "commit": facts["commit"],
        "compiler": facts["compiler"],
        "features": features,
    }


def device_of_pointers(pointers: np.ndarray) -> int:
    """The GPU of the first address that is device memory; -1 if all are host memory."""
    return NO_DEVICE if is_stub_build() else _ask("device_of_pointers", arguments.in_memory(pointers))


@functools.cache
def _compiled_facts() -> dict[str, str]:
    text = _on_cpu(INFO_BYTES, paddle.uint8)
    call("build_info", text)
    lines = bytes(text.numpy()).rstrip(b"\0").decode().splitlines()
    return dict(line.split("=", 1) for line in lines)


def _ask(op: str, *asked: Any) -> int:
    answer = _on_cpu(1, paddle.int64)
    call(op, answer, *asked)
    return int(answer.item())


def _on_cpu(count: int, dtype: Any) -> paddle.Tensor:
    return private("_C_ops", "empty")([count], dtype, paddle.CPUPlace())


def _lists(op: str, source_pointers: Any, target_pointers: Any, sizes: Any) -> tuple[np.ndarray, ...]:
    """The three lists. One size for all is a list of one."""
    refuse_tracing(op)
    one_size = isinstance(sizes, (int, np.integer)) or not hasattr(sizes, "__len__")
    given = (
        arguments.id_array(source_pointers, "source_pointers"),
        arguments.id_array(target_pointers, "target_pointers"),
        np.array([arguments.integer(sizes, "sizes")]) if one_size else arguments.id_array(sizes, "sizes"),
    )
    for name, values in zip(("target_pointers", "sizes"), given[1:], strict=True):
        if len(values) != len(given[0]) and not (one_size and name == "sizes"):
            raise ValueError(
                f"source_pointers has {len(given[0])} entries, {name} has {len(values)}; both must have the same number"
            )
    return given


def _where(sources: np.ndarray, targets: np.ndarray, stream: Any) -> tuple[int, int]:
    """Device and stream handle. Almost always the first pair has a device address; the rest is searched only if not."""
    device = device_of_pointers(np.array([sources[0], targets[0]]))
    if device == NO_DEVICE and len(sources) > 1:
        device = device_of_pointers(np.concatenate([sources, targets]))
    return device, 0 if device == NO_DEVICE else streams.resolve_on(stream, device)
