"""The tests of scatter_cache once more, with tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_scatter_cache import *  # noqa: F403
