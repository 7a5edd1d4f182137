"""Checks of single arguments that several rooms share. Without NumPy: a directory makes them too."""

from __future__ import annotations

from typing import Any


def check_bool(value: object, name: str) -> None:
    """TypeError unless it is one."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} = {value!r} is {type(value).__name__}; a bool is expected")


def check_choice(value: object, name: str) -> None:
    """TypeError unless it is a bool, or None: the callee decides."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name} = {value!r} is {type(value).__name__}; a bool or None is expected")


def check_callable(value: object, name: str, what: str) -> None:
    """TypeError unless it can be called; ``what`` would be right."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r}; {what} is expected")


def check_methods(value: Any, name: str, methods: tuple[str, ...], what: str) -> None:
    """TypeError unless it is an object, and no class, with these methods; ``what`` would be right."""
    if isinstance(value, type) or not all(callable(getattr(value, method, None)) for method in methods):
        raise TypeError(f"{name} is {value!r}; {what} with {', '.join(methods)} is expected")
