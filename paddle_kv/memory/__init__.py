"""Where blocks lie: the device cache and the host pool; and device rows of tokens that lie on the host."""

from .device_cache import DeviceCache
from .host_pool import HostPool
from .resident_rows import ResidentRows

__all__ = ["DeviceCache", "HostPool", "ResidentRows"]
