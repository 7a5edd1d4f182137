"""The edits of a source that ``tools/mutate.py`` tries: one small change of the syntax tree each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

_COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
_TEXT_ALONE = {"__repr__", "__str__"}  # functions
_NOT_LOOKED_INTO = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)


@dataclass
class Edit:
    """``before`` and ``after`` are a statement as text, only its head if it has a body."""

    where: str  # the qualified name of the function or class
    lines: range  # of the statement, or of its head
    before: str
    after: str
    at_import: bool  # it runs before any test does
    _tree: ast.Module
    _change: _Change

    @property
    def key(self) -> tuple[str, str, str]:
        return self.where, self.before, self.after

    def code(self, path: str) -> CodeType:
        """The edited source, compiled."""
        self._change.swap()
        try:
            return compile(ast.fix_missing_locations(self._tree), path, "exec")
        finally:
            self._change.swap()


@dataclass
class _Change:
    """Sets a field of a node, or one entry of it; the second time sets it back."""

    node: ast.AST
    field: str
    value: object
    index: int | None = None

    def swap(self) -> None:
        if self.index is None:
            old = getattr(self.node, self.field)
            setattr(self.node, self.field, self.value)
        else:
            entries = getattr(self.node, self.field)
            old, entries[self.index] = entries[self.index], self.value
        self.value = old


def edits(source: str) -> list[Edit]:
    """All of a source, in order of lines; those that read alike in one function once."""
    tree = ast.parse(source)
    found: dict[tuple[str, str, str], Edit] = {}
    for where, at_import, parent, field, index in _statements(tree, (), True):
        statement = getattr(parent, field)[index]
        before = _head(statement)
        for change in _changes_of(statement, parent, field, index):
            change.swap()
            try:
                after = _head(getattr(parent, field)[index])
            finally:
                change.swap()
            edit = Edit(".".join(where), _lines(statement), before, after, at_import, tree, change)
            if after != before:
                found.setdefault(edit.key, edit)
    return sorted(found.values(), key=lambda edit: edit.lines.start)


def _statements(
    node: ast.AST, where: tuple[str, ...], at_import: bool
) -> Iterator[tuple[tuple[str, ...], bool, ast.AST, str, int]]:
    for field in ("body", "handlers", "orelse", "finalbody"):
        inner = getattr(node, field, None)
        for index, statement in enumerate(inner if isinstance(inner, list) else ()):
            below = where
            function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                below = (*where, statement.name)
                bases = map(ast.unparse, getattr(statement, "bases", ()))
                if statement.name in _TEXT_ALONE or "Protocol" in bases:
                    continue
            yield below, at_import, node, field, index
            yield from _statements(statement, below, at_import and not function)


def _head(statement: ast.AST) -> str:
    lines = ast.unparse(ast.fix_missing_locations(statement)).splitlines()
    if isinstance(statement, ast.Try | ast.ExceptHandler):
        return " ".join(line.strip() for line in lines[:2])
    if hasattr(statement, "body"):
        return next(line for line in lines if not line.startswith("@"))
    return " ".join(lines)


def _lines(statement: ast.AST) -> range:
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno
    return range(statement.lineno, max(last, statement.lineno) + 1)


def _changes_of(statement: ast.AST, parent: ast.AST, field: str, index: int) -> Iterator[_Change]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return  # a docstring
    if _is_deletable(statement):
        yield _Change(parent, field, ast.Pass(), index)
    if isinstance(statement, ast.Return) and not _is_none(statement.value):
        yield _Change(statement, "value", ast.Constant(None))
    if isinstance(statement, ast.Break):
        yield _Change(parent, field, ast.Continue(), index)
    if isinstance(statement, ast.ExceptHandler) and not isinstance(statement.body[0], ast.Raise):
        yield _Change(statement, "body", ast.Raise(), 0)
    if isinstance(statement, ast.If | ast.While):
        yield from _negations(statement, "test")
    yield from _in_expressions(statement)


def _is_deletable(statement: ast.AST) -> bool:
    if isinstance(statement, ast.Assign):  # a local name that is missing would be noticed by anything
        return not any(isinstance(target, ast.Name | ast.Tuple | ast.List) for target in statement.targets)
    return isinstance(statement, ast.Expr | ast.AugAssign | ast.Delete | ast.Raise | ast.Continue | ast.Break)


def _is_none(value: ast.AST | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _negations(node: ast.AST, field: str, index: int | None = None) -> Iterator[_Change]:
    test = getattr(node, field) if index is None else getattr(node, field)[index]
    turned = (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)  # as comparisons
    if not isinstance(test, ast.UnaryOp) and not (isinstance(test, ast.Compare) and isinstance(test.ops[0], turned)):
        yield _Change(node, field, ast.UnaryOp(ast.Not(), test), index)


def _in_expressions(node: ast.AST) -> Iterator[_Change]:
    """In what the node holds, but for statements in it."""
    if isinstance(node, _NOT_LOOKED_INTO):
        return
    for field, held in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for index, child in enumerate(held) if isinstance(held, list) else [(None, held)]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.stmt | ast.ExceptHandler):
                continue
            yield from _replacements(node, field, index, child)
            yield from _in_expressions(child)


def _replacements(node: ast.AST, field: str, index: int | None, child: ast.AST) -> Iterator[_Change]:
    if isinstance(child, ast.Compare):
        for at, operator in enumerate(child.ops):
            yield _Change(child, "ops", _COMPARISONS[type(operator)](), at)
    elif isinstance(child, ast.BoolOp):
        yield _Change(child, "op", ast.And() if isinstance(child.op, ast.Or) else ast.Or())
        for at in range(len(child.values)):
            rest = child.values[:at] + child.values[at + 1 :]
            yield _Change(node, field, rest[0] if len(rest) == 1 else ast.BoolOp(child.op, rest), index)
    elif isinstance(child, ast.UnaryOp):
        if isinstance(child.op, ast.Not | ast.Invert | ast.USub):
            yield _Change(node, field, child.operand, index)
    elif isinstance(child, ast.BinOp) and type(child.op) in _OPERATORS:
        yield _Change(child, "op", _OPERATORS[type(child.op)]())
    elif isinstance(child, ast.IfExp):
        yield from _negations(child, "test")
    elif isinstance(child, ast.comprehension):
        for at in range(len(child.ifs)):
            yield from _negations(child, "ifs", at)
            yield _Change(child, "ifs", ast.Constant(True), at)
    elif isinstance(child, ast.Constant):
        if isinstance(child.value, bool):
            yield _Change(child, "value", not child.value)
        elif isinstance(child.value, int | float):
            yield _Change(child, "value", child.value + 1)
    elif isinstance(child, ast.Name) and child.id in _NAMES:
        yield _Change(child, "id", _NAMES[child.id])
    elif isinstance(child, ast.Call):
        for at, keyword in enumerate(child.keywords):
            if keyword.arg is not None:
                yield _Change(child, "keywords", child.keywords[:at] + child.keywords[at + 1 :])
        if len(child.args) > 1 and not isinstance(child.args[-1], ast.Starred):
            yield _Change(child, "args", child.args[:-1])
    if isinstance(node, ast.AugAssign) and field == "op" and type(child) in _OPERATORS:
        yield _Change(node, "op", _OPERATORS[type(child)]())
