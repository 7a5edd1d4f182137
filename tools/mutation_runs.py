"""Runs tests on edited sources, in processes forked from one that has Paddle imported."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib  # noqa: F401  before Paddle, see tests/conftest.py
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy  # noqa: F401  what children share
import paddle  # noqa: F401
import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = f"{ROOT / 'paddle_kv'}/"
COLLECTING_S = 300.0  # also the longest that a test may take while its lines are traced, or others have the processors
OPTIONS = ["-q", "-s", "--tb=native", "-p", "no:cacheprovider", "-W", "ignore"]


def held_up_s(session: int) -> float:
    """How long the threads of a session have waited for a processor that others had: no edit made them slower."""
    found_ns = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                for thread in (process / "task").iterdir():
                    found_ns += int((thread / "schedstat").read_text().split()[1])
    return found_ns / 1e9


class Limit:
    """How long a test may take, which ``session`` runs."""

    def __init__(self, session: int, limit_s: float = COLLECTING_S) -> None:
        self._session, self._held_up_s = session, 0.0
        self.begin(limit_s)

    def begin(self, limit_s: float) -> None:
        """Another one."""
        self._last_s = time.monotonic() + max(limit_s, COLLECTING_S)
        self._until_s = time.monotonic() + limit_s

    def left_s(self) -> float:
        """0 when it is over."""
        now_s = time.monotonic()
        if self._until_s <= now_s:
            before_s, self._held_up_s = self._held_up_s, held_up_s(self._session)
            self._until_s = min(now_s + self._held_up_s - before_s, self._last_s)
        return max(0.0, self._until_s - now_s)


# ---- in the child ----
class EditedSource(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the import system edited code for one module."""

    def __init__(self, path: Path, code: CodeType) -> None:
        self._path = path
        self._folder = path.parent if path.name == "__init__.py" else None  # of a package
        self._name = ".".join((self._folder or path.with_suffix("")).relative_to(ROOT).parts)
        self._code = code

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=str(self._path))
        spec.has_location = True
        if self._folder is not None:
            spec.submodule_search_locations = [str(self._folder)]
        return spec

    def exec_module(self, module: Any) -> None:
        exec(self._code, module.__dict__)


def load_calm_profile() -> None:
    calm = settings(phases=[Phase.explicit, Phase.generate], database=None, derandomize=True)
    settings.register_profile("mutate", calm)
    settings.load_profile("mutate")


