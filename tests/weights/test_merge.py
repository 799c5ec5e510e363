"""A merged checkpoint computes what the adapter does, and whatever cannot be merged is left unwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_files import ALL, write_lora
from tiny import write_tiny
from torch import Tensor
from typer.testing import CliRunner

from kvilt.cli.app import app
from kvilt.config import RunConfig
from kvilt.errors import InputError, KviltError, Unsupported, WeightError
from kvilt.executor.load import load_executor
from kvilt.weights.merge import merge
from kvilt.weights.peft import open_peft
from kvilt.weights.source import open_checkpoint

IDS = [5, 17, 3, 44, 21, 9, 9, 30, 2, 58, 13, 7]


def logits(base: Path, adapter: Path | None = None, scale: float = 1.0) -> Tensor:
    executor = load_executor(base, RunConfig(kv_memory=1 << 20, backend="reference", threads=1))
    lora = None if adapter is None else executor.load_lora(adapter)
    with executor.create_kv_cache() as kv:
        found = executor.step(IDS, kv, lora, scale)
    executor.close()
    return found


def merged(base: Path, adapter: Path, target: Path, scale: float = 1.0) -> int:
    with open_peft(adapter) as opened:
        checkpoint = open_checkpoint(base)
        with checkpoint.tensors:
            return merge(checkpoint, opened, target, scale)


@pytest.mark.parametrize("scale", [1.0, -0.5])
def test_a_merged_checkpoint_needs_no_adapter(tmp_path: Path, scale: float) -> None:
    base = write_tiny(tmp_path / "base")
    adapter = write_lora(tmp_path / "adapter", 5, ALL, 3, use_rslora=True, alpha_pattern={"q_proj": 1})
    assert merged(base, adapter, tmp_path / "merged", scale) == 21
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(base, adapter, scale), rtol=1e-4, atol=1e-4)
    assert (logits(base) - logits(base, adapter, scale)).abs().max() > 0.1


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_merged_checkpoint_has_the_lengths_of_dora(tmp_path: Path, scale: float) -> None:
    base = write_tiny(tmp_path / "base")
    adapter = write_lora(tmp_path / "adapter", 5, ALL, 3, use_dora=True)
    assert merged(base, adapter, tmp_path / "merged", scale) == 21
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(base, adapter, scale), rtol=1e-4, atol=1e-4)
    assert (logits(base) - logits(base, adapter, scale)).abs().max() > 0.1


def test_the_command_merges_and_says_so(tmp_path: Path) -> None:
    base, adapter = write_tiny(tmp_path / "base"), write_lora(tmp_path / "adapter")
    asked = ["lora", "merge", str(adapter), str(tmp_path / "merged"), "--model", str(base)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "21 weights" in done.output
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(base, adapter), rtol=1e-4, atol=1e-4)
    assert CliRunner().invoke(app, asked).exit_code != 0  # the folder is there now


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"parts": ("embed_tokens",)}, Unsupported),  # the tiny model's head is its embedding
        ({"parts": ("lm_head",)}, WeightError),
        ({"alora_invocation_tokens": [1]}, Unsupported),
        ({"r": 5}, WeightError),
    ],
)
def test_what_cannot_be_merged_leaves_nothing_behind(
    tmp_path: Path, changes: dict[str, object], error: type[KviltError]
) -> None:
    adapter = write_lora(tmp_path / "adapter", 4, **changes)  # type: ignore[arg-type]
    with pytest.raises(error):
        merged(write_tiny(tmp_path / "base"), adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_packed_models_and_folders_in_use_are_refused(tmp_path: Path, smollm2_path: Path) -> None:
    adapter, base = write_lora(tmp_path / "adapter"), write_tiny(tmp_path / "base")
    with pytest.raises(Unsupported, match="GGUF"):
        merged(smollm2_path, adapter, tmp_path / "merged")
    with pytest.raises(InputError, match="new folder"):
        merged(base, adapter, base)
