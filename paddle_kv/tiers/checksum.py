"""The checksum of what lies below host memory: XXH3 with 64 bits, of the library xxhash.

It finds what storage does to bytes; it does not stop somebody who may write to the storage.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ..ops._library import tier_functions

try:
    from xxhash import xxh3_64, xxh3_64_intdigest
except ImportError:
    raise ImportError("paddle_kv.tiers needs xxhash: pip install 'paddle_kv[tiers]'") from None

SUM_BYTES = 8
# Of headers: all that they have in common, and in it where the key is, the checksum of the header and those of the
# pieces; and the bytes of a piece.
Form = tuple[bytes, int, int, int, int]
_IN_C = ("XXH3_64bits_dispatch", "XXH3_64bits")  # the first one takes the widest vectors that this processor has
_Function = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)


def _from_python(address: int, size: int) -> int:
    return xxh3_64_intdigest((ctypes.c_char * size).from_address(address))


def function_in(library: object) -> Any:
    """The checksum as a function of C: what the library xxhash gives to others, or else its Python function."""
    found = [getattr(library, name) for name in _IN_C if hasattr(library, name)]
    return found[0] if found else _Function(_from_python)


_checksums: Callable[[int, list[tuple[memoryview, int]]], list[bytes]] = tier_functions()["checksums"]
_write_headers: Callable[[int, Form, list[tuple[memoryview, bytes, memoryview]]], None] = tier_functions()[
    "write_headers"
]
_function = function_in(ctypes.CDLL(import_module("xxhash._xxhash").__file__))
_address = ctypes.cast(_function, ctypes.c_void_p).value or 0


def checksums(asked: Sequence[tuple[memoryview, int]]) -> list[bytes]:
    """Of the pieces of each buffer, 8 bytes each. Each buffer comes with the bytes of a piece; its last one may be
    shorter. Much at once goes without the interpreter's lock."""
    return _checksums(_address, list(asked))


def write_headers(form: Form, asked: list[tuple[memoryview, bytes, memoryview]]) -> None:
    """Fills the header of each object, which comes with its key as the header tells it and its payload: checksums and
    all, in one call and without the interpreter's lock."""
    _write_headers(_address, form, asked)


def checksum_of(*contents: memoryview | bytes) -> int:
    """Of all of them, one behind the other."""
    total = xxh3_64()
    for content in contents:
        total.update(content)
    return total.intdigest()
