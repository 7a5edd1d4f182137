"""A server with a GPU, whose blocks in host memory other processes read: does what it is asked, and is killed."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler, devices
from paddle_kv.offload import KVOffloadManager
from paddle_kv.tiers.neighbours import Lender
from tests.gpu.peer_rig import SEED, SPECS, begin, serve, set_cache
from tests.schedule.rig import WAIT_S, random_bits

MODEL = b"model"


def lend(pipe: Connection, gpu: int, kind: str) -> None:
    """What is saved from its cache is lent, until its pipe ends. Of its host memory half at most is read at a time."""
    begin(gpu)
    spec, blocks, _ = SPECS[kind]
    cache = DeviceCache(spec, blocks, devices.name_of(gpu))
    set_cache(cache, random_bits(spec, blocks, SEED))
    pool = HostPool(spec, 2 * blocks, layout="block_first", shared=True)
    lender = Lender(pool, model=MODEL)
    manager = KVOffloadManager(LayerwiseScheduler(cache, pool), lender=lender)

    def save(keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        manager.save(keys, block_ids).wait(WAIT_S)

    serve(pipe, {"path": lambda: str(lender.path), "save": save, "evict": manager.evict, "stats": lender.stats})
