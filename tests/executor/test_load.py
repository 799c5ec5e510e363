"""Loading an executor: its device, and the memory its pages get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.errors import ParamError
from kvilt.executor import load
from kvilt.executor.load import ACTIVATION_BYTES, load_executor
from kvilt.ops import select as registry
from kvilt.ops.contract import Ops

GIB = 1 << 30


def test_pages_get_a_quarter_of_the_memory_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "available_memory_bytes", lambda: 4_000_000)
    executor = load_executor(write_tiny(tmp_path / "model"), RunConfig(device="cpu", max_context=256, threads=1))
    page_bytes = executor.layout.groups[0].shape.page_bytes
    assert 1_000_000 - page_bytes < executor.pool.nbytes <= 1_000_000
    executor.close()


def test_pages_on_a_gpu_get_what_weights_and_activations_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (60 * GIB, 80 * GIB))
    config = RunConfig(gpu_memory=0.5)
    assert load._kv_budget(torch.device("cuda"), config) == 20 * GIB - ACTIVATION_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (30 * GIB, 80 * GIB))
    assert load._kv_budget(torch.device("cuda"), config) == 0, "others have more of it than is ours"


@pytest.mark.parametrize(("there", "expected"), [(True, "cuda"), (False, "cpu")])
def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch, there: bool, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert load.device_of(RunConfig(device="auto")) == torch.device(expected)
    assert load.device_of(RunConfig(device="cpu")) == torch.device("cpu")
    for backend in ("native", "native/avx2"):  # they have no kernels for a GPU
        assert load.device_of(RunConfig(backend=backend)) == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert load.device_of(RunConfig(device="cuda:1")) == torch.device("cuda:1")
    for device in ("cuda:2", "cuda:3"):
        with pytest.raises(ParamError, match="torch sees 2 CUDA devices"):
            load.device_of(RunConfig(device=device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert load.device_of(RunConfig(device="cuda")) == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ParamError, match="cuda is not there"):
        load.device_of(RunConfig(device="cuda"))


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_larger_models_get_bfloat16_tiles_where_the_processor_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    folder, asked = write_tiny(tmp_path / "model"), list[str]()

    def recorded(name: str, *rest: object) -> Ops:
        asked.append(name)
        return registry.select("reference")

    def chosen(config: RunConfig) -> str:
        load_executor(folder, config).close()
        return asked[-1]

    monkeypatch.setattr(load, "select", recorded)
    monkeypatch.setattr(registry, "native_isas", lambda: ("amx", "amx-bf16", "avx512"))
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    config = RunConfig(backend=backend, device="cpu", kv_memory=1 << 20)
    monkeypatch.setattr(registry, "LARGE_WEIGHT_BYTES", weight_bytes)  # more than the weights: the file has a header
    assert chosen(config) == backend
    monkeypatch.setattr(registry, "LARGE_WEIGHT_BYTES", weight_bytes // 2)
    assert chosen(config) == "native/amx-bf16"
    for named in ("native/amx", "reference"):
        assert chosen(replace(config, backend=named)) == named, "a choice of the user stays"
    monkeypatch.setattr(registry, "native_isas", lambda: ("avx512",))
    assert chosen(config) == backend


def test_threads_are_those_of_the_configuration_or_else_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = write_tiny(tmp_path / "model"), list[object]()
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for own, environment, expected in ((2, 3, [2]), (None, 3, [3]), (None, None, [])):
        monkeypatch.setattr(load, "env_threads", lambda found=environment: found)
        load_executor(folder, RunConfig(kv_memory=1 << 20, backend="reference", threads=own)).close()
        assert asked == expected
        asked.clear()


def test_the_context_is_the_models_or_a_smaller_one(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model")
    for asked, expected in ((None, 256), (256, 256), (100, 100)):
        executor = load_executor(folder, RunConfig(kv_memory=1 << 20, max_context=asked, threads=1))
        assert executor.max_context == expected
        executor.close()
    with pytest.raises(ParamError, match="at most 256 tokens, not 257"):
        load_executor(folder, RunConfig(kv_memory=1 << 20, max_context=257, threads=1))
