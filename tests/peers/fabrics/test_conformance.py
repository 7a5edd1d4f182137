"""Each fabric does what every fabric has to do."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paddle_kv import HostPool, PeerError
from paddle_kv.peers.fabrics import Fabric, register
from paddle_kv.peers.fabrics.mooncake import MooncakeFabric
from paddle_kv.peers.fabrics.nixl import NixlFabric
from paddle_kv.peers.fabrics.shared_memory import SharedMemoryFabric
from paddle_kv.testing.peers import FabricConformance
from tests.peers.fabrics import network
from tests.schedule.rig import WAIT_S, make_spec
from tests.tiers.mooncake_cluster import loopback_only, why_not


def make_mooncake() -> MooncakeFabric:
    return MooncakeFabric("127.0.0.1")


def make_nixl() -> NixlFabric:
    return NixlFabric()


class TestSharedMemory(FabricConformance):
    make_fabric = SharedMemoryFabric

    def test_a_damaged_address_is_refused_when_it_is_given(self) -> None:
        pool, fabric, other = HostPool(make_spec(), 2, shared=True), SharedMemoryFabric(), SharedMemoryFabric()
        register(fabric, pool)
        found = json.loads(fabric.address())
        for wrong in ("x", 1.5, None):
            with pytest.raises(PeerError, match="the memory cannot be reached"):
                other.connect(json.dumps([[wrong, found[0][1]]]).encode())
        with pytest.raises(PeerError, match="the memory cannot be reached"):
            other.connect(b"[" * 100_000)
        other.connect(fabric.address())
        for one in (other, fabric):
            one.close(WAIT_S)
        pool.close()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
class InNetwork(FabricConformance):
    start = staticmethod(network.start)

    @pytest.fixture(autouse=True)
    def _loopback_only(self) -> Iterator[None]:
        with loopback_only():
            yield


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
class TestNixl(InNetwork):
    make_fabric = staticmethod(make_nixl)

    def test_a_process_that_had_one_exits_as_others_do(self) -> None:
        program = "from paddle_kv.peers.fabrics.nixl import NixlFabric; NixlFabric().close()"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr


class TestMooncake(InNetwork):
    make_fabric = staticmethod(make_mooncake)


def test_protocols() -> None:
    made: list[Fabric] = [SharedMemoryFabric()]
    assert made[0].name == "shared_memory"
