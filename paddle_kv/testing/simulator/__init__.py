"""A deterministic device on which the scheduler runs unchanged, and a checker of what it orders (docs/simulator.md)."""

from .checker import Finding, check
from .chooser import Exploration, LateChooser, RandomChooser, explore
from .device import Deadlock
from .log import HOST, Entry, Location, Log
from .memory import INITIAL, POISON
from .mutations import REMOVALS
from .recorder import RecordingBackend
from .simulation import Computation, OrderingError, Simulation

__all__ = [
    "HOST",
    "INITIAL",
    "POISON",
    "REMOVALS",
    "Computation",
    "Deadlock",
    "Entry",
    "Exploration",
    "Finding",
    "LateChooser",
    "Location",
    "Log",
    "OrderingError",
    "RandomChooser",
    "RecordingBackend",
    "Simulation",
    "check",
    "explore",
]
