"""Tokens into block caches, out of them, and caches in another number format or layout."""

from ._cache_convert import convert_fp8, convert_layout, gather_cache, scatter_cache
from ._cache_insert import concat_and_cache_mla, reshape_and_cache, reshape_and_cache_dynamic

__all__ = [
    "concat_and_cache_mla",
    "convert_fp8",
    "convert_layout",
    "gather_cache",
    "reshape_and_cache",
    "reshape_and_cache_dynamic",
    "scatter_cache",
]
