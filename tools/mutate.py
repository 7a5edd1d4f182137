"""Edits the package line by line and lists the edits that no test notices.

    python tools/mutate.py --file paddle_kv/tracking/domain.py
    python tools/mutate.py --file paddle_kv/schedule/submission.py --sample 40 --seed 1
    python tools/mutate.py --survivors-only

Nothing is written into the tree: each edit is compiled in memory, in a process of its own (a fork of one that has
Paddle imported), which runs the tests that execute the edited lines, those that have failed for most edits first, then
one variant of each, the shortest first, until one fails or ``--seconds`` are spent. A test that takes five times as
long as without the edit counts as failed. Programs that tests start see the source without the edit; an edit of a
function in a line that no test executes survives.

What was noticed is remembered, until the source changes; what was not is tried again. Edits that change nothing
anybody could see stand in docs/mutations.md, each with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import importlib.abc
import importlib.machinery
import itertools
import json
import os
import random
import re
import select
import signal
import sys
import threading
import time
import zlib  # noqa: F401  before Paddle, see tests/conftest.py
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy  # noqa: F401  what children share
import paddle  # noqa: F401
import pytest
from hypothesis import Phase, settings
from mutation_edits import Edit, edits

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "docs" / "mutations.md"
# Which tests may notice an edit of a file, by the longest prefix that fits.
TESTS = {
    "paddle_kv/tracking/": ["tests/schedule", "tests/memory/test_host_pool.py"],
    "paddle_kv/schedule/": [
        "tests/schedule",
        "tests/backend",
        "tests/simulator/test_faults.py",
        "tests/simulator/test_mutations.py",
    ],
    "paddle_kv/backend/": ["tests/backend", "tests/schedule"],
    "paddle_kv/memory/": ["tests/memory", "tests/schedule/test_lifetime.py", "tests/schedule/test_threads.py"],
    "paddle_kv/offload/": ["tests/offload"],
    "paddle_kv/testing/simulator/": ["tests/simulator"],
}
SLOW_S = 2.5  # tests that take longer are left out
TIMES_AS_LONG, LEAST_LIMIT_S = 5.0, 4.0
COLLECTING_S = 60.0
LIKELY = 10  # tests that are tried before the others
PACKAGE = f"{ROOT / 'paddle_kv'}/"


# ---- in the child ----
class EditedSource(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the import system edited code for one module."""

    def __init__(self, path: Path, code: CodeType) -> None:
        self._path = path
        self._name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        self._code = code

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=str(self._path))
        spec.has_location = True
        return spec

    def exec_module(self, module: Any) -> None:
        exec(self._code, module.__dict__)


