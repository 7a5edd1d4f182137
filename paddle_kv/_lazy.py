"""Names of a package that are imported when they are asked for. The standard library alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def lazy_name(package: str, module_of: Mapping[str, str], name: str) -> Any:
    """For ``__getattr__`` of ``package``: the name out of its module, and kept in the package from then on.

    Raises:
        AttributeError: the package has no such name.
    """
    if name not in module_of:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
    setattr(sys.modules[package], name, found)
    return found
