"""Options are checked by name before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny

from kvilt.config import RunConfig, env_threads
from kvilt.errors import ParamError
from kvilt.executor.load import load_executor


@pytest.mark.parametrize("name", ["threads", "kv_memory", "max_context"])
@pytest.mark.parametrize("value", [0, -1, True, False, 2.5, 1.5e9, "2", [2]])
def test_a_number_that_is_none_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ParamError, match=f"^{name}: must be a whole number and at least 1"):
        RunConfig(**{name: value})


@pytest.mark.parametrize("text", ["0", "00", "-1", "two", "1.5"])
def test_threads_of_the_environment_are_held_to_the_same_rule(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVILT_THREADS", text)
    with pytest.raises(ParamError, match=r"^KVILT_THREADS: must be a whole number and at least 1"):
        env_threads()
    monkeypatch.setenv("KVILT_THREADS", " 3 ")
    assert env_threads() == 3


@pytest.mark.parametrize("kv_memory", [1 << 60, 1 << 100])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_memory_that_cannot_be_mapped_is_refused_by_name(tmp_path: Path, kv_memory: int, backend: str) -> None:
    with pytest.raises(ParamError, match=r"kv_memory: .* more than this machine can map"):
        load_executor(write_tiny(tmp_path), RunConfig(kv_memory=kv_memory, backend=backend))


@pytest.mark.parametrize("backend", ["native/avx2", "native/generic"])
def test_native_kernels_of_one_instruction_set_can_be_asked_for(tmp_path: Path, backend: str) -> None:
    executor = load_executor(write_tiny(tmp_path), RunConfig(backend=backend))
    assert executor.pool.ops.numerics.endswith(backend.removeprefix("native"))
    executor.close()
