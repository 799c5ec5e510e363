"""Fixtures every test may use: the default model's file, development weights when present, and the rule for skips."""

from __future__ import annotations

from importlib.util import find_spec

import torch

if find_spec("triton") and not torch.cuda.is_available():  # there is no triton for every system
    import interpreted  # noqa: F401 (before transformers imports triton)

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import effort
import pytest
from absent import skip_without, told
from backends import CPU_BACKENDS
from hypothesis import is_hypothesis_test
from model_results import PROPERTY, ModelResults, Shows
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.weights.hub import resolve

# Tiny models gain nothing from threads, and on a shared machine waiting threads cost a lot.
torch.set_num_threads(1)

DEV_WEIGHTS = Path("~/.cache/kvilt-dev").expanduser()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model, fetched once the way a user would."""
    return resolve("smollm2")


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests list the servers they start in a folder of their own, and never use a developer's, nor their settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


TINY = [(reach, backend) for backend in CPU_BACKENDS for reach in ("full", "window")]


@pytest.fixture(scope="session", params=TINY, ids="-".join)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    """An executor over a tiny random model: with full attention and with a sliding window, on every backend."""
    reach, backend = request.param
    window = 9 if reach == "window" else None
    folder = write_tiny(tmp_path_factory.mktemp(reach), sliding_window=window)
    return load_executor(folder, RunConfig(kv_memory=1 << 22, backend=backend, threads=1))


def _dev(name: str) -> Path:
    path = DEV_WEIGHTS / name
    if not path.exists():
        skip_without("development weights")
    return path


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return _dev("gemma-3-270m-q4_k_m.gguf")


@pytest.fixture(scope="session")
def qwen2_path() -> Path:
    return _dev("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model-results", help="write what the tests show about model families to this file")
    parser.addoption("--record-agents", action="store_true", help="keep the requests of agents' clients as fixtures")
    parser.addoption("--slow", action="store_true", help="run what the default run leaves out, and laws in full")


@pytest.fixture
def shows(record_property: Callable[[str, object], None]) -> Shows:
    """Says what a test shows about model families (`model_results.py`)."""
    return lambda column, row, detail="": record_property(PROPERTY, f"{column}\t{row}\t{detail}")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--model-results"):
        config.pluginmanager.register(ModelResults(Path(path)))
    effort.load(slow=config.getoption("--slow"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of development weights carry the marker `models` without having to say so; `slow` ones wait for --slow."""
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        if names & {"gemma3_path", "qwen2_path"}:
            item.add_marker(pytest.mark.models)
    slow = config.getoption("--slow")
    config.hook.pytest_deselected(items=[item for item in items if not _belongs(item, slow)])
    items[:] = [item for item in items if _belongs(item, slow)]


def _belongs(item: pytest.Item, slow: bool) -> bool:
    """With --slow: what is marked so, and the laws, which then try more examples. Otherwise all that is not marked."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        return False
    marked = item.get_closest_marker("slow") is not None
    return marked or is_hypothesis_test(getattr(item, "obj", None)) if slow else not marked


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """In CI a skip is a missing tool, hence a failure; weights, privileges and instruction sets may be absent there."""
    outcome = yield
    report = outcome.get_result()
    excused = {"models", "privileged", "processor"} & set(item.keywords)
    if report.skipped and os.environ.get("CI") and not excused and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped and how to get it."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = [one.longrepr[2] if isinstance(one.longrepr, tuple) else str(one.longrepr) for one in reports]
    if line := told(reasons):
        terminalreporter.write_line(line)
