from __future__ import annotations

import pytest

from examples import two_servers
from tests.tiers.mooncake_cluster import Cluster, loopback_only, why_not


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_what_one_server_has_computed_the_other_one_loads() -> None:
    with loopback_only(), Cluster() as cluster:
        found = two_servers.main(cluster.master)
    assert [one.wrong for one in found.values()] == [0] * 6
    assert [one.computed for one in found.values()] == [12, 0, 6, 0, 9, 0]
    assert [one.loaded for one in found.values()] == [0, 12, 12, 18, 12, 21]
