"""Families with recurrent state as GGUF files, written as llama.cpp's converter writes them, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import random_model
from model_results import Shows
from safetensors.numpy import load_file
from test_gguf_dialects import close, interleave, write_multipliers, write_rope
from transformers import PreTrainedModel

from kvilt.config import RunConfig
from kvilt.errors import Unsupported, WeightError
from kvilt.executor.load import load_executor

ARCHITECTURES = {
    "falcon-h1": "falcon-h1",
    "falcon-h1-gate-first": "falcon-h1",
    "nemotron-h": "nemotron_h",
    "nemotron-h-moe": "nemotron_h_moe",
    "granite-hybrid": "granitehybrid",
    "granite-hybrid-moe": "granitehybrid",
    "lfm2": "lfm2",
    "lfm2-untied": "lfm2",
    "lfm2-moe": "lfm2moe",
    "qwen3-next-experts": "qwen3next",
    "qwen3.5": "qwen35",
    "qwen3.5-moe": "qwen35moe",
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
    names = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    writer.add_layer_norm_rms_eps(next(getattr(config, name) for name in names if hasattr(config, name)))
    if hasattr(config, "rope_parameters"):
        write_rope(writer, config, head_dim)


def mamba2(name: str, data: np.ndarray, tensors: Tensors, groups: int) -> None:
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
            tensors[name] = data.reshape(groups, -1)
        case _:
            tensors[name] = data


def granite_hybrid(writer: gguf.GGUFWriter, config: Any, given: Tensors) -> Tensors:
    writer.add_feed_forward_length(config.intermediate_size if config.num_local_experts else 20)
    writer.add_head_count_kv(kv_heads(config))
    write_multipliers(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok if config.num_local_experts else 0)
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
            mamba2(name, data, tensors, config.mamba_n_groups)
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


def write_delta(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(3)


def write_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def gated_delta(given: Tensors) -> Tensors:
    """Norms whose weights are offsets from 1, as whole weights; decays as they are used; convolutions as matrices."""
    tensors: Tensors = {}
    for name, data in given.items():
        if name.endswith(".A_log"):
            tensors[name] = -np.exp(data)
        elif name.endswith(".dt_bias"):
            tensors[name.replace("dt_bias", "dt_proj.bias")] = data
        elif "conv1d" in name:
            tensors[name] = data.squeeze()
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensors[name] = data + 1
        else:
            tensors[name] = data
    return tensors


def qwen3_next(writer: gguf.GGUFWriter, config: Any, given: Tensors) -> Tensors:
    writer.add_feed_forward_length(config.intermediate_size)
    write_delta(writer, config)
    write_experts(writer, config)
    tensors, keys = gated_delta(given), config.linear_num_key_heads
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    cuts = np.cumsum([config.linear_key_head_dim, config.linear_key_head_dim, values])
    for name in [name for name in tensors if "in_proj_qkvz" in name]:  # from head by head to kind by kind
        data = tensors.pop(name)
        parts = np.split(data.reshape(keys, -1, data.shape[1]), cuts, axis=1)
        *qkv, z = (part.reshape(-1, data.shape[1]) for part in parts)
        tensors[name.replace("in_proj_qkvz", "in_proj_qkv")] = np.concatenate(qkv)
        tensors[name.replace("in_proj_qkvz", "in_proj_z")] = z
    return stacked(tensors, config.num_experts)


def tiled(data: np.ndarray, config: Any, dim: int, axis: int = 0) -> np.ndarray:
    """Value heads that follow each other by their key head, reordered so that they take the key heads in turn."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    shape = (*data.shape[:axis], keys, values // keys, dim, *data.shape[axis + 1 :])
    return data.reshape(shape).swapaxes(axis, axis + 1).reshape(data.shape)


