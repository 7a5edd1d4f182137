"""The tests of latent caches once more, with tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_latent_cache import *  # noqa: F403
