"""What must not stand in the sources of the kernels, because no run shows that it is wrong."""

import re
from collections import Counter
from pathlib import Path

import pytest

CUSTOM_OPS = Path(__file__).resolve().parents[2] / "custom_ops"
KERNELS = sorted(path for path in CUSTOM_OPS.rglob("*") if path.suffix in (".cu", ".cuh"))
# The read-only path of a GPU may return old bytes where anything writes them meanwhile, as other blocks of the same
# cache are written. The compiler takes it by itself for pointers that are const and __restrict__.
READ_ONLY = re.compile(r"__ldg|ld\.global\.nc|__restrict__")


def code_of(path):
    return re.sub(r"//[^\n]*", "", path.read_text())


def test_kernels_are_found():
    assert len(KERNELS) > 20


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_no_load_takes_the_read_only_path(path):
    assert not READ_ONLY.search(code_of(path))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_no_check_of_a_kernel_vanishes_in_a_release(path):
    """An assert is compiled out, or ends the process: ids are skipped or reported instead."""
    assert not re.search(r"\bassert\s*\(", code_of(path))


@pytest.mark.parametrize("path", [path for path in KERNELS if path.suffix == ".cu"], ids=lambda path: path.name)
def test_nvcc_compiles_only_what_has_code_for_a_gpu(path):
    """The copy engine's batches alone keep the suffix: Paddle 2.6 puts all object files into one folder, and the glue
    has the name."""
    included = re.findall(r'#include "(paddle_kv/.+\.cuh)"', path.read_text())
    texts = [path.read_text(), *((CUSTOM_OPS / "include" / header).read_text() for header in included)]
    assert path.name == "memcpy_batch.cu" or any("__global__" in text for text in texts)


@pytest.mark.parametrize("path", [path for path in KERNELS if path.suffix == ".cuh"], ids=lambda path: path.name)
def test_no_header_has_kernels_of_its_own_in_each_file(path):
    """A static kernel in a header is another one in each file, behind an inline function that has to be one."""
    assert not re.search(r"static\s+__global__", code_of(path))


@pytest.mark.parametrize("path", sorted((CUSTOM_OPS / "include").rglob("*.cuh")), ids=lambda path: path.name)
def test_nothing_is_destroyed_while_threads_may_still_come(path):
    """Threads of Python call the operators until the process is gone."""
    assert not re.search(r"static std::(mutex|vector|map|unique_ptr)\b[^&]*;", code_of(path))


def test_one_file_says_how_many_bytes_of_parameters_a_kernel_may_have():
    """Two that differ would launch what the compiler or the driver of the other refuses."""
    limit = re.compile(r"CUDART_VERSION\s*>=\s*120[0-4]|\b12010\b|32'?76[04]|(<=|>)\s*4'?096\b")
    assert [path.name for path in KERNELS if limit.search(code_of(path))] == ["kernel_parameters.cuh"]
    taken_from_it = {path.name for path in KERNELS if re.search(r"k(Largest|Small)ParameterBytes", code_of(path))}
    assert taken_from_it >= {"pair_launch.cuh", "kernel_table.cu", "permute_chunks.cu", "vectorized_copy.cu"}


def test_each_file_has_a_name_of_its_own():
    """Paddle 2.6 puts all object files into one folder, and would link the last of two of a name twice."""
    names = Counter(path.name for path in CUSTOM_OPS.rglob("*") if path.suffix in (".cc", ".cu"))
    assert {name for name, count in names.items() if count > 1} == set()
