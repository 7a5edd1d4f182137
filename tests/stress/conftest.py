from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.schedule.conftest import copies, nothing_left, rig  # noqa: F401


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """Thousands of failures that nobody asks for are told there, which costs more than they do."""
    logger = logging.getLogger("paddle_kv")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)
