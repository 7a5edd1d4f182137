"""The edits that ``tools/mutate.py`` tries, and the list of those that nobody could see."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutate
import mutation_runs
import pytest
from mutation_edits import edits

SOURCE = '''
LIMIT = 3

class Counter:
    def count(self, values, *, most=None):
        """Up to ``most``."""
        found = 0
        for value in values:
            if value <= LIMIT and value:
                found += 1
        self.found = max(found, 0)
        return sorted([found, self.found], key=abs)
'''


def test_each_kind_of_edit_is_made() -> None:
    made = {(edit.where, edit.before, edit.after) for edit in edits(SOURCE)}
    where, test = "Counter.count", "if value <= LIMIT and value:"
    assert {
        ("", "LIMIT = 3", "LIMIT = 4"),
        (where, test, "if value < LIMIT and value:"),
        (where, test, "if value <= LIMIT or value:"),
        (where, test, "if value:"),
        (where, test, "if value <= LIMIT:"),
        (where, test, "if not (value <= LIMIT and value):"),
        (where, "found += 1", "found -= 1"),
        (where, "found += 1", "pass"),
        (where, "self.found = max(found, 0)", "self.found = min(found, 0)"),
        (where, "self.found = max(found, 0)", "pass"),
        (where, "return sorted([found, self.found], key=abs)", "return sorted([found, self.found])"),
        (where, "return sorted([found, self.found], key=abs)", "return None"),
    } <= made
    assert len(made) == len(edits(SOURCE))


def test_what_runs_at_import_is_told_from_what_a_test_has_to_run() -> None:
    at_import = {edit.before for edit in edits(SOURCE) if edit.at_import}
    assert at_import == {"LIMIT = 3"}
    assert [edit.at_import for edit in edits("def f(a=1):\n    return a + 2\n")] == [True, False, False, False]


def test_an_edit_is_one_edit_and_leaves_the_source_as_it_was() -> None:
    found = edits(SOURCE)
    results = []
    for edit in found:
        namespace: dict[str, object] = {}
        exec(edit.code("<edited>"), namespace)
        results.append(namespace["LIMIT"])
    assert results.count(4) == 1 and results.count(3) == len(found) - 1


@pytest.mark.parametrize("row", sorted(mutate.listed()), ids=lambda row: f"{row[0]} {row[1]} {row[3]}")
def test_each_edit_that_is_listed_still_applies(row: tuple[str, str, str, str]) -> None:
    file, *key = row
    made = {edit.key: edit for edit in edits((mutate.ROOT / file).read_text())}
    assert tuple(key) in made, "write the row anew, or delete it"
    made[tuple(key)].code(file)


def test_every_row_of_the_list_is_read() -> None:
    rows = [line for line in mutate.LISTED.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(mutate.listed())


def test_an_edited_module_is_imported_without_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation_runs, "ROOT", tmp_path)
    source = tmp_path / "edited_here.py"
    source.write_text("LIMIT = 3\n")
    [edit] = edits(source.read_text())
    monkeypatch.setattr(sys, "meta_path", [mutation_runs.EditedSource(source, edit.code(str(source))), *sys.meta_path])
    import edited_here

    monkeypatch.delitem(sys.modules, "edited_here")
    assert edited_here.LIMIT == 4
    assert source.read_text() == "LIMIT = 3\n"


WITH_CLOSURE = """
def outer(factor):
    def inner(value):
        return value * factor
    return inner

def count(first, second):
    return first + second
"""


def test_living_functions_take_the_code_of_an_edit(tmp_path: Path) -> None:
    path = tmp_path / "living.py"
    path.write_text(WITH_CLOSURE)
    namespace: dict[str, Any] = {}
    exec(compile(WITH_CLOSURE, str(path), "exec"), namespace)
    kept, twice = namespace["count"], namespace["outer"](2)
    by_text = {edit.after: edit.code(str(path)) for edit in edits(WITH_CLOSURE)}
    assert (kept(5, 3), twice(3)) == (8, 6)
    mutation_runs.replace([kept, namespace["outer"]], by_text["return first - second"])
    assert (kept(5, 3), twice(3)) == (2, 6)
    mutation_runs.replace([kept, twice], by_text["return value // factor"])
    assert (kept(5, 3), twice(3)) == (8, 1)
    assert mutate.replaceable(path, by_text["return value // factor"])
    without = WITH_CLOSURE.replace("value * factor", "value")
    assert not mutate.replaceable(path, compile(without, str(path), "exec"))


def test_the_counts_are_of_the_sources_that_they_name() -> None:
    rows = mutate.read_counts()
    assert list(rows) == sorted(rows)
    for row in rows.values():
        assert int(row["edits"]) == sum(int(row[name]) for name in ("noticed", "equivalent", "open"))


@pytest.fixture
def constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], mutate.Source]:
    """A source of two edits, which no test executes, with what is remembered of it."""
    for module in (mutate, mutation_runs):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    file = "paddle_kv/memory/constants.py"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("LEAST = 3\nMOST = 5\n")
    return lambda: mutate.Source(file, edits((tmp_path / file).read_text()), mutate.Memory(), ())


def test_what_was_not_tried_is_no_survivor(constants: Callable[[], mutate.Source]) -> None:
    first, second = constants().left()
    source = constants()
    source.tried(first, None)
    source.save()
    again = constants()
    assert [edit.key for edit in again.survivors()] == [first.key]
    assert again.counts() is None
    again.tried(second, "tests/test_constants.py::test_most")
    again.save()
    counts = constants().counts()
    assert counts is not None and (counts["edits"], counts["noticed"], counts["open"]) == (2, 1, 1)
    again.tried(first, "tests/test_constants.py::test_least")
    again.save()
    counts = constants().counts()
    assert counts is not None and (counts["noticed"], counts["open"]) == (2, 0)


def test_no_edit_is_tried_when_the_minutes_are_over(constants: Callable[[], mutate.Source]) -> None:
    source = constants()
    mutate.Campaign([source], 1.0, 1, time.monotonic() - 1.0).run()
    assert (len(source.left()), source.survivors()) == (2, [])
    mutate.Campaign([source], 1.0, 1, math.inf).run()
    assert len(source.survivors()) == 2


def test_a_test_is_not_late_where_others_have_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = mutation_runs.Limit(os.getpid(), 0.0)
    monkeypatch.setattr(mutation_runs, "held_up_s", lambda session: 30.0)
    assert 29.0 < limit.left_s() <= 30.0
    limit.begin(0.0)  # it was held up no more since
    assert limit.left_s() == 0.0
    monkeypatch.setattr(mutation_runs, "held_up_s", lambda session: 1e9)
    assert 0 < limit.left_s() <= mutation_runs.COLLECTING_S


def test_waiting_for_a_processor_is_counted_of_all_threads_of_a_session() -> None:
    """Two processes that never sleep, on one processor."""
    spin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint(flush=True)\nwhile True: pass"
    spinning = [
        subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, start_new_session=True) for _ in range(2)
    ]
    try:
        for one in spinning:
            assert one.stdout is not None and one.stdout.readline()
        while any(mutation_runs.held_up_s(one.pid) < 0.05 for one in spinning):
            assert all(one.poll() is None for one in spinning)
    finally:
        for one in spinning:
            one.kill()
            one.communicate()
    assert mutation_runs.held_up_s(spinning[0].pid) == 0.0


def test_functions_are_found_of_a_module_that_is_imported_when_it_is_needed() -> None:
    found = mutation_runs.functions_of(mutation_runs.ROOT / "paddle_kv" / "offload" / "lending.py")
    assert "Lending.heard" in {one.__qualname__ for one in found}
