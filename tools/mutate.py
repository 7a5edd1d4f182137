"""Edits the package line by line and lists the edits that no test notices.

    python tools/mutate.py --file paddle_kv/tracking/domain.py
    python tools/mutate.py --file paddle_kv/schedule/submission.py --sample 40 --seed 1
    python tools/mutate.py --survivors-only
    python tools/mutate.py --at-once 14 --minutes 9

Nothing is written into the tree: each edit is compiled in memory. The tests that execute its lines run until one fails
or ``--seconds`` are spent, in a process forked from one that has them collected: functions that live there take the
edited code. An edit of what runs at import is tried in a process that imports the package anew. A test that takes five
times as long as without the edit, waiting for a processor apart, counts as failed. What a test noticed first is held
against the same tests without the edit. Programs that tests start see the source without the edit; an edit of a
function in a line that no test executes survives.

What was noticed is remembered in build/mutate, and tried anew by the same test when the source has changed. Edits
that change nothing anybody could see stand in docs/mutations.md, each with the reason. The counts of files that were
tried whole go to docs/measurements/mutations.csv; without ``--file`` those are passed over that have not changed since
and left nothing open. What ``--minutes`` leaves untried is tried by the next call.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import marshal
import math
import multiprocessing
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from mutation_edits import Edit, edits
from mutation_runs import OPTIONS, EditedSource, Trial, Trials, codes_in, run_tests

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "docs" / "mutations.md"
COUNTS = ROOT / "docs" / "measurements" / "mutations.csv"
COLUMNS = ("file", "digest", "edits", "noticed", "equivalent", "open")
# Which tests may notice an edit of a file, by the longest prefix that fits.
TESTS = {
    "paddle_kv/tracking/": ["tests/schedule", "tests/memory/test_host_pool.py"],
    "paddle_kv/schedule/": [
        "tests/schedule",
        "tests/backend",
        "tests/simulator/test_faults.py",
        "tests/simulator/test_mutations.py",
        "tests/test_metrics.py",
        "tests/tiers/test_loading.py",
        "tests/stress/test_cost.py",
    ],
    "paddle_kv/backend/": ["tests/backend", "tests/schedule", "tests/memory/test_heads.py"],
    "paddle_kv/memory/": ["tests/memory", "tests/schedule"],
    "paddle_kv/peers/": ["tests/peers"],
    "paddle_kv/tiers/": ["tests/tiers"],
    "paddle_kv/offload/": ["tests/offload", "tests/test_metrics.py"],
    "paddle_kv/testing/simulator/": ["tests/simulator"],
}
TIMES_AS_LONG, LEAST_LIMIT_S = 5.0, 2.0
LIKELY = 10  # tests that are tried before the others, where the package is imported anew


# ---- what is remembered ----
class Memory:
    """In build/mutate: coverage of the test files, and for each source what noticed its edits."""

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._folder = ROOT / "build" / "mutate"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.tests: dict[str, dict[str, Any]] = self._read("tests")  # of a test file: digests, durations, lines

    def _read(self, name: str) -> Any:
        path = self._folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _write(self, name: str, held: Any) -> None:
        written = self._folder / f"{name}.{os.getpid()}"
        written.write_text(json.dumps(held, indent=1))
        written.replace(self._folder / f"{name}.json")

    def of_source(self, file: str) -> dict[str, Any]:
        """Which test noticed which edit of this text of the source ("killers"), of others ("hints"); "survivors"."""
        held = {"digest": "", "killers": {}, "hints": {}, "survivors": [], **self._read(file.replace("/", "."))}
        if held["digest"] != digest(file):
            held.update(digest=digest(file), hints={**held["hints"], **held["killers"]}, killers={})
        return held

    def save_source(self, file: str, held: dict[str, Any]) -> None:
        self._write(file.replace("/", "."), held)

    def covering(self, file: str, asked: Sequence[str]) -> dict[str, tuple[float, set[int]]]:
        """The tests that may notice edits of the file: how long each takes, and which lines of the file it runs."""
        found: dict[str, tuple[float, set[int]]] = {}
        fitting = asked or test_files(file)
        self._measure([test_file for test_file in fitting if not self._knows(test_file, file)])
        for held in (self.tests[test_file] for test_file in fitting):
            if any(file in lines for _, lines in held["tests"].values()):  # also those that only look at a constant
                found |= {name: (took_s, set(lines.get(file, ()))) for name, (took_s, lines) in held["tests"].items()}
        return found

    def _knows(self, test_file: str, file: str) -> bool:
        held = self.tests.get(test_file)
        return held is not None and held["digest"] == digest(test_file) and held["sources"].get(file) == digest(file)

    def _measure(self, measured: Sequence[str]) -> None:
        if not measured:
            return
        with processes(self._at_once) as pool:
            running = {pool.submit(run_tests, [test_file]): test_file for test_file in measured}
            for done in as_completed(running):
                self._keep(running[done], *done.result())

    def _keep(self, test_file: str, status: int, told: Sequence[Sequence[Any]]) -> None:
        say(f"measured {test_file}")
        if status == -1:
            raise RuntimeError(f"{test_file}: {told[-1][1] if told else 'collecting'} took too long")
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
        self._write("tests", self.tests)


def processes(at_once: int) -> ProcessPoolExecutor:
    """Forked: Paddle is imported already."""
    return ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("fork"))


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


# ---- trying ----
class Source:
    """A file with the edits of it that are asked for."""

    def __init__(self, file: str, chosen: Sequence[Edit], memory: Memory, tests: Sequence[str]) -> None:
        self.file, self.path, self.chosen = file, ROOT / file, chosen
        self._all = edits(self.path.read_text())
        known = listed()
        self.reasons = {edit.key: known[file, *edit.key] for edit in self._all if (file, *edit.key) in known}
        self._memory, self._held = memory, memory.of_source(file)
        self.killers: dict[str, str] = self._held["killers"]
        self._survived = set(self._held["survivors"])
        self.covering = memory.covering(file, tests) if self.left() else {}
        self._fails: Counter[str] = Counter()
        self._variant: dict[str, int] = {}
        variants: Counter[str] = Counter()
        for name in sorted(self.covering, key=lambda name: self.covering[name][0]):
            self._variant[name] = variants[name.partition("[")[0]]
            variants[name.partition("[")[0]] += 1

    def left(self) -> list[Edit]:
        return [edit for edit in self.chosen if edit.key not in self.reasons and key_of(edit) not in self.killers]

    def tests_for(self, edit: Edit, most_s: float) -> list[str]:
        """Those that run its lines; first what takes little time for each edit that it has noticed."""
        hint = self._held["hints"].get(key_of(edit))

        def cost_s(name: str) -> float:
            return (
                -1.0 if name == hint else self.covering[name][0] * (1 + self._variant[name]) / (1 + self._fails[name])
            )

        names = [n for n, (_, lines) in self.covering.items() if edit.at_import or not lines.isdisjoint(edit.lines)]
        names.sort(key=cost_s)
        spent_s = itertools.accumulate(self.covering[name][0] for name in names)
        return [name for name, until_s in zip(names, spent_s, strict=True) if until_s <= most_s]

    def tried(self, edit: Edit, killer: str | None) -> None:
        if killer is None:
            self._survived.add(key_of(edit))
        else:
            self._survived.discard(key_of(edit))
            self.killers[key_of(edit)] = killer
            self._fails[killer] += 1

    def survivors(self) -> list[Edit]:
        return [edit for edit in self.left() if key_of(edit) in self._survived]

    def save(self) -> None:
        known = {key_of(edit) for edit in self._all if edit.key not in self.reasons} - self.killers.keys()
        self._held["survivors"] = sorted(self._survived & known)
        self._memory.save_source(self.file, self._held)

    def counts(self) -> dict[str, Any] | None:
        """Of all edits of the source, once each was tried."""
        left = [key_of(edit) for edit in self._all if edit.key not in self.reasons and key_of(edit) not in self.killers]
        if not set(left) <= set(self._held["survivors"]):
            return None
        counted = len(self._all), len(self._all) - len(left) - len(self.reasons), len(self.reasons), len(left)
        return dict(zip(COLUMNS, (self.file, self._held["digest"], *counted), strict=True))


class Campaign:
    """Tries the edits of some sources that the same tests may notice."""

    def __init__(self, sources: Sequence[Source], most_s: float, at_once: int, until_s: float) -> None:
        self._sources, self._most_s, self._at_once, self._until_s = sources, most_s, at_once, until_s
        self._limits_s = {
            name: max(LEAST_LIMIT_S, TIMES_AS_LONG * took_s)
            for source in sources
            for name, (took_s, _) in source.covering.items()
        }
        self._waiting = [(source, edit) for source in sources for edit in source.left()]
        self._num_tried, self._num_edits = 0, len(self._waiting)
        self._checks: list[Trial] = []
        self._about: dict[int, tuple[Source, Edit, Trial | None]] = {}  # of a trial: what, and whose killer it checks
        self._sound: set[str] = set()
        self._unsaved: set[Source] = set()
        self._began_s = time.monotonic()

    def run(self) -> None:
        functions: list[tuple[Source, Edit]] = []
        importing: list[tuple[Source, Edit]] = []
        for source, edit in self._waiting:
            lives = not edit.at_import and replaceable(source.path, edit.code(str(source.path)))
            (functions if lives else importing).append((source, edit))
        self._with_new_imports(importing)
        self._waiting = functions
        if functions:
            names = [name for source in self._sources for name in source.covering]
            files = list(dict.fromkeys(name.partition("::")[0] for name in names))
            trials = Trials(self._next, self._done, self._limits_s, self._at_once)
            status = int(pytest.main([*OPTIONS, *files], plugins=[trials]))
            if status not in (0, 5):
                raise RuntimeError(f"pytest ended with {status}")
        for source in self._sources:
            source.save()

    def _with_new_imports(self, edited: Sequence[tuple[Source, Edit]]) -> None:
        if not edited:
            return
        with processes(self._at_once) as pool:
            running = {}
            for source, edit in edited:
                names = source.tests_for(edit, self._most_s)
                code = marshal.dumps(edit.code(str(source.path)))
                limits_s = {name: self._limits_s[name] for name in names}
                running[pool.submit(try_new_import, source.path, code, names, limits_s, self._until_s)] = source, edit
            for done in as_completed(running):
                if (noticed := done.result()) is not None:
                    self._say(*running[done], noticed or None)

    def _next(self) -> Trial | None:
        if self._checks:
            return self._checks.pop()
        if not self._waiting or time.monotonic() > self._until_s:
            return None
        source, edit = self._waiting.pop(0)
        trial = Trial(source.path, edit.code(str(source.path)), source.tests_for(edit, self._most_s))
        self._about[id(trial)] = (source, edit, None)
        return trial

    def _done(self, trial: Trial) -> None:
        source, edit, checked = self._about.pop(id(trial))
        if checked is not None:  # the same tests without the edit
            killer = checked.failed[0]
            if trial.failed:
                if trial.failed[0] not in self._limits_s:
                    raise RuntimeError(f"{trial.failed[0]}: no test of {source.file}")
                say(f"fails without an edit, left out: {trial.failed[0]}")
                source.covering.pop(trial.failed[0], None)
                self._waiting.insert(0, (source, edit))
            else:
                self._sound.add(killer)
                self._say(source, edit, killer)
        elif not trial.failed:
            self._say(source, edit, None)
        elif trial.failed[0] in self._sound:
            self._say(source, edit, trial.failed[0])
        else:
            killer = trial.failed[0]
            upto = trial.names[: trial.names.index(killer) + 1] if killer in trial.names else trial.names
            check = Trial(source.path, None, upto)
            self._about[id(check)] = (source, edit, trial)
            self._checks.append(check)

    def _say(self, source: Source, edit: Edit, killer: str | None) -> None:
        self._num_tried += 1
        source.tried(edit, killer)
        self._unsaved.add(source)
        if self._num_tried % 20 == 0:
            while self._unsaved:
                self._unsaved.pop().save()
            rate = 60 * self._num_tried / (time.monotonic() - self._began_s)
            say(f"{self._num_tried} of {self._num_edits} edits, {rate:.0f} a minute")
        if killer is None:
            say(f"survived: {source.file}:{edit.lines.start} {edit.where}: {edit.before}  ->  {edit.after}")


def try_new_import(
    path: Path, code: bytes, names: Sequence[str], limits_s: dict[str, float], until_s: float
) -> str | None:
    """What noticed the edited code, "" for nothing, None where no time was left to try."""
    if time.monotonic() > until_s:
        return None
    edited = EditedSource(path, marshal.loads(code))
    for some in (names[:LIKELY], names[LIKELY:]):  # few files are collected sooner
        files = list(dict.fromkeys(name.partition("::")[0] for name in some))
        status, told = run_tests(files, some, edited=edited, limits_s=limits_s) if some else (0, [])
        if status != 0:
            killers = (what[1] for what in reversed(told) if what[0] in ("begins", "failed"))
            return str(next(killers, "the import"))
    return ""


def replaceable(path: Path, edited: CodeType) -> bool:
    """Whether functions may take the edited code: each has the free variables that it had."""
    after = free_variables(edited)
    return all(after.get(key, free) == free for key, free in free_variables_of(path).items())


@cache
def free_variables_of(path: Path) -> dict[tuple[str, int], tuple[str, ...]]:
    return free_variables(compile(path.read_text(), str(path), "exec"))


def free_variables(code: CodeType) -> dict[tuple[str, int], tuple[str, ...]]:
    return {(inner.co_qualname, inner.co_firstlineno): inner.co_freevars for inner in codes_in(code)}


def key_of(edit: Edit) -> str:
    return " | ".join(edit.key)


def say(what: str) -> None:
    print(what, flush=True)


def read_counts() -> dict[str, dict[str, Any]]:
    if not COUNTS.exists():
        return {}
    with COUNTS.open(newline="") as held:
        return {row["file"]: row for row in csv.DictReader(held)}


def write_counts(rows: Sequence[dict[str, Any]]) -> None:
    kept = {**read_counts(), **{row["file"]: row for row in rows}}
    with COUNTS.open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept[file] for file in sorted(kept) if (ROOT / file).exists())


def all_files() -> list[str]:
    """But for those of which nothing is left to try."""
    folders = [folder for folder in TESTS if "testing" not in folder]
    files = [str(path.relative_to(ROOT)) for folder in folders for path in sources_of(folder)]
    done = {file for file, row in read_counts().items() if row["open"] == "0"}
    known = {file: row["digest"] for file, row in read_counts().items() if file in done}
    return [file for file in files if known.get(file) != digest(file)]


def chosen_edits(file: str, asked: argparse.Namespace, memory: Memory) -> list[Edit]:
    chosen = edits((ROOT / file).read_text())
    if asked.survivors_only:
        survivors = set(memory.of_source(file)["survivors"])
        chosen = [edit for edit in chosen if key_of(edit) in survivors]
    if asked.lines:
        first, _, end = asked.lines.partition("-")
        chosen = [edit for edit in chosen if int(first) <= edit.lines.start <= int(end)]
    if asked.sample is not None:
        chosen = random.Random(asked.seed).sample(chosen, min(asked.sample, len(chosen)))
    return chosen


def try_files(files: Sequence[str], asked: argparse.Namespace, until_s: float) -> None:
    """Sources that the same tests may notice, together."""
    memory = Memory(asked.at_once)
    sources = [Source(file, chosen_edits(file, asked, memory), memory, asked.test or ()) for file in files]
    Campaign(sources, asked.seconds, asked.at_once, until_s).run()
    for source in sources:
        survivors = source.survivors()
        untried = len(source.left()) - len(survivors)
        say(f"{source.file}: of {len(source.chosen)} edits {len(survivors)} survived, {untried} are untried")
        for edit in survivors:
            say(f"  {edit.lines.start} {edit.where}: {edit.before}  ->  {edit.after}")
    write_counts([counts for source in sources if (counts := source.counts()) is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", action="append", help="a source, from the root of the checkout; default: all")
    parser.add_argument("--sample", type=int, help="so many edits of each file, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", action="append", help="a file of tests; default: all that fit the source")
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests, for each edit at the most")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further edit is tried")
    parser.add_argument("--lines", help="FIRST-LAST: only edits of these lines")
    parser.add_argument("--survivors-only", action="store_true", help="only what survived the last time")
    asked = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT)]
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    until_s = time.monotonic() + 60 * asked.minutes
    groups = itertools.groupby(asked.file or all_files(), key=test_files)
    for files in [list(group) for _, group in groups]:
        child = os.fork()  # which imports the package and collects the tests
        if child == 0:
            try_files(files, asked, until_s)
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(1)


if __name__ == "__main__":
    main()
