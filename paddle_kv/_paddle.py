"""Names of Paddle that it does not promise to keep: whoever needs one asks here, so that a Paddle without it is told of
in words."""

from __future__ import annotations

import functools
import importlib
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from typing import Any

import paddle


@functools.cache
def private(module: str, name: str) -> Any:
    """``name`` of ``paddle.<module>``.

    Raises:
        ImportError: this Paddle has no such name.
    """
    try:
        return getattr(importlib.import_module(f"paddle.{module}"), name)
    except (ImportError, AttributeError):
        raise ImportError(
            f"Paddle {paddle.__version__} has no paddle.{module}.{name}, which paddle_kv needs; Paddle 2.6 and 3.0 to "
            "3.3 have it"
        ) from None
