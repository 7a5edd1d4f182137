"""Hears from the library's thread which events were passed: one thread a process, asleep until there is something."""

from __future__ import annotations

import itertools
import select
import threading
from collections.abc import Callable, Sequence

from . import transfer_queue

_tokens = itertools.count(1)
_reports: dict[int, Callable[[], None]] = {}
_starting = threading.Lock()
_thread: threading.Thread | None = None


def watch(device_id: int, events: Sequence[int], report: Callable[[], None]) -> None:
    """``report`` is called once, in that thread, when all of the events were passed or have failed. Not by the main
    thread: a signal handler could come in between."""
    _start()
    token = next(_tokens)
    _reports[token] = report
    try:
        transfer_queue.watch(device_id, token, events)
    except BaseException:
        del _reports[token]
        raise


def _start() -> None:
    global _thread
    with _starting:
        if _thread is None:
            descriptor = transfer_queue.completions_fd()
            _thread = threading.Thread(target=_serve, args=(descriptor,), name="paddle_kv-completions", daemon=True)
            _thread.start()


def _serve(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        poll.poll()
        for token in transfer_queue.take_completions():
            _reports.pop(token)()
