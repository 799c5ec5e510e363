"""A model's architecture as data. A family makes a `ModelSpec` from a checkpoint's config.

Never holds devices, storage dtypes or file names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from ..errors import Unsupported, WeightError
from ..kv.layout import Full, KVLayout, Latent, LayerGroup, Reach, RecurrentGroup
from ..ops.contract import Activation, PageShape, Pairing, Routing, StateShape, TemperatureScaling
from ..ops.kv_dtypes import KVDtype
from ..ops.routing import GroupScore, RouterScores
from .recurrent_spec import RecurrentSpec
from .spec_repr import spec_repr
from .stream_spec import AltUpSpec, PerLayerSpec

NormKind = Literal["rms", "layer"]
Blocks = Literal["both", "mixer", "feed_forward"]


# How rope frequencies are stretched.


@dataclass(frozen=True, slots=True)
class NoScaling:
    """Frequencies as they are."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by a factor, high ones kept, a smooth band between."""

    factor: float
    low: float
    high: float
    original_context: int


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """One divisor per frequency, as GGUF files carry them in `rope_freqs.weight`."""

    factors: tuple[float, ...]
    magnitude: float = 1.0  # by which rotated vectors grow


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: high frequencies kept, low ones divided, a linear ramp between two numbers of turns."""

    factor: float
    original_context: int
    magnitude: float
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    whole_pairs: bool = True  # the ramp begins and ends at whole pairs


@dataclass(frozen=True, slots=True)
class LongScaling:
    """longrope: one set of divisors for contexts up to the original one, another for longer ones."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    magnitude: float

    def at(self, context: int) -> FactorScaling:
        """The divisors for a context. One set for all lengths in it, so that KV never has to be rotated again."""
        return FactorScaling(self.long if context > self.original_context else self.short, self.magnitude)


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """The first pairs turn as those of a whole head do, the others not at all."""

    pairs: int
    factor: float = 1.0


