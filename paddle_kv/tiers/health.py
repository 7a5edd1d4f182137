"""Whether storage works: after an error it rests, longer each time, and the log says so once."""

from __future__ import annotations

import errno
import threading
import time

from ..tracking.keeper import log

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0
OF_ONE_OBJECT = {errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ}  # a sector, perhaps, and not the whole device
MOST_IN_A_ROW = 3  # of these errors, until it is the device


class Health:
    """Of one root in one direction. ``what`` is the text that the log begins with."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._rest_s = 0.0  # of the last rest; 0: it works
        self._until_s = 0.0
        self._in_a_row = 0
        self.errors = 0

    @property
    def resting(self) -> bool:
        """Whether it is better not to ask it now."""
        return time.monotonic() < self._until_s

    def failed(self, error: BaseException) -> None:
        with self._lock:
            self.errors += 1
            self._in_a_row += 1
            if not self._rest_s and self._in_a_row < MOST_IN_A_ROW and getattr(error, "errno", None) in OF_ONE_OBJECT:
                return
            first, resting = not self._rest_s, self.resting
            if not resting:  # else one of those that were under way
                self._rest_s = min(2 * self._rest_s, LONGEST_REST_S) if self._rest_s else FIRST_REST_S
                self._until_s = time.monotonic() + self._rest_s
        if first:
            log.warning(
                "%s failed (%s); it is left alone for %g s, longer each time it fails again, and serving goes on "
                "without it",
                self._what,
                error,
                FIRST_REST_S,
            )

    def worked(self) -> None:
        self._in_a_row = 0
        if not self._rest_s or self.resting:
            return
        with self._lock:
            self._rest_s = 0.0
        log.info("%s works again", self._what)