def qwen3_5(writer: gguf.GGUFWriter, config: Any, given: Tensors) -> Tensors:
    if not hasattr(config, "num_experts"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    write_delta(writer, config)
    dim, keys = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    for name, data in given.items():
        match name.rpartition(".linear_attn.")[2]:
            case "in_proj_qkv.weight" | "conv1d.weight":
                given[name] = np.concatenate((data[:keys], tiled(data[keys:], config, dim)))
            case "in_proj_z.weight":
                given[name] = tiled(data, config, dim)
            case "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias":
                given[name] = tiled(data, config, 1)
            case "out_proj.weight":
                given[name] = tiled(data, config, dim, axis=1)
    return gated_delta(given)


def qwen3_5_moe(writer: gguf.GGUFWriter, config: Any, given: Tensors) -> Tensors:
    write_experts(writer, config)
    return stacked(qwen3_5(writer, config, given), config.num_experts)


def falcon_h1(writer: gguf.GGUFWriter, config: Any, given: Tensors) -> Tensors:
    """All multipliers go into the weights."""
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    keys, inner = config.mamba_n_groups * config.mamba_d_state, config.mamba_n_heads * config.mamba_d_head
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    parts = np.repeat(config.ssm_multipliers, [inner, inner, keys, keys, config.mamba_n_heads])
    factors = {
        "in_proj.weight": (config.ssm_in_multiplier * parts)[:, None],
        "out_proj.weight": config.ssm_out_multiplier,
        "q_proj.weight": config.attention_in_multiplier,
        "k_proj.weight": config.attention_in_multiplier * config.key_multiplier,
        "v_proj.weight": config.attention_in_multiplier,
        "o_proj.weight": config.attention_out_multiplier,
        "gate_proj.weight": config.mlp_multipliers[0],
        "down_proj.weight": config.mlp_multipliers[1],
        "lm_head.weight": config.lm_head_multiplier,
        "embed_tokens.weight": config.embedding_multiplier,
    }
    tensors: Tensors = {}
    for name, data in given.items():
        factor = factors.get(".".join(name.split(".")[-2:]), 1.0)
        mamba2(name, (data * factor).astype(np.float32), tensors, config.mamba_n_groups)
    return tensors


def nemotron_h(writer: gguf.GGUFWriter, config: Any, given: Tensors) -> Tensors:
    kinds = config.layers_block_type
    widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_feed_forward_length([widths.get(kind, 0) for kind in kinds])
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    tensors: Tensors = {}
    for name, data in given.items():
        match name.rpartition(".mixer.")[2]:
            case "A_log":
                tensors[name] = -np.exp(data)[:, None]
            case "D":
                tensors[name] = data[:, None]
            case "dt_bias":
                tensors[name.replace("dt_bias", "dt.bias")] = data
            case "conv1d.weight":
                tensors[name] = data.squeeze()
            case "norm.weight":
                tensors[name] = data.reshape(config.n_groups, -1)
            case "gate.e_score_correction_bias":
                tensors[name.replace("_correction_bias", "_correction.bias")] = data
            case _:
                tensors[name] = data
    return tensors


def nemotron_h_moe(writer: gguf.GGUFWriter, config: Any, given: Tensors) -> Tensors:
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    tensors = stacked(nemotron_h(writer, config, given), config.n_routed_experts)
    return {
        name.replace("backbone", "model").replace("mixer.experts", "mlp.experts") if ".experts." in name else name: data
        for name, data in tensors.items()
    }


CONVERTERS: dict[str, Callable[[gguf.GGUFWriter, Any, Tensors], Tensors]] = {
    "falcon-h1": falcon_h1,
    "granitehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h_moe,
    "lfm2": lfm2,
    "lfm2moe": lfm2_moe,
    "qwen3next": qwen3_next,
    "qwen35": qwen3_5,
    "qwen35moe": qwen3_5_moe,
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


def rewritten(change: Callable[[Tensors, int], Any]) -> Callable[[gguf.GGUFWriter, Tensors], None]:
    """What changes the tensors of each layer."""

    def extra(_writer: gguf.GGUFWriter, tensors: Tensors) -> None:
        for layer in range(4):
            change(tensors, layer)

    return extra


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_gguf_with_state_gives_the_logits_of_its_checkpoint(tmp_path: Path, name: str, shows: Shows) -> None:
    model, arch = random_model(name), ARCHITECTURES[name]
    shows("gguf", type(model).__name__, f"{name} {arch}")
    close(write_hybrid(model, arch, tmp_path / "model.gguf"), model)


def test_gates_and_ups_of_experts_in_one_tensor(tmp_path: Path) -> None:
    def joined(tensors: Tensors, layer: int) -> None:
        halves = [tensors.pop(f"blk.{layer}.ffn_{half}_exps.weight") for half in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(halves, axis=1)

    model = random_model("qwen3.5-moe")
    close(write_hybrid(model, "qwen35moe", tmp_path / "model.gguf", rewritten(joined)), model)


def test_a_qwen3_next_with_one_tensor_of_queries_keys_values_and_gates(tmp_path: Path) -> None:
    """As older files have it, head by head."""
    model = random_model("qwen3-next-experts")

    def older(tensors: Tensors, layer: int) -> None:
        if tensors.pop(f"blk.{layer}.attn_qkv.weight", None) is not None:
            tensors.pop(f"blk.{layer}.attn_gate.weight")
            own = model.model.layers[layer].linear_attn.in_proj_qkvz.weight
            tensors[f"blk.{layer}.ssm_in.weight"] = own.detach().numpy()

    close(write_hybrid(model, "qwen3next", tmp_path / "model.gguf", rewritten(older)), model)


def test_layers_that_predict_further_tokens_and_a_list_of_recurrent_layers(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter, tensors: Tensors) -> None:
        writer.add_block_count(5)
        writer.add_uint32("qwen35.nextn_predict_layers", 1)
        writer.add_full_attention_interval(2)  # which the list overrules
        writer.add_array("qwen35.attention.recurrent_layers", [True, True, False, True, False])
        tensors["blk.4.nextn.eh_proj.weight"] = np.zeros((32, 64), dtype=np.float32)

    model = random_model("qwen3.5")
    close(write_hybrid(model, "qwen35", tmp_path / "model.gguf", more), model)


def test_a_state_that_does_not_decay_is_refused(tmp_path: Path) -> None:
    def grows(_writer: gguf.GGUFWriter, tensors: Tensors) -> None:
        tensors["blk.0.ssm_a"][1] = 0.5

    path = write_hybrid(random_model("granite-hybrid"), "granitehybrid", tmp_path / "model.gguf", grows)
    with pytest.raises(WeightError, match="ssm_a: must be below 0"):
        load_executor(path, RunConfig(kv_memory=1 << 22))


class GroupNorms(torch.nn.Module):
    """Norms each group for itself, behind the gate, as llama.cpp does; transformers norms all of them together."""

    def __init__(self, norm: torch.nn.Module, groups: int) -> None:
        super().__init__()
        self.weight, self.eps, self.groups = norm.weight, norm.variance_epsilon, groups

    def forward(self, states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = states * torch.nn.functional.silu(gate)
        parts = gated.unflatten(-1, (self.groups, -1))
        normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.flatten(-2)


def test_several_groups_of_granite_are_normed_as_by_llama_cpp(tmp_path: Path) -> None:
    model = random_model("granite-hybrid-groups")
    path = write_hybrid(model, "granitehybrid", tmp_path / "model.gguf")
    for layer in model.model.layers:
        if getattr(layer, "mamba", None) is not None:
            layer.mamba.norm = GroupNorms(layer.mamba.norm, 2)
    close(path, model)


def test_experts_that_read_a_compressed_vector_are_refused(tmp_path: Path) -> None:
    def latent(writer: gguf.GGUFWriter, _tensors: Tensors) -> None:
        writer.add_moe_latent_size(8)

    path = write_hybrid(random_model("nemotron-h-moe"), "nemotron_h_moe", tmp_path / "model.gguf", latent)
    with pytest.raises(Unsupported, match="moe_latent_size"):
        load_executor(path, RunConfig(kv_memory=1 << 22))


def test_kv_heads_that_differ_between_layers_are_refused(tmp_path: Path) -> None:
    def differ(writer: gguf.GGUFWriter, _tensors: Tensors) -> None:
        writer.add_head_count_kv([1, 2, 0])

    path = write_hybrid(random_model("lfm2"), "lfm2", tmp_path / "model.gguf", differ)
    with pytest.raises(Unsupported, match="different numbers of KV heads"):
        load_executor(path, RunConfig(kv_memory=1 << 22))
