"""Arguments of the directory, the movers, the manager, ranks, peers and tiers, with values of all wrong kinds: each is
refused by an error that names it, or is one of those that are listed here as legal."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, PeerError
from paddle_kv.offload import (
    POLICIES,
    BlockHasher,
    Directory,
    Event,
    Hello,
    KVOffloadManager,
    Mirror,
    Mover,
    Namespace,
    Prompt,
    Rates,
    RateSnapshot,
    Result,
    Snapshot,
    cache_salt,
    decide,
    lookup_common,
    make_policy,
    paddle_all_reduce_min,
    spec_digest,
)
from paddle_kv.peers import Grant, Listener, PeerBlocks, Receiver, Sender, connect
from paddle_kv.tiers import FilesEngine, Job, Saver, Tier, load

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
WAIT_S = 20.0
VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "-1": -1,
    "0": 0,
    "5": 5,
    "huge": 2**70,
    "1.5": 1.5,
    "nan": math.nan,
    "inf": math.inf,
    "''": "",
    "x": "x",
    "b''": b"",
    "[]": [],
    "{}": {},
    "object": object(),
    "10**400": 10**400,  # more than a float can be
    "-10**400": -(10**400),
    "array": np.array(0.5),  # iterable by its type, and there is nothing to go through
}
POSITIVE = "5"
COUNT = "0 5"
ANY_TIME = "None -1 0 5 1.5"  # one that is not positive is over at once
A_TIME = "-1 0 5 1.5"
LISTS = "[]"
ITERABLES = "[] {}"
A_RATE = "5 1.5 huge"
RATES = {"link_s": 0.1, "tier_s": 1.0, "base_s": 0.5, "slope_s": 0.0, "block_tokens": 16}
PROMPT = {"host": (0, 3), "tier": (3, 5), "end_tokens": 80, "num_tokens": 100}


class Rig:
    """One of each, of which the calls of the table leave nothing behind."""

    def __init__(self, folder: Path) -> None:
        self.scheduler = LayerwiseScheduler(
            DeviceCache(SPEC, 8, "cpu"), HostPool(SPEC, 16, layout="block_first", shared=True)
        )
        self.manager = KVOffloadManager(self.scheduler, capacity_bytes=4 * 2 * SPEC.block_bytes)
        self.hashes = self.manager.block_hashes(range(6))
        self.manager.save(self.hashes, [0, 1]).wait(WAIT_S)
        self.mover = Mover(self.scheduler, capacity_blocks=2)
        self.receiver = Receiver(self.scheduler)
        self.listener = Listener(self.receiver)
        self.sender = Sender(self.scheduler, bool)
        self.engine = FilesEngine({folder: 1 << 20})
        self.tier = Tier(self.engine, self.scheduler.host_pool, model=b"m", max_objects=4)

    def close(self) -> None:
        self.sender.close(WAIT_S)
        self.receiver.close(WAIT_S)
        self.listener.close(WAIT_S)
        self.tier.close(WAIT_S)
        self.engine.close(WAIT_S)
        self.mover.close()
        self.manager.close()
        self.scheduler.close(WAIT_S)

    def directory(self) -> Directory:
        found = Directory(8, policy="lru")
        found.join(Hello(0, 5, 8))
        save = found.plan_save([b"a", b"b"], [0, 1]).job
        assert save is not None
        found.complete([Result(save.id, 0, 5)])
        found.tier_stored("x", [b"t"])
        return found

    def grant(self, **given: Any) -> None:
        transfer, grant = self.receiver.grant(**given)
        self.receiver.revoke(grant)
        transfer.wait_over(WAIT_S)

    def request(self, name: str, **given: Any) -> None:
        request = self.manager.request([1, 2, 3, 4], [3, 4])
        try:
            getattr(request, name)(**given)
        finally:
            request.cancel()

    def keep_first(self, **given: Any) -> None:
        with self.manager.lookup(self.hashes) as lease:
            lease.keep_first(**given)


def _of(name: str, method: str) -> Callable[[Rig], Callable[..., Any]]:
    """A method of what the rig has."""
    return lambda rig: getattr(getattr(rig, name), method)


def _directory(method: str) -> Callable[[Rig], Callable[..., Any]]:
    return lambda rig: getattr(rig.directory(), method)


def _made(kind: Callable[..., Any]) -> Callable[[Rig], Callable[..., Any]]:
    return lambda rig: kind


def _decided(rates: dict[str, Any], prompt: dict[str, Any]) -> Any:
    return decide(RateSnapshot(**rates), Prompt(**prompt), chunk_tokens=32, num_layers=2)


def _closed(kind: Callable[..., Any]) -> Callable[[Rig], Callable[..., Any]]:
    """It is made, and closed again."""
    return lambda rig: lambda **given: kind(**given).close()


# Of each call: what is called, arguments that are right ("@": of the rig), legal values of each argument. With a "?" it
# is legal and names nothing that is there.
Call = tuple[Callable[[Rig], Callable[..., Any]], dict[str, Any], dict[str, str]]
RIG_S, RIG_H = "@scheduler", "@hashes"
HASHES = {"hashes": LISTS}
CALLS: dict[str, Call] = {
    "Directory": (
        _made(Directory),
        {"capacity_blocks": 8},
        {
            "capacity_blocks": POSITIVE,
            "num_ranks": POSITIVE,
            "space": "None",
            "policy": "",
            "timeout_s": "None 5 1.5",
            "max_events": COUNT,
            "clock": "",
            "slots": "None",
        },
    ),
    "Directory.lookup": (_directory("lookup"), {"hashes": [b"a"]}, HASHES | {"prompt": "None []"}),
    "Directory.peek": (_directory("peek"), {}, HASHES),
    "Directory.states": (_directory("states"), {}, HASHES),
    "Directory.tiers_of": (_directory("tiers_of"), {}, {"key": "b''"}),
    "Directory.tier_stored": (_directory("tier_stored"), {"tier": "d", "hashes": [b"c"]}, HASHES | {"tier": "x"}),
    "Directory.tier_removed": (_directory("tier_removed"), {"tier": "d", "hashes": [b"c"]}, HASHES | {"tier": "x"}),
    "Directory.expect": (
        _directory("expect"),
        {"hashes": [b"a"]},
        HASHES | {"in_seconds": "None 0 5 1.5 huge"},
    ),
    "Directory.end": (_directory("end"), {}, HASHES),
    "Directory.evict": (_directory("evict"), {}, {"num_blocks": COUNT}),
    "Directory.drop": (_directory("drop"), {}, {"keys": LISTS}),
    "Directory.join": (_directory("join"), {}, {"hello": ""}),
    "Directory.lost": (_directory("lost"), {}, {"rank": "0"}),
    "Directory.complete": (_directory("complete"), {}, {"results": ITERABLES}),
    "Directory.plan_load": (
        _directory("plan_load"),
        {"hashes": [b"t"], "device_block_ids": [1], "tier": "x"},
        {"hashes": "", "device_block_ids": "", "timeout_s": "None 5 1.5", "tier": "x"},
    ),
    "Directory.plan_save": (
        _directory("plan_save"),
        {"hashes": [b"c"], "device_block_ids": [1]},
        {
            "hashes": "",
            "device_block_ids": "",
            "layerwise": "True",
            "all_or_nothing": "True",
            "min_uses": POSITIVE,
            "computed_from": ITERABLES,
            "timeout_s": "None 5 1.5",
        },
    ),
    "Directory.undo": (_directory("undo"), {}, {"job": ""}),
    "Namespace": (_made(Namespace), {}, {"model": "b''", "spec": "b''", "group": COUNT}),
    "Mirror.longest_prefix": (
        _made(Mirror().longest_prefix),
        {"keys": [b"a"]},
        {"keys": LISTS, "tier": "'' x"},
    ),
    "Mirror.apply": (_made(Mirror().apply), {}, {"events": ITERABLES}),
    "Mirror.restore": (_made(Mirror().restore), {}, {"snapshot": ""}),
    "Mirror.restore number": (
        _made(lambda number: Mirror().restore(Snapshot(number))),
        {},
        {"number": COUNT + " huge 10**400"},
    ),
    "Mirror.apply number": (
        _made(lambda number: Mirror().apply([Event(number, "stored", "disk")])),
        {},
        {"number": POSITIVE + " huge 10**400"},
    ),
    "Mover": (
        _closed(Mover),
        {"scheduler": RIG_S, "capacity_blocks": 2},
        {"scheduler": "", "rank": COUNT, "capacity_blocks": "None 5"},
    ),
    "Mover.submit": (_of("mover", "submit"), {}, {"jobs": ITERABLES}),
    "Mover.restart": (_of("mover", "restart"), {}, {"timeout_s": ANY_TIME}),
    "KVOffloadManager": (
        _closed(KVOffloadManager),
        {"scheduler": RIG_S},
        {
            "scheduler": "",
            "policy": "",
            "write_through": "True",
            "salt": "b''",
            "capacity_bytes": "None",
            "tier": "None",
            "tier_timeout_s": A_TIME,
            "max_events": COUNT,
            "lender": "None",
        },
    ),
    "manager.block_hashes": (
        _of("manager", "block_hashes"),
        {"token_ids": [1, 2, 3]},
        {"token_ids": LISTS, "request_salt": "b''"},
    ),
    "manager.prefix": (_of("manager", "prefix"), {}, {"request_salt": "b''"}),
    "manager.lookup": (_of("manager", "lookup"), {"hashes": RIG_H}, HASHES | {"num_tokens": "None"}),
    "manager.peek": (_of("manager", "peek"), {}, HASHES),
    "manager.states": (_of("manager", "states"), {}, HASHES),
    "manager.prefetch": (
        _of("manager", "prefetch"),
        {"hashes": RIG_H, "timeout_s": 1.0},
        HASHES | {"timeout_s": A_TIME},
    ),
    "manager.observe_prefill": (
        _of("manager", "observe_prefill"),
        {"tokens": range(3), "seconds": 1.0},
        {"tokens": "", "seconds": "5 1.5 huge"},
    ),
    "manager.onload": (
        _of("manager", "onload"),
        {"hashes": RIG_H, "device_block_ids": [0, 1]},
        {"hashes": "", "device_block_ids": ""},
    ),
    "manager.save": (
        _of("manager", "save"),
        {"hashes": RIG_H, "device_block_ids": [0, 1]},
        {"hashes": "", "device_block_ids": "", "layerwise": "True", "computed_from": ITERABLES},
    ),
    "manager.blocks_full": (
        _of("manager", "blocks_full"),
        {"hashes": RIG_H, "device_block_ids": [0, 1]},
        {"hashes": "", "device_block_ids": "", "layerwise": "True", "computed_from": ITERABLES},
    ),
    "manager.blocks_evicted": (
        _of("manager", "blocks_evicted"),
        {"hashes": RIG_H, "device_block_ids": [0, 1]},
        {"hashes": "", "device_block_ids": "", "computed_from": ITERABLES},
    ),
    "manager.blocks_to_recompute": (_of("manager", "blocks_to_recompute"), {}, {"load": ""}),
    "manager.left_out": (_of("manager", "left_out"), {}, {"save": ""}),
    "manager.evict": (_of("manager", "evict"), {}, {"num_blocks": "0 5"}),
    "manager.drop": (_of("manager", "drop"), {}, HASHES),
    "manager.flush": (_of("manager", "flush"), {}, {"timeout_s": ANY_TIME}),
    "manager.expect": (_of("manager", "expect"), {"hashes": RIG_H}, HASHES | {"in_seconds": "None 0 5 1.5 huge"}),
    "manager.end": (_of("manager", "end"), {}, HASHES),
    "lease.keep_first": (lambda rig: rig.keep_first, {}, {"num_blocks": "0"}),
    "prefetch.wait": (
        lambda rig: rig.manager.prefetch(rig.hashes, timeout_s=1.0).wait,
        {},
        {"timeout_s": ANY_TIME},
    ),
    "request.next_chunk": (
        lambda rig: lambda **given: rig.request("next_chunk", **given),
        {},
        {"max_tokens": "None 5", "timeout_s": ANY_TIME},
    ),
    "request.wait": (lambda rig: lambda **given: rig.request("wait", **given), {}, {"timeout_s": ANY_TIME}),
    "decide": (
        _made(decide),
        {"rates": RateSnapshot(**RATES), "prompt": Prompt(**PROMPT), "chunk_tokens": 32, "num_layers": 2},  # type: ignore[arg-type]
        {
            "rates": "",
            "prompt": "",
            "chunk_tokens": POSITIVE,
            "num_layers": POSITIVE,
            "wait_s": "0 " + A_RATE,
            "link_wait_s": "0 " + A_RATE,
            "tier_wait_s": "0 " + A_RATE,
        },
    ),
    "decide rates": (
        _made(lambda **given: _decided(given, PROMPT)),
        RATES,
        {
            "link_s": A_RATE + " inf",
            "tier_s": A_RATE + " inf",
            "base_s": A_RATE + " None",
            "slope_s": A_RATE + " 0",
            "block_tokens": POSITIVE,
        },
    ),
    "decide prompt": (
        _made(lambda **given: _decided(RATES, given)),
        PROMPT,
        {"host": "", "tier": "", "end_tokens": "", "num_tokens": ""},
    ),
    "Rates": (
        _made(Rates),
        {"block_bytes": 1000, "block_tokens": 16},
        {"block_bytes": POSITIVE, "block_tokens": POSITIVE, "clock": ""},
    ),
    **{
        f"make_policy {name}": (
            _made(make_policy),
            {"name": name, "capacity_blocks": 8},
            {"capacity_blocks": POSITIVE, "clock": ""},
        )
        for name in POLICIES
    },
    "lookup_common": (
        lambda rig: lambda **given: lookup_common(**given).release(),
        {"manager": "@manager", "hashes": RIG_H, "all_reduce_min": int},
        HASHES | {"manager": "", "all_reduce_min": "", "num_tokens": "None"},
    ),
    "paddle_all_reduce_min": (_made(paddle_all_reduce_min), {}, {"group": "None"}),
    "cache_salt": (
        _made(cache_salt),
        {"model": "m", "tp_size": 8},
        {"model": "'' x", "lora": "'' x", "tp_rank": COUNT, "tp_size": POSITIVE},
    ),
    "spec_digest": (_made(spec_digest), {}, {"spec": ""}),
    "BlockHasher": (_made(BlockHasher), {"block_size": 3}, {"block_size": POSITIVE, "salt": "b''"}),
    "Receiver": (_closed(Receiver), {"scheduler": RIG_S}, {"scheduler": "", "direct": "?True"}),
    "receiver.grant": (
        lambda rig: rig.grant,
        {"device_block_ids": [1]},
        {"device_block_ids": "", "host_block_ids": "None", "timeout_s": A_TIME, "urgent": "None True"},
    ),
    "receiver.revoke": (_of("receiver", "revoke"), {}, {"grant": ""}),
    "receiver.received": (_of("receiver", "received"), {"data": b"x"}, {"peer": ""}),
    "receiver.holds": (_of("receiver", "holds"), {}, {"peer": ""}),
    "receiver.lost": (_of("receiver", "lost"), {}, {"peer": ""}),
    "receiver.gone": (_of("receiver", "gone"), {}, {"peer": ""}),
    "receiver.close": (lambda rig: Receiver(rig.scheduler).close, {}, {"timeout_s": ANY_TIME}),
    "Sender": (
        _closed(Sender),
        {"scheduler": RIG_S, "send": bool},
        {"scheduler": "", "send": "", "hang_up": ""},
    ),
    "sender.send": (
        _of("sender", "send"),
        {"grant": Grant(3, "00" * 16, "elsewhere", (4,), 2, 0, 2, 1.0), "device_block_ids": [1]},
        {"grant": ""},
    ),
    "sender.close": (lambda rig: Sender(rig.scheduler, bool).close, {}, {"timeout_s": ANY_TIME}),
    "Listener": (_closed(Listener), {"receiver": "@receiver"}, {"receiver": "", "path": "None ?x"}),
    "listener.close": (lambda rig: Listener(rig.receiver).close, {}, {"timeout_s": ANY_TIME}),
    "connect": (_closed(connect), {"scheduler": RIG_S, "path": "none-such"}, {"scheduler": "", "path": "?x"}),
    "PeerBlocks": (_made(PeerBlocks), {}, {"cache": ""}),
    "Grant.from_json": (_made(Grant.from_json), {}, {"text": ""}),
    "Tier": (
        _closed(Tier),
        {"engine": "@engine", "pool": "@pool", "model": b"m", "max_objects": 4},
        {
            "engine": "",
            "pool": "",
            "model": "b''",
            "rank": COUNT,
            "group": COUNT,
            "max_store_bytes": POSITIVE + " huge 10**400",
            "max_objects": POSITIVE,
        },
    ),
    "tier.payload": (_of("tier", "payload"), {}, {"block_id": COUNT}),
    "tier.store": (_of("tier", "store"), {}, {"jobs": LISTS}),
    "tier.load": (_of("tier", "load"), {}, {"jobs": LISTS}),
    "tier.exists": (_of("tier", "exists"), {}, {"keys": ITERABLES}),
    "tier.delete": (_of("tier", "delete"), {}, {"keys": ITERABLES}),
    "tier.drain": (_of("tier", "drain"), {}, {"timeout_s": ANY_TIME}),
    "tiers.Job": (
        _made(Job),
        {"keys": [b"a"], "block_ids": [0]},
        {"keys": "", "block_ids": "", "timeout_s": A_TIME, "layerwise": "True", "observer": "None"},
    ),
    "tiers.load": (
        _made(load),
        {"tier": "@tier", "scheduler": RIG_S, "keys": [b"a"], "host_block_ids": [15], "device_block_ids": [7]},
        {
            "tier": "",
            "scheduler": "",
            "keys": "",
            "host_block_ids": "",
            "device_block_ids": "",
            "timeout_s": A_TIME,
            "urgent": "None True",
        },
    ),
    "FilesEngine": (_closed(FilesEngine), {"roots": "@roots"}, {"roots": "", "threads_per_root": POSITIVE}),
    "Saver": (
        _made(Saver),
        {"tier": "@tier", "when": "nth_use"},
        {
            "tier": "",
            "when": "",
            "uses": POSITIVE + " huge 10**400",
            "timeout_s": A_TIME,
            "most_counted": POSITIVE + " huge 10**400",
        },
    ),
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with contextlib.closing(Rig(tmp_path_factory.mktemp("tier"))) as made:
        yield made


def outcome_of(call: Callable[..., Any], given: dict[str, Any], name: str) -> str:
    """ "taken", "refused", or what else became of it."""
    try:
        call(**given)
    except (TypeError, ValueError, IndexError) as error:
        return "refused" if name in str(error) else f"does not name it: {error!r}"
    except (PeerError, OSError) as error:
        return f"not there: {error!r}"
    except Exception as error:  # noqa: BLE001
        return f"not a refusal: {error!r}"
    return "taken"


@pytest.mark.parametrize("title", CALLS)
def test_each_argument_takes_what_is_legal_and_refuses_all_else(title: str, rig: Rig, tmp_path: Path) -> None:
    call_of, right, legal = CALLS[title]
    there = {"pool": rig.scheduler.host_pool, "roots": {tmp_path: 1 << 20}}
    names = {key: value for key, value in right.items() if isinstance(value, str) and value[:1] == "@"}
    given = right | {key: there.get(value[1:]) or getattr(rig, value[1:]) for key, value in names.items()}
    wrong = []
    for name, values in legal.items():
        for shown, value in VALUES.items():
            found = outcome_of(call_of(rig), given | {name: value}, name)
            expected = "taken" if shown in values.split() else "refused"
            if f"?{shown}" in values.split():
                expected = "does not name it" if name == "direct" else "not there"
            if found.partition(":")[0] != expected:
                wrong.append(f"{name} = {shown}: {found}")
    assert wrong == []
