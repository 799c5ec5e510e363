"""Gemma 3n (text): four residual streams (AltUp), Laurel, inputs of each layer's own, sparse activations, shared KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from types import MappingProxyType

from ...errors import WeightError
from ...kv.layout import Full, Window
from ...weights.source import Checkpoint
from ..spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeSpec
from ..stream_spec import AltUpSpec, PerLayerSpec
from . import gemma_gguf
from .family import CheckpointDialect, Family
from .fields import Fields, even_dims, hf_rope, layer_kinds, whole_heads
from .gemma import HF_NAMES as GEMMA_NAMES
from .plain import HF_IGNORED
from .shared_kv import shared_layers

PATTERN = 5
DEFAULT_WINDOW = 512
SPARSE_LAYERS, SPARSITY = 10, 0.95  # where a config does not say it
_LAYER = "model.layers.{i}."
HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **GEMMA_NAMES,
        "layer_embedding": "model.embed_tokens_per_layer.weight",
        "layer_inputs": "model.per_layer_model_projection.weight",
        "layer_inputs_norm": "model.per_layer_projection_norm.weight",
        "layer_gate": _LAYER + "per_layer_input_gate.weight",
        "layer_projection": _LAYER + "per_layer_projection.weight",
        "layer_input_norm": _LAYER + "post_per_layer_input_norm.weight",
        "stream_spread": "model.altup_projections.{e}.weight",
        "stream_gather": "model.altup_unembed_projections.{e}.weight",
        "stream_router": _LAYER + "altup.modality_router.weight",
        "stream_router_norm": _LAYER + "altup.router_norm.weight",
        "stream_predict": _LAYER + "altup.prediction_coefs.weight",
        "stream_correct": _LAYER + "altup.correction_coefs.weight",
        "stream_scale": _LAYER + "altup.correct_output_scale",
        "laurel_left": _LAYER + "laurel.linear_left.weight",
        "laurel_right": _LAYER + "laurel.linear_right.weight",
        "laurel_norm": _LAYER + "laurel.post_laurel_norm.weight",
    }
)
NESTED_NAMES: Mapping[str, str] = MappingProxyType(
    {ours: name.replace("model.", "model.language_model.", 1) for ours, name in HF_NAMES.items()}
)
OTHER_SENSES = ("model.vision_tower.*", "model.audio_tower.*", "model.embed_vision.*", "model.embed_audio.*")
# Of layers that read the KV of others.
UNUSED_KV = ("*.self_attn.k_proj.*", "*.self_attn.v_proj.*", "*.self_attn.k_norm.*")


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    hidden, layers = config.integer("hidden_size"), config.integer("num_hidden_layers", 35, high=1 << 12)
    kinds = layer_kinds(config, layers) or _alternating(layers)
    shared = shared_layers(kinds, config.count("num_kv_shared_layers", 15), "num_kv_shared_layers")
    ropes = {kind: _rope(checkpoint, kind, config.integer("head_dim", 256, high=1 << 12)) for kind in set(kinds)}
    each = (
        LayerSpec(_attention(config, kind, ropes[kind], source), block, post_norms=True)
        for kind, source, block in zip(kinds, shared, _blocks(config, layers), strict=True)
    )
    return ModelSpec(
        family="gemma3n",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        context=config.integer("max_position_embeddings", 32768),
        layers=tuple(each),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tied_head=config.flag("tie_word_embeddings", True),
        embed_scale=hidden**0.5,
        final_soft_cap=0.0 if config.says_none("final_logit_softcapping") else _cap(config),
        per_layer=PerLayerSpec(
            config.integer("hidden_size_per_layer_input", 256, high=1 << 16),
            config.integer("vocab_size_per_layer_input", 262144),
        ),
        altup=AltUpSpec(
            config.integer("altup_num_inputs", 4, high=64),
            config.count("altup_active_idx", 0, high=63),
            config.integer("laurel_rank", 64, high=1 << 16),
            config.flag("altup_correct_scale", True),
        ),
    )


def from_nested(checkpoint: Checkpoint) -> ModelSpec:
    """The text model of one that also sees and hears."""
    text = checkpoint.config.get("text_config")
    if not isinstance(text, Mapping):
        raise WeightError("text_config", "missing from the model's configuration")
    return from_hf(replace(checkpoint, config=text))


def _cap(config: Fields) -> float:
    return config.number("final_logit_softcapping", 30.0)


def _attention(config: Fields, kind: str, rope: RopeSpec, source: int | None) -> AttentionSpec:
    heads, kv_heads = config.integer("num_attention_heads", 8, high=1 << 12), config.integer("num_key_value_heads", 2)
    whole_heads(heads, kv_heads)
    window, bias = Window(config.integer("sliding_window", DEFAULT_WINDOW)), config.flag("attention_bias")
    return AttentionSpec(
        heads,
        kv_heads,
        rope.dims,
        1.0,
        rope,
        Full() if kind == "full_attention" else window,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        v_norm=True,
        shared_with=source,
    )


def _rope(checkpoint: Checkpoint, kind: str, head_dim: int) -> RopeSpec:
    config, full = Fields(checkpoint.config), kind == "full_attention"
    if not config.has("rope_parameters") and not full:
        return RopeSpec(config.number("rope_local_base_freq", 10000.0), even_dims(head_dim, head_dim))
    rope = hf_rope(checkpoint.config, kind, 1000000.0 if full else 10000.0)
    if rope.partial != 1.0:
        raise WeightError("partial_rotary_factor", f"must be 1 in this family, not {rope.partial:g}")
    return RopeSpec(rope.theta, even_dims(head_dim, head_dim), scaling=rope.scaling)


def _blocks(config: Fields, layers: int) -> list[FeedForwardSpec]:
    """The feed-forward block of each layer: its width, and how sparse it is."""
    widths = config.values.get("intermediate_size", 16384)
    widths = list(widths) if isinstance(widths, Sequence) else [widths] * layers
    shares = config.values.get("activation_sparsity_pattern")
    if shares is None:
        sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
        shares = [SPARSITY] * sparse + [0.0] * (layers - sparse)
    if not isinstance(shares, Sequence) or len(shares) != layers or not all(_is_share(one) for one in shares):
        raise WeightError("activation_sparsity_pattern", f"must be a share below 1 for each of {layers} layers")
    if len(widths) != layers:
        raise WeightError("intermediate_size", f"must be one width, or one for each of {layers} layers")
    activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
    return [
        FeedForwardSpec(Fields({"intermediate_size": width}).integer("intermediate_size"), activation, sparse_cut=cut)
        for width, cut in zip(widths, map(_cut, shares), strict=True)
    ]


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _cut(share: float) -> float | None:
    """The deviations above the mean that a share of normally distributed numbers stays below."""
    return NormalDist().inv_cdf(share) if share > 0 else None


def _alternating(layers: int) -> tuple[str, ...]:
    return tuple("sliding_attention" if (i + 1) % PATTERN else "full_attention" for i in range(layers))


_IGNORED = HF_IGNORED + UNUSED_KV
GEMMA3N = Family(
    "gemma3n",
    (
        CheckpointDialect("gguf", ("gemma3n",), gemma_gguf.gemma3n, gemma_gguf.NAMES, gemma_gguf.IGNORED),
        CheckpointDialect("hf", ("Gemma3nForCausalLM",), from_hf, HF_NAMES, _IGNORED),
        CheckpointDialect(
            "hf", ("Gemma3nForConditionalGeneration",), from_nested, NESTED_NAMES, _IGNORED + OTHER_SENSES
        ),
    ),
)
