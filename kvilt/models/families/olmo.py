"""OLMo 2 and 3: norms after the blocks and none before them, q and k normed over all heads; OLMo 3 has windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ...errors import WeightError
from ...kv.layout import Full, Reach, Window
from ...weights.source import Checkpoint
from ..spec import LayerSpec, ModelSpec, NoScaling, Rope, RopeSpec, each_attention, each_layer
from .family import CheckpointDialect, Family
from .fields import DEFAULT_WINDOW, Fields, hf_rope, layer_kinds
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_spec, hf_spec
from .plain import GGUF_NAMES as PLAIN_GGUF_NAMES
from .plain import HF_NAMES as PLAIN_HF_NAMES

PATTERN = 4  # every fourth layer of OLMo 3 is full
THETA_3 = 500000.0
_POST_NORMS = ("post_attention_norm", "post_feed_forward_norm")

GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **PLAIN_GGUF_NAMES,
        **dict(
            zip(_POST_NORMS, ("blk.{i}.post_attention_norm.weight", "blk.{i}.post_ffw_norm.weight"), strict=True),
        ),
    }
)
HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **PLAIN_HF_NAMES,
        "post_attention_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "post_feed_forward_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
    }
)


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    """OLMo 2, or where there is a window OLMo 3."""
    spec, fields = _olmo(gguf_spec(checkpoint, "olmo2")), gguf_fields(checkpoint)
    if not fields.has("attention.sliding_window"):
        return spec
    kinds = _alternating(len(spec.layers))
    return _windowed(spec, kinds, Window(fields.integer("attention.sliding_window")))


def from_olmo2(checkpoint: Checkpoint) -> ModelSpec:
    return _olmo(hf_spec(checkpoint, "olmo2"))


def from_olmo3(checkpoint: Checkpoint) -> ModelSpec:
    config, ropes = Fields(checkpoint.config), checkpoint.config.get("rope_parameters")
    if ropes is not None and not (isinstance(ropes, Mapping) and "full_attention" in ropes):
        raise WeightError("rope_parameters", "must have a rope for full_attention and one for sliding_attention")
    flat = {**checkpoint.config, "rope_parameters": None, "rope_scaling": None}
    spec = _olmo(hf_spec(replace(checkpoint, config=flat), "olmo2", theta=THETA_3))
    kinds = layer_kinds(config, len(spec.layers)) or _alternating(len(spec.layers))
    if config.says_none("sliding_window"):
        raise WeightError("sliding_window", "must be a number of tokens: some layers have a window")
    window = Window(config.integer("sliding_window", DEFAULT_WINDOW))
    spec = _windowed(spec, kinds, window)
    own = {kind: hf_rope(checkpoint.config, kind, THETA_3) for kind in ("full_attention", "sliding_attention")}

    def rope(layer: int, kept: Rope) -> Rope:
        found = own[kinds[layer]]
        # The older spelling has one scaling, which is of the full layers.
        plain = ropes is None and kinds[layer] == "sliding_attention"
        assert isinstance(kept, RopeSpec)
        return replace(kept, theta=found.theta, scaling=NoScaling() if plain else found.scaling)

    return each_attention(spec, lambda layer, a: replace(a, rope=rope(layer, a.rope)))


def _olmo(spec: ModelSpec) -> ModelSpec:
    def change(_index: int, layer: LayerSpec) -> LayerSpec:
        attention = replace(layer.attention, qk_norm=True, qk_norm_whole=True)
        return replace(layer, attention=attention, pre_norms=False, post_norms=True)

    return each_layer(spec, change)


def _alternating(layers: int) -> tuple[str, ...]:
    return tuple("sliding_attention" if (i + 1) % PATTERN else "full_attention" for i in range(layers))


def _windowed(spec: ModelSpec, kinds: tuple[str, ...], window: Window) -> ModelSpec:
    """Windows where the kinds say so; rope scaling stretches full layers alone."""
    reaches: list[Reach] = [window if kind == "sliding_attention" else Full() for kind in kinds]

    def change(layer: int, rope: Rope) -> Rope:
        stretched = isinstance(rope, RopeSpec) and reaches[layer] == window
        return replace(rope, scaling=NoScaling()) if stretched and isinstance(rope, RopeSpec) else rope

    return each_attention(spec, lambda i, a: replace(a, reach=reaches[i], rope=change(i, a.rope)))


OLMO = Family(
    "olmo2",
    (
        CheckpointDialect("gguf", ("olmo2",), from_gguf, GGUF_NAMES, GGUF_IGNORED),
        CheckpointDialect("hf", ("Olmo2ForCausalLM",), from_olmo2, HF_NAMES, HF_IGNORED),
        CheckpointDialect("hf", ("Olmo3ForCausalLM",), from_olmo3, HF_NAMES, HF_IGNORED),
    ),
)
