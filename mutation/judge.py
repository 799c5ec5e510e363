"""Whether tests notice a mutant: a forked process imports kvilt with the mutant and runs the tests of its line."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from .operators import Mutant, mutated
from .record import OPTIONS, Steady

# Tests run in stages of so many recorded seconds, each in a process of its own: most mutants fall in the first.
STAGES = (1.0, 5.0)
STARTUP_S = 60.0  # to import kvilt and the tests, and for what a test waits on


@dataclass(frozen=True, slots=True)
class RecordedTest:
    """A test that passes, its seconds of CPU time, and the lines it runs of each target."""

    name: str
    seconds: float
    lines: dict[str, frozenset[int]]

    @property
    def cost(self) -> float:
        """Quick tests of few lines come first."""
        return self.seconds * sum(map(len, self.lines.values()))


class Judge:
    """Runs tests against mutants, at most so many recorded seconds of tests for each."""

    def __init__(self, tests: list[RecordedTest], seconds: float) -> None:
        self._tests = sorted(tests, key=lambda test: test.cost)
        self._seconds = seconds

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        """ "killed" or "survived", and by which test or limit."""
        tree = mutated(Path(mutant.file).read_text(), mutant)
        stages = self.stages(mutant)
        for stage in stages:
            if killer := _killer(_Swap(mutant.file, tree), stage):
                return "killed", killer
        return "survived", f"{sum(map(len, stages))} tests"

    def fails_alone(self, killers: set[str]) -> str:
        """Of the tests that killed mutants, one that fails on the unmutated code as well; "" when there is none."""
        return _killer(None, [test for test in self._tests if test.name in killers])

    def stages(self, mutant: Mutant) -> list[list[RecordedTest]]:
        tests, stages, spent = self._touching(mutant), [[]], 0.0  # type: ignore[var-annotated]
        for test in tests:
            if spent + test.seconds > self._seconds:
                continue
            spent += test.seconds
            if len(stages) <= len(STAGES) and spent > STAGES[len(stages) - 1] and stages[-1]:
                stages.append([])
            stages[-1].append(test)
        return stages

    def _touching(self, mutant: Mutant) -> list[RecordedTest]:
        """Tests that run the line; for one that runs on import, those of its function, file or package."""
        first, last = mutant.around
        for lines in ({mutant.line}, set(range(first, last + 1))):
            if tests := [test for test in self._tests if lines & test.lines.get(mutant.file, frozenset())]:
                return tests
        package = str(Path(mutant.file).parent)
        return [test for test in self._tests if mutant.file in test.lines] or [
            test for test in self._tests if any(file.startswith(package) for file in test.lines)
        ]


def _killer(swap: _Swap | None, tests: list[RecordedTest]) -> str:
    """The test that fails, or what else went wrong; "" when all pass."""
    folder = Path(tempfile.mkdtemp(prefix="kvilt-mutant-"))
    if (child := os.fork()) == 0:
        os.setsid()
        os._exit(_run_tests(swap, tests, folder))
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test started and did not end
    killer = (folder / "killer").read_text() if (folder / "killer").exists() else ""
    running = (folder / "running").read_text() if (folder / "running").exists() else "import"
    shutil.rmtree(folder, ignore_errors=True)
    if os.WIFSIGNALED(status):
        return f"{signal.Signals(os.WTERMSIG(status)).name} in {running}"
    code = os.waitstatus_to_exitcode(status)
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise RuntimeError(f"none of the tests was found: {[test.name for test in tests[:3]]}")
    return "" if code == pytest.ExitCode.OK else killer or "import"


def _run_tests(swap: _Swap | None, tests: list[RecordedTest], folder: Path) -> int:
    """In the new process: swap the module, run the tests, stop at the first failure."""
    quiet = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    _limit(STARTUP_S)
    if swap is not None:
        sys.meta_path.insert(0, swap)
    paths = dict.fromkeys(test.name.split("::")[0] for test in tests)
    options = [*OPTIONS, "-x", "--tb=no", f"--basetemp={folder / 'tmp'}"]
    return int(pytest.main([*options, *paths], plugins=[Steady(), _Chosen(tests, folder)]))


def _limit(seconds: float) -> None:
    """The process ends by a signal after so many seconds of CPU time, or several times as many by the clock."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 3 * seconds)


class _Chosen:
    """Of the files that were collected, only the chosen tests; notes the first that fails."""

    def __init__(self, tests: Iterable[RecordedTest], folder: Path) -> None:
        self._seconds = {test.name: test.seconds for test in tests}
        self._folder = folder

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._seconds]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        _limit(20.0 + 10 * self._seconds[nodeid])
        (self._folder / "running").write_text(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            (self._folder / "killer").write_text(report.nodeid)


class _Swap(importlib.abc.MetaPathFinder):
    """Finds the mutated module before any other finder does."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self._name = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        self._file, self._tree = str(Path(file).resolve()), tree

    def find_spec(
        self, name: str, _path: Any = None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._file, loader=_Loader(name, self._file, self._tree))


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, file: str, tree: ast.Module) -> None:
        super().__init__(name, file)
        self._tree = tree

    def get_code(self, _name: str) -> CodeType:
        return compile(self._tree, self.path, "exec", dont_inherit=True)
