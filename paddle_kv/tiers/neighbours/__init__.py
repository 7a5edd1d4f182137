"""Blocks out of the host memory of another process of this host, as a tier: who lends them, and who reads them."""

from .engine import NeighbourEngine
from .lender import Lender

__all__ = ["Lender", "NeighbourEngine"]
