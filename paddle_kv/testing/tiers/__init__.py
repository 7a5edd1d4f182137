"""What proves an engine below host memory: the suite that each passes, and faults around any of them."""

from .conformance import EngineConformance
from .faults import Fault, FaultyEngine

__all__ = ["EngineConformance", "Fault", "FaultyEngine"]
