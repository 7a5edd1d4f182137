"""The tests of what no operator takes once more, with all tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_refused_tensors import *  # noqa: F403
