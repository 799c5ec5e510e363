"""Ministral 3 and Mistral Small 3: Mistral inside a model that also sees, queries scaled by position if asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ...errors import Unsupported, WeightError
from ...kv.layout import Window
from ...ops.contract import TemperatureScaling
from ...weights.source import Checkpoint
from ..spec import ModelSpec, each_attention
from .family import CheckpointDialect, Family
from .fields import Fields
from .llama import from_mistral
from .plain import GGUF_IGNORED, GGUF_NAMES, HF_IGNORED, HF_NAMES, gguf_fields, gguf_spec, hf_spec

VISION = ("*vision_tower.*", "*multi_modal_projector.*")


def renamed(prefix: str, head: str) -> Mapping[str, str]:
    """The usual names, of a text model under `prefix`."""
    own = {ours: name.replace("model.", prefix, 1) for ours, name in HF_NAMES.items()}
    return MappingProxyType(own | {"head": head})


INNER_NAMES = renamed("model.language_model.", "lm_head.weight")
OLDER_NAMES = renamed("language_model.model.", "language_model.lm_head.weight")


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    spec, fields = gguf_spec(checkpoint, "mistral3", interleaved=True), gguf_fields(checkpoint)
    if not fields.has("attention.temperature_scale"):
        return spec
    length = fields.integer("rope.scaling.original_context_length")
    return _scaled(spec, TemperatureScaling(fields.number("attention.temperature_scale"), length))


def from_ministral3(checkpoint: Checkpoint) -> ModelSpec:
    spec, config = hf_spec(checkpoint, "mistral3"), Fields(checkpoint.config)
    ropes = checkpoint.config.get("rope_parameters")
    if not isinstance(ropes, Mapping):
        raise WeightError("rope_parameters", "missing from the model's configuration")
    if config.has("sliding_window"):
        window = Window(config.integer("sliding_window"))
        spec = each_attention(spec, lambda _layer, attention: replace(attention, reach=window))
    rope = Fields(ropes)
    if not rope.has("llama_4_scaling_beta"):
        return spec
    scaling = TemperatureScaling(rope.number("llama_4_scaling_beta"), rope.integer("original_max_position_embeddings"))
    return _scaled(spec, scaling)


def from_nested(checkpoint: Checkpoint) -> ModelSpec:
    """The text model of one that also sees."""
    text = checkpoint.config.get("text_config")
    if not isinstance(text, Mapping):
        raise WeightError("text_config", "missing from the model's configuration")
    heads = {INNER_NAMES["head"], OLDER_NAMES["head"]}
    tied = heads.isdisjoint(checkpoint.tensors.names())
    inner = replace(checkpoint, config={**text, "tie_word_embeddings": tied})
    match text.get("model_type"):
        case "ministral3":
            return from_ministral3(inner)
        case "mistral":
            return replace(from_mistral(inner), family="mistral3")
        case other:
            raise Unsupported(f"text_config.model_type is {other!r}; kvilt knows mistral and ministral3 in a Mistral 3")


def _scaled(spec: ModelSpec, scaling: TemperatureScaling) -> ModelSpec:
    return each_attention(spec, lambda _layer, attention: replace(attention, temperature=scaling))


_NESTED, _IGNORED = ("Mistral3ForConditionalGeneration",), HF_IGNORED + VISION
MISTRAL3 = Family(
    "mistral3",
    (
        CheckpointDialect("gguf", ("mistral3",), from_gguf, GGUF_NAMES, GGUF_IGNORED, pairs_qk=True),
        CheckpointDialect("hf", ("Ministral3ForCausalLM",), from_ministral3, HF_NAMES, HF_IGNORED),
        CheckpointDialect("hf", _NESTED, from_nested, OLDER_NAMES, _IGNORED, when=OLDER_NAMES["embedding"]),
        CheckpointDialect("hf", _NESTED, from_nested, INNER_NAMES, _IGNORED),
    ),
)