Scaling = ProportionalScaling | NoScaling | LinearScaling | Llama3Scaling | FactorScaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `dims` dimensions of each head."""

    theta: float
    dims: int
    pairing: Pairing = "half"
    scaling: Scaling = NoScaling()
    # Pairs that turn by each axis of a position, in order; empty: a position has one axis.
    sections: tuple[int, ...] = field(default=(), repr=False)

    __repr__ = spec_repr

    def __post_init__(self) -> None:
        if self.sections and 2 * sum(self.sections) != self.dims:
            raise WeightError("rope sections", f"must share out {self.dims // 2} pairs, not {sum(self.sections)}")
        match self.scaling:
            case YarnScaling() if self.theta <= 1:
                raise WeightError("rope_theta", f"must be above 1 for YaRN, not {self.theta:g}")
            case LongScaling(short, long):
                for name, factors in (("short_factor", short), ("long_factor", long)):
                    if len(factors) != self.dims // 2:
                        raise WeightError(name, f"must have {self.dims // 2} numbers, not {len(factors)}")


@dataclass(frozen=True, slots=True)
class NoRope:
    """Queries and keys as they are: position enters through other layers."""


Rope = RopeSpec | NoRope


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """What latent attention (MLA) has beside a grouped-query one: its ranks, and the parts of a head."""

    kv_rank: int  # numbers of the compressed vector that stands for a token's keys and values
    plain_dim: int  # numbers of a head's query and key that no rope turns (qk_nope_head_dim)
    rope_dim: int  # numbers that a rope turns; the keys' are shared by all heads
    value_dim: int
    q_rank: int = 0  # queries come from a compressed vector too; 0: they do not
    norm_eps: float = 1e-6  # of the norms of compressed vectors, whatever the other norms have


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention; with `latent`, multi-head latent attention."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope
    reach: Reach = Full()
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    soft_cap: float = 0.0  # 0: none
    # Each head has a learned logit that joins its softmax and has no value.
    sinks: bool = field(default=False, repr=False)
    output_gate: bool = field(default=False, repr=False)  # what heads read is multiplied by a sigmoid
    qk_norm_whole: bool = field(default=False, repr=False)  # the norms cover all heads together, not each head
    temperature: TemperatureScaling | None = field(default=None, repr=False)  # of queries, by position
    qk_norm_plain: bool = field(default=False, repr=False)  # each head is normed, without a learned scale
    # The reach is a window that begins at its last multiple: queries see keys of their own chunk alone.
    chunked: bool = field(default=False, repr=False)
    v_norm: bool = field(default=False, repr=False)  # values are normed by head, without a learned scale
    values_are_keys: bool = field(default=False, repr=False)  # as projected: neither normed nor rotated
    latent: LatentSpec | None = field(default=None, repr=False)
    shared_with: int | None = field(default=None, repr=False)  # an earlier layer whose KV this one reads; it has none

    __repr__ = spec_repr

    @property
    def kv_dims(self) -> tuple[int, int]:
        """Numbers of a key and of a value, as pages keep them."""
        latent = self.latent
        return (self.head_dim, self.head_dim) if latent is None else (latent.rope_dim, latent.kv_rank)


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """A feed-forward block: down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""

    hidden: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = field(default=True, repr=False)
    gate_scale: float = field(default=1.0, repr=False)  # of gate(x), before the activation
    down_scale: float = field(default=1.0, repr=False)  # of what the block makes
    # Only what is so many deviations above the mean of gate(x) passes; None: all of it.
    sparse_cut: float | None = field(default=None, repr=False)

    __repr__ = spec_repr


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a router's logits choose experts, beyond a softmax and its largest values."""

    scores: RouterScores = "softmax"
    scale: float = 1.0  # of the weights of the chosen ones
    bias: bool = False  # of the router's own map
    selection_bias: bool = False  # added to the scores that choose, not to the weights
    groups: int = 1  # of neighbouring experts; only those of the best `top_groups` are chosen from
    top_groups: int = 1
    group_score: GroupScore = "best"
    epsilon: float = 0.0  # added to the sum that weights are divided by
    floor: float = 0.0  # the least that this sum counts as
    weigh_inputs: bool = field(default=False, repr=False)  # weights multiply what experts read, not what they make

    __repr__ = spec_repr


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    """A block that all tokens use beside their experts; `gated`: by a sigmoid of its own logit."""

    block: FeedForwardSpec
    gated: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Several gated blocks of one kind, of which each token uses the `top_k` that a router likes best."""

    experts: int
    top_k: int
    expert: FeedForwardSpec
    normalized: bool = True  # the weights of the chosen ones are made to sum to 1
    # Part of what a spec shows of itself only where they are not plain, since the identity of saved KV is made of that.
    router: RouterSpec = field(default=RouterSpec(), repr=False)
    shared: SharedExpertSpec | None = field(default=None, repr=False)
    # A dense block beside them. Both, and the router, have norms of their own, and each expert a factor (Gemma 4).
    dense: FeedForwardSpec | None = field(default=None, repr=False)

    __repr__ = spec_repr

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.experts:
            raise WeightError("num_experts_per_tok", f"must be 1 to {self.experts}, not {self.top_k}")
        groups, size = self.router.groups, self.experts // self.router.groups
        if self.experts % groups or (self.router.group_score == "two_best" and groups > 1 and size < 2):
            raise WeightError("n_group", f"cannot share out {self.experts} experts among {groups} groups")
        if not 0 < self.router.top_groups <= groups or self.top_k > self.router.top_groups * size:
            raise WeightError("topk_group", f"must be 1 to {groups} groups that have {self.top_k} experts together")

        if not self.expert.gated and self.expert.activation != "relu2":
            raise Unsupported(f"experts without a gate whose activation is {self.expert.activation} are not supported")

    @property
    def gate_activation(self) -> Activation:
        """Of gates. Blocks without one are their own gates: relu(x) squared is relu(x) times x."""
        return self.expert.activation if self.expert.gated else "relu"

    @property
    def routing(self) -> Routing:
        """As backends take it."""
        how = self.router
        return Routing(
            self.top_k,
            how.scores,
            self.normalized,
            how.epsilon,
            how.floor,
            how.scale,
            how.groups,
            how.top_groups,
            how.group_score,
        )


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One transformer layer; `post_norms` adds a norm after each block, before its residual."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec | ExpertsSpec
    post_norms: bool = False
    # What stands in the place of attention, which then only says what other layers have.
    recurrent: RecurrentSpec | None = field(default=None, repr=False)
    # Attention and `recurrent` stand beside each other: the factors of what either adds.
    beside: tuple[float, float] | None = field(default=None, repr=False)
    pre_norms: bool = field(default=True, repr=False)  # a norm before each block
    parallel: bool = field(default=False, repr=False)  # both blocks read the same normed input, and are added to it
    residual_scale: float = field(default=1.0, repr=False)  # of what each block adds
    output_scale: bool = field(default=False, repr=False)  # the checkpoint has a factor for what leaves the layer
    # A layer may be one block alone: attention or what stands in its place, or a feed-forward block.
    blocks: Blocks = field(default="both", repr=False)

    __repr__ = spec_repr

    @property
    def has_attention(self) -> bool:
        return self.blocks != "feed_forward" and (self.recurrent is None or self.beside is not None)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the decoder needs to know besides the weights."""

    family: str
    vocab_size: int
    hidden_size: int
    context: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied_head: bool
    embed_scale: float = 1.0
    final_soft_cap: float = 0.0  # 0: none
    norm_kind: NormKind = field(default="rms", repr=False)
    norm_bias: bool = field(default=False, repr=False)
    logit_scale: float = field(default=1.0, repr=False)
    learned_positions: bool = field(default=False, repr=False)  # each position has a vector that is added to its token
    per_layer: PerLayerSpec | None = field(default=None, repr=False)  # inputs of each layer's own
    altup: AltUpSpec | None = field(default=None, repr=False)  # several residual streams

    __repr__ = spec_repr

    @property
    def stream_size(self) -> int:
        """Numbers of a token's residual streams."""
        return self.hidden_size if self.altup is None else self.altup.streams * self.hidden_size

    @property
    def state_size(self) -> int:
        """Numbers that a token has between two layers: its streams, and the inputs of all layers."""
        return self.stream_size + (0 if self.per_layer is None else len(self.layers) * self.per_layer.width)


