"""Where the blocks of all tensors and layers lie in the memory of a host pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..layout import KVCacheSpec
from ..ops import _arguments as arguments

ROOM_UNIT_BYTES = 4096
SMALL_BLOCK_BYTES = 48 << 10  # of a tensor; smaller ones move as layers of a block side by side (docs/performance.md)
HostLayout = Literal["layer_first", "block_first", "page_first_direct"]


@dataclass(frozen=True)
class Placement:
    """Pieces of memory, and what lies in them."""

    sizes_bytes: list[int]
    strides_bytes: dict[str, int]  # name -> from a block to the next one
    first_blocks: dict[str, list[tuple[int, int]]]  # name -> of each layer the piece, and the first byte in it


def check_layout(layout: str | None) -> None:
    """ValueError unless it is one of ``HostLayout``, or None."""
    if layout is not None and layout not in get_args(HostLayout):
        raise ValueError(f"layout = {layout!r} must be 'layer_first', 'block_first', 'page_first_direct' or None")


def layout_for(spec: KVCacheSpec) -> HostLayout:
    """The one in which blocks of this size move best beside a model. Each tensor counts by its bytes: scales are small,
    and little of what is moved."""
    sizes = [spec.tensor_block_bytes(name) for name in spec.tensor_names]
    small = sum(size * size for size in sizes) < SMALL_BLOCK_BYTES * sum(sizes)
    return "block_first" if small else "layer_first"


def check_room(room_bytes: int, layout: str, *, shared: bool) -> None:
    """ValueError unless blocks of this layout can have so many bytes before them."""
    if room_bytes < 0 or room_bytes % ROOM_UNIT_BYTES:
        raise ValueError(f"room_bytes = {room_bytes} must be 0 or a multiple of {ROOM_UNIT_BYTES}")
    if room_bytes and (layout != "block_first" or shared):
        raise ValueError(f"room_bytes = {room_bytes} needs layout='block_first' and shared=False")


def placement(spec: KVCacheSpec, num_blocks: int, layout: HostLayout, room_bytes: int) -> Placement:
    """One piece per layer, one in which all layers of a block are adjacent, or one per name in which they are."""
    layers, names = spec.num_layers, spec.tensor_names
    own = {name: spec.tensor_block_bytes(name) for name in names}
    offset = {name: spec.tensor_offset_bytes(name) for name in names}
    if layout == "layer_first":
        first = {name: [(layer, num_blocks * offset[name]) for layer in range(layers)] for name in names}
        return Placement([num_blocks * spec.block_bytes] * layers, own, first)
    if layout == "block_first":
        stride = room_bytes + layers * spec.block_bytes
        starts = range(room_bytes, stride, spec.block_bytes)
        first = {name: [(0, start + offset[name]) for start in starts] for name in names}
        return Placement([num_blocks * stride], dict.fromkeys(names, stride), first)
    strides = {name: layers * own[name] for name in names}
    first = {name: [(piece, layer * own[name]) for layer in range(layers)] for piece, name in enumerate(names)}
    return Placement([num_blocks * stride for stride in strides.values()], strides, first)


def adopted(
    spec: KVCacheSpec, pointers: Mapping[str, Sequence[int]], strides_bytes: Mapping[str, int] | None
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Addresses and strides of memory that a user has; TypeError or ValueError unless they fit the spec."""
    addresses_of: dict[str, list[int]] = {}
    strides_of: dict[str, int] = {}
    if not isinstance(pointers, Mapping):
        raise TypeError(f"pointers is {type(pointers).__name__}; a mapping name -> one address per layer is expected")
    if set(pointers) != set(spec.tensor_names):
        raise ValueError(f"pointers has the names {sorted(pointers)}; {sorted(spec.tensor_names)} are expected")
    if strides_bytes is not None and not isinstance(strides_bytes, Mapping):
        raise TypeError(f"strides_bytes is {strides_bytes!r}; a mapping name -> bytes, or None, is expected")
    strides = dict(strides_bytes or {})
    if not set(strides) <= set(spec.tensor_names):
        raise ValueError(f"strides_bytes has the names {sorted(strides)}; only {sorted(spec.tensor_names)} are known")
    for name in spec.tensor_names:
        addresses = arguments.block_ids(pointers[name], f"pointers[{name!r}]")
        if len(addresses) != spec.num_layers:
            raise ValueError(f"pointers[{name!r}] has {len(addresses)} layers; {spec.num_layers} are expected")
        for layer, address in enumerate(addresses):
            if address <= 0:
                raise ValueError(f"pointers[{name!r}][{layer}] = {address} must be the address of host memory")
        addresses_of[name] = addresses
        own = spec.tensor_block_bytes(name)
        strides_of[name] = arguments.integer(strides.get(name, own), f"strides_bytes[{name!r}]")
        if strides_of[name] < own:
            raise ValueError(f"strides_bytes[{name!r}] = {strides_of[name]} must be at least {own}, a block")
    return addresses_of, strides_of
