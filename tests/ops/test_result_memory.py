"""Memory of results on the CPU: what was released is used again, not asked of the kernel page by page."""

from __future__ import annotations

import json
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

# A hole in the heap that the first result fits into, and that is filled again before the next one. It lies where a
# piece with pages of its own would: 16 bytes behind the start of a page.
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
while (first := libc.malloc(100_000)) % 4096 != 16:
    end = first + 100_016 + 100_016
    libc.malloc(100_000 + (16 - end) % 4096)
hole = [first, *take_memory()]
for piece in hole[:-1]:
    libc.free(piece)
gather()
filled = take_memory()

def faults_of_a_call():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gather()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(10):
    gather()
print([faults_of_a_call() for _ in range({calls})])
"""
CALLS = 40


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how glibc keeps memory")
@pytest.mark.parametrize("mib", [1, 2, 8, 24])
def test_a_result_costs_no_page_faults(mib):
    program = PROGRAM.format(blocks=mib * 32, calls=CALLS)
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    faults = json.loads(ran.stdout.splitlines()[-1])
    # Now and then anything small that stays gets memory right behind a result: the next result does not fit between it
    # and what lies before, and begins behind it.
    dear = sum(each > mib * 256 / 8 for each in faults)  # of 256 pages a MiB
    assert dear <= CALLS / 2, faults
