"""The engine "mooncake" does what every engine has to do, with a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_kv import KVCacheSpec
from paddle_kv.testing.tiers import EngineConformance
from paddle_kv.testing.tiers.conformance import CAPACITY_BYTES
from paddle_kv.tiers import mooncake

from .mooncake_cluster import SEGMENT_STEP_BYTES, Cluster, Kept, loopback_only, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

_clusters: dict[int, Cluster] = {}  # by the room that they have
_connect = mooncake.connect
_stores: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def network() -> Iterator[None]:
    with loopback_only(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mooncake, "connect", lambda master, **options: _store_of(master, **options))
        yield
        while _stores:
            _stores.popitem()[1].close()
        while _clusters:
            _clusters.popitem()[1].close()


def _store_of(master: str, **options: Any) -> Any:
    if master not in _stores:
        _stores[master] = _connect(master, **options)
    return Kept(_stores[master])


class TestMooncake(EngineConformance):
    # Ten of them fill the least memory that a store takes.
    capacity_spec = KVCacheSpec(num_layers=6, num_kv_heads=1, head_dim=128, block_size=16 * 33, dtype="float16")
    capacity_step_bytes = SEGMENT_STEP_BYTES

    def make_engine(self, folder: Path, capacity_bytes: int) -> mooncake.MooncakeEngine:
        room = capacity_bytes if capacity_bytes == SEGMENT_STEP_BYTES else CAPACITY_BYTES
        if room not in _clusters:
            _clusters[room] = Cluster(room)
        cluster = _clusters[room]
        return mooncake.MooncakeEngine(cluster.master, metrics=cluster.metrics, answer_s=5.0, prefix=f"{folder}/")
