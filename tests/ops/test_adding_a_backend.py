"""The worked example of docs/adding_a_backend.md: its code runs as it stands on the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny

import kvilt
from kvilt.config import RunConfig
from kvilt.errors import ParamError
from kvilt.executor.load import load_executor
from kvilt.ops import select as registry

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_backend.md"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's block defines, with a registry that is put back afterwards."""
    monkeypatch.setattr(registry, "_NAMED", dict(registry._NAMED))
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    defined: dict[str, Any] = {"__name__": "example"}
    exec(compile(block, str(PAGE), "exec"), defined)
    return defined


def test_the_example_of_the_page_runs_a_model(example: dict[str, Any], tmp_path: Path) -> None:
    folder, found = write_tiny(tmp_path), {}
    for backend in ("float64", "reference"):
        executor = load_executor(folder, RunConfig(backend=backend, kv_memory=1 << 20))
        with executor.create_kv_cache() as kv:
            found[backend] = executor.step([1, 2, 3, 4], kv)
        assert executor.pool.ops.name == backend
        assert executor.pool.ops.numerics.startswith(f"{backend}-1/")
        executor.close()
    torch.testing.assert_close(found["float64"], found["reference"], rtol=1e-4, atol=1e-5)
    assert isinstance(registry.select("float64"), example["Float64Ops"])


@pytest.mark.usefixtures("example")
def test_a_name_is_registered_once() -> None:
    for name in ("float64", "native", "native/avx2", "auto"):
        with pytest.raises(ValueError, match="already"):
            registry.register(name, registry.BACKENDS["reference"])
    assert registry.select("auto").name == "native"


def test_a_name_that_is_not_registered_is_refused_before_a_model_is_looked_for(tmp_path: Path) -> None:
    says = r"^backend: must be one of auto, native, triton, reference, native/amx, .* not 'float64'"
    with pytest.raises(ParamError, match=says):
        kvilt.load("no-such-model", backend="float64")
    with pytest.raises(ParamError, match=says):
        load_executor(write_tiny(tmp_path), RunConfig(backend="float64"))
