"""The tests of convert_fp8 once more, with tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_convert_fp8 import *  # noqa: F403
