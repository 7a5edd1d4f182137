"""The tests of gather_cache once more, with tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_gather_cache import *  # noqa: F403
