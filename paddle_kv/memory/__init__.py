"""Where blocks lie: the device cache and the host pool; and device rows of tokens that lie on the host."""

from ..ops import _library
from ..tracking.keeper import hold_signals_with
from .device_cache import DeviceCache
from .host_pool import HostPool
from .resident_rows import ResidentRows

__all__ = ["DeviceCache", "HostPool", "ResidentRows"]

hold_signals_with(_library.signals)  # the tracker knows no library
