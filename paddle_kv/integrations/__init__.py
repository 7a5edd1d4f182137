"""Ties transfers to the code of a server: hooks around layers, and the calls of two known cache managers."""

from .fastdeploy import CacheTransferManager
from .layers import ForwardPass, LayerHooks
from .vllm import CacheEngine

__all__ = ["CacheEngine", "CacheTransferManager", "ForwardPass", "LayerHooks"]