def rope_axes(spec: ModelSpec) -> int:
    """Axes that a position has, where it has more than one."""
    ropes = (layer.attention.rope for layer in spec.layers)
    return max((len(rope.sections) for rope in ropes if isinstance(rope, RopeSpec)), default=0)


def each_attention(spec: ModelSpec, change: Callable[[int, AttentionSpec], AttentionSpec]) -> ModelSpec:
    """The spec with the attention of each layer changed."""
    layers = (replace(layer, attention=change(i, layer.attention)) for i, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


def each_layer(spec: ModelSpec, change: Callable[[int, LayerSpec], LayerSpec]) -> ModelSpec:
    """The spec with each layer changed."""
    return replace(spec, layers=tuple(change(i, layer) for i, layer in enumerate(spec.layers)))


def at_context(spec: ModelSpec, context: int) -> ModelSpec:
    """The spec as it runs with sequences of up to `context` tokens."""

    def settle(_layer: int, attention: AttentionSpec) -> AttentionSpec:
        match attention.rope:
            case RopeSpec(scaling=LongScaling() as scaling) as rope:
                return replace(attention, rope=replace(rope, scaling=scaling.at(context)))
            case _:
                return attention

    return each_attention(spec, settle)


def kv_layout(spec: ModelSpec, page_tokens: int, dtype: KVDtype) -> KVLayout:
    """The KV layout of a model: layers with the same reach and shape form a group."""
    kinds: dict[tuple[Reach, int, tuple[int, int]], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        attention = layer.attention
        if not layer.has_attention or attention.shared_with is not None:
            continue
        kinds.setdefault((attention.reach, attention.kv_heads, attention.kv_dims), []).append(index)
    groups = []
    for (reach, heads, dims), layers in kinds.items():
        if dtype.packed_values and (isinstance(reach, Latent) or dims[1] % 2):
            what = "that are keys as well" if isinstance(reach, Latent) else f"of heads of {dims[1]}"
            raise Unsupported(f"{dtype.name} packs values of 4 bits in pairs, not those {what}; use kv_dtype int8")
        shape = PageShape(len(layers), page_tokens, heads, *dims, dtype, isinstance(reach, Latent))
        groups.append(LayerGroup(reach, tuple(layers), shape))
    recurrent = _recurrent_group(spec)
    kept = {*chain(*kinds.values()), *(() if recurrent is None else recurrent.layers)}
    return KVLayout(tuple(groups), recurrent, tuple(i for i in range(len(spec.layers)) if i not in kept))


def _recurrent_group(spec: ModelSpec) -> RecurrentGroup | None:
    """The layers that keep a state; all of them keep one of the same shape."""
    kept = {index: layer.recurrent for index, layer in enumerate(spec.layers) if layer.recurrent is not None}
    if not kept:
        return None
    if not any(layer.has_attention for layer in spec.layers):
        raise Unsupported("a model of recurrent layers alone is not supported; kvilt runs those with attention between")
    shapes = {(one.tail, one.memory) for one in kept.values()}
    if len(shapes) > 1:
        raise Unsupported("recurrent layers whose states differ in shape are not supported")
    ((tail, memory),) = shapes
    return RecurrentGroup(tuple(kept), StateShape(len(kept), tail, memory))
