"""Where blocks lie: the device cache and the host pool."""

from .device_cache import DeviceCache
from .host_pool import HostPool

__all__ = ["DeviceCache", "HostPool"]
