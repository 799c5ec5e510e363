"""Llama 4 (text): chunked attention with full layers without rope between, experts that read weighed inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...errors import WeightError
from ...kv.layout import Window
from ...ops.contract import TemperatureScaling
from ...weights.source import Checkpoint
from ..spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, ModelSpec, NoRope, RouterSpec, each_attention
from .expert_fields import (
    GGUF_EXPERT_NAMES,
    GGUF_STACKS,
    HF_EXPERT_NAMES,
    MAX_EXPERTS,
    gguf_experts,
    shared_block,
    with_experts,
)
from .family import CheckpointDialect, Family, StackedTensor
from .fields import Fields
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_spec, hf_spec

THETA, CHUNK, PATTERN = 500000.0, 8192, 4  # every fourth layer is full and has no rope
TUNED = TemperatureScaling(0.1, 8192, 1)
ROUTER = RouterSpec("chosen_sigmoid", weigh_inputs=True)
WITHOUT_QK_NORM = 128  # experts of the one model that does not norm; files do not say it
_KINDS = ("chunked_attention", "full_attention")
_VISION = ("vision_model.*", "multi_modal_projector.*")
# What a config means by leaving them out, where other families mean something else.
_DEFAULTS: Mapping[str, object] = MappingProxyType({"head_dim": 128, "num_key_value_heads": 8})


def _names(prefix: str = "") -> Mapping[str, str]:
    """Tensors of a text model under `prefix`."""
    own = {ours: prefix + name.replace(".mlp.", ".feed_forward.") for ours, name in HF_EXPERT_NAMES.items()}
    at = prefix + "model.layers.{i}.feed_forward."
    own |= {f"shared.{name}": f"{at}shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")}
    return MappingProxyType(own | {"router": f"{at}router.weight"})


def _stacks(prefix: str = "") -> Mapping[str, StackedTensor]:
    """Gate and up lie in one tensor, one after the other; all tensors of experts are [experts, inputs, outputs]."""
    at = prefix + "model.layers.{i}.feed_forward.experts."
    both = {
        f"experts.{name}": StackedTensor(f"{at}gate_up_proj", share, 2, transposed=True)
        for share, name in enumerate(("gate", "up"))
    }
    return MappingProxyType(both | {"experts.down": StackedTensor(f"{at}down_proj", transposed=True)})


@dataclass(frozen=True, slots=True)
class _Layers:
    """What layers have, one entry for each of them."""

    ropes: Sequence[bool]
    chunked: Sequence[bool]
    chunk: int
    qk_norm: bool
    temperature: TemperatureScaling | None

    def attention(self, index: int, attention: AttentionSpec) -> AttentionSpec:
        """Norms are before the rope here and behind it in the original, which is the same: a rope keeps lengths."""
        if self.chunked[index]:
            attention = replace(attention, reach=Window(self.chunk), chunked=True)
        if self.ropes[index]:
            return replace(attention, qk_norm_plain=self.qk_norm)
        return replace(attention, rope=NoRope(), temperature=self.temperature)


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    """Files have neither the chunk nor the pattern of layers; llama.cpp takes those of the published models."""
    fields, spec = gguf_fields(checkpoint), gguf_spec(checkpoint, "llama4", interleaved=True)
    count = fields.count("expert_count", 0)
    # A window of 0 stands for layers that are all full and have a rope.
    plain = fields.values.get(f"{fields.prefix}attention.sliding_window") == 0
    local = [plain or (i + 1) % PATTERN != 0 for i in range(len(spec.layers))]
    layers = _Layers(local, [not plain and one for one in local], CHUNK, count != WITHOUT_QK_NORM, TUNED)
    spec = each_attention(spec, layers.attention)
    if not count:
        return spec
    experts = gguf_experts(fields, False, ROUTER)
    step = fields.integer("interleave_moe_layer_step")
    return with_experts(spec, _with_shared(experts), lambda index: (index + 1) % step == 0)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    values = {**_DEFAULTS, **checkpoint.config}
    config, spec = (
        Fields(values),
        hf_spec(replace(checkpoint, config=values), "llama4", theta=THETA, pairing="interleaved"),
    )
    spec = each_attention(spec, _hf_layers(config, len(spec.layers)).attention)
    activation = config.activation("hidden_act", "silu")
    dense = FeedForwardSpec(config.integer("intermediate_size_mlp", 16384), activation)
    spec = replace(spec, layers=tuple(replace(layer, feed_forward=dense) for layer in spec.layers))
    sparse = _moe_layers(config, len(spec.layers))
    if not sparse:
        return spec
    experts = ExpertsSpec(
        config.integer("num_local_experts", 16, high=MAX_EXPERTS),
        config.integer("num_experts_per_tok", 1),
        FeedForwardSpec(config.integer("intermediate_size", 8192), activation),
        False,
        ROUTER,
    )
    return with_experts(spec, _with_shared(experts), lambda index: index in sparse)


def from_nested(checkpoint: Checkpoint) -> ModelSpec:
    """The text model of one that also sees."""
    text = checkpoint.config.get("text_config")
    if not isinstance(text, Mapping):
        raise WeightError("text_config", "missing from the model's configuration")
    return from_hf(replace(checkpoint, config=text))


def _with_shared(experts: ExpertsSpec) -> ExpertsSpec:
    return replace(experts, shared=shared_block(experts.expert, 1))


def _hf_layers(config: Fields, count: int) -> _Layers:
    every = config.integer("no_rope_layer_interval", PATTERN)
    ropes = config.values.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    if not isinstance(ropes, list) or len(ropes) < count or any(one not in (0, 1) for one in ropes):
        raise WeightError("no_rope_layers", f"must have 0 or 1 for each of the {count} layers")
    kinds = config.values.get("layer_types") or [_KINDS[not rope] for rope in ropes[:count]]
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in _KINDS for kind in kinds):
        raise WeightError("layer_types", f"must name one of {', '.join(_KINDS)} for each of the {count} layers")
    chunked = [kind == "chunked_attention" for kind in kinds]
    if any(chunked) and config.says_none("attention_chunk_size"):
        raise WeightError("attention_chunk_size", "must be a number of tokens: some layers are chunked")
    chunk = config.integer("attention_chunk_size", CHUNK) if any(chunked) else CHUNK
    tuned = None
    if config.values.get("attn_temperature_tuning", True):  # a number in some files
        tuned = TemperatureScaling(
            config.number("attn_scale", TUNED.beta), config.integer("floor_scale", TUNED.length), TUNED.offset
        )
    return _Layers([bool(rope) for rope in ropes], chunked, chunk, config.flag("use_qk_norm", True), tuned)


def _moe_layers(config: Fields, count: int) -> frozenset[int]:
    named = config.values.get("moe_layers")
    if named is None:
        step = config.integer("interleave_moe_layer_step", 1)
        return frozenset(range(step - 1, count, step))
    if not isinstance(named, list) or any(type(i) is not int or not 0 <= i < count for i in named):
        raise WeightError("moe_layers", f"must be a list of layers below {count}")
    return frozenset(named)


_NESTED = "language_model."
LLAMA4 = Family(
    "llama4",
    (
        CheckpointDialect(
            "gguf", ("llama4",), from_gguf, GGUF_EXPERT_NAMES, GGUF_IGNORED, stacks=GGUF_STACKS, pairs_qk=True
        ),
        CheckpointDialect("hf", ("Llama4ForCausalLM",), from_hf, _names(), HF_IGNORED, stacks=_stacks(), pairs_qk=True),
        CheckpointDialect(
            "hf",
            ("Llama4ForConditionalGeneration",),
            from_nested,
            _names(_NESTED),
            HF_IGNORED + _VISION,
            stacks=_stacks(_NESTED),
            pairs_qk=True,
        ),
    ),
)
