"""What lies below host memory: blocks as checked objects, by default in files."""

from .files import FilesEngine
from .in_order import EnginesInOrder
from .job import Job, Observer
from .loading import load
from .protocol import Engine, Outcome, Read, Write
from .saving import Saver
from .tier import Tier

__all__ = [
    "Engine",
    "EnginesInOrder",
    "FilesEngine",
    "Job",
    "Observer",
    "Outcome",
    "Read",
    "Saver",
    "Tier",
    "Write",
    "load",
]
