"""Adapters from a path, an open file or bytes in memory: the same adapter, whatever it was loaded from."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import write_gguf_lora, write_lora
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.errors import InputError, KviltError, ParamError, WeightError
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.weights.assets import ModelAssets
from kvilt.weights.mapped import MappedFile
from kvilt.weights.peft import CONFIG, WEIGHTS
from kvilt.weights.safetensors import SafetensorsFiles


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    executor = load_executor(write_tiny(tmp_path / "base"), RunConfig(kv_memory=1 << 20, threads=1))
    yield executor
    executor.close()


def in_memory(folder: Path) -> dict[str, Any]:
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


PEFT: dict[str, Callable[[Path], Any]] = {
    "bytes": in_memory,
    "open files": lambda folder: {name: io.BytesIO(data) for name, data in in_memory(folder).items()},
    "real files": lambda folder: {name: (folder / name).open("rb") for name in (CONFIG, WEIGHTS)},
    "paths": lambda folder: {name: str(folder / name) for name in (CONFIG, WEIGHTS)},
    "assets": lambda folder: ModelAssets.of(in_memory(folder), 1 << 30),
}
GGUF: dict[str, Callable[[Path], Any]] = {
    "bytes": Path.read_bytes,
    "bytearray": lambda path: bytearray(path.read_bytes()),
    "open file": lambda path: path.open("rb"),
    "buffer": lambda path: io.BytesIO(path.read_bytes()),
}


def logits(executor: Executor, lora: int) -> torch.Tensor:
    with executor.create_kv_cache() as kv:
        return executor.step([5, 17, 3, 44], kv, lora_id=lora)


@pytest.mark.parametrize("kind", [*(("peft", one) for one in PEFT), *(("gguf", one) for one in GGUF)], ids="-".join)
def test_it_is_the_same_adapter_and_needs_no_file_afterwards(
    executor: Executor, tmp_path: Path, kind: tuple[str, str]
) -> None:
    peft = kind[0] == "peft"
    path = write_lora(tmp_path / "one") if peft else write_gguf_lora(tmp_path / "one.gguf")
    from_path = executor.load_lora(path)
    assets = (PEFT if peft else GGUF)[kind[1]](path)
    lora = executor.load_lora(assets, "other")
    for opened in assets.values() if isinstance(assets, dict) else [assets]:
        getattr(opened, "close", lambda: None)()
    wanted = logits(executor, from_path)
    assert executor.adapters.find(lora).content == executor.adapters.find(from_path).content
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    executor.adapters._evict(executor.adapters._loaded[lora])  # it comes back without any file
    assert torch.equal(logits(executor, lora), wanted)
    assert executor.adapters.find(lora).resident


def test_names_of_adapters_without_one(executor: Executor, tmp_path: Path) -> None:
    folder, file = write_lora(tmp_path / "folder"), write_gguf_lora(tmp_path / "file.gguf")
    ids = [executor.load_lora(in_memory(folder)), executor.load_lora(file.read_bytes())]
    with file.open("rb") as opened:
        ids.append(executor.load_lora(opened))
    assert [executor.adapters.find(one).name for one in ids] == ["adapter-1", "adapter-2", "file"]


@pytest.mark.parametrize(
    ("assets", "error", "match"),
    [
        (b"neither", InputError, "unless it is a GGUF file"),
        (io.BytesIO(b""), InputError, "unless it is a GGUF file"),
        (io.StringIO("text"), InputError, "opened for bytes"),
        (5, InputError, "not a int"),
        ({CONFIG: b"{}"}, WeightError, WEIGHTS),
        ({WEIGHTS: b"{}"}, WeightError, CONFIG),
        ({CONFIG: 5, WEIGHTS: b""}, InputError, "not a int"),
        ({CONFIG: b"[", WEIGHTS: b""}, WeightError, CONFIG),
        ({CONFIG: b'{"peft_type": "LORA"}', WEIGHTS: b""}, WeightError, "empty"),
        ({CONFIG: b'{"peft_type": "LORA"}', WEIGHTS: b"12345678901"}, WeightError, "header"),
        (b"GGUF" + bytes(40), KviltError, "version"),
    ],
)
def test_what_is_no_adapter_is_refused_by_name(executor: Executor, assets: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        executor.load_lora(assets)
    assert executor.lora_metrics_snapshot()["loaded"] == 0


def test_more_bytes_than_are_allowed_are_not_read(executor: Executor, tmp_path: Path) -> None:
    executor.adapters.budget_bytes = 1000

    class Endless(io.RawIOBase):
        asked = 0

        def read(self, size: int = -1) -> bytes:
            self.asked += size
            return b"GGUF" + bytes(size - 4)

    endless = Endless()
    for assets in (endless, in_memory(write_lora(tmp_path / "large"))):
        with pytest.raises(ParamError, match="1000 bytes"):
            executor.load_lora(assets)
    assert endless.asked == 1001


def test_bytes_in_memory_are_read_as_a_file_is(tmp_path: Path) -> None:
    path = write_lora(tmp_path / "one") / WEIGHTS
    data = path.read_bytes()
    with SafetensorsFiles.open(path) as file, SafetensorsFiles.of_bytes(path.name, data) as memory:
        assert memory.names() == file.names()
        assert memory.digest() == file.digest()
        for name in file.names():
            memory.forget(name)  # there is no file to read it from again
            assert torch.equal(memory.tensor(name), file.tensor(name))
    mapped = MappedFile.in_memory("x", b"bytes")
    mapped.close()
    with pytest.raises(WeightError, match="is closed"):
        mapped.view(0, 1)
