"""A small Granite 4 hybrid with random weights as a GGUF that kvilt and llama.cpp both load. Needs the package gguf."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 8, 256, 512, 4, 2
STATE, SSM_HEADS, WIDTH = 64, 8, 4
ATTENTION = (3, 7)  # layers; the others are Mamba-2


def write_hybrid(path: Path) -> Path:
    """Every byte is a token, and every number is float32, so that answers can be compared token by token."""
    import gguf

    writer = gguf.GGUFWriter(path, "granitehybrid")
    writer.add_context_length(16384)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([KV_HEADS if i in ATTENTION else 0 for i in range(LAYERS)])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_scaling_finetuned(False)
    writer.add_embedding_scale(1.0)
    writer.add_residual_scale(0.5)
    writer.add_attention_scale(0.125)
    writer.add_logit_scale(1.0)
    writer.add_expert_count(0)
    writer.add_expert_used_count(0)
    writer.add_ssm_conv_kernel(WIDTH)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_group_count(1)
    writer.add_ssm_inner_size(2 * HIDDEN)
    writer.add_ssm_time_step_rank(SSM_HEADS)
    tokens = _bytes()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([f"{tokens[65]} {tokens[66]}"])  # llama.cpp wants one; no prompt here is text
    writer.add_eos_token_id(0)
    for name, values in _tensors(len(tokens)).items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _bytes() -> list[str]:
    """The letters that GPT-2's vocabulary has for bytes, and one merged pair."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    return [*letters, letters[65] + letters[66]]


def _tensors(vocab: int) -> dict[str, np.ndarray]:
    dice = np.random.default_rng(5)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return dice.standard_normal((rows, columns)) * columns**-0.5

    wide, head = 2 * HIDDEN, HIDDEN // HEADS
    mixed = wide + 2 * STATE
    tensors = {"token_embd.weight": matrix(vocab, HIDDEN) * 16, "output_norm.weight": np.ones(HIDDEN)}
    tensors["output.weight"] = matrix(vocab, HIDDEN) * 4
    for i in range(LAYERS):
        at = f"blk.{i}."
        tensors |= {f"{at}attn_norm.weight": np.ones(HIDDEN), f"{at}ffn_norm.weight": np.ones(HIDDEN)}
        tensors |= {f"{at}ffn_{name}.weight": matrix(INNER, HIDDEN) for name in ("gate", "up")}
        tensors[f"{at}ffn_down.weight"] = matrix(HIDDEN, INNER)
        if i in ATTENTION:
            tensors |= {f"{at}attn_{name}.weight": matrix(KV_HEADS * head, HIDDEN) for name in ("k", "v")}
            tensors |= {f"{at}attn_{name}.weight": matrix(HIDDEN, HIDDEN) for name in ("q", "output")}
            continue
        tensors |= {
            f"{at}ssm_in.weight": matrix(wide + mixed + SSM_HEADS, HIDDEN),
            f"{at}ssm_conv1d.weight": matrix(mixed, WIDTH),
            f"{at}ssm_conv1d.bias": np.zeros(mixed),
            f"{at}ssm_dt.bias": dice.uniform(-4, -1, SSM_HEADS),
            f"{at}ssm_a": -dice.uniform(0.1, 4, (SSM_HEADS, 1)),
            f"{at}ssm_d": np.ones((SSM_HEADS, 1)),
            f"{at}ssm_norm.weight": np.ones((1, wide)),
            f"{at}ssm_out.weight": matrix(HIDDEN, wide),
        }
    return tensors
