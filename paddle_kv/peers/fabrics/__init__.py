"""Ways into host memory of other processes, also on other hosts: what moves the bytes of a hand-over."""

from .protocol import Fabric, Sink, Write
from .remote_pool import RemotePool, describe, register

__all__ = ["Fabric", "RemotePool", "Sink", "Write", "describe", "register"]
