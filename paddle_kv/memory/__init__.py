"""Where blocks lie: the device cache and the host pool; and device rows of tokens that lie on the host."""

import os

from ..ops import _library
from ..tracking.keeper import keeper
from .device_cache import DeviceCache
from .host_pool import HostPool
from .resident_rows import ResidentRows

# The tracker knows no library, and whatever it tracks lies in one of these.
_signals = _library.signal_functions()
keeper.undisturbed = _signals["undisturbed"]
os.register_at_fork(after_in_child=_signals["put_back"])

__all__ = ["DeviceCache", "HostPool", "ResidentRows"]
