"""LoRA adapters of every kind against peft, on a small random model of every family and on every backend."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import FAMILIES, random_model, write_checkpoint
from safetensors.torch import load_file, save_file
from test_gguf_dialects import ARCHITECTURES, write_gguf
from torch import Tensor

from kvilt.batch import Batch, Embeds, Row
from kvilt.config import RunConfig
from kvilt.errors import Unsupported
from kvilt.executor.executor import Executor
from kvilt.executor.load import load_executor
from kvilt.ops.select import BACKENDS

IDS = [3, 17, 41, 5, 5, 60, 22, 9, 77, 31, 2, 64, 18, 18, 90, 11, 7]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]

KINDS: dict[str, dict[str, Any]] = {
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "rslora": {"use_rslora": True, "r": 9},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7, r"^model\.layers\.0\.self_attn\.o_proj": 3},
        "alpha_pattern": {"down_proj": 1, r"layers\.2\.self_attn\.(q_proj|k_proj)": 33},
    },
    "one layer": {"layers_to_transform": [1]},
    "rank one": {"r": 1},
    "wide": {"r": 70},
    "embedding and head": {"target_modules": [*SEVEN, "embed_tokens", "lm_head"]},
    "embedding alone": {"target_modules": ["embed_tokens"]},
    "fan in, fan out": {"fan_in_fan_out": True},
}


@dataclass(frozen=True)
class Tuned:
    """A random model with a random adapter, as peft computes it and as it lies on disk."""

    base: Path
    adapter: Path
    logits: Tensor


def tuned(folder: Path, family: str, **changes: Any) -> Tuned:
    """Both written to disk; peft's logits of IDS."""
    model = random_model(family)
    base = write_checkpoint(model, folder / "base")
    fields = {"r": 5, "lora_alpha": 7, "target_modules": FUSED if family.startswith("phi3") else SEVEN} | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's advice about targets that are fine
        adapted = peft.get_peft_model(model, peft.LoraConfig(**fields, init_lora_weights=False)).eval()
    torch.manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.2
    adapted.save_pretrained(folder / "adapter")
    with torch.no_grad():
        return Tuned(base, folder / "adapter", adapted(torch.tensor([IDS])).logits[0])


def open_at(base: Path, backend: str) -> Executor:
    return load_executor(base, RunConfig(kv_memory=1 << 24, backend=backend, threads=1, kv_dtype="float32"))


def logits_of(executor: Executor, lora_id: int | None = None, cut: int = 10, **scale: float) -> Tensor:
    with executor.create_kv_cache() as kv:
        executor.prefill(IDS[:cut], kv, lora_id, **scale)
        return torch.cat([executor.step([token], kv, lora_id, **scale) for token in IDS[cut:]])


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_computes_what_peft_does(family: str, tmp_path: Path) -> None:
    made = tuned(tmp_path, family)
    for backend in BACKENDS:
        executor = open_at(made.base, backend)
        found = logits_of(executor, executor.load_lora(made.adapter))
        close(found, made.logits[10:])
        assert (logits_of(executor) - found).abs().max() > 0.5  # the base model is another one
        executor.close()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_computes_what_peft_does(kind: str, tmp_path: Path) -> None:
    made = tuned(tmp_path, "gemma3" if "embedding" in kind else "llama", **KINDS[kind])
    for backend in BACKENDS:
        executor = open_at(made.base, backend)
        found = logits_of(executor, executor.load_lora(made.adapter))
        close(found, made.logits[10:])
        assert (logits_of(executor) - found).abs().max() > 0.05
        executor.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Executor, Tuned]]:
    made = tuned(tmp_path_factory.mktemp("pair"), "llama", target_modules=[*SEVEN, "embed_tokens"])
    executor = open_at(made.base, "native")
    yield executor, made
    executor.close()


def test_a_scale_stands_between_the_base_model_and_the_adapter(pair: tuple[Executor, Tuned]) -> None:
    executor, made = pair
    adapter = executor.load_lora(made.adapter, "scaled")
    base, whole = logits_of(executor), logits_of(executor, adapter)
    close(logits_of(executor, adapter, lora_scale=0.0), base)
    half = logits_of(executor, adapter, lora_scale=0.5)
    assert (half - base).abs().max() > 0.05
    assert (half - whole).abs().max() > 0.05
    executor.unload_lora(adapter)


def test_embedding_rows_that_come_as_vectors_are_left_alone(pair: tuple[Executor, Tuned]) -> None:
    """An image's rows are no tokens, so an adapter of the embedding has nothing to add to them."""
    executor, made = pair
    adapter = executor.adapters.choose(executor.load_lora(made.adapter, "vectors"))
    vectors = torch.randn(2, executor.spec.hidden_size)
    results = []
    for ids in ([3, 0, 41, 0, 9], [3, 50, 41, 60, 9]):  # what stands where a vector comes is not looked at
        with executor.create_kv_cache() as kv:
            kv.reserve(5)
            row = Row(Embeds(ids, [1, 3], vectors), range(5), kv, adapter=adapter)
            results.append(executor.run(Batch.of([row])).values)
    assert torch.equal(*results)
    executor.unload_lora(adapter.adapter_id)


def test_a_copy_of_other_embeddings_is_refused(tmp_path: Path) -> None:
    made = tuned(tmp_path, "llama", target_modules=["embed_tokens"])
    file = made.adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    (copy,) = (name for name in tensors if name.endswith("base_layer.weight"))
    tensors[copy][3, 5] += 1
    save_file(tensors, file)
    executor = open_at(made.base, "native")
    with pytest.raises(Unsupported, match="save_embedding_layers"):
        executor.load_lora(made.adapter)
    executor.close()


@pytest.mark.parametrize("family", ["llama", "smollm3", "phi3", "qwen2"])
def test_gguf_files_take_the_adapters_of_their_originals(family: str, tmp_path: Path) -> None:
    """q and k of some of them stand in neighbouring pairs; an adapter written for the original must follow them."""
    path = write_gguf(random_model(family), ARCHITECTURES[family], tmp_path / "model.gguf")
    made = tuned(tmp_path, family)
    executor = open_at(path, "native")
    close(logits_of(executor, executor.load_lora(made.adapter)), made.logits[10:])
    executor.close()
