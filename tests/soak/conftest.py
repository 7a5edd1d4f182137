from __future__ import annotations

from tests.schedule.conftest import copies, nothing_left

__all__ = ["copies", "nothing_left"]
