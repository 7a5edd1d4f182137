"""paddle_kv in one process with a library that already owns the name ``static_op_swap_cache_per_layer``.

Two libraries that register one name end the process, so each order of loading gets a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import paddle
import pytest

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """
#include "paddle/phi/api/include/tensor.h"
#include "paddle/common/ddim.h"
#include "paddle/phi/api/ext/op_meta_info.h"

void AddOne(paddle::Tensor& x) { ++*x.data<int64_t>(); }

PD_BUILD_OP(static_op_swap_cache_per_layer).Inputs({"x"}).Outputs({"x_out"}).SetInplaceMap({{"x", "x_out"}})
    .SetKernelFn(PD_KERNEL(AddOne));
"""

LOAD_OTHER = """
from paddle.utils.cpp_extension import load_op_meta_info_and_register_op
load_op_meta_info_and_register_op({library!r})
"""
LOAD_OURS = "from paddle_kv import ops\n"
CALL_BOTH = """
from paddle.base import core
source = paddle.to_tensor(numpy.arange(6, dtype="int64").reshape(3, 1, 2), place=paddle.CPUPlace())
target = paddle.to_tensor(numpy.zeros((2, 1, 2), "int64"), place=paddle.CPUPlace())
host = numpy.zeros((3, 1, 2), "int64")
ops.swap_cache_per_layer(source, host.ctypes.data, 3, [2], [1], 0, 0)
one = paddle.to_tensor(numpy.array([41]), place=paddle.CPUPlace())
core.eager._run_custom_op("static_op_swap_cache_per_layer", one)
print(host.ravel().tolist(), one.item())
"""


@pytest.fixture(scope="module")
def other_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("other")
    (directory / "other.cc").write_text(SOURCE)
    installed = Path(paddle.__file__).parent
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-DPADDLE_WITH_CUSTOM_KERNEL", "other.cc"]
    command += [f"-I{installed}/include", f"-I{installed}/include/third_party", f"-L{installed}/base"]
    command += [f"-L{installed}/libs", "-Wl,--no-as-needed", "-l:libpaddle.so", "-Wl,-z,now", "-o", "other.so"]
    subprocess.run(command, cwd=directory, check=True)
    return directory / "other.so"


@pytest.mark.parametrize("ours_first", [True, False])
def test_both_libraries_work_in_one_process(other_library: Path, ours_first: bool) -> None:
    loads = [LOAD_OURS, LOAD_OTHER.format(library=str(other_library))]
    program = "import zlib, numpy, paddle\n" + "".join(loads if ours_first else reversed(loads)) + CALL_BOTH
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0, 0, 4, 5, 0, 0] 42"
