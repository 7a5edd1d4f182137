"""Where the blocks of all tensors and layers lie in the memory of a host pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..layout import KVCacheSpec

HostLayout = Literal["layer_first", "block_first", "page_first_direct"]


@dataclass(frozen=True)
class Placement:
    """Pieces of memory, and what lies in them."""

    sizes_bytes: list[int]
    strides_bytes: dict[str, int]  # name -> from a block to the next one
    first_blocks: dict[str, list[tuple[int, int]]]  # name -> of each layer the piece, and the first byte in it


def check_layout(layout: str) -> None:
    """ValueError unless it is one of ``HostLayout``."""
    if layout not in get_args(HostLayout):
        raise ValueError(f"layout = {layout!r} must be 'layer_first', 'block_first' or 'page_first_direct'")


def placement(spec: KVCacheSpec, num_blocks: int, layout: HostLayout) -> Placement:
    """One piece per layer, one in which all layers of a block are adjacent, or one per name in which they are."""
    layers, names = spec.num_layers, spec.tensor_names
    own = {name: spec.tensor_block_bytes(name) for name in names}
    offset = {name: spec.tensor_offset_bytes(name) for name in names}
    if layout == "layer_first":
        first = {name: [(layer, num_blocks * offset[name]) for layer in range(layers)] for name in names}
        return Placement([num_blocks * spec.block_bytes] * layers, own, first)
    if layout == "block_first":
        stride = layers * spec.block_bytes
        first = {name: [(0, layer * spec.block_bytes + offset[name]) for layer in range(layers)] for name in names}
        return Placement([num_blocks * stride], dict.fromkeys(names, stride), first)
    strides = {name: layers * own[name] for name in names}
    first = {name: [(piece, layer * own[name]) for layer in range(layers)] for piece, name in enumerate(names)}
    return Placement([num_blocks * stride for stride in strides.values()], strides, first)
