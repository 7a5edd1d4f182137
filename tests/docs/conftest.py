from __future__ import annotations

from tests.schedule.conftest import nothing_left

__all__ = ["nothing_left"]
