"""docs/ordering.md is true: its example runs, and the tests that it names exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.schedule import rig as rig_module

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ordering.md").read_text()


@functools.cache
def names_of_tests(folder: str) -> set[str]:
    return {
        node.name
        for path in (ROOT / "tests" / folder).glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_the_example_runs():
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S))
    names: dict[str, object] = {}
    exec(compile(program, "docs/ordering.md", "exec"), names)
    assert names["scheduler"].stats()["cancelled"] == 1
    assert names["pool"].pinned_bytes == 0
    assert rig_module.in_flight() == []


def test_each_clause_names_tests_that_exist():
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 11))
    for clause, on_cpu, on_gpu in rows:
        for column, folder in ((on_cpu, "schedule"), (on_gpu, "gpu")):
            named = re.findall(r"`(\w+)`", column)
            assert set(named) <= names_of_tests(folder), f"clause {clause}"
            assert named or "(" in column
        assert all(f"test_{clause.strip()}_" in name for name in re.findall(r"`(\w+)`", on_gpu))
    every = {name for name in names_of_tests("gpu") if re.match(r"test_\d+_", name)}
    assert {int(name.split("_")[1]) for name in every} == set(range(1, 11))
