"""Memory of results on the CPU: what was released is used again, not asked of the kernel page by page."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource
import numpy as np, paddle
from paddle_kv import ops

paddle.set_device("cpu")
blocks, tokens = {blocks}, {blocks} * 16
cache = paddle.zeros([blocks, 16, 8, 128], "float16")
table, lengths = paddle.to_tensor(np.arange(blocks)[None]), paddle.to_tensor(np.array([0, tokens]))

def gather():
    return ops.gather_cache(cache, table, lengths, total_tokens=tokens, layout="NHD")

def take_memory():
    return [libc.malloc(100_000) for _ in range({blocks} * 2)]

# A hole in the heap that the first result fits into, and that is filled again before the next one.
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
hole = take_memory()
for piece in hole[:-1]:
    libc.free(piece)
gather()
filled = take_memory()

for _ in range(3):
    gather()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    gather()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 40)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how glibc keeps memory")
@pytest.mark.parametrize("mib", [1, 2, 8, 24])
def test_a_result_costs_no_page_faults(mib):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocks=mib * 32)], check=True, capture_output=True, text=True
    )
    faults = float(ran.stdout.split()[-1])
    assert faults < mib * 256 / 8  # of 256 pages a MiB
