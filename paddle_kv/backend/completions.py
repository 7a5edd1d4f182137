"""Hears from the library's thread which events were passed: one thread a process, asleep until there is something."""

from __future__ import annotations

import functools
import itertools
import os
import select
import threading
from collections.abc import Callable, Sequence

from ..tracking.keeper import END_S, Living, keeper
from . import transfer_queue
from .protocol import Later

_tokens = itertools.count(1)
_reports: dict[int, Callable[[], Later | None]] = {}
_starting = threading.Lock()
_thread: threading.Thread | None = None


def watch(device_id: int, events: Sequence[int], report: Callable[[], Later | None]) -> int:
    """``report`` is called once, in that thread, when all of the events were passed or have failed, unless somebody
    hears of it himself. Not by the main thread: a signal handler could come in between. Returns what :func:`hear`
    takes."""
    token = expect(report)
    try:
        transfer_queue.watch(device_id, token, events)
    except BaseException:
        forget(token)
        raise
    return token


def expect(report: Callable[[], Later | None]) -> int:
    """:func:`watch`, by a call that has the library watch for the token: it is made next, or :func:`forget` is."""
    reports, token = place()
    reports[token] = report
    return token


def place() -> tuple[dict[int, Callable[[], Later | None]], int]:
    """Where a report is put for which the library watches, and under which token: by the call that has it watched."""
    if _thread is None:
        _start()
    return _reports, next(_tokens)


def forget(token: int) -> None:
    """Nobody watches for it."""
    del _reports[token]


def hear(token: int, timeout_s: float | None, told: Callable[[], object], report: Callable[[], Later | None]) -> None:
    """Waits for that report in the calling thread: ``told`` is called in its place. If that raises, or a signal handler
    holds it up, ``report`` is called too, in place of the one that the library was given; of that nothing is kept from
    here on. Returns without if the time is over, or if another thread has heard of it or waits for it already."""
    transfer_queue.hear(token, timeout_s, told, _reports, report)


def _start() -> None:
    global _thread
    with _starting:
        if _thread is None:
            descriptor = transfer_queue.completions_fd()
            end = os.eventfd(0)
            thread = threading.Thread(target=_serve, args=(descriptor, end), name="paddle_kv-completions", daemon=True)
            try:
                thread.start()
            except BaseException:  # the next call tries again
                os.close(end)
                raise
            _thread = thread
            keeper.at_end.append(functools.partial(_end, thread, end))


def _serve(descriptor: int, end: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(end, select.POLLIN)
    while all(ready != end for ready, _ in poll.poll()):
        with Living("an error in the thread that hears of the device"):
            _hear()


def _hear() -> None:
    """A call of its own: while the thread waits, its frame must keep nothing of what was told last."""
    # One is there no more if whoever waited for it was told, and was held up.
    reports = [_reports.pop(token, None) for token in transfer_queue.take_completions()]
    laters: dict[Later, None] = {}
    for report in filter(None, reports):
        with Living("an error in the report of an end"):
            if (told := report()) is not None:
                laters[told] = None
    for later in laters:
        with Living("an error in what was to be done behind a transfer"):
            later.now()


def _end(thread: threading.Thread, end: int) -> None:
    # It must not come out of C while the interpreter goes.
    os.eventfd_write(end, 1)
    thread.join(END_S)
