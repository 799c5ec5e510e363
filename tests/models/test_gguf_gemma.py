"""Gemma 3n and Gemma 4 as GGUF files, written as llama.cpp's converter writes them, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from families import random_model, write_checkpoint
from model_results import Shows
from safetensors.numpy import load_file, save_file
from test_gguf_dialects import close
from transformers import PreTrainedModel

from kvilt.errors import WeightError
from kvilt.models.assemble import read_spec
from kvilt.models.spec import ProportionalScaling, RopeSpec
from kvilt.weights.source import open_checkpoint

GGUF_MODELS = ("gemma3n", "gemma4", "gemma4-e", "gemma4-own-values", "gemma4-moe")
Change = Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None]


def write(name: str, folder: Path, change: Change | None = None) -> tuple[PreTrainedModel, Path]:
    model = random_model(name)
    config, arch = model.config, gguf.MODEL_ARCH.GEMMA3N if "3n" in name else gguf.MODEL_ARCH.GEMMA4
    writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    tensors = dict(gemma3n(writer, model) if "3n" in name else gemma4(writer, model))
    if change is not None:
        change(writer, tensors)
    for own, data in tensors.items():
        writer.add_tensor(own, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, folder / "model.gguf"


def named(state: dict[str, torch.Tensor], arch: gguf.MODEL_ARCH, layers: int) -> dict[str, np.ndarray]:
    """Tensors under llama.cpp's names; the head is the embedding."""
    names = gguf.get_tensor_name_map(arch, layers)
    return {
        names.get_name(name + suffix(name), try_suffixes=(".weight", ".bias")): tensor.float().numpy()
        for name, tensor in state.items()
        if name != "lm_head.weight"
    }


def suffix(name: str) -> str:
    """What the converter adds to the names of single numbers, of scales, and of the maps of all experts."""
    return ".weight" if name.endswith(("_scale", "layer_scalar", "gate_up_proj", "down_proj")) else ""


def gemma3n(writer: gguf.GGUFWriter, model: PreTrainedModel) -> dict[str, np.ndarray]:
    config, state = model.config, model.state_dict()
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_feed_forward_length(list(config.intermediate_size))
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    shares = torch.tensor(config.activation_sparsity_pattern, dtype=torch.float32)
    writer.add_activation_sparsity_scale(torch.distributions.normal.Normal(0, 1).icdf(shares).tolist())
    for side in ("altup_projections", "altup_unembed_projections"):
        each = [state.pop(f"model.{side}.{e}.weight") for e in range(config.altup_num_inputs - 1)]
        state[f"model.{side}.weight"] = torch.stack(each)
    return named(state, gguf.MODEL_ARCH.GEMMA3N, config.num_hidden_layers)


def gemma4(writer: gguf.GGUFWriter, model: PreTrainedModel) -> dict[str, np.ndarray]:
    config = model.config
    kinds, rope = config.layer_types, config.rope_parameters
    wide, narrow = (config.per_layer_config[kinds.index(f"{kind}_attention")] for kind in ("full", "sliding"))
    writer.add_head_count_kv([config.per_layer_config[i].num_key_value_heads for i in range(config.num_hidden_layers)])
    for length in (writer.add_key_length, writer.add_value_length):
        length(wide.head_dim)
    for length in (writer.add_key_length_swa, writer.add_value_length_swa):
        length(narrow.head_dim)
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    double = [config.use_double_wide_mlp and i >= first_shared for i in range(config.num_hidden_layers)]
    widths = [config.intermediate_size * (1 + own) for own in double]
    writer.add_feed_forward_length(widths if any(double) else config.intermediate_size)
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(wide.head_dim)
    writer.add_rope_dimension_count_swa(narrow.head_dim)
    turning = int(wide.head_dim * rope["full_attention"]["partial_rotary_factor"] / 2)
    freqs = np.array([1.0] * turning + [1e30] * (wide.head_dim // 2 - turning), dtype=np.float32)
    state, scales = model.state_dict(), {}
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        for i in range(config.num_hidden_layers):
            for theirs, part in (("scale", "ffn_gate_inp"), ("per_expert_scale", "ffn_down_exps")):
                scales[f"blk.{i}.{part}.scale"] = state.pop(f"model.layers.{i}.router.{theirs}").numpy()
    own = named(state, gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)
    return own | scales | {"rope_freqs.weight": freqs}


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_a_gguf_gives_the_logits_of_the_checkpoint_it_was_made_from(name: str, tmp_path: Path, shows: Shows) -> None:
    model, path = write(name, tmp_path)
    shows("gguf", type(model).__name__, f"{name} {'gemma3n' if '3n' in name else 'gemma4'}")
    close(path, model)


def gate_and_up_apart(_writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if "gate_up_exps" in name]:
        both = tensors.pop(name)
        for part, own in zip(("gate", "up"), np.split(both, 2, axis=1), strict=True):
            tensors[name.replace("gate_up", part)] = own


def test_experts_may_have_two_tensors_for_gate_and_up(tmp_path: Path) -> None:
    model, path = write("gemma4-moe", tmp_path, gate_and_up_apart)
    close(path, model)


def test_pairs_that_a_file_stops_do_not_turn(tmp_path: Path) -> None:
    rope = read_spec(open_checkpoint(write("gemma4", tmp_path)[1])).layers[-1].attention.rope
    assert isinstance(rope, RopeSpec) and rope.scaling == ProportionalScaling(4)


def test_wide_blocks_of_layers_that_share_kv(tmp_path: Path) -> None:
    spec = read_spec(open_checkpoint(write("gemma4-e-wide", tmp_path)[1]))
    assert [layer.feed_forward.hidden for layer in spec.layers] == [48, 48, 96, 96, 96, 96]
    assert [layer.attention.shared_with for layer in spec.layers] == [None, None, 0, 1, 0, 1]


def too_few_experts(writer: gguf.GGUFWriter, _tensors: dict[str, np.ndarray]) -> None:
    writer.add_expert_used_count(9)


def no_pattern(writer: gguf.GGUFWriter, _tensors: dict[str, np.ndarray]) -> None:
    writer.add_sliding_window_pattern([True])


def all_shared(writer: gguf.GGUFWriter, _tensors: dict[str, np.ndarray]) -> None:
    writer.add_shared_kv_layers(6)


@pytest.mark.parametrize(
    ("name", "change", "error", "said"),
    [
        ("gemma4-moe", too_few_experts, WeightError, "num_experts_per_tok"),
        ("gemma4", no_pattern, WeightError, "sliding_window_pattern"),
        ("gemma4-e", all_shared, WeightError, "shared_kv_layers"),
        ("gemma3n", all_shared, WeightError, "shared_kv_layers"),
    ],
)
def test_what_means_other_logits_is_refused(
    name: str, change: Change, error: type[Exception], said: str, tmp_path: Path
) -> None:
    _, path = write(name, tmp_path, change)
    with pytest.raises(error, match=said):
        read_spec(open_checkpoint(path))


def test_the_text_model_of_one_that_also_sees_and_hears(tmp_path: Path, shows: Shows) -> None:
    """Its config is nested and its tensors have longer names; those of other senses are left out."""
    shows("parity", "Gemma3nForConditionalGeneration", "gemma3n native")
    model = random_model("gemma3n")
    folder = write_checkpoint(model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): data for name, data in tensors.items()}
    nested["model.vision_tower.stem.weight"] = np.zeros(3, dtype=np.float32)
    save_file(nested, folder / "model.safetensors")
    close(folder, model)
