"""What proves a fabric between hosts: the suite that each passes, and faults around any of them."""

from .conformance import FabricConformance
from .faults import FaultyFabric, FaultySink

__all__ = ["FabricConformance", "FaultyFabric", "FaultySink"]
