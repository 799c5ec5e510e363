"""Latent attention beside what the one runner of families shows: GGUF files, bits, what pages keep, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import FAMILIES, SMALL, random_model, write_checkpoint
from model_results import Shows
from safetensors.torch import load_file, save_file
from test_checkpoints import edit_config
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

from kvilt.compat.facts import capabilities_of
from kvilt.config import RunConfig
from kvilt.errors import Unsupported
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.kv.layout import Latent
from kvilt.models.assemble import read_spec
from kvilt.weights.source import open_checkpoint

IDS = [int(i) for i in torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(7))]
WIDE = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 16, "rms_norm_eps": 1e-6}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def wide_model(v3: bool = False, **changes: Any) -> PreTrainedModel:
    """Sizes that blocks of 32 fit into."""
    torch.manual_seed(5)
    own = WIDE | {"num_key_value_heads": 4, "q_lora_rank": None, "first_k_dense_replace": 3} | changes
    if not v3:
        return DeepseekV2ForCausalLM(DeepseekV2Config(**SMALL | own)).eval()
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL | own)).eval()
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.add_(torch.randn_like(bias))
    return model


Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(model: PreTrainedModel, path: Path, cut: bool, packed: bool | None = None) -> Path:
    """As llama.cpp's converter does: the projections of heads `cut` into two tensors, or whole as by older ones.

    `packed`: whether these are packed as Q8_0, or the floats that this stands for; None: as they are.
    """
    config, writer = model.config, gguf.GGUFWriter(path, "deepseek2")
    rank, rope, plain = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if cut else config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(rope)
    writer.add_key_length(rank + rope if cut else plain + rope)
    writer.add_value_length(rank if cut else config.v_head_dim)
    if cut:
        writer.add_key_length_mla(plain + rope)
        writer.add_value_length_mla(config.v_head_dim)
    write_yarn(writer, config.rope_parameters)
    write_experts(writer, config)
    for name, tensor in model.state_dict().items():
        for own, data in named(name.removesuffix(".weight"), tensor.float().numpy(), config, cut):
            data = np.ascontiguousarray(data)
            if packed is None or not own.endswith("_b"):
                writer.add_tensor(own if own.endswith(".bias") else f"{own}.weight", data)
                continue
            blocks = gguf.quants.quantize(data, Q8_0)
            if packed:
                writer.add_tensor(f"{own}.weight", blocks, raw_dtype=Q8_0)
            else:
                writer.add_tensor(f"{own}.weight", gguf.quants.dequantize(blocks, Q8_0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_yarn(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def write_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.first_k_dense_replace == config.num_hidden_layers:
        return
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type == "deepseek_v3":
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def named(name: str, data: np.ndarray, config: Any, cut: bool) -> list[tuple[str, np.ndarray]]:
    """What a tensor is called, or its parts are."""
    if name in TOP:
        return [(TOP[name], data)]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    if part == "mlp.experts.gate_up_proj":
        gates, ups = np.split(data, 2, axis=1)
        return [(f"blk.{layer}.ffn_gate_exps", gates), (f"blk.{layer}.ffn_up_exps", ups)]
    if part == "mlp.gate.e_score_correction_bias":
        return [(f"blk.{layer}.exp_probs_b.bias", data)]
    if part != "self_attn.kv_b_proj":
        return [(f"blk.{layer}.{NAMES[part]}", data)]
    if not cut:
        return [(f"blk.{layer}.attn_kv_b", data)]
    by_head = data.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = by_head[:, : config.qk_nope_head_dim], by_head[:, config.qk_nope_head_dim :]
    return [(f"blk.{layer}.attn_k_b", keys.swapaxes(1, 2)), (f"blk.{layer}.attn_v_b", values)]


def load(path: Path, **config: Any) -> Executor:
    return load_executor(path, RunConfig(kv_memory=1 << 24, **{"kv_dtype": "float32"} | config))


def logits(path: Path, ids: list[int], **config: Any) -> torch.Tensor:
    executor = load(path, **config)
    with executor.create_kv_cache() as kv:
        return executor.step(ids, kv)[0]


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
GGUF_MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v2-plain-queries": {},
    "deepseek-v2-compressed-queries": {"q_lora_rank": 24},
    "deepseek-v2-yarn": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    "deepseek-v2-experts": EXPERTS,
    "deepseek-v3-experts": EXPERTS | {"v3": True, "n_group": 3, "topk_group": 2},
}


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize("name", GGUF_MODELS)
def test_a_gguf_gives_the_logits_of_the_checkpoint_it_was_made_from(
    tmp_path: Path, name: str, cut: bool, shows: Shows
) -> None:
    model = wide_model(**GGUF_MODELS[name])
    shows("gguf", type(model).__name__, f"{name} deepseek2")
    path = write_gguf(model, tmp_path / "model.gguf", cut)
    with torch.no_grad():
        theirs = model(torch.tensor([IDS])).logits[0, -1]
    torch.testing.assert_close(logits(path, IDS), theirs, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
def test_packed_projections_of_heads_are_multiplied_as_floats(tmp_path: Path, cut: bool) -> None:
    model = wide_model()
    paths = [write_gguf(model, tmp_path / f"{packed}.gguf", cut, packed) for packed in (True, False, None)]
    packed, floats, exact = (logits(path, IDS) for path in paths)
    assert torch.equal(packed, floats)
    assert not torch.equal(packed, exact)


def test_a_checkpoint_in_blocks_of_8_bit_floats_runs(tmp_path: Path) -> None:
    """As V3 is published; the compressed vector and the rotated part of keys lie in one tensor of whole blocks."""
    folder = write_checkpoint(wide_model(v3=True, **EXPERTS, kv_lora_rank=128, n_group=1, topk_group=1), tmp_path)
    path, found = folder / "model.safetensors", []
    tensors = load_file(path)
    packed, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("proj.weight", "with_mqa.weight"))]:
        rows, columns = (-(-size // 128) for size in tensors[name].shape)
        scales = torch.linspace(0.01, 0.02, rows * columns).view(rows, columns)
        each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[
            : len(tensors[name]), : tensors[name].shape[1]
        ]
        codes = (tensors[name] / each).to(torch.float8_e4m3fn)
        packed |= {name: codes, f"{name}_scale_inv": scales}
        plain[name] = codes.float() * each
    for written in (packed, plain):
        save_file(written, path)
        found.append(logits(folder, IDS, backend="reference"))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


def test_pages_keep_one_compressed_vector_and_a_rotated_part(tmp_path: Path) -> None:
    executor = load(write_checkpoint(random_model("deepseek-v2"), tmp_path))
    (group,) = executor.layout.groups
    assert group.reach == Latent(8)
    assert (group.shape.kv_heads, group.shape.key_dim, group.shape.value_dim) == (1, 8, 20)
    assert group.shape.token_bytes == 3 * 4 * (8 + 20)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
def test_chunks_and_batches_change_no_bit_on_native(tmp_path: Path, kv_dtype: str) -> None:
    executor = load(
        write_checkpoint(random_model("deepseek-v3-halves"), tmp_path), backend="native", kv_dtype=kv_dtype, threads=2
    )
    with executor.create_kv_cache() as kv:
        whole = executor.step(IDS, kv)[0].clone()
    for cut in (1, 33):
        with executor.create_kv_cache(batch_size=2) as kv:
            for start in range(0, len(IDS) - 1, cut):
                part = IDS[start : min(start + cut, len(IDS) - 1)]
                executor.prefill([part, part[:3]], kv)
            assert torch.equal(executor.step([[IDS[-1]], [4]], kv)[0], whole)


def test_saved_kv_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    executor = load(write_checkpoint(random_model("deepseek-v2"), tmp_path))
    with executor.create_kv_cache() as kv, executor.create_kv_cache() as other:
        executor.prefill(IDS[:40], kv)
        other.load(kv.serialize())
        assert torch.equal(executor.step([9], other), executor.step([9], kv))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("deepseek-v2", "attention_bias", True),
        ("deepseek-v2", "norm_topk_prob", True),
        ("deepseek-v2", "partial_rotary_factor", 0.5),
        ("deepseek-v2", "topk_method", "noaux_tc"),
        ("deepseek-v3", "scoring_func", "softmax"),
        ("deepseek-v3", "moe_layer_freq", 2),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, name: str, field: str, value: object) -> None:
    folder = write_checkpoint(FAMILIES[name](), tmp_path)
    edit_config(folder, lambda config: config.update({field: value}))
    with pytest.raises(Unsupported, match=field):
        read_spec(open_checkpoint(folder))


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    """Its config has a model type of its own, one group of experts, and the architecture of DeepSeek V3."""
    folder = write_checkpoint(wide_model(v3=True, **EXPERTS, n_group=1, topk_group=1), tmp_path)
    with torch.no_grad():
        theirs = DeepseekV3ForCausalLM.from_pretrained(folder)(torch.tensor([IDS])).logits[0, -1]
    own = {"model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    edit_config(folder, lambda config: config.update(own))
    torch.testing.assert_close(logits(folder, IDS), theirs, rtol=1e-4, atol=5e-4)


def test_capabilities_name_latent_layers_and_blending(tmp_path: Path) -> None:
    found = capabilities_of(load(write_checkpoint(random_model("deepseek-v3-halves"), tmp_path), backend="reference"))
    assert (found.family, found.layer_groups, found.blending) == ("deepseek", ("latent",), True)
