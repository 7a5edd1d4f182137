from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.offload.urgency_rig import Server
from tests.schedule.conftest import copies, nothing_left

__all__ = ["copies", "nothing_left", "server"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One whose tier is served by hand."""
    made = Server(tmp_path)
    yield made
    made.close()