def be_silent() -> None:
    with open(os.devnull, "w") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)


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
        load_calm_profile()
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
        be_silent()
        if edited is not None:
            sys.meta_path.insert(0, edited)
        options = [*OPTIONS, *(["-x"] if order else [])]
        status = 3
        try:
            status = int(pytest.main([*options, *files], plugins=[Reporter(writing, order, traces=edited is None)]))
        finally:
            os._exit(status)
    os.close(writing)
    told: list[list[Any]] = []
    limit = Limit(child)
    try:
        with open(reading, "rb", buffering=0) as pipe:
            kept = b""
            while (left_s := limit.left_s()) > 0:
                if not select.select([pipe], [], [], left_s)[0]:
                    continue
                got = os.read(pipe.fileno(), 1 << 16)
                if not got:
                    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), told
                *lines, kept = (kept + got).split(b"\n")
                told += map(json.loads, lines)
                runs = told and told[-1][0] == "begins" and limits_s is not None
                limit.begin(limits_s[told[-1][1]] if runs else COLLECTING_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return -1, told
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it started itself
            os.killpg(child, signal.SIGKILL)


# ---- many edits, the tests collected once ----
@dataclass
class Trial:
    """Tests to run, in this order, with functions of a source edited; what it came to stands in ``status``."""

    path: Path
    code: CodeType | None
    names: Sequence[str]
    to_the_end: bool = False  # or to the first failure
    status: int = -1  # of the process; -1: a test took too long
    failed: list[str] = field(default_factory=list)
    took_s: float = 0.0


@dataclass
class Running:
    trial: Trial
    process: int
    temporary: str
    began_s: float
    limit: Limit
    kept: bytes = b""
    last: str = "the start"


class Trials:
    """A plugin of pytest that, once the tests are collected, takes trials from ``next_trial``, ``at_once`` of them, and
    gives each to ``done``."""

    def __init__(
        self,
        next_trial: Callable[[], Trial | None],
        done: Callable[[Trial], None],
        limits_s: Mapping[str, float],
        at_once: int,
    ) -> None:
        self._next_trial, self._done, self._limits_s, self._at_once = next_trial, done, limits_s, at_once
        self._items: dict[str, pytest.Item] = {}
        self._running: dict[int, Running] = {}
        self._functions: dict[str, list[FunctionType]] = {}
        self._descriptor = -1
        self._parent = os.getppid()  # without it nobody wants the rest

    def pytest_sessionstart(self) -> None:
        load_calm_profile()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        gc.unfreeze()  # what is frozen, by tests/conftest.py, is not told
        for function in [held for held in gc.get_objects() if isinstance(held, FunctionType)]:
            self._functions.setdefault(function.__code__.co_filename, []).append(function)
        if not any(path.startswith(PACKAGE) for path in self._functions):
            raise RuntimeError("no function of the package is found: every edit would seem to survive")
        gc.collect()
        gc.freeze()  # children need not copy the pages, nor look through the objects
        try:
            while True:
                while len(self._running) < self._at_once and (trial := self._next_trial()) is not None:
                    self._start(trial)
                if not self._running or os.getppid() != self._parent:
                    return True
                left_s = {reading: running.limit.left_s() for reading, running in self._running.items()}
                ready = select.select(list(self._running), [], [], min(left_s.values()))[0]
                for reading in ready:
                    self._hear(reading)
                for reading in left_s.keys() - ready:
                    if not left_s[reading]:
                        self._running[reading].trial.failed.append(self._running[reading].last)
                        self._end(reading, hangs=True)
        finally:
            self._done = lambda trial: None  # who is stopped here has not been tried
            for reading in list(self._running):
                self._end(reading, hangs=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell("failed", report.nodeid)

    def _start(self, trial: Trial) -> None:
        temporary = tempfile.mkdtemp(prefix="mutate-")
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            be_silent()
            os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.tempdir = temporary
            self._descriptor = writing
            status = 3
            try:
                status = self._run(trial)
            finally:
                os._exit(status)
        os.close(writing)
        self._running[reading] = Running(trial, child, temporary, time.monotonic(), Limit(child))

    def _run(self, trial: Trial) -> int:
        if trial.code is not None:
            replace(self._functions.get(str(trial.path)) or functions_of(trial.path), trial.code)
        items = [self._items[name] for name in trial.names if name in self._items]
        for item, following in zip(items, [*items[1:], None], strict=False):
            self._tell("begins", item.nodeid)
            before = item.session.testsfailed
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if item.session.testsfailed > before and not trial.to_the_end:
                return 1
        return 0

    def _tell(self, what: str, name: str) -> None:
        os.write(self._descriptor, json.dumps([what, name]).encode() + b"\n")

    def _hear(self, reading: int) -> None:
        running = self._running[reading]
        got = os.read(reading, 1 << 16)
        if not got:
            self._end(reading)
            return
        *lines, running.kept = (running.kept + got).split(b"\n")
        for what, name in map(json.loads, lines):
            if what == "failed":
                running.trial.failed.append(name)
            running.last = name
            running.limit.begin(self._limits_s.get(name, COLLECTING_S))

    def _end(self, reading: int, *, hangs: bool = False) -> None:
        running = self._running.pop(reading)
        trial = running.trial
        os.close(reading)
        if not hangs:
            trial.status = os.waitstatus_to_exitcode(os.waitpid(running.process, 0)[1])
            if trial.status != 0 and not trial.failed:
                trial.failed.append(running.last)
        with contextlib.suppress(ProcessLookupError):  # with what it started itself
            os.killpg(running.process, signal.SIGKILL)
        if hangs:
            os.waitpid(running.process, 0)
        shutil.rmtree(running.temporary, ignore_errors=True)
        trial.took_s = time.monotonic() - running.began_s
        self._done(trial)


def replace(functions: Sequence[FunctionType], edited: CodeType) -> None:
    """Gives living functions of a source the code that they have in an edited one."""
    codes = {(code.co_qualname, code.co_firstlineno): code for code in codes_in(edited)}
    for function in functions:
        here = function.__code__
        function.__code__ = codes.get((here.co_qualname, here.co_firstlineno), here)


def functions_of(path: Path) -> list[FunctionType]:
    """Of a module that is imported when it is needed."""
    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    gc.unfreeze()  # where it was imported before, its functions may be frozen, and are not told
    held = [one for one in gc.get_objects() if isinstance(one, FunctionType)]
    return [one for one in held if one.__code__.co_filename == str(path)]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_in(constant)
