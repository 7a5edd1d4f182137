"""Caches as FastDeploy keeps them, by names in maps: every form is adopted in place, saved and loaded, byte by byte."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest

from paddle_kv import HostPool
from paddle_kv.integrations import CacheTransferManager
from tests.machine import POISON, bits_of, item_bytes, random_bits, tensor_of
from tests.schedule.rig import WAIT_S, cpu_tensor

DEVICE_BLOCKS, HOST_BLOCKS = 6, 5
Form = dict[str, tuple[tuple[int, ...], str]]  # role -> block shape, dtype

HEADS, TOKENS, WIDTH = 2, 3, 8
KEY = (HEADS, TOKENS, WIDTH)
SCALE = ((HEADS, TOKENS), "float32")
FORMS: dict[str, Form] = {
    "bf16": {"key_caches": (KEY, "bfloat16"), "value_caches": (KEY, "bfloat16")},
    "values of another size": {"key_caches": (KEY, "float16"), "value_caches": ((HEADS, TOKENS, 5), "float16")},
    "block-wise fp8": {
        "key_caches": (KEY, "uint8"),
        "value_caches": (KEY, "uint8"),
        "key_cache_scales": ((HEADS, TOKENS), "bfloat16"),
        "value_cache_scales": SCALE,
    },
    "int4": {"key_caches": ((HEADS, TOKENS, 4), "uint8"), "value_caches": ((HEADS, TOKENS, 4), "uint8")},
    "MLA": {"key_caches": ((1, TOKENS, 11), "bfloat16")},
    "MLA of rank 3": {"key_caches": ((TOKENS, 11), "bfloat16")},
    "DSA": {"key_caches": ((1, TOKENS, 656), "uint8"), "indexer_caches": ((TOKENS, 1, 132), "uint8")},
}


def name_of(role: str, layer: int, rank: int = 1, device: int = 2) -> str:
    return f"{role}_{layer}_rank{rank}.device{device}"


class Maps:
    """The maps of a rank: tensors with known bits, and one piece of poisoned host memory a role and layer.

    ``draft_blocks``: of ``draft_layer``, which is one of a draft model.
    """

    def __init__(self, form: Form, layers: int = 3, draft_blocks: int = DEVICE_BLOCKS, draft_layer: int = 2) -> None:
        self.form, self.layers = form, layers
        self.tensors: dict[str, Any] = {}
        self.device: dict[str, np.ndarray] = {}
        self.host: dict[str, np.ndarray] = {}
        for role, (shape, dtype) in form.items():
            for layer in range(layers):
                name, blocks = name_of(role, layer), draft_blocks if layer == draft_layer else DEVICE_BLOCKS
                block_bytes = int(np.prod(shape)) * item_bytes(dtype)
                self.device[name] = random_bits(blocks, block_bytes, len(self.tensors))
                self.tensors[name] = tensor_of(self.device[name], shape, dtype, cpu_tensor(np.zeros(1)).place)
                self.host[name] = np.full((HOST_BLOCKS, block_bytes), POISON, np.uint8)
        self.addresses = {name: memory.ctypes.data for name, memory in self.host.items()}
        self.options: dict[str, Any] = {"num_host_blocks": HOST_BLOCKS, "local_rank": 1, "device_id": 2}

    def manager(self, **changed: Any) -> CacheTransferManager:
        given = {"cache_kvs_map": self.tensors, "host_cache_kvs_map": self.addresses, **self.options, **changed}
        return CacheTransferManager.from_maps(**given)

    def move(self, manager: CacheTransferManager) -> None:
        """Two blocks out and, elsewhere, in again."""
        manager.evict_to_host_async([5, 2], [0, 4])
        manager.load_layers_to_device_async(range(manager.num_layers), [4, 0], [1, 3])
        manager.sync_input_stream()
        for bits in self.device.values():
            bits[[1, 3]] = bits[[2, 5]]

    def check(self) -> None:
        for name, tensor in self.tensors.items():
            np.testing.assert_array_equal(bits_of(tensor), self.device[name], err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_saved_and_loaded(form: str) -> None:
    maps = Maps(FORMS[form])
    with maps.manager() as manager:
        maps.move(manager)
    maps.check()
    for name, memory in maps.host.items():
        expected = np.full_like(memory, POISON)
        expected[[0, 4]] = maps.device[name][[5, 2]]
        np.testing.assert_array_equal(memory, expected, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_without_host_memory_it_is_allocated(form: str) -> None:
    maps = Maps(FORMS[form])
    with maps.manager(host_cache_kvs_map=None) as manager:
        maps.move(manager)
        assert manager.scheduler.host_pool.num_blocks == HOST_BLOCKS
    maps.check()


@pytest.mark.parametrize(("width", "adjacent"), [(4095, True), (4096, False)])
def test_memory_that_is_allocated_has_the_order_for_its_blocks(width: int, adjacent: bool) -> None:
    """Layers side by side where blocks have less than 48 KiB, or for a tier."""
    maps = Maps({role: ((HEADS, TOKENS, width), "bfloat16") for role in ("key_caches", "value_caches")})
    block_bytes = HEADS * TOKENS * width * 2
    with maps.manager(host_cache_kvs_map=None) as manager:
        pool = manager.scheduler.host_pool
        assert pool.stride_bytes("key") == (3 * 2 * block_bytes if adjacent else block_bytes)

    class NoTier(Exception):
        pass

    def make_tier(pool: HostPool) -> NoReturn:
        assert pool.stride_bytes("key") == 3 * 2 * block_bytes
        raise NoTier

    with pytest.raises(NoTier):
        maps.manager(host_cache_kvs_map=None, make_tier=make_tier)


@pytest.mark.parametrize("draft_layer", [0, 2])
def test_layers_of_a_draft_model_have_more_blocks(draft_layer: int) -> None:
    maps = Maps(FORMS["bf16"], draft_blocks=2 * DEVICE_BLOCKS, draft_layer=draft_layer)
    with maps.manager() as manager:
        assert manager.num_layers == 3
        maps.move(manager)
        with pytest.raises(IndexError, match=r"device_block_ids\[0\] = 6 must be in \[0, 6\)"):
            manager.evict_to_host_async([6], [0])
    maps.check()


def test_host_memory_whose_layers_lie_together() -> None:
    """A buffer ``[position, layer, heads, tokens, size]`` for each role."""
    maps = Maps(FORMS["block-wise fp8"])
    ours = {"key_caches": "key", "value_caches": "value"}
    buffers, strides = {}, {}
    for role in maps.form:
        block_bytes = maps.host[name_of(role, 0)].shape[1]
        buffers[role] = np.full((HOST_BLOCKS, maps.layers, block_bytes), POISON, np.uint8)
        strides[ours.get(role, role)] = maps.layers * block_bytes
        for layer in range(maps.layers):
            maps.addresses[name_of(role, layer)] = buffers[role][0, layer].ctypes.data
    with maps.manager(host_strides_bytes=strides) as manager:
        maps.move(manager)
    maps.check()
    for role, buffer in buffers.items():
        expected = np.full_like(buffer, POISON)
        for layer in range(maps.layers):
            expected[[0, 4], layer] = maps.device[name_of(role, layer)][[5, 2]]
        np.testing.assert_array_equal(buffer, expected, err_msg=role)


def test_none_stands_for_no_values_and_other_ranks_are_passed_over() -> None:
    maps = Maps(FORMS["MLA"])
    maps.tensors.update({name_of("value_caches", layer): None for layer in range(3)})
    maps.addresses.update({name_of("value_caches", layer): None for layer in range(3)})
    maps.tensors[name_of("key_caches", 7, rank=0)] = cpu_tensor(np.zeros(3))
    with maps.manager() as manager:
        assert manager.scheduler.device_cache.spec.tensor_names == ("latent",)
        maps.tensors = {name: tensor for name, tensor in maps.tensors.items() if name in maps.device}
        maps.move(manager)
    maps.check()


def test_stats_have_its_names_and_ours() -> None:
    with Maps(FORMS["block-wise fp8"]).manager() as manager:
        stats = manager.get_stats()
    theirs = ["num_layers", "local_rank", "device_id", "cache_dtype", "num_host_blocks", "has_device_cache"]
    assert [stats[name] for name in [*theirs, "has_host_cache", "is_fp8"]] == [3, 1, 2, "uint8", 5, True, True, True]
    assert stats["offload_transfers"] == 0
    with Maps(FORMS["MLA"]).manager() as manager:
        assert not manager.get_stats()["is_fp8"]


def test_close_ends_what_was_made_and_only_that() -> None:
    maps = Maps(FORMS["bf16"])
    for _ in range(2):  # the same memory again: nothing of the first is left
        manager = maps.manager()
        manager.evict_to_host_async([0], [0], order_compute=False)
        manager.close()
        manager.close()
        assert manager.scheduler.host_pool.closed
    with maps.manager() as owner:
        CacheTransferManager(owner.scheduler).close()
        owner.evict_to_host_async([0], [0]).wait(WAIT_S)


def changed(maps: Maps, **change: Any) -> dict[str, Any]:
    return {name: change.get(name.split("_rank")[0], value) for name, value in maps.tensors.items()}


def without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("bf16", lambda m: {"cache_kvs_map": []}, TypeError, "cache_kvs_map is list; a mapping"),
    ("bf16", lambda m: {"host_cache_kvs_map": 3}, TypeError, "host_cache_kvs_map is int; a mapping"),
    ("bf16", lambda m: {"cache_kvs_map": {}}, ValueError, "cache_kvs_map has nothing of rank 1 on device 2"),
    ("bf16", lambda m: {"local_rank": 0}, ValueError, r"nothing of rank 0 on device 2; its names are \['key_caches_0"),
    (
        "bf16",
        lambda m: {"cache_kvs_map": m.tensors | {"key": 1}},
        ValueError,
        "cache_kvs_map has the name 'key'; 'role_0",
    ),
    (
        "bf16",
        lambda m: {"cache_kvs_map": without(m.tensors, name_of("key_caches", 1))},
        ValueError,
        "cache_kvs_map lacks 'key_caches_1_rank1.device2'; each of 3 layers needs it",
    ),
    (
        "bf16",
        lambda m: {"cache_kvs_map": without(m.tensors, *(name_of("key_caches", i) for i in range(3)))},
        ValueError,
        r"cache_kvs_map has \['value_caches'\]; key_caches are expected",
    ),
    (
        "DSA",  # FastDeploy allocates no host memory for these
        lambda m: {"host_cache_kvs_map": without(m.addresses, *(name_of("indexer_caches", i) for i in range(3)))},
        ValueError,
        r"host_cache_kvs_map has \['key_caches'\], cache_kvs_map has \['indexer_caches', 'key_caches'\]; a block is",
    ),
    (
        "MLA",
        lambda m: {"host_cache_kvs_map": m.addresses | {name_of("indexer_caches", i): 4096 for i in range(3)}},
        ValueError,
        r"host_cache_kvs_map has \['indexer_caches', 'key_caches'\], cache_kvs_map has \['key_caches'\]; a block is",
    ),
    (
        "MLA",
        lambda m: {"host_cache_kvs_map": without(m.addresses, name_of("key_caches", 2))},
        ValueError,
        "host_cache_kvs_map has 2 layers, cache_kvs_map has 3; both need as many",
    ),
    ("MLA", lambda m: {"host_cache_kvs_map": m.addresses | {name_of("key_caches", 1): 0}}, ValueError, "= 0 must be"),
    ("MLA", lambda m: {"cache_kvs_map": changed(m, key_caches_1=5)}, TypeError, "cache_kvs_map.'key_caches_1_rank1"),
    (
        "MLA",
        lambda m: {"cache_kvs_map": changed(m, key_caches_1=cpu_tensor(np.zeros((6, 1, 3, 12), "float16")))},
        ValueError,
        r"tensors\['latent'\]\[1\] has shape",
    ),
    (
        "MLA",
        lambda m: {"cache_kvs_map": changed(m, key_caches_0=cpu_tensor(np.zeros((6, 2, 3, 11), "float16")))},
        ValueError,
        r"key_caches of layer 0 have shape \[6, 2, 3, 11\]; \[blocks, 1, tokens, width\], as there are no values,",
    ),
    (
        "bf16",
        lambda m: {"cache_kvs_map": changed(m, key_caches_0=cpu_tensor(np.zeros((6, 3, 8), "float16")))},
        ValueError,
        r"key_caches of layer 0 have shape \[6, 3, 8\]; \[blocks, heads, tokens, size\] is expected",
    ),
    (
        "bf16",
        lambda m: {"cache_kvs_map": changed(m, key_caches_0=cpu_tensor(np.zeros((6, 3), "float16")))},
        ValueError,
        r"key_caches of layer 0 have shape \[6, 3\]",
    ),
    (
        "bf16",
        lambda m: {"cache_kvs_map": m.tensors | {"key_caches_01_rank1.device2": m.tensors[name_of("key_caches", 0)]}},
        ValueError,
        "cache_kvs_map has several names for 'key_caches_1_rank1.device2'; give it one",
    ),
    (
        "bf16",
        lambda m: {"host_cache_kvs_map": None, "host_strides_bytes": {"key": 4096}},
        ValueError,
        "host_strides_bytes was given without a host_cache_kvs_map",
    ),
    ("bf16", lambda m: {"host_strides_bytes": 4096}, TypeError, "strides_bytes is 4096; a mapping"),
    ("bf16", lambda m: {"num_host_blocks": 0}, ValueError, "num_blocks = 0 must be an integer of at least 1"),
    ("bf16", lambda m: {"engine": "none"}, ValueError, "engine = 'none' must be one of"),
    ("bf16", lambda m: {"make_tier": 7}, TypeError, "make_tier is 7; a function of the host pool, or None,"),
    ("bf16", lambda m: {"local_rank": np.arange(2)}, TypeError, "local_rank is array.* an integer is expected"),
    ("bf16", lambda m: {"device_id": "2"}, TypeError, "device_id is '2' .* an integer is expected"),
]


@pytest.mark.parametrize(("form", "wrong", "error", "text"), WRONG)
def test_what_is_missing_or_does_not_fit_is_named(form: str, wrong: Any, error: type[Exception], text: str) -> None:
    maps = Maps(FORMS[form])
    with pytest.raises(error, match=text):
        maps.manager(**wrong(maps))
    with maps.manager() as manager:  # nothing of the first is left
        maps.move(manager)
    maps.check()
