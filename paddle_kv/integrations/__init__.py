"""Ties transfers to the code of a server: hooks around layers, and the calls of FastDeploy's cache manager."""

from .fastdeploy import CacheTransferManager
from .layers import ForwardPass, LayerHooks

__all__ = ["CacheTransferManager", "ForwardPass", "LayerHooks"]
