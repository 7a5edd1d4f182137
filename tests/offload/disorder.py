"""What a caller may do to a manager: policies that raise, interrupts at any line, forks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddle_kv.offload import Lru, books


class Rebel(Lru[bytes]):
    """Raises at one of its calls, before or behind what the call does."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1
        self.behind = False

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.behind:
            raise ZeroDivisionError
        found = method(*arguments)
        if self.left == 0:
            raise ZeroDivisionError
        return found

    def on_insert(self, key: bytes) -> None:
        self._call(super().on_insert, key)

    def on_access(self, key: bytes) -> None:
        self._call(super().on_access, key)

    def on_remove(self, key: bytes) -> None:
        self._call(super().on_remove, key)

    def victim(self, *arguments: Any) -> Any:
        return self._call(super().victim, *arguments)


def interrupted(call: Callable[[], object], lines: int) -> bool:
    """Whether the call was ended by an interrupt: a signal comes at so many lines of the package that the main thread
    executes."""
    left = lines
    package = str(Path(books.__file__).parents[1])

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(package) or frame.f_code.co_name == "__del__":
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGINT, before)
    return False


def in_child(call: Callable[[], object]) -> None:
    """AssertionError if it raises or hangs in a forked child."""
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(10)  # a child that hangs ends by it
            call()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
