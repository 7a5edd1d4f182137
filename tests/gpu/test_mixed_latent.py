"""The tests of fp8_ds_mla once more, with tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_mixed_latent import *  # noqa: F403
