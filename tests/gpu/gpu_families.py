"""Small random checkpoints of the families whose layers have kernels of their own, written without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvilt.models.assemble import tensor_shapes
from kvilt.weights.source import HF, Checkpoint, TensorSource

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "norm_topk_prob": True},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
    "gpt_oss_mxfp4": {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "sliding_window": 128,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 1,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_shared_experts": 1,
        "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    },
    "llama4": {
        "architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 4, "intermediate_size_mlp": 256,
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3,
        "attention_chunk_size": 96, "floor_scale": 64, "attn_scale": 0.1,
    },
    "qwen3_5": {"architectures": ["Qwen3_5ForCausalLM"], **DELTA},
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], **DELTA, **EXPERTS},
    "granite_hybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "shared_intermediate_size": 128, "mamba_n_heads": 8,
        "mamba_d_state": 32, "mamba_d_head": 64, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_conv": 4,
        "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "residual_multiplier": 0.4,
    },
    "gemma3n": {
        "architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 6, "sliding_window": 96, "laurel_rank": 16,
        "final_logit_softcapping": 6.0, "activation_sparsity_pattern": [0.8, 0.0, 0.4, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32,
        "rope_local_base_freq": 10000.0, "tie_word_embeddings": True, "altup_num_inputs": 3,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
    },
    "lfm2": {"architectures": ["Lfm2ForCausalLM"], "norm_eps": 1e-5, "layer_types": ["conv", "full_attention", "conv"]},
}  # fmt: skip
PACKED = ("gpt_oss_mxfp4",)
RECURRENT = ("qwen3_5", "qwen3_next", "granite_hybrid", "lfm2")


class _Blocks:
    """Says of the tensors of MXFP4 blocks that a checkpoint has them."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.endswith("_blocks")


def write_family(folder: Path, name: str) -> Path:
    """A checkpoint of a family."""
    config = SIZES | FAMILIES[name]
    nothing: Any = None
    tensors: TensorSource = nothing  # a spec is made of the configuration alone
    packed = _Blocks() if name in PACKED else ()
    shapes = tensor_shapes(Checkpoint(folder, HF, config, {}, tensors), packed)
    random = torch.Generator().manual_seed(11)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_made(shapes, random), folder / "model.safetensors")
    return folder


def _made(shapes: Mapping[str, tuple[int, ...]], random: torch.Generator) -> dict[str, Tensor]:
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith(("_blocks", "_scales")):
            low, high = (0, 256) if name.endswith("_blocks") else (121, 124)
            tensors[name] = torch.randint(low, high, shape, generator=random, dtype=torch.uint8)
        elif len(shape) == 1:
            centre, spread = (1.0, 0.1) if "norm" in name else (0.0, 0.3)
            tensors[name] = centre + spread * torch.randn(shape, generator=random)
        else:
            tensors[name] = torch.randn(shape, generator=random) * (1.2 / shape[-1] ** 0.5)
    return tensors
