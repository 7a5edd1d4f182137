"""Hand-overs by a fabric: from the sender's host pool into the receiver's, layer by layer."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator

import pytest

from paddle_kv import AttachError, HostPool, LayerwiseScheduler, Transfer, TransferError
from paddle_kv.peers import Receiver, RemoteSender, receiver
from paddle_kv.peers.fabrics import Fabric, describe, register
from paddle_kv.peers.fabrics.shared_memory import SharedMemoryFabric
from paddle_kv.peers.messages import encode
from tests.memory.test_heads import with_heads_moved
from tests.peers.conftest import until
from tests.peers.fabrics.remote import POOL_BLOCKS, RemotePrefill
from tests.peers.fabrics.test_conformance import make_mooncake, make_nixl
from tests.peers.prefill import bits
from tests.peers.test_messages import BEGIN_ID, FakePeer
from tests.schedule.rig import SHORT_S, WAIT_S, Rig, assert_same, cache_memory, make_spec, moved
from tests.tiers.mooncake_cluster import loopback_only, why_not

LAYERS = range(5)
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class Decode:
    """The receiver, in this process."""

    def __init__(self, make_fabric: Callable[[], Fabric], heads: int = 2) -> None:
        self.make_fabric = make_fabric
        extra = {"scale": ((heads, 3), "float32")}
        self.rig = Rig(make_spec(num_kv_heads=heads, extra=extra), shared=True)
        self.fabric = make_fabric()
        self.remote = describe(self.fabric, self.rig.pool)
        self.scheduler = LayerwiseScheduler(self.rig.cache, self.rig.pool)
        self.receiver = Receiver(self.scheduler, remote=self.remote)

    def prefill(self, **options: int) -> RemotePrefill:
        return RemotePrefill(self.receiver, self.make_fabric, self.remote, **options)

    @property
    def num_held(self) -> int:
        return self.rig.pool.num_blocks - self.rig.pool.num_free_blocks

    def check(self, source: list[int], target: list[int]) -> None:
        spec = self.rig.spec
        self.rig.device = moved(bits(spec), self.rig.device, source, target)
        assert_same(cache_memory(self.rig.cache), self.rig.device)

    def forget(self, blocks: list[int]) -> None:
        """They are poisoned; all others are as they were."""
        assert self.rig.cache.domain.poisoned(blocks) == blocks
        now = cache_memory(self.rig.cache)
        for name, array in self.rig.device.items():
            array[:, blocks] = now[name][:, blocks]
        assert_same(now, self.rig.device)
        self.rig.cache.mark_rewritten(blocks)

    def close(self) -> None:
        self.receiver.close(WAIT_S)
        self.scheduler.close(WAIT_S)
        self.fabric.close(WAIT_S)
        assert self.num_held == 0
        self.rig.pool.close()


@pytest.fixture(scope="module")
def _soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receiver, "SETTLE_S", 0.2)
        yield


@pytest.fixture(scope="module")
def decode(_soon: None) -> Iterator[Decode]:
    with contextlib.closing(Decode(SharedMemoryFabric)) as made:
        yield made


@pytest.fixture(scope="module")
def prefill(decode: Decode) -> Iterator[RemotePrefill]:
    made = decode.prefill()
    yield made
    made.end()


def mark(prefill: RemotePrefill, load: Transfer, alone: int) -> None:
    """The first layers each in a write of its own; those behind them perhaps together."""
    for layer in range(alone):
        prefill.ask("mark", "a", [layer])
        load.wait_layer(layer, timeout_s=WAIT_S)
    prefill.ask("mark", "a", LAYERS[alone:])


@pytest.mark.parametrize("name", ["shared_memory", "nixl", "mooncake"])
def test_every_byte_layer_by_layer(name: str) -> None:
    if name == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed")
    make = {"shared_memory": SharedMemoryFabric, "nixl": make_nixl, "mooncake": make_mooncake}[name]
    with loopback_only(), contextlib.closing(Decode(make)) as decode:
        prefill = decode.prefill()
        for source, target in (
            ([8, 0, 5, 3], [2, 12, 0, 7]),
            ([1], [3]),
            ([0, 1, 2, 3, 4, 6, 7], [6, 5, 4, 3, 2, 1, 0]),
        ):
            load, grant = decode.receiver.grant(target, timeout_s=WAIT_S)
            prefill.ask("send", "a", grant.to_json(), source)
            for layer in LAYERS:
                prefill.ask("mark", "a", [layer])
                load.wait_layer(layer, timeout_s=WAIT_S)
            load.wait(WAIT_S)
            assert prefill.ask("wait", "a") == "done"
            decode.check(source, target)
        assert prefill.ask("free") == POOL_BLOCKS
        until(lambda: decode.num_held == 0)
        prefill.end()


def test_ranks_with_some_of_the_heads() -> None:
    with contextlib.closing(Decode(SharedMemoryFabric, heads=3)) as decode:
        ranks = [decode.prefill(num_heads=2, seed=5), decode.prefill(num_heads=1, seed=6)]
        load, grants = decode.receiver.grant_heads([7, 2], [2, 1], timeout_s=WAIT_S)
        for rank, grant in zip(ranks, grants, strict=True):
            rank.ask("send", "a", grant.to_json(), [8, 1])
            rank.ask("mark", "a", LAYERS)
        load.wait(WAIT_S)
        for heads, seed, first in ((2, 5, 0), (1, 6, 2)):
            spec, whole = decode.rig.spec.with_heads(heads), decode.rig.spec
            ids = ([8, 1], [7, 2])
            decode.rig.device = with_heads_moved(
                spec, bits(spec, seed), whole, decode.rig.device, ids, (0, first), heads
            )
        assert_same(cache_memory(decode.rig.cache), decode.rig.device)
        whole_grant, grant = decode.receiver.grant([4], timeout_s=WAIT_S)
        kind, text = ranks[0].refused("send", "b", grant.to_json(), [3])
        assert (kind, "this sender has 2, and the receiver 3" in text) == ("ValueError", True)
        whole_grant.cancel()
        for rank in ranks:
            rank.end()


def test_what_the_model_writes_next_does_not_wait_for_the_network(decode: Decode, prefill: RemotePrefill) -> None:
    load, grant = decode.receiver.grant([3, 9], timeout_s=WAIT_S)
    prefill.ask("hold", 2)
    prefill.ask("send", "a", grant.to_json(), [5, 7])
    mark(prefill, load, 2)
    prefill.ask("held")
    prefill.ask("wait_layers", "a")  # all is in host memory: the blocks may be written
    prefill.ask("overwrite")
    assert prefill.ask("done", "a") is False
    load.wait_layer(1, timeout_s=WAIT_S)
    with pytest.raises(TimeoutError):
        load.wait_layer(2, timeout_s=SHORT_S)
    assert prefill.ask("free") == POOL_BLOCKS - 2
    prefill.ask("go_on")
    load.wait(WAIT_S)
    assert prefill.ask("wait", "a") == "done"
    prefill.ask("restore")
    decode.check([5, 7], [3, 9])


@pytest.mark.parametrize("fault", ["fail", "tear"])
def test_a_write_that_fails_fails_both_sides(decode: Decode, fault: str) -> None:
    prefill = decode.prefill()
    load, grant = decode.receiver.grant([3, 9], timeout_s=WAIT_S)
    prefill.ask(fault, 2)
    prefill.ask("send", "a", grant.to_json(), [5, 7])
    mark(prefill, load, 2)
    kind, text = prefill.refused("raise", "a")
    assert kind == "TransferError"
    assert "layer 2 did not reach the receiver: " in text
    with pytest.raises(TransferError, match="the sender failed: layer 2 did not reach the receiver"):
        load.wait(WAIT_S)
    until(lambda: decode.num_held == 0)
    decode.forget([3, 9])
    assert prefill.ask("free") == POOL_BLOCKS
    prefill.end()


def test_a_revoked_save_holds_its_blocks_until_the_network_has_let_go(decode: Decode, prefill: RemotePrefill) -> None:
    load, grant = decode.receiver.grant([3, 9], timeout_s=WAIT_S)
    prefill.ask("hold", 1)
    prefill.ask("send", "a", grant.to_json(), [5, 7])
    mark(prefill, load, 1)
    prefill.ask("held")
    load.wait_layer(0, timeout_s=WAIT_S)
    load.cancel()
    with pytest.raises(TimeoutError):
        load.wait_over(4 * SHORT_S)
    assert prefill.ask("done", "a") is False
    assert (decode.num_held, prefill.ask("free")) == (2, POOL_BLOCKS - 2)
    prefill.ask("go_on")
    assert prefill.ask("wait", "a") == "cancelled"
    load.wait_over(WAIT_S)
    until(lambda: decode.num_held == 0)
    decode.forget([3, 9])


def test_a_sender_that_is_killed_in_the_middle_of_a_write(decode: Decode) -> None:
    prefill = decode.prefill()
    load, grant = decode.receiver.grant([3, 9], timeout_s=WAIT_S)
    prefill.ask("hold", 1)
    prefill.ask("send", "a", grant.to_json(), [5, 7])
    mark(prefill, load, 1)
    prefill.ask("held")
    load.wait_layer(0, timeout_s=WAIT_S)
    prefill.kill()
    with pytest.raises(TransferError, match="the sender is gone"):
        load.wait_layer(1, timeout_s=WAIT_S)
    assert decode.num_held == 2  # what the network still has may arrive
    load.wait_over(WAIT_S)
    until(lambda: decode.num_held == 0)
    decode.forget([3, 9])


def test_a_pool_without_room_and_wrong_ids(decode: Decode, prefill: RemotePrefill) -> None:
    load, grant = decode.receiver.grant(list(range(8)), timeout_s=WAIT_S)
    assert prefill.refused("send", "a", grant.to_json(), list(range(8)))[0] == "MemoryError"
    assert prefill.refused("send", "a", grant.to_json(), [0, 1])[0] == "ValueError"
    assert prefill.ask("free") == POOL_BLOCKS
    load.cancel()
    load.wait_over(WAIT_S)
    decode.forget(list(range(8)))
    late, grant = decode.receiver.grant([1], timeout_s=0.001)
    late.wait_over(WAIT_S)
    assert prefill.refused("send", "a", grant.to_json(), [2])[0] == "PeerError"
    assert prefill.ask("free") == POOL_BLOCKS
    decode.forget([1])


def test_a_sender_that_has_failed_is_not_asked_to_stop(decode: Decode) -> None:
    load, grant = decode.receiver.grant([1], timeout_s=WAIT_S)
    peer = FakePeer()
    assert decode.receiver.received(peer, encode("begin", grant.grant_id, BEGIN_ID, digest=grant.digest))
    assert decode.receiver.received(peer, encode("failed", grant.grant_id, BEGIN_ID, reason="why not"))
    load.wait_over(WAIT_S)  # SETTLE_S later; it is asked again and again until then where it has not answered
    assert peer.kinds == ["accepted"]
    decode.forget([1])


def test_what_is_refused_before_anything_is_sent(decode: Decode) -> None:
    fabric, spec = SharedMemoryFabric(), decode.rig.spec
    for changes, named in (
        ({"block_size": 14}, "block_size"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"num_layers": 4}, ""),
    ):
        rig = Rig(make_spec(**{"num_kv_heads": 2, "extra": dict(spec.extra), **changes}))
        with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
            with pytest.raises(AttachError, match=f"the description has the spec {named}"):
                RemoteSender(scheduler, decode.remote, fabric, print)
            with pytest.raises(TypeError, match="remote is str"):
                RemoteSender(scheduler, "there", fabric, print)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="remote describes another pool"):
                Receiver(scheduler, remote=decode.remote)
        rig.pool.close()
    rig = Rig(spec)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        other = type(decode.remote)(**{**vars(decode.remote), "fabric": "nixl"})
        with pytest.raises(AttachError, match="of fabric 'nixl'; 'shared_memory' is expected"):
            RemoteSender(scheduler, other, fabric, print)
        newer = type(decode.remote)(**{**vars(decode.remote), "version": 99})
        with pytest.raises(AttachError, match="version 99"):
            RemoteSender(scheduler, newer, fabric, print)
        with pytest.raises(TypeError, match="fabric"):
            RemoteSender(scheduler, decode.remote, None, print)  # type: ignore[arg-type]
        for wrong, error in ((None, TypeError), (float("inf"), ValueError)):
            with pytest.raises(error, match=r"write_timeout_s (is|=) (None|inf)"):
                RemoteSender(scheduler, decode.remote, fabric, print, write_timeout_s=wrong)  # type: ignore[arg-type]
        mine = describe(fabric, rig.pool)
        with pytest.raises(ValueError, match="direct = True is for senders on this host"):
            Receiver(scheduler, direct=True, remote=mine)
    rig.pool.close()
    attached = HostPool.attach(spec, decode.rig.pool.export())
    with pytest.raises(ValueError, match="of another process"):
        describe(fabric, attached)
    for use in (describe, register):
        with pytest.raises(TypeError, match="pool is int; a HostPool is expected"):
            use(fabric, 3)  # type: ignore[operator]
        for wrong in (None, 3, type(fabric)):
            with pytest.raises(TypeError, match=r"fabric is .*; a fabric with register, address, connect, close"):
                use(wrong, decode.rig.pool)  # type: ignore[operator]
    register(fabric, decode.rig.pool)
