"""Out of memory on a device is an error of ours that names what was asked and what is free."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import write_tiny

from kvilt.batch import Batch, Ids, Row
from kvilt.config import RunConfig
from kvilt.errors import DeviceMemoryError
from kvilt.executor.device_memory import asked_bytes
from kvilt.executor.load import load_executor

TORCH = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free."
)


@pytest.fixture(autouse=True)
def eight_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.parametrize(
    ("message", "asked"),
    [(TORCH, 5 << 29), ("Tried to allocate 20.00 MiB.", 20 << 20), ("allocate 512 bytes", 512), ("other words", None)],
)
def test_what_torch_tried_to_allocate_is_read(message: str, asked: int | None) -> None:
    assert asked_bytes(message) == asked


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError(TORCH)


@pytest.mark.parametrize("part", ["assemble", "PagePool"])
def test_a_model_that_does_not_fit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(f"kvilt.executor.load.{part}", out_of_memory)
    with pytest.raises(
        DeviceMemoryError, match="needs 2,560 MiB, and 1,024 of the device's 8,192 MiB are free"
    ) as caught:
        load_executor(write_tiny(tmp_path), RunConfig(kv_memory=1 << 20, threads=1))
    assert (caught.value.asked_bytes, caught.value.free_bytes, caught.value.total_bytes) == (5 << 29, 1 << 30, 8 << 30)


def test_a_step_that_does_not_fit_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = load_executor(write_tiny(tmp_path), RunConfig(kv_memory=1 << 20, threads=1))
    with executor.create_kv_cache() as kv:
        executor.prefill([1, 2, 3], kv)
        truth = executor.step([4], kv)
        kv.truncate(3)
        with monkeypatch.context() as patch:
            patch.setattr(executor._replay, "run", out_of_memory)
            kv.reserve(1)
            with pytest.raises(DeviceMemoryError, match="a step of 1 tokens"):
                executor.run(Batch.of([Row(Ids([4]), [3], kv)]))
        assert kv.lengths == (3,)
        assert torch.equal(executor.step([4], kv), truth)
    executor.close()
