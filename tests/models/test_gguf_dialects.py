"""Every family as a GGUF: the same random weights under llama.cpp's names and conventions, against transformers."""

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
from transformers import Phi3Config, Phi3ForCausalLM, PreTrainedModel

from kvilt.config import RunConfig
from kvilt.errors import Unsupported, WeightError
from kvilt.executor.load import load_executor
from kvilt.models.assemble import read_spec
from kvilt.models.spec import FactorScaling, RopeSpec, YarnScaling, at_context
from kvilt.weights.source import open_checkpoint

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "llama3-rope": gguf.MODEL_ARCH.LLAMA,
    "linear-rope": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3-yarn": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "phi3-window": gguf.MODEL_ARCH.PHI3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "command-r": gguf.MODEL_ARCH.COMMAND_R,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
}
PERMUTED = {gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3, gguf.MODEL_ARCH.GRANITE, gguf.MODEL_ARCH.MISTRAL3}
SHIFTED_NORMS = {gguf.MODEL_ARCH.GEMMA2}
IDS = [int(i) for i in torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(7))]


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """From half-split pairs to neighbouring ones, as llama.cpp's converter stores q and k of llama."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    model: PreTrainedModel, arch: gguf.MODEL_ARCH, path: Path, extra: Callable[[gguf.GGUFWriter], Any] | None = None
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 4 * config.hidden_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    write_eps(writer, config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch != gguf.MODEL_ARCH.GPT2:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        write_rope(writer, config, head_dim)
    write_multipliers(writer, config)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if arch == gguf.MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if extra is not None:
        extra(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.float().numpy()
        if arch == gguf.MODEL_ARCH.GPT2 and name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
            data = data.T
        if arch in PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
            data = interleave(data, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if arch in SHIFTED_NORMS and name.endswith("norm.weight"):
            data = data + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_eps(writer: gguf.GGUFWriter, config: Any) -> None:
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"):
        if hasattr(config, name):
            writer.add_layer_norm_eps(getattr(config, name))


def write_multipliers(writer: gguf.GGUFWriter, config: Any) -> None:
    if hasattr(config, "logit_scale"):
        writer.add_logit_scale(config.logit_scale)
    if hasattr(config, "residual_multiplier"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def write_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        case "llama3":
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
            plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim))
            writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())


def logits(path: Path, ids: list[int], **config: Any) -> torch.Tensor:
    executor = load_executor(path, RunConfig(kv_memory=1 << 24, kv_dtype="float32", **config))
    with executor.create_kv_cache() as kv:
        return executor.step(ids, kv)[0]


def close(path: Path, model: PreTrainedModel, ids: list[int] = IDS, **config: Any) -> None:
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(logits(path, ids, **config), theirs, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_gguf_gives_the_logits_of_the_checkpoint_it_was_made_from(tmp_path: Path, name: str, shows: Shows) -> None:
    model = random_model(name)
    shows("gguf", type(model).__name__, f"{name} {gguf.MODEL_ARCH_NAMES[ARCHITECTURES[name]]}")
    if name == "gemma2":  # llama.cpp derives the scale of queries from the head size
        for layer in model.model.layers:
            layer.self_attn.scaling = model.config.head_dim**-0.5
    close(write_gguf(model, ARCHITECTURES[name], tmp_path / "model.gguf"), model)


def long_phi3() -> PreTrainedModel:
    torch.manual_seed(4)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 48,
    }
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4}
    context = {"max_position_embeddings": 192, "original_max_position_embeddings": 48, "rope_parameters": rope}
    specials = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return Phi3ForCausalLM(Phi3Config(**sizes, **heads, **context, **specials)).eval()


def long_factors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_factors_short.weight", np.array([1.0, 1.1, 1.2, 1.3], dtype=np.float32))
    writer.add_tensor("rope_factors_long.weight", np.array([1.0, 2.0, 4.0, 8.0], dtype=np.float32))
    writer.add_rope_scaling_orig_ctx_len(48)
    writer.add_rope_scaling_attn_factors((1 + np.log(192 / 48) / np.log(48)) ** 0.5)


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_longrope_takes_its_factors_by_the_context_it_runs_with(tmp_path: Path, kind: str) -> None:
    """Up to the original context the short factors, beyond it the long ones, for all lengths alike."""
    model = long_phi3()
    if kind == "gguf":
        path = write_gguf(model, gguf.MODEL_ARCH.PHI3, tmp_path / "model.gguf", long_factors)
    else:
        model.save_pretrained(tmp_path)
        path = tmp_path
    close(path, model, IDS[:40], max_context=48)  # transformers takes the short ones for a short prompt
    close(path, model, IDS)  # and the long ones for a long prompt
    short, long = (
        at_context(read_spec(open_checkpoint(path)), context).layers[0].attention.rope for context in (48, 192)
    )
    assert isinstance(short, RopeSpec)
    assert isinstance(long, RopeSpec)
    assert isinstance(short.scaling, FactorScaling)
    assert isinstance(long.scaling, FactorScaling)
    assert short.scaling.factors[-1] == pytest.approx(1.3)
    assert long.scaling.factors[-1] == pytest.approx(8.0)


def test_yarn_in_a_gguf_reads_the_same_as_in_a_config(tmp_path: Path) -> None:
    model = random_model("qwen3-yarn")
    model.save_pretrained(tmp_path / "hf")
    path = write_gguf(model, gguf.MODEL_ARCH.QWEN3, tmp_path / "model.gguf")
    ropes = [read_spec(open_checkpoint(p)).layers[0].attention.rope for p in (path, tmp_path / "hf")]
    assert ropes[0] == ropes[1]
    assert isinstance(ropes[0], RopeSpec)
    assert isinstance(ropes[0].scaling, YarnScaling)


def test_damaged_rope_tensors_are_refused(tmp_path: Path) -> None:
    model = long_phi3()

    def too_few(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_factors_short.weight", np.ones(3, dtype=np.float32))
        writer.add_tensor("rope_factors_long.weight", np.ones(4, dtype=np.float32))
        writer.add_rope_scaling_orig_ctx_len(48)

    with pytest.raises(WeightError, match="rope_factors_short"):
        logits(write_gguf(model, gguf.MODEL_ARCH.PHI3, tmp_path / "few.gguf", too_few), IDS)

    def negative(writer: gguf.GGUFWriter) -> None:
        long_factors(writer)
        writer.tensors[-1]["rope_factors_long.weight"].tensor[1] = -1

    with pytest.raises(WeightError, match="rope_factors_long"):
        logits(write_gguf(model, gguf.MODEL_ARCH.PHI3, tmp_path / "negative.gguf", negative), IDS)

    def unknown(writer: gguf.GGUFWriter) -> None:
        writer.add_string("phi3.rope.scaling.type", "spiral")

    with pytest.raises(Unsupported, match="spiral"):
        logits(write_gguf(model, gguf.MODEL_ARCH.PHI3, tmp_path / "unknown.gguf", unknown), IDS)