class Reporter:
    """Tells the parent, a line each, which test begins, what failed, and how long a test took over which lines."""

    def __init__(self, descriptor: int, order: Sequence[str], *, traces: bool) -> None:
        self._descriptor = descriptor
        self._place = {name: place for place, name in enumerate(order)}
        self._traces = traces
        self._process_id = os.getpid()
        self._running = ""
        self._lines: set[tuple[str, int]] = set()

    def pytest_sessionstart(self) -> None:
        calm = settings(phases=[Phase.explicit, Phase.generate], database=None, derandomize=True)
        settings.register_profile("mutate", calm)
        settings.load_profile("mutate")
        if self._traces:  # before the library starts a thread
            threading.settrace(self._trace)
            sys.settrace(self._trace)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._place:
            items[:] = sorted((i for i in items if i.nodeid in self._place), key=lambda i: self._place[i.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._tell("begins", item.nodeid)
        self._running, self._lines = item.nodeid, set()
        began_s = time.monotonic()
        try:
            return (yield)
        finally:
            self._tell("took", item.nodeid, time.monotonic() - began_s, sorted(self._lines))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell("failed", report.nodeid)

    def _tell(self, *what: Any) -> None:
        with open(self._descriptor, "w", closefd=False) as out:
            out.write(json.dumps(what) + "\n")

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._trace_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        line = (frame.f_code.co_filename[len(PACKAGE) - len("paddle_kv/") :], frame.f_lineno)
        if line not in self._lines:
            self._lines.add(line)
            if os.getpid() != self._process_id:  # a test has forked
                self._tell("ran", self._running, line)
        return self._trace_line


def run_tests(
    files: Sequence[str],
    order: Sequence[str] = (),
    *,
    edited: EditedSource | None = None,
    limits_s: Mapping[str, float] | None = None,
) -> tuple[int, list[list[Any]]]:
    """Pytest in a child, until the first failure if ``order`` names tests. Its exit status (-1: a test took too long)
    and what its reporter told."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reading)
        with open(os.devnull, "w") as nowhere:
            for descriptor in (1, 2):
                os.dup2(nowhere.fileno(), descriptor)
        if edited is not None:
            sys.meta_path.insert(0, edited)
        options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", *(["-x"] if order else [])]
        status = 3
        try:
            status = int(pytest.main([*options, *files], plugins=[Reporter(writing, order, traces=edited is None)]))
        finally:
            os._exit(status)
    os.close(writing)
    told: list[list[Any]] = []
    limit_s = COLLECTING_S
    try:
        with open(reading, "rb", buffering=0) as pipe:
            kept = b""
            while select.select([pipe], [], [], limit_s)[0]:
                got = os.read(pipe.fileno(), 1 << 16)
                if not got:
                    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), told
                *lines, kept = (kept + got).split(b"\n")
                told += map(json.loads, lines)
                limit_s = COLLECTING_S
                if told and told[-1][0] == "begins" and limits_s is not None:
                    limit_s = limits_s[told[-1][1]]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return -1, told
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it started itself
            os.killpg(child, signal.SIGKILL)


# ---- what is remembered ----
class Memory:
    """Results and coverage, in build/mutations.json."""

    def __init__(self) -> None:
        self._path = ROOT / "build" / "mutations.json"
        held = json.loads(self._path.read_text()) if self._path.exists() else {}
        self.tests: dict[str, dict[str, Any]] = held.get("tests", {})  # of a test file: digests, durations, lines
        self.results: dict[str, dict[str, Any]] = held.get("results", {})  # of a source: digest, status of each edit

    def save(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps({"tests": self.tests, "results": self.results}))

    def covering(self, file: str, asked: Sequence[str]) -> dict[str, tuple[float, set[int]]]:
        """The tests that may notice edits of the file: how long each takes, and which lines of the file it runs."""
        found: dict[str, tuple[float, set[int]]] = {}
        for test_file in asked or test_files(file):
            held = self.tests.get(test_file)
            if held is None or held["digest"] != digest(test_file) or held["sources"].get(file) != digest(file):
                held = self._measure(test_file)
            for name, (took_s, lines) in held["tests"].items():
                if file in lines and took_s <= SLOW_S:
                    found[name] = (took_s, set(lines[file]))
        return found

    def _measure(self, test_file: str) -> dict[str, Any]:
        say(f"measuring {test_file}")
        _, told = run_tests([test_file])
        failed = {what[1] for what in told if what[0] == "failed"}
        if failed:
            say(f"  fail without an edit, left out: {', '.join(sorted(failed))}")
        tests: dict[str, Any] = {}
        forked: dict[str, list[tuple[str, int]]] = {}
        for name, line in (what[1:] for what in told if what[0] == "ran"):
            forked.setdefault(name, []).append(line)
        for name, took_s, lines in (what[1:] for what in told if what[0] == "took" and what[1] not in failed):
            by_file: dict[str, list[int]] = {}
            for path, line in [*lines, *forked.get(name, [])]:
                by_file.setdefault(path, []).append(line)
            tests[name] = (took_s, by_file)
        files = {path for _, lines in tests.values() for path in lines}
        sources = {
            path: digest(path) for path in {*files, *(str(p.relative_to(ROOT)) for p in sources_of("paddle_kv"))}
        }
        self.tests[test_file] = {"digest": digest(test_file), "sources": sources, "tests": tests}
        self.save()
        return self.tests[test_file]


def digest(file: str) -> str:
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]


def sources_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_files(file: str) -> list[str]:
    fitting = max((prefix for prefix in TESTS if file.startswith(prefix)), key=len)
    found: list[str] = []
    for place in TESTS[fitting]:
        paths = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).glob("test_*.py"))
        found += [str(path.relative_to(ROOT)) for path in paths]
    return found


# ---- what is known to change nothing ----
def listed() -> dict[tuple[str, str, str, str], str]:
    """From docs/mutations.md: (file, where, before, after) -> reason."""
    row = re.compile(r"^\| `([^`]+)` \| `([^`]*)` \| `([^`]+)` \| `([^`]+)` \| (.+) \|$")
    matches = (row.match(line) for line in LISTED.read_text().splitlines())
    return {
        (match[1], match[2], unescaped(match[3]), unescaped(match[4])): match[5]
        for match in matches
        if match is not None
    }


def unescaped(cell: str) -> str:
    return cell.replace("\\|", "|")


# ---- one file ----
def try_edits(
    file: str, chosen: Sequence[Edit], memory: Memory, tests: Sequence[str], most_s: float
) -> list[dict[str, Any]]:
    """One row for each edit, with ``most_s`` seconds of these test files at the most, or of all that fit."""
    known = listed()
    covering = memory.covering(file, tests)
    held = memory.results.setdefault(file, {})
    if held.get("digest") != digest(file):
        held.update(digest=digest(file), killers={})
    fails: Counter[str] = Counter()
    rows = []
    for number, edit in enumerate(chosen, 1):
        key = " | ".join(edit.key)
        row = dict(zip(("file", "line", "where", "before", "after"), (file, edit.lines.start, *edit.key), strict=True))
        reason = known.get((file, *edit.key))
        if reason is not None:
            rows.append({**row, "status": "equivalent", "by": reason})
            continue
        if key not in held["killers"]:
            began_s = time.monotonic()
            killer = killer_of(file, edit, covering, fails, most_s)
            if killer is not None:
                held["killers"][key] = killer
            memory.save()
            status = "survived" if killer is None else "killed"
            say(f"{number}/{len(chosen)} {time.monotonic() - began_s:5.1f} s {status}: {text(row)}")
        killer = held["killers"].get(key)
        rows.append({**row, "status": "killed" if killer else "survived", "by": killer or ""})
    return rows


def killer_of(
    file: str, edit: Edit, covering: dict[str, tuple[float, set[int]]], fails: Counter[str], most_s: float
) -> str | None:
    """The test that notices it, or why it cannot live."""
    path = ROOT / file
    names = [name for name, (_, lines) in covering.items() if edit.at_import or not lines.isdisjoint(edit.lines)]
    names.sort(key=lambda name: covering[name][0])
    variants: Counter[str] = Counter()
    place = {}
    for name in names:
        function = name.partition("[")[0]
        place[name] = variants[function]
        variants[function] += 1
    names.sort(key=lambda name: (-fails[name], place[name]))
    spent_s = itertools.accumulate(covering[name][0] for name in names)
    names = [name for name, until_s in zip(names, spent_s, strict=True) if until_s <= most_s]
    limits_s = {name: max(LEAST_LIMIT_S, TIMES_AS_LONG * covering[name][0]) for name in names}
    edited = EditedSource(path, edit.code(str(path)))
    for some in (names[:LIKELY], names[LIKELY:]):  # few files are collected sooner
        files = list(dict.fromkeys(name.partition("::")[0] for name in some))
        status, told = run_tests(files, some, edited=edited, limits_s=limits_s) if some else (0, [])
        if status != 0:
            killer = str(next((what[1] for what in reversed(told) if what[0] in ("begins", "failed")), "the import"))
            fails[killer] += status == 1  # one that hangs takes long to notice
            return killer
    return None


def text(row: dict[str, Any]) -> str:
    return f"{row['file']}:{row['line']} {row['where']}: {row['before']}  ->  {row['after']}"


def say(what: str) -> None:
    print(what, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", action="append", help="a source, from the root of the checkout; default: all")
    parser.add_argument("--sample", type=int, help="so many edits of each file, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", action="append", help="a file of tests; default: all that fit the source")
    parser.add_argument("--seconds", type=float, default=15.0, help="of tests, for each edit at the most")
    parser.add_argument("--lines", help="FIRST-LAST: only edits of these lines")
    parser.add_argument("--survivors-only", action="store_true", help="only what survived the last time")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "mutations", help="folder for the CSV and the JSON"
    )
    asked = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT)]
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    folders = [folder for folder in TESTS if "testing" not in folder]
    files = asked.file or [str(path.relative_to(ROOT)) for folder in folders for path in sources_of(folder)]
    memory = Memory()
    asked.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for file in files:
        chosen = edits((ROOT / file).read_text())
        before = asked.out / f"{file.replace('/', '.')}.json"
        if asked.survivors_only:
            last = json.loads(before.read_text()) if before.exists() else []
            survived = {(row["where"], row["before"], row["after"]) for row in last if row["status"] == "survived"}
            chosen = [edit for edit in chosen if edit.key in survived]
        if asked.lines:
            first, _, end = asked.lines.partition("-")
            chosen = [edit for edit in chosen if int(first) <= edit.lines.start <= int(end)]
        if asked.sample is not None:
            chosen = random.Random(asked.seed).sample(chosen, min(asked.sample, len(chosen)))
        here = try_edits(file, chosen, memory, asked.test or (), asked.seconds)
        before.write_text(json.dumps(here, indent=1) + "\n")
        counts = Counter(row["status"] for row in here)
        say(f"{file}: {len(here)} edits, {', '.join(f'{count} {status}' for status, count in sorted(counts.items()))}")
        rows += here
    with (asked.out / "mutations.csv").open("w", newline="") as out:
        writer = csv.DictWriter(out, ["file", "line", "where", "before", "after", "status", "by"])
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        if row["status"] == "survived":
            say(f"survived: {text(row)}")


if __name__ == "__main__":
    main()
