"""LoRA adapters of every kind against peft, on a small random model of every family and on every backend."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft
import pytest
import torch
from backends import CPU_BACKENDS
from families import FAMILIES, random_model, write_checkpoint
from safetensors.torch import load_file, save_file
from test_gguf_dialects import ARCHITECTURES, PERMUTED, interleave, write_gguf
from torch import Tensor

from kvilt.batch import Adapter, Base, Batch, Embeds, Ids, Row
from kvilt.config import RunConfig
from kvilt.errors import Unsupported, WeightError
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache

IDS = [3, 17, 41, 5, 5, 60, 22, 9, 77, 31, 2, 64, 18, 18, 90, 11, 7]
LATENT = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
TARGETS = {
    "phi3": FUSED,
    "deepseek": LATENT,
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "starcoder2": ["q_proj", "v_proj", "o_proj", "c_fc", "c_proj"],
    "glm": ["q_proj", "k_proj", "o_proj", "gate_up_proj", "down_proj"],
    "mistral3": r".*language_model.*(q_proj|k_proj|o_proj|up_proj|down_proj)",
    "llama4-nested": r".*language_model.*(q_proj|k_proj|o_proj|up_proj|down_proj)",
}

# Of families with recurrent layers, the maps of these too.
RECURRENT = {
    "qwen3-next": [*SEVEN[:4], "in_proj_qkvz", "in_proj_ba", "out_proj"],
    "qwen3.5": [*SEVEN, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"],
    "falcon-h1": [*SEVEN, "in_proj"],  # peft refuses out_proj
    "granite-hybrid": [*SEVEN[:4], "in_proj", "out_proj", "input_linear", "output_linear"],
    "lfm2": ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"],
}

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
    "dora": {"use_dora": True},
    "dora and rslora of some": {"use_dora": True, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
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
    # peft trains experts as whole parameters of three dimensions, which are refused by name.
    own = (targets for prefix, targets in (TARGETS | RECURRENT).items() if family.startswith(prefix))
    targets = SEVEN[:4] if "moe" in family else next(own, SEVEN)
    fields = {"r": 5, "lora_alpha": 7, "target_modules": targets} | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's advice about targets that are fine
        adapted = peft.get_peft_model(model, peft.LoraConfig(**fields, init_lora_weights=False)).eval()
    torch.manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if "magnitude" in name:  # it began as the lengths of the weights
            parameter.data *= 0.6 + torch.rand_like(parameter)
        elif "lora_" in name:
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


def computes_what_peft_does(made: Tuned, apart: float) -> None:
    """On every backend; and the base model is another one, by so much at least."""
    for backend in CPU_BACKENDS:
        executor = open_at(made.base, backend)
        found = logits_of(executor, executor.load_lora(made.adapter))
        close(found, made.logits[10:])
        assert (logits_of(executor) - found).abs().max() > apart
        executor.close()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_computes_what_peft_does(family: str, tmp_path: Path) -> None:
    computes_what_peft_does(tuned(tmp_path, family), 0.5)


def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    made = tuned(tmp_path, "qwen3-moe", target_modules=SEVEN)
    executor = open_at(made.base, "reference")
    with pytest.raises(Unsupported, match="target_parameters"):
        executor.load_lora(made.adapter)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_computes_what_peft_does(kind: str, tmp_path: Path) -> None:
    made = tuned(tmp_path, "gemma3" if "embedding" in kind else "llama", **KINDS[kind])
    computes_what_peft_does(made, 0.05)


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
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_gguf_files_take_the_adapters_of_their_originals(family: str, dora: bool, tmp_path: Path) -> None:
    """q and k of some of them stand in neighbouring pairs; an adapter written for the original must follow them."""
    path = write_gguf(random_model(family), ARCHITECTURES[family], tmp_path / "model.gguf")
    made = tuned(tmp_path, family, use_dora=dora)
    executor = open_at(path, "native")
    close(logits_of(executor, executor.load_lora(made.adapter)), made.logits[10:])
    executor.close()


# DoRA.


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma3"])
def test_dora_beside_biases_fused_maps_and_norms(family: str, tmp_path: Path) -> None:
    """What an output holds besides its map's product, a bias or a residual, does not grow with it."""
    made = tuned(tmp_path, family, use_dora=True)
    computes_what_peft_does(made, 0.05)


def test_dora_of_the_head(tmp_path: Path) -> None:
    made = tuned(tmp_path, "qwen3", use_dora=True, target_modules=["lm_head", "v_proj"])
    for backend in CPU_BACKENDS:
        executor = open_at(made.base, backend)
        close(logits_of(executor, executor.load_lora(made.adapter)), made.logits[10:])
        executor.close()


def test_a_scale_weighs_what_dora_changes(tmp_path: Path) -> None:
    made = tuned(tmp_path, "llama", use_dora=True, target_modules=["v_proj"], layers_to_transform=[2])
    executor = open_at(made.base, "native")
    adapter = executor.load_lora(made.adapter)
    base, half, whole = (logits_of(executor, adapter, lora_scale=scale) for scale in (0.0, 0.5, 1.0))
    assert torch.equal(base, logits_of(executor))
    assert (half - base).abs().max() > 0.01
    assert (half - whole).abs().max() > 0.01
    close(whole, made.logits[10:])
    executor.close()


