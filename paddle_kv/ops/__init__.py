"""The operators, as functions on Paddle tensors."""

from .copy import copy_blocks, copy_single_block, swap_blocks
from .swap import (
    swap_cache_all_layers,
    swap_cache_all_layers_async,
    swap_cache_per_layer,
    swap_cache_per_layer_async,
    transfer_blocks,
)

__all__ = [
    "copy_blocks",
    "copy_single_block",
    "swap_blocks",
    "swap_cache_all_layers",
    "swap_cache_all_layers_async",
    "swap_cache_per_layer",
    "swap_cache_per_layer_async",
    "transfer_blocks",
]
