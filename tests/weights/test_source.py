"""Opening a checkpoint from a path: what is found, and one clear sentence for everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvilt.errors import ModelNotFound, WeightError
from kvilt.weights.source import open_checkpoint

Craft = Any  # conftest.Craft


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 2}))
    return folder


def test_a_gguf_file_opens_with_its_metadata_as_config(tmp_path: Path, craft: Craft) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(craft.file())
    for given in (path, tmp_path):
        checkpoint = open_checkpoint(given)
        with checkpoint.tensors:
            assert (checkpoint.kind, checkpoint.path) == ("gguf", path)
            assert checkpoint.config["general.architecture"] == "llama"
            assert checkpoint.generation == {}


def test_a_folder_with_config_and_safetensors_opens(hf: Path) -> None:
    (hf / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    for given in (hf, hf / "model.safetensors"):
        checkpoint = open_checkpoint(given)
        with checkpoint.tensors as tensors:
            assert checkpoint.kind == "hf"
            assert checkpoint.config["hidden_size"] == 2
            assert checkpoint.generation == {"eos_token_id": 2}
            assert tensors.names() == ("w",)


def test_the_fingerprint_of_a_folder_changes_with_its_config(hf: Path) -> None:
    before = open_checkpoint(hf)
    (hf / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 2, "rope_theta": 5e5}))
    after = open_checkpoint(hf)
    with before.tensors, after.tensors:
        assert before.fingerprint == before.fingerprint != after.fingerprint


def test_a_missing_path_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nothing at"):
        open_checkpoint(tmp_path / "absent.gguf")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_path_that_cannot_exist_is_not_found(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelNotFound):
        open_checkpoint(tmp_path / name)


def test_an_empty_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="neither"):
        open_checkpoint(tmp_path)


def test_a_folder_of_several_gguf_files_asks_for_one(tmp_path: Path, craft: Craft) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(craft.file())
    with pytest.raises(WeightError, match="2 GGUF files"):
        open_checkpoint(tmp_path)


def test_a_text_file_is_said_not_to_be_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    with pytest.raises(WeightError, match="not a GGUF file"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_a_pickle_is_never_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x80\x04N.")
    for given in (path, tmp_path):
        with pytest.raises(WeightError, match="never read"):
            open_checkpoint(given)


def test_safetensors_without_a_config_are_refused(hf: Path) -> None:
    (hf / "config.json").unlink()
    with pytest.raises(WeightError) as caught:
        open_checkpoint(hf / "model.safetensors")
    assert caught.value.field == "config.json"


@pytest.mark.parametrize("text", ["", "[1]", '{"a": ', "[" * 100_000, '{"a": 1, "a": 2}'])
def test_a_damaged_config_is_refused_by_name(hf: Path, text: str) -> None:
    (hf / "config.json").write_text(text)
    with pytest.raises(WeightError) as caught:
        open_checkpoint(hf)
    assert caught.value.field == "config.json"


def test_a_tensor_that_was_forgotten_is_read_from_the_file_again(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    weight = torch.randn(300, 100)
    save_file({"w": weight}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    with open_checkpoint(folder).tensors as tensors:
        view, digest = tensors.tensor("w"), tensors.digest()
        tensors.forget("w")
        assert torch.equal(view, weight)
        assert torch.equal(tensors.tensor("w"), weight)
        assert tensors.digest() == digest
    tensors.forget("w")  # of a closed file nothing is left to give back
