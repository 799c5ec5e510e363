"""Families with recurrent state as GGUF files, written as llama.cpp's converter writes them, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from families import random_model
from model_results import Shows
from safetensors.numpy import load_file
from test_gguf_dialects import close, interleave, write_multipliers, write_rope
from transformers import PreTrainedModel

from kvilt.config import RunConfig
from kvilt.errors import Unsupported, WeightError
from kvilt.executor.load import load_executor

ARCHITECTURES = {
    "granite-hybrid": "granitehybrid",
    "granite-hybrid-moe": "granitehybrid",
    "lfm2": "lfm2",
    "lfm2-untied": "lfm2",
    "lfm2-moe": "lfm2moe",
}
ARCHS = {gguf.MODEL_ARCH_NAMES[arch]: arch for arch in gguf.MODEL_ARCH}
Tensors = dict[str, np.ndarray]


def kv_heads(config: Any) -> list[int]:
    """None in the layers without attention."""
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def write_fields(writer: gguf.GGUFWriter, config: Any) -> None:
    """What the converter writes of every model."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    write_rope(writer, config, head_dim)


def mamba2(name: str, data: np.ndarray, tensors: Tensors) -> None:
    """A tensor of a Mamba-2 block; each group's part of the norm is a row of its own."""
    match name.rpartition(".mamba.")[2]:
        case "A_log":
            tensors[name] = -np.exp(data)[:, None]
        case "D":
            tensors[name] = data[:, None]
        case "dt_bias":
            tensors[name.replace("dt_bias", "dt_proj.bias")] = data
        case "conv1d.weight":
            tensors[name] = data.squeeze()
        case "norm.weight":
            tensors[name] = data[None]
        case _:
            tensors[name] = data


def granite_hybrid(writer: gguf.GGUFWriter, config: Any, given: Tensors) -> Tensors:
    writer.add_feed_forward_length(config.intermediate_size if config.num_local_experts else 20)
    writer.add_head_count_kv(kv_heads(config))
    write_multipliers(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    tensors: Tensors = {}
    for name, data in given.items():
        layer, _, part = name.rpartition("shared_mlp.")
        if part == "input_linear.weight":
            own = "mlp.{}_proj" if not config.num_local_experts else "mlp.shared_experts.{}_proj"
            for half, values in zip(("gate", "up"), np.split(data, 2), strict=True):
                tensors[f"{layer}{own.format(half)}.weight"] = values
        elif part == "output_linear.weight":
            own = "mlp.shared_experts.down_proj" if config.num_local_experts else "mlp.down_proj"
            tensors[f"{layer}{own}.weight"] = data
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            for half, values in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
                tensors[name.replace("block_sparse_moe.input_linear", f"mlp.experts.{half}_proj")] = values
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensors[name] = interleave(data, heads)
        else:
            mamba2(name, data, tensors)
    return tensors


def lfm2(writer: gguf.GGUFWriter, config: Any, given: Tensors) -> Tensors:
    writer.add_feed_forward_length(len(given["model.layers.0.feed_forward.w1.weight"]))
    writer.add_head_count_kv(kv_heads(config))
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    return {name: data.squeeze(1) if "conv.conv" in name else data for name, data in given.items()}


def lfm2_moe(writer: gguf.GGUFWriter, config: Any, given: Tensors) -> Tensors:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    renamed = {name.replace("expert_bias", "expert_bias.bias"): data for name, data in given.items()}
    tensors = stacked(lfm2(writer, config, renamed), config.num_experts)
    return {name.removeprefix("model.") if ".experts." in name else name: data for name, data in tensors.items()}


def stacked(given: Tensors, experts: int) -> Tensors:
    """The maps of all experts in one tensor."""
    tensors: Tensors = {}
    for name, data in given.items():
        if ".experts." not in name:
            tensors[name] = data
        elif ".experts.0." in name:
            each = [given[name.replace(".experts.0.", f".experts.{e}.")] for e in range(experts)]
            tensors[name.replace(".experts.0.", ".experts.")] = np.stack(each)
    return tensors


CONVERTERS: dict[str, Callable[[gguf.GGUFWriter, Any, Tensors], Tensors]] = {
    "granitehybrid": granite_hybrid,
    "lfm2": lfm2,
    "lfm2moe": lfm2_moe,
}


def write_hybrid(
    model: PreTrainedModel, arch: str, path: Path, extra: Callable[[gguf.GGUFWriter, Tensors], Any] | None = None
) -> Path:
    """The model as llama.cpp's converter writes it, from the tensors of its safetensors; `extra` may change them."""
    model.save_pretrained(path.with_suffix(""))
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    write_fields(writer, config)
    tensors = CONVERTERS[arch](writer, config, load_file(path.with_suffix("") / "model.safetensors"))
    names = gguf.get_tensor_name_map(ARCHS[arch], config.num_hidden_layers)
    mapped = {name_of(names, name): data for name, data in tensors.items()}
    if extra is not None:
        extra(writer, mapped)
    for name, data in mapped.items():
        writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def name_of(names: gguf.TensorNameMap, name: str) -> str:
    """In the file."""
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_gguf_with_state_gives_the_logits_of_its_checkpoint(tmp_path: Path, name: str, shows: Shows) -> None:
    model, arch = random_model(name), ARCHITECTURES[name]
    shows("gguf", type(model).__name__, f"{name} {arch}")
    close(write_hybrid(model, arch, tmp_path / "model.gguf"), model)


def test_a_state_that_does_not_decay_is_refused(tmp_path: Path) -> None:
    def grows(_writer: gguf.GGUFWriter, tensors: Tensors) -> None:
        tensors["blk.0.ssm_a"][1] = 0.5

    path = write_hybrid(random_model("granite-hybrid"), "granitehybrid", tmp_path / "model.gguf", grows)
    with pytest.raises(WeightError, match="ssm_a: must be below 0"):
        load_executor(path, RunConfig(kv_memory=1 << 22))


def test_what_llama_cpp_and_transformers_compute_differently_is_refused(tmp_path: Path) -> None:
    def two_groups(writer: gguf.GGUFWriter, _tensors: Tensors) -> None:
        writer.add_ssm_group_count(2)

    path = write_hybrid(random_model("granite-hybrid"), "granitehybrid", tmp_path / "model.gguf", two_groups)
    with pytest.raises(Unsupported, match="2 groups"):
        load_executor(path, RunConfig(kv_memory=1 << 22))


def test_kv_heads_that_differ_between_layers_are_refused(tmp_path: Path) -> None:
    def differ(writer: gguf.GGUFWriter, _tensors: Tensors) -> None:
        writer.add_head_count_kv([1, 2, 0])

    path = write_hybrid(random_model("lfm2"), "lfm2", tmp_path / "model.gguf", differ)
    with pytest.raises(Unsupported, match="different numbers of KV heads"):
        load_executor(path, RunConfig(kv_memory=1 << 22))
