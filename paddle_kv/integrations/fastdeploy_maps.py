"""The maps in which FastDeploy keeps its caches, ``{role}_{layer}_rank{rank}.device{device}`` -> tensor or address, as
a device cache and a host pool."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..layout import KVCacheSpec
from ..memory import DeviceCache, HostPool
from ..memory.host_layout import HostLayout
from ..ops import _arguments as arguments

_NAME = re.compile(r"([a-z_]+)_(\d+)_rank(\d+)\.device(\d+)")
KEYS, VALUES = "key_caches", "value_caches"  # every other role is a tensor of its own beside them


def adopt(
    cache_kvs_map: Mapping[str, Any],
    host_cache_kvs_map: Mapping[str, int] | None,
    num_host_blocks: int,
    owner: tuple[int, int],
    host_strides_bytes: Mapping[str, int] | None,
    layout: HostLayout | None,
) -> tuple[DeviceCache, HostPool]:
    """``owner``: rank and device; ``layout``: of memory that is allocated here. See
    :meth:`CacheTransferManager.from_maps`."""
    tensors = _by_role(cache_kvs_map, "cache_kvs_map", owner)
    if KEYS not in tensors:
        raise ValueError(f"cache_kvs_map has {sorted(tensors)}; {KEYS} are expected")
    for role, layers in tensors.items():
        for layer, tensor in layers.items():
            arguments.cache(tensor, f"cache_kvs_map[{_name(role, layer, owner)!r}]")
    num_layers = _count_layers(tensors, "cache_kvs_map", owner)
    spec = _spec(tensors, num_layers)
    named = {_our_name(role, spec): layers for role, layers in tensors.items()}
    lists = {
        name: [_shaped(layers[layer], spec, name) for layer in range(num_layers)] for name, layers in named.items()
    }
    cache = DeviceCache.adopt(spec, lists, num_blocks=min(int(one.shape[0]) for of in lists.values() for one in of))
    if host_cache_kvs_map is None:
        if host_strides_bytes is not None:
            raise ValueError("host_strides_bytes was given without a host_cache_kvs_map, whose memory it describes")
        return cache, HostPool(spec, num_host_blocks, layout=layout)
    addresses = _by_role(host_cache_kvs_map, "host_cache_kvs_map", owner)
    if set(addresses) != set(tensors):
        raise ValueError(
            f"host_cache_kvs_map has {sorted(addresses)}, cache_kvs_map has {sorted(tensors)}; a block is moved as a "
            "whole, so both must have the same; without a host_cache_kvs_map the memory is allocated here"
        )
    on_host = _count_layers(addresses, "host_cache_kvs_map", owner)
    if on_host != num_layers:
        raise ValueError(f"host_cache_kvs_map has {on_host} layers, cache_kvs_map has {num_layers}; both need as many")
    pointers = {_our_name(role, spec): [of[layer] for layer in range(num_layers)] for role, of in addresses.items()}
    return cache, HostPool.adopt(spec, pointers, num_host_blocks, strides_bytes=host_strides_bytes)


def _name(role: str, layer: int, owner: tuple[int, int]) -> str:
    return f"{role}_{layer}_rank{owner[0]}.device{owner[1]}"


def _by_role(given: Any, label: str, owner: tuple[int, int]) -> dict[str, dict[int, Any]]:
    """Role -> layer -> what is there, of one rank and device. None, as MLA has for values, is nothing."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{label} is {type(given).__name__}; a mapping name -> tensor or address is expected")
    found: dict[str, dict[int, Any]] = {}
    for name, value in given.items():
        match = _NAME.fullmatch(str(name))
        if match is None:  # of an unknown form: left out, it would hold the content of another request
            raise ValueError(f"{label} has the name {name!r}; {_name('role', 0, owner)!r} is the form that is expected")
        role, layer, *of = match.groups()
        if value is not None and tuple(map(int, of)) == owner:
            layers = found.setdefault(role, {})
            if int(layer) in layers:
                raise ValueError(f"{label} has several names for {_name(role, int(layer), owner)!r}; give it one")
            layers[int(layer)] = value
    if not found:
        raise ValueError(
            f"{label} has nothing of rank {owner[0]} on device {owner[1]}; its names are {list(given)[:4]}"
        )
    return found


def _count_layers(by_role: dict[str, dict[int, Any]], label: str, owner: tuple[int, int]) -> int:
    """Layers of the model and of its draft; ValueError unless each of them has each role."""
    num_layers = 1 + max(layer for layers in by_role.values() for layer in layers)
    for role, layers in by_role.items():
        for layer in range(num_layers):
            if layer not in layers:
                raise ValueError(f"{label} lacks {_name(role, layer, owner)!r}; each of {num_layers} layers needs it")
    return num_layers


def _spec(tensors: dict[str, dict[int, Any]], num_layers: int) -> KVCacheSpec:
    key = tensors[KEYS][0]
    *heads, tokens, width = list(key.shape)[1:] if key.ndim in (3, 4) else [0, 0, 0, 0]
    extra = {role: (tuple(of[0].shape[1:]), of[0].dtype) for role, of in tensors.items() if role not in (KEYS, VALUES)}
    common: dict[str, Any] = {"num_layers": num_layers, "block_size": tokens, "dtype": key.dtype, "extra": extra}
    if VALUES in tensors:
        if len(heads) == 1 and tensors[VALUES][0].ndim == 4:
            value_width = tensors[VALUES][0].shape[3]
            return KVCacheSpec(num_kv_heads=heads[0], head_dim=width, v_head_dim=value_width, **common)
    elif heads in ([], [1]) and width:
        return KVCacheSpec(num_kv_heads=1, head_dim=width, latent=True, **common)
    form = (
        "[blocks, heads, tokens, size]" if VALUES in tensors else "[blocks, 1, tokens, width], as there are no values,"
    )
    raise ValueError(f"{KEYS} of layer 0 have shape {list(key.shape)}; {form} is expected")


def _our_name(role: str, spec: KVCacheSpec) -> str:
    return {KEYS: "latent" if spec.latent else "key", VALUES: "value"}.get(role, role)


def _shaped(tensor: Any, spec: KVCacheSpec, name: str) -> Any:
    """The same memory, for a latent cache without the dimension of one head."""
    if name == "latent" and tensor.ndim == 4 and tensor.shape[1] == 1:
        return tensor.view([tensor.shape[0], *tensor.shape[2:]])
    return tensor
