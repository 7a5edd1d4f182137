"""What a C header declares, as ctypes has it: nothing else checks that Python calls the library with these types."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

HEADERS = Path(__file__).resolve().parents[1] / "custom_ops/include/paddle_kv"
_TYPES = {
    "int": ctypes.c_int,
    "std::int64_t": ctypes.c_int64,
    "std::uint32_t": ctypes.c_uint32,
    "void": None,
    "const char*": ctypes.c_char_p,
}


def functions(path: str) -> dict[str, tuple[Any, list[Any]]]:
    """name -> type of the result, types of the arguments."""
    text = (HEADERS / path).read_text()
    declared = re.findall(r"^([\w:]+(?: [\w:]+)?\*?) (paddle_kv_\w+)\(([^;]*)\);$", text, re.MULTILINE)
    return {
        name: (_type(result), [_type(one.rpartition(" ")[0]) for one in filter(None, arguments.split(","))])
        for result, name, arguments in declared
    }


def members(path: str, structure: str) -> list[tuple[str, Any]]:
    """(name, type) of each, in their order."""
    body = (HEADERS / path).read_text().partition(f"struct {structure} {{")[2].partition("\n};")[0]
    return [(name, _type(kind)) for kind, name in re.findall(r"^  ([^;]+[ *])(\w+);", body, re.MULTILINE)]


def _type(text: str) -> Any:
    text = text.strip()
    return _TYPES[text] if text in _TYPES else ctypes.c_void_p if text.endswith("*") else text
