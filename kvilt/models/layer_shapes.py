"""The tensors that a layer asks of a checkpoint, by our names, and their shapes."""

from __future__ import annotations

from .latent_loading import latent_shapes
from .recurrent_spec import recurrent_shapes
from .spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec
from .stream_spec import altup_shapes, per_layer_shapes


def with_biases(norms: list[str], spec: ModelSpec) -> list[str]:
    """Names of norms, and of their biases where a model has them."""
    return [*norms, *(f"{name}_bias" for name in norms)] if spec.norm_bias else norms


def layer_shapes(layer: LayerSpec, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer by our names: those of its blocks, and its norms."""
    width, norms = spec.hidden_size, []
    if layer.pre_norms and layer.blocks != "feed_forward":
        norms.append("attention_norm")
    if layer.pre_norms and layer.blocks != "mixer" and not layer.parallel:
        norms.append("feed_forward_norm")
    if layer.post_norms:
        norms += ["post_attention_norm", "post_feed_forward_norm"]
    return {
        **({"output_scale": (1,)} if layer.output_scale else {}),
        **dict.fromkeys(with_biases(norms, spec), (width,)),
        **(_attention_shapes(layer.attention, width) if layer.has_attention else {}),
        **({} if layer.recurrent is None else recurrent_shapes(layer.recurrent, width)),
        **(_feed_forward_shapes(layer.feed_forward, width) if layer.blocks != "mixer" else {}),
        **({} if spec.per_layer is None else per_layer_shapes(spec.per_layer, width)),
        **({} if spec.altup is None else altup_shapes(spec.altup, width)),
    }


def _attention_shapes(spec: AttentionSpec, width: int) -> dict[str, tuple[int, ...]]:
    if spec.latent is not None:
        return latent_shapes(spec, spec.latent, width)
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"q": (q, width), "k": (kv, width), "v": (kv, width), "out": (width, q)}
    if spec.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if spec.values_are_keys:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("v")}
    if spec.out_bias:
        shapes |= {"out_bias": (width,)}
    if spec.qk_norm:
        sizes = (q, kv) if spec.qk_norm_whole else (spec.head_dim, spec.head_dim)
        shapes |= {"q_norm": sizes[:1], "k_norm": sizes[1:]}
    if spec.sinks:
        shapes |= {"sinks": (spec.heads,)}
    if spec.output_gate:
        shapes |= {"q_gate": (q, width)}
    if spec.shared_with is not None:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(("k", "v"))}
    return shapes


def _feed_forward_shapes(spec: FeedForwardSpec | ExpertsSpec, width: int) -> dict[str, tuple[int, ...]]:
    match spec:
        case FeedForwardSpec(inner, bias=bias, gated=gated):
            opening = ("gate", "up") if gated else ("up",)
            shapes: dict[str, tuple[int, ...]] = {**dict.fromkeys(opening, (inner, width)), "down": (width, inner)}
            biases: dict[str, tuple[int, ...]] = {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
            return shapes | biases if bias else shapes
        case ExpertsSpec(experts, expert=expert):
            shapes = _router_shapes(spec, width)
            each = _feed_forward_shapes(expert, width)
            return shapes | {f"experts.{e}.{name}": shape for e in range(experts) for name, shape in each.items()}


def _router_shapes(spec: ExpertsSpec, width: int) -> dict[str, tuple[int, ...]]:
    """What a block of experts has besides them."""
    shapes: dict[str, tuple[int, ...]] = {"router": (spec.experts, width)}
    if spec.router.bias:
        shapes["router_bias"] = (spec.experts,)
    if spec.router.selection_bias:
        shapes["selection_bias"] = (spec.experts,)
    if spec.dense is not None:
        shapes |= dict.fromkeys(("router_norm", "dense_norm", "experts_norm", "experts_out_norm"), (width,))
        shapes |= {"expert_factors": (spec.experts,), **_feed_forward_shapes(spec.dense, width)}
    if spec.shared is not None:
        shapes |= {f"shared.{name}": shape for name, shape in _feed_forward_shapes(spec.shared.block, width).items()}
        shapes |= {"shared_gate": (1, width)} if spec.shared.gated else {}
    return shapes