def test_dora_rows_and_their_neighbours_keep_their_bits(tmp_path: Path) -> None:
    executor = open_at(tuned(tmp_path / "x", "qwen2").base, "native")
    loras = [
        executor.load_lora(tuned(tmp_path / name, "qwen2", use_dora=name != "plain", r=rank).adapter, name)
        for name, rank in (("one", 3), ("two", 8), ("plain", 5))
    ]
    chosen = [Base(), *(executor.adapters.choose(one) for one in loras), executor.adapters.choose("one", 0.5)]
    alone = []
    for adapter in chosen:
        with executor.create_kv_cache() as kv:
            alone.append(_run(executor, [(kv, adapter)])[0])
    caches = [executor.create_kv_cache() for _ in chosen]
    together = _run(executor, list(zip(caches, chosen, strict=True)))
    assert all(map(torch.equal, alone, together))
    assert all(not torch.equal(one, alone[0]) for one in alone[1:])
    for kv in caches:
        kv.close()
    executor.close()


def _run(executor: Executor, rows: list[tuple[KVCache, Adapter]]) -> list[Tensor]:
    """Logits of all rows: a prefill in two pieces, then decodes."""
    found: list[list[Tensor]] = [[] for _ in rows]
    for start, stop in ((0, 5), (5, 10), *((i, i + 1) for i in range(10, len(IDS)))):
        made = []
        for kv, adapter in rows:
            kv.reserve(stop - start)
            made.append(Row(Ids(IDS[start:stop]), range(start, stop), kv, adapter=adapter))
        logits = executor.run(Batch.of(made))
        for index, (kv, _) in enumerate(rows):
            found[index].append(logits.of_row(index))
            kv.commit([IDS[start:stop]])
    return [torch.cat(one) for one in found]


# Adapters in GGUF.


def write_gguf_lora(adapter: Path, family: str, path: Path, model: Any, kind: Any = None, **fields: Any) -> Path:
    """A PEFT folder as llama.cpp's converter writes it: its names, q and k in the model's order."""
    arch = ARCHITECTURES[family]
    config = json.loads((adapter / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]))
    if tokens := fields.get("invocation"):
        writer.add_array("adapter.alora.invocation_tokens", tokens)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, _, half = name.removeprefix("base_model.model.").rpartition(".lora_")
        data = tensor.float().numpy()
        if arch in PERMUTED and half.startswith("B") and module.endswith(("q_proj", "k_proj")):
            heads = model.config.num_attention_heads if "q_proj" in module else model.config.num_key_value_heads
            data = interleave(data, heads)
        own = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        data = np.ascontiguousarray(data)
        if kind is not None and data.shape[-1] % 32 == 0:
            writer.add_tensor(f"{own}.lora_{half[0].lower()}", gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{own}.lora_{half[0].lower()}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["llama", "smollm3", "phi3", "qwen2", "qwen3"])
def test_adapters_in_gguf_are_the_same_adapters(family: str, tmp_path: Path) -> None:
    """On the GGUF and on the original: an adapter's outputs stand where its model has them."""
    model = random_model(family)
    made = tuned(tmp_path, family)
    path = write_gguf(random_model(family), ARCHITECTURES[family], tmp_path / "model.gguf")
    lora = write_gguf_lora(made.adapter, family, tmp_path / "small.gguf", model)
    for base in (path, made.base):
        executor = open_at(base, "native")
        found, same = executor.load_lora(lora), executor.load_lora(made.adapter)
        assert executor.adapters.find(found).name == "small"
        assert torch.equal(logits_of(executor, found), logits_of(executor, same))
        close(logits_of(executor, found), made.logits[10:])
        executor.close()


def test_packed_and_half_adapters_in_gguf(tmp_path: Path) -> None:
    made = tuned(tmp_path, "llama", r=32)
    executor = open_at(made.base, "native")
    for kind, near in ((gguf.GGMLQuantizationType.F16, 0.02), (gguf.GGMLQuantizationType.Q8_0, 0.3)):
        path = write_gguf_lora(made.adapter, "llama", tmp_path / f"{kind.name}.gguf", random_model("llama"), kind)
        found = logits_of(executor, executor.load_lora(path))
        assert (found - made.logits[10:]).abs().max() < near * made.logits.abs().max()
    executor.close()


def test_a_gguf_adapter_that_tokens_switch_on(tmp_path: Path) -> None:
    made = tuned(tmp_path, "llama", alora_invocation_tokens=IDS[4:6])
    path = write_gguf_lora(made.adapter, "llama", tmp_path / "a.gguf", random_model("llama"), invocation=IDS[4:6])
    executor = open_at(made.base, "native")
    found, same = executor.load_lora(path), executor.load_lora(made.adapter)
    assert executor.adapters.find(found).invocation == tuple(IDS[4:6])
    assert torch.equal(logits_of(executor, found), logits_of(executor, same))
    executor.close()


def test_adapters_of_single_heads_projections_are_refused_by_name(tmp_path: Path) -> None:
    made = tuned(tmp_path, "deepseek-v2", target_modules=["kv_b_proj"])
    with pytest.raises(WeightError, match="kv_b_proj"):
        open_at(made.base, "reference").load_lora(made.adapter)
