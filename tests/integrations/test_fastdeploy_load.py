"""A short run of ``python -m tests.integrations.fastdeploy_load``, and that it can fail."""

from __future__ import annotations

import pytest

from paddle_kv.integrations import CacheTransferManager
from paddle_kv.integrations.fastdeploy import LayerEvent
from tests.integrations.fastdeploy_load import stale_tensors, wrong_bytes


def test_four_threads_load_and_see_no_stale_tensor() -> None:
    assert stale_tensors(800) == 0


def test_evictions_whose_result_is_dropped_save_what_was_there() -> None:
    assert wrong_bytes(400) == 0


def test_stale_tensors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerEvent, "synchronize", lambda self: None)
    assert stale_tensors(200) > 0


def test_wrong_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = CacheTransferManager.evict_to_host_async
    monkeypatch.setattr(
        CacheTransferManager, "evict_to_host_async", lambda self, *ids: evict(self, *ids, order_compute=False)
    )
    assert wrong_bytes(200) > 0
