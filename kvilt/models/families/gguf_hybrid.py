"""What GGUF files of families with recurrent layers share: tensor names, fields, and what their numbers mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from ...errors import Unsupported, WeightError
from ...ops.contract import FoldHeads
from ...weights.source import Checkpoint
from ..recurrent_spec import GatedDeltaSpec, Mamba2Spec
from ..spec import ExpertsSpec, FeedForwardSpec, SharedExpertSpec
from .expert_fields import GGUF_EXPERT_NAMES, GGUF_STACKS, gguf_experts
from .family import StackedTensor
from .fields import Fields
from .plain import gguf_fields

STATE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "mamba_in": "blk.{i}.ssm_in.weight",
        "conv": "blk.{i}.ssm_conv1d.weight",
        "conv_bias": "blk.{i}.ssm_conv1d.bias",
        "dt_bias": "blk.{i}.ssm_dt.bias",
        "a_log": "blk.{i}.ssm_a",
        "skip": "blk.{i}.ssm_d",
        "memory_norm": "blk.{i}.ssm_norm.weight",
        "memory_out": "blk.{i}.ssm_out.weight",
    }
)
DELTA_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **GGUF_EXPERT_NAMES,
        **STATE_NAMES,
        "feed_forward_norm": "blk.{i}.post_attention_norm.weight",
        "q_and_gate": "blk.{i}.attn_q.weight",
        "qkv": "blk.{i}.attn_qkv.weight",
        "z": "blk.{i}.attn_gate.weight",
        "in_qkvz": "blk.{i}.ssm_in.weight",  # of older files
        "in_ba": "blk.{i}.ssm_ba.weight",
        "b": "blk.{i}.ssm_beta.weight",
        "a": "blk.{i}.ssm_alpha.weight",
    }
)
# Files may have the gates and the ups of all experts in one tensor: how they lie there, and the tensor that tells.
_GATE_UP = "blk.{i}.ffn_gate_up_exps.weight"
JOINED: tuple[Mapping[str, StackedTensor], str] = (
    MappingProxyType(
        {
            "experts.gate": StackedTensor(_GATE_UP, 0, 2),
            "experts.up": StackedTensor(_GATE_UP, 1, 2),
            "experts.down": GGUF_STACKS["experts.down"],
        }
    ),
    _GATE_UP.format(i=0),
)


def _log_rate(rate: Tensor) -> Tensor:
    """Files have -exp(A_log)."""
    if not bool((rate < 0).all()):
        raise WeightError("ssm_a", "must be below 0 everywhere: a state that does not decay grows without bound")
    return (-rate).log()


TRANSFORMS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"a_log": _log_rate})


def attention_layers(checkpoint: Checkpoint) -> tuple[Checkpoint, list[bool]]:
    """The checkpoint with one number of KV heads, and which layers have attention: those that have KV heads."""
    fields, name = gguf_fields(checkpoint), "attention.head_count_kv"
    layers = fields.integer("block_count", high=1 << 12)
    counts = checkpoint.config.get(fields.prefix + name)
    if not isinstance(counts, list):
        return checkpoint, [True] * layers
    if len(counts) != layers or any(type(count) is not int or count < 0 for count in counts):
        raise WeightError(fields.prefix + name, f"must be the number of KV heads of each of {layers} layers")
    kinds = sorted({count for count in counts if count})
    if len(kinds) > 1:
        raise Unsupported(f"layers with different numbers of KV heads ({kinds}) are not supported in this family")
    config = {**checkpoint.config, fields.prefix + name: kinds[0] if kinds else None}
    return replace(checkpoint, config=config), [count > 0 for count in counts]


def mamba2(fields: Fields, conv_bias: bool) -> Mamba2Spec:
    """Mamba-2 as GGUF files describe it; llama.cpp norms each group for itself, behind the gate."""
    heads, inner = fields.integer("ssm.time_step_rank", high=1 << 12), fields.integer("ssm.inner_size")
    if inner % heads:
        raise WeightError("ssm.inner_size", f"{inner} is not divisible into {heads} heads")
    groups, state = fields.integer("ssm.group_count", 1), fields.integer("ssm.state_size", high=1 << 12)
    folded = FoldHeads(groups, heads, state, inner // heads)
    return Mamba2Spec(folded, fields.integer("ssm.conv_kernel", high=64), conv_bias, norm_groups=groups)


def gated_delta(fields: Fields, tiled: bool) -> GatedDeltaSpec:
    """Gated delta nets as GGUF files describe them; `tiled`: the converter reordered value heads."""
    values, inner = fields.integer("ssm.time_step_rank", high=1 << 12), fields.integer("ssm.inner_size")
    if inner % values:
        raise WeightError("ssm.inner_size", f"{inner} is not divisible into {values} heads")
    keys, dim = fields.integer("ssm.group_count", high=1 << 12), fields.integer("ssm.state_size", high=1 << 12)
    heads = FoldHeads(keys, values, dim, inner // values, tiled and keys != values)
    return GatedDeltaSpec(heads, fields.integer("ssm.conv_kernel", high=64))


def delta_layers(fields: Fields, layers: int) -> list[bool]:
    """Which layers are gated delta nets: those that a file lists, else all but every so many."""
    name = "attention.recurrent_layers"
    kinds = fields.values.get(fields.prefix + name)
    if kinds is None:
        every = fields.integer("full_attention_interval", 4)
        return [bool((i + 1) % every) for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise WeightError(fields.prefix + name, f"must say of each of {layers} layers whether it is recurrent")
    return [bool(kind) for kind in kinds[:layers]]


def gated_experts(fields: Fields) -> ExpertsSpec:
    """Experts beside a shared one behind a sigmoid."""
    shared = fields.integer("expert_shared_feed_forward_length", fields.integer("expert_feed_forward_length"))
    experts = gguf_experts(fields, normalized=True)
    return replace(experts, shared=SharedExpertSpec(FeedForwardSpec(shared), gated=True))
