"""What tests ask of Paddle beside a GPU, and a device plugin does not have. The GPU itself is named by ``devices``."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddle_kv import devices

pinned_tensors = pytest.mark.skipif(
    devices.plugin() is not None, reason="Paddle has pinned tensors in its CUDA build, not with a device plugin"
)
PINNED: Any = paddle.CUDAPinnedPlace() if paddle.is_compiled_with_cuda() else None
