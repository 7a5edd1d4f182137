"""Time-outs that callers give. Without NumPy: a directory checks them too."""

from __future__ import annotations

from numbers import Rational, Real
from sys import float_info
from threading import TIMEOUT_MAX
from typing import Any


def check_time(timeout_s: float, name: str = "timeout_s") -> float:
    """A time-out that ends: TypeError or ValueError unless it is a number of seconds."""
    if timeout_s is None:
        raise TypeError(f"{name} is None; a number of seconds is expected: nothing waits for storage for ever")
    check_timeout(timeout_s, name=name)
    return float(timeout_s)  # NumPy's lose digits when they are added to the clock


def check_timeout(timeout_s: float | None, *, positive: bool = False, name: str = "timeout_s") -> None:
    """TypeError or ValueError unless it is a number of seconds or None. One that is not positive is over at once, where
    that makes sense."""
    if timeout_s is None:
        return
    if type(timeout_s) not in (float, int) and (isinstance(timeout_s, bool) or not isinstance(timeout_s, Real)):
        raise TypeError(f"{name} is {timeout_s!r}; a number of seconds or None is expected")
    if not timeout_s <= TIMEOUT_MAX:
        raise ValueError(f"{name} = {timeout_s} must be at most {TIMEOUT_MAX:.0f} seconds, or None")
    if is_no_float(timeout_s):
        raise ValueError(f"{name} = {timeout_s} must be at least {-float_info.max} seconds, or None")
    if positive and not timeout_s > 0:
        raise ValueError(f"{name} = {timeout_s} must be positive")


def is_no_float(value: Any) -> bool:
    """Whether it is an integer, or a fraction, that is larger than a float can be. (Numbers of NumPy are not compared
    with one that is too large for them: it would warn.)"""
    is_exact = isinstance(value, Rational)
    return is_exact and not -float_info.max <= value <= float_info.max
