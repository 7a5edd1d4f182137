"""The tests of starts and of results in memory of the caller once more, with tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_gather_starts import *  # noqa: F403
