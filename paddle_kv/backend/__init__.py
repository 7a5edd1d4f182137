"""Devices as the scheduler sees them."""

from __future__ import annotations

from typing import Any

from .protocol import Backend


def create(name: str | Backend, device_id: int | None) -> Backend:
    """The backend for a device cache: "auto" is cupy where the cache is on a GPU, else cpu.

    Raises:
        TypeError: neither a name nor a backend.
        ValueError: an unknown name, or one that does not fit the device.
    """
    if not isinstance(name, str):
        if not callable(getattr(name, "copy_layers", None)):
            raise TypeError(f"backend is {name!r}; 'auto', 'cupy', 'cpu' or a Backend is expected")
        return name
    if name not in ("auto", "cupy", "cpu"):
        raise ValueError(f"backend = {name!r} must be 'auto', 'cupy', 'cpu' or a Backend")
    if name == "auto":
        name = "cpu" if device_id is None else "cupy"
    if name == "cpu":
        from .cpu_backend import CpuBackend

        return CpuBackend()
    if device_id is None:
        raise ValueError("backend = 'cupy' needs a device cache on a GPU; this one is on the CPU")
    from .cupy_backend import CupyBackend

    made: Any = CupyBackend(device_id)
    return made  # type: ignore[no-any-return]
