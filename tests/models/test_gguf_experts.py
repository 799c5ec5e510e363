"""Families with experts as GGUF files, whose tensors hold the maps of all experts, against transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import random_model
from model_results import Shows
from test_gguf_dialects import close, interleave, write_rope
from transformers import PreTrainedModel

from kvilt.config import RunConfig
from kvilt.errors import WeightError
from kvilt.executor.load import load_executor
from kvilt.models.assemble import read_spec
from kvilt.models.spec import ExpertsSpec
from kvilt.weights.source import open_checkpoint

ARCHITECTURES = {
    "qwen3-moe-normalized": "qwen3moe",
    "qwen2-moe-plain": "qwen2moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "llama4-as-published": "llama4",
    "glm4-moe": "glm4moe",
    "ernie4-5-moe": "ernie4_5-moe",
    "gpt-oss": "gpt-oss",
}
# What llama.cpp's converter calls the tensors of a layer.
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}


def layer_name(name: str, arch: str) -> str:
    """The same tensor in a GGUF, without its layer."""
    name = name.replace("feed_forward.", "mlp.")  # Llama 4
    if name == "post_attention_layernorm.weight":
        return "post_attention_norm.weight" if arch in ("glm4moe", "gpt-oss") else "ffn_norm.weight"
    for theirs, ours in NAMES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    name = re.sub(
        r"self_attn\.([qkv])_(proj|norm)", lambda m: f"attn_{m[1]}" + ("_norm" if m[2] == "norm" else ""), name
    )
    name = re.sub(r"mlp\.shared_experts?\.(gate|up|down)_proj", r"ffn_\1_shexp", name)
    return re.sub(r"mlp\.(gate|up|down)_proj", r"ffn_\1", name)


def expert_tensors(name: str, data: np.ndarray, arch: str) -> dict[str, np.ndarray]:
    """The maps that a stacked tensor of transformers holds, [experts, outputs, inputs] each."""
    kind = "bias" if name.endswith("_bias") else "weight"
    if arch in ("gpt-oss", "llama4") and kind == "weight":
        data = data.swapaxes(1, 2)
    halves = (data[:, 0::2], data[:, 1::2]) if arch == "gpt-oss" else tuple(np.split(data, 2, axis=1))
    if "down_proj" in name:
        return {f"ffn_down_exps.{kind}": data}
    return {f"ffn_gate_exps.{kind}": halves[0], f"ffn_up_exps.{kind}": halves[1]}


def write_fields(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size_mlp", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    write_rope(writer, config, head_dim)
    writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if arch not in ("llama", "olmoe"):
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    match arch:
        case "qwen2moe":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        case "glm4moe":
            writer.add_expert_shared_count(config.n_shared_experts)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_expert_weights_norm(config.norm_topk_prob)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_leading_dense_block_count(config.first_k_dense_replace)
        case "ernie4_5-moe":
            writer.add_expert_shared_count(config.moe_num_shared_experts)
            writer.add_leading_dense_block_count(config.moe_layer_start_index)
        case "llama4":
            writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
        case "gpt-oss":
            writer.add_sliding_window(config.sliding_window)


def write_experts(model: PreTrainedModel, arch: str, path: Path) -> Path:
    """The model as llama.cpp's converter writes it."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    write_fields(writer, config, arch)
    plain = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in model.state_dict().items():
        data, layer = tensor.float().numpy(), re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if layer is None:
            if not (name.startswith("lm_head") and config.tie_word_embeddings):
                writer.add_tensor(plain[name.removesuffix(".weight")] + ".weight", data)
            continue
        if arch == "llama" and layer[2].endswith(("q_proj.weight", "k_proj.weight")):
            data = interleave(data, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        own = {layer_name(layer[2], arch): data}
        if ".experts." in name:
            own = expert_tensors(name, data, arch)
        for part, values in own.items():
            writer.add_tensor(f"blk.{layer[1]}.{part}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_gguf_with_experts_gives_the_logits_of_its_checkpoint(tmp_path: Path, name: str, shows: Shows) -> None:
    model, arch = random_model(name), ARCHITECTURES[name]
    shows("gguf", type(model).__name__, f"{name} {arch}")
    close(write_experts(model, arch, tmp_path / "model.gguf"), model)


def test_experts_that_are_missing_or_misshapen_are_named(tmp_path: Path) -> None:
    model = random_model("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj[:, :, :40].clone())
    with pytest.raises(WeightError, match=r"blk\.1\.ffn_down_exps\.weight is \[4, 32, 40\] instead of \[4, 32, 48\]"):
        load_executor(write_experts(model, "llama", tmp_path / "model.gguf"), RunConfig(kv_memory=1 << 22))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """A GLM whose last layer is one of these: the file counts it, and its tensors may be there."""
    path = write_experts(random_model("glm4-moe"), "glm4moe", tmp_path / "model.gguf")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "more.gguf", "glm4moe")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "glm4moe.block_count")):
            value = field.contents()
            add = {bool: writer.add_bool, float: writer.add_float32}.get(type(value), writer.add_uint32)
            add(field.name, value)
    writer.add_block_count(4)
    writer.add_uint32("glm4moe.nextn_predict_layers", 1)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("blk.3.nextn.eh_proj.weight", np.zeros((32, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spec = read_spec(open_checkpoint(tmp_path / "more.gguf"))
    assert [isinstance(layer.feed_forward, ExpertsSpec) for layer in spec.layers] == [False, True, True]
    close(tmp_path / "more.gguf", random_model("glm4-moe"))
