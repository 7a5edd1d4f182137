"""Imports go one way: between the rooms of the package, and between the modules of each."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "paddle_kv"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if "_lib" not in path.parts
}


def imports(name: str) -> set[str]:
    """The modules of the package that a module imports, wherever in it, also for the type checker alone."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            origin = ".".join(filter(None, [base if node.level else "", node.module]))
            # Of a package one imports what it exports, or a module of it.
            whole = [f"{origin}.{alias.name}" for alias in node.names]
            found.update(one if one in MODULES else origin for one in whole)
    return {one for one in found if one in MODULES and one != name}


def room_of(name: str) -> str:
    """The package below ``paddle_kv``; a module beside them is a room of its own."""
    return ".".join(name.split(".")[:2])


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_modules_import_in_no_circle() -> None:
    assert circle({name: imports(name) for name in MODULES if name != "paddle_kv"}) == []


def test_rooms_import_in_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name in MODULES:
        if name != "paddle_kv":
            rooms = {room_of(one) for one in imports(name)} - {room_of(name), "paddle_kv"}
            graph.setdefault(room_of(name), set()).update(rooms)
    assert circle(graph) == []


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("paddle_kv.tracking.")])
def test_tracking_knows_neither_paddle_nor_who_schedules(name: str) -> None:
    assert {room_of(one) for one in imports(name)} <= {"paddle_kv.tracking", "paddle_kv.errors", "paddle_kv.checks"}
    assert "paddle" not in {
        alias.name.partition(".")[0]
        for node in ast.walk(ast.parse(MODULES[name].read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }


def test_a_circle_would_be_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []
    assert "paddle_kv.tracking.group" in imports("paddle_kv.tracking.memories")
    assert "paddle_kv.backend.binding" in imports("paddle_kv.backend.cpu_backend")
