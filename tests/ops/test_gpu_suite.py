"""What runs on any device runs in tests/gpu as well: a test that is not imported there looks as if it had passed."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

OPS = Path(__file__).resolve().parent
GPU = OPS.parent / "gpu"

# tests/gpu traces programs of its own: a GPU needs other tensors for them.
TRACED = {
    "TestPrograms",
    "test_in_a_program",
    "test_in_a_static_graph",
    "test_where_the_tracer_can_let_go_it_runs",
}
ON_THE_CPU = {"test_the_cpu_ignores_the_stream"}


def names_for_any_device(path: Path) -> Iterator[str]:
    nodes = ast.parse(path.read_text()).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    machines = {"machine"} | {node.name for node in functions if takes(node, {"machine"})}  # fixtures among them
    for node in functions:
        if node.name.startswith("test") and takes(node, machines):
            yield node.name
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
            if any(takes(method, machines) for method in methods):
                yield node.name


def takes(function: ast.FunctionDef, names: set[str]) -> bool:
    return any(argument.arg in names for argument in function.args.args)


@functools.cache
def imported_on_a_gpu() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for path in GPU.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.ops."):
                found[(node.module or "").rpartition(".")[2]].update(alias.name for alias in node.names)
    return found


@pytest.mark.parametrize(
    "path", sorted(set(OPS.glob("test_*.py")) - {OPS / "test_permute_traced.py"}), ids=lambda p: p.stem
)
def test_nothing_is_left_out(path: Path) -> None:
    imported = imported_on_a_gpu()[path.stem]
    if "*" not in imported:
        assert set(names_for_any_device(path)) - TRACED - ON_THE_CPU <= imported
