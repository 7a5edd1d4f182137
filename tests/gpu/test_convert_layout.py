"""The tests of convert_layout once more, with tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_convert_layout import *  # noqa: F403
