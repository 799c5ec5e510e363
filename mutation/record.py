"""Which tests run which lines of the mutated files, and how long each test takes.

A pytest plugin with a tracer of its own. What a shared fixture runs counts for every test that uses the fixture, not
only for the first.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

# Without xdist: a test runs in the process that was forked for it. Plugins of the suite stay as they are.
OPTIONS = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=-p no:valkey --import-mode=importlib"]
REAL_WEIGHTS = {"smollm2_path", "gemma3_path", "qwen2_path"}

Lines = dict[str, set[int]]


class Steady:
    """Hypothesis draws the same examples in every run, and does not shrink what fails."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        name = settings.get_current_profile_name()
        phases = (Phase.explicit, Phase.generate, Phase.target)
        settings.register_profile(name, settings.default, derandomize=True, database=None, phases=phases)
        settings.load_profile(name)


class Recorder:
    """Lines of the target files by test; `tests` maps a node id to its seconds and lines."""

    def __init__(self, targets: list[Path]) -> None:
        self._targets = [str(path.resolve()) for path in targets]
        self._seen = self._nothing()
        self._shared: dict[tuple[int, int | None], Lines] = {}
        self._failed: set[str] = set()
        self.tests: dict[str, dict[str, Any]] = {}

    def _nothing(self) -> Lines:
        return {name: set() for name in self._targets}

    def _enter(self, frame: Any, _event: str, _argument: Any) -> Any:
        lines = self._seen.get(frame.f_code.co_filename)
        if lines is None:
            return None
        lines.add(frame.f_lineno)
        return self._step

    def _step(self, frame: Any, event: str, _argument: Any) -> Any:
        if event == "line":
            self._seen[frame.f_code.co_filename].add(frame.f_lineno)
        return self._step

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not REAL_WEIGHTS & set(getattr(item, "fixturenames", ()))]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        outer, self._seen = self._seen, self._nothing()
        yield
        inner, self._seen = self._seen, outer
        if fixturedef.scope != "function":
            self._shared[id(fixturedef), getattr(request, "param_index", None)] = inner
        _merge(outer, inner)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self._seen = self._nothing()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        start = time.process_time()  # not the clock: the machine may be busy
        yield
        seconds = time.process_time() - start
        sys.settrace(None)
        threading.settrace(None)
        indices = item.callspec.indices if hasattr(item, "callspec") else {}
        for name, found in item._fixtureinfo.name2fixturedefs.items():
            for index in {0, indices.get(name), None}:
                _merge(self._seen, self._shared.get((id(found[-1]), index), {}))
        lines = {name: sorted(numbers) for name, numbers in self._seen.items() if numbers}
        self.tests[item.nodeid] = {"seconds": seconds, "lines": lines}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)

    def results(self) -> dict[str, dict[str, Any]]:
        """Tests that passed and ran a line of a target."""
        return {name: test for name, test in self.tests.items() if name not in self._failed and test["lines"]}


def _merge(into: Lines, more: Lines) -> None:
    for name, numbers in more.items():
        into[name] |= numbers


def _third_party(name: str, module: Any) -> bool:
    """What a forked process may have imported before its mutant is chosen."""
    file = getattr(module, "__file__", None) or ""
    return "kvilt" not in name and "site-packages" in file and "__" not in name


def main() -> None:
    """record.py RESULT TARGETS.. -- TESTS..: run the tests, write what each ran."""
    cut = sys.argv.index("--")
    recorder = Recorder([Path(name) for name in sys.argv[2:cut]])
    status = pytest.main([*OPTIONS, "--tb=short", *sys.argv[cut + 1 :]], plugins=[Steady(), recorder])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit("the unmutated code must pass its tests first")
    modules = [name for name, module in sys.modules.items() if _third_party(name, module)]
    Path(sys.argv[1]).write_text(json.dumps({"tests": recorder.results(), "modules": modules}))


if __name__ == "__main__":
    main()
