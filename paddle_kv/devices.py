"""The GPUs, and on which of them a tensor lies. Nothing else in the package asks Paddle.

Paddle's CUDA build calls a GPU ``gpu:0``. The CPU build of Paddle 3 reaches one through a device plugin, under the
plugin's own name (``cuda_like:0``), and its tensors there have a ``CustomPlace``. Such a device counts as the GPU of
the same number if its type is in :data:`CUDA_DEVICE_TYPES`: if its memory is CUDA's, and its streams are CUDA streams.
"""

from __future__ import annotations

import os
from typing import Any

import paddle

from ._paddle import private

CUDA_DEVICE_TYPES = frozenset(
    ("cuda_like", "metax_gpu", "iluvatar_gpu", *os.environ.get("PADDLE_KV_CUDA_DEVICES", "").split(","))
)
"""Device types of plugins that count as GPUs: the built-in ones and those in the environment variable
``PADDLE_KV_CUDA_DEVICES`` (separated by commas), which is read when ``paddle_kv`` is imported."""

CPU, PINNED = -1, -2  # no GPU: memory of the CPU, page-locked memory of Paddle's


def device_of(tensor: Any) -> int:
    """The number of the GPU on which a tensor lies, else :data:`CPU` or :data:`PINNED`.

    Raises:
        NotImplementedError: it lies on a device that is not known to be CUDA's, and is not host memory either.
    """
    place = tensor.place
    if place.is_gpu_place():
        return int(place.gpu_device_id())
    if place.is_cpu_place():
        return CPU
    if place.is_cuda_pinned_place():
        return PINNED
    if place.is_custom_place() and place.custom_device_type() in CUDA_DEVICE_TYPES:
        return int(place.custom_device_id())
    raise NotImplementedError(
        f"a tensor is on {str(place)[6:-1]}, whose memory is not known to be CUDA's; if it is, name its device type in "
        "PADDLE_KV_CUDA_DEVICES before paddle_kv is imported"
    )


def on_gpu(tensor: Any) -> bool:
    """Whether a tensor lies on a GPU. Raises as :func:`device_of`."""
    return device_of(tensor) >= 0


def plugin() -> str | None:
    """The device type by which Paddle reaches the GPUs; None if that is Paddle's own, or if there are none."""
    if paddle.is_compiled_with_cuda():
        return None
    types = paddle.device.get_all_custom_device_type() or ()
    return next((name for name in types if name in CUDA_DEVICE_TYPES and _count(name) > 0), None)


def gpu_count() -> int:
    """How many GPUs Paddle can use. Asked before any GPU place is made: 2.6 ends the process otherwise."""
    if paddle.is_compiled_with_cuda():
        return int(paddle.device.cuda.device_count())
    kind = plugin()
    return 0 if kind is None else _count(kind)


def _count(device_type: str) -> int:
    return int(private("base.core", "get_custom_device_count")(device_type))


def has_gpu() -> bool:
    """Whether Paddle can use a GPU here."""
    return gpu_count() > 0


def name_of(number: int) -> str:
    """What ``paddle.set_device`` calls a GPU."""
    return f"{plugin() or 'gpu'}:{number}"


def place_of(number: int) -> Any:
    """The place of a GPU that is there."""
    kind = plugin()
    return paddle.CUDAPlace(number) if kind is None else paddle.CustomPlace(kind, number)
