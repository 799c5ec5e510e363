"""The operations a backend provides; the values they exchange are in `values.py`, and can be imported from here.

Refuses to know models, caches and requests: an operation sees tensors, page ids and numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from ..quant.formats import Format
from ..quant.tensor import Weight
from .fold_values import Decay as Decay
from .fold_values import FoldHeads as FoldHeads
from .fold_values import StatePlace as StatePlace
from .host_copies import HostCopies as HostCopies
from .host_copies import HostCopy as HostCopy
from .kv_dtypes import KVDtype
from .lowrank import AdapterSlots, LowRank, LowRankTable
from .recorder import Recorded as Recorded
from .recorder import Recorder as Recorder
from .reductions import Draws as Draws
from .reductions import Reductions as Reductions
from .reductions import RowLogprobs as RowLogprobs
from .reductions import SamplingKernels as SamplingKernels
from .routing import ExpertMaps as ExpertMaps
from .routing import ExpertStack as ExpertStack
from .routing import Routed as Routed
from .routing import Routing as Routing
from .routing import SharedExpert as SharedExpert
from .states import StateShape as StateShape
from .states import StateSlots as StateSlots
from .states import StateStore as StateStore
from .streams import StreamOps as StreamOps
from .values import Activation as Activation
from .values import AttentionMask as AttentionMask
from .values import Interpolation as Interpolation
from .values import KeysValues as KeysValues
from .values import LinearMap as LinearMap
from .values import NewKV as NewKV
from .values import PackedWeight as PackedWeight
from .values import PageShape as PageShape
from .values import PageStore as PageStore
from .values import Paging as Paging
from .values import Pairing as Pairing
from .values import Prepared as Prepared
from .values import RmsNorm as RmsNorm
from .values import Rotation as Rotation
from .values import RowLengths as RowLengths
from .values import TemperatureScaling as TemperatureScaling
from .values import row_ends as row_ends


class Ops(Protocol):
    """A backend on one device. Every method is pure except those that write pages.

    Activations enter and leave in `dtype`. Norm weights, angles and scales are float32.
    """

    @property
    def name(self) -> str: ...

    @property
    def numerics(self) -> str:
        """Names everything that decides the bits of a result: backend, instruction set, revision."""
        ...

    @property
    def deterministic(self) -> bool:
        """Whether a token's results have the same bits in any batch, however its prompt was cut into chunks."""
        ...

    @property
    def device(self) -> torch.device:
        """Where weights, pages and activations are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What activations are kept in between two operations."""
        ...

    @property
    def kv_dtype(self) -> KVDtype:
        """What this backend keeps KV in unless it is told otherwise."""
        ...

    @property
    def reductions(self) -> Reductions | None:
        """What this backend does for sampling; None where plain torch has to."""
        ...

    @property
    def sampling(self) -> SamplingKernels | None:
        """What samples on this backend's device; None where logits are sampled by reductions, or by plain torch."""
        ...

    @property
    def streams(self) -> StreamOps:
        """What this backend does for models with several residual streams."""
        ...

    @property
    def host_copies(self) -> HostCopies:
        """What copies KV between host memory and this backend's device."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Held while a call runs: keeps other pools of threads off the cores this backend uses."""
        ...

    def recorder(self) -> Recorder | None:
        """What records steps of this backend, if it can."""
        ...

    def expands(self, format_: Format) -> bool:
        """Whether `prepare` turns packed weights of this format into float32, since there are no kernels for it."""
        ...

    def numerics_for(self, formats: Collection[str]) -> str:
        """What names the bits of a model with weights in these formats: `numerics`, and single kernels that changed."""
        ...

    def kernel(self, format_: Format) -> str:
        """What multiplies weights of this format, in a few words: for `kvilt inspect` and `capabilities()`."""
        ...

    def prepare(self, weight: Weight) -> Prepared:
        """Bring a weight to this backend's device, in the form it multiplies with, once, at load."""
        ...

    def embed(self, table: Prepared, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Rows of `table` [vocab, hidden] for `ids` [tokens], times `scale`, in this backend's dtype."""
        ...

    def linear(self, x: Tensor, weight: Prepared, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """`x` [tokens, in] times `weight` [out, in] transposed, plus `bias` [out], plus `residual` [tokens, out].

        May use the memory of `residual`, which the caller does not need any more.
        """
        ...

    def linears(self, x: Tensor, maps: Sequence[LinearMap], norm: RmsNorm | None = None) -> list[Tensor]:
        """Several linear maps of the same input, which a backend then has to look at only once.

        With a norm, the input is normalized first, as by `rms_norm`.
        """
        ...

    def norm_linears(self, x: Tensor, maps: Sequence[LinearMap], norm: RmsNorm) -> tuple[Tensor, list[Tensor]]:
        """The normalized input, as by `rms_norm`, and several linear maps of it."""
        ...

    def prepare_per_head(self, weight: Tensor) -> Prepared:
        """Bring floats [heads, out, in] into the form that `per_head_linear` multiplies with, once, at load."""
        ...

    def per_head_linear(self, x: Tensor, weight: Prepared, moved: int = 0) -> Tensor:
        """Each head of `x` [tokens, heads, in + moved] times its own matrix of `weight` [heads, out, in].

        The last `moved` numbers of a head are not multiplied and stand first in the result, [tokens, heads, moved +
        out]: the part that a rope turns, in a query of latent attention.
        """
        ...

    def gate_up(
        self, x: Tensor, gate: LinearMap, up: LinearMap, activation: Activation, norm: RmsNorm | None = None
    ) -> Tensor:
        """activation(gate(x)) * up(x), of the normalized input where there is a norm."""
        ...

    def act_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up, to the same bits as by `gate_up`."""
        ...

    def stack_experts(self, experts: Sequence[ExpertMaps]) -> ExpertStack:
        """Bring prepared maps of experts into the form that `experts` takes, once, at load."""
        ...

    def route(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None, factors: Tensor | None = None
    ) -> Routed:
        """The experts that logits [tokens, experts] choose; `bias` [experts] moves the choice and not the weights.

        The weight of each expert is multiplied by its own of `factors` [experts], at last.
        """
        ...

    def experts(
        self,
        x: Tensor,
        routed: Routed,
        stack: ExpertStack,
        activation: Activation,
        residual: Tensor | None = None,
        shared: SharedExpert | None = None,
        weigh_inputs: bool = False,
    ) -> Tensor:
        """`residual` plus each token's weighted sum of down(activation(gate(x)) * up(x)) over its experts.

        Each expert's weights are read once, for the tokens that chose it. What `shared` made is added at last. With
        `weigh_inputs` a token's weights multiply what its experts read, and the sum is a plain one.
        """
        ...

    def sum_experts(
        self, made: Tensor, routed: Routed, residual: Tensor | None = None, shared: SharedExpert | None = None
    ) -> Tensor:
        """The same sum where experts `made` their results [tokens, top_k, hidden] one by one, to the same bits."""
        ...

    def prepare_low_rank(self, product: LowRank) -> LowRank:
        """Bring an adapter's product into the form this backend multiplies with, once, at load."""
        ...

    def new_table(self, outputs: int, inputs: int, slots: int) -> LowRankTable:
        """Room for the products of one linear map [outputs, inputs]."""
        ...

    def adapt(
        self, x: Tensor, tables: Sequence[LowRankTable], outs: Sequence[Tensor], adapter_slots: AdapterSlots
    ) -> None:
        """Add to each of `outs` [tokens, out], in place, what each token's slot of its table makes of `x` [tokens, in].

        One gathered product for all tokens and adapters; a token with slot -1 keeps its bits.
        """
        ...

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """The activation of `x` [tokens, out]."""
        ...

    def add(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        """`x` plus `scale` times `y`, two tensors of one shape."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last axis, times `weight`."""
        ...

    def rms_norms(self, xs: Sequence[Tensor], norms: Sequence[RmsNorm]) -> list[Tensor]:
        """`rms_norm` of several tensors [tokens, heads, dim], each with its own norm."""
        ...

    def gated_norm(self, x: Tensor, norm: RmsNorm, gate: Tensor) -> Tensor:
        """`rms_norm` of the heads of `x` [tokens, heads, dim], times silu of `gate` [tokens, heads * dim]."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Mean and variance norm over the last axis, times `weight`, plus `bias`."""
        ...

    def scale_queries(self, query: Tensor, positions: Tensor, scaling: TemperatureScaling) -> Tensor:
        """`query` [tokens, heads, dim], each token times the factor of its position."""
        ...

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotary embedding of `x` [tokens, heads, dim]; dims past 2 * pairs pass through."""
        ...

    def rotation(self, positions: Tensor, inv_freq: Tensor, mscale: float, pairing: Pairing) -> Rotation:
        """Cosines and sines of `positions` [tokens] times `inv_freq` [pairs], times `mscale`."""
        ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap); may use the memory of `x`."""
        ...

    def attention(
        self,
        query: Tensor,
        store: PageStore,
        layer: int,
        paging: Paging,
        mask: AttentionMask,
        new: NewKV | None = None,
    ) -> Tensor:
        """Attention of `query` [tokens, heads, query_dim] over the pages of each token's row, by position.

        With `new` the query is not rotated yet, nor normalized where `new` has norms, and comes after
        `rotate_and_write` into the slots of `paging`.
        """
        ...

    def causal_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, place: StatePlace) -> Tensor:
        """A convolution of each channel over the last tokens of its row, [tokens, channels]; see `recurrent.py`."""
        ...

    def gated_delta(
        self, mixed: Tensor, step: Tensor, beta: Tensor, decay: Decay, heads: FoldHeads, place: StatePlace
    ) -> Tensor:
        """The gated delta rule, token after token, [tokens, value_heads, value_dim]; see `recurrent.py`."""
        ...

    def mamba2(
        self, mixed: Tensor, step: Tensor, skip: Tensor, decay: Decay, heads: FoldHeads, place: StatePlace
    ) -> Tensor:
        """Mamba-2, one token after the other, [tokens, value_heads, value_dim]; see `recurrent.py`."""
        ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x` times the sigmoid of `gate`, both of one shape."""
        ...

    def key_mass(
        self, query: Tensor, store: PageStore, layer: int, table: Tensor, positions: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Attention that each key of one row receives from `query` [tokens, heads, dim] at `positions`.

        Summed over queries, averaged over heads: float32 [last position + 1]. `table` [pages] is the row's.
        """
        ...

    def new_pages(self, shape: PageShape, pages: int, device: torch.device) -> PageStore:
        """Room for `pages` pages; their content is noise until written."""
        ...

    def write(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation | None = None,
    ) -> None:
        """Put `keys` and `values` [tokens, kv_heads, dim] of one layer into `slots`, in the store's dtype.

        With a rotation the keys come unrotated and are rotated here, to the same bits as by `rotate`: this is how a
        stored chunk is placed at any position.
        """
        ...

    def rotate_and_write(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation,
    ) -> Tensor:
        """`rotate` of `query`, and `write` of the others with that rotation."""
        ...

    def interpolate(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        interpolation: Interpolation,
        kept: tuple[Tensor, Tensor],
        fresh: tuple[Tensor, Tensor],
        rotation: Rotation | None = None,
    ) -> None:
        """Put keys and values of its tokens into `slots`, as `write` does: `kept`, plus a share of the anchors' change.

        `kept` are keys and values of the whole text [tokens, kv_heads, dim], `fresh` those of the anchors.
        """
        ...

    def copy_pages(self, source: PageStore, sources: list[int], target: PageStore, targets: list[int]) -> None:
        """Copy whole pages, all layers; the two stores may belong to different pools."""
        ...

    def read_slots(self, store: PageStore, slots: Tensor) -> KeysValues:
        """The KV in `slots`, all layers, in canonical order on the CPU."""
        ...

    def copy_out(self, store: PageStore, slots: Tensor) -> HostCopy:
        """`read_slots` that need not wait: the fields of `KeysValues`, perhaps still arriving.

        The pages may be used for something else at once.
        """
        ...

    def write_slots(self, store: PageStore, slots: Tensor, kv: KeysValues) -> None:
        """The inverse of `read_slots`."""
        ...
